"""Databases of older releases: what migrations find when they come to an installation at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gangq import schema


@pytest.fixture
def migrate_to(
    empty_dsn: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Bring the database to the tables of the release whose last migration this is.

    An installation has its roles; here they came with the template.
    """

    def migrate(newest: str) -> None:
        root = tmp_path / newest
        (root / "migrations").mkdir(parents=True)
        for file in schema.migrations():
            if file.name <= newest:
                (root / "migrations" / f"{file.name}.sql").write_text(file.text)
        with monkeypatch.context() as patch:
            patch.setattr(schema, "_sql_root", lambda: root)
            schema.migrate(empty_dsn, log=lambda _: None)

    return migrate

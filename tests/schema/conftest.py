"""A copy of the schema's files that a test may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangq import schema


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of sql/ that this library then reads: tests may change it."""
    root = tmp_path / "sql"
    (root / "migrations").mkdir(parents=True)
    for file in schema.sql_files():
        (root / ("migrations" if file.migration else ".") / f"{file.name}.sql").write_text(file.text)
    monkeypatch.setattr(schema, "_sql_root", lambda: root)
    return root

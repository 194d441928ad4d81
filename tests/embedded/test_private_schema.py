"""The private server's schema: an App or a worker makes it where there is none, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gangq import App, schema
from gangq.embedded import Server
from gangq.errors import SchemaMismatch
from gangq.worker.main import run_worker

FIRST = """
import gangq
app = gangq.App({dsn})

@app.task
def double(ctx, n):
    return 2 * n

if __name__ == "__main__":
    handle = double.submit(n=21)
    app.run_worker(once=True)
    print(handle.result(timeout=30))
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh home directory, in which a user who is not root reaches his files."""
    with tempfile.TemporaryDirectory(prefix="gangq-home-", ignore_cleanup_errors=True) as made:
        Path(made).chmod(0o755)
        for name in ("GANGQ_DATA_DIR", "XDG_DATA_HOME", "GANGQ_DSN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", made)
        yield Path(made)
        if any((Path(made) / ".local").rglob("PG_VERSION")):
            Server().stop()


@pytest.mark.slow
def test_the_first_script_needs_no_migrate(home: Path) -> None:
    script = home / "first.py"
    script.write_text(FIRST.format(dsn='"embedded"'))
    ran = subprocess.run([sys.executable, script], cwd=home, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr
    (home / "second.py").write_text(FIRST.format(dsn=""))
    again = subprocess.run(
        [sys.executable, "second.py"],
        cwd=home, env={**os.environ, "GANGQ_DSN": "embedded"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (again.returncode, again.stdout) == (0, "42\n"), again.stderr


@pytest.mark.slow
def test_an_older_schema_is_left_alone_and_the_command_is_said(home: Path) -> None:
    del home
    with App("embedded") as app:
        app.client.schema_version()
    with psycopg.connect(Server().dsn(), autocommit=True) as conn:
        conn.execute("delete from gangq.migrations where name <> 'code'")
        with App("embedded") as app, pytest.raises(SchemaMismatch, match="run `gangq migrate --embedded`"):
            app.declare_task("t").submit()
        with pytest.raises(SchemaMismatch, match="run `gangq migrate --embedded`"):
            run_worker(dsn="embedded")
        assert conn.execute("select name from gangq.migrations").fetchall() == [("code",)]


def test_a_database_that_was_named_is_nobodys_to_migrate(home: Path) -> None:
    del home
    dsn = Server().start().dsn()
    with App(dsn) as app, pytest.raises(SchemaMismatch):
        app.declare_task("t").submit()
    assert schema.pending(dsn).migrations

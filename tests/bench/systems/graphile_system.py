"""Graphile Worker, for reference: PostgreSQL's fastest queue outside Python, with the preset of its own speed test.

Needs node and npm; its package is installed into this Python environment's own directory on the first run. Jobs are
added by psycopg through its SQL functions, as its documentation has it for other languages.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
from marks import Marks

from systems.base import Absent, Enqueuers, System

_PACKAGES = {"graphile-worker": "0.17.3", "pg": "8.23.1"}
_HOME = Path(sys.prefix) / "share" / "gangq-bench" / "graphile-worker-{graphile-worker}".format(**_PACKAGES)
_SCRIPT = Path(__file__).with_name("graphile.cjs")
_PATIENCE_S = 120.0

_ADD = "select graphile_worker.add_job('noop', %s::json)"
_ADD_MANY = (
    "select graphile_worker.add_jobs(array("
    "select row('noop', '{}'::json, null, null, null, null, null, null)::graphile_worker.job_spec "
    "from generate_series(1, %s)))"
)


class _GraphileEnqueuer:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def one_by_one(self, count: int) -> None:
        for _ in range(count):
            self._connection.execute(_ADD, ("{}",)).fetchone()

    def many(self, count: int) -> None:
        self._connection.execute(_ADD_MANY, (count,)).fetchall()

    def numbered(self, number: int) -> None:
        self._connection.execute(_ADD, (f'{{"n": {number}}}',)).fetchone()


class Graphile(System):
    """The size of its local queue is its batch; with 1 it has none and runs one job at a time."""

    name = "graphile"
    unfinished = "select exists (select 1 from graphile_worker._private_jobs)"
    best = 500

    def prepare(self, bindir: Path) -> None:
        missing = [program for program in ("node", "npm") if not shutil.which(program)]
        if missing:
            raise Absent(f"{' and '.join(missing)} not found: it is a Node.js program")
        if (_HOME / "node_modules" / "graphile-worker" / "package.json").exists():
            return
        _HOME.mkdir(parents=True, exist_ok=True)
        (_HOME / "package.json").write_text("{}\n")
        wanted = [f"{package}@{version}" for package, version in _PACKAGES.items()]
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", *wanted]
        try:
            said = subprocess.run(
                command, cwd=_HOME, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Absent(f"npm could not install it: {error}") from error
        if said.returncode:
            raise Absent(f"npm could not install it: {(said.stderr or said.stdout).strip()[-300:]}")

    def version(self) -> str:
        node = subprocess.run(
            ["node", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip()
        return f"graphile-worker {_PACKAGES['graphile-worker']} (node {node})"

    def install(self, dsn: str) -> None:
        subprocess.run(self._command("install", dsn), check=True, capture_output=True, timeout=_PATIENCE_S)

    @contextlib.contextmanager
    def enqueuer(self, dsn: str) -> Enqueuers:
        with psycopg.connect(dsn, autocommit=True) as connection:
            yield _GraphileEnqueuer(connection)

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        os.execvp("node", self._command("work", dsn, str(marks.path), str(batch)))

    def _command(self, what: str, dsn: str, *arguments: str) -> list[str]:
        info = psycopg.conninfo.conninfo_to_dict(dsn)
        where = [str(info[key]) for key in ("host", "port", "user", "dbname")]
        return ["node", str(_SCRIPT), str(_HOME), what, *where, *arguments]

"""The server, a fresh database for each measurement, and worker processes in it."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
from marks import Marks
from systems import System

from gangq.embedded import Server

_HERE = Path(__file__).parent
_WAIT_S = 120.0


class BenchError(Exception):
    """A measurement did not come to its end; the message holds the worker's last words."""


class Stage:
    """One server for the whole run. Databases are copies of a template with a system's tables in it."""

    def __init__(self, server: Server, scratch: Path) -> None:
        self.server = server
        self.scratch = scratch
        self._templates: set[str] = set()
        self._numbers = itertools.count(1)

    @contextlib.contextmanager
    def database(self, system: System) -> Iterator[str]:
        """The DSN of a fresh database with the system's tables; dropped at the end."""
        template = f"template_{system.name}"
        if template not in self._templates:
            system.install(self.server.create_database(template))
            self._templates.add(template)
        name = f"bench_{next(self._numbers)}"
        dsn = self.server.create_database(name, template=template)
        try:
            yield dsn
        finally:
            self.server.drop_database(name)

    def marks(self, numbered: int = 0, shut: bool = False) -> Marks:
        """A fresh file of marks."""
        return Marks.create(self.scratch / f"marks_{next(self._numbers)}", numbered, shut)

    def tidy(self, dsn: str) -> None:
        """As after autovacuum has been: what has just been submitted is known to the planner."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("vacuum analyze")

    @contextlib.contextmanager
    def process(self, script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A script of this directory as a process of its own; ended with SIGTERM, then SIGKILL."""
        with tempfile.TemporaryFile(dir=self.scratch) as said:
            started = subprocess.Popen(
                [sys.executable, str(_HERE / script), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            try:
                yield started
            except BenchError as error:
                said.seek(0)
                words = said.read().decode(errors="replace")[-3000:]
                raise BenchError(f"{error}; {script} {arguments[0]} said:\n{words}") from None
            finally:
                started.terminate()
                try:
                    started.wait(5)
                except subprocess.TimeoutExpired:
                    started.kill()
                    started.wait()

    def worker(
        self, system: System, dsn: str, marks: Marks, batch: int
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """A worker process of a system."""
        return self.process("work.py", system.name, dsn, str(marks.path), str(batch))


def wait_until(
    met: Callable[[], object], what: str, *processes: subprocess.Popen[bytes], poll_s: float = 0.004
) -> None:
    """Look every ``poll_s`` seconds until it is so. Raises `BenchError` when it takes too long, or one of the
    processes has ended.
    """
    until = time.monotonic() + _WAIT_S
    while not met():
        for process in processes:
            if process.poll() is not None:
                raise BenchError(f"the process ended ({process.returncode}) before {what}")
        if time.monotonic() > until:
            raise BenchError(f"{what}: not within {_WAIT_S:g} s")
        time.sleep(poll_s)


def scalar(connection: psycopg.Connection, query: str) -> object:
    """The one value of a query."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def wal_position(connection: psycopg.Connection) -> int:
    """Bytes of WAL written by the cluster since its creation."""
    position = scalar(connection, "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
    assert isinstance(position, int)
    return position

"""What the benchmark asks of each system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from marks import Marks

OF_A_QUEUE = ("drain", "drain2", "single", "enqueue", "pickup", "work")
"""The measures that a whole queue takes part in."""


class Absent(Exception):
    """A system cannot be measured here; the message says why."""


class Enqueuer(Protocol):
    """Enqueues over one connection."""

    def one_by_one(self, count: int) -> None:
        """``count`` calls, one job each, each committed before the next."""

    def many(self, count: int) -> None:
        """``count`` jobs in one call, or in one transaction where there is no such call."""

    def numbered(self, number: int) -> None:
        """One job that carries its number; an idle worker is woken."""


class System:
    """A queue under test. Everything but :meth:`work` runs in the benchmark's own process."""

    name: str
    unfinished: str
    """SQL: true while a job is not finished."""
    measures: tuple[str, ...] = OF_A_QUEUE
    """What it takes part in."""
    takes_100 = True
    """False: it has no batch that could be set to 100, and is drained with its own settings only."""
    best = 100
    """The batch at which one worker process drains most; 0 where it has none."""
    slowness = 1
    """Counts are divided by it, so that a run stays short."""
    poll_s = 0.0
    """How long an idle worker sleeps between looks, where nothing wakes it."""

    def prepare(self, bindir: Path) -> None:
        """Find or fetch what it needs beside its package; ``bindir`` has the server's programs. `Absent`: none."""

    def version(self) -> str:
        """Its version and its driver's, for the report."""
        return f"{self.name} {version(self.name)}"

    def install(self, dsn: str) -> None:
        """Make its tables in an empty database."""
        raise NotImplementedError

    def enqueuer(self, dsn: str) -> AbstractContextManager[Enqueuer]:
        """Connect."""
        raise NotImplementedError

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        """Be a worker process that takes ``batch`` jobs at a time (0: its own settings), until killed."""
        raise NotImplementedError


Enqueuers = Iterator[Enqueuer]

"""What the benchmark asks of each system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from marks import Marks


class Enqueuer(Protocol):
    """Enqueues over one connection."""

    def one_by_one(self, count: int) -> None:
        """``count`` calls, one job each, each committed before the next."""

    def many(self, count: int) -> None:
        """``count`` jobs in one call."""

    def numbered(self, number: int) -> None:
        """One job that carries its number; an idle worker is woken."""


class System(Protocol):
    """A queue under test. Everything but :meth:`work` runs in the benchmark's own process."""

    name: str
    unfinished: str
    """SQL: true while a job is not finished."""

    def version(self) -> str:
        """Its version and its driver's, for the report."""

    def install(self, dsn: str) -> None:
        """Make its tables in an empty database."""

    def enqueuer(self, dsn: str) -> AbstractContextManager[Enqueuer]:
        """Connect."""

    def work(self, dsn: str, marks: Marks, batch: int) -> None:
        """Be a worker process that takes ``batch`` jobs at a time, until killed."""


Enqueuers = Iterator[Enqueuer]

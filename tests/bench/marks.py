"""When handlers started: written by a worker process, read by the benchmark, through one shared file.

CLOCK_MONOTONIC is one clock for all processes of a host, so a start in one process can be subtracted from an
enqueue in another. Writing costs a handler about a microsecond and no system call.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_COUNT, _FIRST, _SHUT, _STAMPS = 0, 1, 2, 3


class Marks:
    """How many handlers have started, when the first did, and when each numbered one did (nanoseconds)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @classmethod
    def create(cls, path: Path, numbered: int = 0, shut: bool = False) -> Marks:
        """Make the file, with room for jobs number 0 to ``numbered - 1``. ``shut``: see :meth:`shut`."""
        path.write_bytes(bytes(8 * (_STAMPS + numbered)))
        marks = cls(path)
        if shut:
            marks.shut()
        return marks

    def shut(self) -> None:
        """The next handler that starts waits for :meth:`open`, and with it its worker."""
        self._words[_SHUT] = 1

    def open(self) -> None:
        """Let it go on."""
        self._words[_SHUT] = 0

    def started(self, number: int = -1) -> None:
        """A handler begins; ``number`` below 0: it has none. For one thread of one process."""
        words, now = self._words, time.monotonic_ns()
        if number >= 0:
            words[_STAMPS + number] = now
        if words[_COUNT] == 0:
            words[_FIRST] = now
        words[_COUNT] += 1
        while words[_SHUT]:
            time.sleep(0.0005)

    @property
    def count(self) -> int:
        """Handlers that have started."""
        return self._words[_COUNT]

    @property
    def first_ns(self) -> int:
        """When the first one started."""
        return self._words[_FIRST]

    def stamp_ns(self, number: int) -> int:
        """When job ``number`` started; 0: it has not."""
        return self._words[_STAMPS + number]

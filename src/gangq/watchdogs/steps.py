"""Whether Python makes progress in this process: whether its threads return from the calls they are in.

Processor time cannot tell, because a call that spins in vain burns all of it. A thread that stays in one call into C
makes no pending call of CPython's either, and stands at the same instruction at every look. One that computes, polls
or sleeps in a loop comes back into bytecode in between, and then it makes the pending call that was asked for at the
look before (the main thread), or is found elsewhere (any other).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from gangq.proc.clock import boottime
from gangq.watchdogs import pending

OWN_NAMES = ("gangq-", "pool-")
"""Names that the library's threads begin with; ``pool-`` are those of psycopg's pools."""


class PythonSteps:
    """Counts the looks at which some thread of the program had gone on. Watchdogs look, from any of their threads."""

    def __init__(self, clock: Callable[[], float] = boottime) -> None:
        self.count = 0
        self.at: float | None = None
        """When a thread was last seen to make progress; None: not yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._passed = False
        self._stood: dict[int, tuple[int, int]] = {}

    def look(self) -> int:
        """Record progress since the previous look; return how many looks have found some."""
        with self._lock:
            passed, self._passed = self._passed, False
            stands = _places()
            went_on = any(self._stood.get(thread, place) != place for thread, place in stands.items())
            self._stood = stands
            if passed or went_on:
                self.count += 1
                self.at = self._clock()
            pending.ask(self._pass)
            return self.count

    def _pass(self) -> None:
        # In the main thread, possibly within look(): no lock is taken.
        self._passed = True


def _places() -> dict[int, tuple[int, int]]:
    """Function and instruction of every thread but the library's and the main one, by its identifier."""
    skipped = {thread.ident for thread in threading.enumerate() if thread.name.startswith(OWN_NAMES)}
    skipped |= {threading.get_ident(), threading.main_thread().ident}
    return {
        ident: (id(frame.f_code), frame.f_lasti)
        for ident, frame in sys._current_frames().items()
        if ident not in skipped
    }

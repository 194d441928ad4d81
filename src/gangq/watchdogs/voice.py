"""Log lines of threads that have no time for a log: standard error may be a pipe that nobody reads any more.

A job that hangs because its log is full must not take its watchdog with it. So a watchdog waits for a line of
its own no longer than a moment, and where one is stuck, those that follow are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

PATIENCE_S = 0.2


class Voice:
    """Says lines to a log, each in a thread of its own, one at a time. Thread-safe; never raises."""

    def __init__(self, log: logging.Logger, *, patience_s: float = PATIENCE_S) -> None:
        """``patience_s``: for how long to wait for a line, or for the one before it."""
        self.lost = 0
        """Lines dropped since the last one that was said."""
        self._log = log
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._late = False

    def say(
        self,
        level: int,
        event: str,
        extra: Mapping[str, Any] | None = None,
        *,
        error: BaseException | None = None,
        wait: bool = True,
    ) -> None:
        """Log it, with the traceback of ``error``. ``wait=False``: as soon as may be, without waiting for it."""
        if not self._log.isEnabledFor(level):
            return
        # Once a line was late the next ones do not wait at all: a handful of them would add up to a deadline.
        if not self._turn.acquire(timeout=0 if self._late else self._patience_s):
            self._late = True
            self.lost += 1
            return
        lost, self.lost = self.lost, 0
        more = {**(extra or {}), **({"lines_lost": lost} if lost else {})}

        def speak() -> None:
            try:
                self._log.log(level, event, extra=more, exc_info=error)
            except Exception:
                self.lost += lost + 1
            finally:
                self._late = False
                self._turn.release()

        thread = threading.Thread(target=speak, name="gangq-voice", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # No thread is to be had (a full pids cgroup). From this one it might take for ever.
            self.lost += lost + 1
            self._turn.release()
            return
        if wait:
            thread.join(self._patience_s)
            self._late = thread.is_alive()


@cache
def voice(name: str) -> Voice:
    """The one voice of the log of that name: however many watchdogs there are, one line at most is stuck."""
    return Voice(logging.getLogger(name))

"""Time in which this process did not run, through no fault of its work.

A process that was stopped (SIGSTOP, a frozen container), starved, or asleep with its host looks hung to every clock:
no beat came, nothing moved. So each watchdog thread measures its own rounds, and a wake that comes much too late
moves all deadlines. A round is from the end of one wait to the end of the next, because the process may also be
stopped while the watchdog checks its job. The processor time of that check is subtracted: it is work, not a pause.

One kind of late wake must not count: the thread was ready and waited for the GIL. Then the watched work itself held
the interpreter, and to count that as a pause would ignore just what a watchdog is for. The kernel's counters tell the
two apart: a thread that waits for the GIL wakes every 5 ms to ask for it, which makes some 200 voluntary context
switches a second; a thread that could not run makes none.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

from gangq.proc.clock import boottime

log = logging.getLogger("gangq.watchdogs.pauses")

_LATE_FACTOR = 3.0
_LEAST_LATE_S = 0.5
_GIL_WAITS_PER_S = 50.0


def thread_switches() -> int:
    """Voluntary context switches of the calling thread so far."""
    # Without RUSAGE_THREAD (no Linux, no worker) nothing looks like waiting for the GIL.
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


class PauseMeter:
    """Adds up the pauses that one thread meets. Read from any thread, fed by that one.

    ``total_s`` only grows: to count a deadline, remember it at the start and move the deadline by what
    was added since. ``count`` is how many pauses there were.
    """

    def __init__(
        self,
        *,
        name: str = "gangq",
        clock: Callable[[], float] = boottime,
        awake: Callable[[], float] = time.monotonic,
        switches: Callable[[], int] = thread_switches,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        """``clock`` runs on while the host sleeps, ``awake`` stands still then: their difference is sleep.
        ``switches`` and ``worked`` (seconds of processor time) are the calling thread's.
        """
        self.total_s = 0.0
        self.count = 0
        self._name = name
        self._clock = clock
        self._awake = awake
        self._switches = switches
        self._worked = worked
        self._asleep = clock() - awake()
        self._round: tuple[float, int, float] | None = None
        """Clock, switches and processor time at the end of the last wait."""

    def resume(self) -> None:
        """What came since the last wait was no look and may have taken any time: count from the next wait on."""
        self._round = None

    def wait(self, wait: Callable[[float], object], seconds: float) -> float:
        """Wait with ``wait(seconds)``; return how long a pause this round turned out to hold, seconds, mostly 0."""
        began, switched, worked = self._round or self._now()
        wait(seconds)
        self._round = self._now()
        ended, switches, work = self._round
        late = ended - began - seconds - (work - worked)
        asleep = ended - self._awake()
        slept, self._asleep = max(0.0, asleep - self._asleep), asleep
        in_vain = False
        if late <= max((_LATE_FACTOR - 1) * seconds, _LEAST_LATE_S):
            late = 0.0
        elif switches - switched > _GIL_WAITS_PER_S * late:
            late, in_vain = 0.0, True
        pause = max(late, slept if slept > _LEAST_LATE_S else 0.0)
        if pause:
            self.note(pause, "asleep" if slept >= late else "stopped or starved")
        if in_vain:
            log.warning("late_for_the_gil", extra={"watchdog": self._name})
        return pause

    def _now(self) -> tuple[float, int, float]:
        return self._clock(), self._switches(), self._worked()

    def note(self, seconds: float, why: str) -> None:
        """Count a pause: all deadlines move by so many seconds."""
        self.total_s += seconds
        self.count += 1
        log.warning(
            "pause",
            extra={"watchdog": self._name, "pause_s": round(seconds, 1), "reason": why, "count": self.count},
        )

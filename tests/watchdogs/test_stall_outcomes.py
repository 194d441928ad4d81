"""What follows from a window of silence: every row of the table in `gangq.watchdogs.stall`."""

from __future__ import annotations

import pytest

from gangq.watchdogs.idle import Verdict
from gangq.watchdogs.stall import SilenceLimits, _outcome

LIMITS = SilenceLimits(due=10, waited=30, overdue=100, unit=10)
WORK = Verdict(False, "", known=True)
WAIT = Verdict(False, "", known=True, waiting=True)
SPIN = Verdict(False, "", known=True, spinning=True)
STILL = Verdict(True, "", known=True)
HALF_KNOWN = Verdict(None, "", known=True)
UNKNOWN = Verdict(None, "")


@pytest.mark.parametrize(
    ("verdict", "silence_s", "full", "got_on", "outcome"),
    [
        (WORK, 100, False, False, "no_progress"),
        (WAIT, 100, True, False, "no_progress"),
        (STILL, 100, True, False, "no_progress"),
        (HALF_KNOWN, 100, False, False, "no_progress"),
        (UNKNOWN, 100, False, False, "look"),
        (UNKNOWN, 100, True, False, "unknown"),
        (WORK, 99, True, False, "rearm"),
        (WORK, 10, False, True, "rearm"),
        (WAIT, 29, True, False, "rearm"),
        (SPIN, 29, True, False, "rearm"),
        (STILL, 29, True, True, "rearm"),
        (WAIT, 30, False, False, "look"),
        (SPIN, 30, False, False, "look"),
        (STILL, 30, False, True, "look"),
        (WAIT, 30, True, False, "waits"),
        (SPIN, 30, True, False, "spin"),
        (STILL, 30, True, True, "waits"),
        (STILL, 10, False, False, "look"),
        (STILL, 10, True, False, "idle"),
        (HALF_KNOWN, 10, False, False, "look"),
        (HALF_KNOWN, 10, True, True, "unknown"),
    ],
)
def test_each_window_has_one_outcome(
    verdict: Verdict, silence_s: float, full: bool, got_on: bool, outcome: str
) -> None:
    assert _outcome(verdict, full, got_on, silence_s, LIMITS) == outcome

"""How an attempt ended, as a table."""

from __future__ import annotations

import pytest

from gangq.watchdogs import ExitCode
from gangq.worker.endings import Attempt, Ending, ending_of

STALL, MEMORY = ExitCode.STALL, ExitCode.MEMORY


@pytest.mark.parametrize(
    ("attempt", "ending"),
    [
        # The claim decides first, then the handler's own transaction, then a result.
        (Attempt("result", lost=True), Ending.NOTHING),
        (
            Attempt("error", lost=True, completed=True, told_to_stop=True, trip=STALL, cause="kill"),
            Ending.NOTHING,
        ),
        (Attempt("error", completed=True), Ending.COMMITTED_OR_FAILED),
        (Attempt("result", completed=True, told_to_stop=True), Ending.COMMITTED_OR_FAILED),
        (Attempt("result"), Ending.DONE),
        (Attempt("result", told_to_stop=True), Ending.DONE),
        (Attempt("result", told_to_stop=True, cause="stop"), Ending.DONE),
        (Attempt("result", trip=STALL, cause="kill"), Ending.DONE),
        # A watchdog.
        (Attempt(None, trip=STALL, cause="kill"), Ending.TRIPPED),
        (Attempt(None, told_to_stop=True, trip=STALL, cause="kill"), Ending.TRIPPED),
        (Attempt("exit 0", trip=STALL), Ending.DONE),
        (Attempt(None, trip=STALL), Ending.FAILED),
        (Attempt(None, trip=MEMORY), Ending.TRIPPED),
        # Told to stop.
        (Attempt(None, cause="deadline"), Ending.STOPPED),
        (Attempt("exit 0", cause="orphan"), Ending.STOPPED),
        (Attempt(None, told_to_stop=True, cause="stop"), Ending.STOPPED),
        (Attempt("exit 0", told_to_stop=True, cause="stop"), Ending.STOPPED),
        (Attempt(None, told_to_stop=True, cause="kill"), Ending.STOPPED),
        (Attempt("stopped", told_to_stop=True), Ending.STOPPED),
        # Told to stop, and it ended by itself before that: as it says.
        (Attempt("error", told_to_stop=True), Ending.ERROR),
        (Attempt("exit 0", told_to_stop=True), Ending.DONE),
        (Attempt(None, told_to_stop=True), Ending.FAILED),
        # A handler that stopped although nobody told it to.
        (Attempt("stopped"), Ending.FAILED),
        (Attempt("error"), Ending.ERROR),
        (Attempt("exit 0"), Ending.DONE),
        (Attempt(None), Ending.FAILED),
        (Attempt(None, cause="kill"), Ending.FAILED),
        (Attempt("exit 0", cause="guardian_lost"), Ending.DONE),
    ],
)
def test_the_first_rule_that_fits_decides(attempt: Attempt, ending: Ending) -> None:
    assert ending_of(attempt) is ending

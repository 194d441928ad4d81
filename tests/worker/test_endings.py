"""How an attempt ended, as a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gangq.watchdogs import ExitCode
from gangq.worker.child import Exit
from gangq.worker.command_report import Ended, report
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
        # It could not reach its worker.
        (Attempt(None, socket_gone=True), Ending.STOPPED),
        (Attempt("error", socket_gone=True), Ending.ERROR),
        (Attempt("exit 0", socket_gone=True), Ending.DONE),
        (Attempt(None, trip=STALL, cause="kill", socket_gone=True), Ending.TRIPPED),
    ],
)
def test_the_first_rule_that_fits_decides(attempt: Attempt, ending: Ending) -> None:
    assert ending_of(attempt) is ending


@pytest.mark.parametrize(
    ("cause", "socket_gone", "why"),
    [
        ("deadline", False, "lease"),
        ("deadline", True, "lease"),
        ("orphan", True, "lease"),
        ("exit", True, "directory"),
    ],
)
def test_what_its_guardian_ended_is_not_put_down_to_the_directory(
    cause: str, socket_gone: bool, why: str
) -> None:
    told: list[str] = []
    reporter: Any = SimpleNamespace(stopped=lambda job, *, unless_told: told.append(unless_told))
    job: Any = SimpleNamespace(lost=None, work_end=None, completed_by_handler=False, stop_reason=None)
    tripped: Any = SimpleNamespace(trip=None, over=None)
    gone = Exit(1, None, True, cause=cause)
    report(reporter, Ended(job, gone, "", 1.0, None, True, tripped, socket_gone), lambda *_: None)
    assert told == [why]

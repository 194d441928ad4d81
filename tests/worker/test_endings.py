"""How an attempt ended, as a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gangq.watchdogs import ExitCode
from gangq.worker.child import Exit
from gangq.worker.endings import Ending, ending_of, report

STALL, MEMORY = ExitCode.STALL, ExitCode.MEMORY


def ending(
    said: Any, *, lost: bool = False, completed: bool = False, told_to_stop: bool = False, **more: Any
) -> Ending:
    job: Any = SimpleNamespace(
        lost="why" if lost else None,
        completed_by_handler=completed,
        stop_reason="drain" if told_to_stop else None,
    )
    return ending_of(job, said, **more)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        # The claim decides first, then the handler's own transaction, then a result.
        (ending("result", lost=True), Ending.NOTHING),
        (
            ending("error", lost=True, completed=True, told_to_stop=True, trip=STALL, cause="kill"),
            Ending.NOTHING,
        ),
        (ending("error", completed=True), Ending.COMMITTED_OR_FAILED),
        (ending("result", completed=True, told_to_stop=True), Ending.COMMITTED_OR_FAILED),
        (ending("result"), Ending.DONE),
        (ending("result", told_to_stop=True), Ending.DONE),
        (ending("result", told_to_stop=True, cause="stop"), Ending.DONE),
        (ending("result", trip=STALL, cause="kill"), Ending.DONE),
        # A watchdog.
        (ending(None, trip=STALL, cause="kill"), Ending.TRIPPED),
        (ending(None, told_to_stop=True, trip=STALL, cause="kill"), Ending.TRIPPED),
        (ending("exit 0", trip=STALL), Ending.DONE),
        (ending(None, trip=STALL), Ending.FAILED),
        (ending(None, trip=MEMORY), Ending.TRIPPED),
        # Told to stop.
        (ending(None, cause="deadline"), Ending.STOPPED),
        (ending("exit 0", cause="orphan"), Ending.STOPPED),
        (ending(None, told_to_stop=True, cause="stop"), Ending.STOPPED),
        (ending("exit 0", told_to_stop=True, cause="stop"), Ending.STOPPED),
        (ending(None, told_to_stop=True, cause="kill"), Ending.STOPPED),
        (ending("stopped", told_to_stop=True), Ending.STOPPED),
        # Told to stop, and it ended by itself before that: as it says.
        (ending("error", told_to_stop=True), Ending.ERROR),
        (ending("exit 0", told_to_stop=True), Ending.DONE),
        (ending(None, told_to_stop=True), Ending.FAILED),
        # A handler that stopped although nobody told it to.
        (ending("stopped"), Ending.FAILED),
        (ending("error"), Ending.ERROR),
        (ending("exit 0"), Ending.DONE),
        (ending(None), Ending.FAILED),
        (ending(None, cause="kill"), Ending.FAILED),
        (ending("exit 0", cause="guardian_lost"), Ending.DONE),
        # It could not reach its worker.
        (ending(None, socket_gone=True), Ending.STOPPED),
        (ending("error", socket_gone=True), Ending.ERROR),
        (ending("exit 0", socket_gone=True), Ending.DONE),
        (ending(None, trip=STALL, cause="kill", socket_gone=True), Ending.TRIPPED),
    ],
)
def test_the_first_rule_that_fits_decides(found: Ending, wanted: Ending) -> None:
    assert found is wanted


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
    job: Any = SimpleNamespace(
        lost=None, work_end=None, completed_by_handler=False, stop_reason=None, gang=None
    )
    tripped: Any = SimpleNamespace(trip=None, over=None)
    gone = Exit(1, None, True, cause=cause)
    report(
        reporter,
        job,
        gone,
        lambda *_: None,
        tail="",
        ran_s=1.0,
        is_handler=True,
        tripped=tripped,
        socket_gone=socket_gone,
    )
    assert told == [why]

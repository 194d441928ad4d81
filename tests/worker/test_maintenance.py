"""What a worker asks of the tick, one call after another: what was asked once is asked until a whole tick has run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client.rows import TickReport
from gangq.errors import Busy
from gangq.worker.maintenance import Maintenance

RAN = TickReport(ran=True, again=False, next_in_s=0.01, detail={}, next_turn=None, decide=False, unplanned=0)
ANOTHER_RUNS = RAN._replace(ran=False, next_turn=7)


def asked(*answers: TickReport | Exception) -> list[tuple[bool, int | None]]:
    """Force and turn of each call of a worker that is told once to tick, if the calls are answered so."""
    calls: list[tuple[bool, int | None]] = []
    left = iter(answers)

    async def tick(*, force: bool, turn: int | None) -> TickReport:
        calls.append((force, turn))
        answer = next(left, None)
        if answer is None:
            raise asyncio.CancelledError
        if isinstance(answer, Exception):
            raise answer
        return answer

    client: Any = SimpleNamespace(tick=tick)
    session: Any = SimpleNamespace(control=SimpleNamespace(client=client), terms=SimpleNamespace(tick_s=0.01))
    maintenance = Maintenance(session)
    maintenance.ask()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(maintenance.run())
    return calls


def test_what_was_asked_is_asked_once() -> None:
    assert asked(RAN) == [(True, None), (False, None)]


def test_what_was_asked_is_asked_again_where_the_call_failed() -> None:
    assert asked(Busy("x"), Busy("x"), RAN) == [(True, None)] * 3 + [(False, None)]


def test_the_run_that_is_waited_for_is_waited_for_after_a_failed_call_too() -> None:
    assert asked(ANOTHER_RUNS, Busy("x"), RAN) == [(True, None), (True, 7), (True, 7), (False, None)]


def test_a_step_that_has_done_its_most_goes_on_with_a_whole_tick_and_what_is_busy_does_not() -> None:
    assert asked(RAN._replace(again=True, next_in_s=0.0)) == [(True, None), (True, None)]
    assert asked(RAN._replace(again=True, next_in_s=0.05)) == [(True, None), (False, None)]

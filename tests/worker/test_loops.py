"""When a worker that runs until nothing is left is done: both lanes have looked since the last job ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gangq.worker.loops import ChildLoop, NothingLeft


class Table(list[object]):
    """What the worker holds."""

    def count(self, _: object) -> int:
        """Of any lane."""
        return len(self)


def intake(tick: Callable[[], object] = bool, take: Callable[[], object] = bool) -> Any:
    """A worker whose one job has ended; ``tick()`` happens with each pass, ``take()`` with each claim."""
    report = SimpleNamespace(ran=True, again=False, decide=True, next_in_s=None, next_turn=None)
    session = SimpleNamespace(
        table=Table(),
        client=SimpleNamespace(tick=lambda **_: (tick(), report)[1]),
        terms=SimpleNamespace(tick_s=10.0),
        wake=lambda: None,
    )
    return SimpleNamespace(
        session=session, taken=1, serving=True, doubtful=False, take=lambda *_: (take(), [])[1]
    )


def child_loop(of: Any, turns: int) -> ChildLoop:
    """A loop that ends after so many claims."""
    claims = SimpleNamespace(woken=threading.Event(), unsure=False, lane="placed", pace=lambda: None)
    loop = ChildLoop(of, claims, None, None, 1)  # type: ignore[arg-type]
    left = iter(range(turns - 1))

    def wait() -> None:
        of.serving = next(left, None) is not None

    claims.wait = wait
    return loop


def test_what_the_other_lane_ran_while_a_pass_was_under_way_has_a_pass_after_it() -> None:
    passes = 0

    def tick() -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            of.taken += 1  # It has ended by now: what follows it is not pending before the next tick.

    of = intake(tick)
    left = NothingLeft(of, placed=True)
    assert [left(), left(), left()] == [False, False, True]
    assert passes == 2


def test_a_claim_that_began_before_the_lane_was_told_to_look_again_leaves_it_at_work() -> None:
    of = intake(take=lambda: loop.look_again())
    loop = child_loop(of, 1)
    loop.run()
    assert not loop.idle


def test_a_lane_that_has_looked_again_in_vain_is_idle() -> None:
    of = intake()
    loop = child_loop(of, 1)
    loop.look_again()
    loop.run()
    assert loop.idle
    loop.look_again()
    assert not loop.idle

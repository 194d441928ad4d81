"""When a worker that runs until nothing is left is done: both lanes have looked since the last job ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client.sync import in_steps
from gangq.client.verb import Query, Steps
from gangq.worker.loops import ChildProcessLoop, NothingLeft


class Table(list[object]):
    """What the worker holds."""

    added = 0

    def count(self, _: object) -> int:
        """Of any lane."""
        return len(self)


def never() -> Steps[None]:
    """Steps that take none."""
    yield from ()


def intake(tick: Callable[[], object] = bool, take: Callable[[], object] = bool) -> Any:
    """A worker whose one job has ended; ``tick()`` happens with each pass, ``take()`` with each claim."""
    report = SimpleNamespace(ran=True, again=False, decide=True, next_in_s=None, next_turn=None)

    def send(query: Query[Any]) -> object:
        assert query.name == "gangq.tick"
        tick()
        return report

    async def execute(steps: Steps[Any]) -> Any:
        return in_steps(send, steps)

    def taking(*_: object) -> Steps[list[Any]]:
        yield from never()
        take()
        return []

    session = SimpleNamespace(
        table=Table(),
        main_client=SimpleNamespace(execute=lambda steps: in_steps(send, steps)),
        control=SimpleNamespace(client=SimpleNamespace(execute=execute)),
        terms=SimpleNamespace(tick_s=10.0),
        wake=lambda: None,
    )
    return SimpleNamespace(session=session, taken=1, serving=True, doubtful=False, taking=taking)


class Turns:
    """What wakes a loop: nothing, and after so many turns its worker stops."""

    def __init__(self, of: Any, turns: int) -> None:
        self._of = of
        self._left = iter(range(turns - 1))

    def set(self) -> None:
        """Nobody waits."""

    async def wait_kept(self, _: float) -> bool:
        """At once."""
        return False

    async def wait(self, _: float) -> None:
        """At once, and once too often."""
        self._of.serving = next(self._left, None) is not None


def child_loop(of: Any, turns: int) -> ChildProcessLoop:
    """A loop that ends after so many claims."""
    claims = SimpleNamespace(
        wakes=Turns(of, turns),
        unsure=False,
        lane="placed",
        pace_s=0.0,
        wait_s=0.0,
        begin_claim=lambda _: None,
        abandon=bool,
    )
    return ChildProcessLoop(of, claims, None, None, 1)  # type: ignore[arg-type]


def test_what_the_other_lane_ran_while_a_pass_was_under_way_has_a_pass_after_it() -> None:
    passes = 0

    def tick() -> None:
        nonlocal passes
        passes += 1
        if passes == 1:
            of.session.table.added += (
                1  # It has ended by now: what follows it is not pending before the next tick.
            )

    of = intake(tick)
    left = NothingLeft(of, placed=True)
    looks = [of.session.main_client.execute(left.look()) for _ in range(3)]
    assert looks == [False, False, True]
    assert passes == 2


@pytest.mark.parametrize(("claims", "done"), [(1, False), (2, True)])
def test_a_claim_of_the_other_lane_counts_if_it_began_after_the_first_look(claims: int, done: bool) -> None:
    during: list[bool] = []
    of = intake(take=lambda: during.append(of.session.main_client.execute(left.look())))
    left = NothingLeft(of, placed=True)
    left.children = child_loop(of, claims)
    asyncio.run(left.children.run())
    assert during == [False] * claims
    assert of.session.main_client.execute(left.look()) is done


def test_a_slot_that_a_job_which_ends_has_filled_meanwhile_is_not_asked_for() -> None:
    asked: list[int] = []
    of = intake()

    def taking(_: object, most: int) -> Steps[list[Any]]:
        asked.append(most)
        yield from never()
        return []

    class Filled:
        """Who had it before has claimed a job for the one slot."""

        def acquire(self, blocking: bool = True) -> bool:
            of.session.table.append("a job")
            return True

        def release(self) -> None:
            """Nobody waits."""

    of.taking = taking
    loop = child_loop(of, 1)
    loop._claim_lock = Filled()  # type: ignore[assignment]
    asyncio.run(loop.run())
    assert asked == []


def test_a_lane_that_is_stopped_while_it_waits_for_its_pace_claims_no_more() -> None:
    of = intake(take=lambda: pytest.fail("it was stopped"))
    loop = child_loop(of, 2)

    async def stopped_meanwhile(_: float) -> bool:
        loop._stopping = True
        return False

    loop._claims.wakes.wait_kept = stopped_meanwhile  # type: ignore[method-assign]
    asyncio.run(loop.run())


def test_a_lane_leaves_no_claim_to_be_handed_back_before_a_report_has_claimed_to_its_end() -> None:
    seen: list[str] = []

    class Held:
        """By the thread of a job, whose report claims."""

        def acquire(self, blocking: bool = True) -> bool:
            assert not blocking
            seen.append("held" if len(seen) < 3 else "free")
            return seen[-1] == "free"

    of = intake()
    of.serving = False
    loop = child_loop(of, 1)
    loop._claim_lock = Held()  # type: ignore[assignment]
    loop._claims.abandon = lambda: seen.append("abandoned")  # type: ignore[method-assign]
    asyncio.run(loop.run())
    assert seen == ["held"] * 3 + ["free", "abandoned"]


@pytest.mark.parametrize("why", ["may begin none", "stopping", "a claim is in flight"])
def test_a_report_claims_nothing_where_its_lane_must_not(why: str) -> None:
    of = intake()
    of.may_begin = why != "may begin none"
    loop = child_loop(of, 1)
    loop._claims.completing_and_claiming = lambda *_: pytest.fail(why)  # type: ignore[method-assign]
    loop._stopping = why == "stopping"
    if why == "a claim is in flight":
        assert loop._claim_lock.acquire(blocking=False)
    assert loop._complete_and_claim([]) is None
    assert loop._claim_lock.locked() is (why == "a claim is in flight")

"""The gate ``rate``: how many starts a bucket has left, and when it has more."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.placement import gates
from gangq.placement.board import (
    Ask,
    Board,
    Device,
    Hold,
    Kept,
    Kind,
    Needs,
    Place,
    Queue,
    Rate,
    Role,
    Unit,
    Worker,
)
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision
from gangq.placement.explain import explain
from placement.drawn_boards import Picture

RATE = Rate("4/1m", 4, 15.0)


def decided(rate: Rate, *, count: int = 9, least: int = 1, most: int = 1, **more: Any) -> Decision:
    """What becomes of single jobs, or of a gang of these sizes, under a rate at the moment 1000."""
    single = most == 1
    ask = Ask("k7/0" if single else "g7", -7 if single else 7, count=count if single else 1)
    role = Role(Needs(memory_mb=1), least, most)
    board = Board(
        now=1000.0,
        workers=(Worker(1, "w1", "h1", slots=20, memory_mb=100),),
        kinds=(Kind(ask.kind, (role,), limit_key="api"),),
        asks=(ask,),
        **({"rates": {"api": rate}} | more),
    )
    assert Board.from_json(board.to_json()) == board
    (decision,) = decide(board)
    return decision


@pytest.mark.parametrize(
    ("full_at", "starts", "at"),
    [(0, 4, 1015), (1000, 4, 1015), (1030, 2, 1015), (1052, 0, 1007), (1060, 0, 1015), (1062, 4, 1015)],
)
def test_so_many_start_as_the_bucket_holds_and_the_next_when_it_has_one_more(
    full_at: float, starts: int, at: float
) -> None:
    """No start can have moved it to 1062: the clock was set back, and the bucket is taken as full."""
    decision = decided(Rate("4/1m", 4, 15.0, full_at))
    assert len(decision.seats) == starts
    assert decision.refused is not None
    assert (decision.refused.gate, decision.refused.at) == (gates.RATE, at)
    assert explain(decision.refused) == (
        "the rate of limit key api, 4/1m, leaves 0 starts now, and it needs 1 start",
        "nothing: its time comes by itself",
    )


def test_the_rate_of_a_queue_above_counts() -> None:
    queues = (Queue("default", rate=Rate("2/1m", 2, 30.0)),)
    decision = decided(RATE, queues=queues)
    assert len(decision.seats) == 2
    assert decision.refused is not None
    assert decision.refused.where == "queue default, 2/1m,"


def test_an_open_place_is_a_start_that_is_counted_already() -> None:
    empty = Rate("4/1m", 4, 15.0, 1060.0)
    assert len(decided(empty, places=(Place(5, 1, -7),)).seats) == 1
    assert len(decided(empty, places=(Place(5, 1, -8),)).seats) == 0


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "no rate"])
def test_a_place_whose_start_is_counted_stays_where_it_is(counted: bool) -> None:
    """Another place would be one more start. Where no rate counts it, jobs are packed beside what runs by now."""
    workers = tuple(
        Worker(n, f"w{n}", f"h{n}", slots=4, devices=(Device(n * 10, 16), Device(n * 10 + 1, 16)))
        for n in (1, 2)
    )
    board = Board(
        now=1000.0,
        workers=workers,
        units=(Unit("j1", (Hold(1, (10,)),), 2000.0),),
        kinds=(Kind(-7, (Role(Needs(gpus=1)),), limit_key="api"),),
        asks=(Ask("k7/0", -7, count=3),),
        places=(Place(5, 2, -7, (21,)),),
        rates={"api": Rate("4/1m", 4, 15.0, 1060.0)} if counted else {},
    )
    (decision,) = decide(board)
    first = decision.seats[0]
    assert (first.place, first.worker, first.devices) == ((5, 2, (21,)) if counted else (None, 1, (11,)))
    assert len(decision.seats) == (1 if counted else 3)
    first, second = workers
    for gone in (
        board._replace(units=(*board.units, Unit("j2", (Hold(2, (21,)),), 2000.0))),
        board._replace(units=(*board.units, Unit("j2", (Hold(2, (), slots=4),), 2000.0))),
        board._replace(workers=(first, second._replace(open=False))),
        board._replace(workers=(first, second._replace(class_id=1))),
    ):
        (decision,) = decide(gone)
        if counted:
            assert decision.seats == ()
            assert decision.refused is not None
            assert (decision.refused.gate, decision.refused.at) == (gates.RATE, 1015)
        else:
            assert decision.seats
            assert (2, (21,)) not in {(seat.worker, seat.devices) for seat in decision.seats}


def test_an_open_place_is_no_start_for_seats_that_are_kept_elsewhere() -> None:
    workers = tuple(Worker(n, f"w{n}", f"h{n}", slots=4, devices=(Device(n * 10, 16),)) for n in (1, 2))
    board = Board(
        now=1000.0,
        workers=workers,
        kinds=(Kind(-7, (Role(Needs(gpus=1)),), limit_key="api"),),
        asks=(Ask("k7/0", -7),),
        places=(Place(5, 2, -7, (20,)),),
        kept=(Kept("k7/0", (Hold(1, (10,)),), 1000.0),),
        rates={"api": Rate("4/1m", 4, 15.0, 1060.0)},
    )
    (decision,) = decide(board)
    assert decision.seats == ()
    assert decision.refused is not None
    assert decision.refused.gate == gates.RATE
    (decision,) = decide(board._replace(kept=()))
    assert [seat.place for seat in decision.seats] == [5]


@pytest.mark.parametrize(("starts", "second"), [(2, "wait"), (3, "start")])
def test_a_gang_for_which_others_are_told_to_stop_has_its_starts(starts: int, second: str) -> None:
    board = Picture("victims=8\nh0 AA\nh1 .\nX 2 prio=5 strict_pack\nY 1").board
    rate = Rate(f"{starts}/1m", starts, 60 / starts)
    decisions = decide(board._replace(queues=(Queue("default", rate=rate),)))
    assert [decision.action for decision in decisions] == ["stop", second]


def test_a_gang_needs_all_its_starts_and_an_elastic_one_takes_those_there_are() -> None:
    half = Rate("4/1m", 4, 15.0, 1030.0)
    assert len(decided(half, least=1, most=4).seats) == 2
    waits = decided(half, least=4, most=4)
    assert waits.refused is not None
    assert (waits.refused.gate, waits.refused.at) == (gates.RATE, 1030)
    never = decided(half, least=5, most=5)
    assert never.refused is not None
    assert never.refused.at is None
    assert explain(never.refused)[1] == "a rate of 5 or more"

"""Single jobs are decided about like gangs: planned starts, displacing, packing; and which places are refilled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gangq.placement.board import Ask, Board, Device, Hold, Kind, Needs, Place, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from gangq.placement.places import LOWEST, closed_places
from placement.drawn_boards import Picture, after, drawn

PICTURES = {
    "one of a higher priority displaces a gang": (
        """
        victims=8
        h0 AAAABBBB
        A prio=0
        B prio=9
        x*1 1x4 prio=5
        """,
        """
        h0 AAAABBBB
        x stops A
        x starts in 30 on h0
        """,
    ),
    "one of equal priority does not": (
        """
        victims=8
        h0 AAAABBBB
        x*1 1x4
        """,
        """
        h0 AAAABBBB
        x waits: room 0 of 1
        """,
    ),
    "they leave whole hosts to those who need one": (
        """
        h0 ........
        h1 A.......
        h2 ........
        h3 BB......
        x*10 1
        Y 8 strict_pack
        Z 8 strict_pack
        """,
        """
        h0 YYYYYYYY
        h1 Axxxx...
        h2 ZZZZZZZZ
        h3 BBxxxxxx
        """,
    ),
    "of two about as old the one whose model is loaded goes first": (
        """
        warm_s=10
        w0 _ warm=a
        x*1 1x0 since=15
        y*1 1x0 since=5 model=a
        """,
        """
        w0 y
        x waits: room 0 of 1
        """,
    ),
    "what has overtaken takes no cold worker before its turn": (
        """
        warm_s=10
        w0 _ warm=a
        w1 _
        w2 _
        x*2 1x0 since=15
        y*3 1x0 since=5 model=a
        """,
        """
        w0 y
        w1 x
        w2 x
        y waits: room 0 of 1
        """,
    ),
    "one that is older by more than that goes first": (
        """
        warm_s=10
        w0 _ warm=a
        x*1 1x0 since=15.5
        y*1 1x0 since=5 model=a
        """,
        """
        w0 x
        y waits: room 0 of 1
        """,
    ),
    "one of a higher priority goes first": (
        """
        warm_s=10
        w0 _ warm=a
        x*1 1x0 since=5 prio=1
        y*1 1x0 since=5 model=a
        """,
        """
        w0 x
        y waits: room 0 of 1
        """,
    ),
    "where its model is loaded there is no room": (
        """
        warm_s=10
        w0 z warm=a
        w1 _
        z ends=600
        x*1 1x0 since=5
        y*1 1x0 since=5 model=a
        """,
        """
        w0 z
        w1 x
        y waits: room 0 of 1
        """,
    ),
    "nothing passes one that went to the front after a trip": (
        """
        warm_s=10
        w0 _ warm=a
        x*1 1x0
        y*1 1x0 since=5 model=a
        """,
        """
        w0 x
        y waits: room 0 of 1
        """,
    ),
    "small ones pass a large one only where they end before its planned start": (
        """
        plans=1
        h0 aaaaaa..
        h1 bbbbbb..
        a ends=100
        b ends=900
        x*1 1x8
        y*4 1 ends=200
        """,
        """
        h0 aaaaaa..
        h1 bbbbbbyy
        x starts in 100 on h0
        y waits: planned_start 100 of 200
        """,
    ),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_single_jobs(picture: str) -> None:
    before, expected = PICTURES[picture]
    assert sorted(after(before).splitlines()) == sorted(drawn(expected).splitlines())


def test_where_one_starts_and_the_next_must_displace_nobody_is_told_before_the_next_pass() -> None:
    """A decision is carried out as one action. What would stop is not locked, and its room is given to nobody."""
    board = Picture("victims=8\nh0 ...\nh1 AA..\nx*2 1x3 prio=5\nY 2").board
    jobs, gang = decide(board)
    assert (jobs.action, jobs.stop, jobs.planned, jobs.starts_at) == ("start", (), (), None)
    assert [seat.worker for seat in jobs.seats] == [0]
    assert jobs.refused is not None
    assert (jobs.refused.gate, jobs.refused.holders) == ("stopping", ())
    assert gang.action == "wait"
    (jobs, gang) = decide(
        board._replace(asks=(board.asks[0]._replace(count=1), board.asks[1]), workers=board.workers[1:])
    )
    assert (jobs.action, jobs.stop, gang.action) == ("stop", ("g65",), "wait")


# A stream of small ones -------------------------------------------------------------------------------------

SMALL, LARGE = (
    Kind(number, (Role(Needs(gpus=gpus), 1, 1, frozenset({0})),)) for number, gpus in ((1, 1), (2, 8))
)


class Stream:
    """Two hosts of eight GPUs, on which more small jobs come than can run; time moves by what is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: dict[str, tuple[float, Unit]] = {}
        self.large: Ask | None = None
        self.started = 0
        self.workers = tuple(
            Worker(
                id=host,
                name=f"w{host}",
                host=f"h{host}",
                slots=8,
                memory_mb=0,
                millicpus=0,
                devices=tuple(Device(10 * host + n, 80) for n in range(8)),
                class_id=0,
                domains=(f"h{host}",),
            )
            for host in range(2)
        )

    def board(self) -> Board:
        small = Ask("k1/0", 1, 0, age=9, submitter="me", estimate_s=100, count=20)
        return Board(
            now=self.now,
            workers=self.workers,
            units=tuple(unit for _, unit in self.running.values()),
            kinds=(SMALL, LARGE),
            asks=(small, self.large) if self.large else (small,),
            queues=(Queue("default"),),
            planned_starts=1,
            victims=0,
        )

    def step(self, seconds: float) -> Iterator[str]:
        """What starts now; then time passes, and what has run its time ends."""
        for decision in decide(self.board()):
            for seat in decision.seats:
                self.started += 1
                name = f"j{self.started}"
                # They run for 30 to 90 s and say 100.
                ends = self.now + 30 + 20 * (self.started % 4)
                holds = (Hold(seat.worker, seat.devices),)
                unit = Unit(name, holds, self.now + 100, "default", "me", 0, self.now)
                self.running[name] = (ends, unit)
                yield decision.ask
        self.now += seconds
        self.running = {name: one for name, one in self.running.items() if one[0] > self.now}


def test_a_job_of_eight_gpus_in_a_stream_of_small_ones_starts_within_one_of_their_budgets() -> None:
    stream = Stream()
    while stream.now < 200:
        list(stream.step(5))
    assert len(stream.running) > 10
    stream.large = Ask("k2/0", 2, 0, age=1, submitter="me", estimate_s=100)
    while "k2/0" not in list(stream.step(5)):
        assert stream.now <= 300, "the budget of the last that started before it came"


# Places -----------------------------------------------------------------------------------------------------


def seated(text: str) -> Board:
    """A drawn board of which each small letter sits in a place for the kind of the first ask."""
    board = Picture(text).board
    singles = [unit for unit in board.units if unit.id.startswith("j")]
    places = [
        Place(number, unit.holds[0].worker, board.asks[0].kind, unit.holds[0].devices, unit.id)
        for number, unit in enumerate(singles, 1)
    ]
    return board._replace(places=tuple(places))


def refilled(board: Board) -> dict[int, int]:
    """Which places of a board may be filled again, and from which priority on."""
    return {refill.place: refill.min_priority for one in decide(board) for refill in one.refills}


REFILLS = {
    "nothing else waits": ("x*3 1", {1: LOWEST, 2: LOWEST}),
    "a gang that comes after it waits, and none of a lower priority goes ahead of that": (
        "x*3 1\nY 2",
        {1: 0, 2: 0},
    ),
    "one of a lower priority waits": ("x*3 1\nY 2 prio=-5", {1: -5, 2: -5}),
    "what waits is for other workers": ("x*3 1\nY 2 prio=5 class=1", {1: LOWEST, 2: LOWEST}),
    "a gang that comes before it waits": ("x*3 1 prio=0 ends=100\nY 2 prio=5", {}),
    "what waits for its limit key comes before it": ("limit k 1\nx*3 1 key=k\nY 2 prio=5 class=1 key=k", {}),
    "what waits is for another limit key": (
        "limit k 1\nlimit j 1\nx*3 1 key=k\nY 2 prio=5 class=1 key=j",
        {1: LOWEST, 2: LOWEST},
    ),
    "a single job that comes before it waits": ("x*3 1\ny*1 1x2 prio=5", {}),
    "others are told to stop for a gang that comes before it": ("victims=1\nx*3 1\nY 1 mem=1 prio=5", {}),
}


@pytest.mark.parametrize("what", REFILLS)
def test_a_place_is_refilled_until_something_that_comes_before_waits(what: str) -> None:
    asks, expected = REFILLS[what]
    assert refilled(seated(f"h0 ab\na ends=600\nb ends=600\n{asks}")) == expected


def test_a_place_on_a_worker_that_is_not_on_the_board_is_closed() -> None:
    board = seated("h0 ab\nx*3 1")
    first, second = board.places
    board = board._replace(places=(first, second._replace(worker=99)))
    assert refilled(board) == {1: LOWEST}
    assert closed_places(board, decide(board)) == [2]


def test_a_place_of_which_no_more_waits_is_closed() -> None:
    board = seated("h0 ab\nx*3 1")._replace(asks=())
    decisions = decide(board)
    assert refilled(board) == {}
    assert closed_places(board, decisions) == [1, 2]


def test_a_place_whose_job_has_been_told_to_stop_is_closed() -> None:
    board = seated("h0 ab\na leaving\nx*3 1")
    assert refilled(board) == {2: LOWEST}
    assert closed_places(board, decide(board)) == [1]


def test_an_open_place_that_is_still_right_stays_the_same_one() -> None:
    board = seated("h0 a.\nx*1 1")
    vacant = Place(7, 0, board.asks[0].kind, (1,))
    (decision,) = decide(board._replace(places=(*board.places, vacant)))
    assert [seat.place for seat in decision.seats] == [7]


def test_a_place_that_is_opened_while_something_before_it_waits_is_for_one_job() -> None:
    """Here the gang waits for both GPUs, and what ends before its planned start may pass."""
    board = seated("plans=1\nh0 a.\na ends=600\nx*3 1 ends=50\nY 2 prio=5")
    opened = {seat.place: seat.refills for one in decide(board) if one.ask[0] == "k" for seat in one.seats}
    assert opened == {None: False}


# Loaded models ----------------------------------------------------------------------------------------------

COLD, WARM = (
    Kind(number, (Role(Needs(), 1, 1, frozenset({0})),), model=model)
    for number, model in ((1, "b"), (2, "a"))
)


def test_a_stream_of_jobs_whose_model_is_loaded_keeps_no_other_waiting_for_longer_than_warm_s() -> None:
    """Four of them a second for a worker with four slots, each for a second; at second 5 one that is cold comes."""
    worker = Worker(1, "w", "h", slots=4, memory_mb=0, millicpus=0, class_id=0, domains=("h",), warm=("a",))
    warm = [second for second in range(100) for _ in range(4)]
    came, started = 5.0, None
    for now in range(100):
        waiting = [second for second in warm if second <= now]
        asks = [Ask("k2/0", 2, 0, 1, "me", 1.0, count=len(waiting), since=min(waiting))] if waiting else []
        if now >= came:
            asks.append(Ask("k1/0", 1, 0, 0, "me", 1.0, since=came))
        board = Board(
            now=float(now),
            workers=(worker,),
            units=(),
            kinds=(COLD, WARM),
            asks=tuple(asks),
            queues=(Queue("default"),),
            planned_starts=1,
            victims=0,
            warm_s=10.0,
        )
        seats = {one.ask: len(one.seats) for one in decide(board)}
        if seats.get("k1/0"):
            started = now
            break
        for second in waiting[: seats.get("k2/0", 0)]:
            warm.remove(second)
    assert started is not None
    assert came + 5 < started <= came + 10 + 1, "overtaken for a while, and no longer"

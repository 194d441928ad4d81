"""What is kept apart shares no host, with what will be there either: kept seats, planned starts, moves."""

from __future__ import annotations

import itertools
import random

import pytest
from test_kept_seats import with_kept_seats
from test_properties import random_board

from gangq.placement import decide
from gangq.placement.board import Hold, Unit
from placement.drawn_boards import Picture, after, drawn

PICTURES = {
    "seats that are kept for another": (
        """
        h0 ....
        h1 ....
        X 1 apart=db kept=X...
        Y 1 apart=db prio=5
        """,
        """
        h0 X...
        h1 Y...
        """,
    ),
    "seats that are kept for another of another key": (
        """
        h0 ....
        h1 ....
        X 1 apart=db kept=X...
        Y 1 apart=web prio=5
        """,
        """
        h0 XY..
        h1 ....
        """,
    ),
    "seats for which this pass has others stop": (
        """
        victims=8
        h0 AA..
        X 3 prio=5 apart=db
        Y 1 apart=db
        """,
        """
        h0 AA..
        X stops A
        X starts in 30 on h0
        Y waits: apart 0 of 1
        """,
    ),
    "a planned start that it would meet": (
        """
        plans=1
        h0 AA..
        A ends=600
        X 3 apart=db
        Y 1 apart=db ends=700
        Z 1 apart=db ends=500
        """,
        """
        h0 AAZ.
        X starts in 600 on h0
        Y waits: planned_start 600 of 700
        """,
    ),
    "a planned start beside which it would be planned": (
        """
        plans=2
        h0 AAAA
        A ends=600
        X 2 apart=db ends=100
        Y 2 apart=db
        """,
        """
        h0 AAAA
        X starts in 600 on h0
        Y starts in 700 on h0
        """,
    ),
    "what runs on a host until it leaves that": (
        """
        plans=1
        h0 A...
        A ends=600 apart=db
        Y 2 apart=db
        """,
        """
        h0 A...
        Y starts in 600 on h0
        """,
    ),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_it_is_kept_apart_from(picture: str) -> None:
    before, expected = PICTURES[picture]
    assert sorted(after(before).splitlines()) == sorted(drawn(expected).splitlines())


def test_who_has_seats_kept_or_told_to_be_freed_is_named_as_what_it_is_kept_apart_from() -> None:
    board = Picture("h0 AA..\nA leaving\nX 3 apart=db kept=XXX\nY 1 apart=db").board
    refused = decide(board)[1].refused
    assert refused is not None
    assert (refused.gate, refused.holders) == ("apart", ("g88",))


def test_of_two_that_move_only_one_goes_to_the_same_host() -> None:
    board = Picture("h0 A--- closed\nh1 B--- closed\nh2 ....\nA drained apart=db\nB drained apart=db").board
    for key, moved in (("db", ["g65"]), ("", ["g65", "g66"])):
        kinds = tuple(kind._replace(apart=key) for kind in board.kinds)
        assert [one.ask for one in decide(board._replace(kinds=kinds))] == moved


def test_a_member_is_not_kept_apart_from_one_of_its_own_gang_that_is_a_unit_of_its_own() -> None:
    """The gang could go on without that one, so others may have it stop."""
    board = Picture("h0 A\nh1 ...\nA apart=db\nX 3 missing=1 mates=0,1 apart=db").board
    surplus = Unit("j5", (Hold(1, (100,)),), board.now + 600, part_of="g88", apart="db")
    (decision,) = decide(board._replace(units=(board.units[0]._replace(id="g88"), surplus)))
    assert [seat.worker for seat in decision.seats] == [1]
    (decision,) = decide(board._replace(units=(board.units[0], surplus._replace(part_of="g9"))))
    assert decision.refused is not None
    assert (decision.refused.gate, decision.refused.holders) == ("apart", ("g65", "g9"))


def test_at_no_moment_what_is_kept_apart_is_on_one_host() -> None:
    """Of what runs, has seats kept, starts and is planned, as long as each is taken to run."""
    dice, planned, waiting = random.Random(4), 0, 0
    for n in range(400):
        board = random_board(dice)
        board = board._replace(
            units=tuple(unit._replace(apart=dice.choice(["", "", "x"])) for unit in board.units),
            kinds=tuple(kind._replace(apart=dice.choice(["x", "x", "y", ""])) for kind in board.kinds),
        )
        board = (with_kept_seats(board) or (board,))[0]
        hosts = {worker.id: worker.host for worker in board.workers}
        keys = {ask.id: next(k.apart for k in board.kinds if k.id == ask.kind) for ask in board.asks}
        lasts = {ask.id: ask.estimate_s for ask in board.asks}
        there: list[tuple[str, str, str, float, float]] = []
        for unit in board.units:
            there += [(unit.apart, unit.id, hosts[hold.worker], 0.0, unit.ends_at) for hold in unit.holds]
        decisions = decide(board)
        for kept in board.kept:
            if not next(one for one in decisions if one.ask == kept.ask).seats:
                ends_at = kept.starts_at + lasts[kept.ask]
                there += [(keys[kept.ask], kept.ask, hosts[h.worker], 0.0, ends_at) for h in kept.holds]
        for one in decisions:
            for seats, at in ((one.seats, 0.0), (one.planned, one.starts_at)):
                for number, seat in enumerate(seats):
                    assert at is not None
                    name = f"{one.ask}#{at}#{number}" if one.ask.startswith("k") else one.ask
                    there.append((keys[one.ask], name, hosts[seat.worker], at, at + lasts[one.ask]))
        if any(unit.leaving for unit in board.units) or any(one.stop for one in decisions):
            continue
        planned += sum(one.action == "plan" and keys[one.ask] != "" for one in decisions)
        waiting += len(board.kept)
        for one, other in itertools.combinations([entry for entry in there if entry[0]], 2):
            alike = (one[0], one[2]) == (other[0], other[2]) and one[1] != other[1]
            alike = alike and not one[1][0] == other[1][0] == "j"  # They were put there as it came.
            assert not alike or one[4] <= other[3] or other[4] <= one[3], (n, one, other)
    assert planned > 30
    assert waiting > 30

"""Deciding about one ask fails, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gangq.placement import Decision, Refused, decide
from gangq.placement.board import Ask
from gangq.placement.decide import Pass
from gangq.placement.explain import explain, told
from gangq.placement.fit import Search
from gangq.placement.free import Taken
from gangq.placement.places import Rivals
from placement.drawn_boards import Picture, mark_of

BOARD = """
plans=1
h0 AAAA....
A ends=600
X 2
Y 8
Z 2 ends=500
"""


def decided(picture: Picture) -> dict[str, Decision]:
    """By the letter of the ask."""
    return {mark_of(decision.ask): decision for decision in decide(picture.board)}


def test_an_ask_over_which_deciding_fails_waits_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture(BOARD)
    seats = Search.seats

    def fails(search: Search, ask: Ask, *counts: Sequence[int], **rest: object) -> list[Taken] | Refused:
        if ask.id == "g88":
            raise ZeroDivisionError("no member has a size")
        return seats(search, ask, *counts, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "seats", fails)
    of = decided(picture)
    assert {name: of[name].action for name in of} == {"X": "wait", "Y": "plan", "Z": "start"}
    refused = of["X"].refused
    assert refused is not None
    assert (refused.gate, refused.where.partition(" (")[0]) == (
        "error",
        "ZeroDivisionError: no member has a size",
    )
    assert "(fails, line" in refused.where


def test_one_that_fails_after_it_was_given_seats_starts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Pass.start

    def fails(now: Pass, ask: Ask, counts: Sequence[int], found: list[Taken]) -> None:
        start(now, ask, counts, found)
        if ask.id == "g88":
            raise RuntimeError("too late")

    monkeypatch.setattr(Pass, "start", fails)
    of = decided(Picture(BOARD))
    assert (of["X"].action, of["X"].seats) == ("wait", ())
    assert of["Z"].action == "start"
    assert len({device for seat in of["Z"].seats for device in seat.devices}) == 2


def test_where_keeping_its_places_fails_one_kind_waits_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    floor = Rivals.floor

    def fails(rivals: Rivals, kind: int, class_id: int) -> int:
        if kind == broken.kind:
            raise KeyError(class_id)
        return floor(rivals, kind, class_id)

    board = Picture("h0 ........\nx*2 1\ny*2 1x2\nZ 1x2").board
    broken, works, gang = board.asks
    monkeypatch.setattr(Rivals, "floor", fails)
    of = {decision.ask: decision for decision in decide(board)}
    assert [of[ask.id].action for ask in (broken, works, gang)] == ["wait", "start", "start"]
    refused = of[broken.id].refused
    assert refused is not None
    assert refused.gate == "error"


UNKNOWN = {
    "a policy": ("queue a policy=random", "policy 'random'"),
    "the policy of an ancestor": ("queue a policy=random\nqueue a.b", "policy 'random'"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_waits_where_the_policy_is_unknown_is_refused_and_all_else_is_decided(what: str) -> None:
    queues, named = UNKNOWN[what]
    below = "a.b" if "a.b" in queues else "a"
    picture = Picture(
        f"victims=8\nh0 A...\n{queues}\nX 1 queue={below} prio=9\ny*2 1 queue={below}\nZ 1 prio=5"
    )
    of = decided(picture)
    assert {name: of[name].action for name in of} == {"X": "wait", "y": "wait", "Z": "start"}
    for name in ("X", "y"):
        refused = of[name].refused
        assert refused is not None
        assert refused.gate == "unknown"
        assert explain(refused)[0] == f"this library knows no {named}, so it cannot decide about it"
    said = told(picture.board, of.values())
    assert [(one["ask"], one.get("alike")) for one in said] == [("g88", ["k121/0"]), ("g90", None)]


def test_what_has_an_unknown_strategy_is_refused_and_neither_placed_nor_moved() -> None:
    board = Picture("h0 AAAA---- closed\nh1 ......\nA drained\nX 2\nY 2").board
    kinds = tuple(
        kind._replace(roles=(kind.roles[0]._replace(strategy="by_moon"),)) if n in (0, 1) else kind
        for n, kind in enumerate([*board.kinds, board.kinds[0]._replace(id=9)])
    )
    asks = tuple(ask._replace(kind=9) if ask.id == "g89" else ask for ask in board.asks)
    of = {one.ask: one for one in decide(board._replace(kinds=kinds, asks=asks))}
    assert {name: one.action for name, one in of.items()} == {"g88": "wait", "g89": "start"}
    refused = of["g88"].refused
    assert refused is not None
    assert (refused.gate, refused.of, refused.where) == ("unknown", "strategy", "by_moon")


def test_what_is_kept_for_one_that_fails_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture("h0 A...\nA leaving\nX 2 prio=5 kept=..XX\nY 2")
    seats = Search.seats

    def fails(search: Search, ask: Ask, *counts: Sequence[int], **rest: object) -> list[Taken] | Refused:
        if ask.id == "g88":
            raise ZeroDivisionError
        return seats(search, ask, *counts, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Search, "seats", fails)
    of = decided(picture)
    assert {name: of[name].action for name in of} == {"X": "wait", "Y": "wait"}

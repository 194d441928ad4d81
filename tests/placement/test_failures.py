"""Deciding about one ask fails, and the others go on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from drawn_boards import Picture

from gangq.placement import Decision, Refused, decide
from gangq.placement.board import Ask
from gangq.placement.decide import Pass
from gangq.placement.fit import Search
from gangq.placement.free import Taken
from gangq.placement.places import Rivals

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
    return {chr(int(decision.ask[1:])): decision for decision in decide(picture.board)}


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
    to = Rivals.to

    def fails(rivals: Rivals, kind: int, class_id: int) -> tuple[bool, int]:
        if kind == broken.kind:
            raise KeyError(class_id)
        return to(rivals, kind, class_id)

    board = Picture("h0 ........\nx*2 1\ny*2 1x2\nZ 1x2").board
    broken, works, gang = board.asks
    monkeypatch.setattr(Rivals, "to", fails)
    of = {decision.ask: decision for decision in decide(board)}
    assert [of[ask.id].action for ask in (broken, works, gang)] == ["wait", "start", "start"]
    refused = of[broken.id].refused
    assert refused is not None
    assert refused.gate == "error"

"""The decider fails over a gang: an event says so, once, and the board is kept."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.placement.board import Board
from gangq.placement.fit import Search
from sql.drive import Q


def test_it_is_told_once_an_hour_with_its_board_and_the_others_start(
    q: Q, monkeypatch: pytest.MonkeyPatch
) -> None:
    q.worker(slots=8)
    failing, other = q.submit_gang(2), q.submit_gang(2)
    seats = Search.seats

    def fails(search: Search, ask: Any, *rest: Any, **named: Any) -> Any:
        if ask.id == f"g{failing.id}":
            raise KeyError("class 7")
        return seats(search, ask, *rest, **named)

    monkeypatch.setattr(Search, "seats", fails)
    q.place()
    q.place()
    assert (failing.state, other.state) == ("blocked", "reserved")
    (event,) = q.events("decision_failed")
    assert event["gang_id"] == failing.id
    assert event["reason"].startswith("KeyError: 'class 7'")
    (kept,) = q.sql("select board from gangq.passes where board is not null")
    assert f"g{failing.id}" in {ask.id for ask in Board.from_json(kept["board"]).asks}
    monkeypatch.undo()
    q.place()
    assert failing.state == "reserved"

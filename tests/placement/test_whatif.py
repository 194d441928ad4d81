"""Boards as they would be, on which `gangq plan` decides."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.placement import board as layout
from gangq.placement.board import Hold, Kept
from gangq.placement.whatif import edit
from placement.drawn_boards import Picture

MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a gang": (
        {"submit": {}},
        {"kind": {"id": 9, "roles": [{"serves": [0]}]}, "ask": {"id": "new1", "kind": 9}},
    ),
    "a gang that waits behind all that is shown": (
        {"priority": {"gang": 7, "value": 5}},
        {"ask": {"id": "g7", "kind": 1}},
    ),
    "a worker": (
        {"add_workers": 1},
        {"workers": [{"worker": {"id": 9, "name": "w9", "host": "h9"}, "serves": []}]},
    ),
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_added_is_of_the_format_of_the_board(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board that tells no format is one of the first."""
    monkeypatch.setattr(layout, "_UNTOLD", 0)
    board = Picture("h0 ..\nX 2").board
    change, preview = MORE[what]
    assert edit(board, [change], [preview]) != board


def test_the_priority_of_a_gang_is_that_of_its_members_that_are_units_of_their_own() -> None:
    board = Picture("h0 aB").board
    gang, member = board.units
    board = board._replace(units=(gang, member._replace(part_of=gang.id)))
    board = edit(board, [{"priority": {"gang": 66, "value": 7}}], [{}])
    assert [unit.priority for unit in board.units] == [7, 7]


def test_with_a_host_go_the_seats_that_were_kept_on_it() -> None:
    board = Picture("h0 AA\nh1 BB\nA leaving\nX 2\nY 1 kept=/Y.").board
    kept = (Kept("g88", (Hold(0, (0,)), Hold(1, (100,))), board.now + 30), *board.kept)
    assert edit(board._replace(kept=kept), [{"remove_host": "h0"}], [{}]).kept == board.kept

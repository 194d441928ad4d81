"""Who is told to stop, and who may be later: what the pictures of test_decide.py do not draw."""

from __future__ import annotations

from dataclasses import replace

from gangq.placement import Board, decide
from placement.drawn_boards import Picture


def with_young(board: Board, *units: str, movable_in_s: float = 60) -> Board:
    """The same board, but these units may be told to stop only then."""
    return replace(
        board,
        units=tuple(
            replace(unit, movable=False, movable_at=board.now + movable_in_s) if unit.id in units else unit
            for unit in board.units
        ),
    )


def test_who_may_be_told_to_stop_later_is_named_with_the_moment() -> None:
    board = with_young(Picture("victims=8\nh0 AB\nX 2 prio=5").board, "g66")
    refused = decide(board)[0].refused
    assert refused is not None
    assert (refused.may_stop, refused.may_stop_at) == (("g66",), board.now + 60)


def test_no_moment_is_told_where_nobody_is_waited_for() -> None:
    """A and B may be told to stop now, but a pass may tell only one. C, on another host, is not needed."""
    board = with_young(Picture("victims=1\nh0 AB\nh1 C.\nX 2 prio=5 strict_pack").board, "g67")
    refused = decide(board)[0].refused
    assert refused is not None
    assert (refused.may_stop, refused.may_stop_at) == ((), None)

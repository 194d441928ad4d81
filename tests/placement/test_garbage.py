"""A pass leaves nothing that garbage collection would have to find: it makes very many objects and no cycles."""

from __future__ import annotations

import gc

from gangq.placement import Board, decide
from placement.drawn_boards import Picture


def test_what_a_pass_has_made_is_gone_when_it_is_over() -> None:
    board = Picture("""
        plans=1 victims=8
        h0 AAAABBBB
        h1 ..
        A ends=600
        X 2
        Y 4 prio=5
        Z 8
        """).board
    decide(board)
    gc.disable()
    try:
        gc.collect()
        actions = {decision.action for decision in decide(board)}
        Board.from_json(board.to_json())
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert actions == {"start", "stop", "plan"}

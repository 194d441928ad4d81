"""A pass does without garbage collection, and needs none."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence

import pytest

from gangq.placement import Board, decide
from gangq.placement.board import Ask
from gangq.placement.collection import uncollected
from gangq.placement.decide import Pass
from gangq.placement.decisions import Refused
from gangq.placement.free import Taken
from placement.drawn_boards import Picture

BOARD = """
plans=1 victims=8
h0 AAAABBBB
h1 ..
A ends=600
X 2
Y 4 prio=5
Z 8
"""


def test_what_a_pass_has_made_is_gone_when_it_is_over() -> None:
    board = Picture(BOARD).board
    decide(board)
    with uncollected():
        gc.collect()
        actions = {decision.action for decision in decide(board)}
        Board.from_json(board.to_json())
        assert gc.collect() == 0
    assert actions == {"start", "stop", "plan"}


def test_nothing_is_collected_in_a_pass_and_afterwards_it_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, seats = [], Pass.seats

    def noted(now: Pass, ask: Ask, counts: Sequence[int]) -> list[Taken] | Refused:
        seen.append(gc.isenabled())
        return seats(now, ask, counts)

    monkeypatch.setattr(Pass, "seats", noted)
    decide(Picture(BOARD).board)
    assert set(seen) == {False}
    assert gc.isenabled()
    with uncollected():
        decide(Picture(BOARD).board)
        assert not gc.isenabled()
    monkeypatch.delattr(Pass, "stopping")
    monkeypatch.delattr(Pass, "failed")
    with pytest.raises(AttributeError):
        decide(Picture(BOARD).board)
    assert gc.isenabled()


def test_a_process_that_is_forked_while_another_thread_decides_collects_its_garbage() -> None:
    """As a handler's loader of data is, in whose worker the control loop decides."""
    begun, over = threading.Event(), threading.Event()

    @uncollected()
    def decides() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=decides)
    thread.start()
    begun.wait()
    pid = os.fork()
    if pid == 0:
        inherited = gc.isenabled()
        decide(Picture(BOARD).board)
        os._exit(0 if inherited and gc.isenabled() else 1)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert gc.isenabled()


def test_passes_of_two_threads_leave_it_as_it_was() -> None:
    """Whichever of them ends first."""
    for first in (0, 1):
        contexts = [uncollected(), uncollected()]
        for context in contexts:
            context.__enter__()
        contexts.pop(first).__exit__(None, None, None)
        assert not gc.isenabled()
        contexts[0].__exit__(None, None, None)
        assert gc.isenabled()

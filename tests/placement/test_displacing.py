"""Who is told to stop, and who may be later: what the pictures of test_decide.py do not draw."""

from __future__ import annotations

import pytest

from gangq.placement import Board, decide, displace
from placement.drawn_boards import Picture, after


def with_young(board: Board, *units: str, movable_in_s: float = 60) -> Board:
    """The same board, but these units may be told to stop only then."""
    return board._replace(
        units=tuple(
            unit._replace(movable=False, movable_at=board.now + movable_in_s) if unit.id in units else unit
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


@pytest.mark.parametrize(("guaranteed", "said"), [("a", "Y stops A"), ("b", "Y waits: room 0 of 2")])
def test_what_a_guarantee_covers_waits_for_no_planned_start_that_borrows(guaranteed: str, said: str) -> None:
    """X of queue b has a planned start on the whole host, which Y would still meet."""
    text = f"""
        plans=1 victims=8
        h0 AABB
        queue a {"least_gpus=2" if guaranteed == "a" else ""}
        queue b {"least_gpus=9" if guaranteed == "b" else ""}
        A prio=9 queue=b ends=100
        B prio=9 queue=b ends=1000 fixed
        X 4 prio=9 queue=b
        Y 2 queue=a ends=9999
        """
    assert said in after(text).splitlines()


@pytest.mark.parametrize(("searches", "action"), [(2, "stop"), (1, "wait")])
def test_after_so_many_searches_in_vain_a_pass_tells_nobody_more(
    searches: int, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search is long. For X two would have to stop, and one is the most; C would make room for Y."""
    monkeypatch.setattr(displace, "SEARCHES", searches)
    board = Picture("victims=1\nh0 AB\nh1 C\nX 2 prio=5 strict_pack\nY 1 prio=5").board
    assert [one.action for one in decide(board)] == ["wait", action]


@pytest.mark.parametrize(("searches", "named"), [(2, ("g66",)), (1, ())])
def test_after_so_many_searches_in_vain_nobody_is_named_who_may_stop_later(
    searches: int, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the end of B would make room for X."""
    monkeypatch.setattr(displace, "SEARCHES", searches)
    board = with_young(Picture("victims=8\nh0 AAAB\nA fixed\nX 4 prio=5\nY 1 prio=5").board, "g66")
    first, second = (one.refused for one in decide(board))
    assert first is not None
    assert second is not None
    assert (first.may_stop, second.may_stop) == ((), named)


def test_nobody_is_named_who_may_stop_only_after_the_planned_start() -> None:
    board = with_young(Picture("plans=1 victims=8\nh0 AB\nA fixed ends=30\nX 1 prio=5").board, "g66")
    (planned,) = decide(board)
    assert planned.refused is not None
    assert (planned.starts_at, planned.refused.may_stop) == (board.now + 30, ())


@pytest.mark.parametrize(("queue", "named"), [("", ("g65",)), ("meek", ())])
def test_in_a_queue_that_displaces_nobody_nobody_is_named_who_may_stop_later(
    queue: str, named: tuple[str, ...]
) -> None:
    board = with_young(Picture(f"victims=8\nh0 A\nqueue q {queue}\nX 1 queue=q prio=5").board, "g65")
    refused = decide(board)[0].refused
    assert refused is not None
    assert refused.may_stop == named


def test_only_what_an_ask_may_displace_is_named_that_may_stop_later() -> None:
    """Y is worth more than A alone. What X asks for its queue is guaranteed, so it may have either."""
    text = "h0 AB\nqueue q least_gpus=1\nA prio=4\nB prio=5\nX 1 queue=q prio=4\nY 1 prio=5"
    board = with_young(Picture(text).board, "g65", "g66")
    named = {one.ask: one.refused.may_stop for one in decide(board) if one.refused}
    assert named == {"g88": ("g65", "g66"), "g89": ("g65",)}

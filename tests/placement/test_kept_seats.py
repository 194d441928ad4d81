"""Seats that are kept for a gang that starts again are its own, whoever comes before it."""

from __future__ import annotations

import random

from test_properties import random_board

from gangq.placement import Board, decide
from gangq.placement.board import Device, Hold, Kept
from gangq.placement.displace import _shares
from gangq.placement.free import Taken
from placement.drawn_boards import Picture, after


def with_kept_seats(board: Board) -> tuple[Board, str] | None:
    """The same board with the seats that the last gang would get kept for it, and all others before it."""
    kinds = {kind.id: kind for kind in board.kinds}
    started = [one for one in decide(board) if one.seats and one.ask.startswith("g")]
    if not started:
        return None
    own = started[-1]
    kind = kinds[next(ask for ask in board.asks if ask.id == own.ask).kind]
    holds = []
    for seat in own.seats:
        needs = kind.roles[seat.role].needs
        holds.append(Hold(seat.worker, seat.devices, needs.memory_mb, needs.millicpus))
    asks = tuple(ask._replace(priority=0 if ask.id == own.ask else 5) for ask in board.asks)
    kept = (Kept(own.ask, tuple(holds), board.now + 30),)
    return board._replace(asks=asks, kept=kept), own.ask


def test_nobody_else_gets_what_is_kept() -> None:
    dice, seen, started = random.Random(1), 0, 0
    for n in range(300):
        board = random_board(dice)._replace(victims=0)
        if (found := with_kept_seats(board)) is None:
            continue
        board, own = found
        devices = {device for hold in board.kept[0].holds for device in hold.devices}
        for decision in decide(board):
            taken = {device for seat in decision.seats for device in seat.devices}
            if decision.ask == own:
                started += bool(decision.seats)
            else:
                assert devices.isdisjoint(taken), (n, decision)
        seen += 1
    assert seen > 50
    assert started > seen / 2


def test_it_names_those_of_which_it_waits_for_the_end() -> None:
    board = Picture("h0 AA\nh1 BB\nA leaving\nB leaving\nX 2 kept=../XX").board
    (one,) = decide(board)
    assert one.refused is not None
    assert (one.refused.gate, one.refused.holders) == ("stopping", ("g66",))


def test_what_is_left_of_two_that_stop_is_shared_as_they_hold_it() -> None:
    a, b, c = (Device(n) for n in range(3))
    held = {"g1": [Taken(0, (a, b), 2, 8, 0)], "g2": [Taken(0, (c,), 1, 8, 0), Taken(1, (), 1, 0, 0)]}
    assert _shares(held, [Taken(0, (b, c), 2, 12, 0), Taken(1, (), 1, 0, 0)]) == {
        "g1": [Taken(0, (b,), 2, 8, 0)],
        "g2": [Taken(0, (c,), 0, 4, 0), Taken(1, (), 1, 0, 0)],
    }


def test_what_a_single_job_starts_on_comes_free_once() -> None:
    """Its seat was kept for it. At 100 it gives one slot back, and the gang needs two."""
    board = Picture("plans=1\nh0 b.\nb ends=1000\nx*1 1 prio=5 ends=100\nY 2 cpu").board
    job = board.asks[0].id
    starts, waits = decide(board._replace(kept=(Kept(job, (Hold(0, (1,)),), board.now + 30),)))
    assert (starts.ask, starts.action) == (job, "start")
    assert (waits.action, waits.starts_at) == ("plan", board.now + 1000)
    assert [end.unit for end in waits.after] == ["j98", job]


def test_a_planned_start_names_each_of_several_that_were_told_to_stop() -> None:
    board = Picture("plans=1\nh0 AB\nh1 CC\nA leaving\nB leaving\nX 2 kept=/CC\nY 2").board
    board = board._replace(kept=(Kept("g9", (Hold(1, (100,)), Hold(1, (101,))), board.now + 30),))
    planned = decide(board)[0]
    assert [(end.unit, end.by) for end in planned.after] == [("g66", "stop"), ("g65", "stop")]


def test_what_is_kept_apart_from_one_of_several_that_stop_starts_once_that_is_gone() -> None:
    text = "plans=1\nh0 AB\nh1 ..\nA leaving apart=db\nB leaving\nX 1 prio=5 kept=../X\nY 2 apart=db"
    assert after(text).splitlines()[-1] == "Y starts in 30 on h0"


def test_a_gang_that_starts_again_elsewhere_leaves_what_it_holds_now() -> None:
    board = Picture("plans=1\nh0 AA\nh1 ..\nA leaving ends=20\nX 2").board
    kept = Kept("g65", (Hold(1, (100,)), Hold(1, (101,))), board.now + 30)
    (planned,) = decide(board._replace(kept=(kept,)))
    assert (planned.starts_at, [seat.worker for seat in planned.planned]) == (board.now + 30, [0, 0])


def test_what_was_kept_for_single_jobs_of_which_none_waits_is_free() -> None:
    board = Picture("h0 A.\nA leaving\nX 1").board
    (starts,) = decide(board._replace(kept=(Kept("k9/0", (Hold(0, (1,)),), board.now + 30),)))
    assert starts.action == "start"

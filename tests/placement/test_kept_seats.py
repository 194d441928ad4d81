"""Seats that are kept for a gang that starts again are its own, whoever comes before it."""

from __future__ import annotations

import random
from dataclasses import replace

from test_properties import random_board

from gangq.placement import Board, decide
from gangq.placement.board import Device, Hold, Kept
from gangq.placement.displace import _shares
from gangq.placement.free import Taken
from placement.drawn_boards import Picture


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
    asks = tuple(replace(ask, priority=0 if ask.id == own.ask else 5) for ask in board.asks)
    kept = (Kept(own.ask, tuple(holds), board.now + 30),)
    return replace(board, asks=asks, kept=kept), own.ask


def test_nobody_else_gets_what_is_kept() -> None:
    dice, seen, started = random.Random(1), 0, 0
    for n in range(300):
        board = replace(random_board(dice), victims=0)
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

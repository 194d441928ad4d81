"""A strategy, an order and a choice of devices are added by a class and a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from drawn_boards import Picture

from gangq.placement import Board, decide
from gangq.placement.board import Ask, Device
from gangq.placement.free import Rooms
from gangq.placement.order import ORDERS, Order
from gangq.placement.strategies import STRATEGIES, Choice, Pack, Strategy, Takes


class WholePairs:
    """Two devices that are joined by NVLink, or none."""

    def devices(self, good: Sequence[Sequence[Device]], count: int) -> Sequence[Device] | None:
        """The first pair."""
        free = [device for equal in good for device in equal]
        for device in free:
            pair = [other for other in free if other.link and other.link == device.link]
            if len(pair) >= count == 2:
                return pair[:2]
        return None


class Paired(Pack):
    """Packed, each member on a pair of its own."""

    choice: Choice = WholePairs()


class OneAHost(Strategy):
    """A member on each of the first hosts that have room, whatever else would fit there."""

    own_hosts = True

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """The first hosts by name."""
        first = sorted(host for _, host in rooms.ascending())[:size]
        return [(host, 1) for host in first] if len(first) == size else None


class SmallestFirst(Order):
    """What needs few members goes first."""

    def key(self, ask: Ask, size: int, /) -> tuple[int, ...]:
        """By size, then age."""
        return size, ask.order


def drawn_with(board: str, strategy: str) -> str:
    """What becomes of a board whose roles all have this strategy."""
    picture = Picture(board)
    kinds = tuple(
        replace(kind, roles=tuple(replace(role, strategy=strategy) for role in kind.roles))
        for kind in picture.board.kinds
    )
    return picture.draw(decide(replace(picture.board, kinds=kinds)))


def test_a_strategy_that_keeps_pairs_on_one_link_is_a_class_and_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRATEGIES, "paired", Paired())
    assert drawn_with("h0 .A...A.. link=01012233\nX 1x2", "paired") == "h0 XAX..A.."
    assert drawn_with("h0 .AA. link=0011\nX 1x2", "pack") == "h0 XAAX"
    assert drawn_with("h0 .AA. link=0011\nX 1x2", "paired") == "h0 .AA.\nX waits: devices"


def test_a_new_strategy_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "one_a_host", OneAHost())
    hosts = "h0 ...\nh1 .A.\nh2 AAA\nh3 A.."
    assert drawn_with(f"{hosts}\nX 2", "one_a_host") == "h0 X..\nh1 XA.\nh2 AAA\nh3 A.."
    assert drawn_with(f"{hosts}\nX 4", "one_a_host") == f"{hosts}\nX waits: hosts 3 of 4"


def test_an_order_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "smallest_first", SmallestFirst())
    picture = Picture("h0 ....\nX 4\nY 1")
    queues = tuple(replace(queue, order="smallest_first") for queue in picture.board.queues)
    board: Board = replace(picture.board, queues=queues)
    assert picture.draw(decide(board)).startswith("h0 Y...")

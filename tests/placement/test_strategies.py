"""A strategy and a policy are added by a class and a line."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from gangq.placement import Board, decide
from gangq.placement.board import Ask, Device, Hold, Kind, Needs, Role, Unit, Worker
from gangq.placement.order import POLICIES, Policy
from gangq.placement.room import Rooms
from gangq.placement.strategies import ALL, STRATEGIES, Pack, Spread, Strategy, Takes
from placement.drawn_boards import Picture


class SpreadOverLinks(Spread):
    """Spread, each member on a link of its own."""

    joined = ALL


class Paired(Pack):
    """Packed, and the GPUs of each member are pairs on a link."""

    joined = 2


class HighestFirst(Pack):
    """Packed, and the devices with the highest numbers are taken first."""

    def devices(self, equal: Sequence[Sequence[Device]], members: int, gpus: int) -> list[Device]:
        """Of what will do, whatever its size."""
        free = sorted((device for devices in equal for device in devices), key=lambda device: -device.id)
        return free[: members * gpus]


class OneAHost(Strategy):
    """A member on each of the first hosts that have room, whatever else would fit there."""

    own_hosts = True

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """The first hosts by name."""
        first = sorted(host for _, host in rooms.ascending())[:size]
        return [(host, 1) for host in first] if len(first) == size else None


class TwoAHost(Strategy):
    """Two members on a host, or none."""

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """The tightest with room for two."""
        hosts = [host for _, host in rooms.ascending(2)][: size // 2]
        return None if size % 2 or len(hosts) < size // 2 else [(host, 2) for host in hosts]


class SmallestFirst(Policy):
    """What needs few members goes first."""

    def key(self, ask: Ask, size: int, /) -> tuple[int, ...]:
        """By size, then age."""
        return size, ask.age


def with_strategy(board: Board, strategy: str) -> Board:
    """The same board, but all roles have this strategy."""
    kinds = tuple(
        kind._replace(roles=tuple(role._replace(strategy=strategy) for role in kind.roles))
        for kind in board.kinds
    )
    return board._replace(kinds=kinds)


def drawn_with(board: str, strategy: str) -> str:
    """What becomes of a board whose roles all have this strategy."""
    picture = Picture(board)
    return picture.draw(decide(with_strategy(picture.board, strategy)))


def test_a_new_strategy_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "one_a_host", OneAHost())
    hosts = "h0 ...\nh1 .A.\nh2 AAA\nh3 A.."
    assert drawn_with(f"{hosts}\nX 2", "one_a_host") == "h0 X..\nh1 XA.\nh2 AAA\nh3 A.."
    assert drawn_with(f"{hosts}\nX 4", "one_a_host") == f"{hosts}\nX waits: hosts 3 of 4"


def test_what_a_new_strategy_cannot_spread_is_told_as_the_room_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is room for five, but for two of four as this strategy spreads them: nothing of one host is told."""
    monkeypatch.setitem(STRATEGIES, "two_a_host", TwoAHost())
    hosts = "h0 AAA.\nh1 AAA.\nh2 A..."
    assert drawn_with(f"{hosts}\nX 2", "two_a_host") == "h0 AAA.\nh1 AAA.\nh2 AXX."
    assert drawn_with(f"{hosts}\nX 4", "two_a_host") == f"{hosts}\nX waits: fragmented 2 of 4"


def test_a_strategy_may_choose_devices_for_all_members_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "highest_first", HighestFirst())
    assert drawn_with("h0 .....A\nX 2x2", "highest_first") == "h0 .XXXXA"
    assert drawn_with("h0 .....A\nX 3", "highest_first") == "h0 ..XXXA"


WRONG: dict[str, Callable[[list[Device], int], list[Device]]] = {
    "too few": lambda free, count: free[: count - 1],
    "too many": lambda free, count: free[: count + 1],
    "one twice": lambda free, count: [free[0]] * count,
    "others": lambda free, count: [Device(99)] * (count - 1) + free[:1],
    "none": lambda free, count: [],
}


@pytest.mark.parametrize("what", WRONG)
def test_an_ask_whose_strategy_chooses_wrong_devices_waits_and_the_strategy_is_named(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Pack):
        def devices(self, equal: Sequence[Sequence[Device]], members: int, gpus: int) -> list[Device]:
            return WRONG[what]([device for devices in equal for device in devices], members * gpus)

    monkeypatch.setitem(STRATEGIES, "wrong", Wrong())
    for size in ("2", "1x2"):
        (decision,) = decide(with_strategy(Picture(f"h0 ...\nX {size}").board, "wrong"))
        assert decision.refused is not None
        assert decision.refused.gate == "error"
        assert "strategy wrong chose" in decision.refused.where, decision.refused.where
        assert "h0" in decision.refused.where, decision.refused.where


def test_a_new_policy_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "smallest_first", SmallestFirst())
    picture = Picture("h0 ....\nX 4\nY 1")
    queues = tuple(queue._replace(policy="smallest_first") for queue in picture.board.queues)
    board: Board = picture.board._replace(queues=queues)
    assert picture.draw(decide(board)).startswith("h0 Y...")


# Members whose GPUs have to be joined -----------------------------------------------------------------------

LINKED = {
    "it takes a whole pair where any other two would be nearer": (
        "h0 .AA. link=0011\nh1 ..AA link=0011\nX 1x2",
        "h0 .AA.\nh1 XXAA",
    ),
    "it waits for a pair, and says so": (
        "h0 .AA. link=0011\nX 1x2",
        "h0 .AA.\nX waits: fragmented 0 of 1",
    ),
    "each member has a link of its own, and the tightest is taken": (
        "h0 .......A link=00001111\nX 2x3",
        "h0 XXX.XXXA",
    ),
    "what nothing joins is joined with nothing": (
        "h0 .... \nh1 A..A link=0110\nX 1x2",
        "h0 ....\nh1 AXXA",
    ),
    "a member of one GPU needs no link": ("h0 .A.A link=0011\nX 2", "h0 XAXA"),
    "only large ones of a link count": (
        "h0 .... link=0011 vram=24,80\nh1 .... link=0011 vram=80,80,24,24\nX 1x2 vram=40",
        "h0 ....\nh1 XX..",
    ),
    "who is told to stop frees a pair, though others are cheaper": (
        "victims=8\nh0 abAA link=0011\na lost=1\nb lost=2\nA prio=9\nh1 c..d link=0011\nc lost=3\nd lost=4\n"
        "X 1x2 prio=1",
        "h0 abAA\nh1 c..d\nX stops c\nX starts in 30 on h1",
    ),
    "one unit that frees a GPU of each of two pairs makes room for two": (
        "victims=1\nh0 a.a. link=0011\nX 2x2 prio=1",
        "h0 a.a.\nX stops a\nX starts in 30 on h0",
    ),
    "it is planned for the moment at which a pair is free": (
        "plans=1\nh0 .A.B link=0011\nA ends=100\nB ends=50\nX 1x2",
        "h0 .A.B\nX starts in 50 on h0",
    ),
    "one that no worker could ever hold says so": (
        "plans=1\nh0 .A.B link=0011\nX 1x3",
        "h0 .A.B\nX waits: infeasible 0 of 1",
    ),
}


@pytest.mark.parametrize("what", LINKED)
def test_linked(what: str) -> None:
    board, expected = LINKED[what]
    assert drawn_with(board, "linked") == expected


def test_a_strategy_of_ones_own_is_strict_about_links_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "over_links", SpreadOverLinks())
    hosts = "h0 .AA. link=0011\nh1 ..AA link=0011\nh2 ..AA link=0011"
    assert drawn_with(f"{hosts}\nX 2x2", "over_links") == "h0 .AA.\nh1 XXAA\nh2 XXAA"
    assert (
        drawn_with(f"{hosts}\nX 3x2", "over_links")
        == f"{hosts.replace(' link=0011', '')}\nX waits: fragmented 2 of 3"
    )


PAIRED = {
    "pairs on several links": ("h0 ..A.... link=0011223\nX 1x4", "h0 XXA.XX."),
    "a last one alone counts as a pair": (
        "h0 ..A.A.. link=0011223\nX 1x3",
        "h0 ..A.A..\nX waits: fragmented 0 of 1",
    ),
    "a last one alone is out of a pair": ("h0 ..A... link=001122\nX 1x3", "h0 XXA.X."),
    "who is told to stop frees pairs": (
        "victims=8\nh0 a.b... link=001123\na lost=1\nb lost=2\nX 1x4 prio=1",
        "h0 a.b...\nX stops a b\nX starts in 30 on h0",
    ),
}


@pytest.mark.parametrize("what", PAIRED)
def test_a_strategy_of_pairs_is_a_class_with_one_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "paired", Paired())
    board, expected = PAIRED[what]
    assert drawn_with(board, "paired") == expected


def test_what_is_short_is_counted_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "paired", Paired())
    for gpus, short in {8: (8, 6), 7: (8, 6), 5: None}.items():
        board = with_strategy(Picture(f"h0 ..A..A..A link=001112223\nX 1x{gpus}").board, "paired")
        (decision,) = decide(board)
        assert (decision.refused and [(one.need, one.have) for one in decision.refused.short]) == (
            short and [short]
        )


def some_workers(dice: random.Random) -> tuple[tuple[Worker, ...], tuple[Unit, ...]]:
    """Small hosts with links and devices of two sizes, and single jobs that hold some of these."""
    workers, units = [], []
    for n in range(dice.randint(1, 4)):
        devices = tuple(
            Device(10 * n + d, dice.choice([24, 80]), dice.choice(["", "x", "x", "y"]))
            for d in range(dice.randint(1, 6))
        )
        workers.append(Worker(n, f"w{n}", f"h{n}", slots=dice.randint(1, 6), devices=devices))
        for device in devices:
            if (
                dice.random() < 0.3
                and sum(hold.worker == n for u in units for hold in u.holds) < workers[n].slots
            ):
                units.append(
                    Unit(f"j{device.id}", (Hold(n, (device.id,)),), dice.choice([50.0, 100.0]), movable=True)
                )
    return tuple(workers), tuple(units)


def room_by_links(workers: Sequence[Worker], units: Sequence[Unit], needs: Needs, part: int) -> int:
    """How many members fit of which links join so many GPUs each, by counting link by link."""
    total, parts = 0, math.ceil(needs.gpus / part)
    for worker in workers:
        holds = [hold for unit in units for hold in unit.holds if hold.worker == worker.id]
        held = {device for hold in holds for device in hold.devices}
        good = [d for d in worker.devices if d.id not in held and d.vram_mb >= needs.vram_mb]
        links = Counter(device.link or f"alone {device.id}" for device in good)
        total += min(worker.slots - len(holds), sum(n // part for n in links.values()) // parts)
    return total


@pytest.mark.parametrize("strategy", ["linked", "paired"])
def test_a_gang_that_needs_links_starts_stops_others_or_waits_exactly_by_the_room_of_links(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STRATEGIES, "paired", Paired())
    dice, seen = random.Random(1), Counter[str]()
    for n in range(600):
        workers, units = some_workers(dice)
        needs = Needs(
            dice.choice([1, 2, 2, 3] if strategy == "linked" else [2, 3, 4, 4]), dice.choice([0, 0, 40])
        )
        part = min(needs.gpus, STRATEGIES[strategy].joined)
        size = dice.randint(1, 3)
        role = Role(needs, size, size, strategy=strategy)
        board = Board(
            0.0,
            workers,
            units,
            (Kind(1, (role,)),),
            (Ask("g1", 1, priority=1),),
            planned_starts=1,
            victims=99,
        )
        (one,) = decide(board)
        seen[one.action] += 1
        links = {device.id: device.link or f"alone {device.id}" for w in workers for device in w.devices}
        for seat in one.seats or one.planned:
            for at in range(0, needs.gpus, part):
                assert len({links[device] for device in seat.devices[at : at + part]}) == 1, (n, one)
        stopped = [unit for unit in units if unit.id in one.stop]
        left = [unit for unit in units if unit not in stopped]
        fits = (
            room_by_links(workers, units, needs, part) >= size,
            room_by_links(workers, (), needs, part) >= size,
        )
        assert one.action == {(True, True): "start", (False, True): "stop", (False, False): "wait"}[fits], (
            n,
            one,
        )
        if one.action == "stop":
            assert room_by_links(workers, left, needs, part) >= size, (n, one)
            for unit in stopped:
                spared = [*left, unit]
                assert room_by_links(workers, spared, needs, part) < size, (n, one, "in vain")
        if one.action == "wait":
            assert one.refused is not None
            assert (one.refused.gate, one.refused.have) == (
                "infeasible",
                room_by_links(workers, units, needs, part),
            )
    assert min(seen[action] for action in ("start", "stop", "wait")) > 50

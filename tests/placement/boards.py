"""Boards made by hand, and a brute force to compare with what is decided on them.

`Fleet` says what there is, `Role` what a gang asks for; `board()` is what a pass would see of it, from the moment 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gangq.placement import board as seen
from gangq.placement.decide import decide
from gangq.placement.decisions import Refused
from gangq.placement.fit import Search
from gangq.placement.free import Free


def contiguous(names: Sequence[Any]) -> bool:
    """Whether nobody comes back after somebody else."""
    return len([name for name, _ in itertools.groupby(names)]) == len(set(names))


@dataclass(frozen=True)
class Node:
    """A worker: `labels` name its topology domains, `label` is what shapes select by."""

    host: str
    slots: int = 1
    memory: int = 1000
    mcpus: int = 100000
    vrams: tuple[int, ...] = ()
    labels: dict[str, str] = field(default_factory=dict)
    label: str = ""
    open: bool = True
    withheld: int = 0
    """The first so many devices are held by somebody."""


@dataclass(frozen=True)
class Role:
    """What each of `count` members needs, and where."""

    count: int
    gpus: int = 0
    vram: int = 0
    memory: int = 0
    mcpus: int = 0
    strategy: str = "pack"
    require: str | None = None
    prefer: str | None = None
    balanced: bool = False
    label: str | None = None
    avoid: tuple[int, ...] = ()
    most: int | None = None


@dataclass(frozen=True)
class Kind:
    """A gang's whole demand."""

    roles: tuple[Role, ...]
    require: str | None = None
    prefer: str | None = None
    apart: str | None = None
    queue: str = "default"


@dataclass
class Waiting:
    """A gang that waits."""

    kind: Kind
    estimate: float = 3600.0
    priority: int = 0
    submitter: str = "me"


@dataclass(frozen=True)
class Held:
    """A job that runs on a worker (its number from 1) until so many seconds from now."""

    worker: int
    ends: float
    gpus: int = 0
    memory: int = 0
    mcpus: int = 0


@dataclass
class Fleet:
    """Nodes in order of their hosts, and the topology levels."""

    nodes: Sequence[Node]
    levels: tuple[str, ...] = ("host",)

    def __post_init__(self) -> None:
        self.nodes = sorted(self.nodes, key=lambda node: node.host)

    @cached_property
    def hosts(self) -> list[str]:
        return sorted({node.host for node in self.nodes})

    @cached_property
    def devices(self) -> list[tuple[int, int]]:
        """(worker from 0, vram), as the board numbers them from 1."""
        return [(n, vram) for n, node in enumerate(self.nodes) for vram in sorted(node.vrams)]

    def board(
        self,
        kinds: Sequence[Kind] = (),
        gangs: Sequence[Waiting] = (),
        held: Sequence[Held] = (),
        apart: Sequence[tuple[str, str]] = (),
        queues: dict[str, dict[str, Any]] | None = None,
        reservations: int = 0,
    ) -> seen.Board:
        """The board. Workers are numbered from 1, gangs too."""
        kinds = list(dict.fromkeys([*kinds, *(gang.kind for gang in gangs)]))
        labels = sorted({node.label for node in self.nodes})
        units = [*self._units(held), *self._apart(apart)]
        return seen.Board(
            now=0.0,
            workers=tuple(self._worker(n, labels) for n in range(len(self.nodes))),
            units=tuple(units),
            kinds=tuple(self._kind(n, kind, labels) for n, kind in enumerate(kinds, 1)),
            asks=tuple(
                seen.Ask(f"g{n}", kinds.index(g.kind) + 1, g.priority, n, g.submitter, g.estimate)
                for n, g in enumerate(gangs, 1)
            ),
            queues=tuple(seen.Queue(name, **limits) for name, limits in (queues or {"default": {}}).items()),
            levels=self.levels,
            planned_starts=reservations,
            victims=0,
        )

    def _devices(self, n: int) -> tuple[seen.Device, ...]:
        return tuple(
            seen.Device(1000 + d, vram) for d, (worker, vram) in enumerate(self.devices) if worker == n
        )

    def _worker(self, n: int, labels: list[str]) -> seen.Worker:
        node = self.nodes[n]
        return seen.Worker(
            id=n + 1,
            name=f"w{n + 1}",
            host=node.host,
            slots=node.slots,
            memory_mb=node.memory,
            millicpus=node.mcpus,
            devices=self._devices(n),
            class_id=labels.index(node.label),
            domains=tuple(self.path(n, level) for level in self.levels),
            open=node.open,
        )

    def _units(self, held: Sequence[Held]) -> Iterator[seen.Unit]:
        free = {n: list(self._devices(n)) for n in range(len(self.nodes))}
        for n, node in enumerate(self.nodes):
            if node.withheld:
                mine = tuple(device.id for device in free[n][: node.withheld])
                del free[n][: node.withheld]
                yield seen.Unit(f"j{900 + n}", (seen.Hold(n + 1, mine, slots=0),), 1e9)
        for job, one in enumerate(held, 1):
            n = one.worker - 1
            assert len(free[n]) >= one.gpus
            mine = tuple(device.id for device in free[n][: one.gpus])
            del free[n][: one.gpus]
            yield seen.Unit(f"j{job}", (seen.Hold(n + 1, mine, one.memory, one.mcpus),), one.ends)

    def _apart(self, apart: Sequence[tuple[str, str]]) -> Iterator[seen.Unit]:
        for n, (key, host) in enumerate(apart):
            there = next(n for n, node in enumerate(self.nodes) if node.host == host)
            yield seen.Unit(f"g{900 + n}", (seen.Hold(there + 1, slots=0),), 1e9, apart=key)

    @staticmethod
    def _kind(n: int, kind: Kind, labels: list[str]) -> seen.Kind:
        roles = tuple(
            seen.Role(
                seen.Needs(role.gpus, role.vram, role.memory, role.mcpus, frozenset(role.avoid)),
                role.count,
                role.most or role.count,
                frozenset(c for c, label in enumerate(labels) if role.label in (None, label)),
                strategy=role.strategy,
                balanced=role.balanced,
                require=role.require or "",
                prefer=role.prefer or "",
            )
            for role in kind.roles
        )
        return seen.Kind(n, roles, kind.queue, kind.require or "", kind.prefer or "", kind.apart or "")

    def path(self, worker: int, level: str) -> str | None:
        """The domain of a level a worker (from 0) lies in, with the broader ones; None when a label is missing."""
        node = self.nodes[worker]
        if level == "host":
            return node.host
        names = self.levels[: self.levels.index(level) + 1]
        path = [node.host if name == "host" else node.labels.get(name) for name in names]
        return None if None in path else "/".join(str(part) for part in path)

    def _matched(self, worker: int, members: Sequence[Role]) -> bool:
        """Whether these members get their devices on one worker: a matching, by augmenting paths."""
        node = self.nodes[worker]
        mine = [d for d, (on, _) in enumerate(self.devices) if on == worker][node.withheld :]
        wants = [role for role in members for _ in range(role.gpus)]
        owner: dict[int, int] = {}

        def find(want: int, seen: set[int]) -> bool:
            for d in mine:
                role = wants[want]
                if d in seen or self.devices[d][1] < role.vram or 1000 + d in role.avoid:
                    continue
                seen.add(d)
                if d not in owner or find(owner[d], seen):
                    owner[d] = want
                    return True
            return False

        return all(find(want, set()) for want in range(len(wants)))

    def holds(self, worker: int, members: Sequence[Role]) -> bool:
        """Whether one worker holds these members at once."""
        node = self.nodes[worker]
        return (
            node.open
            and len(members) <= node.slots
            and sum(role.memory for role in members) <= node.memory
            and sum(role.mcpus for role in members) <= node.mcpus
            and all(role.label in (None, node.label) for role in members)
            and self._matched(worker, members)
        )

    def obeys(self, kind: Kind, seats: Sequence[Sequence[int]], apart: Sequence[str] = ()) -> bool:
        """Whether seats (of each role, workers from 0) are what the kind asks for, but for what it merely prefers."""
        everybody = [worker for role in seats for worker in role]
        if any(self.nodes[worker].host in apart for worker in everybody):
            return False
        for level, workers in [
            (kind.require, everybody),
            *((role.require, mine) for role, mine in zip(kind.roles, seats, strict=True)),
        ]:
            if level and (
                len({self.path(w, level) for w in workers}) > 1
                or None in {self.path(w, level) for w in workers}
            ):
                return False
        for role, mine in zip(kind.roles, seats, strict=True):
            hosts = Counter(self.nodes[worker].host for worker in mine)
            if role.strategy == "strict_pack" and len(hosts) > 1:
                return False
            if role.strategy == "strict_spread" and max(hosts.values(), default=0) > 1:
                return False
        on = [
            [role for role, mine in zip(kind.roles, seats, strict=True) for w in mine if w == n]
            for n in range(len(self.nodes))
        ]
        return all(not members or self.holds(n, members) for n, members in enumerate(on))

    def placement(self, kind: Kind, apart: Sequence[str] = ()) -> list[tuple[int, ...]] | None:
        """Some placement of the whole gang, by trying all."""

        def ways(done: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
            if len(done) == len(kind.roles):
                yield done
                return
            for mine in itertools.combinations_with_replacement(
                range(len(self.nodes)), kind.roles[len(done)].count
            ):
                if self.obeys(Kind(kind.roles[: len(done) + 1], require=kind.require), [*done, mine], apart):
                    yield from ways([*done, mine])

        return next(ways([]), None)


def seat(
    fleet: Fleet, kind: Kind, apart: Sequence[tuple[str, str]] = (), held: Sequence[Held] = ()
) -> list[list[int]] | None:
    """Where its members sit: of each role the workers (from 0), in rank order."""
    board = fleet.board(gangs=[Waiting(kind)], apart=apart, held=held)
    free = Free(board)
    seats = Search(board, free).seats(board.asks[0], [role.count for role in kind.roles], 0)
    if isinstance(seats, Refused):
        return None
    flat = iter(free.workers[one.worker].id - 1 for one in seats)
    return [[next(flat) for _ in range(role.count)] for role in kind.roles]


@dataclass(frozen=True)
class Decided:
    """What is decided about one gang."""

    gang: int
    action: str
    gate: str | None
    starts_at: float | None
    workers: list[int]
    """Of each member, from 1: now, or as planned."""


def decided(board: seen.Board) -> list[Decided]:
    """What a pass would do with this board, gang by gang, in the order in which they were judged."""
    return [
        Decided(
            int(one.ask[1:]),
            one.action,
            one.refused.gate if one.refused else None,
            one.starts_at,
            [one_seat.worker for one_seat in one.seats or one.planned],
        )
        for one in decide(board)
    ]

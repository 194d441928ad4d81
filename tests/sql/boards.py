"""Boards made by hand, for what decides from a board and reads no table, and a brute force to compare it with.

`Fleet` says what there is, `Role` what a gang asks for; `board()` is the same as `gangq.look()` would have seen it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def _arrays(values: Sequence[list[Any] | None]) -> str:
    """As the text of a jsonb[], because in JSON arrays of arrays mean one of two dimensions."""
    return "{" + ",".join("null" if value is None else f'"{value}"' for value in values) + "}"


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

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self.gpus, self.vram, self.memory, self.mcpus, self.label, self.avoid)


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
    missing: list[int] | None = None
    mates: list[list[int]] | None = None


@dataclass(frozen=True)
class Held:
    """A job that runs on a worker (its number from 1) until so many seconds from now."""

    worker: int
    ends: float
    gpus: int = 0
    memory: int = 0
    mcpus: int = 0
    gang: int | None = None


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
    ) -> dict[str, Any]:
        """The board, for `jsonb_populate_record(null::gangq.board, ...)`."""
        kinds = list(kinds)
        for gang in gangs:
            if gang.kind not in kinds:
                kinds.append(gang.kind)
        queues = dict(sorted((queues or {"default": {}}).items()))
        names = list(queues)
        shapes: list[tuple[Any, ...]] = []
        for kind in kinds:
            for role in kind.roles:
                if role.shape not in shapes:
                    shapes.append(role.shape)
        classes = sorted({node.label for node in self.nodes})
        level = {None: 0} | {name: n + 1 for n, name in enumerate(self.levels)}
        first = [1 + next(i for i, node in enumerate(self.nodes) if node.host == host) for host in self.hosts]
        ids = [1000 + n for n in range(len(self.devices))]
        free = [node.slots for node in self.nodes]
        memory, mcpus = [node.memory for node in self.nodes], [node.mcpus for node in self.nodes]
        holds = [0] * len(self.devices)
        for n, node in enumerate(self.nodes):
            mine = [d for d, (worker, _) in enumerate(self.devices) if worker == n]
            for d in mine[: node.withheld]:
                holds[d] = -1
        for job, job_held in enumerate(held, 1):
            n = job_held.worker - 1
            free[n] -= 1
            memory[n] -= job_held.memory
            mcpus[n] -= job_held.mcpus
            mine = [d for d, (worker, _) in enumerate(self.devices) if worker == n and not holds[d]]
            assert len(mine) >= job_held.gpus
            for d in mine[: job_held.gpus]:
                holds[d] = job
        roles = [role for kind in kinds for role in kind.roles]
        zero = [0] * len(names)

        def setting(key: str, default: Any = None) -> list[Any]:
            return [queue.get(key, default) for queue in queues.values()]

        parents = [
            max(
                (i + 1 for i, up in enumerate(names) if name.startswith(up + ".")),
                default=None,
                key=lambda i: len(names[i - 1]),
            )
            for name in names
        ]
        return {
            "t": NOW.isoformat(),
            "reservations": reservations,
            "preemptions": 0,
            "levels": list(self.levels),
            "worker_ids": [n + 1 for n in range(len(self.nodes))],
            "worker_names": [f"w{n + 1}" for n in range(len(self.nodes))],
            "worker_host": [self.hosts.index(node.host) + 1 for node in self.nodes],
            "worker_open": [node.open for node in self.nodes],
            "worker_class": [classes.index(node.label) + 1 for node in self.nodes],
            "free_slots": free,
            "free_memory": memory,
            "free_mcpus": mcpus,
            "all_slots": [node.slots for node in self.nodes],
            "all_memory": [node.memory for node in self.nodes],
            "all_mcpus": [node.mcpus for node in self.nodes],
            "hosts": self.hosts,
            "host_first": [*first, len(self.nodes) + 1],
            "worker_domains": None
            if len(self.levels) == 1
            else [self.path(n, name) for n in range(len(self.nodes)) for name in self.levels],
            "device_first": [
                1 + sum(1 for worker, _ in self.devices if worker < n) for n in range(len(self.nodes) + 1)
            ],
            "device_ids": ids,
            "device_worker": [worker + 1 for worker, _ in self.devices],
            "device_vram": [vram for _, vram in self.devices],
            "device_held": holds,
            "held_unit": [h.gang or -job for job, h in enumerate(held, 1)],
            "held_job": list(range(1, len(held) + 1)),
            "held_worker": [h.worker for h in held],
            "held_slots": [1] * len(held),
            "held_memory": [h.memory for h in held],
            "held_mcpus": [h.mcpus for h in held],
            "held_gpus": [h.gpus for h in held],
            "held_ends": [(NOW + timedelta(seconds=h.ends)).isoformat() for h in held],
            "queue_names": names,
            "queue_parent": parents,
            "queue_open": setting("open", True),
            "queue_policy": setting("policy", "priority"),
            "queue_weight": setting("weight", 1.0),
            "queue_maximum": setting("maximum"),
            "queue_guaranteed": setting("guaranteed"),
            "queue_max_gangs": setting("max_gangs"),
            "queue_max_jobs": setting("max_jobs"),
            "queue_submitter_maximum": setting("submitter_maximum"),
            "queue_preempts": setting("preempts", True),
            "used_gangs": zero,
            "used_jobs": zero,
            "used_gpus": zero,
            "used_memory": zero,
            "used_mcpus": zero,
            "usage_submitters": {},
            "shape_ids": list(range(1, len(shapes) + 1)),
            "shape_gpus": [s[0] for s in shapes],
            "shape_vram": [s[1] for s in shapes],
            "shape_memory": [s[2] for s in shapes],
            "shape_mcpus": [s[3] for s in shapes],
            "shape_avoid": _arrays([list(s[5]) or None for s in shapes]),
            "shape_serves": [s[4] is None or s[4] == label for s in shapes for label in classes],
            "classes": len(classes),
            "kind_ids": [n + 1 for n in range(len(kinds))],
            "kind_queue": [names.index(kind.queue) + 1 for kind in kinds],
            "kind_require": [level[kind.require] for kind in kinds],
            "kind_prefer": [level[kind.prefer] for kind in kinds],
            "kind_apart": [kind.apart for kind in kinds],
            "kind_first_role": [1 + sum(len(k.roles) for k in kinds[:n]) for n in range(len(kinds))],
            "kind_roles": [len(kind.roles) for kind in kinds],
            "role_names": [f"r{n}" for n in range(len(roles))],
            "role_shape": [shapes.index(role.shape) + 1 for role in roles],
            "role_min": [role.count for role in roles],
            "role_max": [role.most or role.count for role in roles],
            "role_strategy": [role.strategy for role in roles],
            "role_require": [level[role.require] for role in roles],
            "role_prefer": [level[role.prefer] for role in roles],
            "role_balanced": [role.balanced for role in roles],
            "gang_ids": [n + 1 for n in range(len(gangs))] or None,
            "gang_kind": [kinds.index(gang.kind) + 1 for gang in gangs],
            "gang_priority": [gang.priority for gang in gangs],
            "gang_order_key": [(1000 - gang.priority) << 50 | n for n, gang in enumerate(gangs)],
            "gang_submitter": [gang.submitter for gang in gangs],
            "gang_estimate": [gang.estimate for gang in gangs],
            "gang_missing": _arrays([gang.missing for gang in gangs]),
            "gang_anchor": _arrays([gang.mates for gang in gangs]),
            "gang_preempting": [False] * len(gangs),
            "apart_keys": [key for key, _ in apart],
            "apart_hosts": [self.hosts.index(host) + 1 for _, host in apart],
            "apart_gangs": [0] * len(apart),
        }

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
    db: psycopg.Connection[Any], fleet: Fleet, kind: Kind, apart: Sequence[tuple[str, str]] = (), **board: Any
) -> list[list[int]] | None:
    """What `gangq.seat_gang` says: of each role the workers (from 0), in rank order."""
    row = db.execute(
        "select gangq.seat_gang(b, 1, %(counts)s::integer[], b.free_slots, b.free_memory, b.free_mcpus, "
        "b.device_held, "
        "z.none, z.none::bigint[], z.none::bigint[], z.none) as seats "
        "from jsonb_populate_record(null::gangq.board, %(board)s) b "
        "cross join lateral (select array_fill(0, array[cardinality(b.worker_ids)]) as none) z",
        {
            "board": Jsonb(fleet.board([kind], apart=apart, **board)),
            "counts": [role.count for role in kind.roles],
        },
    ).fetchone()
    assert row is not None
    if row["seats"] is None:
        return None
    flat = [worker - 1 for worker in row["seats"]]
    assert len(flat) == sum(role.count for role in kind.roles)
    ends = list(itertools.accumulate(role.count for role in kind.roles))
    return [flat[end - role.count : end] for end, role in zip(ends, kind.roles, strict=True)]

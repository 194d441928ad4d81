"""What a worker has room for: the one rule, and what follows from it."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gangq.placement.board import Device, Role
from gangq.placement.decisions import Short
from gangq.placement.strategies import STRATEGIES, by_link

if TYPE_CHECKING:
    from gangq.placement.free import Taken


class WorkerState(NamedTuple):
    """What is free on a worker: all that decides how many members it has room for."""

    class_id: int
    slots: int
    memory_mb: int
    millicpus: int
    vrams: tuple[int, ...]
    """The memory of each free device, smallest first."""
    links: tuple[tuple[int, ...], ...] = ()
    """The same of those that one link joins, link by link; empty where no role of the board needs to know."""


def parts(role: Role) -> tuple[int, int, bool]:
    """How each member takes its GPUs: in how many parts, how many GPUs a part has (the last may have fewer), and
    whether one link has to join those of a part. The one rule of links.
    """
    gpus = role.needs.gpus
    if gpus < 2:
        return 1, gpus, False
    # An ask whose strategy is unknown has been refused by a gate; other asks on its board go on.
    strategy = STRATEGIES.get(role.strategy)
    if strategy is None or strategy.joined < 2:
        return 1, gpus, False
    size = min(gpus, strategy.joined)
    return -(-gpus // size), size, True


def linked(role: Role) -> bool:
    """Whether links have to join GPUs of each member."""
    return parts(role)[2]


def link_groups(role: Role, devices: Sequence[Device]) -> Sequence[Sequence[Device]]:
    """Devices of one worker in groups: each part of a member comes out of one of them."""
    return by_link(devices) if linked(role) else [devices]


def room_by(state: WorkerState, role: Role) -> dict[str, int]:
    """How many members of a role each thing alone that they need leaves room for on a worker in this state; nothing
    where it does not serve the role. The one rule of room; :func:`lacking` and :func:`most_gained` follow from it.
    """
    if state.class_id not in role.serves:
        return {}
    needs, room = role.needs, {"slots": state.slots}
    if needs.memory_mb:
        room["memory_mb"] = state.memory_mb // needs.memory_mb
    if needs.millicpus:
        room["cpus"] = state.millicpus // needs.millicpus
    if needs.gpus:
        each, size, joined = parts(role)
        if joined:
            room["gpus"] = sum([_enough(vrams, needs.vram_mb) // size for vrams in state.links]) // each
        else:
            room["gpus"] = _enough(state.vrams, needs.vram_mb) // size
    return room


def _enough(vrams: tuple[int, ...], vram_mb: int) -> int:
    return len(vrams) - bisect_left(vrams, vram_mb)


def spare(state: WorkerState, role: Role) -> tuple[int, int, int, int]:
    """The free slots, memory, processors and large enough GPUs of a worker in this state; none where it does not
    serve the role.
    """
    if state.class_id not in role.serves:
        return 0, 0, 0, 0
    gpus = _enough(state.vrams, role.needs.vram_mb)
    return max(0, state.slots), max(0, state.memory_mb), max(0, state.millicpus), gpus


def fits(state: WorkerState, role: Role) -> int:
    """How many members of a role a worker in this state holds."""
    return max(0, min(room_by(state, role).values(), default=0))


def lacking(state: WorkerState, role: Role) -> tuple[Short, ...]:
    """What one more member than fit lacks on a worker in this state; nothing where it does not serve the role."""
    room, needs = room_by(state, role), role.needs
    if not room:
        return ()
    members = max(0, min(room.values()))
    short = []
    if room["slots"] <= members:
        short.append(Short("slots", 1, max(0, state.slots - members)))
    if needs.memory_mb and room["memory_mb"] <= members:
        short.append(Short("memory_mb", needs.memory_mb, max(0, state.memory_mb - members * needs.memory_mb)))
    if needs.millicpus and room["cpus"] <= members:
        left = max(0, state.millicpus - members * needs.millicpus)
        short.append(Short("cpus", needs.millicpus / 1000, left / 1000))
    if needs.gpus and room["gpus"] <= members:
        each, size, joined = parts(role)
        groups = state.links if joined else (state.vrams,)
        free = [_enough(vrams, needs.vram_mb) for vrams in groups]
        alone = _enough(state.vrams, needs.vram_mb) - sum(free)
        whole = sum([n // size for n in free]) - members * each
        # Beside whole parts the largest of the broken ones; a GPU that nothing joins is one as well.
        left = whole * size + max([min(alone, 1), *(n % size for n in free)])
        short.append(Short("linked GPUs" if joined else "gpus", each * size, left))
    return tuple(short)


def most_gained(role: Role, seats: Iterable[Taken]) -> int:
    """How many members more there is room for, at most, once the GPUs of these seats come free.

    n GPUs of one group, with those that are free already, make room for no more than n / g more parts of g GPUs,
    rounded up; and n parts of a worker for no more than n / p more members of p parts. Whether they are large enough
    is not asked.
    """
    each, size, joined = parts(role)
    if not joined:  # As below, with one group a seat: this is asked of every unit that may be told to stop.
        return sum([-(-len(seat.devices) // size) for seat in seats])
    gained = [sum([-(-len(group) // size) for group in by_link(seat.devices)]) for seat in seats]
    return sum([-(-more // each) for more in gained])


class Rooms:
    """How many members of one role each host has room for."""

    def __init__(
        self,
        groups: dict[int, list[Sequence[int]]],
        skipped: frozenset[int],
        ones: dict[int, list[int]],
    ) -> None:
        """``groups``: hosts by room, but for the ``skipped``; ``ones``: hosts that were looked at one by one."""
        self._groups = groups
        self._skipped = skipped
        self._ones = ones
        self.sizes = sorted({*groups, *ones})

    @property
    def total(self) -> int:
        """Room in all hosts together."""
        if not self._skipped:
            grouped = sum(room * sum(map(len, hosts)) for room, hosts in self._groups.items())
            return grouped + sum(room * len(hosts) for room, hosts in self._ones.items())
        return sum(room for room, _ in self.ascending())

    def of(self, room: int) -> Iterator[int]:
        """The hosts with exactly this room, in order."""
        groups, ones = self._groups.get(room, ()), self._ones.get(room)
        grouped: Iterable[int] = groups[0] if len(groups) == 1 else heapq.merge(*groups)
        if self._skipped:
            grouped = (host for host in grouped if host not in self._skipped)
        return heapq.merge(grouped, ones) if ones else iter(grouped)

    def ascending(self, least: int = 1) -> Iterator[tuple[int, int]]:
        """(room, host), the tightest first, from this room on."""
        for room in self.sizes[bisect_left(self.sizes, least) :]:
            for host in self.of(room):
                yield room, host

    def descending(self) -> Iterator[tuple[int, int]]:
        """(room, host), the roomiest first."""
        for room in reversed(self.sizes):
            for host in self.of(room):
                yield room, host

    def tightest(self, size: int) -> tuple[int, int] | None:
        """The host that holds so many and little more."""
        return next(self.ascending(size), None)

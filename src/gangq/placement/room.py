"""What a worker has room for: the one rule, and what follows from it."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gangq.placement.board import Role
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


def linked(role: Role) -> bool:
    """Whether the GPUs of each member have to be joined by one link."""
    if role.needs.gpus < 2:
        return False
    # An ask whose strategy is unknown has been refused by a gate; other asks on its board go on.
    strategy = STRATEGIES.get(role.strategy)
    return strategy is not None and strategy.linked


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
    if needs.gpus and linked(role):
        room["gpus"] = sum([_enough(vrams, needs.vram_mb) // needs.gpus for vrams in state.links])
    elif needs.gpus:
        room["gpus"] = _enough(state.vrams, needs.vram_mb) // needs.gpus
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
        good = _enough(state.vrams, needs.vram_mb)
        if linked(role):
            joined = [_enough(vrams, needs.vram_mb) for vrams in state.links]
            best = max([min(good - sum(joined), 1), *(free % needs.gpus for free in joined)])
            short.append(Short("linked GPUs", needs.gpus, best))
        else:
            short.append(Short("gpus", needs.gpus, good - members * needs.gpus))
    return tuple(short)


def most_gained(role: Role, seats: Iterable[Taken]) -> int:
    """How many members more there is room for, at most, once the GPUs of these seats come free.

    n GPUs of a worker, with those that are free already, make room for no more than n / g more members, rounded up,
    where each needs g and any g will do. Where a link has to join them, that holds of each link. Whether they are
    large enough is not asked.
    """
    gpus = role.needs.gpus
    if linked(role):
        return sum([-(-len(group) // gpus) for seat in seats for group in by_link(seat.devices)])
    return sum([-(-len(seat.devices) // gpus) for seat in seats])


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

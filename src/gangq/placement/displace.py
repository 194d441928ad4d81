"""Who is told to stop so that something else can start: the fewest, the cheapest, and never in vain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gangq.placement.board import Ask, Board
from gangq.placement.decisions import Refused
from gangq.placement.fit import Search
from gangq.placement.free import Taken
from gangq.placement.limits import Amount, Usage

TRIES = 64
"""How many ways one ask may cost to look at."""


class Displacer:
    """Chooses victims among the units of a board."""

    def __init__(self, board: Board, search: Search, usage: Usage) -> None:
        self._search = search
        self._usage = usage
        self._units = {unit.id: unit for unit in board.units}
        self._holds = {unit.id: search.free.held_by(unit.holds) for unit in board.units}
        self._told: set[str] = set()
        self._left = board.victims
        self._in_vain: dict[int, int] = {}
        """Of each kind the highest priority at which nobody could be told to stop for it."""
        self._lowest = min((unit.priority for unit in board.units if unit.movable), default=None)

    def holds(self, unit: str) -> list[Taken]:
        """What a unit of the board holds."""
        return self._holds[unit]

    def choose(
        self, ask: Ask, counts: Sequence[int], layer: int
    ) -> tuple[tuple[str, ...], list[Taken]] | Refused:
        """The units to tell to stop so that an ask fits, and its seats then. Nobody is told in vain: the seats are
        found on what is free once they are gone.

        An ask may displace what has a lower priority, and, where the guarantee of its queue covers it, what other
        queues have beyond theirs.
        """
        kind = self._search.kinds[ask.kind]
        queue = self._usage.path(kind.queue)[0]
        in_vain = self._in_vain.get(ask.kind)
        if (
            not queue.displaces
            or self._lowest is None
            or not self._left
            or (in_vain is not None and ask.priority <= in_vain)
        ):
            return Refused("displace")
        asked = Amount.asked(kind, counts, gangs=not ask.single)
        owed = self._usage.covered_by(kind.queue, asked)
        if owed is None and self._lowest >= ask.priority:
            return Refused("displace")
        candidates = self._candidates(ask, owed.name if owed else None)
        found = self._fewest(ask, counts, layer, candidates)
        if isinstance(found, Refused) or len(found[0]) > self._left:
            self._in_vain[ask.kind] = max(ask.priority, in_vain if in_vain is not None else ask.priority)
            return (
                found
                if isinstance(found, Refused)
                else Refused("displace", len(found[0]), self._left, "units")
            )
        self._left -= len(found[0])
        return found

    def left_over(self, victims: Sequence[str], left: list[Taken]) -> None:
        """These units have been told to stop; this is what nobody has yet of what they hold."""
        for unit in victims:
            self._told.add(unit)
            self._holds[unit] = left
            left = []

    def _candidates(self, ask: Ask, owed: str | None) -> list[str]:
        """Who may be told to stop, the cheapest first: priority, work lost, youngest. No queue loses what it is
        guaranteed.
        """
        path = {up.name for up in self._usage.path(self._search.kinds[ask.kind].queue)}
        gone: dict[str, Amount] = defaultdict(Amount)
        for unit in self._units.values():
            if unit.leaving or unit.id in self._told:
                for up in self._usage.path(unit.queue):
                    gone[up.name].add(Amount.held(unit))
        chosen = []
        for unit in sorted(self._units.values(), key=lambda u: (u.priority, u.lost_s, -u.since)):
            elsewhere = owed is not None and all(up.name != owed for up in self._usage.path(unit.queue))
            if not unit.movable or unit.leaving or unit.id in self._told:
                continue
            if not (unit.priority < ask.priority or elsewhere):
                continue
            if not any(self._search.free.workers[hold.worker].open for hold in self._holds[unit.id]):
                continue
            lost = Amount.held(unit)
            if self._usage.may_lose(unit.queue, path, lost, gone):
                chosen.append(unit.id)
                for up in self._usage.path(unit.queue):
                    if up.name in path:
                        break
                    gone[up.name].add(lost)
        return chosen

    def _fewest(
        self, ask: Ask, counts: Sequence[int], layer: int, candidates: list[str]
    ) -> tuple[tuple[str, ...], list[Taken]] | Refused:
        """One that suffices, the cheapest such; else as many of the cheapest as suffice, less those not needed."""
        found = self._without(ask, counts, layer, candidates)
        if isinstance(found, Refused):
            return found
        for unit in self._could_suffice(ask, counts, layer, candidates)[:TRIES]:
            found = self._without(ask, counts, layer, [unit])
            if not isinstance(found, Refused):
                return (unit,), found
        low, high = 1, len(candidates)
        while low < high:
            middle = (low + high) // 2
            if isinstance(self._without(ask, counts, layer, candidates[:middle]), Refused):
                low = middle + 1
            else:
                high = middle
        needed = candidates[:low]
        seats = self._without(ask, counts, layer, needed)
        assert not isinstance(seats, Refused)
        used = {seat.worker for seat in seats}
        needed = [unit for unit in needed if any(hold.worker in used for hold in self._holds[unit])]
        for unit in reversed(needed[:TRIES]):
            fewer = [other for other in needed if other != unit]
            without = self._without(ask, counts, layer, fewer)
            if not isinstance(without, Refused):
                needed, seats = fewer, without
        seats = self._without(ask, counts, layer, needed)
        assert not isinstance(seats, Refused)
        return tuple(needed), seats

    def _could_suffice(self, ask: Ask, counts: Sequence[int], layer: int, candidates: list[str]) -> list[str]:
        """Those whose end alone makes room for all members by numbers."""
        free, kind = self._search.free, self._search.kinds[ask.kind]
        roles = [(role, count) for role, count in zip(kind.roles, counts, strict=True) if count]
        room = [free.rooms(role, layer).total for role, _ in roles]
        good = []
        for unit in candidates:
            workers = {hold.worker for hold in self._holds[unit] if free.workers[hold.worker].open}
            before = [sum(free.room_on(w, role, layer) for w in workers) for role, _ in roles]
            free.give(self._holds[unit], self._units[unit].ends_at)
            after = [sum(free.room_on(w, role, layer) for w in workers) for role, _ in roles]
            free.take(self._holds[unit], self._units[unit].ends_at)
            if all(
                have - less + more >= count
                for have, less, more, (_, count) in zip(room, before, after, roles, strict=True)
            ):
                good.append(unit)
        return good

    def _without(
        self, ask: Ask, counts: Sequence[int], layer: int, units: Sequence[str]
    ) -> list[Taken] | Refused:
        """Seats once these units, and all that leaves already, are gone."""
        free = self._search.free
        leaving = {u.id for u in self._units.values() if u.leaving} | self._told | {*units}
        for unit in leaving:
            free.give(self._holds[unit], self._units[unit].ends_at)
        found = self._search.seats(ask, counts, layer, leaving=frozenset(leaving))
        for unit in leaving:
            free.take(self._holds[unit], self._units[unit].ends_at)
        return found


def swap(before: Sequence[Taken], after: Sequence[Taken]) -> tuple[list[Taken], list[Taken]]:
    """What seats ``after`` need beyond what ``before`` holds on the same workers, and what of that is left over."""
    had, will = _by_worker(before), _by_worker(after)
    more = [_beyond(will[worker], had.get(worker)) for worker in sorted(will)]
    left = [_beyond(had[worker], will.get(worker)) for worker in sorted(had)]
    return more, left


def _by_worker(seats: Sequence[Taken]) -> dict[int, Taken]:
    found: dict[int, Taken] = {}
    for seat in seats:
        if seat.worker in found:
            one = found[seat.worker]
            seat = Taken(
                seat.worker,
                one.devices + seat.devices,
                one.slots + seat.slots,
                one.memory_mb + seat.memory_mb,
                one.millicpus + seat.millicpus,
            )
        found[seat.worker] = seat
    return found


def _beyond(one: Taken, other: Taken | None) -> Taken:
    if other is None:
        return one
    return Taken(
        one.worker,
        tuple(device for device in one.devices if device not in other.devices),
        max(0, one.slots - other.slots),
        max(0, one.memory_mb - other.memory_mb),
        max(0, one.millicpus - other.millicpus),
    )

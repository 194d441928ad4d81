"""Planned starts: when something that does not fit now will, if what runs ends when it should."""

from __future__ import annotations

from collections.abc import Sequence

from gangq.placement.board import Ask, Board, Role
from gangq.placement.decisions import Refused
from gangq.placement.fit import Search
from gangq.placement.free import Free, PlannedStart, Taken


class Timeline:
    """What runs on a board, and what the pass starts, in the order of its end."""

    def __init__(self, board: Board, free: Free) -> None:
        self._ends = {unit.id: (unit.ends_at, free.held_by(unit.holds)) for unit in board.units}
        self._not_before: dict[int, float] = {}
        """Of each kind the planned start it has: a later ask of that kind starts no sooner."""

    def add(self, unit: str, ends_at: float, seats: list[Taken]) -> None:
        """A unit ends then, or another time than was known."""
        self._ends[unit] = (ends_at, seats)

    def remove(self, unit: str) -> None:
        """A unit is accounted for in another way."""
        self._ends.pop(unit, None)

    def find(self, search: Search, ask: Ask, counts: Sequence[int]) -> tuple[PlannedStart, Free] | Refused:
        """The first moment at which an ask fits, beside all planned starts there are; and what is free then.

        Those count as placed from now until they end, so what is free only grows with time, and the first moment
        with enough room is found by walking the ends in order.
        """
        free = search.free
        then = free.copy_empty()
        ends = list(self._ends.items())
        for start in free.starts:
            then.take(start.seats, 0)
            ends.append((start.ask, (start.ends_at, list(start.seats))))
        ends.sort(key=lambda end: (end[1][0], end[0]))
        looking = search.on(then)
        kind = search.kinds[ask.kind]
        roles = [(role, count) for role, count in zip(kind.roles, counts, strict=True) if count]
        room = [then.rooms(role, 0).total for role, _ in roles]
        earliest = self._not_before.get(kind.id, 0.0)
        gone = set()
        refused = Refused("never")
        for n, (unit, (ends_at, seats)) in enumerate(ends):
            workers = {seat.worker for seat in seats}
            before = _room_on(then, workers, roles)
            # A plan takes what ends last: what is idle until then is of use to others meanwhile.
            then.rank.update({device.id: -n for seat in seats for device in seat.devices})
            then.give(seats, 0)
            gone.add(unit)
            grown = [more - less for more, less in zip(_room_on(then, workers, roles), before, strict=True)]
            room = [have + more for have, more in zip(room, grown, strict=True)]
            last = n + 1 == len(ends) or ends[n + 1][1][0] > ends_at
            enough = all(have >= count for have, (_, count) in zip(room, roles, strict=True))
            if not last or not enough or ends_at < earliest:
                continue
            found = looking.seats(ask, counts, 0, leaving=frozenset(gone))
            if isinstance(found, Refused):
                refused = found
                continue
            then.take(found, 0)
            self._not_before[kind.id] = ends_at
            return PlannedStart(ask.id, ends_at, ends_at + ask.estimate_s, found), then
        return refused


def _room_on(free: Free, workers: set[int], roles: list[tuple[Role, int]]) -> list[int]:
    """Room for each role on a few workers."""
    return [
        sum(free.room_on(worker, role, 0) for worker in workers if free.workers[worker].open)
        for role, _ in roles
    ]

"""Planned starts: when something that does not fit now will, if what runs ends when it should."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from operator import itemgetter

from gangq.placement.board import Ask, Board, Role
from gangq.placement.decisions import HOLDERS, End, Refused
from gangq.placement.fit import Search
from gangq.placement.free import Free, PlannedStart, Taken, by_worker

Moment = tuple[float, str, list[Taken]]
"""(when, the name of what ends then, what it gives back)"""
_when = itemgetter(0, 1)


class Timeline:
    """What runs on a board, and what the pass starts, in the order of its end."""

    def __init__(self, board: Board, free: Free) -> None:
        self._ends = {unit.id: (unit.ends_at, free.held[unit.id]) for unit in board.units}
        """By name, when it ends and what it gives back then."""
        self._told = {unit.id: End(unit.id, unit.ends_by) for unit in board.units}
        """By name, how that end is told to people."""
        self._moments: list[Moment] = []
        """``_ends`` in order; empty: to be sorted again."""
        self._empty: Free | None = None
        """What is free once everything has ended."""
        self._feasible: set[int] = set()
        """Kinds that fit then."""

    def add(self, name: str, ends_at: float, seats: list[Taken], told: End) -> None:
        """What has this name gives these seats back then, whatever was known of it before."""
        self._ends[name] = (ends_at, list(by_worker(seats).values()))
        self._told[name] = told
        self._moments = []

    def remove(self, name: str) -> None:
        """What has this name gives nothing back."""
        self._ends.pop(name, None)
        self._moments = []

    def find(self, search: Search, ask: Ask, counts: Sequence[int]) -> tuple[PlannedStart, Free] | None:
        """The first moment at which an ask fits, beside all planned starts there are; and what is free then. None: it
        never does.

        The planned starts count as placed from now until they end. So what is free only grows with time.
        """
        if self._empty is None:
            self._empty = search.free.emptied()
        if ask.kind not in self._feasible:
            found = search.on(self._empty).seats(ask, counts, 0, leaving=self._ends)
            if isinstance(found, Refused):
                return None
            self._feasible.add(ask.kind)
        then = search.free.copy(starts=False)
        moments = list(self._in_order())
        for start in search.free.starts:
            then.take(start.held, 0)
            insort(moments, (start.ends_at, start.ask, start.held), key=_when)
        fit = first_fit(search.on(then, search.free.starts), ask, counts, 0, moments)
        if fit is None:
            return None
        starts_at, ended, seats = fit
        apart = search.kinds[ask.kind].apart
        start = PlannedStart(ask.id, starts_at, starts_at + ask.estimate_s, seats, apart)
        then.take(start.held, 0)
        start.after = self._waits_for(start, moments[:ended])
        return start, then

    def _waits_for(self, start: PlannedStart, ended: Sequence[Moment]) -> tuple[End, ...]:
        """What ends last on the workers of a planned start before it, the last of all first."""
        workers = {seat.worker for seat in start.held}
        found: dict[End, None] = {}
        for _, name, held in reversed(ended):
            if any(seat.worker in workers for seat in held):
                found[self._told.get(name) or End(name, "plan")] = None
                if len(found) == HOLDERS:
                    break
        return tuple(found)

    def _in_order(self) -> list[Moment]:
        if not self._moments:
            self._moments = sorted([(at, name, seats) for name, (at, seats) in self._ends.items()], key=_when)
        return self._moments


def first_fit(
    search: Search,
    ask: Ask,
    counts: Sequence[int],
    layer: int,
    moments: Sequence[Moment],
    leaving: Sequence[str] = (),
    together: bool = True,
) -> tuple[float, int, list[Taken]] | None:
    """Let one after another end until an ask fits.

    Args:
        search: on what is free before; afterwards all that ended until then is free there.
        ask: what is to fit.
        counts: its members, by role.
        layer: how many of the planned starts of ``search.free`` it meets.
        moments: in order.
        leaving: names of what has gone before.
        together: what ends at one moment ends together, and not one after the other.

    Returns:
        When, how many of the moments had come then, and the seats; None: it does not fit when all have ended.
    """
    free, kind = search.free, search.kinds[ask.kind]
    roles = [(role, count) for role, count in zip(kind.roles, counts, strict=True) if count]
    room: list[int] = []
    """Room in all for each role. Empty: not counted yet, because slots alone do not suffice."""
    gone = {*leaving}
    for n, (at, name, seats) in enumerate(moments):
        workers = {seat.worker for seat in seats if free.workers[seat.worker].open} if room else ()
        before = _room_on(free, workers, roles, layer)
        free.end(seats, at)
        gone.add(name)
        after = _room_on(free, workers, roles, layer)
        if room:
            room = [have - less + more for have, less, more in zip(room, before, after, strict=True)]
        last = not together or n + 1 == len(moments) or moments[n + 1][0] > at
        if not last or free.slots < sum(counts):
            continue
        room = room or [free.rooms(role, layer).total for role, _ in roles]
        if all(have >= count for have, (_, count) in zip(room, roles, strict=True)):
            found = search.seats(ask, counts, layer, leaving=gone)
            if not isinstance(found, Refused):
                return at, n + 1, found
    return None


def _room_on(
    free: Free, workers: Collection[int], roles: Sequence[tuple[Role, int]], layer: int
) -> list[int]:
    """Room for each role on some workers."""
    return [sum(free.room_on(worker, role, layer) for worker in workers) for role, _ in roles]

"""Which units are told to stop so that an ask can start: the fewest, the cheapest, and none in vain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gangq.placement.board import Ask, Board, Queue
from gangq.placement.decisions import HOLDERS, Refused
from gangq.placement.fit import Search
from gangq.placement.free import Free, Taken, by_worker
from gangq.placement.limits import Amount, Usage
from gangq.placement.plans import first_fit
from gangq.placement.room import most_gained

TRIES = 64
"""How many units are tried alone, and how many of several are tried to be spared."""
SEARCHES = 16
"""How many searches of one pass may find that too many units would have to stop."""

Victims = tuple[tuple[str, ...], list[Taken]]
"""(units to tell to stop, the seats of the ask once they have)"""


class Displacer:
    """Chooses victims among the units of a board.

    What it remembers in a pass, beside what of the board never changes:

    ==============  ========================================================  ======================================
    memory          what it holds                                             until when
    ==============  ========================================================  ======================================
    ``_told``       units that were told to stop for kept seats               the end of the pass
    ``_holds``      what each unit gives back when it ends                    less once some is kept for an ask
    ``_left``       how many more units may be told to stop                   counts down
    ``_searches``   how many more searches may be in vain                     counts down
    ``_in_vain``    by kind, last start met and priority of one in vain       one with a higher priority is in vain
    ``_known``      by rights, candidates, and what is free without them      anything is taken, given or planned
    ``borrowing``   asks with a planned start that no guarantee covers        the end of the pass
    ==============  ========================================================  ======================================
    """

    def __init__(self, board: Board, search: Search, usage: Usage) -> None:
        self._search = search
        self._usage = usage
        self.units = {unit.id: unit for unit in board.units}
        self._holds = dict(search.free.held)
        """By unit; of those told to stop without what is kept for an ask."""
        self._told: set[str] = set()
        self._left = board.victims
        """How many more units may be told to stop in this pass."""
        self._searches = SEARCHES
        """How many more searches may be in vain."""
        self._in_vain: dict[int, tuple[float, int]] = {}
        """By kind, beside which planned starts (:meth:`Free.last_met`) and at which priority nobody could be told to
        stop for one of it.
        """
        self._known: dict[tuple[int, str, str], tuple[list[str], Free]] = {}
        """By priority, queue that is owed something, and path of queues: :meth:`_all_gone`."""
        self._known_at = 0
        """``Free.changes`` when that was true."""
        self._guarded = any(queue.guaranteed for queue in board.queues)
        self._by_cost = sorted(board.units, key=lambda u: (u.priority, u.lost_s, -u.since, u.id[0] == "g"))
        self.borrowing: dict[str, str] = {}
        """Asks with a planned start that no guarantee covers, and their queues: ``Pass.plan`` writes it."""
        young = [unit for unit in board.units if unit.movable_at is not None and not unit.movable]
        self._lowest_young = min((unit.priority for unit in young), default=None)
        """The lowest priority of units that may be told to stop later."""
        self._lowest = min((unit.priority for unit in board.units if unit.movable), default=None)
        """The lowest priority of units that may be told to stop now."""

    def holds(self, unit: str) -> list[Taken]:
        """What a unit of the board gives back when it ends."""
        return self._holds[unit]

    def _held(self, unit: str) -> tuple[list[Taken], float]:
        """The same, and until when."""
        return self._holds[unit], self.units[unit].ends_at

    def choose(self, ask: Ask, counts: Sequence[int], layer: int) -> Victims | None:
        """The units to tell to stop so that an ask fits, and its seats then; None: it may displace none, or that
        would not do. Nobody is told in vain: the seats are found on what is free once they are gone.

        An ask may displace what has a lower priority, and, where the guarantee of its queue covers it, what other
        queues have beyond theirs.
        """
        queue = self._usage.path(self._search.kinds[ask.kind].queue)[0]
        if (
            not queue.displaces
            or not self._left
            or not self._searches
            or self._lowest is None
            or self._known_in_vain(ask, layer)
        ):
            return None
        owed = self._owed(ask, counts)
        if owed is None and self._lowest >= ask.priority:
            return None
        asked_at = layer
        if owed is not None:
            layer = self._beside_owed(owed.name, layer)
        leaving = self._leaving()
        if leaving and not isinstance(
            self._search.on(self._without_leaving()).seats(ask, counts, layer, leaving=leaving), Refused
        ):
            return None  # It fits once all has gone that leaves already.
        candidates, emptied = self._all_gone(ask, owed)
        leaving = self._leaving() | {*candidates}
        found = self._search.on(emptied).seats(ask, counts, layer, leaving=leaving)
        if not isinstance(found, Refused):
            fewest = self._fewest(ask, counts, layer, candidates)
            if fewest is not None and len(fewest[0]) <= self._left:
                self._left -= len(fewest[0])
                return fewest
            self._searches -= 1
        if ask.missing is None and not self._known_in_vain(ask, asked_at):
            self._in_vain[ask.kind] = self._search.free.last_met(asked_at), ask.priority
        return None

    def _known_in_vain(self, ask: Ask, layer: int) -> bool:
        """Whether the search for another of its kind was in vain that met no more planned starts and had no lower
        priority. That says nothing about missing members, which sit beside their mates.
        """
        if ask.missing is not None or ask.kind not in self._in_vain:
            return False
        last_met, priority = self._in_vain[ask.kind]
        return last_met <= self._search.free.last_met(layer) and ask.priority <= priority

    def later(
        self, ask: Ask, counts: Sequence[int], layer: int, before: float
    ) -> tuple[tuple[str, ...], float] | None:
        """Units that may be told to stop for an ask once they have run their minimum time, and the moment from which
        on they may; None: that would not do, or not before the moment ``before``.
        """
        kind, owed = self._search.kinds[ask.kind], self._owed(ask, counts)
        if owed is None and (self._lowest_young is None or self._lowest_young >= ask.priority):
            return None
        young = sorted(
            (unit.movable_at, unit.id)
            for unit in self.units.values()
            if unit.movable_at is not None
            and not unit.movable
            and unit.movable_at < before
            and (unit.priority < ask.priority or self._elsewhere(unit.queue, owed))
        )
        if not young or not self._searches or not self._usage.path(kind.queue)[0].displaces:
            return None
        candidates, emptied = self._all_gone(ask, owed)
        free = emptied.copy(starts=True)
        leaving = self._leaving() | {*candidates}
        for n, (at, unit) in enumerate(young):
            free.end(*self._held(unit))
            leaving |= {unit}
            # A search takes long: one for each moment among the first of them, then one with all of them gone. So the
            # moment said may be later than the first that would do, never too early.
            if n + 1 < len(young) and (young[n + 1][0] == at or n > SEARCHES):
                continue
            found = self._search.on(free).seats(ask, counts, layer, leaving=leaving)
            if not isinstance(found, Refused):
                used = {seat.worker for seat in found}
                needed = [u for _, u in young[: n + 1] if any(h.worker in used for h in self._holds[u])]
                # None of them: those that may stop now would do, if as many may be told in one pass.
                return (tuple(needed[:HOLDERS]), at) if needed else None
        self._searches -= 1
        return None

    def _owed(self, ask: Ask, counts: Sequence[int]) -> Queue | None:
        """The queue whose guarantee covers an ask, if any queue has one."""
        if not self._guarded:
            return None
        kind = self._search.kinds[ask.kind]
        return self._usage.covered_by(kind.queue, Amount.asked(kind, counts, gangs=not ask.single))

    def _elsewhere(self, queue: str, owed: Queue | None) -> bool:
        """Whether a queue lies outside the one to which something is owed, and so may have what is owed."""
        return owed is not None and all(up.name != owed.name for up in self._usage.path(queue))

    def _beside_owed(self, owed: str, layer: int) -> int:
        """The layer for an ask that the guarantee of the queue ``owed`` covers. It need not wait for planned starts
        of asks that no guarantee covers: those at the end of the layer are left out.
        """
        starts = self._search.free.starts
        while layer and (queue := self.borrowing.get(starts[layer - 1].ask)):
            if any(up.name == owed for up in self._usage.path(queue)):
                break
            layer -= 1
        return layer

    def left_over(self, victims: Sequence[str], left: list[Taken]) -> None:
        """These units have been told to stop, and this is what they will give back beyond what is kept for an ask."""
        self._told.update(victims)
        self._holds |= _shares({unit: self._holds[unit] for unit in victims}, left)

    def _candidates(self, ask: Ask, owed: Queue | None) -> list[str]:
        """Units that may be told to stop, the cheapest first: the lowest priority, the least work lost, the youngest.
        No queue loses what it is guaranteed.
        """
        path = {up.name for up in self._usage.path(self._search.kinds[ask.kind].queue)}
        gone: dict[str, Amount] = defaultdict(Amount)
        for unit in self.units.values():
            if unit.leaving or unit.id in self._told:
                for up in self._usage.path(unit.queue):
                    gone[up.name].add(Amount.held(unit))
        chosen = []
        for unit in self._by_cost:
            if not unit.movable or unit.id in self._told:
                continue
            if not (unit.priority < ask.priority or self._elsewhere(unit.queue, owed)):
                continue
            if not any(self._search.free.workers[hold.worker].open for hold in self._holds[unit.id]):
                continue
            if not self._guarded:
                chosen.append(unit.id)
                continue
            lost = Amount.held(unit)
            if self._usage.may_lose(unit.queue, path, lost, gone):
                chosen.append(unit.id)
                for up in self._usage.path(unit.queue):
                    if up.name in path:
                        break
                    gone[up.name].add(lost)
        return chosen

    def _leaving(self) -> frozenset[str]:
        return frozenset({unit.id for unit in self.units.values() if unit.leaving} | self._told)

    def _without_leaving(self) -> Free:
        """What is free once all that leaves already has gone."""
        free = self._search.free.copy(starts=True)
        # In the order of the board: of what ended last devices are taken first.
        for unit in self.units.values():
            if unit.leaving or unit.id in self._told:
                free.end(self._holds[unit.id], unit.ends_at)
        return free

    def _all_gone(self, ask: Ask, owed: Queue | None) -> tuple[list[str], Free]:
        """The candidates, and what is free once all of them have gone; the same for many asks."""
        path = (
            ",".join(up.name for up in self._usage.path(self._search.kinds[ask.kind].queue))
            if self._guarded
            else ""
        )
        key = (ask.priority, owed.name if owed else "", path)
        if self._known_at != self._search.free.changes:
            self._known.clear()
            self._known_at = self._search.free.changes
        if key not in self._known:
            candidates, free = self._candidates(ask, owed), self._without_leaving()
            for unit in candidates:
                free.end(self._holds[unit], self.units[unit].ends_at)
            self._known[key] = candidates, free
        return self._known[key]

    def _fewest(self, ask: Ask, counts: Sequence[int], layer: int, candidates: list[str]) -> Victims | None:
        """The cheapest one that suffices; else as many of the cheapest as suffice, less those not needed."""
        # A copy of what is free: units end in it, one after another, until the ask fits.
        search = self._search.on(self._without_leaving())
        alone = self._alone(search, ask, counts, layer, candidates)
        if alone is None:
            return None
        return self._one(search, ask, counts, layer, alone) or self._several(
            search, ask, counts, layer, candidates
        )

    def _alone(
        self, search: Search, ask: Ask, counts: Sequence[int], layer: int, candidates: list[str]
    ) -> list[str] | None:
        """Units of which one may free enough GPUs, by numbers; None: not even as many as may be told together would.

        A bound, so that not every unit is tried: it asks what GPUs come free (:func:`most_gained`), and not where, or
        beside what else.
        """
        alone = set(candidates)
        for role, count in zip(search.kinds[ask.kind].roles, counts, strict=True):
            if not role.needs.gpus or not count:
                continue
            lacking = count - search.free.room_by_gpus(role, layer, count)
            gains = {unit: most_gained(role, self._holds[unit]) for unit in candidates}
            if sum(sorted(gains.values())[-self._left :]) < lacking:
                return None
            alone &= {unit for unit, gain in gains.items() if gain >= lacking}
        return [unit for unit in candidates if unit in alone][:TRIES]

    def _one(
        self, search: Search, ask: Ask, counts: Sequence[int], layer: int, alone: list[str]
    ) -> Victims | None:
        """The first of these units that suffices by itself, on what is free once all has gone that leaves already."""
        leaving = self._leaving()
        for unit in alone:
            with search.free.ended(*self._held(unit)):
                found = search.seats(ask, counts, layer, leaving=leaving | {unit})
            if not isinstance(found, Refused):
                return (unit,), found
        return None

    def _several(
        self, search: Search, ask: Ask, counts: Sequence[int], layer: int, candidates: list[str]
    ) -> Victims | None:
        """As many of the cheapest as suffice, less those not needed. Uses ``search.free`` up: afterwards it is free
        of other units than before, so do not use it again.
        """
        leaving = self._leaving()
        moments = [(self.units[unit].ends_at, unit, self._holds[unit]) for unit in candidates]
        fit = first_fit(search, ask, counts, layer, moments, leaving=tuple(leaving), together=False)
        if fit is None:
            return None
        _, ended, seats = fit
        # Now `search.free` is what is free without the cheapest, up to the one with which it fits. From here on it is
        # that without those in `needed`.
        used = {seat.worker for seat in seats}
        needed = [u for u in candidates[:ended] if any(hold.worker in used for hold in self._holds[u])]
        spared = {*candidates[:ended]} - {*needed}
        for unit in candidates[:ended]:
            if unit in spared:
                search.free.take(*self._held(unit))
        # The dearest is the first that is tried to be spared.
        for unit in needed[-TRIES:][::-1]:
            fewer = [other for other in needed if other != unit]
            with search.free.taken(*self._held(unit)):
                found = search.seats(ask, counts, layer, leaving=leaving | {*fewer})
            if not isinstance(found, Refused):
                search.free.take(*self._held(unit))
                needed = fewer
        seated = search.seats(ask, counts, layer, leaving=leaving | {*needed})
        return None if isinstance(seated, Refused) else (tuple(needed), seated)


def swap(before: Sequence[Taken], after: Sequence[Taken]) -> tuple[list[Taken], list[Taken]]:
    """What seats ``after`` need beyond what ``before`` holds on the same workers, and what of that is left over."""
    had, will = by_worker(before), by_worker(after)
    more = [_less(will[worker], had.get(worker)) for worker in sorted(will)]
    left = [_less(had[worker], will.get(worker)) for worker in sorted(had)]
    return more, left


def _less(one: Taken, other: Taken | None) -> Taken:
    """What one takes of a worker beyond what the other does."""
    if other is None:
        return one
    return Taken(
        one.worker,
        tuple(device for device in one.devices if device not in other.devices),
        max(0, one.slots - other.slots),
        max(0, one.memory_mb - other.memory_mb),
        max(0, one.millicpus - other.millicpus),
    )


def _shares(held: Mapping[str, Sequence[Taken]], left: Sequence[Taken]) -> dict[str, list[Taken]]:
    """What is left of what several units hold, to each its part: its own devices, and of slots, memory and processors
    as much as it holds, until nothing is left. A unit of which nothing is left on a worker still is on it.
    """
    rest = by_worker(left)
    shares: dict[str, list[Taken]] = {}
    for unit, holds in held.items():
        shares[unit] = []
        for worker, hold in by_worker(holds).items():
            if worker in rest:
                mine = _less(hold, _less(hold, rest[worker]))
                rest[worker] = _less(rest[worker], mine)
                shares[unit].append(mine)
    return shares

"""Why something that waits gets no seats now, in numbers: judged after the search has found none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from gangq.placement import gates
from gangq.placement.board import Ask, Kind
from gangq.placement.decisions import HOLDERS, Refused, Short
from gangq.placement.fit import Search, Wish
from gangq.placement.free import Taken


class WhyNot:
    """Says why, and who holds what is lacking."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._free = search.free
        self._given: dict[int, list[tuple[str, Taken]]] = defaultdict(list)
        """By worker what gangs have got in this pass."""

    def note_given(self, ask: str, seats: Sequence[Taken]) -> None:
        """A gang has these seats from now on, or they are kept for it. Of single jobs it is not known which start."""
        if ask.startswith("g"):
            for seat in seats:
                self._given[seat.worker].append((ask, seat))

    def say(self, ask: Ask, counts: Sequence[int], layer: int, found: Refused) -> Refused:
        """Why there are no seats for an ask: the first of these that is true.

        1. ``planned_start``: it would fit, were it not for the planned starts that it would delay.
           Where some of it would, the numbers below are of all that is free, and it is named what they keep of that.
        2. ``workers``: no worker serves it, or none of those that do takes work.
        3. ``apart``: it would fit, were it not to be kept apart from others.
        4. What the search has ``found``; of room with what is short on the worker that is nearest to having it.
           ``fragmented`` in place of ``room``, where all that is free on its workers together would be enough.
        """
        kind = self._search.kinds[ask.kind]
        idle = self._search.seats(ask, counts, 0) if layer else found
        if not isinstance(idle, Refused):
            return self._planned_before(ask, layer)
        return (
            self._search.unserved(kind, counts)
            or self._search.kept_apart(ask, counts, layer)
            or self._beside_plans(ask, counts, layer, found, self._short(ask, kind, counts, idle))
        )

    def _beside_plans(
        self, ask: Ask, counts: Sequence[int], layer: int, found: Refused, idle: Refused
    ) -> Refused:
        """The refusal on all that is ``idle``, and which planned starts keep some of that."""
        if found.have >= idle.have:
            return idle
        keep, have = [], idle.have
        for n, start in enumerate(self._free.starts[:layer], 1):
            beside = found if n == layer else self._search.seats(ask, counts, n)
            if isinstance(beside, Refused) and beside.have < have:
                keep.append(start.ask)
                have = beside.have
        return idle._replace(plans=tuple(keep[:HOLDERS]), left=found.have)

    def _planned_before(self, ask: Ask, layer: int) -> Refused:
        starts = self._free.starts[:layer]
        return Refused(
            gates.PLANNED_START,
            ask.estimate_s,
            starts[0].starts_at - self._search.board.now,
            "seconds",
            holders=tuple(start.ask for start in starts)[:HOLDERS],
            at=starts[0].starts_at,
        )

    def _short(self, ask: Ask, kind: Kind, counts: Sequence[int], found: Refused) -> Refused:
        # Of several roles it is not known here what those before the one refused have taken.
        if found.gate != gates.ROOM or len(kind.roles) > 1:
            return found
        wish = self._search.beside_mates(ask, kind, 0, Wish(self._search.hosts_of_others(ask)))
        nearest = self._free.nearest(kind.roles[0], 0, wish.without, wish.only)
        if nearest is None:
            return found
        number, short = nearest
        together = self._free.enough_in_all(kind.roles[0], counts[0], 0, wish.without, wish.only)
        return found._replace(
            gate=gates.FRAGMENTED if together else found.gate,
            nearest=self._free.workers[number].name,
            short=short,
            holders=self._holders(number, short),
        )

    def _holders(self, worker: int, short: Sequence[Short]) -> tuple[str, ...]:
        """The units and asks that hold something of what is short on a worker."""
        names = []
        for name, held in [*self._units_on[worker], *self._given[worker]]:
            things = {"slots": held.slots, "memory_mb": held.memory_mb, "cpus": held.millicpus}
            if any(things.get(one.of, held.devices) for one in short):
                names.append(name)
        return tuple(dict.fromkeys(names))[:HOLDERS]

    @cached_property
    def _units_on(self) -> dict[int, list[tuple[str, Taken]]]:
        """By worker what the units of the board hold there."""
        there = defaultdict(list)
        for unit, seats in self._free.held.items():
            for held in seats:
                there[held.worker].append((unit, held))
        return there

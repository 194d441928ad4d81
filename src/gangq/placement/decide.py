"""The loop: every ask of a board gets one decision."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from math import inf as INFINITY
from typing import NamedTuple

from gangq.placement import gates
from gangq.placement.board import Ask, Board, Hold, Kind, Place, Unit
from gangq.placement.decisions import HOLDERS, Decision, End, Refused, Seat
from gangq.placement.displace import Displacer, swap
from gangq.placement.fit import Search
from gangq.placement.free import Free, Taken, by_worker
from gangq.placement.limits import Amount, Usage
from gangq.placement.order import POLICIES, Turns
from gangq.placement.places import Places, Rivals
from gangq.placement.plans import Timeline
from gangq.placement.strategies import STRATEGIES
from gangq.placement.why import WhyNot


def decide(board: Board) -> list[Decision]:
    """What to do now with all that waits, and with what must move.

    The asks are judged one after another, as the orders of the queues say. An ask starts if it fits without delaying
    the planned starts of those before it. Otherwise units are told to stop for it, if it may displace any; otherwise
    it gets a planned start, if fewer than ``board.planned_starts`` have one; otherwise it waits. The single jobs of
    one kind and priority are one ask with many turns. An ask about which deciding fails waits, and says so.

    Returns:
        One decision per ask, in the order in which they were judged first; then one for each unit that moves.
    """
    now = Pass(board)
    for ask in now.turns:
        try:
            judge(now, ask)
        except Exception as problem:
            now.failed(ask, problem)
    told = {unit for decision in now.decisions.values() for unit in decision.stop}
    for unit in board.units:
        if unit.drained and not unit.leaving and unit.id not in told and unit.ask is not None:
            try:
                now.move(unit, unit.ask)
            except Exception as problem:
                now.failed(unit.ask, problem)
    places = Places(board, now.rivals)
    singles = {ask.id: ask for ask in board.asks if ask.single}
    for name, decision in now.decisions.items():
        if name in singles:
            try:
                decision.seats = places.seats(decision.seats, singles[name])
                decision.refills = places.refills(singles[name])
            except Exception as problem:
                now.failed(singles[name], problem)
    return list(now.decisions.values())


def judge(now: Pass, ask: Ask) -> None:
    """Decide about one ask, on what those before it have left."""
    kind, counts = now.kinds[ask.kind], counts_of(ask, now.kinds[ask.kind])
    for check in CHECKS:
        if refused := check(now, ask, kind, counts):
            now.wait(ask, refused)
            return
    seats = now.seats(ask, counts)
    if not isinstance(seats, Refused):
        now.start(ask, *now.grow(ask, counts, seats))
        if ask.count > 1:
            now.turns.again(ask._replace(count=ask.count - 1))
        return
    if stopping := now.stopping(ask):
        now.wait(ask, stopping)
        return
    if found := now.displacer.choose(ask, counts, now.layer(ask)):
        now.stop(ask, counts, *found)
        return
    refused = now.why_not.say(ask, counts, now.layer(ask), seats)
    if not now.plan(ask, counts, refused):
        now.wait(ask, now.later(ask, counts, now.never(ask, refused)))


def counts_of(ask: Ask, kind: Kind) -> list[int]:
    """How many members of each role an ask needs at least."""
    return [role.least for role in kind.roles] if ask.missing is None else list(ask.missing)


Check = Callable[["Pass", Ask, Kind, Sequence[int]], Refused | None]
"""A check that needs no look at workers. It says why not, with its numbers, or None."""


def paused(now: Pass, _: Ask, kind: Kind, __: Sequence[int]) -> Refused | None:
    """Nothing starts in a paused queue or below one, and nothing of a paused task."""
    for queue in now.usage.path(kind.queue):
        if queue.paused:
            return Refused(gates.PAUSED, where=queue.name)
    return Refused(gates.PAUSED, of="task", where=kind.paused_task) if kind.paused_task else None


def unknown(now: Pass, _: Ask, kind: Kind, __: Sequence[int]) -> Refused | None:
    """A policy or strategy of a newer release is not guessed at."""
    for queue in now.usage.path(kind.queue):
        if queue.policy not in POLICIES:
            return Refused(gates.UNKNOWN, of="policy", where=queue.policy)
    for role in kind.roles:
        if role.strategy not in STRATEGIES:
            return Refused(gates.UNKNOWN, of="strategy", where=role.strategy)
    return None


def limited(now: Pass, ask: Ask, kind: Kind, counts: Sequence[int]) -> Refused | None:
    """No limit or rate of its queue, of an ancestor, of its submitter or of its limit key may be exceeded."""
    gangs = not ask.single and ask.missing is None
    if now.usage.limits(kind.queue):
        refused = now.usage.limit_on(kind.queue, ask.submitter, Amount.asked(kind, counts, gangs))
        if refused is not None:
            return refused
    refused = now.usage.key_on(kind.limit_key, sum(counts)) if kind.limit_key else None
    if refused is None and not now.counted_seat(ask):
        refused = now.usage.rate_on(kind, sum(counts))
    return refused


def judged(now: Pass, ask: Ask, _: Kind, __: Sequence[int]) -> Refused | None:
    """Another of its kind was refused, could displace no more than this one, and nothing has been freed since."""
    return now.refused_before(ask)


CHECKS: tuple[Check, ...] = (paused, unknown, limited, judged)

DAY_S = 86400.0
"""How long what has seats kept for it is taken to run, where it is not among the asks."""


class KeptSeats(NamedTuple):
    """Seats that stay free for an ask."""

    seats: list[Taken]
    taken: list[Taken]
    """Those of the seats that are free now. The others are still held by units that were told to stop for the ask."""
    ends_at: float
    """When the ask will have run on them."""


class Before(NamedTuple):
    """How the first of a kind was refused."""

    last_met: float
    """:meth:`Free.last_met` of it."""
    priority: int
    refused: Refused


class Pass:
    """What is known in the middle of a pass, and what can be done about an ask: ``judge`` says in which order.

    Each of ``start``, ``stop``, ``plan``, ``wait`` and ``move`` writes the decision, and counts what it takes for all
    that come after: in ``free``, in ``usage``, in ``timeline``, and in ``search`` what is to be kept apart.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.kinds = {kind.id: kind for kind in board.kinds}
        self.free = Free(board)
        self.usage = Usage(board)
        self.search = Search(board, self.free)
        self.timeline = Timeline(board, self.free)
        self.displacer = Displacer(board, self.search, self.usage)
        self.why_not = WhyNot(self.search)
        self.turns = Turns(board, self.usage, self.search.has_warm_room)
        self.decisions: dict[str, Decision] = {}
        self._kept: dict[str, KeptSeats] = {}
        """By ask."""
        self._refused: dict[int, Before] = {}
        """By kind."""
        self._apart = {unit.id: unit.apart for unit in board.units}
        self._apart |= {ask.id: self.kinds[ask.kind].apart for ask in board.asks}
        """By unit and ask, the key by which it is kept apart from others."""
        self._never: set[int] = set()
        """Kinds that will not fit even when all has ended."""
        self.rivals = Rivals(self.kinds)
        self._counted = defaultdict[int, list[Place]](list)
        """By kind that has a rate, the open places that no job has filled yet: their starts are counted already."""
        for place in board.places:
            if not place.job and place.kind in self.kinds and self.usage.has_rate(self.kinds[place.kind]):
                self._counted[place.kind].append(place)
        self._leaving = [unit.id for unit in board.units if unit.leaving]
        estimates = {ask.id: ask.estimate_s for ask in board.asks}
        for kept in board.kept:
            if kept.ask.startswith("k") and kept.ask not in estimates:
                continue  # No job of it waits any more.
            seats = self.free.held_by(kept.holds)
            self._keep(kept.ask, estimates.get(kept.ask, DAY_S), self._leaving, seats, kept.starts_at)

    def layer(self, ask: Ask) -> int:
        """Which planned starts it would still run at."""
        return self.free.layer(self.board.now + ask.estimate_s)

    def refused_before(self, ask: Ask) -> Refused | None:
        """Why this one is refused without another look, if it is.

        The first refusal of its kind (:meth:`_remember`) holds for it too, if it has no more room and no more rights:

        - It meets the same planned starts or more: its last one is no earlier. In a pass what is free only shrinks,
          except for an ask whose own seats are kept.
        - It may displace no more: ``ask.priority <= before.priority``.
        - It gets no planned start: its kind never fits, or as many have one as may.
        """
        before = self._refused.get(ask.kind)
        if before is None or ask.missing is not None or ask.id in self._kept:
            return None
        planned = ask.kind in self._never or len(self.free.starts) >= self.board.planned_starts
        last_met = self.free.last_met(self.layer(ask))
        alike = before.last_met <= last_met and ask.priority <= before.priority
        return before.refused if planned and alike else None

    def _remember(self, ask: Ask, refused: Refused) -> None:
        """The first refusal of a kind stands for those of it that come later: :meth:`refused_before`."""
        if ask.kind not in self._refused and ask.missing is None and refused.gate.remembered:
            # Who may stop for one of them later is not said of the others of its kind.
            alone = refused._replace(may_stop=(), may_stop_at=None) if refused.may_stop else refused
            last_met = self.free.last_met(self.layer(ask))
            self._refused[ask.kind] = Before(last_met, ask.priority, alone)

    def seats(self, ask: Ask, counts: Sequence[int]) -> list[Taken] | Refused:
        """Seats that are free now, those kept for it first. If there are none, why the search found none."""
        kept = self._kept.get(ask.id)
        if kept is None:
            return self.counted_seat(ask) or self.search.seats(ask, counts, self.layer(ask))
        self._give_back(ask.id, kept)
        first = frozenset(seat.worker for seat in kept.seats)
        found: list[Taken] | Refused | None = None
        try:
            found = self.search.seats(ask, counts, self.layer(ask), first=first)
            return found
        finally:
            if isinstance(found, list):
                del self._kept[ask.id]
            else:  # Also where the search failed: :meth:`failed`.
                self._reserve(ask.id, kept)

    def counted_seat(self, ask: Ask) -> list[Taken]:
        """The seat of the first open place whose start a rate has counted, for an ask that has no seats kept for
        it; none if there is no such place. Places whose room is gone are dropped: elsewhere it is one more start.
        """
        places = self._counted[ask.kind]
        if not places or ask.id in self._kept:
            return []
        role, layer = self.kinds[ask.kind].roles[0], self.layer(ask)
        while places:
            held = Hold(places[0].worker, places[0].devices, role.needs.memory_mb, role.needs.millicpus)
            for seat in self.free.held_by([held]):
                free = self.free.free_devices(seat.worker, layer)
                if (
                    self.free.workers[seat.worker].open
                    and self.free.room_on(seat.worker, role, layer)
                    and {device.id for device in free}.issuperset(places[0].devices)
                ):
                    return [seat]
            del places[0]
        return []

    def stopping(self, ask: Ask) -> Refused | None:
        """The refusal of what has seats kept for it of which some are held yet."""
        if (kept := self._kept.get(ask.id)) is None:
            return None
        workers = {seat.worker for seat in kept.seats}
        there = [u for u in self._leaving if any(h.worker in workers for h in self.displacer.holds(u))]
        members = sum(seat.slots for seat in kept.seats)
        return Refused(gates.STOPPING, need=members, of="members", holders=tuple(there[:HOLDERS]))

    def grow(self, ask: Ask, counts: list[int], seats: list[Taken]) -> tuple[list[int], list[Taken]]:
        """More members for the elastic roles of what is about to start, one role after another, by halving: the first
        role takes all it may have, or as many as fit and no limit forbids; the next takes what that leaves.
        """
        kind = self.kinds[ask.kind]
        if ask.missing is not None:
            return counts, seats
        for n, role in enumerate(kind.roles):
            low = counts[n]
            middle = high = min(role.most, low + self.free.slots - len(seats))
            while low < high:
                more = [*counts[:n], middle, *counts[n + 1 :]]
                found: list[Taken] | Refused | None = limited(self, ask, kind, more)
                if found is None:
                    found = self.search.seats(ask, more, self.layer(ask))
                if isinstance(found, Refused):
                    high = middle - 1
                else:
                    counts, seats, low = more, found, middle
                middle = (low + high + 1) // 2
        return counts, seats

    def start(self, ask: Ask, counts: Sequence[int], seats: list[Taken]) -> None:
        """These seats are taken."""
        decision = self._decision(ask)
        decision.seats += tuple(self._seats(ask, counts, seats))
        self._use(ask, counts)
        if seats == self.counted_seat(ask):
            del self._counted[ask.kind][0]
        else:
            self.usage.count_starts(self.kinds[ask.kind], sum(counts))
        ends_at = self.board.now + ask.estimate_s
        held = list(by_worker(seats).values())
        self.free.take(held, ends_at)
        self.why_not.note_given(ask.id, held)
        name = f"{ask.id}#{len(decision.seats)}" if ask.single else ask.id
        self.timeline.add(name, ends_at, held, End(ask.id, "plan"))
        self.search.keep_apart(self.kinds[ask.kind].apart, name, name, held)

    def stop(self, ask: Ask, counts: Sequence[int], victims: tuple[str, ...], seats: list[Taken]) -> None:
        """These units are told to stop, and what they give back is kept for the ask."""
        decision, starts_at = self._decision(ask), self.board.now + self.board.grace_s
        decision.refused = Refused(gates.STOPPING, need=len(seats), of="members", holders=victims)
        if decision.seats:
            # A decision is carried out as one action, and some of these single jobs start. So the next pass tells the
            # units to stop, and in this one nobody else gets what of the seats is free.
            decision.refused = decision.refused._replace(holders=())
            seats, victims = self._beyond(victims, seats)[0], ()
        else:
            decision.stop, decision.starts_at = victims, starts_at
            decision.lost_s = tuple(self.displacer.units[unit].lost_s for unit in victims)
            decision.planned = tuple(self._seats(ask, counts, seats))
        self._use(ask, counts)
        self.usage.count_starts(self.kinds[ask.kind], sum(counts))
        self._keep(ask.id, ask.estimate_s, victims, seats, starts_at)
        self.rivals.add(ask)

    def plan(self, ask: Ask, counts: Sequence[int], refused: Refused) -> bool:
        """Give it a planned start, if it can have one."""
        if (
            len(self.free.starts) >= self.board.planned_starts
            or ask.missing is not None
            or ask.kind in self._never
        ):
            return False
        found = self.timeline.find(self.search, ask, counts)
        if found is None:
            self._never.add(ask.kind)
            return False
        start, then = found
        kind = self.kinds[ask.kind]
        if self.usage.covered_by(kind.queue, Amount.asked(kind, counts, gangs=not ask.single)) is None:
            self.displacer.borrowing[ask.id] = kind.queue
        refused = refused._replace(at=refused.at or start.starts_at)
        said = self.later(ask, counts, refused, start.starts_at)
        self.free.plan(start, then)
        decision = self._decision(ask)
        decision.planned = tuple(self._seats(ask, counts, list(start.seats)))
        decision.starts_at, decision.after = start.starts_at, start.after
        decision.refused = said
        self._remember(ask, refused)
        self.rivals.add(ask)
        return True

    def never(self, ask: Ask, refused: Refused) -> Refused:
        """The same refusal, unless it would not start even when all has ended. Then it names the workers that serve
        it and were not counted.
        """
        if ask.kind not in self._never or not self.board.workers:
            return refused
        if refused.of == "workers":
            return refused._replace(gate=gates.INFEASIBLE)
        return refused._replace(gate=gates.INFEASIBLE, holders=self.search.closed(self.kinds[ask.kind]))

    def later(self, ask: Ask, counts: Sequence[int], refused: Refused, before: float = INFINITY) -> Refused:
        """The same refusal; and who may be told to stop for it later, if that is before its planned start."""
        found = self.displacer.later(ask, counts, len(self.free.starts), before)
        return refused if found is None else refused._replace(may_stop=found[0], may_stop_at=found[1])

    def wait(self, ask: Ask, refused: Refused) -> None:
        """It waits, and this is why."""
        self._decision(ask).refused = refused
        self._remember(ask, refused)
        if refused.gate == gates.LIMIT_KEY:
            self.rivals.add(ask, key=refused.where)
        elif refused.gate.waits_for == "limit":
            self.rivals.add(ask, queue=refused.where)
        elif refused.gate.waits_for == "room":
            self.rivals.add(ask)

    def failed(self, ask: Ask, problem: Exception) -> None:
        """Nothing becomes of it in this pass, and the others go on. What it left half done is not given to others:
        a pass that errs wastes room, and the next one begins anew.
        """
        at = traceback.extract_tb(problem.__traceback__)[-1]
        what = f"{type(problem).__name__}: {problem} ({at.name}, line {at.lineno})"
        self.decisions[ask.id] = Decision(ask.id, refused=Refused(gates.ERROR, where=what[:500]))

    def move(self, unit: Unit, ask: Ask) -> None:
        """What runs where it should not is told to stop, if it could run elsewhere."""
        kind = self.kinds[ask.kind]
        counts = counts_of(ask, kind)
        if unknown(self, ask, kind, counts):
            return
        held = self.displacer.holds(unit.id)
        with self.free.ended(held, unit.ends_at):
            seats = self.search.seats(ask, counts, len(self.free.starts), leaving=frozenset({unit.id}))
        if isinstance(seats, Refused):
            return
        self.free.take(swap(held, seats)[0], INFINITY)
        self.search.keep_apart(kind.apart, unit.id, unit.id, seats)
        planned = tuple(self._seats(ask, counts, seats))
        self.decisions[unit.id] = Decision(unit.id, planned=planned, stop=(unit.id,), lost_s=(unit.lost_s,))

    # -- book-keeping ----------------------------------------------------------------------------------------

    def _decision(self, ask: Ask) -> Decision:
        return self.decisions.setdefault(ask.id, Decision(ask.id))

    def _use(self, ask: Ask, counts: Sequence[int]) -> None:
        kind = self.kinds[ask.kind]
        gangs = not ask.single and ask.missing is None
        self.usage.add(kind.queue, ask.submitter, Amount.asked(kind, counts, gangs))
        self.usage.add_to_key(kind.limit_key, sum(counts))

    def _keep(
        self, ask: str, estimate_s: float, victims: Sequence[str], seats: list[Taken], starts_at: float
    ) -> None:
        """Seats stay free for an ask: what of them is free now is taken, the rest comes from the victims."""
        more, left = self._beyond(victims, seats)
        if seats:
            self._kept[ask] = KeptSeats(seats, more, starts_at + estimate_s)
            self._reserve(ask, self._kept[ask])
        self.why_not.note_given(ask, seats)
        self.displacer.left_over(victims, left)
        for unit in victims:
            self.timeline.add(unit, starts_at, self.displacer.holds(unit), End(unit, "stop"))

    def _beyond(self, victims: Sequence[str], seats: list[Taken]) -> tuple[list[Taken], list[Taken]]:
        """What seats take beyond what these units hold, and what they leave of that: :func:`swap`."""
        return swap([taken for unit in victims for taken in self.displacer.holds(unit)], seats)

    def _reserve(self, ask: str, kept: KeptSeats) -> None:
        """Nobody else gets these seats, until the ask has run on them."""
        self.free.take(kept.taken, kept.ends_at)
        self.timeline.add(_kept_for(ask), kept.ends_at, kept.seats, End(ask, "plan"))
        self.search.keep_apart(self._apart.get(ask, ""), _kept_for(ask), ask, kept.seats)

    def _give_back(self, ask: str, kept: KeptSeats) -> None:
        """Undo :meth:`_reserve`."""
        self.free.give(kept.taken, kept.ends_at)
        self.timeline.remove(_kept_for(ask))
        self.search.forget(self._apart.get(ask, ""), _kept_for(ask))

    def _seats(self, ask: Ask, counts: Sequence[int], seats: list[Taken]) -> list[Seat]:
        layer, rest = self.layer(ask), iter(seats)
        made: list[Seat] = []
        for role, count in enumerate(counts):
            for taken, alike in groupby(islice(rest, count)):
                seat = Seat(
                    self.free.workers[taken.worker].id,
                    tuple(device.id for device in taken.devices),
                    role,
                    self.free.needed_at(taken, layer) if ask.single else None,
                )
                made += [seat for _ in alike]
        return made


def _kept_for(ask: str) -> str:
    """The name of seats that are kept for an ask: a gang that stops itself to start again is a unit besides."""
    return f"kept for {ask}"

"""What is free: now, and beside planned starts for whoever would still run when they come.

A *layer* is what is free for something that ends after the first so many planned starts: layer 0 is what is free now.
Hosts in the same state are kept together, so that five thousand idle hosts cost what a few cost.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from gangq.placement.board import Board, Device, Hold, Role
from gangq.placement.decisions import End, Short
from gangq.placement.room import Rooms, WorkerState, fits, lacking, linked, room_by, spare
from gangq.placement.strategies import by_link

_id = attrgetter("id")


class Taken(NamedTuple):
    """What one member takes of a worker (its number on the board)."""

    worker: int
    devices: tuple[Device, ...]
    slots: int
    memory_mb: int
    millicpus: int


class PlannedStart:
    """Seats that will be free at a moment, and what they leave to others on the same workers then."""

    def __init__(
        self, ask: str, starts_at: float, ends_at: float, seats: Sequence[Taken], apart: str = ""
    ) -> None:
        self.ask = ask
        self.apart = apart
        """The key by which it is kept apart from others; empty: from none."""
        self.starts_at = starts_at
        self.ends_at = ends_at
        self.seats = seats
        self.held = list(by_worker(seats).values())
        """The same, a worker each."""
        self.after: tuple[End, ...] = ()
        """What has to end before."""
        self.devices = {device.id for seat in self.held for device in seat.devices}
        self.left: dict[int, list[int]] = {}
        """Of each worker the slots, memory and processors that are free at ``starts_at`` beside these seats."""

    def copy(self) -> PlannedStart:
        """Another one, to be changed by itself."""
        twin = copy.copy(self)
        twin.left = {worker: list(left) for worker, left in self.left.items()}
        return twin


class Free:
    """What is free on a board, changed as the pass decides.

    More may be taken than there is: seats are kept for an ask while the units that were told to stop for it still
    hold them. So these hold at any moment (tests/placement/test_free.py):

    - of the slots, memory and processors of a worker: left = offered - taken, which may be below 0;
    - of a device: free - owed = offered - taken, and free or owed is 0. A withheld one is offered 0 times.

    What is taken until a moment is given back until the same moment, because the planned starts before it count it.
    """

    def __init__(self, board: Board) -> None:
        """Workers are numbered host by host; whatever is placed on the board is taken."""
        # What never changes.
        self.workers = sorted(board.workers, key=lambda w: (w.host, w.id))
        self.number = {worker.id: n for n, worker in enumerate(self.workers)}
        self.hosts: list[str] = []
        self.host_of: list[int] = []
        self.workers_of: list[list[int]] = []
        for n, worker in enumerate(self.workers):
            if not self.hosts or self.hosts[-1] != worker.host:
                self.hosts.append(worker.host)
                self.workers_of.append([])
            self.host_of.append(len(self.hosts) - 1)
            if worker.open:
                self.workers_of[-1].append(n)
        self.device = {device.id: device for worker in self.workers for device in worker.devices}
        self._owner = {d.id: n for n, worker in enumerate(self.workers) for d in worker.devices}
        by_links = any(linked(role) for kind in board.kinds for role in kind.roles)
        self._links = {
            n for n, worker in enumerate(self.workers) if by_links and any(d.link for d in worker.devices)
        }
        """Workers with links, where a role needs to know."""
        self.held = {unit.id: self.held_by(unit.holds) for unit in board.units}
        """What each unit of the board holds."""
        # What only grows: each host state that was seen, its number, and how many members of a role fit in it.
        self._ids: dict[tuple[WorkerState, ...], int] = {}
        self._states: list[tuple[WorkerState, ...]] = []
        self._fits: dict[Role, dict[int, int]] = defaultdict(dict)
        # What changes: a copy has its own.
        self._left = self._all_left()
        """Of each worker the free slots, memory and processors."""
        self._devices = self._all_devices()
        """Of each worker the free devices, by id."""
        self._owed = Counter[int]()
        """Of a device how many more have taken it than one can; they get it once it is given back."""
        self.slots = sum(worker.slots for worker in self.workers)
        """Free slots in all: there is room for no more members than that."""
        self._ends = 0
        """How often :meth:`end` was called."""
        self._ended: dict[int, int] = {}
        """Of devices that are free only once something has ended: the number of that :meth:`end`."""
        self.starts: list[PlannedStart] = []
        """The planned starts, by their moment."""
        self.layers: list[Layer] = []
        self._changed: set[int] = set()
        """Hosts that stand in the layers as they were before."""
        self.changes = 0
        """How often anything was taken, given back or planned."""
        for seats in self.held.values():
            for taken in seats:
                self._add(taken, -1)
        self._rebuild()

    # -- taking and giving back ------------------------------------------------------------------------------

    def held_by(self, holds: Iterable[Hold]) -> list[Taken]:
        """Holdings of the board, as far as they are on its workers."""
        return [
            Taken(
                self.number[hold.worker],
                tuple(self.device[d] for d in hold.devices if d in self.device),
                hold.slots,
                hold.memory_mb,
                hold.millicpus,
            )
            for hold in holds
            if hold.worker in self.number
        ]

    def take(self, seats: Iterable[Taken], ends_at: float) -> None:
        """These seats are taken from now until then."""
        self._change(seats, ends_at, -1)

    def give(self, seats: Iterable[Taken], ends_at: float) -> None:
        """Undo :meth:`take`: the same seats until the same moment."""
        self._change(seats, ends_at, 1)

    def end(self, seats: Sequence[Taken], ends_at: float) -> None:
        """As if what was to run until then had ended. Of devices of one size, those that come free last are taken
        first, so that those that are free sooner are left for others.
        """
        self.give(seats, ends_at)
        self._ends += 1
        self._ended.update({device.id: self._ends for seat in seats for device in seat.devices})

    @contextmanager
    def ended(self, seats: Sequence[Taken], ends_at: float) -> Iterator[None]:
        """:meth:`end` for the time of a ``with``."""
        self.end(seats, ends_at)
        try:
            yield
        finally:
            self.take(seats, ends_at)

    @contextmanager
    def taken(self, seats: Sequence[Taken], ends_at: float) -> Iterator[None]:
        """:meth:`take` for the time of a ``with``."""
        self.take(seats, ends_at)
        try:
            yield
        finally:
            self.give(seats, ends_at)

    def _change(self, seats: Iterable[Taken], ends_at: float, sign: int) -> None:
        for taken in seats:
            self.changes += 1
            self._add(taken, sign)
            self._changed.add(self.host_of[taken.worker])
            for start in self.starts:
                if start.starts_at < ends_at and taken.worker in start.left:
                    _add(start.left[taken.worker], taken, sign)

    def _add(self, taken: Taken, sign: int) -> None:
        left = self._left[taken.worker]
        before = max(0, left[0])
        _add(left, taken, sign)
        self.slots += max(0, left[0]) - before
        if not taken.devices:
            return
        devices = self._devices[taken.worker]
        for device in taken.devices:
            if sign < 0 and device.id in devices:
                del devices[device.id]
            elif sign > 0 and not self._owed[device.id]:
                devices[device.id] = device
            else:
                # Held and planned for: whoever holds it gives it back to the plan.
                self._owed[device.id] -= sign

    def plan(self, start: PlannedStart, then: Free) -> None:
        """Keep seats free from a moment on; ``then`` is what is free at that moment, these seats taken.

        What runs here from then on still has its seats when the planned starts come that lie in its time. So what
        each of those leaves on the same workers is less by these seats.
        """
        for known in self.starts:
            if start.starts_at <= known.starts_at < start.ends_at:
                for taken in start.held:
                    if taken.worker in known.left:
                        _add(known.left[taken.worker], taken, -1)
        start.left = {taken.worker: list(then._left[taken.worker]) for taken in start.held}
        self.changes += 1
        self._settle()
        place = bisect_right(self.starts, start.starts_at, key=lambda s: s.starts_at)
        self.starts = [*self.starts[:place], start, *self.starts[place:]]
        # Those of the same moment leave less now, too.
        self._rebuild(self.layer(start.starts_at))

    def copy(self, *, starts: bool) -> Free:
        """The same workers and what is free on them; ``starts``: with the planned starts."""
        self._settle()  # Once, and not in each copy of this.
        twin = copy.copy(self)
        twin._left = [list(left) for left in self._left]
        twin._devices = [devices.copy() for devices in self._devices]
        twin._owed = Counter(self._owed)
        twin._ended = {}
        twin.starts = [start.copy() for start in self.starts] if starts else []
        twin.layers = [layer.copy() for layer in self.layers[: len(twin.starts) + 1]]
        twin._changed = set()
        return twin

    def emptied(self) -> Free:
        """The same workers, once everything has ended."""
        twin = self.copy(starts=False)
        twin._left, twin._devices = self._all_left(), self._all_devices()
        twin.slots = sum(worker.slots for worker in self.workers)
        twin._owed.clear()
        twin.layers = []
        twin._rebuild()
        return twin

    def _all_left(self) -> list[list[int]]:
        return [[worker.slots, worker.memory_mb, worker.millicpus] for worker in self.workers]

    def _all_devices(self) -> list[dict[int, Device]]:
        return [{d.id: d for d in worker.devices if not d.withheld} for worker in self.workers]

    # -- layers ----------------------------------------------------------------------------------------------

    def layer(self, ends_at: float) -> int:
        """The layer for something that runs until then: how many planned starts it would meet."""
        return bisect_left(self.starts, ends_at, key=lambda start: start.starts_at)

    def last_met(self, layer: int) -> float:
        """The moment of the last planned start that something of this layer meets. What is remembered in a pass is
        compared by it, because a start that is planned meanwhile moves the numbers of the layers after it.
        """
        return self.starts[layer - 1].starts_at if layer else -math.inf

    def _rebuild(self, place: int = 0) -> None:
        """The layers that meet the planned start at this place, and later ones."""
        self.layers[place + 1 :] = []
        if not self.layers:
            self.layers = [Layer(len(self.hosts))]
            for host in range(len(self.hosts)):
                self._put(host)
        for n, start in enumerate(self.starts[place:], place + 1):
            self.layers.append(self.layers[-1].copy())
            for host in {self.host_of[seat.worker] for seat in start.held}:
                self.layers[n].put(host, self._host_state(host, n))

    def _settle(self) -> None:
        """Bring the layers up to date."""
        for host in self._changed:
            self._put(host)
        self._changed.clear()

    def _put(self, host: int) -> None:
        """Say in all layers what is free on a host: one differs from that before it where its start has seats."""
        state = self._host_state(host, 0)
        self.layers[0].put(host, state)
        for n, start in enumerate(self.starts[: len(self.layers) - 1], 1):
            if not start.left.keys().isdisjoint(self.workers_of[host]):
                state = self._host_state(host, n)
            self.layers[n].put(host, state)

    def _host_state(self, host: int, layer: int) -> int:
        state = tuple([self.worker_state(worker, layer) for worker in self.workers_of[host]])
        number = self._ids.get(state)
        if number is None:
            number = self._ids[state] = len(self._states)
            self._states.append(state)
        return number

    def worker_state(self, worker: int, layer: int, avoid: frozenset[int] = frozenset()) -> WorkerState:
        """What is free on one worker for something that meets the first ``layer`` planned starts."""
        slots, memory_mb, millicpus = self._left[worker]
        devices: Iterable[Device] = self._devices[worker].values()
        for start in self.starts[:layer]:
            if (left := start.left.get(worker)) is not None:
                slots, memory_mb, millicpus = (
                    min(slots, left[0]),
                    min(memory_mb, left[1]),
                    min(millicpus, left[2]),
                )
                devices = [device for device in devices if device.id not in start.devices]
        class_id = self.workers[worker].class_id
        if not devices:
            return WorkerState(class_id, slots, memory_mb, millicpus, ())
        if avoid:
            devices = [device for device in devices if device.id not in avoid]
        vrams = tuple(sorted([device.vram_mb for device in devices]))
        links: tuple[tuple[int, ...], ...] = ()
        if worker in self._links:
            groups = (tuple(sorted([device.vram_mb for device in group])) for group in by_link(devices))
            links = tuple(sorted(group for group in groups if len(group) > 1))
        return WorkerState(class_id, slots, memory_mb, millicpus, vrams, links)

    def free_devices(self, worker: int, layer: int) -> list[Device]:
        """The devices behind :meth:`worker_state`."""
        kept = {d for start in self.starts[:layer] if worker in start.left for d in start.devices}
        return [device for device in self._devices[worker].values() if device.id not in kept]

    def equal(self, worker: int, devices: Iterable[Device], layer: int) -> list[list[Device]]:
        """Free devices of a worker in classes of equal ones, the smallest first; of one size those first that the
        fewest others could use: of the last :meth:`end`, then what planned starts beyond this layer will take.
        """
        later = [start.devices for start in self.starts[layer:] if worker in start.left]
        classes: dict[tuple[int, ...], list[Device]] = defaultdict(list)
        for device in sorted(devices, key=_id):
            spared = (device.id not in taken for taken in later)
            classes[device.vram_mb, -self._ended.get(device.id, 0), *spared].append(device)
        return [classes[key] for key in sorted(classes)]

    def needed_at(self, seat: Taken, layer: int) -> float | None:
        """When a planned start beyond this layer needs a seat that is about to be taken; None: never."""
        for start in self.starts[layer:]:
            if (left := start.left.get(seat.worker)) is not None and (
                left[0] < seat.slots
                or left[1] < seat.memory_mb
                or left[2] < seat.millicpus
                or not start.devices.isdisjoint(device.id for device in seat.devices)
            ):
                return start.starts_at
        return None

    # -- room ------------------------------------------------------------------------------------------------

    def room_on(self, worker: int, role: Role, layer: int) -> int:
        """How many members of a role a worker has room for."""
        return fits(self.worker_state(worker, layer, role.needs.avoid), role)

    def nearest(
        self, role: Role, layer: int, without: frozenset[int], inside: frozenset[int] | None
    ) -> tuple[int, tuple[Short, ...]] | None:
        """The worker that is nearest to having room for one more member of a role, and what is short there: the
        fewest things, then the smallest parts of what is needed. None: no worker serves it.

        ``without`` and ``inside`` are as in :meth:`rooms`.
        """
        best: tuple[int, float, int] | None = None
        lacks: tuple[Short, ...] = ()
        for state, _, worker in self._in_states(role, layer, without, inside):
            if short := lacking(state, role):
                key = len(short), sum([1 - have / need for _, need, have in short]), worker
                if best is None or key < best:
                    best, lacks = key, short
        return best and (best[2], lacks)

    def enough_in_all(
        self,
        role: Role,
        members: int,
        layer: int,
        without: frozenset[int],
        inside: frozenset[int] | None,
    ) -> bool:
        """Whether what is free on all workers that serve a role would be enough for so many members, if it were on
        one of them. ``without`` and ``inside`` are as in :meth:`rooms`.
        """
        total = [0, 0, 0, 0]
        for state, workers, _ in self._in_states(role, layer, without, inside):
            for n, amount in enumerate(spare(state, role)):
                total[n] += workers * amount
        needs = role.needs
        each = (1, needs.memory_mb, needs.millicpus, needs.gpus)
        return all(have >= members * need for have, need in zip(total, each, strict=True))

    def room_by_gpus(self, role: Role, layer: int, most: int) -> int:
        """How many members its GPUs alone leave room for, so many on a worker at most."""
        return sum(
            workers * min(most, room_by(state, role).get("gpus", 0))
            for state, workers, _ in self._in_states(role, layer)
        )

    def _in_states(
        self,
        role: Role,
        layer: int,
        without: frozenset[int] = frozenset(),
        inside: frozenset[int] | None = None,
    ) -> Iterator[tuple[WorkerState, int, int]]:
        """The states of open workers, without the devices that a role avoids: how many are in each, and the first."""
        self._settle()
        odd = self._odd(role)
        apart = odd | without
        for number, hosts in self.layers[layer].hosts.items() if inside is None else ():
            alike = [host for host in hosts if host not in apart] if apart else hosts
            for n, state in enumerate(self._states[number] if alike else ()):
                yield state, len(alike), self.workers_of[alike[0]][n]
        alone = (worker for host in odd for worker in self.workers_of[host]) if inside is None else inside
        for worker in alone:
            if self.workers[worker].open and self.host_of[worker] not in without:
                yield self.worker_state(worker, layer, role.needs.avoid), 1, worker

    def _odd(self, role: Role) -> set[int]:
        """Hosts with devices that a role avoids: they are in another state for it."""
        return {self.host_of[self._owner[d]] for d in role.needs.avoid if d in self._owner}

    def rooms(
        self,
        role: Role,
        layer: int,
        *,
        without: frozenset[int] = frozenset(),
        inside: frozenset[int] | None = None,
    ) -> Rooms:
        """The room of every host for a role: but not of the hosts ``without``, and only of workers ``inside``."""
        self._settle()
        known, by_room = self._fits[role], defaultdict[int, list[Sequence[int]]](list)
        odd = self._odd(role)
        if inside is not None:
            counted: dict[int, int] = defaultdict(int)
            for worker in inside:
                if self.workers[worker].open and self.host_of[worker] not in without:
                    counted[self.host_of[worker]] += self.room_on(worker, role, layer)
        else:
            counted = {
                h: sum(self.room_on(w, role, layer) for w in self.workers_of[h]) for h in odd - without
            }
            for state, hosts in self.layers[layer].hosts.items():
                room = known.get(state)
                if room is None:
                    room = known[state] = sum(fits(worker, role) for worker in self._states[state])
                if room:
                    by_room[room].append(hosts)
        ones: dict[int, list[int]] = defaultdict(list)
        for host in sorted(counted):
            if counted[host]:
                ones[counted[host]].append(host)
        return Rooms(by_room, frozenset(odd) | without if inside is None else frozenset(), ones)


class Layer:
    """Which hosts are in which state."""

    def __init__(self, hosts: int) -> None:
        self._state = [-1] * hosts
        self.hosts: dict[int, list[int]] = {}
        """By the number of the state, in order."""

    def copy(self) -> Layer:
        """Another one, to be changed by itself."""
        twin = Layer(0)
        twin._state = list(self._state)
        twin.hosts = {state: list(hosts) for state, hosts in self.hosts.items()}
        return twin

    def put(self, host: int, state: int) -> None:
        """A host is in this state now."""
        before = self._state[host]
        if before == state:
            return
        if before >= 0:
            hosts = self.hosts[before]
            del hosts[bisect_left(hosts, host)]
            if not hosts:
                del self.hosts[before]
        self._state[host] = state
        mine = self.hosts.setdefault(state, [])
        if mine and mine[-1] > host:
            insort(mine, host)
        else:
            mine.append(host)


def by_worker(seats: Iterable[Taken]) -> dict[int, Taken]:
    """What seats take of each worker together."""
    found: dict[int, Taken] = {}
    for seat, alike in groupby(seats):
        n = len([*alike])
        _, devices, slots, memory_mb, millicpus = found.get(seat.worker, (0, (), 0, 0, 0))
        found[seat.worker] = Taken(
            seat.worker,
            devices + n * seat.devices,
            slots + n * seat.slots,
            memory_mb + n * seat.memory_mb,
            millicpus + n * seat.millicpus,
        )
    return found


def _add(left: list[int], taken: Taken, sign: int) -> None:
    left[0] += sign * taken.slots
    left[1] += sign * taken.memory_mb
    left[2] += sign * taken.millicpus

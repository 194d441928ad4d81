"""Where members sit: topology domains, roles, hosts by strategy, devices.

A search tries one way after another, from what is preferred most to what will just do, each inside the one before:

1. wishes: the workers kept for it, those with its model, hosts where nothing failed, then any (:meth:`Search.seats`);
2. domains: of the narrowest level that is preferred or required, then of broader ones, then none; of one level the
   tightest first (:meth:`Search._gang`);
3. roles: the scarcest first, then the other way round (:meth:`Search._roles`);
4. for one role its own domains, then its hosts and devices (:meth:`Search._members`).

The first way that holds all members is taken. Otherwise the refusal is that of the widest one: the last wish, in
it the roomiest domain of the broadest level, or the whole fleet if no level is required; of the two orders of roles
the first. So its numbers are the best that could be had.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from math import inf as INFINITY
from typing import NamedTuple

from gangq.placement import gates
from gangq.placement.board import Ask, Board, Device, Kind, Role
from gangq.placement.decisions import HOLDERS, Refused
from gangq.placement.free import Free, PlannedStart, Taken
from gangq.placement.room import Rooms, link_groups, parts
from gangq.placement.strategies import STRATEGIES


class Wish(NamedTuple):
    """One way to look for seats; what an ask prefers is tried first."""

    without: frozenset[int] = frozenset()
    """Hosts that are not looked at."""
    only: frozenset[int] | None = None
    """Workers that are looked at; None: all."""


class Placed(NamedTuple):
    """What is on some hosts, and keeps others of its key away from them."""

    owner: str
    """The gang that it belongs to: itself, or the gang of a member that is a unit of its own."""
    hosts: set[int]


class Search:
    """Looks for seats on what is free."""

    def __init__(self, board: Board, free: Free) -> None:
        self.board = board
        self.free = free
        self.kinds = {kind.id: kind for kind in board.kinds}
        self._domains: dict[tuple[str, str], dict[str, frozenset[int]]] = {}
        self._paths: dict[int, list[tuple[int, str]]] = {}
        self._apart: dict[str, dict[str, Placed]] = defaultdict(dict)
        """By key and name, what is placed or has seats kept for it."""
        self._planned: Sequence[PlannedStart] = ()
        """Planned starts that count as placed."""
        for unit in board.units:
            self.keep_apart(unit.apart, unit.id, unit.part_of or unit.id, free.held[unit.id])
        doubtful = {free.host_of[n] for n, worker in enumerate(free.workers) if worker.doubtful}
        self._doubtful = frozenset(doubtful)
        self._open_classes = frozenset(worker.class_id for worker in free.workers if worker.open)
        self._host = {name: n for n, name in enumerate(free.hosts)}
        self._warm: dict[str, set[int]] = defaultdict(set)
        for n, worker in enumerate(free.workers):
            for model in worker.warm:
                self._warm[model].add(n)

    def on(self, free: Free, planned: Sequence[PlannedStart] = ()) -> Search:
        """The same search on another state of the same workers, where these planned starts count as placed."""
        # Shared with this one, because they are of workers and not of what is free: _domains, _paths and _warm. And
        # _apart, which keep_apart changes for all: what has started is on its hosts in every state.
        twin = copy.copy(self)
        twin.free = free
        twin._planned = planned
        return twin

    def keep_apart(self, key: str, name: str, owner: str, seats: Iterable[Taken]) -> None:
        """What has this name is here, too: what has the same key, but for its owner, takes none of these hosts."""
        if key:
            there = self._apart[key].setdefault(name, Placed(owner, set()))
            there.hosts.update(self.free.host_of[seat.worker] for seat in seats)

    def forget(self, key: str, name: str) -> None:
        """What has this name keeps nothing apart any more."""
        self._apart[key].pop(name, None)

    def hosts_of_others(self, ask: Ask, layer: int = 0, leaving: Container[str] = ()) -> frozenset[int]:
        """Hosts from which an ask is to be kept apart: of what is placed, and of the planned starts that it meets.
        What is ``leaving`` will be gone.
        """
        key = self.kinds[ask.kind].apart
        if not key:
            return frozenset()
        hosts: set[int] = set()
        for name, other in self._apart[key].items():
            if other.owner != ask.id and name not in leaving:
                hosts |= other.hosts
        for start in (*self._planned, *self.free.starts[:layer]):
            if start.apart == key and start.ask not in leaving:
                hosts.update(self.free.host_of[seat.worker] for seat in start.held)
        return frozenset(hosts)

    def kept_apart(self, ask: Ask, counts: Sequence[int], layer: int) -> Refused | None:
        """The refusal of what would fit, were it not to be kept apart from what is placed."""
        if not self.hosts_of_others(ask) or isinstance(self._gang(ask, counts, layer, Wish()), Refused):
            return None
        key = self.kinds[ask.kind].apart
        others = dict.fromkeys(other.owner for other in self._apart[key].values() if other.hosts)
        others.pop(ask.id, None)
        return Refused(
            gates.APART, need=sum(counts), of="members", where=key, holders=tuple(others)[:HOLDERS]
        )

    def has_warm_room(self, ask: Ask) -> bool:
        """Whether a worker that has its model loaded has room for a member of its first role now. Not if asking
        fails: then so does deciding about it when its turn comes, and that is said.
        """
        kind = self.kinds[ask.kind]
        try:
            layer = self.free.layer(self.board.now + ask.estimate_s)
            warm = self._warm.get(kind.model, ()) if kind.model else ()
            return any(self.free.workers[n].open and self.free.room_on(n, kind.roles[0], layer) for n in warm)
        except Exception:
            return False

    def unserved(self, kind: Kind, counts: Sequence[int]) -> Refused | None:
        """The refusal of what no worker serves, or only workers that take nothing now: these are named."""
        for role, count in zip(kind.roles, counts, strict=True):
            if count and self._open_classes.isdisjoint(role.serves):
                closed = tuple(w.name for w in self.free.workers if w.class_id in role.serves)
                name = role.name if len(kind.roles) > 1 else ""
                return Refused(gates.WORKERS, need=count, of="workers", where=name, holders=closed[:HOLDERS])
        return None

    def closed(self, kind: Kind) -> tuple[str, ...]:
        """The first workers that serve a role of it, and take nothing now."""
        serves = {class_id for role in kind.roles for class_id in role.serves}
        return tuple(w.name for w in self.free.workers if not w.open and w.class_id in serves)[:HOLDERS]

    def seats(
        self,
        ask: Ask,
        counts: Sequence[int],
        layer: int,
        leaving: Container[str] = (),
        first: frozenset[int] = frozenset(),
    ) -> list[Taken] | Refused:
        """Seats for so many members of each role, ranks in order, for something that meets the first ``layer``
        planned starts.

        Args:
            ask: what is to be seated.
            counts: its members, by role.
            layer: how many planned starts it would still run at.
            leaving: names of what keeps it apart from nothing, because it will be gone.
            first: workers that are kept for it.
        """
        apart = self.hosts_of_others(ask, layer, leaving)
        failed = frozenset(self._host[host] for host in ask.avoid_hosts if host in self._host)
        wishes = [Wish(apart)]
        if failed or self._doubtful:
            wishes = [Wish(apart | failed | self._doubtful), Wish(apart | failed), *wishes]
        if model := self.kinds[ask.kind].model:
            warm = frozenset(self._warm[model])
            wishes = [*(wish._replace(only=warm) for wish in wishes if warm), *wishes]
        if first:
            wishes = [Wish(apart, first), *wishes]
        *preferred, widest = dict.fromkeys(wishes)
        for wish in preferred:
            found = self._gang(ask, counts, layer, wish)
            if not isinstance(found, Refused):
                return found
        return self._gang(ask, counts, layer, widest)

    def _gang(self, ask: Ask, counts: Sequence[int], layer: int, wish: Wish) -> list[Taken] | Refused:
        """In the tightest domain of the narrowest level that is preferred or required."""
        kind = self.kinds[ask.kind]
        roomiest: Refused | None = None
        for level in self._levels(kind.require, kind.prefer):
            for inside in self._domains_with_room(kind, counts, layer, wish, level, kind.require):
                found = self._roles(ask, kind, counts, layer, wish._replace(only=inside))
                if not isinstance(found, Refused):
                    return found
                roomiest = found
        if kind.require:
            return roomiest or self._not_in_one(kind, counts, layer, wish, kind.require)
        return self._roles(ask, kind, counts, layer, wish)

    def _roles(
        self, ask: Ask, kind: Kind, counts: Sequence[int], layer: int, wish: Wish
    ) -> list[Taken] | Refused:
        """Roles one after another: the scarcest first, and if that fails the other way round. If both fail, the first
        order says why.
        """
        asked = [n for n in range(len(kind.roles)) if counts[n]]
        if len(asked) > 1:
            scarce = {
                n: self.free.rooms(kind.roles[n], layer, without=wish.without, inside=wish.only).total
                / counts[n]
                for n in asked
            }
            asked.sort(key=lambda n: (scarce[n], n))
        found = self._in_turn(ask, kind, counts, layer, wish, asked)
        if isinstance(found, Refused) and len(asked) > 1:
            other = self._in_turn(ask, kind, counts, layer, wish, asked[::-1])
            found = found if isinstance(other, Refused) else other
        return found

    def _in_turn(
        self, ask: Ask, kind: Kind, counts: Sequence[int], layer: int, wish: Wish, turns: Sequence[int]
    ) -> list[Taken] | Refused:
        """Seats for the roles in this order, each on what those before it have left."""
        seats: dict[int, list[Taken]] = {}
        taken: list[Taken] = []
        refused: Refused | None = None
        for n in turns:
            workers = self._members(ask, kind, n, counts[n], layer, wish)
            if isinstance(workers, Refused):
                refused = workers
                break
            seats[n] = self._with_devices(kind.roles[n], workers, layer)
            if len(turns) > 1:
                # Whatever moment that is for: the next role finds less beside the planned starts, too.
                self.free.take(seats[n], INFINITY)
                taken += seats[n]
        self.free.give(taken, INFINITY)
        return refused or [seat for n in sorted(seats) for seat in seats[n]]

    def _members(
        self, ask: Ask, kind: Kind, n: int, count: int, layer: int, wish: Wish
    ) -> list[int] | Refused:
        """Workers for the members of one role, ranks in order."""
        role = kind.roles[n]
        wish = self.beside_mates(ask, kind, n, wish)
        for level in self._levels(role.require, role.prefer):
            alone = kind._replace(roles=(role,))
            for inside in self._domains_with_room(alone, [count], layer, wish, level, role.require):
                found = self._spread_out(role, count, layer, wish._replace(only=inside))
                if found is not None:
                    return found
        if role.require:
            return self._not_in_one(kind._replace(roles=(role,)), [count], layer, wish, role.require)
        rooms = self.free.rooms(role, layer, without=wish.without, inside=wish.only)
        found = self._spread_out(role, count, layer, wish, rooms) if rooms.total >= count else None
        if found is not None:
            return found
        return self._no_way(role, count, rooms)

    def _no_way(self, role: Role, count: int, rooms: Rooms) -> Refused:
        """The refusal of members that the strategy of their role cannot seat on hosts with this room."""
        strategy, total = STRATEGIES[role.strategy], rooms.total
        best = next(rooms.descending(), None)
        where = self.free.hosts[best[1]] if best else ""
        if strategy.own_hosts and count > 1 and total:
            return Refused(gates.HOSTS, need=count, have=sum(1 for _ in rooms.ascending()), of="hosts")
        gate, have = gates.ROOM, total
        if strategy.one_host and count > 1 and best:
            gate, have = gates.ONE_HOST, best[0]
        elif total >= count:
            # There is room, but not as it spreads them: as many as it would seat.
            have = next((n for n in range(count - 1, 0, -1) if strategy.hosts(n, rooms) is not None), 0)
        return Refused(gate, need=count, have=have, of=role.name or "members", where=where)

    def _spread_out(
        self, role: Role, count: int, layer: int, wish: Wish, rooms: Rooms | None = None
    ) -> list[int] | None:
        """By the strategy of a role; then ranks contiguous by domain, host and worker, the host not filled last."""
        rooms = rooms or self.free.rooms(role, layer, without=wish.without, inside=wish.only)
        strategy = STRATEGIES[role.strategy]
        takes = strategy.hosts(count, rooms)
        if takes is None:
            return None
        if role.balanced:
            takes = strategy.evenly(takes, rooms)
        seated: list[tuple[int, int]] = []
        for host, take in takes:
            workers = self.free.workers_of[host]
            if len(workers) == 1:
                seated.append((workers[0], take))
                continue
            mine = [
                (self.free.room_on(worker, role, layer), worker)
                for worker in workers
                if wish.only is None or worker in wish.only
            ]
            for room, worker in sorted(mine, key=lambda x: (-x[0], x[1])):
                if take and room:
                    seated.append((worker, min(room, take)))
                    take -= min(room, take)
        if len(takes) > 1:
            seated = self._in_order(seated, last=takes[-1][0])
        return [worker for worker, members in seated for _ in range(members)]

    def _in_order(self, seated: list[tuple[int, int]], last: int) -> list[tuple[int, int]]:
        """Workers by domain, host, worker: large parts first, and what the host ``last`` lies in at the end."""
        members = Counter[tuple[int, str]]()
        latest: set[tuple[int, str]] = set()
        for worker, take in seated:
            path = self._path(worker)
            for part in path:
                members[part] += take
            if self.free.host_of[worker] == last:
                latest.update(path)
        place = {part: (part in latest, -count, part[1]) for part, count in members.items()}
        return sorted(seated, key=lambda one: [place[part] for part in self._path(one[0])])

    def _path(self, worker: int) -> list[tuple[int, str]]:
        """Where a worker lies, broad to narrow: the number and name of each level, and at last its host."""
        if worker not in self._paths:
            host = self.free.host_of[worker]
            names = [
                self.free.hosts[host] if level == "host" else str(domain)
                for level, domain in zip(self.board.levels, self._domains_of(worker), strict=False)
            ]
            self._paths[worker] = [*enumerate([*names, f"{host:08}"])]
        return self._paths[worker]

    def _with_devices(self, role: Role, workers: Sequence[int], layer: int) -> list[Taken]:
        """Seats with devices, on workers that have room for them."""
        needs = role.needs
        if not needs.gpus:
            # Members on one worker are alike: a gang of 256 needs no 256 objects.
            alike = {w: Taken(w, (), 1, needs.memory_mb, needs.millicpus) for w in {*workers}}
            return [alike[worker] for worker in workers]
        seats: list[Taken] = []
        for worker, members in groupby(workers):
            beside = len(list(members))
            good = [
                device
                for device in self.free.free_devices(worker, layer)
                if device.vram_mb >= needs.vram_mb and device.id not in needs.avoid
            ]
            together = beside if needs.gpus == 1 else 1
            for _ in range(beside // together):
                picked: list[Device] = []
                while lacking := together * needs.gpus - len(picked):
                    chosen = self._chosen(role, worker, good, layer, together, lacking // together)
                    gone = {device.id for device in chosen}
                    good = [device for device in good if device.id not in gone]
                    picked += chosen
                seats += [
                    Taken(worker, tuple(devices), 1, needs.memory_mb, needs.millicpus)
                    for devices in (picked[m : m + needs.gpus] for m in range(0, len(picked), needs.gpus))
                ]
        return seats

    def _chosen(
        self, role: Role, worker: int, good: Sequence[Device], layer: int, members: int, lacking: int
    ) -> list[Device]:
        """The next part of what each of these members lacks, out of the smallest group with so many of what is good.

        Raises RuntimeError if its strategy chooses too many, too few, or others.
        """
        _, size, _ = parts(role)
        enough = (group for group in link_groups(role, good) if len(group) >= members * size)
        offered = min(enough, key=len, default=())
        gpus = min(size, lacking)
        chosen = STRATEGIES[role.strategy].devices(self.free.equal(worker, offered, layer), members, gpus)
        ids = {device.id for device in chosen}
        if not len(chosen) == len(ids) == members * gpus or not ids <= {device.id for device in offered}:
            raise RuntimeError(
                f"strategy {role.strategy} chose GPUs {[device.id for device in chosen]} of worker "
                f"{self.free.workers[worker].name}; {members * gpus} of these were to be chosen: "
                f"{[device.id for device in offered]}"
            )
        return chosen

    # -- topology --------------------------------------------------------------------------------------------

    def _levels(self, require: str, prefer: str) -> list[str]:
        """Narrow to broad: from the level that is preferred to the one that is required."""
        if not require and not prefer:
            return []
        levels = list(self.board.levels)
        if require and require not in levels:
            return []
        narrow = max(levels.index(level) if level in levels else -1 for level in (require, prefer))
        broad = levels.index(require) if require else 0
        return levels[broad : narrow + 1][::-1] if narrow >= 0 else []

    def _domains_of(self, worker: int) -> tuple[str | None, ...]:
        domains = self.free.workers[worker].domains
        return domains or (None,) * len(self.board.levels)

    def _domain(self, worker: int, level: str) -> str | None:
        if level == "host":
            return self.free.workers[worker].host
        return self._domains_of(worker)[self.board.levels.index(level)]

    def domains(self, level: str, within: str = "") -> dict[str, frozenset[int]]:
        """The workers of every domain of a level; a host lies in a broader level only where that is known of it."""
        if (level, within) not in self._domains:
            found: dict[str, set[int]] = defaultdict(set)
            for worker in range(len(self.free.workers)):
                name = self._domain(worker, level)
                outer = self._domain(worker, within) if within and within != level else ""
                if name is not None and outer is not None:
                    found[f"{outer}/{name}" if level == "host" and outer else name].add(worker)
            self._domains[level, within] = {name: frozenset(found[name]) for name in sorted(found)}
        return self._domains[level, within]

    def _domains_with_room(
        self, kind: Kind, counts: Sequence[int], layer: int, wish: Wish, level: str, within: str
    ) -> list[frozenset[int]]:
        """Domains with room for each of the roles by itself, the tightest first."""
        roomy = []
        for name, workers in self.domains(level, within).items():
            inside = workers if wish.only is None else workers & wish.only
            rooms = [self._room_inside(role, inside, layer, wish) for role in kind.roles]
            if inside and all(room >= count for room, count in zip(rooms, counts, strict=True)):
                roomy.append((sum(rooms), name, inside))
        return [inside for _, _, inside in sorted(roomy, key=lambda x: x[:2])]

    def _room_inside(self, role: Role, inside: frozenset[int], layer: int, wish: Wish) -> int:
        return sum(
            self.free.room_on(worker, role, layer)
            for worker in inside
            if self.free.workers[worker].open and self.free.host_of[worker] not in wish.without
        )

    def _not_in_one(self, kind: Kind, counts: Sequence[int], layer: int, wish: Wish, level: str) -> Refused:
        """No domain of a level holds all: how many the best one does."""
        best, where = 0, ""
        for name, workers in (self.domains(level) if level in self.board.levels else {}).items():
            inside = workers if wish.only is None else workers & wish.only
            room = sum(
                min(count, self._room_inside(role, inside, layer, wish))
                for role, count in zip(kind.roles, counts, strict=True)
            )
            if room > best:
                best, where = room, name
        return Refused(gates.ONE_DOMAIN, need=sum(counts), have=best, of=level, where=where)

    def beside_mates(self, ask: Ask, kind: Kind, n: int, wish: Wish) -> Wish:
        """A replaced member sits beside the others where the gang or its role has to be together, else apart."""
        if not any(ask.mates):
            return wish
        role, strategy = kind.roles[n], STRATEGIES[kind.roles[n].strategy]
        everybody = {
            self.free.number[w] for role_mates in ask.mates for w in role_mates if w in self.free.number
        }
        mine = {self.free.number[w] for w in ask.mates[n] if w in self.free.number}
        only, without = wish.only, wish.without
        level = role.require or ("host" if strategy.one_host else "")
        for within, mates in ((kind.require, everybody), (level, mine)):
            if within in self.board.levels and mates:
                together = {w for w in self.domains(within).values() if w & mates}
                inside = frozenset().union(*together)
                only = inside if only is None else only & inside
        if strategy.own_hosts:
            without = without | {self.free.host_of[worker] for worker in mine}
        return Wish(without, only)

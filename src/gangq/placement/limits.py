"""What queues and submitters use, and what they may."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from gangq.placement import gates
from gangq.placement.board import Board, Kind, Queue, Rate, Unit
from gangq.placement.decisions import HOLDERS, Refused

_ROUNDING = 1e-4
"""Of a start, or of a CPU, which is counted in thousandths: these are floats, and the database counts exactly."""


class Amount(defaultdict[str, float]):
    """So much of ``gangs``, ``jobs``, ``gpus``, ``memory_mb``, ``cpus``."""

    def __init__(self, **amounts: float) -> None:
        super().__init__(float, **amounts)

    def add(self, more: Mapping[str, float]) -> None:
        """So much more."""
        for of, amount in more.items():
            self[of] += amount

    @classmethod
    def asked(cls, kind: Kind, counts: Sequence[int], gangs: int) -> Amount:
        """What so many members of each role use."""
        total = cls(gangs=int(gangs))
        for role, count in zip(kind.roles, counts, strict=True):
            total["jobs"] += count
            total["gpus"] += count * role.needs.gpus
            total["memory_mb"] += count * role.needs.memory_mb
            total["cpus"] += count * role.needs.millicpus / 1000
        return total

    @classmethod
    def held(cls, *units: Unit) -> Amount:
        """What units use together."""
        holds = [hold for unit in units for hold in unit.holds]
        return cls(
            gangs=sum(unit.id.startswith("g") for unit in units),
            jobs=sum([hold.slots for hold in holds]),
            gpus=sum([len(hold.devices) for hold in holds]),
            memory_mb=sum([hold.memory_mb for hold in holds]),
            cpus=sum([hold.millicpus for hold in holds]) / 1000,
        )


class Usage:
    """What every queue uses, its children included, as the pass goes on."""

    def __init__(self, board: Board) -> None:
        self.queues = {queue.name: queue for queue in board.queues}
        self._paths: dict[str, list[Queue]] = {}
        self.used: dict[str, Amount] = defaultdict(Amount)
        self._limits = board.limits
        self._now, self._rates = board.now, board.rates
        self._full_at: dict[str, float] = {}
        """By what has a rate, when its bucket is full again, as the pass goes on."""
        self._key_used: dict[str, float] = defaultdict(float)
        self._of_key: dict[str, list[str]] = defaultdict(list)
        """By limit key, the units that name it."""
        self.by_submitter: dict[tuple[str, str], Amount] = defaultdict(Amount)
        self._units: dict[tuple[str, str], list[tuple[int, Unit]]] = defaultdict(list)
        """By queue and submitter, with their places on the board."""
        self.total = Amount()
        for worker in board.workers:
            self.total["jobs"] += worker.slots
            self.total["gpus"] += len(worker.devices)
            self.total["memory_mb"] += worker.memory_mb
            self.total["cpus"] += worker.millicpus / 1000
        for queue in board.queues:
            for up in self.path(queue.name):
                self.used[up.name]["jobs"] += queue.light_jobs
        for n, unit in enumerate(board.units):
            self._units[unit.queue, unit.submitter].append((n, unit))
        for (name, submitter), units in self._units.items():
            self.add(name, submitter, Amount.held(*(unit for _, unit in units)))
        for unit in board.units:
            if unit.limit_key:
                self._key_used[unit.limit_key] += Amount.held(unit)["jobs"]
                self._of_key[unit.limit_key].append(unit.id)

    def path(self, name: str) -> list[Queue]:
        """A queue and its ancestors, from itself to the root."""
        if name not in self._paths:
            parts = name.split(".")
            names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
            self._paths[name] = [self.queues[up] for up in names if up in self.queues] or [Queue(name)]
        return self._paths[name]

    def add(self, queue: str, submitter: str, used: Amount) -> None:
        """So much more is used from here on."""
        for up in self.path(queue):
            self.used[up.name].add(used)
            self.by_submitter[up.name, submitter].add(used)

    def add_to_key(self, key: str, jobs: float) -> None:
        """So many more jobs that name a limit key, or no key, are placed from here on."""
        if key:
            self._key_used[key] += jobs

    def key_on(self, key: str, jobs: float) -> Refused | None:
        """The limit key, if so many more jobs that name it would exceed its limit."""
        most = self._limits.get(key)
        if most is None or self._key_used[key] + jobs <= most:
            return None
        holders = tuple(self._of_key[key][:HOLDERS])
        left = most - self._key_used[key]
        return Refused(gates.LIMIT_KEY, jobs, left, "jobs", limit=most, where=key, holders=holders)

    def rate_on(self, kind: Kind, starts: float) -> Refused | None:
        """The first rate of a kind's limit key or queues of which so many starts are not left."""
        for where, rate in self._rates_on(kind):
            left = rate.starts - (self._full(where, rate) - self._now) / rate.every_s
            if starts > left + _ROUNDING:
                at = self._now + (starts - left) * rate.every_s if starts <= rate.starts else None
                have = max(0, math.floor(left + _ROUNDING))
                return Refused(
                    gates.RATE,
                    starts,
                    have,
                    "starts",
                    limit=rate.starts,
                    where=f"{where}, {rate.said},",
                    at=at,
                )
        return None

    def has_rate(self, kind: Kind) -> bool:
        """Whether a rate counts the starts of a kind."""
        return any(self._rates_on(kind))

    def count_starts(self, kind: Kind, starts: float) -> None:
        """So many of a kind start now."""
        for where, rate in self._rates_on(kind):
            self._full_at[where] = self._full(where, rate) + starts * rate.every_s

    def _rates_on(self, kind: Kind) -> Iterator[tuple[str, Rate]]:
        if (rate := self._rates.get(kind.limit_key)) is not None:
            yield f"limit key {kind.limit_key}", rate
        for queue in self.path(kind.queue):
            if queue.rate is not None:
                yield f"queue {queue.name}", queue.rate

    def _full(self, where: str, rate: Rate) -> float:
        full_at = self._full_at.get(where, rate.full_at)
        # Later than any start can have made it: the clock was set back, and the database takes the bucket as full.
        late = full_at > self._now + rate.starts * rate.every_s + 1
        return self._now if late else max(full_at, self._now)

    def limits(self, queue: str) -> bool:
        """Whether there is any limit on the path of a queue."""
        return any(
            up.maximum or up.submitter_maximum or up.max_gangs is not None or up.max_jobs is not None
            for up in self.path(queue)
        )

    def limit_on(self, queue: str, submitter: str, asked: Amount) -> Refused | None:
        """The first limit on the path of a queue that so much more would exceed."""
        for up in self.path(queue):
            used, mine = self.used[up.name], self.by_submitter[up.name, submitter]
            running = {"gangs": up.max_gangs, "jobs": up.max_jobs}
            for gate, limits, has in (
                (gates.RUNNING_LIMIT, {of: most for of, most in running.items() if most is not None}, used),
                (gates.QUOTA, up.maximum, used),
                (gates.SUBMITTER_LIMIT, up.submitter_maximum, mine),
            ):
                for of, most in limits.items():
                    if asked[of] and has[of] + asked[of] > most + _ROUNDING:
                        holders = self._holders(up.name, submitter if gate == gates.SUBMITTER_LIMIT else None)
                        return Refused(
                            gate, asked[of], most - has[of], of, limit=most, where=up.name, holders=holders
                        )
        return None

    def _holders(self, queue: str, submitter: str | None) -> tuple[str, ...]:
        """The first units of a submitter in a queue and below it, or of all submitters there."""
        inside = (
            units
            for (name, whose), units in self._units.items()
            if f"{name}.".startswith(f"{queue}.") and submitter in (None, whose)
        )
        return tuple(unit.id for _, unit in islice(heapq.merge(*inside), HOLDERS))

    def share(self, queue: Queue) -> float:
        """The largest part of anything that a queue uses, by weight; within its guarantee it is below all others."""
        used = self.used[queue.name]
        share = self._dominant(used) / queue.weight
        within = queue.guaranteed and all(used[of] < most for of, most in queue.guaranteed.items())
        return share - 1e9 if within else share

    def submitter_share(self, queue: str, submitter: str) -> float:
        """The largest part of anything that a submitter uses in a queue."""
        return self._dominant(self.by_submitter[queue, submitter])

    def _dominant(self, used: Amount) -> float:
        return max((used[of] / most for of, most in self.total.items() if most), default=0.0)

    def covered_by(self, queue: str, asked: Amount) -> Queue | None:
        """The nearest queue on the path whose guarantee covers so much more, or None."""
        for up in self.path(queue):
            owed = {of: least for of, least in up.guaranteed.items() if asked[of]}
            if owed and all(
                self.used[up.name][of] + asked[of] <= least + _ROUNDING for of, least in owed.items()
            ):
                return up
        return None

    def may_lose(self, queue: str, path: set[str], lost: Amount, gone: Mapping[str, Amount]) -> bool:
        """Whether no queue falls below its guarantee by losing so much. ``gone``: what each loses already. Queues on
        the ``path`` of the gang that gains do not count: they lose nothing.
        """
        for up in self.path(queue):
            if up.name in path:
                break
            for of, least in up.guaranteed.items():
                if lost[of] and self.used[up.name][of] - gone[up.name][of] - lost[of] < least - _ROUNDING:
                    return False
        return True

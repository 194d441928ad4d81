"""A job log on `gangq.placement` alone: boards that no database made, decided whenever something changes.

Every job is a gang, as in `simulator`. What ends gives its slots back at once, what is told to stop too.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence

from joblog import Job
from outcome import Ran

from gangq.placement.board import Ask, Board, Hold, Kept, Kind, Queue, Role, Unit, Worker
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision, Seat
from simulator import Fleet, Policy

A_KIND, IN_ALL = 200, 1000
"""How much of what waits a board shows: `gangq.board()` does so too."""


class InMemory:
    """One log, one policy."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        if policy.learn:
            raise ValueError("estimates are learned by the database: replay this policy on it")
        self._fleet, self._policy = fleet, policy
        self._workers = tuple(
            Worker(n, f"w{n}", f"h{n}", fleet.slots_per_host) for n in range(1, fleet.hosts + 1)
        )
        self._kinds: dict[tuple[str, int], Kind] = {}
        self._waiting: dict[int, list[Ask]] = {}
        self._running: dict[str, Unit] = {}
        self._asks: dict[str, Ask] = {}
        self._displaced: Counter[str] = Counter()
        self._promises: dict[int, float] = {}
        self.passes = 0
        self.cpu_s = 0.0
        """Of all decisions together."""

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int, float], None] = lambda done, at_s: None
    ) -> list[Ran]:
        """Play it to its end; `progress` is told how many jobs have ended, and the log's time."""
        coming = list(reversed(jobs))
        by_id = {f"g{job.id}": job for job in jobs}
        ending: list[tuple[int, int]] = []
        done: list[Ran] = []
        while coming or ending:
            now = min([*(job.submit_s for job in coming[-1:]), *(at for at, _ in ending[:1])])
            while ending and ending[0][0] == now:
                name = f"g{heapq.heappop(ending)[1]}"
                unit, job = self._running.get(name), by_id[name]
                # One that was displaced has another end, or none yet.
                if unit is not None and now == unit.since + min(job.run_s, job.estimate_s):
                    del self._running[name]
                    done.append(Ran(job, int(unit.since), now, self._displaced[name]))
            while coming and coming[-1].submit_s == now:
                self._submit(coming.pop())
            for name in self._pass(now):
                job = by_id[name]
                heapq.heappush(ending, (now + min(job.run_s, job.estimate_s), job.id))
            progress(len(done), now)
        if len(done) != len(jobs):
            raise RuntimeError(f"{len(jobs) - len(done)} of {len(jobs)} jobs were never placed")
        return done

    def promises(self) -> dict[int, float]:
        """The first planned start of each job that was ever given one, in the log's seconds."""
        return self._promises

    def _submit(self, job: Job) -> None:
        key = (job.queue, job.size)
        if key not in self._kinds:
            role = Role(least=job.size, most=job.size)
            self._kinds[key] = Kind(len(self._kinds) + 1, (role,), job.queue)
        kind = self._kinds[key].id
        ask = Ask(f"g{job.id}", kind, job.priority, job.id, job.user, float(job.estimate_s))
        self._asks[ask.id] = ask
        self._waiting.setdefault(kind, []).append(ask)

    def _pass(self, now: int) -> list[str]:
        """What has started: passes are made until none tells anybody to stop."""
        started: list[str] = []
        kept: tuple[Kept, ...] = ()
        while any(self._waiting.values()):
            board, began = self._board(now, kept), time.process_time()
            decisions = decide(board)
            self.cpu_s += time.process_time() - began
            self.passes += 1
            for decision in decisions:
                if decision.action == "plan" and decision.starts_at is not None:
                    self._promises.setdefault(self._asks[decision.ask].age, decision.starts_at)
                if decision.seats:
                    self._start(decision, now)
                    started.append(decision.ask)
            stops = [decision for decision in decisions if decision.stop]
            for decision in stops:
                for unit in decision.stop:
                    self._stop(unit)
            kept = tuple(Kept(d.ask, holds(d.planned), now) for d in stops)
            if not stops:
                break
        return started

    def _board(self, now: int, kept: tuple[Kept, ...]) -> Board:
        policy = self._policy
        first = (ask for line in self._waiting.values() for ask in line[:A_KIND])
        asks = sorted(first, key=lambda ask: (policy.order != "fifo" and -ask.priority, ask.age))[:IN_ALL]
        queues = sorted({kind.queue for kind in self._kinds.values()})
        return Board(
            now=float(now),
            workers=self._workers,
            units=tuple(self._running.values()),
            kinds=tuple(self._kinds.values()),
            asks=tuple(asks),
            queues=tuple(Queue(name, policy=policy.order) for name in queues),
            kept=kept,
            planned_starts=policy.reservations,
        )

    def _start(self, decision: Decision, now: int) -> None:
        ask = self._asks[decision.ask]
        self._waiting[ask.kind].remove(ask)
        queue = next(kind.queue for kind in self._kinds.values() if kind.id == ask.kind)
        ends_at, since = now + ask.estimate_s, float(now)
        self._running[ask.id] = Unit(
            ask.id, holds(decision.seats), ends_at, queue, ask.submitter, ask.priority, since
        )

    def _stop(self, name: str) -> None:
        del self._running[name]
        self._displaced[name] += 1
        ask = self._asks[name]
        self._waiting[ask.kind] = sorted([*self._waiting[ask.kind], ask], key=lambda ask: ask.age)


def holds(seats: Sequence[Seat]) -> tuple[Hold, ...]:
    """What these seats hold, a worker each."""
    return tuple(
        Hold(worker, slots=slots) for worker, slots in Counter(seat.worker for seat in seats).items()
    )

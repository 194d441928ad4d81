"""A job log on gangq's real SQL, in a database whose clock we move.

Every job is a gang, of one member too. At each moment at which something is submitted or ends there is one round
trip: what ended is completed, what outran its budget fails, what is new is submitted, one admission pass is made, and
workers claim what it placed. Only PostgreSQL's own time passes.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import psycopg
from joblog import Job
from outcome import Ran
from psycopg.types.json import Jsonb

from gangq.client.sync import in_steps, run
from gangq.decider.passes import run_pass

_STAGE = Path(__file__).with_name("stage.sql")


@dataclass(frozen=True)
class Fleet:
    """`hosts` hosts with one command worker each, of `slots_per_host` slots."""

    hosts: int = 32
    slots_per_host: int = 8

    @property
    def slots(self) -> int:
        return self.hosts * self.slots_per_host


@dataclass(frozen=True)
class Policy:
    """How gangq is set up: planned starts, the order of every queue, and whether estimates are learned."""

    reservations: int
    order: str = "fifo"
    learn: bool = False


class Replay:
    """One log, one policy, one fresh database with the schema."""

    def __init__(self, dsn: str, fleet: Fleet, policy: Policy) -> None:
        self._conn = psycopg.connect(dsn, autocommit=True)
        self._fleet, self._policy = fleet, policy
        self._jobs: dict[int, Job] = {}
        self._backend = psutil.Process(self._conn.info.backend_pid)
        self.passes = 0
        self.cpu_s = 0.0
        """Of all passes together, of this process and of its backend."""

    def close(self) -> None:
        self._conn.close()

    def run(
        self, jobs: Sequence[Job], progress: Callable[[int, float], None] = lambda done, at_s: None
    ) -> list[Ran]:
        """Play it to its end; `progress` is told how many jobs have ended, and the log's time."""
        too_large = [job.id for job in jobs if job.size > self._fleet.slots]
        if too_large:
            raise ValueError(f"jobs {too_large[:5]} need more than the fleet's {self._fleet.slots} slots")
        self._prepare(sorted({job.queue for job in jobs}))
        coming = list(reversed(jobs))
        ending: list[tuple[int, int, bool]] = []  # when, gang, whether at its budget
        jobs_of = self._jobs
        began: dict[int, int] = {}
        displaced: dict[int, int] = {}
        done: list[Ran] = []
        wake = None
        while coming or ending or wake is not None:
            now = min(
                moment
                for moment in (
                    coming[-1].submit_s if coming else None,
                    ending[0][0] if ending else None,
                    wake,
                )
                if moment is not None
            )
            ended: list[int] = []
            outran: list[int] = []
            while ending and ending[0][0] == now:
                _, gang, late = heapq.heappop(ending)
                # One that was displaced has another end, or none yet.
                if gang in began and now == began[gang] + min(jobs_of[gang].run_s, jobs_of[gang].estimate_s):
                    (outran if late else ended).append(gang)
                    done.append(Ran(jobs_of[gang], began.pop(gang), now, displaced.get(gang, 0)))
            new = []
            while coming and coming[-1].submit_s == now:
                new.append(coming.pop())
            submitted, started, stopped, wake_s = self._step(now, ended, outran, new)
            jobs_of.update(zip(submitted, new, strict=True))
            for gang in stopped:
                began.pop(gang, None)
                displaced[gang] = displaced.get(gang, 0) + 1
            for gang in started:
                job = jobs_of[gang]
                began[gang] = now
                end = now + min(job.run_s, job.estimate_s)
                heapq.heappush(ending, (end, gang, job.estimate_s < job.run_s))
            wake = None if wake_s is None else now + max(1, int(wake_s) + 1)
            progress(len(done), now)
        if len(done) != len(jobs):
            raise RuntimeError(f"{len(jobs) - len(done)} of {len(jobs)} jobs were never placed")
        return done

    def promises(self) -> dict[int, float]:
        """The first planned start of each job that was ever given one, in the log's seconds."""
        rows = self._conn.execute("select gang_id, starts_s from simulation.promises").fetchall()
        return {self._jobs[gang].id: starts_s for gang, starts_s in rows}

    def violations(self) -> list[Any]:
        """Broken invariants; there are none."""
        return self._conn.execute("select * from gangq.violations").fetchall()

    def _prepare(self, queues: list[str]) -> None:
        self._conn.execute(_STAGE.read_bytes())
        for queue in queues:
            self._conn.execute(
                "select gangq.set_queue(%s, %s)", (queue, Jsonb({"policy": self._policy.order}))
            )
        self._conn.execute(
            "select gangq.configure(%s)", (Jsonb({"reservations": self._policy.reservations}),)
        )
        fleet = (self._fleet.hosts, self._fleet.slots_per_host, queues)
        self._conn.execute("select simulation.fleet(%s, %s, %s)", fleet)

    def _step(self, now: int, ended: list[int], outran: list[int], new: list[Job]) -> tuple[Any, ...]:
        row = self._conn.execute(
            "select simulation.happen(%s, %s::bigint[], %s::bigint[], %s::integer[], %s::real[], %s::text[], "
            "%s::text[], %s::integer[], %s)",
            (
                now, ended, outran, [job.size for job in new], [float(job.estimate_s) for job in new],
                [job.queue for job in new], [job.user for job in new], [job.priority for job in new],
                self._policy.learn,
            ),
        ).fetchone()  # fmt: skip
        stopped: list[Any] = []
        while True:
            began = self._cpu_s()
            passed = in_steps(lambda query: run(self._conn, query), run_pass())
            self.cpu_s += self._cpu_s() - began
            self.passes += 1
            stopped += self._conn.execute("select unnest(simulation.follow())").fetchall()
            if not passed.placed and not passed.again:
                break
        seen = self._conn.execute("select started, wake_s from simulation.look(%s)", (now,)).fetchone()
        assert row is not None
        assert seen is not None
        return row[0], seen[0], [gang for (gang,) in stopped], seen[1]

    def _cpu_s(self) -> float:
        return time.process_time() + sum(self._backend.cpu_times()[:2])


class Plays(Protocol):
    """What plays a log to its end."""

    def run(self, jobs: Sequence[Job], progress: Callable[[int, float], None]) -> list[Ran]: ...


def timed(
    replay: Plays, jobs: Sequence[Job], progress: Callable[[int, float], None]
) -> tuple[list[Ran], float]:
    """The schedule, and the real seconds it took."""
    began = time.monotonic()
    return replay.run(jobs, progress), time.monotonic() - began

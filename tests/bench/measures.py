"""What is measured. Each measure runs once for one system, in a database of its own."""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg
from flat_sizes import FULL_FLAT, QUICK_FLAT, FlatSizes
from machine import CpuMeter, Usage
from stage import Stage, scalar, wait_until
from systems import System

_LEAST_PICKUPS = 10


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    drain: int = 20_000
    drain_single: int = 2_000
    enqueue_single: int = 2_000
    enqueue_many: int = 10_000
    pickups: int = 100
    warm_ups: int = 5
    per_job: int = 2_000
    per_job_single: int = 1_000
    gpu_pickups: int = 200
    gpu_jobs: int = 2_000
    gpu_short: int = 50
    packing_s: float = 360.0
    gangs: int = 200
    hosts: int = 5_000
    pass_gangs: tuple[int, ...] = (1_000, 2_000, 3_000)
    passes: int = 3
    alone: int = 50
    backlog: int = 100_000
    replayed: int = 5_000
    replayed_by_sql: int = 600
    flat: FlatSizes = FULL_FLAT


QUICK = Sizes(
    drain=5_000, drain_single=1_000, enqueue_single=1_000, pickups=40, per_job=1_000, per_job_single=300, gangs=50,
    gpu_pickups=40, gpu_jobs=500, gpu_short=15, packing_s=75.0,
    hosts=1_000, pass_gangs=(200,), passes=1, alone=10, backlog=10_000,
    replayed=600, replayed_by_sql=100,
    flat=QUICK_FLAT,
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One number of one measurement. ``notes`` go into the JSON file only."""

    measure: str
    unit: str
    value: float
    higher_is_better: bool = True
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A measure, the systems that it is for (empty: all that take part in it), and how to take it."""

    name: str
    title: str
    take: Callable[[Stage, System, Sizes], list[Result]]
    systems: tuple[str, ...] = ()


def drain_title(batch: int | None) -> str:
    """How the drain with that batch is called; None: with each system's own best settings."""
    if batch is None:
        return "drain, best settings"
    return "drain, one at a time" if batch == 1 else f"drain, batch {batch}"


def enqueue_title(count: int) -> str:
    """How submitting so many in one call is called."""
    return "enqueue, one by one" if count == 1 else f"enqueue, {count:,} in one call"


def share(count: int, system: System) -> int:
    """How many of them a system gets: the slow ones fewer."""
    return max(1, count // system.slowness)


def _drain(
    stage: Stage, system: System, count: int, batch: int, workers: int = 1
) -> tuple[float, dict[str, float]]:
    """Jobs per second. One worker's clock runs from the first handler's start, that of several from when all
    of them have their first jobs; until nothing unfinished is left: a worker that reports late is not faster.
    """
    marks = [stage.marks(shut=workers > 1) for _ in range(workers)]
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(stage.database(system))
        with system.enqueuer(dsn) as enqueuer:
            enqueuer.many(count)
        stage.tidy(dsn)
        look = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        started = [stack.enter_context(stage.worker(system, dsn, each, batch)) for each in marks]
        for each in marks:
            wait_until(lambda: each.count > 0, "the first job started", *started, poll_s=0.0005)  # noqa: B023
        meter = CpuMeter(stage.server, *(worker.pid for worker in started))
        began = time.monotonic_ns() if workers > 1 else marks[0].first_ns
        for each in marks:
            each.open()
        wait_until(lambda: sum(each.count for each in marks) >= count, "every job started", *started)
        wait_until(lambda: not scalar(look, system.unfinished), "every job was finished", *started)
        seconds = (time.monotonic_ns() - began) / 1e9
        usage = meter.read()
    return count / seconds, {"jobs": count, "batch": batch, **cpu_notes(usage, count)}


def cpu_notes(usage: Usage, count: int) -> dict[str, float]:
    """CPU for each job, of the workers and of the server; and who else kept the machine busy."""
    return {
        "worker_cpu_us_per_job": round(usage.worker_s * 1e6 / count, 1),
        "server_cpu_us_per_job": round(usage.server_s * 1e6 / count, 1),
        "foreign_cores": round(usage.foreign_cores, 2),
    }


def drain(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """One worker process: with the same batch for all that have one, and at its best."""
    count = share(sizes.drain, system)
    taken = {
        batch: _drain(stage, system, count, batch)
        for batch in dict.fromkeys((100, system.best))
        if batch != 100 or system.takes_100
    }
    named = [(drain_title(100), 100), (drain_title(None), system.best)]
    return [
        Result(title, "jobs/s", taken[batch][0], notes=taken[batch][1])
        for title, batch in named
        if batch in taken
    ]


def drain_by_two(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Two worker processes at its best settings, each with as many jobs as one; and how many times one that is."""
    count = share(sizes.drain, system)
    batch = min(system.best, count // 2)  # The first must not take all.
    one, _ = _drain(stage, system, count, batch)
    two, notes = _drain(stage, system, 2 * count, batch, workers=2)
    return [
        Result("drain, two processes", "jobs/s", two, notes=notes),
        Result("two processes to one", "times", two / one, notes={"one": round(one, 1)}),
    ]


def drain_single(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The same with one job claimed, run and finished at a time, as with jobs that fill a GPU."""
    rate, notes = _drain(stage, system, share(sizes.drain_single, system), 1)
    return [Result(drain_title(1), "jobs/s", rate, notes=notes)]


def enqueue(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Submitting with no worker about: a call per job, and all in one call."""
    results = []
    for title, count in (
        (enqueue_title(1), share(sizes.enqueue_single, system)),
        (enqueue_title(sizes.enqueue_many), share(sizes.enqueue_many, system)),
    ):
        with stage.database(system) as dsn, system.enqueuer(dsn) as enqueuer:
            enqueuer.one_by_one(20)  # Statements are prepared, catalogs are cached.
            meter = CpuMeter(stage.server)
            began = time.monotonic_ns()
            if title == enqueue_title(1):
                enqueuer.one_by_one(count)
            else:
                enqueuer.many(count)
            seconds = (time.monotonic_ns() - began) / 1e9
            notes = {"jobs": count, "foreign_cores": round(meter.read().foreign_cores, 2)}
            results.append(Result(title, "jobs/s", count / seconds, notes=notes))
    return results


def pickup(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """How long a job waits when a worker has nothing to do: from the enqueue call's return to the handler's
    start, one job about every 50 ms.
    """
    total = sizes.warm_ups + max(_LEAST_PICKUPS, share(sizes.pickups, system))
    marks = stage.marks(total)
    returned = []
    with (
        stage.database(system) as dsn,
        system.enqueuer(dsn) as enqueuer,
        stage.worker(system, dsn, marks, 1 if "single" in system.measures else system.best) as worker,
    ):
        for number in range(total):
            # A worker that looks now and then must not be met at the same point of its sleep each time.
            gap = random.uniform(0.04, 0.06) + random.uniform(0, system.poll_s)
            time.sleep(gap if number >= sizes.warm_ups else 0.4)
            called = time.monotonic_ns()
            enqueuer.numbered(number)
            returned.append((called, time.monotonic_ns()))
            wait_until(lambda: marks.stamp_ns(number), f"job {number} started", worker, poll_s=0.002)  # noqa: B023
    starts = [marks.stamp_ns(number) for number in range(sizes.warm_ups, total)]
    timed = list(zip(starts, returned[sizes.warm_ups :], strict=True))
    waits = [max(0, start - after) / 1e6 for start, (_, after) in timed]
    from_call = [(start - before) / 1e6 for start, (before, _) in timed]
    return latency("pick-up by an idle worker", waits, from_call)


def latency(title: str, waits_ms: list[float], from_call_ms: list[float]) -> list[Result]:
    """p50 and p99, with the same from the call's beginning as notes."""
    return [
        Result(f"{title}, p50", "ms", statistics.median(waits_ms), False, _tail(from_call_ms)),
        Result(f"{title}, p99", "ms", percentile(waits_ms, 0.99), False, {"max_ms": round(max(waits_ms), 2)}),
    ]


def _tail(from_call_ms: list[float]) -> dict[str, float]:
    return {
        "jobs": len(from_call_ms),
        "from_call_p50_ms": round(statistics.median(from_call_ms), 3),
        "from_call_p99_ms": round(percentile(from_call_ms, 0.99), 3),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]

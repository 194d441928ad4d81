"""What is measured. Each measure runs once for one system, in a database of its own."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg
from flat_sizes import FULL_FLAT, QUICK_FLAT, FlatSizes
from machine import CpuMeter, Usage
from stage import Stage, scalar, wait_until, wal_position
from systems import System

_WARM_UP = 5


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    drain: int = 20_000
    drain_single: int = 2_000
    enqueue_single: int = 2_000
    enqueue_many: int = 10_000
    pickups: int = 100
    gangs: int = 200
    hosts: int = 5_000
    pass_gangs: tuple[int, ...] = (1_000, 2_000, 3_000)
    passes: int = 3
    alone: int = 50
    backlog: int = 100_000
    flat: FlatSizes = FULL_FLAT


QUICK = Sizes(
    drain=5_000, drain_single=500, enqueue_single=500, pickups=40, gangs=50,
    hosts=1_000, pass_gangs=(200,), passes=1, alone=10, backlog=10_000,
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
    """A measure, the systems that it is for (empty: all of them), and how to take it."""

    name: str
    title: str
    take: Callable[[Stage, System, Sizes], list[Result]]
    systems: tuple[str, ...] = ()


def _drain(stage: Stage, system: System, count: int, batch: int) -> tuple[float, Usage, dict[str, float]]:
    """Jobs per second, and WAL bytes per job. The clock runs from the first handler's start until nothing
    unfinished is left: a worker that reports late is not faster for it.
    """
    path, marks = stage.marks()
    with stage.database(system) as dsn, psycopg.connect(dsn, autocommit=True) as look:
        with system.enqueuer(dsn) as enqueuer:
            before = wal_position(look)
            enqueuer.many(count)
            submitted = wal_position(look)
        look.execute("vacuum analyze")
        waiting = wal_position(look)
        with stage.worker(system, dsn, path, batch) as worker:
            wait_until(lambda: marks.count > 0, "the first job started", worker, poll_s=0.0005)
            meter = CpuMeter(stage.server, worker.pid)
            wait_until(lambda: marks.count >= count, "every job started", worker)
            wait_until(lambda: not scalar(look, system.unfinished), "every job was finished", worker)
            seconds = (time.monotonic_ns() - marks.first_ns) / 1e9
            usage = meter.read()
            drained = wal_position(look)
    wal = {"enqueue": (submitted - before) / count, "drain": (drained - waiting) / count}
    return count / seconds, usage, wal


def _cpu_notes(usage: Usage, count: int) -> dict[str, float]:
    return {
        "worker_cpu_us_per_job": round(usage.worker_s * 1e6 / count, 1),
        "server_cpu_us_per_job": round(usage.server_s * 1e6 / count, 1),
        "foreign_cores": round(usage.foreign_cores, 2),
    }


def drain(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """One worker process, every system with the same batch, and what it wrote."""
    results = []
    for batch in (100, 300):
        rate, usage, wal = _drain(stage, system, sizes.drain, batch)
        results.append(Result(f"drain, batch {batch}", "jobs/s", rate, notes=_cpu_notes(usage, sizes.drain)))
    return [*results, Result("WAL, enqueue and drain", "bytes/job", sum(wal.values()), False, wal)]


def drain_single(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The same with one job claimed, run and finished at a time, as with jobs that fill a GPU."""
    rate, usage, wal = _drain(stage, system, sizes.drain_single, 1)
    notes = _cpu_notes(usage, sizes.drain_single)
    return [
        Result("drain, one at a time", "jobs/s", rate, notes=notes),
        Result("WAL, one at a time", "bytes/job", sum(wal.values()), False, wal),
    ]


def enqueue(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Submitting with no worker about: a call per job, and all in one call."""
    results = []
    for title, count in (
        ("enqueue, one by one", sizes.enqueue_single),
        (f"enqueue, {sizes.enqueue_many:,} in one call", sizes.enqueue_many),
    ):
        with stage.database(system) as dsn, system.enqueuer(dsn) as enqueuer:
            enqueuer.one_by_one(20)  # Statements are prepared, catalogs are cached.
            meter = CpuMeter(stage.server)
            began = time.monotonic_ns()
            if title == "enqueue, one by one":
                enqueuer.one_by_one(count)
            else:
                enqueuer.many(count)
            seconds = (time.monotonic_ns() - began) / 1e9
            notes = {"foreign_cores": round(meter.read().foreign_cores, 2)}
            results.append(Result(title, "jobs/s", count / seconds, notes=notes))
    return results


def pickup(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """How long a job waits when a worker has nothing to do: from the enqueue call's return to the handler's
    start, one job about every 50 ms.
    """
    total = _WARM_UP + sizes.pickups
    path, marks = stage.marks(total)
    returned = []
    with (
        stage.database(system) as dsn,
        system.enqueuer(dsn) as enqueuer,
        stage.worker(system, dsn, path, 1) as worker,
    ):
        for number in range(total):
            time.sleep(random.uniform(0.04, 0.06) if number >= _WARM_UP else 0.4)
            called = time.monotonic_ns()
            enqueuer.numbered(number)
            returned.append((called, time.monotonic_ns()))
            wait_until(lambda: marks.stamp_ns(number), f"job {number} started", worker, poll_s=0.002)  # noqa: B023
    starts = [marks.stamp_ns(number) for number in range(_WARM_UP, total)]
    timed = list(zip(starts, returned[_WARM_UP:], strict=True))
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
        "from_call_p50_ms": round(statistics.median(from_call_ms), 3),
        "from_call_p99_ms": round(percentile(from_call_ms, 0.99), 3),
    }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]

"""Single jobs that need a GPU: how soon one starts on an idle fleet, and how many short ones follow one another.

The GPUs are declared, so no driver is asked: what is timed is the decision, its place, the claim and the report.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from machine import CpuMeter
from marks import Marks
from measures import Result, Sizes, cpu_notes, latency
from stage import Stage, scalar, wait_until
from systems import System

from gangq.client import Client

_WORKERS = 8
_WARM_UPS = 5
_SHORT_S = 0.2
_GPU = "1x24GiB"


def started_soon(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """From the call of submit until the handler of one job runs, on a worker that has nothing to do."""
    total = _WARM_UPS + sizes.gpu_pickups
    marks = stage.marks(total)
    took = []
    with (
        stage.database(system) as dsn,
        Client(dsn, min_size=1, max_size=1) as client,
        stage.process("gpu_work.py", "w1", dsn, str(marks.path), _GPU, "0") as worker,
    ):
        for number in range(total):
            time.sleep(random.uniform(0.04, 0.06) if number >= _WARM_UPS else 0.4)
            called = time.monotonic_ns()
            client.submit(task="noop", payloads=[{"n": number}], gpus=1)
            wait_until(lambda: marks.stamp_ns(number), f"job {number} started", worker, poll_s=0.002)  # noqa: B023
            if number >= _WARM_UPS:
                took.append((marks.stamp_ns(number) - called) / 1e6)
    return latency("one GPU job on an idle worker, submit to running", took, took)


@dataclass(frozen=True)
class _Run:
    """So many jobs that eight workers have run, one at a time each, and the seconds between the first and the last
    start."""

    jobs: int
    seconds: float
    notes: dict[str, float]

    @property
    def rate(self) -> float:
        return self.jobs / self.seconds


@contextlib.contextmanager
def _fleet(stage: Stage, dsn: str, devices: str, job_s: float) -> Iterator[tuple[list[Marks], list[int]]]:
    marks = [stage.marks(shut=True) for _ in range(_WORKERS)]
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(
                stage.process("gpu_work.py", f"w{n}", dsn, str(each.path), devices, str(job_s))
            )
            for n, each in enumerate(marks)
        ]
        wait_until(lambda: all(each.count for each in marks), "every worker had a job", *workers)
        yield marks, [worker.pid for worker in workers]


def _work_off(stage: Stage, system: System, jobs: int, gpus: int, job_s: float) -> _Run:
    """Workers that have their first job begin together; the clock stops when the last job starts."""
    with (
        stage.database(system) as dsn,
        psycopg.connect(dsn, autocommit=True) as look,
        Client(dsn, min_size=1, max_size=1) as client,
    ):
        client.submit(task="noop", payloads=[{}] * (jobs + _WORKERS), gpus=gpus)
        stage.tidy(dsn)
        with _fleet(stage, dsn, _GPU if gpus else "none", job_s) as (marks, pids):
            meter = CpuMeter(stage.server, *pids)
            began = time.monotonic()
            for each in marks:
                each.open()
            wait_until(lambda: sum(each.count for each in marks) >= jobs + _WORKERS, "every job started")
            seconds = time.monotonic() - began
            wait_until(lambda: not scalar(look, system.unfinished), "every job was finished")
            notes = cpu_notes(meter.read(), jobs)
    return _Run(jobs, seconds, {"jobs": jobs, **notes})


def follow_fast(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """No-op jobs on eight workers, with a GPU each and without; then jobs of 200 ms: how busy the devices are."""
    light = _work_off(stage, system, sizes.gpu_jobs, 0, 0)
    placed = _work_off(stage, system, sizes.gpu_jobs, 1, 0)
    short = _work_off(stage, system, sizes.gpu_short * _WORKERS, 1, _SHORT_S)
    busy = short.jobs * _SHORT_S / (_WORKERS * short.seconds)
    return [
        Result(f"no-op jobs, {_WORKERS} workers, light", "jobs/s", light.rate, notes=light.notes),
        Result(f"no-op jobs, {_WORKERS} workers with a GPU each", "jobs/s", placed.rate, notes=placed.notes),
        Result("GPU jobs to light jobs (0.5 or more)", "times", placed.rate / light.rate),
        Result(
            f"devices busy with jobs of {_SHORT_S * 1000:.0f} ms (95 or more)",
            "%",
            100 * busy,
            notes=short.notes,
        ),
    ]

"""The generated job log of `make simulate`, in memory and through SQL: what a pass costs, and the same schedule."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from measures import Result, Sizes
from stage import BenchError, Stage
from systems import System

sys.path.append(str(Path(__file__).parents[1] / "simulator"))

import lublin
from in_memory import InMemory
from outcome import judge
from simulate import LOAD, SEED

from simulator import Fleet, Policy, Replay

_POLICY = Policy(4)


def lublin_log(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The whole log in memory, and its first part on the real SQL."""
    fleet = Fleet()
    jobs = lublin.generate(5000, fleet.slots, LOAD, SEED)
    few = jobs[: sizes.replayed_by_sql]
    memory = InMemory(fleet, _POLICY)
    began = time.process_time()
    ran = memory.run(jobs[: sizes.replayed])
    took_s = time.process_time() - began
    with stage.database(system) as dsn:
        replay = Replay(dsn, fleet, _POLICY)
        try:
            by_sql = {one.job.id: one.start_s for one in replay.run(few)}
        finally:
            replay.close()
    same = {one.job.id: one.start_s for one in InMemory(fleet, _POLICY).run(few)}
    if differ := sorted(job for job, start_s in same.items() if by_sql[job] != start_s):
        raise BenchError(f"{len(differ)} jobs start at another second through SQL, job {differ[0]} first")
    seen = judge("replayed", ran, fleet.slots)
    title = f"{len(ran):,} jobs of the generated log on {fleet.slots} slots"
    quality = {
        "utilisation": round(seen.utilisation, 3),
        "slowdown": round(seen.all.slowdown, 1),
        "longest_wait_days": round(seen.all.longest_wait_s / 86400, 2),
    }
    notes = {"passes": memory.passes, **quality}
    cpu_ms, sql_ms = 1000 * memory.cpu_s / memory.passes, 1000 * replay.cpu_s / replay.passes
    return [
        Result(f"{title}, in memory (60 or less)", "CPU s", took_s, False, notes),
        Result("the same, deciding, mean (5 or less)", "CPU ms", cpu_ms, False),
        Result("the same, slowdown (400 or less)", "times", seen.all.slowdown, False),
        Result("the same, utilisation (91 or more)", "%", 100 * seen.utilisation),
        Result("the same, longest wait (8 or less)", "days", seen.all.longest_wait_s / 86400, False),
        Result(
            f"a pass of its first {len(few)} through SQL, mean (20 or less)",
            "CPU ms",
            sql_ms,
            False,
            {"passes": replay.passes},
        ),
    ]

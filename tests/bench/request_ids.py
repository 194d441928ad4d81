"""What a request_id costs: the same submissions with one and without, turn by turn on one connection.

Two ratios each: of the CPU of the server process that serves them, and of the time that the client waits, as in the
measure enqueue. The table of requests is there to be written in both.
"""

from __future__ import annotations

import statistics
import time
import uuid
from pathlib import Path

import psycopg
from measures import Result, Sizes
from stage import Stage
from systems import System

_TURNS = 10
_SUBMIT = "select gangq.submit('noop', payloads => %s::jsonb[], request_id => %s::uuid)"


def _cpu_us(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def cost(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """With a request_id to without, the median of ten turns, one at a time and in calls of 1,000."""
    results = []
    with stage.database(system) as dsn, psycopg.connect(dsn, autocommit=True) as session:
        pid = session.info.backend_pid

        def spent(calls: int, jobs: int, *, with_id: bool) -> dict[str, float]:
            payloads, cpu_us, began_ns = ["{}"] * jobs, _cpu_us(pid), time.monotonic_ns()
            for _ in range(calls):
                session.execute(_SUBMIT, (payloads, str(uuid.uuid4()) if with_id else None), prepare=True)
            return {"server CPU": _cpu_us(pid) - cpu_us, "time": (time.monotonic_ns() - began_ns) / 1e3}

        for how, calls, jobs in (
            ("one at a time", max(1, sizes.enqueue_single // _TURNS), 1),
            ("in calls of 1,000", max(1, sizes.drain // 1000 // _TURNS), 1000),
        ):
            for with_id in (True, False):
                spent(calls, jobs, with_id=with_id)  # The plans are made.
            turns = []
            for turn in range(_TURNS):
                first = turn % 2 == 0  # Nobody always goes first.
                turns.append({with_id: spent(calls, jobs, with_id=with_id) for with_id in (first, not first)})
            for what in ("server CPU", "time"):
                ratios = [us[True][what] / us[False][what] for us in turns]
                notes = {"least": round(min(ratios), 3), "most": round(max(ratios), 3), "calls": calls}
                ratio = statistics.median(ratios)
                results.append(Result(f"a request_id costs, {how}, {what}", "times", ratio, False, notes))
    return results

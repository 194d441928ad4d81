"""What a worker costs that has nothing to do: `gangq worker` as an operator starts it, with its supervisor."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import psycopg
from measures import Result, Sizes
from stage import BenchError, Stage, wait_until
from systems import System

_SETTLE_S = 25.0
"""Connections that only its start needed are closed one by one, ten seconds apart."""


def _memory_mb(pid: int) -> tuple[float, float]:
    """Resident, and resident with what is shared divided among those who share it (PSS)."""
    fields = {
        line.split(":")[0]: int(line.split()[1]) / 1024
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    }
    return fields["Rss"], fields["Pss"]


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def worker(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Memory, CPU, connections and calls of one idle worker."""
    argv = ["worker", "--name", "idle", "--devices", "none", "--expect-gpus", "0", "--log-level", "error"]
    with (
        stage.database(system) as dsn,
        # Seen from another database, so that looking is not counted.
        psycopg.connect(stage.server.dsn("postgres"), autocommit=True) as look,
        stage.process("idle_worker.py", *argv, "--dsn", dsn) as started,
    ):
        name = dsn_name(dsn)
        wait_until(lambda: _sessions(look, name) >= 2, "the worker had connected", started, poll_s=0.1)
        _wait(started, _SETTLE_S)
        parent = psutil.Process(started.pid)
        processes = [parent, *parent.children(recursive=True)]
        before, cpu, began = _commits(look, name), _cpu_s(processes), time.monotonic()
        connections = 0
        while time.monotonic() - began < sizes.flat.idle_s:
            _wait(started, 1.0)
            connections = max(connections, _sessions(look, name))
        took = time.monotonic() - began
        share = (_cpu_s(processes) - cpu) / took * 100
        calls = (_commits(look, name) - before) / took * 60
        memory = [_memory_mb(process.pid) for process in processes]
    notes = {f"process_{n}_rss_mb": round(rss, 1) for n, (rss, _) in enumerate(memory)}
    notes |= {f"process_{n}_pss_mb": round(pss, 1) for n, (_, pss) in enumerate(memory)}
    return [
        Result(
            "idle worker: its largest process (60 or less)",
            "MB RSS",
            max(rss for rss, _ in memory),
            False,
            notes,
        ),
        Result("idle worker: all its processes", "MB PSS", sum(pss for _, pss in memory), False, notes),
        Result("idle worker: CPU, supervisor included (0.5 or less)", "% of a core", share, False),
        Result("idle worker: connections (2 or less)", "at most", connections, False),
        Result("idle worker: calls of the database", "a minute", calls, False),
    ]


def dsn_name(dsn: str) -> str:
    """The name of the database."""
    return psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]  # type: ignore[return-value]


def _wait(started: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        started.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise BenchError(f"the worker ended ({started.returncode})")


def _sessions(look: psycopg.Connection, name: str) -> int:
    row = look.execute(
        "select count(*) from pg_stat_activity where datname = %s and backend_type = 'client backend'",
        (name,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def _commits(look: psycopg.Connection, name: str) -> int:
    row = look.execute(
        "select xact_commit + xact_rollback from pg_stat_database where datname = %s", (name,)
    ).fetchone()
    assert row is not None
    return int(row[0])

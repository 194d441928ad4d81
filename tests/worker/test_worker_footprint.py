"""What a worker costs while it has nothing to do (connections, memory, modules), and life on one connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from gangq.client import Client
from worker.worker_process import Fleet, WorkerProcess, eventually, fleet_of, short_leases, until_state

MEMORY_MB = 60


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client, lease_s=3, lease_margin_s=0.5, heartbeat_s=0.2, grace_s=0.5)
    with fleet_of(dsn, tmp_path) as running:
        running.define("""
@app.task
def modules(ctx):
    return sorted(sys.modules)

@app.task
def small(ctx):
    return None

@app.task
def long(ctx, path):
    while not Path(path).exists():
        time.sleep(0.01)
    return ctx.stopping
""")
        yield running


def connections(db: psycopg.Connection[dict[str, Any]]) -> list[str]:
    """What the connections of a worker are called."""
    found = db.execute(
        "select application_name as name from pg_stat_activity "
        "where datname = current_database() and application_name like 'gangq worker %' order by name"
    ).fetchall()
    return [str(row["name"]) for row in found]


def settled(client: Client, worker: WorkerProcess) -> WorkerProcess:
    """The worker once it has run a job, ticked, and has nothing to do."""
    until_state(client, client.submit(task="small")[0], "done")
    eventually(lambda: "listening" in worker.log or "tick" in worker.log, "it is up")
    return worker


@pytest.mark.parametrize("wanted", [1, 2])
def test_a_worker_has_as_many_connections_as_it_may_idle_or_at_work(
    db: psycopg.Connection[dict[str, Any]], client: Client, fleet: Fleet, tmp_path: Path, wanted: int
) -> None:
    settled(client, fleet.start(connections=wanted, prefetch=20))
    names = ["gangq worker w1", "gangq worker w1: main thread"][:wanted]
    eventually(lambda: connections(db) == names, "it has all of them")
    most = 0
    ids = client.submit(task="small", payloads=[{}] * 500)
    gate = tmp_path / "gate"
    ids += client.submit(task="long", payloads=[{"path": str(gate)}])
    until = time.monotonic() + 1
    while time.monotonic() < until:
        most = max(most, len(connections(db)))
    gate.touch()
    eventually(lambda: set(client.job_states(ids=ids).values()) == {"done"}, "all are done")
    assert most == wanted


def test_on_one_connection_work_begins_at_once_and_a_long_handler_outlives_many_leases(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    settled(client, fleet.start(connections=1))
    gate = tmp_path / "gate"
    sent_at = time.monotonic()
    job_id = client.submit(task="long", payloads=[{"path": str(gate)}])[0]
    until_state(client, job_id, "running", timeout=3.0)
    assert time.monotonic() - sent_at < 0.4, "it is told, and does not have to ask"
    first = client.workers(name="w1")[0].renewed_at
    eventually(
        lambda: (client.workers(name="w1")[0].renewed_at - first).total_seconds() > 4, "its lease is renewed"
    )
    gate.touch()
    job = until_state(client, job_id, "done")
    assert (job.result, job.attempts, job.crashes, job.stops) == (False, 1, 0, 0)
    assert client.violations() == []


def test_on_one_connection_a_cancellation_comes_at_once(client: Client, fleet: Fleet) -> None:
    client.configure(heartbeat_s=0.9)
    settled(client, fleet.start(connections=1))
    job_id = client.submit(task="command", payloads=[{"argv": ["sleep", "60"]}])[0]
    until_state(client, job_id, "running")
    client.cancel(job_ids=[job_id])
    until_state(client, job_id, "cancelled", timeout=5.0)


def test_an_idle_worker_is_small_and_carries_nothing_it_does_not_use(client: Client, fleet: Fleet) -> None:
    worker = settled(client, fleet.start())
    job = until_state(client, client.submit(task="modules")[0], "done")
    unused = {
        "gangq.embedded",
        "rich",
        "click",
        "numpy",
        "torch",
        "sqlalchemy",
    }
    assert unused.intersection(job.result) == set()
    used_mb = psutil.Process(worker.process.pid).memory_info().rss / 2**20
    assert used_mb < MEMORY_MB, f"an idle worker has {used_mb:.0f} MiB"

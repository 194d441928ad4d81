"""A worker whose private directory is removed: what runs goes on, what has not begun is handed back, code 77."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.worker import host_record
from worker.worker_process import Fleet, WorkerProcess, eventually, fleet_of, short_leases, until_state

GRACE_S = 1.0

TASKS = """
def until(name):
    (HERE / f"{name}-runs").touch()
    while not (HERE / name).exists():
        time.sleep(0.05)

@app.task
def waits(ctx, name):
    until(name)
    print("printed at the end")
    return name

@app.task(isolate=True)
def waits_apart(ctx, name):
    until(name)
    return name

@app.task(isolate=True)
def hangs_up(ctx, name):
    ctx._link.close()
    until(name)
    return name

@app.task(max_attempts=3)
def resumes(ctx, name):
    if ctx.job.attempt == 1:
        ctx.save_checkpoint(1, b"x")
        raise ValueError("the next attempt goes on")
    until(name)
    return ctx.checkpoint.step

@app.task
def stops_when_told(ctx, name):
    (HERE / f"{name}-runs").touch()
    while not ctx.stopping:
        time.sleep(0.05)
    raise Stopped
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the workers have their directories."""
    place = tmp_path / "run"
    place.mkdir()
    return place


@pytest.fixture
def fleet(
    dsn: str, client: Client, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    short_leases(client, lease_s=60, grace_s=GRACE_S)
    with fleet_of(dsn, tmp_path) as running:
        running.define(TASKS)
        yield running


def remove_directory(place: Path) -> None:
    """What a cleaner of temporary files does."""
    (directory,) = place.glob(f"{host_record.DIRECTORY_PREFIX}*")
    shutil.rmtree(directory)


def runs(tmp_path: Path, name: str) -> None:
    eventually((tmp_path / f"{name}-runs").exists, f"{name} runs")


def lets_the_job_run_beyond_its_grace(worker: WorkerProcess) -> None:
    """Wait for the log event, then for longer than the grace: a job that was told to stop would be killed by then."""
    eventually(lambda: "directory_gone" in worker.log, f"it is seen\n{worker.log}")
    time.sleep(GRACE_S + 1)
    assert worker.process.poll() is None, worker.log


def counts(client: Client, job_id: int) -> tuple[Any, ...]:
    job = client.job(id=job_id)
    return job.state, job.attempts, job.crashes


def test_a_worker_that_registers_anew_exits_77(
    client: Client, db: psycopg.Connection[Any], fleet: Fleet, place: Path
) -> None:
    worker = fleet.start()
    eventually(lambda: list(place.glob(f"*/{host_record.SOCKET}")), "it serves")
    (row,) = client.workers(name="w1")
    with db.transaction():
        db.execute("select from gangq.worker_names where name = 'w1' for update")
        client.retire_worker(incarnation=row.incarnation, final=True)
        eventually(lambda: "registration_failed" in worker.log, "it waits for its name")
        remove_directory(place)
    assert worker.exit_code() == 77
    assert "directory_gone" in worker.log


def test_an_idle_worker_hands_back_and_exits_77(client: Client, fleet: Fleet, place: Path) -> None:
    worker = fleet.start()
    eventually(lambda: list(place.glob(f"*/{host_record.SOCKET}")), "it serves")
    remove_directory(place)
    jobs = client.submit(task="command", payloads=[{"argv": ["true"]}] * 3)
    assert worker.exit_code() == 77
    assert "directory_gone" in worker.log
    assert set(client.job_states(ids=jobs).values()) == {"pending"}
    fleet.start()
    eventually(lambda: set(client.job_states(ids=jobs).values()) == {"done"}, "the next one runs them")
    assert [client.job(id=job).attempts for job in jobs] == [1, 1, 1]


def test_a_running_handler_finishes_and_what_has_not_begun_is_handed_back(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    worker = fleet.start(prefetch=2)
    working, held = client.submit(task="waits", payloads=[{"name": "a"}, {"name": "b"}])
    runs(tmp_path, "a")
    assert client.job(id=held).state == "running"
    remove_directory(place)
    until_state(client, held, "pending")
    lets_the_job_run_beyond_its_grace(worker)
    (tmp_path / "a").touch()
    assert worker.exit_code() == 77
    assert counts(client, working) == ("done", 1, 0)
    assert counts(client, held) == ("pending", 0, 0)
    assert "the directory of worker w1 was removed" in str(client.events(job_id=held))
    assert client.violations() == []


@pytest.mark.parametrize("kind", ["command", "handler"])
def test_a_job_in_a_process_of_its_own_finishes(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path, kind: str
) -> None:
    worker = fleet.start()
    waits = f"touch {tmp_path}/a-runs; until [ -e {tmp_path}/a ]; do sleep 0.05; done"
    payload = {"argv": ["sh", "-c", waits]} if kind == "command" else {"name": "a"}
    task = "command" if kind == "command" else "waits_apart"
    (job,) = client.submit(task=task, payloads=[payload], cpus=0.1)
    runs(tmp_path, "a")
    remove_directory(place)
    lets_the_job_run_beyond_its_grace(worker)
    (tmp_path / "a").touch()
    assert worker.exit_code() == 77
    assert counts(client, job) == ("done", 1, 0)
    if kind == "handler":
        assert client.job(id=job).result == "a"


def test_a_claimed_command_that_can_not_start_is_handed_back(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    # Nothing looks while the main thread waits for the first command: it comes to the second one by itself.
    worker = fleet.start(slots=0, light=1, prefetch=2)
    waits = f"touch {tmp_path}/a-runs; until [ -e {tmp_path}/a ]; do sleep 0.05; done"
    first, second = client.submit(
        task="command",
        payloads=[{"argv": ["sh", "-c", waits]}, {"argv": ["touch", str(tmp_path / "second")]}],
    )
    runs(tmp_path, "a")
    assert client.job(id=second).state == "running"
    remove_directory(place)
    (tmp_path / "a").touch()
    assert worker.exit_code() == 77
    assert counts(client, first) == ("done", 1, 0)
    assert counts(client, second) == ("pending", 0, 0)
    assert not (tmp_path / "second").exists()


def test_a_handler_that_can_not_say_how_it_ended_is_handed_back(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    worker = fleet.start()
    (job,) = client.submit(task="hangs_up", payloads=[{"name": "a"}], cpus=0.1)
    runs(tmp_path, "a")
    remove_directory(place)
    eventually(lambda: "directory_gone" in worker.log, "it is seen")
    (tmp_path / "a").touch()
    assert worker.exit_code() == 77
    assert counts(client, job) == ("pending", 0, 0)


def test_a_handler_that_can_not_have_its_checkpoint_is_handed_back(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    client.set_queue(name="default", backoff_s=0.01, backoff_max_s=0.01)
    worker = fleet.start()
    (job,) = client.submit(task="resumes", payloads=[{"name": "a"}])
    runs(tmp_path, "a")
    remove_directory(place)
    (tmp_path / "a").touch()
    assert worker.exit_code() == 77
    assert counts(client, job) == ("pending", 1, 0)
    assert list(place.iterdir()) == [], "nobody makes it anew"
    fleet.start()
    until_state(client, job, "done")
    assert client.job(id=job).result == 1


def test_a_replica_of_a_service_is_told_to_stop(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    worker = fleet.start()
    client.set_service(name="web", task="stops_when_told", payload={"name": "a"}, replicas=1)
    runs(tmp_path, "a")
    remove_directory(place)
    assert worker.exit_code() == 77
    assert client.violations() == []


def test_a_member_that_waits_for_its_gang_is_handed_back(client: Client, fleet: Fleet, place: Path) -> None:
    client.configure(claim_deadline_s=60)  # Else it would be handed back for that.
    worker = fleet.start("w1")
    eventually(lambda: list(place.glob(f"*/{host_record.SOCKET}")), "it serves")
    other = fleet.start("w2")
    eventually(lambda: len(client.workers()) == 2, "both are there")
    other.signal(signal.SIGSTOP)
    client.submit_gang(task="command", size=2, payload={"argv": ["true"]})
    member = eventually(
        lambda: next((job for job in client.jobs() if job.state == "running"), None), "one has claimed"
    )
    (directory,) = [p.parent for p in place.glob("*/worker") if '"w1"' in p.read_text()]
    shutil.rmtree(directory)
    assert worker.exit_code() == 77
    assert counts(client, member.id)[1:] == (0, 0)
    other.signal(signal.SIGCONT)


def test_an_operators_stop_gives_the_handler_its_grace(
    client: Client, fleet: Fleet, place: Path, tmp_path: Path
) -> None:
    worker = fleet.start()
    (job,) = client.submit(task="stops_when_told", payloads=[{"name": "a"}])
    runs(tmp_path, "a")
    remove_directory(place)
    lets_the_job_run_beyond_its_grace(worker)
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 77
    assert counts(client, job) == ("pending", 0, 0)

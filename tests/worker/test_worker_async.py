"""Async handlers: alone in the main thread or in a process of their own, and many in one process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.worker.async_main import _JobLog
from worker.worker_process import Fleet, eventually, short_leases, until_state

TASKS = """
import asyncio

@app.task(isolate=ISOLATED)
async def task(ctx, how="returns"):
    assert gangq.current() is ctx
    if how == "raises":
        await asyncio.sleep(0)
        raise ValueError("bad")
    if how == "waits":
        (HERE / f"waits-{ctx.job.id}").touch()
        try:
            await asyncio.sleep(60)
        finally:
            (HERE / f"cancelled-{ctx.job.id}").touch()
    ctx.beat(step=1)
    print("said by", ctx.job.id)
    return os.getpid()
"""


def submit(client: Client, how: str = "returns", task: str = "task", **options: object) -> int:
    options.setdefault("max_attempts", 1)
    return client.submit(task=task, payloads=[{"how": how}], **options)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_one_alone_runs_in_an_event_loop_of_its_own(client: Client, fleet: Fleet, isolate: bool) -> None:
    fleet.define(TASKS.replace("ISOLATED", str(isolate)))
    worker = fleet.start(slots=0, light=1)
    done = until_state(client, submit(client), "done")
    assert (done.result == worker.process.pid) is not isolate
    assert "".join(row.chunk for row in client.logs(job_id=done.id)).endswith(f"said by {done.id}\n")
    failed = until_state(client, submit(client, "raises"), "failed")
    assert failed.error is not None
    assert (failed.error["type"], failed.error["message"]) == ("ValueError", "bad")


def test_in_the_main_thread_it_is_cancelled_at_the_end_of_its_grace_and_the_worker_lives_on(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(TASKS.replace("ISOLATED", "False"))
    worker = fleet.start(slots=0, light=1)
    job = submit(client, "waits")
    eventually((tmp_path / f"waits-{job}").exists, "the handler waits")
    client.cancel(job_ids=[job])
    until_state(client, job, "cancelled")
    assert (tmp_path / f"cancelled-{job}").exists()
    assert until_state(client, submit(client), "done").result == worker.process.pid


MANY = """
import asyncio

@app.task
async def task(ctx, how="returns"):
    begun = HERE / f"begun-{ctx.job.id}"
    if begun.exists():
        return os.getpid()
    begun.touch()
    if how == "sleeps":
        await asyncio.sleep(1)
        assert gangq.current() is ctx
        assert await asyncio.to_thread(gangq.current) is ctx
        print("said by", ctx.job.id)
    if how == "waits":
        ctx.beat(step=ctx.job.id)
        while not (HERE / "go").exists():
            await asyncio.sleep(0.02)
            if ctx.stopping:
                print("stopping")
                return None
    if how == "deaf":
        try:
            await asyncio.sleep(60)
        finally:
            (HERE / f"cancelled-{ctx.job.id}").touch()
    if how == "immortal":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if how == "beats":
        while not (HERE / "go").exists():
            ctx.beat(step=1)
            await asyncio.sleep(0.1)
    if how == "blocks":
        time.sleep(60)
    if how == "exits":
        os._exit(3)
    if how == "is killed":
        os.kill(os.getpid(), 9)
    if how == "snoozes":
        try:
            ctx.snooze(0.1)
        finally:
            await asyncio.sleep(0.5)
            (HERE / "cleaned").touch()
    if how == "raises":
        raise ValueError("bad")
    return os.getpid()
"""


def begun(place: Path, *jobs: int) -> None:
    for job in jobs:
        eventually((place / f"begun-{job}").exists, f"job {job} has begun")


def charged(row: Any) -> tuple[int, int, int, int]:
    return row.attempts, row.crashes, row.trips, row.stops


def test_ten_that_sleep_take_about_one_sleep_in_one_process(client: Client, fleet: Fleet) -> None:
    fleet.define(MANY)
    worker = fleet.start(slots=0, light=10)
    warm = until_state(client, submit(client), "done")
    jobs = client.submit(task="task", payloads=[{"how": "sleeps"}] * 10)
    rows = [until_state(client, job, "done") for job in jobs]
    assert {row.result for row in rows} == {warm.result}
    assert warm.result != worker.process.pid
    took = max(row.finished_at for row in rows) - min(row.claimed_at for row in rows)
    assert took.total_seconds() < 3, "one after another they take ten"
    for job in jobs:
        assert "".join(row.chunk for row in client.logs(job_id=job)) == f"said by {job}\n"


def test_one_that_fails_leaves_the_others(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(MANY)
    fleet.start(slots=0, light=3)
    others = [submit(client, "waits") for _ in range(2)]
    for job in others:
        eventually(
            lambda job=job: (client.job(id=job).progress or {}).get("step") == job,
            "each has its own progress",
        )
    failed = until_state(client, submit(client, "raises"), "failed")
    assert failed.error is not None
    assert (failed.error["type"], failed.error["message"]) == ("ValueError", "bad")
    (tmp_path / "go").touch()
    pids = {until_state(client, job, "done").result for job in others}
    assert len(pids) == 1


@pytest.mark.parametrize("how", ["waits", "deaf", "immortal"])
def test_a_cancel_of_one_leaves_the_others(client: Client, fleet: Fleet, tmp_path: Path, how: str) -> None:
    fleet.define(MANY)
    fleet.start(slots=0, light=3)
    others = [submit(client, "waits") for _ in range(2)]
    job = submit(client, how)
    begun(tmp_path, job, *others)
    client.cancel(job_ids=[job])
    until_state(client, job, "cancelled")
    assert (tmp_path / f"cancelled-{job}").exists() is (how == "deaf")
    (tmp_path / "go").touch()
    rows = [until_state(client, other, "done") for other in others]
    assert [charged(row) for row in rows] == [(1, 0, 0, 0)] * 2


def test_a_trip_of_one_sends_the_others_back_uncharged(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(MANY)
    worker = fleet.start(slots=0, light=3)
    others = [submit(client, "waits") for _ in range(2)]
    begun(tmp_path, *others)
    tripped = submit(client, "deaf", budget_s=1, max_attempts=2)
    begun(tmp_path, tripped)
    eventually(lambda: client.trips(job_id=tripped), "it trips")
    (tmp_path / "go").touch()
    rows = [until_state(client, job, "done") for job in (tripped, *others)]
    assert [charged(row) for row in rows] == [(1, 0, 1, 0), (1, 0, 0, 0), (1, 0, 0, 0)]
    assert client.trips(job_id=tripped)[0].code == 75
    for job in others:
        assert client.trips(job_id=job) == []
        said = [event.reason for event in client.events(job_id=job) if event.kind == "release"]
        assert len(said) == 1, said
    assert worker.process.poll() is None


def test_a_stall_is_of_the_job_that_holds_the_event_loop(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    short_leases(client, stall_timeout_s=2)
    fleet.define(MANY)
    fleet.start(slots=0, light=3)
    beats = [submit(client, "beats") for _ in range(2)]
    begun(tmp_path, *beats)
    blocks = submit(client, "blocks", max_attempts=2)
    eventually(lambda: client.trips(job_id=blocks), "it trips", 60)
    (tmp_path / "go").touch()
    rows = [until_state(client, job, "done") for job in (blocks, *beats)]
    assert [charged(row) for row in rows] == [(1, 0, 1, 0), (1, 0, 0, 0), (1, 0, 0, 0)]
    (trip,) = client.trips(job_id=blocks)
    assert trip.code == 76
    assert f"job {blocks} (task 'task') holds the event loop of its process" in str(trip)


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_where_the_process_dies_all_in_it_have_failed(
    client: Client, fleet: Fleet, tmp_path: Path, how: str
) -> None:
    fleet.define(MANY)
    fleet.start(slots=0, light=2)
    other = submit(client, "waits", max_attempts=2)
    begun(tmp_path, other)
    dead = until_state(client, submit(client, how), "failed")
    assert dead.error is not None
    assert dead.error["type"] == "ExitStatus"
    assert dead.error["exit_status"] == {"exits": 3, "is killed": 137}[how]
    assert charged(until_state(client, other, "done")) == (2, 0, 0, 0)


def test_one_that_is_snoozed_ends_when_its_handler_has(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(MANY)
    fleet.start(slots=0, light=2)
    row = until_state(client, submit(client, "snoozes"), "done")
    assert (row.snoozes, (tmp_path / "cleaned").exists()) == (1, True)


HOOKS = """
@app.on_worker_start(children=True)
def start_process():
    with open(HERE / "hooks", "a") as file:
        print("process", os.getpid(), file=file)

@app.on_worker_stop(children=True)
def stop_process():
    with open(HERE / "hooks", "a") as file:
        print("over", os.getpid(), file=file)

@app.on_start
def start_job(ctx):
    with open(HERE / "hooks", "a") as file:
        print("job", ctx.job.id, file=file)

import gangq.worker.shared
gangq.worker.shared._MOST_JOBS = 3
"""


def test_hooks_are_called_once_a_process_and_once_a_job_and_a_process_is_replaced_after_so_many_jobs(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(MANY + HOOKS)
    worker = fleet.start(slots=0, light=2)
    pids = [until_state(client, submit(client), "done").result for _ in range(4)]
    assert len(set(pids[:3])) == 1
    assert pids[3] != pids[0]
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    lines = [
        line for line in (tmp_path / "hooks").read_text().splitlines() if str(worker.process.pid) not in line
    ]
    first, second = pids[0], pids[3]
    assert lines == [
        f"process {first}", "job 1", "job 2", "job 3", f"over {first}", f"process {second}", "job 4", f"over {second}"
    ]  # fmt: skip


def test_a_process_without_jobs_ends_with_the_lease_and_the_next_job_has_another(
    client: Client, fleet: Fleet
) -> None:
    fleet.define(MANY)
    fleet.start(slots=0, light=2)
    first = until_state(client, submit(client), "done").result
    eventually(lambda: not Path(f"/proc/{first}").exists(), "the idle process has ended")
    assert until_state(client, submit(client), "done").result != first


def test_one_that_its_guardian_stopped_before_its_worker_has_told_it_goes_back_uncharged(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(
        MANY
        + """
from gangq.errors import DatabaseUnreachable
from gangq.worker import lease
from gangq.worker.lease import LeaseKeeper

beat = LeaseKeeper.beat

async def fails(self):
    if (HERE / "away").exists():
        raise DatabaseUnreachable("away")
    await beat(self)

LeaseKeeper.beat = fails
lease.tell_lapsing = lambda session: None  # It may be a quarter of a second late.
"""
    )
    worker = fleet.start(slots=0, light=2)
    job = submit(client, "waits")
    begun(tmp_path, job)
    (tmp_path / "away").touch()
    eventually(
        lambda: "job_released" in worker.log or client.job(id=job).state != "running", "it has stopped"
    )
    (tmp_path / "away").unlink()
    assert charged(until_state(client, job, "done", "failed")) == (1, 0, 0, 1)


def test_a_drain_tells_each_to_stop_and_hands_them_back(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    fleet.define(MANY)
    worker = fleet.start(slots=0, light=3)
    jobs = [submit(client, how) for how in ("waits", "deaf", "sleeps")]
    begun(tmp_path, *jobs)
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    rows = [client.job(id=job) for job in jobs]
    assert [row.state for row in rows] == ["pending", "pending", "done"]
    assert [charged(row) for row in rows[:2]] == [(0, 0, 0, 1)] * 2
    assert (tmp_path / f"cancelled-{jobs[1]}").exists()
    assert "hard_exit" not in worker.log
    assert "shared_process_killed" not in worker.log


def test_a_job_that_was_reaped_cannot_complete(
    client: Client, fleet: Fleet, db: psycopg.Connection[Any], tmp_path: Path
) -> None:
    fleet.define(MANY)
    worker = fleet.start(slots=0, light=2)
    job = submit(client, "waits", max_attempts=2)
    other = submit(client, "waits")
    begun(tmp_path, job, other)
    incarnation = next(row.incarnation for row in client.workers())
    token = client.job(id=job).token
    client.release(job_ids=[job], tokens=[token])
    row = until_state(client, job, "done")
    assert (row.result is None, row.token) != (True, token)
    assert "job_lost" in worker.log
    (tmp_path / "go").touch()
    assert charged(until_state(client, other, "done")) == (1, 0, 0, 0)
    assert next(row.incarnation for row in client.workers()) == incarnation


CROWDED = """
import asyncio, contextlib, resource

def waits():
    while not (HERE / "go").exists():
        time.sleep(0.05)

@app.task
async def task(ctx, how="returns"):
    if how == "has all files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        files = []
        with contextlib.suppress(OSError):
            while True:
                files.append(open("/dev/null"))
        files.pop().close()
        files.append(open(HERE / "crowded", "w"))
        while not os.access(HERE / "go", os.F_OK):
            await asyncio.sleep(0.05)
        for file in files:
            file.close()
    if how == "has a thread":
        (HERE / f"begun-{ctx.job.id}").touch()
        await asyncio.to_thread(waits)
"""


def test_one_for_which_the_process_has_no_file_left_begins_once_it_has(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(CROWDED)
    fleet.start(slots=0, light=2)
    first = submit(client, "has all files")
    eventually((tmp_path / "crowded").exists, "no file is left")
    second = submit(client)
    until_state(client, second, "running")
    time.sleep(0.5)
    assert client.job(id=second).state == "running"
    (tmp_path / "go").touch()
    for job in (first, second):
        until_state(client, job, "done")


def test_one_begins_and_ends_while_others_have_all_threads_of_the_event_loop(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(CROWDED)
    most = min(32, (os.cpu_count() or 1) + 4)
    fleet.start(slots=0, light=most + 1)
    others = [submit(client, "has a thread") for _ in range(most)]
    begun(tmp_path, *others)
    until_state(client, submit(client), "done", timeout=10)
    (tmp_path / "go").touch()
    for job in others:
        until_state(client, job, "done")


def test_one_that_no_thread_can_be_started_for_is_run_once_there_are_threads(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
start, refused = threading.Thread.start, []

def refuses(self):
    if self.name.startswith("gangq-call") and len(refused) < 3:
        refused.append(self.name)
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = refuses

@app.task
async def any(ctx):
    return len(refused)
""")
    fleet.start(slots=0, light=2)
    (job,) = client.submit(task="any", max_attempts=1)
    assert until_state(client, job, "done").result == 3


def test_what_of_its_output_is_not_kept_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    output = _JobLog(str(tmp_path / "log"), (100, 0))
    assert output._log is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, output._log._head)
    os.close(full)
    assert output.write("lost")
    output.finish()
    assert "output_not_kept: [Errno 28]" in caplog.text

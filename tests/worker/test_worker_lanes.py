"""Placed work and light jobs on one worker: each in its own slots, and beside each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import Fleet, WorkerProcess, eventually, fleet_of, short_leases, until_state

TASKS = """
@app.task
def waits(ctx, until=None, name="work"):
    (HERE / f"{name}-{ctx.job.id}").write_text(f"{os.getpid()}")
    while not ctx.stopping:
        if until and Path(until).exists():
            return [os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), os.getcwd(), os.environ.get("SET_BY_JOB")]
        time.sleep(0.01)

@app.task
def changes_and_waits(ctx, until):
    os.chdir("/")
    os.environ["SET_BY_JOB"] = "yes"
    return waits(ctx, until)

@app.task
def submits(ctx):
    return waits.options(memory_mb=1).submit(until=__file__).id

@app.task
def deaf(ctx):
    (HERE / f"work-{ctx.job.id}").write_text(f"{os.getpid()}")
    while True:
        time.sleep(0.01)
"""
GPU = {"devices": "1x24GiB"}


@pytest.fixture
def fleet(dsn: str, client: Client, tmp_path: Path) -> Iterator[Fleet]:
    short_leases(client)
    with fleet_of(dsn, tmp_path) as running:
        running.define(TASKS)
        yield running


def placed(client: Client, task: str = "waits", **payload: object) -> int:
    """A job that is placed on any worker, with or without a GPU."""
    return client.submit(task=task, payloads=[payload], memory_mb=1, wait_for_hardware=True)[0]


def light(client: Client, task: str = "waits", **payload: object) -> int:
    return client.submit(task=task, payloads=[payload], wait_for_hardware=True)[0]


def at_work(directory: Path, job: int) -> int:
    """Wait until the job's handler runs; return its process."""
    file = directory / f"work-{job}"
    eventually(lambda: file.exists() and file.read_text(), f"job {job} is at work")
    return int(file.read_text())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("gpu", [True, False], ids=["the GPU job in the main thread", "the light one"])
def test_a_job_of_the_other_lane_runs_in_a_child_while_the_handler_in_the_main_thread_runs(
    client: Client, fleet: Fleet, tmp_path: Path, gpu: bool
) -> None:
    worker = fleet.start(**GPU if gpu else {})
    go = tmp_path / "go"
    if gpu:
        (main,) = client.submit(
            task="changes_and_waits", payloads=[{"until": str(go)}], gpus=1, wait_for_hardware=True
        )
    else:
        main = light(client, "changes_and_waits", until=str(go))
    assert at_work(tmp_path, main) == worker.process.pid
    for _ in range(2):
        other = (light if gpu else placed)(client, until="/")
        pid, devices, directory, changed = until_state(client, other, "done").result
        assert pid != worker.process.pid
        assert devices == ""
        # Neither what the handler in the main thread has done to its process.
        assert (directory, changed) == (str(tmp_path), None)
    assert client.job(id=main).state == "running"
    go.touch()
    result = until_state(client, main, "done").result
    assert result == [worker.process.pid, "0" if gpu else "", "/", "yes"]
    assert client.violations() == []


@pytest.mark.parametrize("kept", ["placed", "light"])
def test_a_worker_may_be_kept_to_one_lane(client: Client, fleet: Fleet, tmp_path: Path, kept: str) -> None:
    worker = fleet.start(slots=int(kept == "placed"), light=int(kept == "light"))
    jobs = {"placed": placed(client, until="/"), "light": light(client, until="/")}
    assert until_state(client, jobs.pop(kept), "done").result[0] == worker.process.pid
    # Nobody has to be waited for: one that could run it is known.
    needs = {"memory_mb": 1} if kept == "placed" else {}
    until_state(client, client.submit(task="waits", payloads=[{"until": "/"}], **needs)[0], "done")
    (other,) = jobs.values()
    assert client.job(id=other).state == "pending"


def test_both_lanes_run_as_many_jobs_at_once_as_they_have_slots(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start(slots=2, light=2)
    go = tmp_path / "go"
    jobs = {make: [make(client, until=str(go)) for _ in range(4)] for make in (placed, light)}
    for make in (placed, light):
        eventually(
            lambda make=make: list(client.job_states(ids=jobs[make]).values()).count("running") == 2,
            "two of this lane run",
        )  # type: ignore[misc]
    for job in [job for some in jobs.values() for job in some if client.job(id=job).state == "running"]:
        at_work(tmp_path, job)
    assert len(client.jobs(state="running")) == 4
    go.touch()
    for job in [*jobs[placed], *jobs[light]]:
        until_state(client, job, "done")
    assert client.violations() == []


def test_a_prefetch_is_of_light_jobs_only(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    worker = fleet.start(prefetch=3)
    go = tmp_path / "go"
    lights = [light(client, until=str(go)) for _ in range(5)]
    assert at_work(tmp_path, lights[0]) == worker.process.pid
    several = [placed(client, until=str(go)) for _ in range(3)]
    assert at_work(tmp_path, several[0]) != worker.process.pid
    # The first light job may have been claimed alone, before there were others.
    eventually(
        lambda: list(client.job_states(ids=several).values()).count("running") == 1, "one placed job runs"
    )
    assert list(client.job_states(ids=lights).values()).count("running") in (1, 2, 3)
    go.touch()
    for job in lights + several:
        until_state(client, job, "done")
    eventually(lambda: worker.log.count("job_begins") == 8, "all have begun")
    assert client.violations() == []


def both_at_work(
    client: Client, fleet: Fleet, directory: Path, main: str
) -> tuple[WorkerProcess, int, int, int]:
    """A worker whose main thread runs the light task `main`, and a child a placed job; then who they are."""
    worker = fleet.start()
    own, other = light(client, main), placed(client)
    assert at_work(directory, own) == worker.process.pid
    return worker, own, other, at_work(directory, other)


def test_sigterm_hands_the_jobs_of_both_lanes_back_with_their_attempts(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    client.configure(grace_s=20, lease_s=60)
    worker, own, other, pid = both_at_work(client, fleet, tmp_path, "waits")
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert gone(pid)
    for job in (own, other):
        row = client.job(id=job)
        assert (row.state, row.attempts, row.stops, row.crashes) == ("pending", 0, 1, 0)
    assert client.workers()[0].state == "retired"
    assert client.violations() == []


@pytest.mark.parametrize("order", ["sigterm", "cancel"])
def test_where_the_main_thread_does_not_stop_the_childs_job_goes_back_with_its_attempt(
    client: Client, fleet: Fleet, tmp_path: Path, order: str
) -> None:
    worker, own, other, pid = both_at_work(client, fleet, tmp_path, "deaf")
    if order == "sigterm":
        worker.signal(signal.SIGTERM)
    else:
        client.cancel(job_ids=[own])
    assert worker.exit_code() == 79
    eventually(lambda: gone(pid), "the child is gone")
    fleet.start("w1", light=0, slots=1)  # It finds the word its predecessor left.
    row = until_state(client, other, "running")
    assert (row.attempts, row.crashes, row.trips) == (1, 0, 0)
    assert until_state(client, own, "cancelled" if order == "cancel" else "pending").crashes == 0
    assert client.violations() == []


def test_once_ends_when_nothing_is_left_in_either_lane(client: Client, fleet: Fleet) -> None:
    jobs = [light(client, until="/"), placed(client, until="/"), light(client, "submits")]
    assert fleet.start(once=True).exit_code() == 0
    jobs.append(client.job(id=jobs[-1]).result)
    assert [client.job(id=job).state for job in jobs] == ["done"] * 4


SCRIPT = """
import os, sys, gangq
def made():
    app = gangq.App(os.environ["TEST_DSN"])
    @app.task
    def pid(ctx):
        return os.getpid()
    return app
"""


def run_script(dsn: str, directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"
    script.write_text(SCRIPT + text)
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TEST_DSN": dsn},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_an_app_that_no_other_process_can_import_works_in_the_lane_of_the_main_thread(
    client: Client, dsn: str, tmp_path: Path
) -> None:
    one, other = light(client, "pid"), placed(client, "pid")
    ended = run_script(dsn, tmp_path, "made().run_worker(once=True, devices='none')")
    assert ended.returncode == 0, ended.stderr
    assert (client.job(id=one).state, client.job(id=other).state) == ("done", "pending")
    assert ended.stderr.count("one_lane") == 1
    (worker,) = client.workers()
    assert (worker.slots, worker.light) == (0, 1)


def test_a_script_that_starts_its_worker_under_the_usual_if_works_in_both_lanes(
    client: Client, dsn: str, tmp_path: Path
) -> None:
    jobs = [light(client, "pid"), placed(client, "pid")]
    text = "app = made()\nif __name__ == '__main__':\n    app.run_worker(once=True, devices='none')"
    ended = run_script(dsn, tmp_path, text)
    assert ended.returncode == 0, ended.stderr
    assert [client.job(id=job).state for job in jobs] == ["done"] * 2
    assert client.job(id=jobs[0]).result != client.job(id=jobs[1]).result


def test_a_script_without_that_if_is_told_what_to_write(client: Client, dsn: str, tmp_path: Path) -> None:
    job = client.submit(task="pid", payloads=[{}], memory_mb=1, max_attempts=1, wait_for_hardware=True)[0]
    ended = run_script(dsn, tmp_path, "app = made()\napp.run_worker(once=True, devices='none')")
    assert ended.returncode == 0, ended.stderr
    error = until_state(client, job, "failed").error
    assert error is not None
    assert "__main__" in error["message"]


def test_jobs_with_a_rate_start_at_its_pace(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task(limit_key="api", rate="2/1s")
def asks(ctx):
    pass
""")
    fleet.start(slots=8)
    jobs = client.submit(task="asks", payloads=[{}] * 6, wait_for_hardware=True, limit_key="api", rate="2/1s")
    began = sorted(until_state(client, job, "done").claimed_at for job in jobs)
    # Two at once, then one each half second. A claim follows its place by some milliseconds, the first one by more.
    assert (began[-1] - began[0]).total_seconds() > 1.7
    assert (began[-1] - began[0]).total_seconds() < 6

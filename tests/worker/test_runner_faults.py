"""A fault of the worker while a job runs: the job is reported when nothing of it runs any more, and not before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gangq.client import Client
from worker.worker_process import Fleet, WorkerProcess, can_freeze, eventually, frozen, until_state

FAULT = """
from gangq.worker.child import Child
from gangq.worker.output import LogShipper

start, ship = Child.start, LogShipper.ship

def faults(self):
    if (HERE / "fault").exists():
        raise RuntimeError("can't start new thread")
    ship(self)

Child.start = classmethod(lambda cls, *args, **more: start(*args, **{**more, "stuck_after_s": 0.5}))
LogShipper.ship = faults
"""


def command(client: Client, place: Path) -> tuple[int, int]:
    """A job that runs a command, and the pid of that."""
    argv = ["sh", "-c", f"echo $$ > {place / 'new'} && mv {place / 'new'} {place / 'pid'} && exec sleep 1000"]
    job = client.submit(task="command", payloads=[{"argv": argv}], max_attempts=1)[0]
    eventually((place / "pid").exists, "the command runs")
    return job, int((place / "pid").read_text())


@pytest.fixture(params=[1, 2], ids=["main thread", "child lane"])
def worker(request: pytest.FixtureRequest, fleet: Fleet) -> WorkerProcess:
    """A worker that faults once there is a file `fault`, with one light slot or two."""
    fleet.define(FAULT)
    return fleet.start(slots=0, light=request.param)


def test_its_process_is_gone_before_it_is_reported(
    client: Client, worker: WorkerProcess, tmp_path: Path
) -> None:
    job, pid = command(client, tmp_path)
    (tmp_path / "fault").touch()
    row = until_state(client, job, "failed")
    assert not Path(f"/proc/{pid}").exists()
    assert "its worker could not run it" in row.error["message"]
    (tmp_path / "fault").unlink()
    (tmp_path / "pid").unlink()
    job, pid = command(client, tmp_path)
    client.cancel(job_ids=[job])
    until_state(client, job, "cancelled")
    assert worker.process.poll() is None


@can_freeze
def test_one_that_survives_sigkill_is_not_reported_and_its_worker_ends_with_87(
    client: Client, worker: WorkerProcess, tmp_path: Path
) -> None:
    job, pid = command(client, tmp_path)
    with frozen(pid):
        (tmp_path / "fault").touch()
        assert worker.exit_code() == 87
        assert client.job(id=job).state == "running"
        (row,) = client.workers(name="w1")
        assert (row.reboot_needed, row.quarantined is None) == (True, False)
        os.kill(pid, 0)


def test_one_of_many_in_an_event_loop_has_ended_before_it_is_reported(
    client: Client, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.define(
        FAULT
        + """
import asyncio

@app.task
async def waits(ctx):
    (HERE / "begun").touch()
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.5)
        (HERE / "ended").touch()
"""
    )
    fleet.start(slots=0, light=2)
    job = client.submit(task="waits", max_attempts=1)[0]
    eventually((tmp_path / "begun").exists, "it has begun")
    (tmp_path / "fault").touch()
    until_state(client, job, "failed")
    assert (tmp_path / "ended").exists()


def test_a_job_that_no_thread_can_be_started_for_is_handed_back_and_those_claimed_with_it_run(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
start, refused = threading.Thread.start, []

def refuses(self):
    if self.name.startswith("gangq-job-") and not refused:
        refused.append(self.name)
        raise RuntimeError("can't start new thread")
    start(self)

threading.Thread.start = refuses

@app.task
def any(ctx): ...
""")
    jobs = client.submit(task="any", payloads=[{}] * 3, max_attempts=1)
    worker = fleet.start(slots=0, light=3)
    rows = [until_state(client, job, "done") for job in jobs]
    assert sorted(row.stops for row in rows) == [0, 0, 1]
    assert worker.log.count("job_not_begun") == 1


def test_a_command_is_done_although_a_file_that_it_leaves_cannot_be_removed(
    client: Client, fleet: Fleet
) -> None:
    fleet.start(slots=0, light=1)
    argv = ["sh", "-c", 'mkdir "$(dirname "$GANGQ_SOCKET")/$$.stacks"']
    job = client.submit(task="command", payloads=[{"argv": argv}], max_attempts=1)[0]
    until_state(client, job, "done")


def test_a_handler_that_could_not_be_run_leaves_nothing_on_that_ends_its_worker(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
from gangq.worker.output import Capture

def fails(self, job):
    raise OSError("no space left on device")

Capture.begin = fails

@app.task
def any(ctx): ...
""")
    worker = fleet.start(slots=0, light=1)
    job = client.submit(task="any", max_attempts=1, budget_s=1)[0]
    until_state(client, job, "failed")
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(3)

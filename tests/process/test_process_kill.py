"""kill -9: the job runs again, and only after every process of the attempt before is gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from process.floor import LEASE_S, PATIENCE_S, Floor
from worker.worker_process import WorkerProcess, eventually


def three_at_work(floor: Floor) -> dict[int, WorkerProcess]:
    """A handler, a command, and a command with a process below it; each on a worker of its own, by job."""
    at_work: dict[int, WorkerProcess] = {}
    for name, submit, processes in (
        ("handler", lambda: floor.inline(payload={"deaf": True}), 1),
        ("command", floor.command, 1),
        ("tree", lambda: floor.command("--below", "--deaf"), 2),
    ):
        worker = floor.start(name, ready=False)
        job = submit()
        floor.until_at_work(job, processes)
        at_work[job] = worker
    return at_work


def watch_until_second_attempt(floor: Floor, job: int) -> None:
    """Sample /proc until the second attempt has begun: it may not while a process of the first lives."""
    (first,) = floor.journal.attempts(job)[:1]

    def second_has_begun() -> bool:
        # In this order: what lives now did so when the attempt had already begun.
        begun = len(floor.journal.attempts(job)) > 1
        left = floor.journal.living(job, token=first)
        assert not (begun and left), f"attempt 2 of job {job} has begun, and {left} of attempt 1 live"
        return begun

    eventually(second_has_begun, f"job {job} runs again", PATIENCE_S)


def kill_hard(worker: WorkerProcess) -> None:
    worker.signal(signal.SIGKILL)
    worker.exit_code()


def assert_ran_again_once(floor: Floor, job: int, row: Any) -> None:
    assert floor.journal.attempts(job) == [floor.journal.attempts(job)[0], row.token]
    assert (row.attempts, row.crashes, row.stops) == (1, 1, 0)


def test_jobs_of_killed_workers_run_again_as_soon_as_these_are_back(floor: Floor) -> None:
    # Nobody waits for a lease like this one: only proof of death can free the jobs in time.
    floor.configure(lease_s=600, lease_margin_s=60)
    at_work = three_at_work(floor)
    for worker in at_work.values():
        kill_hard(worker)
    for worker in at_work.values():
        floor.start(worker.name, ready=False)
    for job in at_work:
        watch_until_second_attempt(floor, job)
    for job, row in zip(at_work, floor.until_done(*at_work), strict=True):
        assert_ran_again_once(floor, job, row)
        reap = floor.client.events(job_id=job)
        assert [e.kind for e in reap].count("reap") == 1, reap


def test_jobs_of_killed_workers_that_stay_away_run_again_after_the_lease(floor: Floor) -> None:
    at_work = three_at_work(floor)
    for worker in at_work.values():
        kill_hard(worker)
    renewed = {job: floor.worker_row(worker.name).renewed_at for job, worker in at_work.items()}
    floor.start("spare", ready=False)
    for job in at_work:
        watch_until_second_attempt(floor, job)
    for job, row in zip(at_work, floor.until_done(*at_work), strict=True):
        assert_ran_again_once(floor, job, row)
        assert row.worker == "spare"
        assert (row.claimed_at - renewed[job]).total_seconds() >= LEASE_S


@pytest.mark.soak
def test_what_a_killed_guardian_leaves_behind_is_gone_before_the_job_runs_again(floor: Floor) -> None:
    floor.configure(lease_s=600, lease_margin_s=60)
    worker = floor.start("w", ready=False)
    job = floor.command("--below", "--deaf")
    pids = floor.until_at_work(job, 2)
    guardians = {
        a.pid for pid in pids for a in psutil.Process(pid).parents() if "guardian.py" in " ".join(a.cmdline())
    }
    assert len(guardians) == 1
    kill_hard(worker)
    # Nobody is left who would kill what has left the command's group.
    os.kill(guardians.pop(), signal.SIGKILL)
    floor.start("w", ready=False)
    watch_until_second_attempt(floor, job)
    assert_ran_again_once(floor, job, *floor.until_done(job))


@pytest.mark.parametrize("deaf", [False, True], ids=["obeying", "deaf"])
def test_the_killed_command_of_a_living_worker_is_the_jobs_affair_only(floor: Floor, deaf: bool) -> None:
    worker = floor.start("w", ready=False)
    job = floor.command("--below", *["--deaf"] * deaf, max_attempts=2)
    leader = floor.until_at_work(job, 2)[0]
    os.kill(leader, signal.SIGKILL)
    watch_until_second_attempt(floor, job)
    (row,) = floor.until_done(job)
    assert (row.attempts, row.crashes) == (2, 0)
    assert worker.process.poll() is None

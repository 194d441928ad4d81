"""SIGSTOP: whoever freezes past its lease has lost its work, knows nothing of it, and must change nothing."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from process.evidence import boottime
from process.floor import LEASE_S, PATIENCE_S, Floor
from worker.worker_process import eventually, until_state


def record(floor: Floor, job: int) -> tuple[Any, list[Any]]:
    """All that the database knows of a job."""
    return floor.client.job(id=job), floor.client.events(job_id=job)


def test_a_stopped_workers_handler_is_dead_before_its_lease_ends(floor: Floor) -> None:
    worker = floor.start("w", ready=False)
    job = floor.inline(payload={"deaf": True})
    floor.until_at_work(job)
    worker.signal(signal.SIGSTOP)
    floor.start("spare", ready=False)
    assert worker.exit_code() == -signal.SIGKILL
    assert floor.worker_row("w").lease_left_s > 0
    (row,) = floor.until_done(job)
    assert (row.worker, row.attempts, row.crashes) == ("spare", 1, 1)


def test_a_stopped_workers_command_is_dead_before_its_lease_ends_and_the_zombie_changes_nothing(
    floor: Floor,
) -> None:
    worker = floor.start("w", ready=False)
    job = floor.command("--below", "--deaf")
    floor.until_at_work(job, 2)
    before = floor.worker_row("w")
    worker.signal(signal.SIGSTOP)
    eventually(lambda: floor.journal.living(job) == [], "the tree is dead", PATIENCE_S)
    assert floor.worker_row("w").lease_left_s > 0
    assert floor.client.job(id=job).state == "running"
    floor.start("spare", ready=False)
    (row,) = floor.until_done(job)
    assert (row.worker, row.attempts, row.crashes) == ("spare", 1, 1)
    known = record(floor, job)
    worker.signal(signal.SIGCONT)
    eventually(lambda: floor.worker_row("w").incarnation > before.incarnation, "it is back", PATIENCE_S)
    floor.until_done(floor.inline("quick"))
    assert record(floor, job) == known
    assert worker.process.poll() is None


def test_a_worker_that_was_stopped_while_idle_registers_anew_and_takes_the_next_job(floor: Floor) -> None:
    worker = floor.start("w")
    floor.start("other")  # It runs the tick that ends the silent one.
    before = floor.worker_row("w").incarnation
    worker.signal(signal.SIGSTOP)
    eventually(lambda: floor.worker_row("w").state == "dead", "its lease has ended", PATIENCE_S)
    worker.signal(signal.SIGCONT)
    eventually(lambda: floor.worker_row("w").state == "live", "it is back", PATIENCE_S)
    assert floor.worker_row("w").incarnation > before
    job = floor.inline("quick", labels={}, payload={})
    assert until_state(floor.client, job, "done").worker in ("w", "other")


@pytest.mark.soak
def test_a_stopped_gang_member_drains_its_gang_and_all_run_again(floor: Floor) -> None:
    first, second = floor.start("w1"), floor.start("w2")
    gang = floor.client.submit_gang(task="command", size=2, payload=floor.work("--deaf"))
    for job in gang.job_ids:
        floor.until_at_work(job)
    victim = next(w for w in (first, second) if w.name == floor.client.job(id=gang.job_ids[1]).worker)
    victim.signal(signal.SIGSTOP)
    floor.start("spare", ready=False)
    eventually(lambda: floor.client.gang(id=gang.gang_id).state == "done", "it is done", PATIENCE_S)
    members = [floor.client.job(id=job) for job in gang.job_ids]
    assert [m.crashes for m in members] == [0, 1]
    assert floor.client.gang(id=gang.gang_id).epoch == 2
    victim.signal(signal.SIGCONT)
    (drain,) = floor.client.drains(gang_id=gang.gang_id)
    assert (drain.cause, drain.outcome) == ("crash", "blocked")


def test_whoever_runs_the_tick_may_freeze_and_gangs_are_placed_and_leases_judged(
    floor: Floor,
) -> None:
    frozen = [floor.start(name) for name in ("frozen1", "frozen2")]
    dead = floor.start("dead")
    job = floor.inline(payload={"deaf": True})
    worker = floor.until_at_work(job) and floor.client.job(id=job).worker
    victim = next(w for w in (*frozen, dead) if w.name == worker)
    others = [w for w in (*frozen, dead) if w is not victim]
    for name in ("well1", "well2"):
        floor.start(name)
    for stopped in others:
        stopped.signal(signal.SIGSTOP)
    victim.signal(signal.SIGKILL)
    victim.exit_code()
    renewed = floor.worker_row(victim.name).renewed_at
    # candidate_silence_s has to pass before the silent ones are no candidates any more. They are not flagged: they
    # hold no job.
    eventually(
        lambda: all(floor.worker_row(w.name).silent_s > 3 for w in others), "no candidates", PATIENCE_S
    )
    gang = floor.client.submit_gang(task="quick", size=2)
    eventually(lambda: floor.client.gang(id=gang.gang_id).state == "done", "it is done", PATIENCE_S)
    placed = next(step for step in floor.client.timeline(gang_id=gang.gang_id) if step.what == "reserve")
    assert (placed.at - floor.client.gang(id=gang.gang_id).submitted_at).total_seconds() < 2
    floor.until_done(job)
    ended = next(e for e in floor.client.events(job_id=job) if e.kind == "reap")
    assert 0 <= (ended.at - renewed).total_seconds() - LEASE_S < 2
    for stopped in others:
        stopped.signal(signal.SIGKILL)


def test_a_client_that_freezes_inside_its_transaction_stalls_nobody(floor: Floor) -> None:
    dsn = floor.client.target.conninfo
    more = f"""
import psycopg
@app.task
def holds(ctx):
    with psycopg.connect({dsn!r}) as conn:
        ctx.complete(conn, "held")
        (HERE / "held").touch()
        while not (HERE / "commit").exists():
            time.sleep(0.02)
        conn.commit()
"""
    from process.floor import TASKS

    floor.fleet.define(TASKS + more)
    holder = floor.start("holder")
    held = floor.inline("holds")
    eventually((floor.directory / "held").exists, "it holds its completion uncommitted", PATIENCE_S)
    doomed = floor.start("doomed")
    job = floor.inline(payload={"deaf": True})
    floor.until_at_work(job)
    doomed.signal(signal.SIGKILL)
    doomed.exit_code()
    renewed = floor.worker_row("doomed").renewed_at
    since = boottime()
    floor.start("spare")
    gang = floor.client.submit_gang(task="quick", size=1)
    eventually(lambda: floor.client.gang(id=gang.gang_id).state == "done", "a gang is run", 10)
    (row,) = floor.until_done(job)
    assert 0 <= (row.claimed_at - renewed).total_seconds() - LEASE_S < 4
    eventually(lambda: boottime() - since > 2 * LEASE_S, "two leases have passed", PATIENCE_S)
    assert floor.client.job(id=held).state == "running"
    assert floor.worker_row("holder").flagged_at is None
    (floor.directory / "commit").touch()
    (row,) = floor.until_done(held)
    assert (row.result, row.attempts, row.crashes) == ("held", 1, 0)
    assert holder.process.poll() is None

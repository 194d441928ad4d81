"""Hung work frees its worker by itself: real workers, real hangs, and what the database knows afterwards."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from gangq.embedded import Server
from process.floor import LEASE_S, PATIENCE_S, TASKS, Floor, Restarter
from worker.worker_process import eventually

HUNG = """
def again(ctx):
    "Whether this job has been tried before."
    try:
        (HERE / f"tried-{ctx.job.id}-{ctx.job.payload.get('rank')}").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

@app.task
def outruns(ctx, seconds=600.0):
    if again(ctx):
        return "again"
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        step += 1
        ctx.beat(step=step)
        time.sleep(0.05)
    return "first"

@app.task
def stalls(ctx):
    if again(ctx):
        return "again"
    ctx.beat(step=7, total=9, phase="run")
    deadlock()

app.task(outruns.function, name="outruns_apart", isolate=True)
app.task(stalls.function, name="stalls_apart", isolate=True)

@app.task
def rank_1_stalls(ctx, rank=None):
    if ctx.gang.epoch > 1:
        return "again"
    for step in range(100000):
        ctx.beat(step=step)
        if ctx.gang.rank == 1 and step == 5:
            deadlock()
        if ctx.wait_stopping(0.05):
            return None

@app.task
def model_of(ctx):
    return os.getpid()
"""


@pytest.fixture
def hung(floor: Floor) -> Floor:
    """A floor whose tasks hang, and whose watchdogs have little patience."""
    floor.fleet.define(TASKS + HUNG)
    floor.configure(stall_timeout_s=2)
    return floor


def the_trip(floor: Floor, job: int) -> Any:
    (trip,) = floor.client.trips(job_id=job)
    return trip


@pytest.mark.slow
def test_of_three_workers_under_one_host_name_two_trip_and_the_third_never_notices(hung: Floor) -> None:
    floor = hung
    floor.client.set_queue(name="other")
    third = floor.start("third", host="h1", queues=["other"])
    healthy = floor.inline(queue="other")
    floor.until_at_work(healthy)
    before = floor.worker_row("third").incarnation, floor.journal.attempts(healthy)
    slow = floor.inline("outruns", budget_s=2)
    stuck = floor.inline("stalls")
    with Restarter(floor, first={"host": "h1"}, second={"host": "h1"}) as restarter:
        rows = floor.until_done(slow, stuck)
        assert sorted(restarter.codes) == [75, 76]
    assert [(r.result, r.attempts, r.trips, r.crashes) for r in rows] == [("again", 1, 1, 0)] * 2
    budget, stall = the_trip(floor, slow), the_trip(floor, stuck)
    assert (budget.code, budget.outcome, budget.task, budget.host) == (75, "scheduled", "outruns", "h1")
    assert (stall.code, stall.outcome, stall.task, stall.host) == (76, "scheduled", "stalls", "h1")
    # The evidence says where it hung, what it last said, and for how long nothing had moved.
    assert "deadlock" in stall.evidence["stacks"]
    assert "deadlock" in stall.evidence["handler"]
    assert "runner_inline" not in stall.evidence["handler"], "what called the handler tells nothing"
    assert stall.evidence["place"].startswith("futex() of ")
    assert stall.evidence["seen"]["last_beat"]["step"] == 7
    assert stall.evidence["seen"]["silence_s"] >= 12
    assert [e.kind for e in floor.client.events(job_id=stuck)].count("suspect") == 1
    # The other worker of that host: same process, same claim.
    assert third.process.poll() is None
    assert (floor.worker_row("third").incarnation, floor.journal.attempts(healthy)) == before
    floor.go()
    floor.until_done(healthy)


def test_a_hung_handler_in_a_child_is_killed_and_its_worker_lives_on(hung: Floor) -> None:
    floor = hung
    worker = floor.start("w", light=3)
    incarnation = floor.worker_row("w").incarnation
    slow = floor.inline("outruns_apart", budget_s=2)
    stuck = floor.inline("stalls_apart")
    healthy = floor.command()
    floor.until_at_work(healthy)
    attempts = floor.journal.attempts(healthy)
    rows = floor.until_done(slow, stuck)
    assert [(r.result, r.attempts, r.trips, r.crashes) for r in rows] == [("again", 1, 1, 0)] * 2
    assert [(the_trip(floor, job).code, the_trip(floor, job).outcome) for job in (slow, stuck)] == [
        (75, "pending"),
        (76, "pending"),
    ]
    evidence = the_trip(floor, stuck).evidence
    assert any("futex" in str(thread) for thread in evidence["processes"]), evidence
    assert re.fullmatch(r"futex\(\) of deadlock at .*\.py:\d+", evidence["place"]), evidence["place"]
    assert "lock.acquire()" in evidence["handler"].splitlines()[-1]
    assert "child_main" not in evidence["handler"], "what called the handler tells nothing"
    assert "Current thread" in evidence["stacks"]
    suspicions = [row for row in floor.client.evidence(job_id=stuck) if row.kind == "suspect"]
    assert {row.data["place"] for row in suspicions} == {evidence["place"]}
    assert worker.process.poll() is None
    assert floor.worker_row("w").incarnation == incarnation
    assert floor.journal.attempts(healthy) == attempts
    floor.go()
    floor.until_done(healthy)


def test_the_trip_of_one_member_drains_its_gang_with_it_as_the_culprit(hung: Floor) -> None:
    floor = hung
    with Restarter(floor, a={"commands": False, "light": 0}, b={"commands": False, "light": 0}) as restarter:
        gang = floor.client.submit_gang(task="rank_1_stalls", size=2, wait_for_hardware=True)
        rows = floor.until_done(*gang.job_ids)
        assert restarter.codes == [76]
    assert [r.result for r in rows] == ["again", "again"]
    row = floor.client.gang(id=gang.gang_id)
    assert (row.state, row.epoch, row.attempts) == ("done", 2, 0)
    trip = the_trip(floor, gang.job_ids[1])
    assert (trip.code, trip.outcome, trip.rank, floor.client.trips(job_id=gang.job_ids[0])) == (
        76,
        "preempted",
        1,
        [],
    )
    (drain,) = floor.client.drains(gang_id=gang.gang_id)
    assert (drain.cause, drain.trigger_job) == ("trip", gang.job_ids[1])


def test_a_trip_with_postgresql_gone_exits_in_time_and_the_lease_does_the_rest(
    mortal_floor: Floor, mortal: Server
) -> None:
    floor = mortal_floor
    floor.fleet.define(TASKS + HUNG)
    # Longer than the trip: it is the watchdog that ends the worker here, not its lease.
    floor.configure(lease_s=12)
    worker = floor.start("w")
    job = floor.inline("outruns", budget_s=4)
    eventually(lambda: floor.client.job(id=job).state == "running", "it runs", PATIENCE_S)
    began = time.monotonic()
    mortal.kill()
    assert worker.exit_code() == 75
    assert time.monotonic() - began < 4 + 5 + 1
    mortal.start()
    floor.start("w2", ready=False)
    (row,) = floor.until_done(job, timeout=PATIENCE_S + 2 * LEASE_S)
    # Nobody could be told that it was a trip: to the database its worker was lost.
    assert (row.result, row.trips, row.crashes) == ("again", 0, 1)


def test_a_class_that_only_notifies_stops_nothing_and_is_on_record(hung: Floor) -> None:
    floor = hung
    floor.configure(notify_only=["budget"])
    worker = floor.start("w", light=2)
    inline = floor.start("inline", queues=["default"], commands=False)
    jobs = [
        floor.inline("outruns", budget_s=1, payload={"seconds": 3.0}),
        floor.inline("outruns_apart", budget_s=1, payload={"seconds": 3.0}),
    ]
    rows = floor.until_done(*jobs)
    assert [(r.result, r.attempts, r.trips) for r in rows] == [("first", 1, 0)] * 2
    for job in jobs:
        outcomes = {trip.outcome for trip in floor.client.trips(job_id=job)}
        assert outcomes <= {"notify", None}
        assert outcomes, "nobody was told"
    assert (worker.process.poll(), inline.process.poll()) == (None, None)


@pytest.mark.slow
def test_the_watchdog_of_a_finished_job_never_ends_the_next_one(hung: Floor) -> None:
    floor = hung
    worker = floor.start("w", prefetch=50, commands=False)
    until = time.monotonic() + 4.0
    ran = 0
    while time.monotonic() < until:
        # Together they take far longer than any one of them may.
        jobs = floor.client.submit(task="quick", payloads=[{}] * 200, budget_s=0.5)
        eventually(
            lambda jobs=jobs: set(floor.client.job_states(ids=jobs).values()) == {"done"},
            "all are done",
            PATIENCE_S,
        )
        ran += len(jobs)
    assert floor.client.trips() == []
    assert worker.process.poll() is None
    assert ran > 400


def test_the_worker_that_has_the_model_is_given_the_jobs_that_want_it(hung: Floor) -> None:
    floor = hung
    floor.start("a", commands=False, light=0)
    warm = floor.client.submit(task="model_of", model="qwen")[0]
    pid = floor.until_done(warm)[0].result
    eventually(lambda: floor.worker_row("a").model == "qwen", "it says which model it has", PATIENCE_S)
    # Both wait while it is busy: the one that wants the model comes first, although it is the younger.
    blocker = floor.inline(memory_mb=1)
    floor.until_at_work(blocker)
    cold = floor.client.submit(task="model_of", memory_mb=1)[0]
    wants = floor.client.submit(task="model_of", model="qwen")[0]
    floor.go()
    rows = floor.until_done(cold, wants)
    assert {row.result for row in rows} == {pid}
    assert rows[1].claimed_at < rows[0].claimed_at

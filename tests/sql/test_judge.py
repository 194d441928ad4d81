"""Who is dead, and what is due: leases, silence, outages, told-not-acking; dependencies and due times."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import ENDED, STALE, Q, gpus, refused


def held_silent(q: Q, seconds: float) -> None:
    """Time passes with ticks every 10 s, and nobody heartbeats."""
    q.live_on(seconds)


# Leases -----------------------------------------------------------------------------------------------------


def test_a_job_is_freed_when_its_lease_has_ended_and_not_before(q: Q) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(1))
    claim = worker.take()
    q.tick()
    held_silent(q, 119)
    assert (q.state(job), worker.row["state"]) == ("running", "live")
    held_silent(q, 2)
    row = q.job(job)
    assert (row["state"], row["crashes"], row["attempts"]) == ("pending", 1, 0)
    assert worker.row["state"] == "dead"
    assert q.sql("select * from gangq.device_holds") == []
    with refused(STALE):
        claim.complete()
    with refused(ENDED):
        worker.beat()


def test_a_healthy_worker_is_never_reaped(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take()
    q.live_on(600, worker)
    assert (q.state(job), worker.row["state"]) == ("running", "live")


def test_a_lease_that_ended_drains_the_gang_and_counts_a_crash(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    claims = gang.start(a, b)
    q.live_on(130, a)
    assert gang.state == "draining"
    alive = next(c for c in claims if q.job(c.job_id)["worker"] == "w1")
    assert a.beat(alive) == {alive.job_id: "preempt"}
    alive.ack()
    assert (gang.state, gang.live["crashes"]) == ("blocked", 1)
    assert sorted(m["crashes"] for m in gang.members) == [0, 1]


def test_when_every_member_is_lost_at_once_the_drain_needs_nobody(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    gang.start(a, b)
    held_silent(q, 130)
    assert gang.state == "blocked"
    assert [m["crashes"] for m in gang.members] == [1, 1]


def test_a_worker_lost_while_the_gang_drains_completes_the_drain_uncharged(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    claims = gang.start(a, b)
    culprit = next(c for c in claims if q.job(c.job_id)["worker"] == "w1")
    culprit.fail()
    assert b.report_dead() == 1
    assert gang.state == "blocked"
    assert sorted(m["crashes"] for m in gang.members) == [0, 0]


def test_a_worker_lost_while_others_still_stop_changes_nothing_of_the_drain(q: Q) -> None:
    gang, workers = q.submit_gang(3), q.workers(3)
    claims = gang.start(*workers)
    claims[0].fail()
    lost = next(w for w in workers if w.incarnation == claims[1].incarnation)
    assert lost.report_dead() == 1
    assert gang.states == ["preempted", "preempted", "preempting"]
    claims[2].ack()
    assert (gang.state, gang.row["drain_cause"], gang.row["placement_misses"]) == ("blocked", "fail", 0)
    assert len(q.events("drain")) == 1


def test_a_worker_that_dies_before_it_claims_costs_those_at_the_barrier_nothing(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    q.tick()
    (claim,) = gang.claimed_by(a)
    b.report_dead()
    assert (gang.state, gang.row["drain_cause"]) == ("draining", "placement_miss")
    claim.ack()
    assert (gang.state, gang.row["placement_misses"]) == ("blocked", 1)
    assert [(m["attempts"], m["stops"]) for m in gang.members] == [(0, 0)] * 2


# Told but not acking ----------------------------------------------------------------------------------------


def test_a_member_told_and_never_acking_is_forced_after_the_timeout_and_a_lease_with_its_device_quarantined(
    q: Q,
) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}")) for n in range(2)]
    claims = gang.start(*workers)
    stubborn_device = claims[1]["devices"][0]["uuid"]
    claims[0].fail()
    q.live_on(160, *workers)  # 45 s to ack, then a lease of 120 s
    assert gang.state == "draining", "nothing is forced while its lease may still run"
    q.live_on(10, *workers)
    assert gang.state == "blocked"
    held = {row["uuid"]: row["state"] for row in q.sql("select * from gangq.devices")}
    assert held[stubborn_device] == "quarantined"
    assert sorted(held.values()) == ["free", "quarantined"]
    (drain,) = q.sql("select * from gangq.drains")
    assert (drain["moved"], drain["acked"], drain["forced"], drain["outcome"]) == (1, 0, 1, "blocked")
    with refused(STALE):
        claims[1].ack()
    assert q.events("quarantine")
    assert {w.row["state"] for w in workers} == {"live"}


def test_a_cancelled_solo_job_whose_worker_never_acks_is_cancelled_in_the_end(q: Q) -> None:
    job = q.submit(gpus=1)
    worker = q.worker(devices=gpus(1))
    worker.take()
    q.call("cancel", job_ids=[job])
    q.live_on(160, worker)
    assert q.state(job) == "preempting"
    q.live_on(10, worker)
    assert q.state(job) == "cancelled"
    assert q.sql("select state from gangq.devices")[0]["state"] == "quarantined"


@pytest.mark.parametrize("how", ["dead", "force", "lost"])
def test_what_was_taken_from_a_worker_is_not_its_own_last_word(q: Q, how: str) -> None:
    """Its worker never said that it had stopped: saying so later is stale, not repeated."""
    job, worker = q.submit(), q.worker()
    claim = worker.take()
    if how != "lost":
        q.call("displace_job", job_id=job)
    if how == "force":
        q.live_on(170, worker)
    else:
        worker.report_dead()
    assert (q.state(job), len(q.events(how, job_id=job))) == ("pending", 1)
    for verb in ("ack", "fail", "requeue"):
        with refused(STALE):
            getattr(claim, verb)()
    assert claim.release() == "stale"


# Silence ----------------------------------------------------------------------------------------------------


def test_silence_over_30_s_flags_a_worker_and_frees_nothing(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take()
    held_silent(q, 29)
    assert worker.row["flagged_at"] is None
    held_silent(q, 2)
    assert worker.row["flagged_at"] is not None
    assert q.sql("select state from gangq.workers")[0]["state"] == "silent"
    assert q.state(job) == "running"
    held_silent(q, 20)
    assert len(q.events("flag")) == 1, "once"


def test_a_flag_goes_when_the_worker_is_heard_again(q: Q) -> None:
    q.submit()
    worker = q.worker()
    worker.take()
    held_silent(q, 40)
    assert worker.row["flagged_at"] is not None
    worker.beat()
    q.tick()
    assert worker.row["flagged_at"] is None
    assert [e["kind"] for e in q.events(incarnation=worker.incarnation)] == ["register", "flag", "unflag"]
    assert q.one("flag_dead_workers") == 0


# Outages ----------------------------------------------------------------------------------------------------

OUTAGES = {
    "the server restarted": "update gangq.tick_state set server_started_at = server_started_at - "
    "interval '1 day'",
    "the server changed timeline": "update gangq.tick_state set timeline = '0000000F'",
    "no tick for a long time": "update gangq.tick_state set last_at = gangq.now() - interval '10 minutes'",
    "the clock went back": "update gangq.tick_state set last_at = gangq.now() + interval '1 minute'",
}


@pytest.mark.parametrize("what", OUTAGES)
@pytest.mark.parametrize("verb", ["tick", "reap_expired"])
def test_after_an_outage_nobody_is_judged_for_one_full_lease(q: Q, what: str, verb: str) -> None:
    job, worker = q.submit(), q.worker()
    claim = worker.take()
    q.tick()
    q.later(60)
    q.tick()
    q.later(59)
    q.tick()
    q.sql(OUTAGES[what])
    q.later(2)  # its lease is over, but the authority was not there
    q.call(verb, **({"force": True} if verb == "tick" else {}))
    assert q.events("outage")
    assert (q.state(job), worker.row["state"]) == ("running", "live")
    held_silent(q, 119)
    assert q.state(job) == "running"
    assert worker.beat(claim) == {claim.job_id: "continue"}, "it had a full period to be heard"
    q.live_on(100)
    assert q.state(job) == "running"
    held_silent(q, 30)
    assert q.state(job) == "pending", "and silence after that is judged as ever"


def test_an_outage_also_delays_forcing_those_who_were_told_to_stop(q: Q) -> None:
    job = q.submit()
    worker = q.worker()
    worker.take()
    q.call("cancel", job_ids=[job])
    q.live_on(160, worker)
    q.sql(OUTAGES["the server restarted"])
    q.live_on(100, worker)
    assert q.state(job) == "preempting"
    q.live_on(30, worker)
    assert q.state(job) == "cancelled"


@pytest.mark.parametrize("what", OUTAGES)
def test_after_an_outage_a_reservation_has_its_whole_time_to_be_claimed(q: Q, what: str) -> None:
    gang = q.submit_gang(2, claim_deadline_s=30)
    workers = q.workers(2, slots=1)
    q.tick()
    assert gang.state == "reserved"
    q.sql(OUTAGES[what])
    q.later(40)  # nobody could claim
    q.tick()
    assert gang.state == "reserved"
    assert q.events("rollback") == []
    q.live_on(20, *workers)
    assert len(gang.claimed_by(*workers)) == 2
    assert gang.state == "running"


def test_after_an_outage_a_reservation_that_nobody_claims_ends_as_ever(q: Q) -> None:
    gang = q.submit_gang(2, claim_deadline_s=30)
    workers = q.workers(2, slots=1)
    q.tick()
    q.sql(OUTAGES["the server restarted"])
    q.later(40)
    q.tick()
    q.live_on(40, *workers)
    assert len(q.events("rollback")) == 1
    assert gang.row["placement_misses"] == 1


@pytest.mark.parametrize("how", ["is quarantined", "drains"])
def test_a_reservation_on_a_worker_that_takes_nothing_more_goes_back_at_once_even_after_an_outage(
    q: Q, how: str
) -> None:
    gang, worker = q.submit_gang(1, claim_deadline_s=600), q.worker()
    q.tick()
    assert gang.state == "reserved"
    if how == "drains":
        worker.retire(final=False)
    else:
        q.call("quarantine", worker=worker.name)
    q.sql(OUTAGES["the server restarted"])
    q.later(1)
    q.tick()
    assert gang.state == "blocked"
    assert len(q.events("rollback")) == 1


def test_an_outage_flags_nobody_at_once(q: Q) -> None:
    q.submit()
    worker = q.worker()
    worker.take()
    q.tick()
    q.later(25)
    q.sql(OUTAGES["the server restarted"])
    q.later(10)
    q.tick()
    assert worker.row["flagged_at"] is None


def test_a_gap_between_ticks_shorter_than_a_lease_is_no_outage(q: Q) -> None:
    q.worker()
    q.tick()
    q.later(60)
    q.tick()
    assert q.events("outage") == []


def test_a_judge_that_read_the_clock_before_the_last_one_was_done_sees_no_jump_of_it(q: Q) -> None:
    q.worker()
    read = q.value("select gangq.now()")
    q.later(0.01)
    q.tick()
    assert q.value("select gangq.note_outage(%(t)s)", t=read) is None
    assert q.events("outage") == []


def test_the_first_tick_ever_is_no_outage(q: Q) -> None:
    q.worker()
    q.tick()
    assert q.events("outage") == []


# Due times --------------------------------------------------------------------------------------------------


def test_a_scheduled_job_is_pending_once_it_is_due(q: Q) -> None:
    job = q.submit(due_at=q.value("select gangq.now() + interval '60 s'"))
    worker = q.worker()
    q.live_on(59, worker)
    assert (q.state(job), worker.claim()) == ("scheduled", [])
    q.live_on(2, worker)
    assert worker.take().job_id == job


def test_what_becomes_due_wakes_a_sleeper(q: Q, dsn: str) -> None:
    q.submit(due_at=q.value("select gangq.now() + interval '1 s'"))
    worker = q.worker()
    worker.claim(sleep=True)
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{worker.incarnation}")
        q.later(2)
        q.tick()
        assert [n.payload for n in ear.notifies(timeout=2, stop_after=1)] == ["light"]


def test_the_tick_says_when_the_next_thing_is_due(q: Q) -> None:
    assert q.tick()["next_in_s"] == 1
    q.submit(due_at=q.value("select gangq.now() + interval '0.3 s'"))
    assert q.tick()["next_in_s"] == pytest.approx(0.3, abs=0.01)


# Dependencies -----------------------------------------------------------------------------------------------


def finish(q: Q, worker: Any, *expected: int) -> None:
    """Claim and complete exactly these jobs, which must be all that is claimable."""
    claims = worker.claim()
    assert sorted(c.job_id for c in claims) == sorted(expected)
    for claim in claims:
        claim.complete()
    q.tick()


def test_a_chain_runs_in_order(q: Q) -> None:
    worker = q.worker(prefetch=10)
    first = q.submit()
    second = q.submit(after=[first])
    third = q.submit(after=[second])
    assert [q.state(i) for i in (first, second, third)] == ["pending", "waiting", "waiting"]
    for job in (first, second, third):
        finish(q, worker, job)


def test_a_diamond_waits_for_both_sides(q: Q) -> None:
    worker = q.worker(prefetch=10)
    top = q.submit()
    left, right = q.submit(after=[top]), q.submit(after=[top])
    bottom = q.submit(after=[left, right, left])
    finish(q, worker, top)
    claims = {c.job_id: c for c in worker.claim()}
    assert set(claims) == {left, right}
    claims[left].complete()
    q.tick()
    assert q.state(bottom) == "waiting"
    claims[right].complete()
    q.tick()
    finish(q, worker, bottom)
    assert q.sql("select * from gangq.dependencies") == []


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_when_an_awaited_job_does_not_succeed_all_that_wait_for_it_are_cancelled(q: Q, how: str) -> None:
    first, other = q.submit(), q.submit(priority=-1)
    second = q.submit(after=[first, other])
    third = q.submit(after=[second])
    gang = q.submit_gang(2, after=[third])
    if how == "fails":
        q.worker().take().fail(retryable=False)
    else:
        q.call("cancel", job_ids=[first])
    q.settle()
    assert (q.state(second), q.state(third), gang.state) == ("cancelled", "cancelled", "cancelled")
    assert f"job {first}" in q.job(second)["error"]["message"]
    assert q.state(other) == "pending"
    assert q.sql("select * from gangq.dependencies") == []


def test_a_failed_attempt_that_will_be_retried_keeps_the_others_waiting(q: Q) -> None:
    first = q.submit()
    second = q.submit(after=[first])
    q.worker().take().fail()
    q.settle()
    assert (q.state(first), q.state(second)) == ("scheduled", "waiting")


def test_a_gang_starts_after_the_jobs_it_waits_for(q: Q) -> None:
    first, second = q.submit(count=2)
    gang = q.submit_gang(2, after=[first, second])
    a, b = q.worker("a", prefetch=2), q.worker("b")
    assert (gang.state, gang.states) == ("waiting", ["waiting", "waiting"])
    one, two = a.claim()
    one.complete()
    q.tick()
    assert gang.state == "waiting"
    two.complete()
    q.tick()
    gang.claimed_by(a, b)
    assert gang.state == "running"


def test_a_large_gang_is_let_go_whole(q: Q) -> None:
    """More members than a tick moves at once: still never some blocked and some waiting."""
    first = q.submit()
    gang = q.submit_gang(450, after=[first])
    q.worker().take().complete()
    for _ in range(5):
        q.one("tick", force=True)
        assert q.violations() == []
    assert gang.state == "blocked"


def test_a_job_waits_for_a_member_of_a_gang_whichever_member_is_done_first(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    claims = gang.start(a, b)
    after_first, after_last = q.submit(after=[claims[0].job_id]), q.submit(after=[claims[1].job_id])
    claims[0].complete()
    q.later(5)
    claims[1].complete()
    q.settle()
    assert (q.state(after_first), q.state(after_last)) == ("pending", "pending")


def test_after_what_is_done_already_a_job_starts_at_once_and_after_what_failed_it_is_refused(q: Q) -> None:
    done, failed = q.submit(count=2)
    worker = q.worker()
    worker.take().complete()
    worker.take().fail(retryable=False)
    assert q.state(q.submit(after=[done])) == "pending"
    with refused("GQ001", f"job {failed}"):
        q.submit(after=[done, failed])


def test_a_job_that_waits_and_is_due_later_is_scheduled_when_it_may_go(q: Q) -> None:
    first = q.submit()
    second = q.submit(after=[first], due_at=q.value("select gangq.now() + interval '1 hour'"))
    q.worker().take().complete()
    q.settle()
    assert q.state(second) == "scheduled"


def test_a_submission_after_a_job_that_is_ending_sees_the_end(q: Q) -> None:
    """The awaited job completes in a transaction that is open when the new one is submitted."""
    first = q.submit()
    claim = q.worker().take()
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        second = other.submit(after=[first])
        claim.complete()
        assert q.state(first) == "done"
    assert q.state(second) == "waiting"
    q.settle()
    assert q.state(second) == "pending"

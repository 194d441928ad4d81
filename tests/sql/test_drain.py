"""A gang is taken down together: drain, ack, complete_drain; preempt, cancel, retry."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, STALE, WRONG_STATE, Claim, Gang, Q, Worker, ack_all, gpus, refused


def running(q: Q, size: int = 3, **options: Any) -> tuple[Gang, list[Worker], list[Claim]]:
    gang, workers = q.submit_gang(size, **options), q.workers(size)
    return gang, workers, gang.start(*workers)


def counters(gang: Gang, column: str = "attempts") -> list[int]:
    return [m[column] for m in gang.members]


# A member fails ---------------------------------------------------------------------------------------------


def test_when_a_member_fails_it_is_stopped_at_once_and_the_others_are_told(q: Q) -> None:
    gang, _, claims = running(q)
    assert claims[1].fail("out of memory") == "preempted"
    assert gang.states == ["preempting", "preempted", "preempting"]
    assert (gang.state, gang.live["drain_cause"], gang.live["drain_trigger"]) == (
        "draining",
        "fail",
        claims[1].job_id,
    )
    assert counters(gang) == [0, 1, 0], "the siblings are refunded when the drain starts"
    assert claims[1].fail() == "repeated"
    assert claims[0].ack() == "preempted"
    assert gang.state == "draining", "one is still to be waited for"
    assert claims[2].ack() == "preempted"
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 3)
    assert gang.row["attempts"] == 1
    assert gang.members[1]["error"]["message"] == "out of memory"


def test_a_drained_gang_backs_off_and_runs_again_in_the_next_epoch(q: Q) -> None:
    gang, workers, claims = running(q)
    claims[0].fail()
    ack_all(claims[1:])
    assert gang.row["not_before"] > q.clock.now()
    q.tick()
    assert gang.state == "blocked"
    again = gang.restart(*workers)
    assert [c["epoch"] for c in again] == [2, 2, 2]
    assert [c["attempt"] for c in again] == [2, 1, 1]
    for claim in again:
        claim.complete()
    assert gang.state == "done"


def test_two_members_that_fail_at_the_same_moment_both_count_as_stopped(q: Q) -> None:
    gang, _, claims = running(q)
    assert [claims[0].fail("first"), claims[1].fail("second")] == ["preempted", "preempted"]
    assert gang.states == ["preempted", "preempted", "preempting"]
    assert [m["error"] and m["error"]["message"] for m in gang.members] == ["first", "second", None]
    assert claims[2].fail("third") == "preempted"
    assert gang.state == "blocked", "nobody is left to wait for"
    assert counters(gang) == [1, 0, 0], "one culprit"
    assert gang.row["attempts"] == 1


def test_a_trip_during_a_drain_counts_as_stopped_too(q: Q) -> None:
    gang, _, claims = running(q, 2)
    claims[0].fail()
    assert claims[1].requeue() == "preempted"
    assert (gang.state, counters(gang, "trips")) == ("blocked", [0, 0])


def test_a_members_trip_drains_the_gang_and_counts_as_a_trip(q: Q) -> None:
    gang, _, claims = running(q, 2)
    assert claims[0].requeue("stalled") == "preempted"
    claims[1].ack()
    assert (counters(gang), counters(gang, "trips")) == ([0, 0], [1, 0])
    assert (gang.live["attempts"], gang.live["trips"]) == (0, 1)


def test_a_success_reported_during_a_drain_is_kept(q: Q) -> None:
    gang, _, claims = running(q)
    claims[0].fail()
    assert claims[1].complete({"rank": 1}) == "done"
    assert claims[2].ack() == "preempted"
    assert gang.state == "failed", "honestly: a part is done and the rest cannot start without it"
    assert gang.states == ["failed", "done", "failed"]
    assert [m["result"] for m in gang.members] == [None, {"rank": 1}, None]
    assert "rank 1 was already done" in gang.row["reason"]


def test_when_every_member_succeeds_during_a_preemption_the_gang_is_done(q: Q) -> None:
    gang, _, claims = running(q, 2)
    q.call("preempt_gang", gang_id=gang.id)
    assert [c.complete() for c in claims] == ["done", "done"]
    assert (gang.state, gang.states) == ("done", ["done", "done"])


def test_a_gang_whose_sibling_is_done_fails_when_a_member_fails_and_keeps_the_result(q: Q) -> None:
    gang, _, claims = running(q)
    claims[0].complete({"rank": 0})
    assert (gang.state, gang.states[0]) == ("running", "done")
    claims[1].fail("boom")
    assert gang.states[0] == "done", "terminal ones stay"
    claims[2].ack()
    assert gang.states == ["done", "failed", "failed"]
    assert gang.members[0]["result"] == {"rank": 0}
    assert gang.members[1]["error"]["message"] == "boom"
    assert gang.members[2]["error"]["type"] == "GangFailed"


def test_a_gang_of_one_drains_in_one_step(q: Q) -> None:
    gang, _, (claim,) = running(q, 1)
    assert claim.fail() == "preempted"
    assert gang.state == "blocked"


# Charging ---------------------------------------------------------------------------------------------------


def test_the_same_culprit_spends_its_attempts_and_its_siblings_none(q: Q) -> None:
    gang, workers, claims = running(q, max_attempts=3)
    for launch in range(1, 4):
        assert claims[0]["attempt"] == launch
        claims[0].fail()
        ack_all(claims[1:])
        if launch < 3:
            assert counters(gang) == [launch, 0, 0]
            claims = gang.restart(*workers)
    assert (gang.state, gang.states) == ("failed", ["failed"] * 3)
    assert "rank 0 spent its 3 attempts" in gang.row["reason"]
    assert gang.row["epoch"] == 3


def test_rotating_culprits_are_bounded_by_the_gangs_own_launches(q: Q) -> None:
    gang, workers, claims = running(q, max_attempts=3)
    for launch in range(3):
        culprit = claims[launch]
        culprit.fail()
        ack_all(c for c in claims if c is not culprit)
        if launch < 2:
            claims = gang.restart(*workers)
    assert gang.state == "failed"
    assert gang.row["epoch"] == 3
    assert "3 launches" in gang.row["reason"]


def test_a_failure_that_is_not_retryable_fails_the_gang(q: Q) -> None:
    gang, _, claims = running(q, 2)
    claims[0].fail(retryable=False)
    claims[1].ack()
    assert gang.state == "failed"


def lose(q: Q, culprit: Claim, workers: list[Worker], how: str) -> None:
    """A crash, after which its worker comes back, or a trip."""
    if how == "trip":
        culprit.requeue()
        return
    name = q.job(culprit.job_id)["worker"]
    worker = next(w for w in workers if w.name == name)
    worker.report_dead()
    workers[workers.index(worker)] = q.worker(name)


CAPS = {"crash": "max_crashes", "trip": "max_trips"}


@pytest.mark.parametrize("how", CAPS)
def test_crashes_and_trips_of_a_gang_are_capped_apart_from_its_attempts(q: Q, how: str) -> None:
    gang, workers, claims = running(q, 2, max_attempts=1000, **{CAPS[how]: 1})
    for n in range(2):
        lose(q, claims[n], workers, how)  # rotating, so that no member alone is over its cap
        claims[1 - n].ack()
        if n == 0:
            assert gang.state == "blocked"
            claims = gang.restart(*workers)
    assert gang.state == "failed"
    assert gang.row["attempts"] == 0


@pytest.mark.parametrize(("how", "why"), [("crash", "lost its worker"), ("trip", "tripped a watchdog")])
def test_a_member_over_its_own_cap_ends_a_gang_that_has_more_left(q: Q, how: str, why: str) -> None:
    gang, workers, claims = running(q, 2, max_attempts=1000, **{CAPS[how]: 1})
    q.sql("update gangq.live_gangs set max_crashes = 9, max_trips = 9")
    for n in range(2):
        lose(q, claims[0], workers, how)
        claims[1].ack()
        if n == 0:
            claims = gang.restart(*workers)
    assert (gang.state, gang.row["reason"]) == ("failed", f"rank 0 {why} 2 times")


@pytest.mark.parametrize("lost", ["fails", "trips", "crashes"])
def test_a_member_lost_at_the_barrier_charges_nobody_and_has_its_own_counter(q: Q, lost: str) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    q.tick()
    (claim,) = gang.claimed_by(workers[0])
    if lost == "fails":
        claim.fail()
    elif lost == "trips":
        claim.requeue()
        assert [event["data"]["trips"] for event in q.events("trip")] == [0]
    else:
        workers[0].report_dead()
    assert gang.state == "blocked"
    assert (counters(gang), counters(gang, "crashes"), counters(gang, "trips")) == ([0, 0], [0, 0], [0, 0])
    row = gang.row
    assert (row["attempts"], row["never_started"], row["drain_cause"]) == (0, 1, "never_started")
    assert row["not_before"] > q.clock.now()


def test_ten_times_never_started_backs_off_and_says_so(q: Q) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    for n in range(1, 11):
        gang.skip_backoff()
        q.tick()
        gang.claimed_by(workers[0])[0].fail()
        delay = (gang.row["not_before"] - q.clock.now()).total_seconds()
        assert min(300, 2 ** (n - 1)) / 2 <= delay <= min(300, 2 ** (n - 1))
    gates = {row["gate"]: row for row in q.call("explain_gang", gang_id=gang.id)}
    assert "10 times" in gates["backoff"]["detail"]
    assert gang.row["attempts"] == 0


def test_a_rendezvous_port_that_was_taken_re_opens_the_barrier_uncharged(q: Q) -> None:
    gang, workers, claims = running(q, 2)
    claims[0].fail("port 4000 in use", cause="port_taken")
    claims[1].ack()
    assert (gang.state, counters(gang), gang.row["never_started"]) == ("blocked", [0, 0], 1)
    gang.restart(*workers)


def test_a_members_release_gives_its_attempt_back_and_counts_a_stop(q: Q) -> None:
    gang, _, claims = running(q, 2)
    assert claims[0].release() == "released"
    claims[1].ack()
    assert (gang.state, counters(gang), counters(gang, "stops")) == ("blocked", [0, 0], [1, 1])
    assert (gang.row["attempts"], gang.row["not_before"]) == (0, None)


# Reserved and mixed states ----------------------------------------------------------------------------------


def test_reserved_siblings_go_straight_back_to_blocked_and_their_devices_are_free(q: Q) -> None:
    gang = q.submit_gang(3, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}")) for n in range(3)]
    q.tick()
    first, second = gang.claimed_by(*workers[:2])
    first.fail()
    assert gang.states == ["preempted", "preempting", "blocked"]
    assert q.value("select count(*) from gangq.device_holds") == 1
    second.ack()
    assert gang.state == "blocked"


def test_the_device_of_a_member_told_to_stop_is_held_until_its_ack(q: Q) -> None:
    gang = q.submit_gang(1, gpus=1)
    worker = q.worker(devices=gpus(1))
    (claim,) = gang.start(worker)
    q.call("preempt_gang", gang_id=gang.id)
    assert q.sql("select state, job_id from gangq.devices") == [{"state": "held", "job_id": claim.job_id}]
    claim.ack()
    assert q.sql("select state from gangq.devices") == [{"state": "free"}]


# Acknowledging ----------------------------------------------------------------------------------------------


def test_an_ack_is_fenced_by_the_token_and_repeats_are_harmless(q: Q) -> None:
    gang, workers, claims = running(q, 2)
    with refused(WRONG_STATE, "was not told to stop"):
        claims[0].ack()
    q.call("preempt_gang", gang_id=gang.id)
    with refused(STALE):
        q.call("ack_preempted", job_id=claims[0].job_id, token=claims[1].token)
    assert gang.states == ["preempting", "preempting"]
    assert [claims[0].ack(), claims[0].ack()] == ["preempted", "repeated"]
    claims[1].ack()
    again = gang.restart(*workers)
    assert claims[0].ack() == "repeated", "an old epoch's ack"
    assert gang.state == "running"
    assert {c.job_id for c in again} == {c.job_id for c in claims}


def test_the_events_of_a_drain_name_gang_and_epoch_and_make_one_row_in_drains(q: Q) -> None:
    gang, _, claims = running(q)
    claims[0].fail("boom")
    q.later(2)
    ack_all(claims[1:])
    kinds = [e["kind"] for e in q.events(gang_id=gang.id, epoch=1)]
    assert kinds == ["reserve", "claim", "claim", "claim", "go", "drain", "ack", "ack", "drained"]
    (row,) = q.sql("select * from gangq.drains")
    assert (row["gang_id"], row["epoch"], row["cause"], row["trigger_job"]) == (
        gang.id,
        1,
        "fail",
        claims[0].job_id,
    )
    assert (row["moved"], row["acked"], row["forced"], row["outcome"]) == (2, 2, 0, "blocked")
    assert (row["ended_at"] - row["started_at"]).total_seconds() == 2


# preempt_gang and complete_drain ----------------------------------------------------------------------------


def test_a_preempted_gang_keeps_its_attempts_and_runs_again_at_once(q: Q) -> None:
    gang, workers, claims = running(q, 2)
    assert q.one("preempt_gang", gang_id=gang.id, reason="maintenance") is True
    assert q.one("preempt_gang", gang_id=gang.id) is False, "it drains already"
    ack_all(claims)
    assert (gang.row["attempts"], gang.row["preemptions"], counters(gang)) == (0, 1, [0, 0])
    assert gang.row["not_before"] is None
    gang.start(*workers)


def test_a_gang_that_is_not_placed_is_not_preempted(q: Q) -> None:
    gang = q.submit_gang(1)
    assert q.one("preempt_gang", gang_id=gang.id) is False
    with refused(MISSING):
        q.call("preempt_gang", gang_id=99)


def test_a_reserved_gang_is_preempted_without_waiting(q: Q) -> None:
    gang, _ = q.submit_gang(1), q.worker()
    q.tick()
    assert q.one("preempt_gang", gang_id=gang.id) is True
    assert gang.state == "blocked"


def test_complete_drain_waits_and_refuses_what_does_not_drain(q: Q) -> None:
    gang, _, claims = running(q, 2)
    assert q.one("complete_drain", gang_id=gang.id) is None, "it runs"
    claims[0].fail()
    assert q.one("complete_drain", gang_id=gang.id) is None, "one is still stopping"
    assert gang.state == "draining"
    claims[1].ack()
    assert q.one("complete_drain", gang_id=gang.id) is None, "it has drained"
    with refused(MISSING, "99"):
        q.call("complete_drain", gang_id=99)


# Cancel -----------------------------------------------------------------------------------------------------


def test_cancelling_a_solo_job_in_every_state_of_waiting(q: Q) -> None:
    pending, scheduled = q.submit(), q.submit(due_at="2999-01-01")
    waiting = q.submit(after=[pending])
    rows = q.call("cancel", job_ids=[waiting, scheduled, pending], reason="changed my mind")
    assert {row["state"] for row in rows} == {"cancelled"}
    for job in (pending, scheduled, waiting):
        assert q.job(job)["error"] == {"type": "Cancelled", "message": "changed my mind"}
    assert q.worker().claim() == []


def test_cancelling_a_running_solo_job_goes_through_told_and_ack(q: Q) -> None:
    job = q.submit()
    claim = q.worker().take()
    for _ in range(2):
        assert [row["state"] for row in q.call("cancel", job_ids=[job])] == ["preempting"]
    assert claim.ack() == "cancelled"
    assert (q.state(job), claim.ack()) == ("cancelled", "repeated")
    assert [row["state"] for row in q.call("cancel", job_ids=[job])] == ["cancelled"], (
        "a third time is harmless"
    )


def test_a_cancel_wakes_the_worker_of_a_running_solo_job(q: Q, dsn: str) -> None:
    job = q.submit()
    claim = q.worker().take()
    with psycopg.connect(dsn, autocommit=True) as listening:
        listening.execute(f"listen gangq_{claim.incarnation}")
        q.call("cancel", job_ids=[job])
        assert [n.payload for n in listening.notifies(timeout=2, stop_after=1)] == ["stop"]


def test_a_solo_job_that_finishes_while_being_cancelled_is_done(q: Q) -> None:
    job = q.submit()
    claim = q.worker().take()
    q.call("cancel", job_ids=[job])
    assert claim.complete({"r": 1}) == "done"
    assert q.state(job) == "done"


def test_a_solo_job_that_fails_while_being_cancelled_is_cancelled_with_its_error(q: Q) -> None:
    job = q.submit()
    claim = q.worker().take()
    q.call("cancel", job_ids=[job])
    assert claim.fail("killed") == "cancelled"
    assert (q.state(job), q.job(job)["error"]["message"]) == ("cancelled", "killed")


def test_cancelling_what_has_ended_says_how_it_ended(q: Q) -> None:
    q.submit()
    claim = q.worker().take()
    claim.complete()
    assert q.call("cancel", job_ids=[claim.job_id]) == [
        {"job_id": claim.job_id, "gang_id": None, "state": "done"}
    ]


@pytest.mark.parametrize(
    "state", ["waiting", "blocked", "reserved", "claimed", "running", "draining", "partly done"]
)
def test_a_gang_is_cancelled_from_any_state(q: Q, state: str) -> None:
    first = q.submit()
    gang = q.submit_gang(2, after=[first] if state == "waiting" else [])
    workers = q.workers(2)
    claims: list[Claim] = []
    if state not in ("waiting", "blocked"):
        q.tick()
    if state == "claimed":
        claims = gang.claimed_by(workers[0])
    elif state in ("running", "draining", "partly done"):
        claims = gang.claimed_by(*workers)
    if state == "draining":
        claims.pop(0).fail()
    elif state == "partly done":
        claims.pop(0).complete()
    assert gang.cancel("enough") == ("draining" if claims else "cancelled")
    for claim in claims:
        assert gang.cancel() == "draining", "twice is harmless"
        assert claim.ack() == "preempted"
    assert gang.state == "cancelled"
    assert gang.states == (["done", "cancelled"] if state == "partly done" else ["cancelled"] * 2)
    assert gang.cancel() == "cancelled"


def test_a_member_is_not_cancelled_alone(q: Q) -> None:
    gang, job = q.submit_gang(2), q.submit()
    with refused(INVALID, f"gang g{gang.id}"):
        q.call("cancel", job_ids=[job, gang.job_ids[0]])
    assert (q.state(job), gang.state) == ("pending", "blocked"), "and nothing else of that call happened"


def test_cancelling_what_never_was_is_refused(q: Q) -> None:
    with refused(MISSING, "job 77"):
        q.call("cancel", job_ids=[77])
    with refused(MISSING, "gang g77"):
        q.call("cancel", gang_ids=[77])
    assert q.call("cancel") == []


# Retry ------------------------------------------------------------------------------------------------------


def test_a_failed_job_is_retried_under_its_id_with_fresh_counters(q: Q) -> None:
    job = q.submit(payloads=[{"x": 1}], priority=7, budget_s=9)
    worker = q.worker()
    worker.take().fail(retryable=False)
    q.later(1)
    assert q.call("retry", job_ids=[job]) == [{"job_id": job, "gang_id": None, "state": "pending"}]
    row = q.job(job)
    assert (row["attempts"], row["payload"], row["priority"], row["budget_s"]) == (0, {"x": 1}, 7, 9)
    with refused(WRONG_STATE, "live"):
        q.call("retry", job_ids=[job])
    worker.take().complete()
    assert q.state(job) == "done"
    assert q.value("select count(*) from gangq.history") == 2
    assert len(q.sql("select * from gangq.jobs")) == 1


def test_a_zombie_of_the_life_before_a_retry_changes_nothing(q: Q) -> None:
    job = q.submit()
    worker = q.worker()
    old = worker.take()
    old.fail(retryable=False)
    q.later(1)
    q.call("retry", job_ids=[job])
    with refused(STALE):
        old.complete()
    new = worker.take()
    with refused(STALE):
        old.complete()
    assert new.complete() == "done"


def test_a_gang_is_retried_whole(q: Q) -> None:
    gang, workers, claims = running(q, 2, name="digits", payloads=[{"r": 0}, {"r": 1}])
    claims[0].complete()
    claims[1].fail()
    assert gang.state == "failed"
    q.later(1)
    q.call("retry", gang_ids=[gang.id])
    assert (gang.state, gang.row["attempts"], gang.row["name"]) == ("blocked", 0, "digits")
    assert [m["payload"] for m in gang.members] == [{"r": 0}, {"r": 1}]
    with refused(WRONG_STATE):
        q.call("retry", gang_ids=[gang.id])
    for claim in gang.start(*workers):
        claim.complete()
    q.later(1)
    assert gang.states == ["done", "done"]


def test_a_gang_whose_history_is_partly_gone_is_not_retried_incomplete(q: Q) -> None:
    gang, _, claims = running(q, 2)
    claims[0].complete()
    claims[1].fail()
    q.sql("delete from gangq.history where state = 'done'")
    with refused(MISSING, "history"):
        q.call("retry", gang_ids=[gang.id])
    assert gang.state == "failed"


def test_members_are_kept_as_long_as_their_gang_can_be_retried(q: Q) -> None:
    gang, _, claims = running(q, 2)
    claims[0].complete()
    claims[1].fail()
    q.later(8 * 86400)  # done is kept 7 days, failed 30
    q.call("keep_partitions", at_once=True)
    assert len(q.sql("select * from gangq.history")) == 2
    q.call("retry", gang_ids=[gang.id])
    assert gang.states == ["blocked", "blocked"]


def test_retry_refuses_members_and_strangers(q: Q) -> None:
    gang, _, claims = running(q, 1)
    claims[0].complete()
    with refused(INVALID, f"gang g{gang.id}"):
        q.call("retry", job_ids=gang.job_ids)
    with refused(MISSING):
        q.call("retry", job_ids=[99])
    with refused(MISSING):
        q.call("retry", gang_ids=[99])


# What is charged --------------------------------------------------------------------------------------------


def charge_for(q: Q, cause: str, member: str) -> None:
    """Change what a member or a single job pays for this cause."""
    view = q.value("select pg_get_viewdef('gangq.causes'::regclass)")
    changed = re.sub(rf"(\('{cause}'::text, *[^,]+, *)'\w+'", rf"\1'{member}'", view)
    assert changed != view
    q.sql(f"create or replace view gangq.causes as {changed}")


@pytest.mark.own_database
@pytest.mark.parametrize("what", ["gang", "job"])
def test_what_is_displaced_pays_what_the_table_of_causes_says(q: Q, what: str) -> None:
    charge_for(q, "preempt", "crash")
    worker = q.worker()
    if what == "gang":
        gang, (claim,) = q.running_gang(worker)
        q.call("preempt_gang", gang_id=gang.id)
    else:
        job = q.submit()
        claim = worker.take()
        q.call("displace_job", job_id=job)
    claim.ack()
    assert (q.job(claim.job_id)["crashes"], q.job(claim.job_id)["stops"]) == (1, 0)


def test_a_fault_before_the_barrier_opens_is_charged_as_never_started_whoever_drains(q: Q) -> None:
    gang, worker = q.submit_gang(2), q.worker()
    q.worker("w2")
    q.tick()
    worker.take()
    q.sql(
        "select gangq.drain(%(id)s, '{}', '{}', 'trip', null, 'a watchdog', gangq.now())",
        id=gang.id,
    )
    assert (gang.row["trips"], gang.row["never_started"]) == (0, 1)


def test_a_gang_that_is_cancelled_while_it_drains_tells_its_members_so(q: Q) -> None:
    one, two = q.workers(2)
    gang, claims = q.running_gang(one, two)
    claims[0].fail()
    assert two.beat(claims[1]) == {claims[1].job_id: "preempt"}
    assert gang.cancel() == "draining"
    assert two.beat(claims[1]) == {claims[1].job_id: "cancel"}


def test_a_cancel_gives_no_more_time_to_what_was_told_to_stop_before(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    claim = worker.take()
    q.call("displace_job", job_id=job)
    told_at = claim.live["told_at"]
    q.later(30)
    q.call("cancel", job_ids=[job])
    assert (claim.live["told_at"], claim.live["stop_reason"]) == (told_at, "cancel")

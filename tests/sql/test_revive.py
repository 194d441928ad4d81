"""A retried job revives what was cancelled for it: once, in turn, in bounded steps, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sql.drive import Claim, Q, Worker


def fail(worker: Worker, job: int) -> None:
    """End this job, which must be the next to be claimed, as failed; what waits for it is cancelled."""
    claim = worker.take()
    assert claim.job_id == job
    claim.fail(retryable=False)
    worker.q.settle()


def done(worker: Worker, job: int) -> None:
    claim = worker.take()
    assert claim.job_id == job
    claim.complete()
    worker.q.settle()


def retry(q: Q, *jobs: int) -> None:
    q.later(1)  # No two endings of a job are of one moment.
    q.call("retry", job_ids=list(jobs))


def states(q: Q, *jobs: int) -> list[str]:
    return [q.state(job) for job in jobs]


def unfollowed(q: Q) -> int:
    return int(q.value("select count(*) from gangq.retried where job_id is not null and not followed"))


def test_what_was_cancelled_for_a_job_waits_for_it_again_when_it_is_retried(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    second = q.submit(after=[first])
    third = q.submit(after=[second])
    gang = q.submit_gang(2, after=[third], wait_for_hardware=True)
    fail(worker, first)
    assert (states(q, second, third), gang.states) == (["cancelled"] * 2, ["cancelled"] * 2)
    retry(q, first)
    assert states(q, first, second, third) == ["pending", "waiting", "waiting"]
    assert (gang.state, gang.states) == ("waiting", ["waiting"] * 2)
    q.settle()
    assert unfollowed(q) == 0
    for job in (first, second, third):
        done(worker, job)
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 2)
    reasons = {event["reason"] for event in q.events("retry", job_id=second)}
    assert reasons == {"what it waited for was retried"}


def test_a_retried_gang_revives_what_waited_for_its_members(q: Q) -> None:
    gang, workers = q.submit_gang(2, failure_policy="fail"), q.workers(2)
    job = q.submit(after=gang.job_ids)
    told, failed = gang.start(*workers)
    failed.fail(retryable=False)
    told.ack()
    q.settle()
    assert (gang.state, q.state(job)) == ("failed", "cancelled")
    q.call("retry", gang_ids=[gang.id])
    assert (gang.state, q.state(job)) == ("blocked", "waiting")
    assert q.value("select waits_on from gangq.live_jobs where id = %(id)s", id=job) == 2


def test_what_somebody_cancelled_stays_cancelled(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    by_hand, with_it = q.submit(after=[first]), q.submit(after=[first])
    behind = q.submit(after=[by_hand])
    q.call("cancel", job_ids=[by_hand])
    q.settle()
    assert states(q, by_hand, with_it, behind) == ["cancelled", "waiting", "cancelled"]
    fail(worker, first)
    retry(q, first)
    q.settle()
    assert states(q, by_hand, with_it, behind) == ["cancelled", "waiting", "cancelled"]
    retry(q, by_hand)
    assert states(q, by_hand, behind) == ["pending", "waiting"]


def test_a_job_cancelled_for_one_of_two_waits_until_both_are_retried(q: Q) -> None:
    worker = q.worker()
    one, two = q.submit(count=2)
    both = q.submit(after=[one, two])
    fail(worker, one)
    fail(worker, two)
    retry(q, one)
    q.settle()
    assert q.state(both) == "cancelled"
    done(worker, one)
    retry(q, two)
    assert q.state(both) == "waiting"
    assert q.value("select waits_on from gangq.live_jobs where id = %(id)s", id=both) == 1
    done(worker, two)
    assert q.state(both) == "pending"


def test_what_wanted_a_failure_is_revived_as_well(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    alarm = q.submit(after_failed=[first])
    done(worker, first)
    assert q.state(alarm) == "cancelled"
    retry(q, first)
    assert q.state(alarm) == "waiting"
    fail(worker, first)
    assert q.state(alarm) == "pending"


def test_it_is_cancelled_and_revived_as_often_as_the_job_fails_and_is_retried(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    second = q.submit(after=[first])
    for _ in range(3):
        fail(worker, first)
        assert q.state(second) == "cancelled"
        retry(q, first)
        q.settle()
        assert q.state(second) == "waiting"
    assert q.value("select count(*) from gangq.history where job_id = %(id)s", id=second) == 3
    done(worker, first)
    assert q.state(second) == "pending"


def test_one_ending_is_revived_once(q: Q) -> None:
    """What was revived, has run and has ended is not run again by another look at the retry."""
    worker = q.worker()
    first = q.submit()
    second = q.submit(after=[first])
    fail(worker, first)
    retry(q, first)
    q.sql("update gangq.retried set followed = false")
    done(worker, first)
    done(worker, second)
    q.sql("update gangq.retried set followed = false")
    q.settle()
    assert (q.state(second), unfollowed(q)) == ("done", 0)


def test_a_dependent_that_was_told_but_not_cancelled_yet_waits_on(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    second = q.submit(after=[first])
    worker.take().fail(retryable=False)
    assert q.value("select outcome from gangq.dependencies") == "failed"
    retry(q, first)
    assert q.sql("select outcome, settled from gangq.dependencies") == [{"outcome": None, "settled": False}]
    q.settle()
    assert q.state(second) == "waiting"
    done(worker, first)
    assert q.state(second) == "pending"


def test_a_dependent_of_a_draining_queue_stays_cancelled(q: Q) -> None:
    worker = q.worker()
    q.call("set_queue", name="aside")
    first = q.submit()
    second = q.submit(queue="aside", after=[first], wait_for_hardware=True)
    fail(worker, first)
    q.call("set_queue", name="aside", draining=True)
    retry(q, first)
    q.settle()
    assert (states(q, first, second), unfollowed(q)) == (["pending", "cancelled"], 0)


def test_a_gang_that_cannot_run_again_keeps_nothing_else_from_being_revived(q: Q) -> None:
    first = q.submit()
    gang, job = q.submit_gang(2, after=[first]), q.submit(after=[first])
    q.worker().take().fail(retryable=False)
    q.settle()
    q.sql("delete from gangq.history where job_id = %(id)s", id=gang.job_ids[1])  # past its retention
    q.call("retry", job_ids=[first])
    assert (gang.state, q.state(job)) == ("cancelled", "waiting")


def test_a_dependent_retried_by_hand_waits_for_nothing(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    second = q.submit(after=[first])
    third = q.submit(after=[second])
    fail(worker, first)
    retry(q, second)
    assert states(q, first, second, third) == ["failed", "pending", "waiting"]
    retry(q, first)
    q.settle()
    assert states(q, first, second, third) == ["pending", "pending", "waiting"]


def test_what_is_revived_stays_its_submitters(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    second, gang = q.submit(after=[first]), q.submit_gang(1, after=[first])
    fail(worker, first)
    for table in ("history", "gang_history"):
        q.sql(f"update gangq.{table} set submitter = 'alice', login = 'alice'")
    retry(q, first)
    kept = {"submitter": "alice", "login": "alice"}
    assert q.sql("select submitter, login from gangq.live_jobs where id = %(id)s", id=second) == [kept]
    assert q.sql("select submitter, login from gangq.live_gangs where id = %(id)s", id=gang.id) == [kept]
    mine = q.value("select session_user::text")
    assert q.value("select login from gangq.live_jobs where id = %(id)s", id=first) == mine


def ticks(q: Q) -> Iterator[float]:
    """Tick until nothing is left to do; yield the seconds that each tick took."""
    while True:
        began = time.monotonic()
        again = q.sql("select again from gangq.tick(force => true)")[0]["again"]
        yield time.monotonic() - began
        if not again:
            return


@pytest.mark.slow
@pytest.mark.own_database
def test_a_chain_of_1000_is_revived_in_bounded_steps(q: Q) -> None:
    worker = q.worker()
    first = previous = q.submit()
    chain = []
    for _ in range(1000):
        previous = q.submit(after=[previous])
        chain.append(previous)
    worker.take().fail(retryable=False)
    while q.value("select count(*) from gangq.live_jobs") > 0:
        q.call("tick", force=True)
    began = time.monotonic()
    retry(q, first)
    took = time.monotonic() - began
    at_once = q.value("select count(*) from gangq.live_jobs") - 1
    slowest = max(ticks(q))
    whole = time.monotonic() - began
    print(f"retry {took:.2f} s, {at_once} at once, slowest tick {slowest:.2f} s, all {whole:.2f} s")
    assert q.value("select count(*) from gangq.live_jobs where state = 'waiting'") == 1000
    assert 0 < at_once <= 500
    assert took < 3
    assert slowest < 3
    assert whole < 60


@pytest.mark.slow
@pytest.mark.own_database
def test_a_fan_out_of_10000_is_revived_in_bounded_steps(q: Q) -> None:
    worker = q.worker()
    first = q.submit()
    q.submit(count=10_000, after=[first])
    worker.take().fail(retryable=False)
    while q.value("select count(*) from gangq.live_jobs") > 0:
        q.call("tick", force=True)
    began = time.monotonic()
    retry(q, first)
    took = time.monotonic() - began
    at_once = q.value("select count(*) from gangq.live_jobs") - 1
    slowest = max(ticks(q))
    whole = time.monotonic() - began
    print(f"retry {took:.2f} s, {at_once} at once, slowest tick {slowest:.2f} s, all {whole:.2f} s")
    assert q.value("select count(*) from gangq.live_jobs where state = 'waiting'") == 10_000
    assert at_once == 500
    assert took < 3
    assert slowest < 3
    assert whole < 120


@pytest.mark.parametrize("kind", ["job", "gang"])
def test_the_last_ending_counts_though_the_clock_went_back(q: Q, kind: str) -> None:
    worker = q.worker(slots=2)
    gang = q.submit_gang(1) if kind == "gang" else None
    first = gang.job_ids[0] if gang else q.submit()
    waits = q.submit(after=[first])

    def claim() -> Claim:
        if gang:
            q.place()
        return worker.take()

    claim().fail(retryable=False)
    q.settle()
    assert q.state(waits) == "cancelled"
    q.later(-3600)
    q.call("retry", **({"gang_ids": [gang.id]} if gang else {"job_ids": [first]}))
    worker.beat()
    claim().complete({"ok": True})
    q.settle()
    assert q.state(waits) == "pending"
    last = worker.take()
    (given,) = q.call("inputs", job_id=last.job_id, token=last.token)
    assert (given["state"], given["result"]) == ("done", {"ok": True})

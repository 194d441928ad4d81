"""A retry meets whoever tells, cancels, submits or retries what waited for the retried job: it waits for it again."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from interleaving.sessions import Arena, Later, call, value


def failed(meeting: Arena) -> tuple[int, int]:
    """A job that has failed, and its dependent, which was told so and not cancelled yet."""
    job, token = meeting.running(meeting.worker("w1"))
    waiting = meeting.job(after=[job])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    return job, waiting


def unfollowed(meeting: Arena) -> list[int]:
    rows = meeting.db.execute(
        "select job_id from gangq.retried where job_id is not null and not followed"
    ).fetchall()
    return [row["job_id"] for row in rows]


def waits_for(meeting: Arena, *jobs: int) -> bool:
    """After some ticks the only dependencies are on these jobs, not told, and each retry is followed."""
    for _ in range(3):
        meeting.tick()
    rows = meeting.db.execute(
        "select on_job_id, outcome from gangq.dependencies order by on_job_id"
    ).fetchall()
    assert meeting.violations() == []
    assert unfollowed(meeting) == []
    return [(row["on_job_id"], row["outcome"]) for row in rows] == [(job, None) for job in jobs]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_job_is_retried_while_its_dependent_is_being_cancelled(meeting, ending):
    job, waiting = failed(meeting)
    canceller = meeting.connect(autocommit=False)
    value(canceller, "promote_due")
    call(meeting.connect(statement_timeout="1000"), "retry", job_ids=[job])
    meeting.tick()
    assert unfollowed(meeting) == [job], "the other transaction holds the dependent"
    getattr(canceller, ending)()
    assert meeting.state(waiting) == ("cancelled" if ending == "commit" else "waiting")
    assert waits_for(meeting, job)
    assert meeting.state(waiting) == "waiting"


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_dependent_is_to_be_cancelled_while_the_retry_is_open(meeting, ending):
    job, waiting = failed(meeting)
    retrier = meeting.connect(autocommit=False)
    call(retrier, "retry", job_ids=[job])
    meeting.tick()
    assert meeting.state(waiting) == "waiting", "the retry holds the dependency"
    getattr(retrier, ending)()
    if ending == "commit":
        assert waits_for(meeting, job)
        assert meeting.state(waiting) == "waiting"
    else:
        meeting.tick()
        assert meeting.state(waiting) == "cancelled"


def test_a_dependent_is_submitted_told_and_cancelled_while_the_retry_is_open(meeting):
    job, token = meeting.running(meeting.worker("w1"))
    submitter = meeting.connect(autocommit=False)
    waiting = value(submitter, "submit", task="later", after=[job])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    retrier = meeting.connect(autocommit=False)
    call(retrier, "retry", job_ids=[job])
    submitter.commit()
    for _ in range(2):
        meeting.tick()
    assert meeting.state(waiting) == "cancelled", "nobody but the retrier sees the retry"
    retrier.commit()
    assert waits_for(meeting, job)
    assert meeting.state(waiting) == "waiting"


@pytest.mark.parametrize("order", ["first one first", "second one first"])
def test_two_jobs_that_one_waits_for_are_retried_at_once(meeting, order):
    worker = meeting.worker("w1", slots=2)
    (one, one_token), (two, two_token) = meeting.running(worker), meeting.running(worker)
    waiting = meeting.job(after=[one, two])
    for job, token in ((one, one_token), (two, two_token)):
        value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    meeting.tick()
    assert meeting.state(waiting) == "cancelled"
    retriers = [meeting.connect(autocommit=False) for _ in range(2)]
    for retrier, job in zip(retriers, (one, two), strict=True):
        call(retrier, "retry", job_ids=[job])
    for retrier in retriers if order == "first one first" else retriers[::-1]:
        retrier.commit()
        meeting.tick()
    assert waits_for(meeting, one, two)
    assert meeting.state(waiting) == "waiting"


def test_a_dependent_held_since_before_the_failure_is_told_nothing_after_the_retry(meeting):
    """The ending could not tell it and left a note for the tick; after the retry only the next ending counts."""
    job, token = meeting.running(meeting.worker("w1"))
    held = meeting.job(after=[job])
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", job_ids=[held])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    assert meeting.db.execute("select job_id from gangq.unsettled").fetchall() == [{"job_id": job}]
    call(meeting.db, "retry", job_ids=[job])
    frozen.rollback()
    assert waits_for(meeting, job)
    assert meeting.state(held) == "waiting"
    assert meeting.db.execute("select job_id from gangq.unsettled").fetchall() == []


@pytest.mark.parametrize(("ending", "then"), [("commit", "pending"), ("rollback", "waiting")])
def test_a_dependent_is_retried_by_hand_while_it_is_to_be_revived(meeting, ending, then):
    job, waiting = failed(meeting)
    meeting.tick()
    assert meeting.state(waiting) == "cancelled"
    by_hand = meeting.connect(autocommit=False)
    call(by_hand, "retry", job_ids=[waiting])
    call(meeting.connect(statement_timeout="1000"), "retry", job_ids=[job])
    meeting.tick()
    assert unfollowed(meeting) == [job], "the other transaction holds the ending"
    getattr(by_hand, ending)()
    assert waits_for(meeting, *([job] if then == "waiting" else []))
    assert meeting.state(waiting) == then


@pytest.mark.parametrize("held", ["told", "cancelled", "gang"])
def test_a_dependent_that_is_held_leaves_one_retry_unfollowed_and_no_other(meeting: Arena, held: str) -> None:
    """The tick looks at 200 retries at once: all were looked at again for as long as one dependent was held."""
    worker = meeting.worker("w1", slots=3)
    (one, one_token), (two, two_token) = meeting.running(worker), meeting.running(worker)
    gang, members = meeting.gang(2, after=[one])
    single = meeting.job(after=[one])
    meeting.job(after=[two])
    for job, token in ((one, one_token), (two, two_token)):
        value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    frozen = meeting.connect(autocommit=False)
    if held == "told":
        frozen.execute("select from gangq.dependencies where job_id = %s for update", (single,))
    else:
        meeting.tick()
        meeting.tick()
        assert [meeting.state(job) for job in (single, *members)] == ["cancelled"] * 3
        call(frozen, "retry", **({"gang_ids": [gang]} if held == "gang" else {"job_ids": [single]}))
    call(meeting.connect(statement_timeout="1000"), "retry", job_ids=[one, two])
    meeting.tick()
    assert unfollowed(meeting) == [one]
    frozen.rollback()
    assert waits_for(meeting, one, one, one, two)


def test_a_dependent_that_is_held_until_the_retried_job_is_done_follows_it(meeting: Arena) -> None:
    """The job was not live when the tick looked: the retry counted as followed, and the old ending cancelled it."""
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    waiting = meeting.job(after=[job])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    frozen = meeting.connect(autocommit=False)
    frozen.execute("select from gangq.dependencies where job_id = %s for update", (waiting,))
    call(meeting.connect(statement_timeout="1000"), "retry", job_ids=[job])
    (claim,) = call(meeting.db, "claim", incarnation=worker)
    assert claim["job_id"] == job
    meeting.clock.advance(1)
    call(meeting.db, "complete", job_ids=[job], tokens=[claim["token"]])
    meeting.tick()
    frozen.rollback()
    for _ in range(2):
        meeting.tick()
    assert meeting.state(waiting) == "pending"
    assert unfollowed(meeting) == []


def test_a_dependent_is_not_cancelled_for_an_outcome_that_a_retry_has_taken_back(meeting):
    """The cancelling transaction read the outcome before the retry was committed, and locks the dependent after."""
    other, other_token = meeting.running(meeting.worker("w1"))
    job, token = meeting.running(meeting.worker("w2"))
    # What waits for the lowest id is handled first; what a cancel does to it is held up by a trigger.
    slow, waiting = meeting.job(after=[other]), meeting.job(after=[job])
    meeting.db.execute(
        "create function public.hold_up() returns trigger language plpgsql set lock_timeout = '10s' as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$"
    )
    meeting.db.execute(
        "create trigger hold_up before update on gangq.live_jobs for each row "
        f"when (old.id = {slow}) execute function public.hold_up()"
    )
    value(meeting.db, "fail", job_id=other, token=other_token, retryable=False)
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    gate = meeting.connect()
    gate.execute("select pg_advisory_lock(1)")
    held_up = Later(meeting.connect(), lambda conn: value(conn, "promote_due")).start(meeting.db)
    assert held_up.waited
    call(meeting.connect(statement_timeout="1000"), "retry", job_ids=[job])
    gate.execute("select pg_advisory_unlock(1)")
    held_up.join().result()
    assert [meeting.state(one) for one in (slow, waiting)] == ["cancelled", "waiting"]
    for _ in range(2):
        meeting.tick()
    assert [meeting.state(one) for one in (slow, waiting)] == ["cancelled", "waiting"]
    assert unfollowed(meeting) == []
    assert meeting.violations() == []


def test_a_dependent_that_is_cancelled_while_the_tick_revives_another_is_revived_too(meeting: Arena) -> None:
    """The tick could not lock it when it looked at the told ones, and did not see it among the cancelled ones."""
    job, token = meeting.running(meeting.worker("w1"))
    first, second = meeting.job(after=[job]), meeting.job(after=[job])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    holder = meeting.connect(autocommit=False)
    holder.execute("select from gangq.dependencies where job_id = %s for update", (second,))
    meeting.tick()
    holder.rollback()
    assert [meeting.state(one) for one in (first, second)] == ["cancelled", "waiting"]
    meeting.db.execute(
        "create function public.hold_up() returns trigger language plpgsql set lock_timeout = '10s' as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$"
    )
    meeting.db.execute(
        "create trigger hold_up before insert on gangq.live_jobs for each row "
        f"when (new.id = {first}) execute function public.hold_up()"
    )
    value(holder, "promote_due")
    retrier = meeting.connect()
    with retrier.transaction():  # It leaves all that is to be revived to the tick.
        retrier.execute("set transaction isolation level repeatable read")
        call(retrier, "retry", job_ids=[job])
    gate = meeting.connect()
    gate.execute("select pg_advisory_lock(1)")
    ticking = Later(meeting.connect(), lambda conn: value(conn, "revive_dependents")).start(meeting.db)
    assert ticking.waited
    holder.commit()
    assert meeting.state(second) == "cancelled"
    gate.execute("select pg_advisory_unlock(1)")
    ticking.join().result()
    assert waits_for(meeting, job, job)
    assert [meeting.state(one) for one in (first, second)] == ["waiting"] * 2


def test_a_batch_that_another_transaction_reopens_keeps_no_retry_and_no_tick_waiting(meeting: Arena) -> None:
    worker = meeting.worker("w1")
    first, token = meeting.running(worker)
    batched = [
        row["submit"]
        for row in call(meeting.db, "submit", task="t", payloads=[Jsonb({})] * 2, name="b", after=[first])
    ]
    single = meeting.job(after=[first])
    value(meeting.db, "fail", job_id=first, token=token, retryable=False)
    meeting.tick()
    meeting.tick()
    assert [meeting.state(job) for job in (*batched, single)] == ["cancelled"] * 3
    frozen = meeting.connect(autocommit=False)
    call(frozen, "retry", job_ids=batched[:1])
    others = meeting.connect(statement_timeout="1000")
    call(others, "retry", job_ids=[first])
    assert meeting.tick()["detail"]["revive_dependents"] >= 0
    assert [meeting.state(job) for job in (*batched, single)] == ["cancelled", "cancelled", "waiting"]
    frozen.commit()
    meeting.tick()
    assert [meeting.state(job) for job in batched] == ["pending", "waiting"]
    assert meeting.violations() == []

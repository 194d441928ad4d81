"""Who waits is told how it ended, whoever holds its row at that moment and whatever the caller's snapshot saw."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.types.json import Jsonb

from interleaving.sessions import Arena, Connection, Later, call, value


def end(conn: Connection, job: int, token: int, how: str) -> None:
    if how == "done":
        call(conn, "complete", job_ids=[job], tokens=[token])
    else:
        value(conn, "fail", job_id=job, token=token, retryable=False)


def unsettled(meeting: Arena) -> list[int]:
    return [row["job_id"] for row in meeting.db.execute("select job_id from gangq.unsettled").fetchall()]


@pytest.mark.parametrize(("how", "then"), [("done", "pending"), ("failed", "cancelled")])
def test_a_dependent_held_by_an_open_cancel_is_told_once_the_cancel_is_taken_back(meeting, how, then):
    job, token = meeting.running(meeting.worker("w1"))
    held, free = meeting.job(after=[job]), meeting.job(after=[job])
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", job_ids=[held])
    # Whoever ends the job waits for nobody.
    end(meeting.connect(statement_timeout="1000"), job, token, how)
    assert unsettled(meeting) == [job]
    assert meeting.tick()["detail"]["promote_due"] >= 0
    assert meeting.state(free) == then, "the other one need not wait for the frozen client"
    assert meeting.state(held) == "waiting"
    frozen.rollback()
    meeting.tick()
    assert meeting.state(held) == then
    meeting.tick()
    assert unsettled(meeting) == []
    assert meeting.violations() == []


def test_what_a_tick_has_not_told_yet_is_told_although_the_job_ends_anew_beside_that_tick(meeting):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    call(meeting.db, "submit", task="after", payloads=[Jsonb({})] * 2100, after=[job])
    while meeting.db.execute("select from gangq.dependencies where not settled").fetchall():
        meeting.tick()
    end(meeting.db, job, token, "failed")
    ticker = meeting.connect(autocommit=False)
    call(ticker, "promote_due")
    call(meeting.db, "retry", job_ids=[job])
    meeting.clock.advance(1)
    (again,) = meeting.claim(worker)
    ender = meeting.connect(autocommit=False)
    later = Later(ender, lambda conn: end(conn, job, again["token"], "done")).start(meeting.db)
    # The tick sees that the job lives, and not that it is about to end.
    call(ticker, "promote_due")
    ticker.commit()
    later.join().result()
    ender.commit()
    assert unsettled(meeting) == [job]
    while unsettled(meeting):
        meeting.tick()
    assert meeting.db.execute("select from gangq.dependencies where outcome is null").fetchall() == []


@pytest.mark.parametrize("how", ["done", "failed"])
def test_a_dependent_whose_open_cancel_is_committed_stays_cancelled_and_nothing_is_left_to_tell(meeting, how):
    job, token = meeting.running(meeting.worker("w1"))
    held = meeting.job(after=[job])
    frozen = meeting.connect(autocommit=False)
    call(frozen, "cancel", job_ids=[held])
    end(meeting.connect(statement_timeout="1000"), job, token, how)
    frozen.commit()
    meeting.tick()
    assert meeting.state(held) == "cancelled"
    assert unsettled(meeting) == []
    assert meeting.violations() == []


@pytest.mark.parametrize("kind", ["solo", "gang"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_dependent_submitted_since_the_snapshot_of_a_completing_caller_is_told(meeting, level, kind):
    worker = meeting.worker("w1")
    if kind == "solo":
        job, token = meeting.running(worker)
    else:
        _, (job,), (token,) = meeting.running_gang([worker])
    caller = meeting.connect(autocommit=False)
    caller.isolation_level = getattr(psycopg.IsolationLevel, level.replace(" ", "_"))
    caller.execute("select count(*) from gangq.live_jobs")  # the snapshot is taken here
    waiting = meeting.job(after=[job])
    meeting.tick()  # The dependency is settled: from here on only the caller can tell it.
    assert meeting.db.execute("select settled from gangq.dependencies").fetchall() == [{"settled": True}]
    call(caller, "complete", job_ids=[job], tokens=[token])
    caller.commit()
    assert meeting.state(job) == "done"
    assert meeting.state(waiting) == "waiting"
    assert meeting.violations() == []
    meeting.tick()
    assert meeting.state(waiting) == "pending"
    assert unsettled(meeting) == []


@pytest.mark.parametrize(
    ("option", "how", "then"),
    [
        ("after", "done", "pending"),
        ("after", "failed", "cancelled"),
        ("after_any", "failed", "pending"),
        ("after_failed", "failed", "pending"),
        ("after_failed", "done", "cancelled"),
    ],
)
@pytest.mark.parametrize("kind", ["solo", "gang"])
def test_a_job_ends_while_the_submission_of_one_that_waits_for_it_is_open(meeting, option, how, then, kind):
    worker = meeting.worker("w1")
    if kind == "solo":
        job, token = meeting.running(worker)
    else:
        _, (job,), (token,) = meeting.running_gang([worker], failure_policy="fail")
    submitter = meeting.connect(autocommit=False)
    waiting = value(submitter, "submit", task="later", **{option: [job]})
    (gang,) = call(submitter, "submit_gang", task="later", size=1, **{option: [job]})
    end(meeting.connect(statement_timeout="1000"), job, token, how)
    meeting.tick()
    submitter.commit()
    assert meeting.state(waiting) == "waiting"
    assert meeting.violations() == []
    meeting.tick()
    assert meeting.state(waiting) == then
    assert meeting.gang_row(gang["gang_id"])["state"] in {"pending": ("blocked", "reserved")}.get(
        then, (then,)
    )
    assert meeting.violations() == []


@pytest.mark.parametrize("ending", ["commit", "rollback"])
@pytest.mark.parametrize(("how", "then"), [("done", "pending"), ("failed", "cancelled")])
def test_a_job_is_submitted_after_one_whose_ending_is_open(meeting, how, then, ending):
    job, token = meeting.running(meeting.worker("w1"))
    ender = meeting.connect(autocommit=False)
    end(ender, job, token, how)
    waiting = value(meeting.connect(statement_timeout="1000"), "submit", task="later", after=[job])
    meeting.tick()
    assert meeting.state(waiting) == "waiting"
    if ending == "rollback":
        ender.rollback()
        meeting.tick()
        assert meeting.state(waiting) == "waiting"
        end(meeting.db, job, token, how)
    else:
        ender.commit()
    assert meeting.violations() == []
    meeting.tick()
    assert meeting.state(waiting) == then
    assert meeting.violations() == []


@pytest.mark.parametrize(("how", "then"), [("done", "pending"), ("failed", "cancelled")])
def test_a_job_ends_after_the_tick_has_settled_who_waits_for_it(meeting, how, then):
    job, token = meeting.running(meeting.worker("w1"))
    waiting = meeting.job(after=[job])
    meeting.tick()
    assert meeting.db.execute("select settled from gangq.dependencies").fetchall() == [{"settled": True}]
    end(meeting.db, job, token, how)
    assert meeting.db.execute("select outcome from gangq.dependencies").fetchall() == [{"outcome": how}]
    meeting.tick()
    assert meeting.state(waiting) == then


def test_an_awaited_job_ends_while_the_tick_that_has_settled_its_dependents_is_left_open(meeting):
    job, token = meeting.running(meeting.worker("w1"))
    waiting = meeting.job(after=[job])
    frozen = meeting.connect(autocommit=False)
    call(frozen, "tick", force=True)
    # That tick has let go of the awaited job, but not of the dependency's row: the next one tells it.
    end(meeting.connect(statement_timeout="1000"), job, token, "done")
    frozen.commit()
    assert meeting.violations() == []
    meeting.tick()
    assert meeting.state(waiting) == "pending"
    assert unsettled(meeting) == []


def test_an_open_submission_that_waits_for_it_keeps_nobody_from_any_job(meeting):
    one = meeting.worker("w1", slots=4)
    done, failed, cancelled, handed_back = (meeting.running(one) for _ in range(4))
    pending = meeting.job()
    frozen = meeting.connect(autocommit=False)
    jobs = [job for job, _ in (done, failed, cancelled, handed_back)]
    call(frozen, "submit", task="later", after=[*jobs, pending])
    others = meeting.connect(statement_timeout="1000")
    call(others, "complete", job_ids=[done[0]], tokens=[done[1]])
    value(others, "fail", job_id=failed[0], token=failed[1], retryable=False)
    call(others, "cancel", job_ids=[cancelled[0], pending])
    call(others, "release", job_ids=[handed_back[0]], tokens=[handed_back[1]])
    call(others, "set_priority", priority=5, job_ids=[handed_back[0]])
    assert meeting.tick()["ran"]
    frozen.rollback()
    assert meeting.violations() == []


def test_what_waits_for_an_ending_that_is_kept_no_longer_is_cancelled(meeting):
    job, token = meeting.running(meeting.worker("w1"))
    submitter = meeting.connect(autocommit=False)
    waiting = value(submitter, "submit", task="later", after=[job])
    end(meeting.db, job, token, "done")
    meeting.db.execute("delete from gangq.history")
    submitter.commit()
    meeting.tick()
    assert meeting.state(waiting) == "cancelled"


def test_a_job_with_two_awaited_jobs_is_not_let_go_early_by_two_promotions_at_once(meeting):
    """The second promotion read how many were done before the first one had taken them off."""
    one, two = meeting.worker("w1"), meeting.worker("w2")
    failed, failed_token = meeting.running(one)
    done, done_token = meeting.running(two)
    still, still_token = meeting.running(meeting.worker("w3"))
    # What is cancelled is handled first; what a promotion does to it is held up by a trigger.
    slow, waiting = meeting.job(after=[failed]), meeting.job(after=[done, still])
    meeting.db.execute(
        "create function public.hold_up() returns trigger language plpgsql set lock_timeout = '10s' as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$"
    )
    meeting.db.execute(
        "create trigger hold_up before update on gangq.live_jobs for each row "
        f"when (old.id = {slow}) execute function public.hold_up()"
    )
    value(meeting.db, "fail", job_id=failed, token=failed_token, retryable=False)
    call(meeting.db, "complete", job_ids=[done], tokens=[done_token])
    gate = meeting.connect()
    gate.execute("select pg_advisory_lock(1)")
    held_up = Later(meeting.connect(), lambda conn: value(conn, "promote_due")).start(meeting.db)
    assert held_up.waited
    assert value(meeting.db, "promote_due") == 1
    gate.execute("select pg_advisory_unlock(1)")
    held_up.join().result()
    assert meeting.state(slow) == "cancelled"
    assert meeting.state(waiting) == "waiting", "the other job it waits for still runs"
    assert meeting.violations() == []
    call(meeting.db, "complete", job_ids=[still], tokens=[still_token])
    meeting.tick()
    assert meeting.state(waiting) == "pending"


def test_a_retry_left_open_of_what_a_job_waits_for_in_any_case_does_not_stop_the_tick(meeting):
    """It takes the outcome back that the job was told, and holds that row."""
    job, token = meeting.running(meeting.worker("w1"))
    waiting = meeting.job(after_any=[job])
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    frozen = meeting.connect(autocommit=False)
    call(frozen, "retry", job_ids=[job])
    # On a busy machine its 200 ms were over before it came to this.
    call(frozen, "revive", ids=[job], most=500, t=meeting.clock.now())
    value(meeting.connect(statement_timeout="1000"), "promote_due")
    assert meeting.state(waiting) == "waiting"
    frozen.rollback()
    meeting.tick()
    assert meeting.state(waiting) == "pending"
    assert meeting.violations() == []

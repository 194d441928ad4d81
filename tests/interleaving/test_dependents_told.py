"""Who waits is told how it ended, whoever holds its row at that moment and whatever the caller's snapshot saw."""

from __future__ import annotations

import psycopg
import pytest

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
    call(caller, "complete", job_ids=[job], tokens=[token])
    caller.commit()
    assert meeting.state(job) == "done"
    assert meeting.state(waiting) == "waiting"
    assert meeting.violations() == []
    meeting.tick()
    assert meeting.state(waiting) == "pending"
    assert unsettled(meeting) == []


def test_a_job_with_two_awaited_jobs_is_not_let_go_early_by_two_promotions_at_once(meeting):
    """The second promotion read how many were done before the first one had taken them off."""
    one, two = meeting.worker("w1"), meeting.worker("w2")
    done, done_token = meeting.running(one)
    still, still_token = meeting.running(two)
    # The lowest id is handled first; what a promotion does to it is held up by a trigger.
    slow, waiting = meeting.job(after=[done]), meeting.job(after=[done, still])
    meeting.db.execute(
        "create function public.hold_up() returns trigger language plpgsql set lock_timeout = '10s' as "
        "$$ begin perform pg_advisory_xact_lock(1); return new; end $$"
    )
    meeting.db.execute(
        "create trigger hold_up before update on gangq.live_jobs for each row "
        f"when (old.id = {slow}) execute function public.hold_up()"
    )
    call(meeting.db, "complete", job_ids=[done], tokens=[done_token])
    gate = meeting.connect()
    gate.execute("select pg_advisory_lock(1)")
    held_up = Later(meeting.connect(), lambda conn: value(conn, "promote_due")).start(meeting.db)
    assert held_up.waited
    assert value(meeting.db, "promote_due") == 1
    gate.execute("select pg_advisory_unlock(1)")
    held_up.join().result()
    assert meeting.state(slow) == "pending"
    assert meeting.state(waiting) == "waiting", "the other job it waits for still runs"
    assert meeting.violations() == []
    call(meeting.db, "complete", job_ids=[still], tokens=[still_token])
    meeting.tick()
    assert meeting.state(waiting) == "pending"

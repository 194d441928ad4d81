"""Batches when several sessions work on one at once: its limit, its end, retries of it."""

from __future__ import annotations

import pytest

from interleaving.sessions import Arena, Connection, Later, Row, both_ends, call, claim_all, value, verb
from sql.drive import tick

pytestmark = pytest.mark.slow


def batch(meeting: Arena, n: int, **options: object) -> list[int]:
    """The jobs of a new batch."""
    payloads = ["{}"] * n
    return [
        row["submit"]
        for row in call(meeting.db, "submit", task="t", payloads=payloads, name="sweep", **options)
    ]


def told(meeting: Arena) -> list[str]:
    """What was told of batches that have ended."""
    rows = meeting.db.execute("select body ->> 'reason' as reason from gangq.outbox order by id").fetchall()
    return [row["reason"] for row in rows]


def listen(meeting: Arena) -> None:
    call(meeting.db, "add_notification", target="t", kinds=["batch_done"])


def state(meeting: Arena) -> Row:
    (row,) = meeting.db.execute("select * from gangq.batches").fetchall()
    return row


def test_8_claimers_are_never_seen_above_at_most_and_finish_all_the_work(meeting: Arena):
    incarnations = [meeting.worker(f"w{n}", slots=4) for n in range(8)]
    jobs = {*batch(meeting, 40, at_most=3)}
    assert claim_all(meeting, incarnations, jobs) == 3


@both_ends
def test_of_two_places_of_one_batch_the_second_counts_what_the_first_has_taken(meeting: Arena, end):
    one, two = batch(meeting, 2, at_most=1)
    workers = [meeting.worker("w1"), meeting.worker("w2")]
    met = meeting.meet(
        verb("open_place", incarnation=workers[0], job_id=one),
        verb("open_place", incarnation=workers[1], job_id=two),
        end,
    )
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)


def test_the_last_two_jobs_that_finish_at_once_do_not_wait_and_one_end_is_told(meeting: Arena):
    listen(meeting)
    batch(meeting, 2)
    claims = [meeting.claim(meeting.worker(name))[0] for name in ("w1", "w2")]

    def completes(n: int):
        return lambda conn: call(conn, "complete", job_ids=[claims[n]["job_id"]], tokens=[claims[n]["token"]])

    met = meeting.meet(completes(0), completes(1))
    assert not met.later.waited
    assert (state(meeting)["state"], told(meeting)) == ("done", [])
    ends = meeting.meet(lambda c: value(c, "end_batches"), lambda c: value(c, "end_batches"))
    assert (ends.first, ends.later.value, ends.later.waited) == (1, 0, False)
    tick(meeting.db)
    assert told(meeting) == ["2 of 2 done, 0 failed, 0 cancelled"]


@both_ends
def test_a_batch_has_not_ended_before_the_end_of_its_last_job_is_committed(meeting: Arena, end):
    listen(meeting)
    (job,) = batch(meeting, 1)
    met = meeting.meet(verb_cancel(job), lambda c: value(c, "end_batches"), end)
    assert (met.later.value, met.later.waited) == (0, False)
    assert value(meeting.db, "end_batches") == (end == "commit")
    assert told(meeting) == (["0 of 1 done, 0 failed, 1 cancelled"] if end == "commit" else [])


def verb_cancel(*jobs: int):
    return lambda conn: call(conn, "cancel", job_ids=[*jobs])


@both_ends
def test_a_cancel_of_the_batch_meets_a_job_that_finishes(meeting: Arena, end):
    listen(meeting)
    jobs = batch(meeting, 3)
    (claim,) = meeting.claim(meeting.worker("w1"))

    def complete(conn: Connection) -> None:
        call(conn, "complete", job_ids=[claim["job_id"]], tokens=[claim["token"]])

    met = meeting.meet(complete, verb_cancel(*jobs), end)
    assert met.later.error is None
    left = [row["job_id"] for row in met.later.result() if row["state"] == "left"]
    assert left == [claim["job_id"]]
    verb_cancel(*left)(meeting.db)
    if end == "rollback":
        complete(meeting.db)
    tick(meeting.db)
    assert told(meeting) == ["1 of 3 done, 0 failed, 2 cancelled"]


@both_ends
def test_a_retry_that_is_not_committed_keeps_its_batch_open(meeting: Arena, end):
    listen(meeting)
    (job,) = batch(meeting, 1)
    verb_cancel(job)(meeting.db)
    meeting.clock.advance(1)
    met = meeting.meet(lambda c: call(c, "retry", job_ids=[job]), lambda c: value(c, "end_batches"), end)
    assert (met.later.value, met.later.waited) == (0, False)
    tick(meeting.db)
    assert (state(meeting)["finished_at"] is None, told(meeting)) == (
        end == "commit",
        [] if end == "commit" else ["0 of 1 done, 0 failed, 1 cancelled"],
    )


@both_ends
def test_a_retry_meets_the_tick_that_ends_its_batch(meeting: Arena, end):
    (job,) = batch(meeting, 1)
    verb_cancel(job)(meeting.db)
    meeting.clock.advance(1)
    met = meeting.meet(lambda c: value(c, "end_batches"), lambda c: call(c, "retry", job_ids=[job]), end)
    assert (met.first, met.later.waited, met.later.error) == (1, True, None)
    assert state(meeting)["finished_at"] is None
    assert meeting.violations() == []


def test_a_retry_that_commits_while_a_tick_looks_at_its_batch_keeps_it_open(meeting: Arena):
    listen(meeting)
    (job,) = batch(meeting, 1)
    verb_cancel(job)(meeting.db)
    meeting.clock.advance(1)
    # The tick has seen that no job of the batch is live, and waits before it locks the batch.
    holder = meeting.connect(autocommit=False)
    holder.execute("lock table gangq.batches_table in exclusive mode")
    ends = Later(meeting.connect(), lambda c: value(c, "end_batches")).start(meeting.db)
    assert ends.waited
    call(holder, "retry", job_ids=[job])
    holder.commit()
    assert ends.join().result() == 0
    assert (state(meeting)["finished_at"], told(meeting)) == (None, [])
    assert meeting.violations() == []


def test_two_retries_of_one_batch_do_not_wait_for_each_other(meeting: Arena):
    jobs = batch(meeting, 2)
    verb_cancel(*jobs)(meeting.db)
    meeting.clock.advance(1)
    met = meeting.meet(
        lambda c: call(c, "retry", job_ids=jobs[:1]), lambda c: call(c, "retry", job_ids=jobs[1:])
    )
    assert not met.later.waited


def test_of_two_bulk_retries_each_job_is_retried_by_one(meeting: Arena):
    worker = meeting.worker("w1", light=3)
    jobs = batch(meeting, 3)
    for claim in meeting.claim(worker, max_jobs=3):
        call(meeting.db, "fail", job_id=claim["job_id"], token=claim["token"], retryable=False)
    meeting.clock.advance(1)
    holder = meeting.connect(autocommit=False)
    holder.execute("select from gangq.history where job_id = %s for update", [jobs[0]])
    first = call(meeting.db, "retry_failed", name="sweep")
    assert [(row["job_id"], row["state"]) for row in first] == [
        (jobs[0], "left"),
        (jobs[1], "pending"),
        (jobs[2], "pending"),
    ]
    holder.rollback()
    met = meeting.meet(
        lambda c: call(c, "retry_failed", name="sweep"), lambda c: call(c, "retry_failed", name="sweep")
    )
    assert [row["job_id"] for row in met.first] == jobs[:1]
    assert not met.later.waited
    assert [(row["job_id"], row["state"]) for row in met.later.result()] == [(jobs[0], "left")]
    assert meeting.violations() == []


@both_ends
def test_a_repetition_that_waits_for_the_first_submission_makes_no_second_batch(meeting: Arena, end):
    asked = {
        "task": "t",
        "request_id": "01890000-0000-7000-8000-000000000001",
        "options": {"name": "sweep", "at_most": 1},
    }
    submits = lambda c: call(c, "submit", **asked)  # noqa: E731
    met = meeting.meet(submits, submits, end)
    assert met.later.waited
    assert len(meeting.db.execute("select * from gangq.batches").fetchall()) == 1
    assert len(meeting.db.execute("select * from gangq.live_jobs").fetchall()) == 1

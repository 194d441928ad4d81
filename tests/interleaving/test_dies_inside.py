"""The server process of a verb dies after its last write and before its commit: nothing of it remains."""

from __future__ import annotations

import uuid

from interleaving.sessions import Arena, Connection, Later, Verb, call
from sql.drive import place


def dies(arena: Arena, table: str, work: Verb) -> None:
    """Let it come as far as this table, and end its server process there."""
    holder = arena.connect(autocommit=False)
    holder.execute(f"lock table gangq.{table} in exclusive mode".encode())
    dying: Connection = arena.connect()
    later = Later(dying, work).start(arena.db)
    assert later.waited
    arena.db.execute("select pg_terminate_backend(%s)", (dying.info.backend_pid,))
    assert later.join().sqlstate == "57P01"
    holder.rollback()


def test_a_pass_that_dies_after_it_has_placed_leaves_nothing_placed(meeting: Arena) -> None:
    meeting.worker("w1")
    gang_id, _ = meeting.gang(1)
    dies(meeting, "verdicts", lambda conn: place(conn))
    seen = "select state, epoch, (select count(*) from gangq.passes) as passes from gangq.live_gangs where id = %s"
    assert meeting.db.execute(seen, (gang_id,)).fetchone() == {"state": "blocked", "epoch": 0, "passes": 0}
    assert meeting.violations() == []
    assert place(meeting.db)["placed"] == 1


def test_a_completion_that_dies_with_its_claim_is_said_again_and_both_happen_once(meeting: Arena) -> None:
    worker = meeting.worker("w1")
    first, second = meeting.job(), meeting.job()
    (claim,) = call(meeting.db, "claim", incarnation=worker)
    assert claim["job_id"] == first
    # Its last write: it was put down as asleep, and no more is once it has claimed.
    asleep = "insert into gangq.sleepers (incarnation, queues, since) values (%s, array['default'], now())"
    meeting.db.execute(asleep, (worker,))
    said = {"incarnation": worker, "job_ids": [first], "tokens": [claim["token"]], "request_id": uuid.uuid4()}
    dies(meeting, "sleepers", lambda conn: call(conn, "complete_and_claim", **said))
    states = "select id, state, attempts from gangq.live_jobs order by id"
    assert [tuple(row.values()) for row in meeting.db.execute(states)] == [
        (first, "running", 1),
        (second, "pending", 0),
    ]
    for _ in range(2):
        answer = call(meeting.db, "complete_and_claim", **said)
    assert [(row["job_id"], row["outcome"]) for row in answer] == [(first, "repeated"), (second, "claimed")]
    assert [tuple(row.values()) for row in meeting.db.execute(states)] == [(second, "running", 1)]
    assert meeting.violations() == []


def test_a_retry_of_all_that_failed_that_dies_leaves_them_failed_and_what_waited_cancelled(
    meeting: Arena,
) -> None:
    worker = meeting.worker("w1", slots=2)
    claims = [meeting.running(worker) for _ in range(2)]
    waiting = meeting.job(after=[claims[0][0]])
    for job, token in claims:
        call(meeting.db, "fail", job_id=job, token=token, retryable=False)
    meeting.tick()
    jobs = [job for job, _ in claims]
    # Its last write: both are live by then.
    dies(meeting, "dependencies", lambda conn: call(conn, "retry_failed"))
    assert [meeting.state(job) for job in (*jobs, waiting)] == ["failed", "failed", "cancelled"]
    assert meeting.db.execute("select from gangq.retried").fetchall() == []
    assert [row["state"] for row in call(meeting.db, "retry_failed")] == ["pending"] * 2
    assert [meeting.state(job) for job in (*jobs, waiting)] == ["pending", "pending", "waiting"]
    assert meeting.violations() == []


def test_a_tick_that_dies_while_it_revives_leaves_that_to_the_next(meeting: Arena) -> None:
    job, token = meeting.running(meeting.worker("w1"))
    waiting = meeting.job(after=[job])
    call(meeting.db, "fail", job_id=job, token=token, retryable=False)
    meeting.tick()
    retrier = meeting.connect()
    with retrier.transaction():  # It leaves all that is to be revived to the tick.
        retrier.execute("set transaction isolation level repeatable read")
        call(retrier, "retry", job_ids=[job])
    # By its event: what is revived is live by then.
    dies(meeting, "events", lambda conn: call(conn, "revive_dependents"))
    assert meeting.state(waiting) == "cancelled"
    meeting.tick()
    assert meeting.state(waiting) == "waiting"
    unfollowed = "select from gangq.retried where job_id is not null and not followed"
    assert meeting.db.execute(unfollowed).fetchall() == [], "nothing is left to be revived"
    assert meeting.violations() == []


def test_a_judge_that_dies_while_it_moves_back_what_was_stored_has_moved_nothing(meeting: Arena) -> None:
    """The next one moves all of it, once."""
    worker = meeting.worker("w1")
    meeting.running(worker)
    meeting.tick()
    meeting.clock.advance(3600)
    call(meeting.db, "heartbeat", incarnation=worker, job_ids=[], tokens=[])
    meeting.tick()
    meeting.clock.advance(-3600)

    def left() -> float:
        row = meeting.db.execute(
            "select extract(epoch from expires_at - gangq.now())::real as s from gangq.leases"
        )
        return float(row.fetchall()[0]["s"])

    assert 3600 < left() <= 3720
    # Its last writes.
    dies(meeting, "replicas", lambda conn: conn.execute("select gangq.note_outage(gangq.now())").fetchall())
    assert 3600 < left() <= 3720
    for _ in range(2):
        meeting.tick()
        assert 0 < left() <= 120

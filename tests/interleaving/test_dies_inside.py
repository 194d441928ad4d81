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

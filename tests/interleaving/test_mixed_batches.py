"""Batches of solo jobs and members in any order: all lock gangs by id, then jobs by id, and never see a deadlock."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import ROW_BY_ROW, Arena, Connection, Later, call, value

Pair = tuple[int, int]


class Batch:
    """Two solo jobs with a gang's members between them by id, all running on one worker."""

    def __init__(self, meeting: Arena) -> None:
        worker = meeting.worker("w1", slots=4)
        self.low = meeting.running(worker)
        self.gang_id, members, tokens = meeting.running_gang([worker, worker])
        self.members = list(zip(members, tokens, strict=True))
        self.high = meeting.running(worker)
        assert self.low[0] < members[0] < members[1] < self.high[0]
        self.pairs: list[Pair] = [self.low, *self.members, self.high]


def give_up(conn: Connection, verb: str, pairs: list[Pair], **arguments: Any) -> list[dict[str, Any]]:
    return call(conn, verb, job_ids=[p[0] for p in pairs], tokens=[p[1] for p in pairs], **arguments)


OTHERS = {
    "completed backwards": lambda conn, b: give_up(conn, "complete", b.pairs[::-1], strict=False),
    "released backwards": lambda conn, b: give_up(conn, "release", b.pairs[::-1]),
    "moved": lambda conn, b: call(
        conn, "set_priority", priority=1, job_ids=[b.low[0], b.high[0]], gang_ids=[b.gang_id]
    ),
    "awaited": lambda conn, b: call(conn, "submit", task="t", after=[p[0] for p in b.pairs]),
}


def said(later: Later) -> list[dict[str, Any]]:
    return [row for row in later.result() if "outcome" in row]


@pytest.mark.parametrize("held", ["gang", "low"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("verb", ["complete", "release"])
def test_a_mixed_batch_and_another_in_the_opposite_order_both_end(meeting, verb, other, held):
    """Both wait for one row of the batch, the other one first; whoever held more than its turn would deadlock now."""
    batch = Batch(meeting)
    blocker = meeting.connect(autocommit=False)
    if held == "gang":
        blocker.execute("select 1 from gangq.live_gangs where id = %s for update", (batch.gang_id,))
    else:
        blocker.execute("select 1 from gangq.live_jobs where id = %s for update", (batch.low[0],))
    # Both connected before either waits: a verb waits for a lock for 2 s.
    one, two = meeting.connect(**ROW_BY_ROW), meeting.connect(**ROW_BY_ROW)
    first = Later(one, lambda conn: OTHERS[other](conn, batch)).start(meeting.db)
    mixed = [batch.high, batch.members[1], batch.low, batch.members[0]]
    lenient = {"strict": False} if verb == "complete" else {}
    second = Later(two, lambda conn: give_up(conn, verb, mixed, **lenient)).start(meeting.db)
    assert second.waited == (verb == "release")
    blocker.rollback()
    for later in (first.join(), second.join()):
        assert later.sqlstate is None, later.error
    # A report that waits for nobody says of what was held that it was.
    busy = {row["job_id"] for later in (first, second) for row in said(later) if row["outcome"] == "busy"}
    again = [pair for pair in batch.pairs if pair[0] in busy]
    if again:
        assert {row["outcome"] for row in give_up(one, "complete", again, strict=False)} <= {
            "done",
            "stale",
            "repeated",
        }
    assert meeting.violations() == []
    states = {meeting.state(p[0]) for p in batch.pairs}
    assert "running" not in states, states


ENDS = {
    "complete_drain": lambda conn, gang_id, pairs: call(conn, "complete_drain", gang_id=gang_id),
    "two released": lambda conn, gang_id, pairs: give_up(conn, "release", pairs[:0:-1]),
    "one fails": lambda conn, gang_id, pairs: call(conn, "fail", job_id=pairs[2][0], token=pairs[2][1]),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_output_of_members_and_the_end_of_their_epoch_meet_without_a_deadlock(meeting, how):
    """append_log locks members by id, and not their gang: the others must lock them in the same order."""
    workers = [meeting.worker(f"w{n}") for n in range(3)]
    gang_id, members = meeting.gang(3)
    assert value(meeting.db, "reserve_gang", gang_id=gang_id, incarnations=workers)
    # The last is claimed first: in the table its row comes before the others.
    claims = {row["job_id"]: row["token"] for n in (2, 0, 1) for row in meeting.claim(workers[n])}
    pairs = [(job, claims[job]) for job in members]
    blocker = meeting.connect(autocommit=False)
    blocker.execute("select from gangq.live_jobs where id = %s for update", (members[1],))
    output = {"job_ids": members, "tokens": [p[1] for p in pairs], "seqs": [0] * 3, "chunks": ["x"] * 3}
    ending, printing = meeting.connect(**ROW_BY_ROW), meeting.connect()
    prints = Later(printing, lambda conn: call(conn, "append_log", **output)).start(meeting.db)
    ends = Later(ending, lambda conn: ENDS[how](conn, gang_id, pairs)).start(meeting.db)
    assert prints.waited
    assert ends.waited
    blocker.rollback()
    for later in (prints.join(), ends.join()):
        assert later.sqlstate is None, later.error

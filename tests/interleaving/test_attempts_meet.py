"""Two that end one attempt: it is on record once, with the cause of the one that ended it."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import Arena, both_ends, call, first_of_two, meet, verb


def causes(arena: Arena) -> dict[int, list[Any]]:
    """Why each attempt ended, by its token."""
    found: dict[int, list[Any]] = {}
    for row in arena.db.execute("select token, cause from gangq.attempts order by token, cause").fetchall():
        found.setdefault(row["token"], []).append(row["cause"])
    return found


DEVICE = [{"uuid": "G", "index": 0, "vram_mb": 1000, "source": "nvml"}]


@first_of_two
@both_ends
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_completion_and_the_death_of_its_worker_record_one_end(meeting, turn, end, gpus):
    worker = meeting.worker("w1", devices=DEVICE)
    job, token = meeting.running(worker, gpus=gpus)
    complete = lambda conn: call(conn, "complete", job_ids=[job], tokens=[token], strict=False)  # noqa: E731
    dead = verb("report_dead", worker="w1", incarnation=worker, evidence={"by": "test"})
    meet(meeting, complete, dead, turn, end)
    if (turn, end) == (1, "rollback"):
        complete(meeting.db)  # It was told that the job was busy.
    meeting.tick()
    first, second = ("done", "crash") if turn == 0 else ("crash", "done")
    assert causes(meeting) == {token: [first if end == "commit" else second]}


@first_of_two
@both_ends
def test_two_members_that_end_at_once_are_each_on_record_once(meeting, turn, end):
    workers = [meeting.worker("w1", devices=DEVICE), meeting.worker("w2")]
    _, members, tokens = meeting.running_gang(workers)
    fail = verb("fail", job_id=members[0], token=tokens[0])
    done = lambda conn: call(conn, "complete", job_ids=[members[1]], tokens=[tokens[1]])  # noqa: E731
    meet(meeting, fail, done, turn, end)
    found = causes(meeting)
    assert [len(found[token]) for token in tokens] == [1, 1]
    if end == "commit":
        assert (found[tokens[0]], found[tokens[1]]) == (["fail"], ["done"])

"""A job that somebody's open transaction holds keeps no other report of its worker waiting."""

from __future__ import annotations

from typing import Any

import pytest

from interleaving.sessions import Arena, Connection, call

Pair = tuple[int, int]
WAYS = {"complete": {}, "complete_and_claim": {"max_jobs": 4}}


@pytest.fixture
def frozen(meeting: Arena) -> Connection:
    return meeting.connect(autocommit=False)


@pytest.fixture
def worker(meeting: Arena) -> int:
    return meeting.worker("w1", slots=4)


def report(meeting: Arena, verb: str, worker: int, pairs: list[Pair]) -> dict[int, str]:
    """What the report says of each job, on a connection that waits for nobody."""
    more: dict[str, Any] = {"incarnation": worker} if verb == "complete_and_claim" else {}
    rows = call(
        meeting.connect(statement_timeout="1000"),
        verb,
        job_ids=[job for job, _ in pairs],
        tokens=[token for _, token in pairs],
        strict=False,
        **more,
        **WAYS[verb],
    )
    return {row["job_id"]: row["outcome"] for row in rows}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("verb", WAYS)
def test_only_the_held_job_of_a_batch_is_busy_and_done_when_said_again(meeting, frozen, worker, verb, end):
    pairs = [meeting.running(worker) for _ in range(3)]
    (held, _), *others = pairs[1], pairs[0], pairs[2]
    call(frozen, "cancel", job_ids=[held])
    said = report(meeting, verb, worker, pairs)
    assert said == {held: "busy", **{job: "done" for job, _ in others}}
    assert meeting.state(held) == "running"
    assert meeting.violations() == []
    getattr(frozen, end)()
    assert report(meeting, verb, worker, pairs) == {held: "done", **{job: "repeated" for job, _ in others}}
    assert meeting.violations() == []


@pytest.mark.parametrize("verb", WAYS)
def test_a_report_of_nothing_but_held_jobs_changes_nothing_and_claims(meeting, frozen, worker, verb):
    pair = meeting.running(worker)
    call(frozen, "cancel", job_ids=[pair[0]])
    next_one = meeting.job()
    said = report(meeting, verb, worker, [pair])
    assert said == {pair[0]: "busy", **({next_one: "claimed"} if verb == "complete_and_claim" else {})}
    frozen.rollback()
    assert meeting.state(pair[0]) == "running"


@pytest.mark.parametrize("verb", WAYS)
def test_one_held_member_makes_its_gang_busy_and_nobody_else(meeting, frozen, worker, verb):
    single = meeting.running(worker)
    gang, members, tokens = meeting.running_gang([worker, worker])
    free_gang, free_members, free_tokens = meeting.running_gang([meeting.worker("w2")])
    frozen.execute("select 1 from gangq.live_jobs where id = %s for update", (members[1],))
    pairs = [single, (members[0], tokens[0]), (free_members[0], free_tokens[0])]
    said = report(meeting, verb, worker, pairs)
    assert said == {single[0]: "done", members[0]: "busy", free_members[0]: "done"}
    frozen.rollback()
    assert report(meeting, verb, worker, pairs[1:2]) == {members[0]: "done"}
    assert [meeting.gang_row(g)["state"] for g in (gang, free_gang)] == ["running", "done"]
    assert meeting.violations() == []


def test_a_stale_pair_and_an_unknown_job_beside_a_held_one_are_stale(meeting, frozen, worker):
    held, other = meeting.running(worker), meeting.running(worker)
    call(frozen, "cancel", job_ids=[held[0]])
    pairs = [held, (other[0], other[1] + 1), (987654321, 1)]
    assert report(meeting, "complete", worker, pairs) == {
        held[0]: "busy",
        other[0]: "stale",
        987654321: "stale",
    }


def test_whoever_wants_all_or_nothing_waits(meeting, frozen, worker):
    job, token = meeting.running(worker)
    call(frozen, "cancel", job_ids=[job])
    later = meeting.connect()
    later.execute("set statement_timeout = '500ms'")
    with pytest.raises(Exception, match="statement timeout"):
        call(later, "complete", job_ids=[job], tokens=[token])

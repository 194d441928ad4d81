"""cancel, retry and set_priority of many: bounded, waiting for nobody, and to the end by calls of their own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gangq.client import AsyncClient, Client
from gangq.errors import Busy, NotFound
from interleaving.sessions import Arena, call

BOUND = 500


def many(meeting: Arena, count: int, **more) -> list[int]:
    rows = meeting.db.execute(
        "select * from gangq.submit('t', payloads => array_fill('{}'::jsonb, array[%s]))", (count,)
    ).fetchall()
    return [row["submit"] for row in rows]


def ended(meeting: Arena, count: int) -> list[int]:
    jobs = many(meeting, count)
    left = jobs
    while left:
        left = [row["job_id"] for row in call(meeting.db, "cancel", job_ids=left) if row["state"] == "left"]
    return jobs


VERBS = {
    "cancel": (many, {}, "cancelled"),
    "set_priority": (many, {"priority": 5}, "pending"),
    "retry": (ended, {}, "pending"),
}
verbs = pytest.mark.parametrize("verb", VERBS)


@verbs
def test_one_call_for_many_locks_some_hundreds_and_says_which_are_left(meeting, verb):
    prepare, more, then = VERBS[verb]
    jobs = prepare(meeting, BOUND + 100)
    frozen = meeting.connect(autocommit=False)
    rows = call(frozen, verb, job_ids=jobs, **more)
    assert sorted(row["job_id"] for row in rows) == jobs
    assert [row["state"] for row in rows].count(then) == BOUND
    left = [row["job_id"] for row in rows if row["state"] == "left"]
    # Nobody is kept from those, and nobody waits for the others.
    others = meeting.connect(statement_timeout="1000")
    assert {row["state"] for row in call(others, verb, job_ids=jobs[:BOUND], **more)} == {"left"}
    assert {row["state"] for row in call(others, verb, job_ids=left, **more)} == {then}
    frozen.rollback()
    assert meeting.violations() == []


@verbs
def test_what_another_transaction_holds_is_left_and_the_rest_is_done(meeting, verb):
    prepare, more, then = VERBS[verb]
    jobs = prepare(meeting, 5)
    frozen = meeting.connect(autocommit=False)
    call(frozen, verb, job_ids=[jobs[2]], **more)
    rows = call(meeting.connect(statement_timeout="1000"), verb, job_ids=jobs, **more)
    assert {row["job_id"]: row["state"] for row in rows} == {
        job: "left" if job == jobs[2] else then for job in jobs
    }


@pytest.mark.parametrize("verb", ["cancel", "set_priority"])
def test_a_gang_that_another_transaction_holds_in_part_is_left_whole_and_unlocked(meeting, verb):
    (held, members), (free, _) = meeting.gang(3), meeting.gang(2)
    frozen = meeting.connect(autocommit=False)
    frozen.execute("select from gangq.live_jobs where id = %s for key share", (members[2],))
    second = meeting.connect(autocommit=False)
    rows = call(second, verb, gang_ids=[held, free], **VERBS[verb][1])
    assert {row["state"] for row in rows if row["gang_id"] == held} == {"left"}
    assert {row["state"] for row in rows if row["gang_id"] == free} <= {"cancelled", "blocked"}
    # Also of the members that it had got.
    meeting.connect(statement_timeout="1000").execute(
        "select from gangq.live_jobs where id = %s for update nowait", (members[0],)
    )


def test_one_gang_is_always_done_as_a_whole_however_large_it_is(meeting):
    gang_id, members = meeting.gang(BOUND + 10, wait_for_hardware=True)
    other, _ = meeting.gang(1)
    rows = call(meeting.db, "set_priority", gang_ids=[gang_id, other], priority=3)
    assert [row["state"] for row in rows].count("blocked") == len(members)
    assert [(row["gang_id"], row["state"]) for row in rows if row["state"] == "left"] == [(other, "left")]


@pytest.mark.parametrize("wrong", [999_999_999, None])
def test_many_with_one_that_is_wrong_change_nothing(meeting, wrong):
    jobs = many(meeting, BOUND + 10)
    for verb in ("cancel", "set_priority"):
        with pytest.raises(Exception, match="job") as caught:
            call(meeting.db, verb, job_ids=[*jobs, wrong], **VERBS[verb][1])
        assert caught.value.sqlstate == "GQ002"
    found = meeting.db.execute("select distinct state, priority from gangq.jobs").fetchall()
    assert found == [{"state": "pending", "priority": 0}]


@verbs
def test_the_client_comes_again_until_none_is_left(meeting, verb):
    prepare, more, then = VERBS[verb]
    jobs = prepare(meeting, 2 * BOUND + 50)
    frozen = meeting.connect(autocommit=False)
    call(frozen, verb, job_ids=jobs[10:12], **more)
    threading.Timer(0.3, frozen.rollback).start()
    with Client(meeting.dsn) as client:
        found = getattr(client, verb)(job_ids=jobs, **more)
    assert sorted(row.job_id for row in found) == jobs
    assert {row.state for row in found} == {then}


def test_the_async_client_comes_again_until_none_is_left(meeting):
    jobs = many(meeting, BOUND + 50)

    async def cancel():
        async with AsyncClient(meeting.dsn) as client:
            return await client.cancel(job_ids=jobs)

    assert {row.state for row in asyncio.run(cancel())} == {"cancelled"}


def test_the_client_gives_up_on_what_stays_held_and_says_how_much(meeting):
    jobs = many(meeting, 10)
    frozen = meeting.connect(autocommit=False)
    call(frozen, "set_priority", job_ids=jobs[:3], priority=1)
    with Client(meeting.dsn) as client, pytest.raises(Busy, match="3 of 10"):
        client.cancel(job_ids=jobs)
    assert {meeting.state(job) for job in jobs[3:]} == {"cancelled"}


def test_the_client_refuses_what_does_not_exist_before_anything_changes(meeting):
    jobs = many(meeting, BOUND + 10)
    with Client(meeting.dsn) as client, pytest.raises(NotFound):
        client.cancel(job_ids=[*jobs, 999_999_999])
    assert meeting.state(jobs[0]) == "pending"

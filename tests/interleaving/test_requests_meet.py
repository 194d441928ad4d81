"""Two submissions with one request_id: the second waits for the first, and then repeats its answer or submits."""

from __future__ import annotations

import uuid

import pytest

from interleaving.sessions import Arena, Later, both_ends, call

KINDS = pytest.mark.parametrize(
    ("verb", "options"), [("submit", {}), ("submit_gang", {"size": 2})], ids=["job", "gang"]
)


def jobs(meeting: Arena) -> int:
    return len(meeting.db.execute("select from gangq.live_jobs").fetchall())


@both_ends
@KINDS
@pytest.mark.parametrize("known", [False, True], ids=["new requirement", "known requirement"])
def test_the_second_waits_for_the_first(
    meeting: Arena, verb: str, options: dict[str, int], end: str, known: bool
) -> None:
    before = len(call(meeting.db, verb, task="t", **options)) and jobs(meeting) if known else 0
    named = {"task": "t", "request_id": uuid.uuid4(), **options}
    met = meeting.meet(lambda conn: call(conn, verb, **named), lambda conn: call(conn, verb, **named), end)
    assert met.later.waited
    assert (met.later.result() == met.first) == (end == "commit")
    assert jobs(meeting) - before == options.get("size", 1)


def test_children_of_one_job_meet_as_well(meeting: Arena) -> None:
    job, token = meeting.running(meeting.worker("w1"))
    named = {"parent": job, "parent_token": token, "task": "t", "request_id": uuid.uuid4()}
    met = meeting.meet(lambda conn: call(conn, "submit", **named), lambda conn: call(conn, "submit", **named))
    assert met.later.waited
    assert met.later.result() == met.first


@KINDS
def test_a_first_call_that_stays_open_is_waited_for_two_seconds(
    meeting: Arena, verb: str, options: dict[str, int]
) -> None:
    named = {"task": "t", "request_id": uuid.uuid4(), **options}
    first = meeting.connect(autocommit=False)
    call(first, verb, **named)
    later = Later(meeting.connect(), lambda conn: call(conn, verb, **named)).start(meeting.db).join()
    assert later.sqlstate == "55P03"
    assert 1.5 < later.seconds < 10
    first.rollback()
    assert jobs(meeting) == 0


@KINDS
@pytest.mark.parametrize("prepared", [False, True], ids=["new plans", "plans of before"])
def test_a_call_that_waits_behind_the_turn_finds_what_was_moved_by_it(
    meeting: Arena, verb: str, options: dict[str, int], prepared: bool
) -> None:
    named = {"task": "t", "request_id": uuid.uuid4(), **options}
    meeting.tick()
    meeting.clock.advance(3700)
    first, turn, second = (
        meeting.connect(autocommit=False),
        meeting.connect(autocommit=False),
        meeting.connect(),
    )
    if prepared:
        for _ in range(7):
            call(second, verb, **named | {"request_id": uuid.uuid4()})
    before = jobs(meeting)
    answer = call(first, verb, **named)

    def turned(conn):
        # As the tick does it, which would not wait for so long.
        conn.execute("lock table gangq.requests, gangq.requests_before in access exclusive mode")
        call(conn, "turn_requests", t=meeting.clock.now())
        conn.commit()

    turning = Later(turn, turned).start(meeting.db)
    assert turning.waited
    later = Later(second, lambda conn: call(conn, verb, **named)).start(meeting.db)
    assert later.waited
    first.commit()
    turning.join()
    assert turning.error is None
    assert later.join().result() == answer
    assert jobs(meeting) - before == options.get("size", 1)
    kept = "select from gangq.requests_before where request_id = %s"
    assert len(meeting.db.execute(kept, [named["request_id"]]).fetchall()) == 1


@both_ends
@pytest.mark.parametrize(
    ("verb", "options"), [("submit_unique", {}), ("submit_unique_gang", {"size": 2})], ids=["job", "gang"]
)
@pytest.mark.parametrize("known", [False, True], ids=["new key", "key that was used before"])
def test_of_two_submissions_with_one_unique_key_one_submits(
    meeting: Arena, verb: str, options: dict[str, int], end: str, known: bool
) -> None:
    named = {"unique_key": "k", "task": "t", **options}
    if known:
        used = call(meeting.db, verb, **named)[0]
        call(meeting.db, "cancel", job_ids=[used["job_id"]]) if "job_id" in used else call(
            meeting.db, "cancel", gang_ids=[used["gang_id"]]
        )
    before = jobs(meeting)
    met = meeting.meet(lambda conn: call(conn, verb, **named), lambda conn: call(conn, verb, **named), end)
    assert met.later.waited
    assert met.later.result()[0]["existed"] == (end == "commit")
    assert jobs(meeting) - before == options.get("size", 1)


def test_a_replacement_and_a_claim_meet_and_the_job_runs_with_one_of_the_payloads(meeting: Arena) -> None:
    worker = meeting.worker("w1")
    named = {"unique_key": "k", "task": "t"}
    call(meeting.db, "submit_unique", **named, payload={"n": 1})

    def replace(conn):
        return call(conn, "submit_unique", **named, payload={"n": 2}, replaces=True)

    met = meeting.meet(replace, lambda conn: call(conn, "claim", incarnation=worker, max_jobs=1))
    assert met.first[0]["replaced"]
    # The claim does not wait for a job that somebody holds: it leaves it.
    assert met.later.result() == []
    assert [row["payload"] for row in call(meeting.db, "claim", incarnation=worker, max_jobs=1)] == [{"n": 2}]

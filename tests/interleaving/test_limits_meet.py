"""Limits of queues when several place work at once: no committed state is above one, and nobody stalls for it."""

from __future__ import annotations

import threading
import time

import pytest

from interleaving.sessions import (
    Arena,
    Later,
    Verb,
    both_ends,
    call,
    claim_all,
    first_of_two,
    meet,
    placed,
    value,
    verb,
)
from sql.drive import place

pytestmark = pytest.mark.slow

LIMITS = {
    "maximum": {"maximum": {"jobs": 1}},
    "running jobs": {"max_running_jobs": 1},
    "submitter": {"submitter_maximum": {"jobs": 1}},
}


def opens(incarnation: int, job: int) -> Verb:
    return verb("open_place", incarnation=incarnation, job_id=job)


@both_ends
@pytest.mark.parametrize("limit", LIMITS)
def test_of_two_places_at_once_the_second_counts_what_the_first_has_taken(meeting: Arena, limit, end):
    call(meeting.db, "set_queue", name="default", **LIMITS[limit])
    one, two = meeting.worker("w1"), meeting.worker("w2")
    met = meeting.meet(opens(one, meeting.job()), opens(two, meeting.job()), end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert placed(meeting.db) == 1
    assert len(meeting.claim(one)) + len(meeting.claim(two)) == 1
    assert placed(meeting.db) == 1


@both_ends
def test_two_places_in_sibling_queues_meet_at_the_limit_of_their_parent(meeting: Arena, end):
    call(meeting.db, "set_queue", name="a", maximum={"jobs": 1})
    both = []
    for name in ("x", "y"):
        call(meeting.db, "set_queue", name=f"a.{name}")
        both.append(opens(meeting.worker(name, queues=[f"a.{name}"]), meeting.job(queue=f"a.{name}")))
    met = meeting.meet(*both, end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert placed(meeting.db) == 1


def test_a_place_that_is_being_opened_keeps_its_queue_from_others_and_no_other_queue(meeting: Arena):
    call(meeting.db, "set_queue", name="limited", maximum={"jobs": 9})
    one = meeting.worker("w1", queues=["limited"])
    two = meeting.worker("w2", queues=["limited", "default"], slots=4)
    first, *_ = [meeting.job(queue="limited") for _ in range(3)]
    free = meeting.job()
    holder = meeting.connect(autocommit=False)
    opens(one, first)(holder)
    # It waits for a tenth of a second at most: so short a wait may not be seen on a busy machine.
    passed = Later(meeting.connect(), place).start(meeting.db)
    later = Later(meeting.connect(), lambda c: call(c, "claim", incarnation=two, max_jobs=4))
    later.start(meeting.db).join()
    assert [row["job_id"] for row in later.result()] == [free]
    assert later.seconds < 1.5
    passed.join()
    holder.commit()
    assert len(meeting.claim(two, max_jobs=4)) == 2


def test_two_claims_from_queues_without_limits_do_not_wait_for_each_other(meeting: Arena):
    call(meeting.db, "set_queue", name="elsewhere", maximum={"jobs": 1})
    one, two = meeting.worker("w1"), meeting.worker("w2")
    meeting.job()
    second = meeting.job()
    met = meeting.meet(
        lambda c: call(c, "claim", incarnation=one), lambda c: call(c, "claim", incarnation=two)
    )
    assert not met.later.waited
    assert [row["job_id"] for row in met.later.result()] == [second]


@first_of_two
@both_ends
def test_a_limit_that_is_lowered_meets_a_place(meeting: Arena, turn, end):
    call(meeting.db, "set_queue", name="default", maximum={"jobs": 5})
    worker = meeting.worker("w1", slots=5)
    jobs = [meeting.job() for _ in range(3)]
    for job in jobs[:2]:
        opens(worker, job)(meeting.db)
    lower: Verb = lambda c: value(c, "set_queue", name="default", maximum={"jobs": 2})  # noqa: E731
    met, _, _ = meet(meeting, opens(worker, jobs[2]), lower, turn, end)
    assert met.later.waited
    opened = end == "commit" if turn == 0 else end == "rollback"
    assert met.later.sqlstate == ("GQ004" if turn == 1 and end == "commit" else None)
    assert placed(meeting.db) == 2 + opened
    if turn == 0 or end == "commit":
        # What was opened before and is too much by now is filled by nobody.
        assert len(meeting.claim(worker, max_jobs=5)) == 2
        assert placed(meeting.db) == 2


def test_a_pass_waits_a_moment_for_a_limited_queue_and_leaves_its_gangs_for_the_next(meeting: Arena):
    """Where many workers claim, one of them always holds the row; and whoever sits on it must not stop the pass."""
    call(meeting.db, "set_queue", name="a", maximum={"jobs": 9})
    one, _, _ = (meeting.worker(f"w{n}", queues=[queue]) for n, queue in enumerate(("a", "a", "default")))
    job = meeting.job(queue="a")
    limited, free = (
        call(meeting.db, "submit_gang", task="t", size=1, queue=q)[0]["gang_id"] for q in ("a", "default")
    )
    holder = meeting.connect(autocommit=False)
    opens(one, job)(holder)
    began = time.monotonic()
    passed = place(meeting.db)
    assert time.monotonic() - began < 2
    assert (passed["placed"], passed["again"]) == (1, True)
    states = {row["id"]: row["state"] for row in meeting.db.execute("select id, state from gangq.live_gangs")}
    assert states == {limited: "blocked", free: "reserved"}
    later = Later(meeting.connect(), lambda conn: place(conn)).start(meeting.db)
    assert later.waited
    holder.commit()
    # It has the lock, and the limit has room for what it decided beside the place that was opened meanwhile.
    assert later.join().result() == {"placed": 1, "again": False}
    assert meeting.gang_row(limited)["state"] == "reserved"


def test_8_claimers_are_never_seen_above_a_limit_and_finish_all_the_work(meeting: Arena):
    call(meeting.db, "set_queue", name="a", maximum={"jobs": 3})
    for name in ("a.x", "a.y"):
        call(meeting.db, "set_queue", name=name, submitter_maximum={"jobs": 2})
    incarnations = [meeting.worker(f"w{n}", queues=["a.x", "a.y"], slots=4) for n in range(8)]
    jobs = {meeting.job(queue=("a.x", "a.y")[n % 2]) for n in range(60)}
    assert claim_all(meeting, incarnations, jobs) <= 3
    assert meeting.violations() == []


@both_ends
def test_of_two_places_of_one_limit_key_the_second_counts_what_the_first_has_taken(meeting: Arena, end):
    call(meeting.db, "set_queue", name="other")
    jobs = [meeting.job(queue=queue, limit_key="licence", limit=1) for queue in ("default", "other")]
    workers = [meeting.worker("w1"), meeting.worker("w2", queues=["other"])]
    met = meeting.meet(opens(workers[0], jobs[0]), opens(workers[1], jobs[1]), end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert placed(meeting.db) == 1


def test_a_pass_leaves_a_limit_key_that_another_session_counts_to_the_next_pass(meeting: Arena):
    call(meeting.db, "set_queue", name="other")
    one, two = meeting.worker("w1"), meeting.worker("w2", queues=["other"], slots=2)
    first = meeting.job(limit_key="licence", limit=2)
    same, free = meeting.job(queue="other", limit_key="licence"), meeting.job(queue="other", model="m")
    holder = meeting.connect(autocommit=False)
    opens(one, first)(holder)
    passed = Later(meeting.connect(), place).start(meeting.db)
    passed.join()
    assert [row["job_id"] for row in meeting.claim(two, max_jobs=2)] == [free]
    holder.commit()
    assert [row["job_id"] for row in meeting.claim(one, max_jobs=2)] == [first]
    place(meeting.db)
    assert [row["job_id"] for row in meeting.claim(two, max_jobs=2)] == [same]


@first_of_two
@both_ends
def test_two_that_name_a_limit_key_first_agree_or_one_is_refused(meeting: Arena, turn, end):
    submits = [verb("submit", task="t", options={"limit_key": "licence", "limit": n}) for n in (1, 2)]
    met = meeting.meet(submits[turn], submits[1 - turn], end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ001" if end == "commit" else None)
    assert value(meeting.db, "submit", task="t", options={"limit_key": "licence"}) > 0


@both_ends
@pytest.mark.parametrize("of", ["limit key", "queue"])
def test_of_two_places_of_one_rate_the_second_counts_the_start_of_the_first(meeting: Arena, of, end):
    options = {"limit_key": "api", "rate": "1/1h"} if of == "limit key" else {}
    if not options:
        call(meeting.db, "set_queue", name="default", rate="1/1h")
    jobs = [meeting.job(**options) for _ in range(2)]
    workers = [meeting.worker(f"w{n}") for n in range(2)]
    met = meeting.meet(opens(workers[0], jobs[0]), opens(workers[1], jobs[1]), end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert placed(meeting.db) == 1


def test_8_claimers_never_start_more_than_a_rate_allows(meeting: Arena):
    incarnations = [meeting.worker(f"w{n}", slots=4) for n in range(8)]
    for _ in range(40):
        meeting.job(limit_key="api", rate="5/1h")
    started: list[int] = []
    together = threading.Barrier(8)

    def work(incarnation: int) -> None:
        conn = meeting.connect()
        together.wait(10)
        for _ in range(5):
            place(conn)
            rows = call(conn, "claim", incarnation=incarnation, max_jobs=4)
            started.extend(row["job_id"] for row in rows)
            if rows:
                tokens = [row["token"] for row in rows]
                call(conn, "complete", job_ids=[row["job_id"] for row in rows], tokens=tokens)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in incarnations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    place(meeting.db)
    started += [
        row["job_id"] for i in incarnations for row in call(meeting.db, "claim", incarnation=i, max_jobs=4)
    ]
    assert len(started) == 5
    assert meeting.violations() == []

"""Limit keys: of the jobs that name one, in whatever queue, never more than so many are placed."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, MISSING, WRONG_STATE, Q, a_role, gpus, refused

LICENCE = {"limit_key": "licence", "limit": 2}


def used(q: Q, key: str = "licence") -> int:
    return int(q.value("select used from gangq.limits where name = %(key)s", key=key))


def test_the_limit_holds_across_queues_and_needs_and_the_next_starts_when_one_ends(q: Q) -> None:
    q.call("set_queue", name="other")
    workers = [
        q.worker(f"w{n}", queues=["default", "other"], slots=4, devices=gpus(1, prefix=f"D{n}-"))
        for n in "ab"
    ]
    jobs = [q.submit(**LICENCE), q.submit(queue="other", limit_key="licence"), q.submit(gpus=1, **LICENCE)]
    free = q.submit(cpus=0)
    first = [c for w in workers for c in w.claim()]
    assert {c.job_id for c in first} == {*jobs[:2], free}
    assert used(q) == 2
    assert "limit key licence" in q.value("select why from gangq.waiting where kind <> 'gang'")
    next(c for c in first if c.job_id == jobs[0]).complete()
    assert [c.job_id for w in workers for c in w.claim()] == [jobs[2]]
    assert used(q) == 2


def test_a_job_with_a_key_is_placed_and_never_light(q: Q) -> None:
    q.worker(slots=0, light=4)
    job = q.submit(**LICENCE, wait_for_hardware=True)
    q.tick()
    assert q.state(job) == "pending"
    assert q.value("select gangq.is_placed(s, '{}') from gangq.shapes s where limit_key = 'licence'") is True


def test_members_of_a_gang_count_each_and_one_above_the_limit_is_refused(q: Q) -> None:
    worker = q.worker(slots=8)
    gang, single = q.submit_gang(2, **LICENCE), q.submit(limit_key="licence")
    q.place()
    assert (gang.state, q.state(single)) == ("reserved", "pending")
    assert "limit key licence" in str(q.call("explain_job", job_id=single))
    second = q.submit_gang(2, limit_key="licence")
    with refused(
        WRONG_STATE, "limits of limit key licence: 2 jobs are used, 2 more would be, and 2 is the limit"
    ):
        q.call("reserve_gang", gang_id=second.id, incarnations=[worker.incarnation] * 2)
    with refused(INVALID, "3 jobs at once, and the limit of limit key licence is 2"):
        q.submit_gang(3, limit_key="licence")
    assert q.submit_gang(3, min_size=2, limit_key="licence").state == "blocked"


def test_places_opened_by_hand_stop_at_the_limit(q: Q) -> None:
    worker = q.worker(slots=4)
    jobs = [q.submit(**LICENCE) for _ in range(3)]
    for job in jobs[:2]:
        q.call("open_place", incarnation=worker.incarnation, job_id=job)
    with refused(WRONG_STATE, "limit key licence uses 2 jobs of at most 2"):
        q.call("open_place", incarnation=worker.incarnation, job_id=jobs[2])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"limit_key": "licence", "limit": 3}, INVALID, "the limit of limit key 'licence' is 2, and not 3"),
        ({"limit_key": "seat"}, MISSING, "limit key 'seat' does not exist"),
        ({"limit": 2}, INVALID, "no limit_key says of what"),
        ({"limit_key": "", "limit": 2}, INVALID, "limit_key"),
        ({"limit_key": "seat", "limit": -1}, INVALID, "limit"),
    ],
)
@pytest.mark.parametrize("gang", [False, True])
def test_what_makes_no_sense_is_refused_and_named(
    q: Q, options: dict[str, Any], code: str, said: str, gang: bool
) -> None:
    q.submit(**LICENCE)
    with refused(code, said):
        if gang:
            q.submit_gang(1, **options)
        else:
            q.submit(**options)
    assert [row["name"] for row in q.sql("select name from gangq.limits")] == ["licence"]


def test_an_administrators_limit_holds_whatever_submissions_say(q: Q) -> None:
    worker = q.worker(slots=8)
    q.submit(**LICENCE)
    q.call("set_limit", key="licence", most=3)
    for _ in range(4):
        q.submit(**LICENCE)
    assert len(worker.claim()) == 3
    assert q.sql("select most, used, pinned from gangq.limits") == [{"most": 3, "used": 3, "pinned": True}]
    q.call("set_limit", key="early", most=0)
    q.submit(limit_key="early")
    q.tick()
    assert used(q, "early") == 0


def test_a_limit_that_is_lowered_stops_nothing_and_no_place_is_filled_again(q: Q) -> None:
    worker = q.worker(slots=2)
    for _ in range(4):
        q.submit(**LICENCE)
    claims = worker.claim()
    assert len(claims) == 2
    q.call("set_limit", key="licence", most=1)
    claims[0].complete()
    # Before any pass: its place is vacant, and the next of its kind would fill it.
    assert q.call("claim", incarnation=worker.incarnation, max_jobs=10) == []
    assert worker.claim() == []
    claims[1].complete()
    assert len(worker.claim()) == 1


def test_a_task_that_declares_a_key_has_it_wherever_it_is_submitted_from(q: Q) -> None:
    worker = q.worker(slots=4, task_options={"render": {"limit_key": "licence", "limit": 1}})
    for _ in range(3):
        q.submit("render")
    gang = q.submit_gang(1, task="render")
    q.submit("render", limit_key="other", limit=1)
    assert len(worker.claim()) == 2
    assert (used(q), used(q, "other"), gang.state) == (1, 1, "blocked")


def test_only_an_administrator_sets_a_limit(q: Q) -> None:
    q.sql(f"set role {a_role(q.db, 'submits_test', 'gangq_submitter')}")
    try:
        q.submit(**LICENCE)
        with refused("42501"):
            q.call("set_limit", key="licence", most=9)
    finally:
        q.sql("reset role")

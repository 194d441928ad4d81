"""Batches: what one submission has submitted under a name, how far it is, and its limit."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, MISSING, NOT_ALLOWED, Claim, Q, Worker, a_role, gpus, refused

ARRAY = {"name": "sweep", "tags": ["lr", "a"]}


def batches(q: Q, columns: str = "*") -> list[dict[str, Any]]:
    return q.sql(f"select {columns} from gangq.batches order by id")


def counts(q: Q) -> dict[str, int]:
    (row,) = batches(q, "waiting, running, done, failed, cancelled")
    return {state: n for state, n in row.items() if n}


def claims(worker: Worker, n: int = 100) -> list[Claim]:
    return sorted(worker.claim(n), key=lambda claim: claim.job_id)


def test_a_submission_with_a_name_is_a_batch_and_tells_each_job_its_place(q: Q) -> None:
    jobs = q.submit(count=3, **ARRAY)
    alone = q.submit()
    (batch,) = batches(q)
    assert {key: batch[key] for key in ("name", "tags", "queue", "task", "state", "size", "at_most")} == {
        "name": "sweep",
        "tags": ["a", "lr"],
        "queue": "default",
        "task": "work",
        "state": "waiting",
        "size": 3,
        "at_most": None,
    }
    assert [(q.job(job)["batch_id"], q.job(job)["array_index"]) for job in jobs] == [
        (jobs[0], n) for n in range(3)
    ]
    assert batch["id"] == jobs[0]
    assert (q.job(alone)["batch_id"], q.job(alone)["array_index"]) == (None, None)
    assert [claim.row["array_index"] for claim in claims(q.worker(light=4))] == [0, 1, 2, None]


def test_its_jobs_have_the_indexes_that_are_given(q: Q) -> None:
    jobs = q.submit(count=3, **ARRAY, indexes=[7, 0, 5])
    assert [q.job(job)["array_index"] for job in jobs] == [7, 0, 5]
    (claim, *_) = claims(q.worker(light=4))
    assert claim.row["array_index"] == 7
    claim.complete()
    assert q.job(jobs[0])["array_index"] == 7


def test_how_far_it_is_is_counted_by_the_latest_ending_of_each_job(q: Q) -> None:
    worker = q.worker(light=2)
    jobs = q.submit(count=4, **ARRAY, max_attempts=1)
    assert counts(q) == {"waiting": 4}
    first, second = claims(worker)
    assert (counts(q), batches(q)[0]["state"]) == ({"waiting": 2, "running": 2}, "running")
    first.complete()
    second.fail()
    assert counts(q) == {"waiting": 2, "done": 1, "failed": 1}
    q.call("cancel", job_ids=[jobs[2]])
    claims(worker)[0].complete()
    assert (counts(q), batches(q)[0]["state"]) == ({"done": 2, "failed": 1, "cancelled": 1}, "failed")
    q.later(1)
    q.call("retry", job_ids=[jobs[1]])
    assert (counts(q), batches(q)[0]["state"]) == ({"waiting": 1, "done": 2, "cancelled": 1}, "running")
    (again,) = claims(worker)
    assert again.row["array_index"] == 1
    again.complete()
    assert (counts(q), batches(q)[0]["state"]) == ({"done": 3, "cancelled": 1}, "cancelled")


def test_the_end_of_the_last_job_is_told_once_and_once_more_after_a_retry(q: Q) -> None:
    q.call("add_notification", target="t", kinds=["batch_done"], task="work")
    q.call("add_notification", target="other", kinds=["batch_done"], task="other")
    worker = q.worker(light=2)
    jobs = q.submit(count=2, **ARRAY, max_attempts=1)
    first, second = claims(worker)
    first.complete()
    q.tick()
    assert q.sql("select * from gangq.outbox") == []
    second.fail()
    q.settle(2)
    (told,) = q.sql("select kind, body from gangq.outbox")
    assert told["kind"] == "batch_done"
    assert told["body"]["batch_id"] == batches(q)[0]["id"]
    assert told["body"]["reason"] == "1 of 2 done, 1 failed, 0 cancelled"
    assert told["body"]["data"] == {
        "name": "sweep",
        "tags": ["a", "lr"],
        "size": 2,
        "done": 1,
        "failed": 1,
        "cancelled": 0,
    }
    assert batches(q)[0]["finished_at"] is not None
    q.later(1)
    q.call("retry", job_ids=[jobs[1]])
    assert batches(q)[0]["finished_at"] is None
    claims(worker)[0].complete()
    q.settle(2)
    assert [row["reason"] for row in q.sql("select body ->> 'reason' as reason from gangq.outbox")] == [
        "1 of 2 done, 1 failed, 0 cancelled",
        "2 of 2 done, 0 failed, 0 cancelled",
    ]


def test_at_most_so_many_of_its_jobs_are_placed_and_those_of_another_batch_are_not_counted(q: Q) -> None:
    worker = q.worker(slots=8, devices=gpus(*[1] * 8))
    first = q.submit(count=4, **ARRAY, at_most=2)
    second = q.submit(count=2, **ARRAY, at_most=2, gpus=1)
    held = claims(worker)
    assert [claim.job_id for claim in held] == [*first[:2], *second]
    assert [row["at_most"] for row in batches(q)] == [2, 2]
    held[0].complete()
    assert [claim.job_id for claim in claims(worker)] == [first[2]]
    assert "limit key batch b" in str(q.call("explain_job", job_id=first[3]))
    assert q.sql("select * from gangq.limits") == []


def test_an_administrator_changes_at_most(q: Q) -> None:
    worker = q.worker(slots=8)
    q.submit(count=4, **ARRAY, at_most=1)
    assert len(claims(worker)) == 1
    q.call("set_limit", key=f"batch b{batches(q)[0]['id']}", most=3)
    assert len(claims(worker)) == 2
    assert batches(q)[0]["at_most"] == 3


def test_a_job_with_at_most_is_placed_and_one_without_stays_light(q: Q) -> None:
    q.worker(slots=0, light=4)
    placed = q.submit(**ARRAY, at_most=1, wait_for_hardware=True)
    light = q.submit(**ARRAY)
    q.tick()
    row = q.sql("select incarnation from gangq.workers")[0]
    assert [one["job_id"] for one in q.call("claim", incarnation=row["incarnation"], max_jobs=9)] == [light]
    assert q.state(placed) == "pending"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tags": ["x"]}, "tags are given without name"),
        ({"at_most": 2}, "at_most is given without name"),
        ({"name": ""}, "name"),
        ({"name": "x", "at_most": 0}, "at_most"),
        ({"indexes": [5]}, "indexes are given without name"),
        ({"name": "x", "indexes": []}, "indexes are not a number of its own for each job"),
        ({"name": "x", "indexes": [1, 2]}, "indexes are not a number of its own for each job"),
        ({"name": "x", "indexes": [-1]}, "indexes are not a number of its own for each job"),
        ({"name": "x", "indexes": [None]}, "indexes"),
        ({"name": "x", "tags": [""]}, "tag"),
        ({"name": "x", "tags": [None]}, "tag"),
        ({"name": "x", "tags": ["t" * 101]}, "tag"),
        ({"name": "x", "tags": [str(n) for n in range(21)]}, "tags are 21"),
        ({"name": "x", "at_most": 2, "limit_key": "k", "limit": 1}, "limit key 'k' limits these jobs"),
        ({"limit_key": "batch b1", "limit": 1}, "limit key 'batch b1' is that of a batch"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(q: Q, options: dict[str, Any], said: str) -> None:
    with refused(INVALID, said):
        q.submit(**options)
    assert batches(q) == []
    assert q.sql("select * from gangq.limit_keys") == []


def test_a_repeated_submission_makes_no_second_batch(q: Q) -> None:
    named = {**ARRAY, "at_most": 1, "request_id": "01890000-0000-7000-8000-000000000001"}
    assert q.submit(count=2, **named) == q.submit(count=2, **named)
    assert [row["size"] for row in batches(q)] == [2]


def test_what_waits_for_a_batch_waits_for_its_jobs(q: Q) -> None:
    worker = q.worker(light=2)
    jobs = q.submit(count=2, **ARRAY)
    last = q.submit(after=jobs)
    for claim in claims(worker):
        claim.complete(result={"n": claim.job_id})
    q.settle()
    (claim,) = claims(worker)
    assert claim.job_id == last
    found = q.call("inputs", job_id=last, token=claim.token)
    assert [row["result"] for row in found] == [{"n": job} for job in jobs]


def test_a_batch_is_forgotten_with_its_jobs_and_its_key_and_shapes_with_it(q: Q) -> None:
    worker = q.worker(slots=2, light=2)
    q.submit(count=1, **ARRAY)
    q.submit(count=1, name="limited", at_most=1)
    q.submit(count=1, name="kept", at_most=1)
    kept = q.sql("select max(id) as id from gangq.live_jobs")[0]["id"]
    for claim in claims(worker):
        if claim.job_id != kept:
            claim.complete()
    q.settle()
    for claim in claims(worker):
        claim.complete()
    q.settle()

    def later(days: float) -> list[str]:
        q.later(days * 86400)
        q.settle(2)
        q.call("keep_partitions", at_once=True)
        return [row["name"] for row in batches(q)]

    assert later(0) == ["sweep", "limited", "kept"]
    q.sql("update gangq.batches_table set finished_at = null, retention = null where name = 'kept'")
    q.sql("update gangq.history set retention = 'short'")
    assert later(9) == ["limited", "kept"]
    assert len(q.sql("select * from gangq.limit_keys")) == 2
    assert later(23) == ["kept"]
    assert [row["name"] for row in q.sql("select name from gangq.limit_keys")] == [
        f"batch b{batches(q)[0]['id']}"
    ]
    assert len(q.sql("select * from gangq.shapes where limit_key is not null")) == 1
    assert q.violations() == []


def test_the_key_of_a_repetition_that_lost_a_race_is_forgotten(q: Q) -> None:
    q.sql("insert into gangq.limit_keys (name, most, login, batch_id) values ('batch b99', 1, 'x', 99)")
    q.call("keep_partitions", at_once=True)
    assert len(q.sql("select * from gangq.limit_keys")) == 1
    q.later(2 * 86400)
    q.call("keep_partitions", at_once=True)
    assert q.sql("select * from gangq.limit_keys") == []


def test_a_board_shows_no_limits_of_batches_that_have_ended(q: Q) -> None:
    worker = q.worker(slots=1)
    q.submit(**ARRAY, at_most=1)
    assert q.value("select gangq.board() -> 'limits' as l") == {f"batch b{batches(q)[0]['id']}": 1}
    claims(worker)[0].complete()
    q.settle()
    assert q.value("select gangq.board() -> 'limits' as l") is None


def test_a_batch_left_open_or_ended_too_soon_is_a_violation(q: Q) -> None:
    q.submit(**ARRAY)
    claims(q.worker())[0].complete()
    q.tick()
    q.sql("update gangq.batches_table set finished_at = null, retention = null")
    assert q.violations() == []
    q.later(1200)
    q.sql("update gangq.tick_state set last_at = gangq.now()")
    assert [row["rule"] for row in q.violations()] == ["an open batch has a live job"]
    q.tick()
    assert q.violations() == []
    job = q.submit(**ARRAY)
    q.sql("update gangq.batches_table set finished_at = gangq.now(), retention = 'short'")
    assert [row["rule"] for row in q.violations()] == ["a batch that has ended has no live job"]
    q.call("cancel", job_ids=[job])


# retry_failed ---------------------------------------------------------------------------------------------------


def fail_all(q: Q, worker: Worker) -> None:
    for claim in claims(worker):
        claim.fail(retryable=False)


def test_failed_jobs_are_retried_by_what_is_asked_for_and_no_others(q: Q) -> None:
    q.call("set_queue", name="other")
    worker = q.worker(light=20, queues=["default", "other"])
    one = q.submit(count=2, **ARRAY)
    two = [q.submit(name="sweep", queue="other")]
    three = q.submit("render")
    gang = q.submit_gang(1, task="render")
    fail_all(q, worker)
    q.place()
    claims(worker)[0].fail(retryable=False)
    q.settle()
    assert gang.state == "failed"
    q.submit(**ARRAY)
    first = batches(q)[0]["id"]

    def would(**named: Any) -> list[int]:
        found = q.call("retry_failed", dry_run=True, **named)
        assert all((row["state"], row["gang_id"]) == ("failed", None) for row in found)
        return [row["job_id"] for row in found]

    assert would() == [*one, *two, three]
    assert would(name="sweep") == [*one, *two]
    assert would(tag="lr") == one
    assert would(name="sweep", queue="other") == two
    assert would(batch_id=first) == one
    assert would(task="render") == [three]
    assert would(submitter="nobody") == []
    assert would(name="none") == []
    assert would(after_id=one[0], most=2) == [one[1], *two]
    at = q.job(three)["finished_at"]
    assert three in would(since=at, until=at)
    assert would(until=q.value("select %(at)s::timestamptz - interval '1 hour'", at=at)) == []
    with refused(MISSING, "batch b999 does not exist"):
        would(batch_id=999)
    with refused(INVALID, "most is 501"):
        would(most=501)
    assert [(row["job_id"], row["state"]) for row in q.call("retry_failed", tag="lr")] == [
        (job, "pending") for job in one
    ]
    assert would() == [*two, three]
    assert q.call("retry_failed", tag="lr") == []


def test_only_what_the_caller_may_retry_is_retried(q: Q) -> None:
    q.call("set_queue", name="ours", others="shared")
    worker = q.worker(light=9, queues=["default", "ours"])
    q.submit(**ARRAY)
    shared = q.submit(**ARRAY, queue="ours")
    q.sql(f"set role {a_role(q.db, 'batches_test', 'gangq_submitter')}")
    try:
        mine = q.submit(**ARRAY)
        q.sql("reset role")
        fail_all(q, worker)
        q.sql("set role batches_test")
        found = q.call("retry_failed", name="sweep")
        assert {row["job_id"] for row in found} == {shared, mine}
        (payloads,) = q.sql("select count(payload) as n from gangq.jobs where batch_id is not null")
        assert payloads["n"] == 2
        with refused(NOT_ALLOWED):
            q.sql("select * from gangq.batches_table")
        assert len(batches(q)) == 3
    finally:
        q.sql("reset role")


def test_a_batch_of_which_some_were_cancelled_before_any_started_waits(q: Q) -> None:
    first, second = q.call("submit", task="t", payloads=[{}, {}], name="sweep")
    q.call("cancel", job_ids=[first["submit"]])
    assert q.value("select state from gangq.batches") == "waiting"
    q.worker().take().complete()
    assert q.value("select state from gangq.batches") == "cancelled"
    assert second["submit"] > first["submit"]

"""Submitting once: a key stands for what was submitted with it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from sql.drive import INVALID, WRONG_ISOLATION, Q, refused

HOUR = 3600


def submit(q: Q, key: str = "ds-7", task: str = "train", **options: Any) -> Any:
    return q.one("submit_unique", unique_key=key, task=task, **options)


def gang(q: Q, key: str = "ds-7", **options: Any) -> Any:
    return q.one("submit_unique_gang", unique_key=key, **{"task": "ddp", "size": 2, **options})


def live(q: Q) -> int:
    return int(q.value("select count(*) from gangq.live_jobs"))


def test_the_second_submission_gets_the_first_job_and_is_told_so(q: Q) -> None:
    first = submit(q)
    assert first == {"job_id": first["job_id"], "existed": False, "replaced": False}
    assert submit(q, payload={"n": 2}) == {"job_id": first["job_id"], "existed": True, "replaced": False}
    assert live(q) == 1
    assert q.value("select payload from gangq.live_jobs") == {}


def test_the_job_is_as_submit_makes_it(q: Q) -> None:
    q.sql("select gangq.set_queue('lab')")
    after = q.submit("first")
    submitted = submit(q, queue="lab", payload={"n": 1}, priority=7, gpus=2, after=[after], vram_mb=900)
    row = q.sql("select * from gangq.jobs where id = %(id)s", id=submitted["job_id"])[0]
    assert [row[name] for name in ("task", "queue", "priority", "gpus", "vram_mb", "state")] == [
        "train", "lab", 7, 2, 900, "waiting",
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["done", "cancelled"])
def test_a_key_is_free_again_when_its_job_has_ended(q: Q, state: str) -> None:
    first = submit(q)["job_id"]
    if state == "done":
        q.worker().take().complete()
    else:
        q.call("cancel", job_ids=[first])
    again = submit(q)
    assert not again["existed"]
    assert again["job_id"] != first


def test_a_key_that_is_kept_stands_for_its_job_for_so_long_also_when_it_has_ended(q: Q) -> None:
    first = submit(q, keep_s=HOUR)["job_id"]
    q.worker().take().complete()
    assert submit(q) == {"job_id": first, "existed": True, "replaced": False}
    q.clock.advance(HOUR + 1)
    assert not submit(q)["existed"]


def test_a_key_that_is_kept_stands_for_a_job_that_lives_longer(q: Q) -> None:
    first = submit(q, keep_s=60)["job_id"]
    q.clock.advance(120)
    assert submit(q)["job_id"] == first


@pytest.mark.parametrize(
    "other", [{"task": "eval"}, {"queue": "lab"}, {"key": "ds-8"}], ids=["task", "queue", "key"]
)
def test_a_key_is_one_tasks_in_one_queue(q: Q, other: dict[str, str]) -> None:
    q.sql("select gangq.set_queue('lab')")
    submit(q)
    assert not submit(q, **other)["existed"]


def test_the_queue_of_a_key_is_the_one_that_the_task_is_declared_with(q: Q) -> None:
    q.sql("select gangq.set_queue('lab')")
    q.worker(queues=["lab"], task_options={"train": {"queue": "lab"}})
    first = submit(q)
    assert submit(q, queue="lab") == {**first, "existed": True}


# Replacing


def test_a_job_that_waits_gets_the_new_payload_moment_and_priority(q: Q) -> None:
    first = submit(q, payload={"n": 1}, due_at="2100-01-01 00:00:00+00")["job_id"]
    assert submit(q, payload={"n": 2}, due_at="2100-01-02 00:00:00+00", priority=5, replaces=True) == {
        "job_id": first, "existed": True, "replaced": True,
    }  # fmt: skip
    row = q.sql("select payload, due_at::date::text as day, state, priority from gangq.live_jobs")[0]
    assert row == {"payload": {"n": 2}, "day": "2100-01-02", "state": "scheduled", "priority": 5}


def test_a_replaced_job_waits_for_its_new_moment_and_may_be_due_at_once(q: Q) -> None:
    submit(q)
    submit(q, due_at="2100-01-02 00:00:00+00", replaces=True)
    worker = q.worker()
    assert worker.claim(max_jobs=1) == []
    submit(q, payload={"n": 3}, replaces=True)
    assert worker.take().row["payload"] == {"n": 3}


def test_a_job_that_has_been_claimed_is_not_replaced(q: Q) -> None:
    first = submit(q, payload={"n": 1})["job_id"]
    claim = q.worker().take()
    assert submit(q, payload={"n": 2}, replaces=True) == {"job_id": first, "existed": True, "replaced": False}
    claim.requeue()
    assert not submit(q, payload={"n": 2}, replaces=True)["replaced"]
    assert q.value("select payload from gangq.live_jobs") == {"n": 1}


def test_a_replacement_is_refused_for_what_a_submission_is_refused_for(q: Q) -> None:
    q.sql("select gangq.set_queue('default', '{\"max_payload_bytes\": 1000}')")
    submit(q)
    for wrong in ({"payload": {"x": "y" * 2000}}, {"priority": 5000}, {"due_at": "infinity"}):
        with pytest.raises(Exception, match=r"payload|priority|due_at"):
            submit(q, replaces=True, **wrong)
    assert q.value("select payload from gangq.live_jobs") == {}


# Gangs


def test_a_gang_is_submitted_once(q: Q) -> None:
    first = gang(q)
    assert not first["existed"]
    again = gang(q, size=3)
    assert again == {**first, "note": None, "existed": True}
    assert live(q) == 2
    q.call("cancel", gang_ids=[first["gang_id"]])
    assert not gang(q)["existed"]


def test_the_queue_of_a_key_is_the_one_that_the_first_roles_task_is_declared_with(q: Q) -> None:
    q.sql("select gangq.set_queue('lab')")
    q.worker(queues=["lab"], slots=2, task_options={"ddp": {"queue": "lab"}})
    roles = [{"name": "all", "count": 2, "task": "ddp"}]
    first = gang(q, task=None, size=None, roles=roles)
    assert q.value("select queue from gangq.gangs") == "lab"
    assert gang(q, task=None, size=None, roles=roles, queue="lab") == {**first, "note": None, "existed": True}


def test_a_key_is_a_jobs_or_a_gangs(q: Q) -> None:
    submit(q, task="ddp")
    with refused(INVALID, "stands for job"):
        gang(q)


# Repeated calls, refusals, what is left


def test_a_call_that_is_repeated_with_its_request_id_did_submit(q: Q) -> None:
    request_id = uuid.uuid4()
    first = submit(q, request_id=request_id)
    assert submit(q, request_id=request_id) == first
    q.worker().take().complete()
    assert submit(q, request_id=request_id) == first
    assert submit(q, request_id=uuid.uuid4())["job_id"] != first["job_id"]


@pytest.mark.parametrize(
    "wrong",
    [{"unique_key": ""}, {"unique_key": None}, {"unique_key": "x" * 201}, {"keep_s": 0}, {"keep_s": "NaN"}],
)
def test_what_is_no_key_is_refused(q: Q, wrong: dict[str, Any]) -> None:
    with refused(INVALID):
        q.one("submit_unique", **{"unique_key": "k", "task": "t", **wrong})


@pytest.mark.parametrize(
    "wrong", [{"parent": "x"}, {"parent": 1.5, "parent_token": 1}, {"parent": 1, "parent_token": []}]
)
def test_options_that_cannot_be_read_are_refused_as_submit_refuses_them(q: Q, wrong: dict[str, Any]) -> None:
    with refused(INVALID, "parent"):
        submit(q, **wrong)
    with refused(INVALID, "parent"):
        gang(q, **wrong)
    with refused(INVALID, "request_id"):
        gang(q, options={"request_id": "x"})


def test_a_key_needs_read_committed(q: Q) -> None:
    with refused(WRONG_ISOLATION), q.db.transaction():
        q.sql("set transaction isolation level repeatable read")
        submit(q)


def test_a_refused_submission_leaves_no_key(q: Q) -> None:
    with refused(INVALID):
        submit(q, gpus=5000)
    assert q.sql("select * from gangq.unique_keys") == []


def test_keys_that_stand_for_nothing_are_forgotten(q: Q) -> None:
    submit(q, "live")
    submit(q, "kept", task="a", keep_s=HOUR)
    submit(q, "over", task="b")
    worker = q.worker(slots=3)
    claims = {claim.row["task"]: claim for claim in worker.claim(max_jobs=3)}
    for task in ("a", "b"):
        claims[task].complete()
    q.sql("select gangq.forget(gangq.now())")
    assert {row["key"] for row in q.sql("select key from gangq.unique_keys")} == {"live", "kept"}

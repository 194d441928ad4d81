"""Jobs that jobs submit: on whose behalf, and for how long they may."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, NOT_ALLOWED, STALE, Claim, Q, refused

VERBS = (
    ("submit", {}),
    ("submit_gang", {"size": 2}),
    ("submit_unique", {"unique_key": "k"}),
    ("submit_unique_gang", {"unique_key": "k", "size": 2}),
)
"""Every way to submit."""


@pytest.fixture
def parent(q: Q) -> Claim:
    """A running job that the role sue has submitted."""
    q.sql("do $$ begin create role sue; exception when duplicate_object then null; end $$")
    q.sql("grant gangq_submitter to sue")
    with q.db.transaction():
        q.sql("set local role sue")
        q.submit("fan")
    return q.worker(slots=4).take()


def submit_child(claim: Claim, task: str = "leaf", **options: Any) -> list[int]:
    rows = claim.q.call("submit", task=task, **for_job(claim), **options)
    return [row["submit"] for row in rows]


def for_job(claim: Claim) -> dict[str, int]:
    return {"parent": claim.job_id, "parent_token": claim.token}


def test_a_child_is_submitted_on_behalf_of_whoever_submitted_its_parent(q: Q, parent: Claim) -> None:
    ids = submit_child(parent, payloads=[{"n": 1}, {"n": 2}], priority=3)
    found = [q.job(i) for i in ids]
    assert [job["payload"] for job in found] == [{"n": 1}, {"n": 2}]
    assert {(job["submitter"], job["parent"], job["priority"]) for job in found} == {
        ("sue", parent.job_id, 3)
    }
    assert (q.job(parent.job_id)["submitter"], q.job(parent.job_id)["parent"]) == ("sue", None)


def test_a_gang_of_children_has_the_same_submitter_and_parent(q: Q, parent: Claim) -> None:
    made = q.one("submit_gang", **for_job(parent), task="ddp", size=2)
    gang = q.sql("select * from gangq.gangs where id = %(id)s", id=made["gang_id"])[0]
    assert gang["submitter"] == "sue"
    assert [q.job(i)["parent"] for i in made["job_ids"]] == [parent.job_id] * 2


def test_the_parent_is_kept_when_a_child_ends_and_when_it_is_retried(q: Q, parent: Claim) -> None:
    (child,) = submit_child(parent)
    q.call("cancel", job_ids=[child])
    assert (q.job(child)["state"], q.job(child)["parent"]) == ("cancelled", parent.job_id)
    q.call("retry", job_ids=[child])
    assert (q.job(child)["state"], q.job(child)["parent"]) == ("pending", parent.job_id)


def test_a_claim_that_is_over_submits_nothing(q: Q, parent: Claim) -> None:
    with refused(STALE):
        q.call("submit", task="leaf", parent=parent.job_id, parent_token=parent.token + 1)
    parent.complete()
    for verb, more in VERBS:
        with refused(STALE):
            q.call(verb, task="leaf", **for_job(parent), **more)
    assert q.value("select count(*) from gangq.live_jobs") == 0


def test_the_limits_of_the_parents_submitter_count(q: Q, parent: Claim) -> None:
    q.call("set_queue", name="narrow", submitter_maximum={"gpus": 1})
    with refused(INVALID, "submitter_maximum"):
        submit_child(parent, queue="narrow", gpus=2)
    (child,) = submit_child(parent, queue="narrow", gpus=1)
    assert (
        q.value(
            "select s.submitter from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.id = %(id)s",
            id=child,
        )
        == "sue"
    )


def test_what_a_job_submits_may_have_a_key_and_the_second_gets_the_first(q: Q, parent: Claim) -> None:
    named = {"unique_key": "ds-7", "task": "prepare", **for_job(parent)}
    first = q.one("submit_unique", **named)
    assert not first["existed"]
    assert q.one("submit_unique", **named) == {**first, "existed": True}
    job = q.job(first["job_id"])
    assert (job["submitter"], job["parent"]) == ("sue", parent.job_id)
    gang = q.one("submit_unique_gang", **{**named, "task": "ddp"}, size=2)
    assert q.one("submit_unique_gang", **{**named, "task": "ddp"}, size=2) == {**gang, "existed": True}


def test_keys_are_those_of_the_jobs_login_also_where_a_worker_submits(logins: dict[str, Q]) -> None:
    logins["s1"].submit("fan")
    claim = logins["w1"].worker(slots=4).take()
    first = logins["s1"].one("submit_unique", unique_key="k", task="prepare")
    named = {"unique_key": "k", "task": "prepare", "payload": {"n": 2}, **for_job(claim)}
    assert logins["w1"].one("submit_unique", **named) == {**first, "existed": True}
    assert logins["w1"].one("submit_unique", **named, replaces=True)["replaced"]
    assert not logins["s2"].one("submit_unique", unique_key="k", task="prepare")["existed"]


@pytest.mark.parametrize(("verb", "more"), VERBS)
def test_a_child_is_bound_by_the_ceiling_of_its_parents_submitter_and_not_by_its_workers(
    logins: dict[str, Q], verb: str, more: dict[str, Any]
) -> None:
    logins["s1"].submit("fan")
    claim = logins["w1"].worker(slots=4).take()
    child = {"task": "leaf", **for_job(claim), **more}
    logins["a1"].call("set_queue", name="default", ceilings={"s1_test": 5, "w1_test": 9})
    with refused(NOT_ALLOWED, "the ceiling of s1_test"):
        logins["w1"].call(verb, **child, priority=6)
    logins["a1"].call("set_queue", name="default", ceilings={"s1_test": 9, "w1_test": 5})
    logins["w1"].call(verb, **child, priority=6)


def test_a_replacement_is_bound_by_the_ceiling_of_the_jobs_submitter(logins: dict[str, Q]) -> None:
    logins["a1"].call("set_queue", name="default", ceilings={"s1_test": 5})
    logins["s1"].submit("fan")
    claim = logins["w1"].worker(slots=4).take()
    named = {"unique_key": "k", "task": "prepare", **for_job(claim)}
    logins["w1"].one("submit_unique", **named)
    with refused(NOT_ALLOWED, "the ceiling of s1_test"):
        logins["w1"].one("submit_unique", **named, replaces=True, priority=6)
    assert logins["w1"].one("submit_unique", **named, replaces=True, priority=5)["replaced"]


@pytest.mark.parametrize(("verb", "more"), VERBS)
def test_a_worker_submits_nothing_of_its_own(logins: dict[str, Q], verb: str, more: dict[str, Any]) -> None:
    """A child without a parent would be a job in the worker's own name."""
    logins["s1"].submit("fan")
    claim = logins["w1"].worker(slots=4).take()
    plain = {"wake": "sleepers"} if "gang" not in verb else {}
    for nobody in ({}, plain, {"parent": None, "parent_token": None}):
        with refused(NOT_ALLOWED, "w1_test may not submit"):
            logins["w1"].call(verb, task="leaf", **more, **nobody)
    with refused(NOT_ALLOWED, "may not submit for job"):
        logins["s2"].call(verb, task="leaf", **more, **for_job(claim))
    logins["w1"].call(verb, task="leaf", **more, **for_job(claim))


def test_only_a_worker_names_a_parent(q: Q, parent: Claim) -> None:
    q.sql("set role sue")
    with refused(NOT_ALLOWED, "may not submit for job"):
        q.call("submit", task="leaf", parent=parent.job_id, parent_token=parent.token)

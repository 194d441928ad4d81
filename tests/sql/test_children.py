"""Jobs that jobs submit: on whose behalf, and for how long they may."""

from __future__ import annotations

from typing import Any

import pytest
from drive import INVALID, NOT_ALLOWED, STALE, Claim, Q, refused


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
    rows = claim.q.call("submit_child", job_id=claim.job_id, token=claim.token, task=task, **options)
    return [row["submit_child"] for row in rows]


def test_a_child_is_submitted_on_behalf_of_whoever_submitted_its_parent(q: Q, parent: Claim) -> None:
    ids = submit_child(parent, payloads=[{"n": 1}, {"n": 2}], priority=3)
    found = [q.job(i) for i in ids]
    assert [job["payload"] for job in found] == [{"n": 1}, {"n": 2}]
    assert {(job["submitter"], job["parent"], job["priority"]) for job in found} == {
        ("sue", parent.job_id, 3)
    }
    assert (q.job(parent.job_id)["submitter"], q.job(parent.job_id)["parent"]) == ("sue", None)


def test_a_gang_of_children_has_the_same_submitter_and_parent(q: Q, parent: Claim) -> None:
    made = q.one("submit_child_gang", job_id=parent.job_id, token=parent.token, task="ddp", size=2)
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
        q.call("submit_child", job_id=parent.job_id, token=parent.token + 1, task="leaf")
    parent.complete()
    for verb, more in (("submit_child", {}), ("submit_child_gang", {"size": 2})):
        with refused(STALE):
            q.call(verb, job_id=parent.job_id, token=parent.token, task="leaf", **more)
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


def test_only_a_worker_names_a_parent(q: Q, parent: Claim) -> None:
    q.sql("set role sue")
    with refused(NOT_ALLOWED, "may not submit for job"):
        q.call("submit", task="leaf", parent=parent.job_id, parent_token=parent.token)

"""What a job waits for: that others are done, have ended, or have failed."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import Claim, Q, refused

AS_ASKED = {"after": "done", "after_any": "any", "after_failed": "failed"}


def end(q: Q, job: int, how: str) -> None:
    """End this job, which must be the one that a new worker claims."""
    if how == "cancelled":
        q.call("cancel", job_ids=[job])
        return
    claim = q.worker().take()
    assert claim.job_id == job
    if how == "done":
        claim.complete()
    else:
        claim.fail(retryable=False)


OUTCOMES = [
    ("after", "done", "pending"),
    ("after", "failed", "cancelled"),
    ("after", "cancelled", "cancelled"),
    ("after_any", "done", "pending"),
    ("after_any", "failed", "pending"),
    ("after_any", "cancelled", "pending"),
    ("after_failed", "done", "cancelled"),
    ("after_failed", "failed", "pending"),
    ("after_failed", "cancelled", "cancelled"),
]


@pytest.mark.parametrize(("option", "how", "then"), OUTCOMES)
def test_a_job_and_a_gang_wait_for_the_outcome_they_want(q: Q, option: str, how: str, then: str) -> None:
    first = q.submit(priority=1)
    job, gang = q.submit(**{option: [first]}), q.submit_gang(2, **{option: [first]})
    assert (q.state(job), gang.states) == ("waiting", ["waiting", "waiting"])
    assert {row["wants"] for row in q.sql("select wants from gangq.dependencies")} == {AS_ASKED[option]}
    end(q, first, how)
    q.settle()
    assert (q.state(job), gang.state) == (then, {"pending": "blocked"}.get(then, then))
    if then == "cancelled":
        assert f"job {first}, which it waited for, did not" in q.job(job)["error"]["message"]
    assert q.sql("select * from gangq.dependencies") == []


def test_a_job_that_need_not_wait_any_more_wakes_a_sleeper(q: Q, dsn: str) -> None:
    first = q.submit()
    q.submit(after=[first])
    claim, sleeper = q.worker("w1").take(), q.worker("w2")
    assert sleeper.claim(sleep=True) == []
    with psycopg.connect(dsn, autocommit=True) as ear:
        ear.execute(f"listen gangq_{sleeper.incarnation}")
        claim.complete()
        q.tick()
        assert "light" in [n.payload for n in ear.notifies(timeout=2, stop_after=2)]


@pytest.mark.parametrize(("option", "how", "then"), OUTCOMES)
def test_an_outcome_known_at_submission_is_judged_at_once(q: Q, option: str, how: str, then: str) -> None:
    first = q.submit()
    end(q, first, how)
    if then == "pending":
        assert q.state(q.submit(**{option: [first]})) == "pending"
        assert q.submit_gang(1, **{option: [first]}).state == "blocked"
    else:
        with refused("GQ001", f"{option} names job {first}, which"):
            q.submit(**{option: [first]})
        with refused("GQ001", f"{option} names job {first}, which"):
            q.submit_gang(1, **{option: [first]})


def test_a_job_waits_until_each_of_several_has_ended_as_it_wants(q: Q) -> None:
    worker = q.worker(prefetch=3)
    done, ended, failed = q.submit(count=3)
    job = q.submit(after=[done], after_any=[ended], after_failed=[failed])
    said = q.value("select detail from gangq.explain_job(%(id)s) where gate = 'state'", id=job)
    assert said == f"waits for job {done} to be done, job {ended} to end, job {failed} to fail"
    one, two, three = worker.claim(3)
    three.fail(retryable=False)
    q.settle()
    assert q.state(job) == "waiting"
    two.fail(retryable=False)
    q.settle()
    assert q.state(job) == "waiting"
    one.complete()
    q.settle()
    assert q.state(job) == "pending"


def test_who_ends_a_job_does_not_have_to_wait_for_all_that_others_let_wait_for_it(q: Q) -> None:
    first = q.submit()
    q.submit("after", count=1500, after=[first])
    q.worker(tasks=["work"]).take().complete()
    assert q.value("select count(*) from gangq.dependencies where outcome is not null") == 1000
    for _ in range(30):
        q.tick()
    assert q.value("select count(*) from gangq.live_jobs where state = 'pending'") == 1500
    assert q.sql("select * from gangq.unsettled") == []


def test_members_are_released_together_also_where_a_job_has_not_told_all_of_them_yet(q: Q) -> None:
    first = q.submit()
    gang = q.submit_gang(2100, after=[first], wait_for_hardware=True)
    q.worker(tasks=["work"]).take().complete()
    states = "select distinct state from gangq.live_jobs"
    for state in ("waiting", "blocked"):
        q.call("promote_due")
        assert (gang.state, q.sql(states), q.violations()) == (state, [{"state": state}], [])


def test_explain_names_twenty_of_each_outcome_and_counts_the_others(q: Q) -> None:
    ids = q.submit(count=22)
    gang = q.submit_gang(2, after_any=ids)
    said = q.value("select detail from gangq.explain_gang(%(id)s) where gate = 'state'", id=gang.id)
    assert said == f"waits for jobs {', '.join(map(str, ids[:20]))} and 2 more to end"


def test_a_member_has_failed_when_its_gang_has(q: Q) -> None:
    """The member that was done before its gang failed counts as failed for what waits for the failure."""
    gang, (a, b) = q.submit_gang(2, failure_policy="fail"), q.workers(2)
    ids = [member["id"] for member in gang.members]
    handler, cleanup, plain = (q.submit(**{option: ids}) for option in ("after_failed", "after_any", "after"))
    first, second = gang.start(a, b)
    first.complete()
    second.fail(retryable=False)
    q.settle()
    assert gang.state == "failed"
    assert [q.state(job) for job in (handler, cleanup, plain)] == ["pending", "pending", "cancelled"]


@pytest.mark.parametrize("option", list(AS_ASKED))
def test_no_cycle_can_be_made(q: Q, option: str) -> None:
    """A job waits only for jobs that exist when it is submitted, and what it waits for never grows."""
    first = q.submit()
    own = first + 1  # The id that the next submission would draw.
    with refused("GQ002", f"{option} names job {own}, which does not exist"):
        q.submit(**{option: [first, own]})
    assert q.submit(**{option: [first]}) == own
    with refused("GQ002", f"{option} names job {own + 1}, which does not exist"):
        q.submit_gang(2, **{option: [own + 1]})
    with refused("GQ002", f"{option} names job 999999, which does not exist"):
        q.submit(**{option: [999999]})


def test_a_null_is_refused(q: Q) -> None:
    with refused("GQ002", "after names job null, which does not exist"):
        q.submit(after=[None])
    with refused("GQ001", "after_any cannot be [null]"):
        q.submit(after_any=[None])


def test_the_members_of_a_gang_cannot_wait_for_each_other(q: Q) -> None:
    upcoming = q.value("select last_value from gangq.job_ids") + 1
    with refused("GQ002", f"after names job {upcoming}, which does not exist"):
        q.submit_gang(2, after=[upcoming])


def test_a_job_is_waited_for_with_one_outcome(q: Q) -> None:
    first = q.submit()
    with refused("GQ001", f"job {first} is named in after and after_any"):
        q.submit(after=[first], after_any=[first])
    assert q.state(q.submit(after_any=[first, first])) == "waiting"


@pytest.mark.parametrize("size", [{}, {"size": 2}])
@pytest.mark.parametrize("option", ["after", "after_any", "after_failed"])
def test_a_schedule_refuses_to_wait(q: Q, option: str, size: dict[str, int]) -> None:
    with refused("GQ001", f"a schedule submits without {option}"):
        q.call("set_schedule", name="nightly", task="a", every="1 hour", work={option: [1], **size})


@pytest.mark.parametrize("option", list(AS_ASKED))
def test_a_child_waits_as_any_job(q: Q, option: str) -> None:
    first = q.submit(priority=-1)
    parent = q.submit()
    claim = q.worker().take()
    assert claim.job_id == parent
    (row,) = q.call("submit", task="leaf", parent=parent, parent_token=claim.token, **{option: [first]})
    assert q.state(row["submit"]) == "waiting"
    assert q.value("select wants from gangq.dependencies") == AS_ASKED[option]


def test_the_options_are_lists_of_ids(q: Q) -> None:
    with refused("GQ001", "after_any cannot be"):
        q.submit(after_any=["g1"])


# What a handler is told of them: gangq.inputs -----------------------------------------------------------------


def inputs(claim: Claim) -> list[dict[str, Any]]:
    return claim.q.call("inputs", job_id=claim.job_id, token=claim.token)


def test_a_job_sees_the_results_of_what_it_waited_for_and_of_no_other(q: Q) -> None:
    worker = q.worker(prefetch=9)
    done, failed, cancelled, other, early = q.submit(count=5)
    claims = {claim.job_id: claim for claim in worker.claim(5)}
    claims[cancelled].release()
    claims[early].complete({"early": 1})
    job = q.submit(after=[done, early], after_any=[cancelled], after_failed=[failed])
    claims[done].complete({"n": 1})
    claims[other].complete({"n": 2})
    claims[failed].fail(retryable=False, message="no such file")
    q.call("cancel", job_ids=[cancelled])
    q.settle()
    claim = worker.take()
    assert claim.job_id == job
    found = {row["on_job_id"]: (row["state"], row["result"], row["readable"]) for row in inputs(claim)}
    assert found == {
        done: ("done", {"n": 1}, True),
        failed: ("failed", None, True),
        cancelled: ("cancelled", None, True),
        early: ("done", {"early": 1}, True),
    }
    (error,) = (row["error"] for row in inputs(claim) if row["state"] == "failed")
    assert error["message"] == "no such file"


def test_a_job_that_waited_for_nothing_has_no_inputs(q: Q) -> None:
    q.submit()
    assert inputs(q.worker().take()) == []


def test_the_members_of_a_gang_are_inputs_and_each_member_has_them(q: Q) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    after = q.submit_gang(2, after=gang.job_ids)
    for n, claim in enumerate(gang.start(*workers)):
        claim.complete({"n": n})
    q.settle()
    for claim in after.start(*workers):
        assert [(row["on_job_id"], row["gang_id"], row["rank"], row["result"]) for row in inputs(claim)] == [
            (gang.job_ids[0], gang.id, 0, {"n": 0}),
            (gang.job_ids[1], gang.id, 1, {"n": 1}),
        ]


@pytest.mark.parametrize("shared", [False, True])
def test_a_job_does_not_see_what_its_submitter_may_not_read(q: Q, shared: bool) -> None:
    """Any job may be named in after; its result is another submitter's all the same."""
    first = q.submit()
    second = q.submit(after=[first])
    worker = q.worker()
    worker.take().complete({"secret": 1})
    q.settle()
    q.sql("update gangq.history set submitter = 'alice', login = 'alice'")
    if shared:
        q.call("set_queue", name="default", others="shared")
    claim = worker.take()
    assert claim.job_id == second
    (row,) = inputs(claim)
    assert (row["state"], row["readable"], row["result"]) == (
        ("done", True, {"secret": 1}) if shared else ("done", False, None)
    )


def test_inputs_are_bounded(q: Q) -> None:
    ids = q.submit(count=9)
    job = q.submit(after=ids)
    worker = q.worker(prefetch=9)
    for claim in worker.claim(9):
        claim.complete({})
    q.settle()
    q.sql("update gangq.history set result = jsonb_build_object('x', repeat('x', 2000000))")
    claim = worker.take()
    assert claim.job_id == job
    with refused("GQ007", f"the results that job {job} waited for have 180000"):
        inputs(claim)
    q.sql("update gangq.history set result = '1' where job_id = %(id)s", id=ids[0])
    assert len(inputs(claim)) == 9

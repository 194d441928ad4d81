"""A retry starts from the one ending that no retry has overtaken, whatever the clock said when."""

from __future__ import annotations

import pytest

from sql.drive import MISSING, WRONG_STATE, Q, refused

HOUR = 3600


def retry(q: Q, **ids: list[int]) -> None:
    (row,) = q.call("retry", **ids)
    assert row["state"] in ("pending", "blocked")


@pytest.mark.parametrize("jump", [1, -HOUR], ids=["clock on", "clock back"])
def test_a_job_is_retried_from_its_last_ending_though_the_clock_was_set_back_before_it(
    q: Q, jump: float
) -> None:
    job, worker = q.submit(), q.worker()
    first = worker.take()
    first.fail("the first time", retryable=False)
    retry(q, job_ids=[job])
    q.later(jump)
    second = worker.take()
    second.fail("the second time", retryable=False)
    assert q.job(job)["error"] == {"message": "the second time"}
    retry(q, job_ids=[job])
    assert q.sql("select final_token from gangq.live_jobs") == [{"final_token": second.token}]
    with refused(WRONG_STATE, f"job {job} is live"):
        q.call("retry", job_ids=[job])
    q.later(2)
    assert worker.take().complete() == "done"
    assert [row["state"] for row in q.sql("select state from gangq.jobs")] == ["done"]
    assert q.value("select count(*) from gangq.history") == 3


@pytest.mark.parametrize("jump", [1, -HOUR], ids=["clock on", "clock back"])
def test_a_gang_is_retried_from_its_last_ending_though_the_clock_was_set_back_before_it(
    q: Q, jump: float
) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    for message in ("the first time", "the second time"):
        claims = gang.start(*workers)
        claims[0].fail(message, retryable=False)
        claims[1].ack()
        assert (gang.state, gang.members[0]["error"]) == ("failed", {"message": message})
        retry(q, gang_ids=[gang.id])
        assert gang.states == ["blocked", "blocked"]
        tokens = q.sql("select final_token from gangq.live_jobs order by rank")
        assert [row["final_token"] for row in tokens] == [c.token for c in claims]
        q.later(jump)
    assert q.value("select count(*) from gangq.gangs") == 1
    for claim in gang.start(*workers):
        claim.complete()
    assert (gang.state, gang.states) == ("done", ["done", "done"])


def test_what_was_retried_and_is_done_since_a_bulk_retry_looked_is_not_repeated(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take().fail(retryable=False)
    retry(q, job_ids=[job])
    q.later(1)
    assert worker.take().complete() == "done"
    bulk = "select gangq.retry_jobs(array[%(job)s]::bigint[], null, 1, gangq.now(), ended => 'failed')"
    assert q.value(bulk, job=job) == []
    assert q.state(job) == "done"


def test_a_job_whose_every_ending_was_dropped_is_not_found(q: Q) -> None:
    job, worker = q.submit(), q.worker()
    worker.take().fail(retryable=False)
    q.later(60 * 24 * HOUR)
    q.call("keep_partitions", at_once=True)
    with refused(MISSING, f"job {job} does not exist"):
        q.call("retry", job_ids=[job])

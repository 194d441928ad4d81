"""Two retries of one ending: one of them runs it again, the other is told that it lives."""

from __future__ import annotations

import pytest

from interleaving.sessions import both_ends, call, value


@both_ends
@pytest.mark.parametrize("kind", ["job", "gang"])
def test_of_two_retries_at_once_one_succeeds_and_the_other_is_told_why_not(meeting, kind, end):
    worker = meeting.worker("w1")
    if kind == "job":
        job, token = meeting.running(worker)
        ids = {"job_ids": [job]}
    else:
        gang_id, (job,), (token,) = meeting.running_gang([worker])
        ids = {"gang_ids": [gang_id]}
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    met = meeting.meet(lambda conn: call(conn, "retry", **ids), lambda conn: call(conn, "retry", **ids), end)
    assert met.later.waited
    assert met.later.sqlstate == ("GQ004" if end == "commit" else None)
    assert meeting.state(job) == ("pending" if kind == "job" else "blocked")
    assert meeting.db.execute("select count(*) as n from gangq.retried").fetchone() == {
        "n": 1 if kind == "job" else 2
    }


def test_a_retry_that_waited_for_another_whose_job_has_ended_since_starts_from_that_ending(meeting):
    worker = meeting.worker("w1")
    job, token = meeting.running(worker)
    value(meeting.db, "fail", job_id=job, token=token, retryable=False)
    meeting.clock.advance(1)

    def retry_and_end(conn):
        call(conn, "retry", job_ids=[job])
        call(conn, "cancel", job_ids=[job])

    met = meeting.meet(retry_and_end, lambda conn: call(conn, "retry", job_ids=[job]))
    assert met.later.waited
    assert met.later.result()[0]["state"] == "pending"
    assert meeting.db.execute("select count(*) as n from gangq.retried").fetchone() == {"n": 2}
    assert meeting.state(job) == "pending"

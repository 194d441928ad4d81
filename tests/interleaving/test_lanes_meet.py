"""The two lanes of a worker meet at its row: each claim locks it."""

from __future__ import annotations

import uuid

from interleaving.sessions import Arena, Later, both_ends, call


@both_ends
def test_a_completion_claims_nothing_while_the_other_lane_claims_and_the_next_claim_takes_the_job(
    meeting: Arena, end: str
) -> None:
    worker = meeting.worker("w1", slots=1, light=1)
    job, token = meeting.running(worker)
    waits = meeting.job()
    other_lane = meeting.connect(autocommit=False)
    own_lane = meeting.connect(statement_timeout="1000")
    assert call(other_lane, "claim", incarnation=worker, lane="placed") == []

    request = {"incarnation": worker, "lane": "light", "request_id": uuid.uuid4()}
    rows = call(own_lane, "complete_and_claim", job_ids=[job], tokens=[token], **request)
    assert [(row["outcome"], row["job_id"]) for row in rows] == [("done", job)]
    assert (meeting.state(job), meeting.state(waits)) == ("done", "pending")

    claim = Later(own_lane, lambda conn: call(conn, "claim", **request)).start(meeting.db)
    assert claim.waited
    getattr(other_lane, end)()
    (claimed,) = claim.join().result()
    assert claimed["job_id"] == waits
    # Between claims of the other lane the completion claims the next job itself.
    last = meeting.job()
    rows = call(
        own_lane,
        "complete_and_claim",
        job_ids=[waits],
        tokens=[claimed["token"]],
        **request | {"request_id": uuid.uuid4()},
    )
    assert [(row["outcome"], row["job_id"]) for row in rows] == [("done", waits), ("claimed", last)]
    assert meeting.violations() == []

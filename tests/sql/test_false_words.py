"""What a worker or a decider says may be false: it breaks neither a tick nor what others read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql.drive import Q


def decided(q: Q, ask: str, **refused: Any) -> None:
    """A decider says of an ask why it waits; no number of it is checked."""
    runs = q.value("select runs from gangq.lock_rows where name = 'pass'")
    decision = {"ask": ask, "action": "wait", "why": "so", "refused": refused}
    assert q.one("apply", decisions=[decision], **{"pass": runs})["accepted"]


@pytest.mark.parametrize("at", ["soon", "1e300", "-1e300", "NaN", "[]", '{"n": 1}', "true", f"1{'0' * 40}"])
def test_a_moment_that_is_none_keeps_no_tick_from_running(q: Q, at: str) -> None:
    gang = q.submit_gang(2)
    said = at if at in ("soon", "NaN") else json.loads(at)
    decided(q, f"g{gang.id}", gate="rate", at=said, may_stop_at=said)
    assert q.value("select count(*) from gangq.verdicts where gate = 'rate'") == 1
    q.sql("select * from gangq.tick(force => true)")
    assert q.sql("select * from gangq.tick()")
    assert {row["gate"] for row in q.call("explain_gang", gang_id=gang.id)} >= {"rate", "start", "unblock"}
    assert q.sql("select * from gangq.waiting")


@pytest.mark.parametrize(
    "after", ["g1", {"unit": "g1"}, [{"by": "history"}], [{"by": "history", "unit": "gx"}]]
)
def test_ends_that_are_none_are_left_out_of_an_explanation(q: Q, after: Any) -> None:
    gang = q.submit_gang(1)
    worker = q.worker()
    plan = {
        "ask": f"g{gang.id}",
        "action": "plan",
        "starts_at": float(q.value("select gangq.seconds(gangq.now())")) + 100,
        "planned": [{"worker": worker.incarnation, "devices": []}],
        "refused": {"gate": "planned_start"},
        "follows": "the end of g1",
        "after": after,
    }
    runs = q.value("select runs from gangq.lock_rows where name = 'pass'")
    assert q.one("apply", decisions=[plan], **{"pass": runs})["outcomes"] == {f"g{gang.id}": "done"}
    said = {row["gate"]: row["detail"] for row in q.call("explain_gang", gang_id=gang.id)}
    assert said["start"].endswith(", the end of g1")


def test_the_keys_of_an_error_are_not_taken_for_numbers_of_an_event(q: Q) -> None:
    gang, claims = q.running_gang(*q.workers(2))
    error = {"message": "x", "rank": "first", "charged": "perhaps", "code": "none", "trips": "many"}
    q.call("requeue", job_id=claims[0].job_id, token=claims[0].token, error=error)
    trips = [row for row in q.sql("select * from gangq.timeline") if row["what"] == "trip"]
    assert [(row["gang_id"], row["rank"]) for row in trips] == [(gang.id, None)]
    for view in ("trips", "drains", "preemptions", "device_trips"):
        q.sql(f"select * from gangq.{view}")


def test_a_false_error_does_not_keep_a_later_trip_of_its_job_from_being_carried_out(q: Q) -> None:
    job = q.submit()
    worker = q.worker()
    claim = worker.take()
    q.call("requeue", job_id=job, token=claim.token, error={"charged": "perhaps", "host": "h9"})
    assert worker.take().trip() == "pending"


@pytest.mark.parametrize("alike", ["gx", "k1/0", "g" + "9" * 30])
def test_a_gang_that_is_none_keeps_no_later_pass_from_ending(q: Q, alike: str) -> None:
    first, second = q.submit_gang(2), q.submit_gang(2)
    runs = q.value("select runs from gangq.lock_rows where name = 'pass'")
    said = [
        {"ask": f"g{first.id}", "action": "wait", "refused": {"gate": "room"}},
        {"ask": f"g{second.id}", "action": "wait", "refused": {"gate": "quota"}, "alike": [alike]},
    ]
    assert q.one("apply", decisions=said, last=False, **{"pass": runs})["accepted"]
    assert q.sql("select ask from gangq.verdicts where ask = %(ask)s", ask=alike) != []
    q.workers(2)
    q.tick()
    assert first.state == "reserved"
    assert q.sql("select ask from gangq.verdicts where ask = %(ask)s", ask=alike) == []

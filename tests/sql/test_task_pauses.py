"""A task that is paused: nothing new of it starts, in either lane, until then, and explain says who said so."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, WRONG_STATE, Q, gpus, refused

LANES: dict[str, dict[str, Any]] = {"light": {}, "placed": {"gpus": 1}}


def holding(q: Q, **of: int) -> dict[str, str]:
    rows = q.call("explain_gang" if "gang_id" in of else "explain_job", **of)
    return {row["gate"]: row["detail"] for row in rows if not row["ok"] and row["gate"] != "state"}


def unblock(q: Q, job: int) -> str:
    (found,) = [row["detail"] for row in q.call("explain_job", job_id=job) if row["gate"] == "unblock"]
    return str(found)


@pytest.mark.parametrize("lane", LANES)
def test_nothing_of_a_paused_task_starts_and_what_is_of_others_does(q: Q, lane: str) -> None:
    worker = q.worker(slots=2, light=2, devices=gpus(8000, 8000))
    q.call("pause_task", task="work", reason="new data")
    held, other = q.submit(**LANES[lane]), q.submit("other", **LANES[lane])
    q.place()
    assert [claim.job_id for claim in worker.claim()] == [other]
    said = holding(q, job_id=held)["paused"]
    assert said.startswith("task work is paused by ")
    assert "new data" in said
    assert unblock(q, held) == "gangq task resume work"
    assert "paused" in q.value("select why from gangq.waiting where task = 'work'")
    q.call("resume_task", task="work")
    q.place()
    assert worker.take().job_id == held


@pytest.mark.parametrize("lane", LANES)
def test_a_tick_ends_the_pause_in_time_and_wakes_who_sleeps(q: Q, lane: str) -> None:
    worker = q.worker(light=1, devices=gpus(8000))
    job = q.submit(**LANES[lane])
    until = q.clock.now() + timedelta(seconds=20)
    q.call("pause_task", task="work", until=until.isoformat())
    (row,) = q.sql("select * from gangq.tasks where task = 'work'")
    assert (row["paused"], row["paused_until"], row["pause_reason"]) == (True, until, None)
    q.place()
    assert worker.claim(sleep=True) == []
    assert f"until {until:%Y-%m-%d}" in holding(q, job_id=job)["paused"]
    q.live_on(19.7, worker)
    assert q.one("tick", force=True)["next_in_s"] == pytest.approx(0.3, abs=0.01)
    q.clock.advance(0.3)
    with psycopg.connect(q.db.info.dsn, autocommit=True) as listening:
        listening.execute("listen gangq_wake")
        assert q.one("tick")["detail"] == {"end_pauses": 1}
        assert {n.payload for n in listening.notifies(timeout=2, stop_after=1)} == {"default"}
    assert q.sql("select * from gangq.task_pauses") == []
    q.place()
    assert worker.take().job_id == job


def test_a_gang_waits_while_the_task_of_one_of_its_roles_is_paused(q: Q) -> None:
    q.workers(2)
    roles = [{"name": "driver", "count": 1, "task": "drive"}, {"name": "reader", "count": 1, "task": "read"}]
    q.call("pause_task", task="read", reason="disk")
    gang = q.submit_gang(roles=roles)
    q.place()
    assert gang.state == "blocked"
    assert holding(q, gang_id=gang.id)["paused"].startswith("task read is paused by ")
    q.call("resume_task", task="read")
    q.place()
    assert gang.state == "reserved"


def test_a_decision_from_before_the_pause_places_nothing(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    apply = q.decided()
    q.call("pause_task", task="train")
    assert apply() == {f"g{gang.id}": "a task of it is paused"}
    with refused(WRONG_STATE, "a task of it is paused"):
        q.call("reserve_gang", gang_id=gang.id, incarnations=[worker.incarnation for worker in workers])
    assert gang.state == "blocked"
    assert [claim for worker in workers for claim in worker.claim()] == []


def test_what_runs_goes_on_and_its_place_is_not_refilled(q: Q) -> None:
    worker = q.worker(devices=gpus(8000))
    _, second = q.submit(count=2, gpus=1)
    q.place()
    claim = worker.take()
    q.call("pause_task", task="work")
    assert claim.complete() == "done"
    assert worker.claim() == []
    q.place()
    assert worker.claim() == []
    assert q.state(second) == "pending"
    assert q.sql("select * from gangq.places") == []


def test_a_repeated_pause_says_anew_until_when_and_resuming_twice_is_harmless(q: Q) -> None:
    q.call("pause_task", task="work", until="2999-01-01", reason="first")
    q.call("pause_task", task="work")
    (row,) = q.sql("select * from gangq.task_pauses")
    assert (row["until"], row["reason"]) == (None, None)
    for _ in range(2):
        q.call("resume_task", task="work")
    assert q.sql("select * from gangq.task_pauses") == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"task": ""}, "1 to 200 characters"),
        ({"task": "x" * 201}, "1 to 200 characters"),
        ({"task": "work", "until": "2000-01-01"}, "which has passed"),
        ({"task": "work", "until": "infinity"}, "year 2 to the year 9998"),
    ],
)
def test_a_pause_that_makes_no_sense_is_refused(q: Q, named: dict[str, Any], said: str) -> None:
    with refused(INVALID, said):
        q.call("pause_task", **named)
    assert q.sql("select * from gangq.task_pauses") == []


def test_a_worker_that_waits_for_a_paused_task_is_not_idle_beside_work(q: Q) -> None:
    worker = q.worker()
    q.submit()
    q.call("pause_task", task="work")
    q.live_on(120, worker)
    assert q.call("idle_beside_work") == []
    q.call("resume_task", task="work")
    assert [row["worker"] for row in q.call("idle_beside_work")] == ["w1"]

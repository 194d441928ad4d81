"""What a supervisor has said of its worker, by the process that says it."""

from __future__ import annotations

from typing import Any

from gangq.client import Client
from gangq.worker.report import report


def facts(job: Any, **more: Any) -> dict[str, Any]:
    """Of a worker that froze while this job ran."""
    return {
        "exit_code": 80,
        "status": -9,
        "signal": 9,
        "silent_s": 30.0,
        "job": job.job_id,
        "token": job.token,
        "threads": [],
        "stacks": "",
        "stuck": [],
        "left": [],
        "tree_dead": True,
        **more,
    }


def worker(client: Client) -> dict[str, Any]:
    row = client.register_worker(name="w", host="h", queues=["default"])
    return {"worker": "w", "incarnation": row.incarnation}


def test_the_job_of_a_frozen_worker_is_tripped_and_free_at_once(client: Client) -> None:
    record = worker(client)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(job))
    row = client.job(id=job.job_id)
    assert (row.state, row.trips, row.crashes, row.attempts) == ("pending", 1, 0, 0)
    assert [trip.code for trip in client.trips()] == [80]


def test_what_a_frozen_worker_began_while_it_was_being_ended_is_charged_nothing(client: Client) -> None:
    record = worker(client)
    client.submit(task="t", payloads=[{}, {}])
    (frozen,) = client.claim(incarnation=record["incarnation"])
    client.complete(job_ids=[frozen.job_id], tokens=[frozen.token])
    (next_one,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(frozen))
    row = client.job(id=next_one.job_id)
    assert (row.state, row.trips, row.crashes, row.stops, row.attempts) == ("pending", 0, 0, 1, 0)
    assert client.job(id=frozen.job_id).state == "done"
    assert client.trips() == []


def test_the_job_of_a_killed_worker_is_charged_a_crash(client: Client) -> None:
    record = worker(client)
    client.submit(task="t")
    (job,) = client.claim(incarnation=record["incarnation"])
    assert report(client, record, facts(job, exit_code=137, silent_s=None))
    row = client.job(id=job.job_id)
    assert (row.state, row.trips, row.crashes, row.attempts) == ("pending", 0, 1, 0)

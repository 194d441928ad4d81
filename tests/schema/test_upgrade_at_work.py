"""A fleet is at work while its schema is upgraded: what the release has stored goes on.

Each story is a part of that fleet, with a queue and a worker of its own. Up to its `yield` it is told in the schema
of a release, by functions of that release alone. Then comes the upgrade. Its worker calls throughout as the release
declares its functions.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_schema import migrate, psql
from test_upgrade import RELEASES, text_of

from databases import Clock, Connection, connect
from gangq.client import Client
from gangq.embedded import Server
from sql.drive import PLACED, Claim, Gang, Q, Worker, ack_all, gpus
from sql.services import Replicas, endpoints, gangs, put


class ReleaseQ(Q):
    """Calls functions as the release of this database declares them."""

    def __init__(self, db: Connection) -> None:
        self._signatures = {}
        super().__init__(db)


def claim(worker: Worker, **named: Any) -> list[Claim]:
    """What this worker may take without another decision; members by rank."""
    rows = worker.q.call("claim", incarnation=worker.incarnation, max_jobs=4, **named)
    return [Claim(worker.q, row) for row in sorted(rows, key=lambda row: row["rank"] or 0)]


def start(gang: Gang, worker: Worker) -> list[Claim]:
    gang.q.call("reserve_gang", gang_id=gang.id, incarnations=[worker.incarnation] * len(gang.job_ids))
    return claim(worker)


def seats_of(gang: Gang) -> Any:
    """What is planned for it."""
    return gang.q.sql(f"select kept, seats from gangq.planned where gang_id = {gang.id}")[0]


def finish(gang: Gang, claims: list[Claim]) -> None:
    """A gang that has just been claimed passes its barrier and is done."""
    assert [one.barrier()[0]["go"] for one in claims] == [True] * gang.row["size"]
    assert {one.complete() for one in claims} == {"done"}
    assert gang.state == "done"


def decide(q: Q, **decision: Any) -> None:
    """Carry out a part of a pass, on the board as it is; as 0.2.0 wrote decisions."""
    text = q.value("select gangq.board()::text")
    board = json.loads(text)
    seen = {"board": text, "asked": board["asked"], "now": board["now"]}
    report = q.one("apply", **{"pass": board["pass_number"]}, decisions=[decision], seen=seen, last=False)
    assert report["outcomes"] == {decision["ask"]: "done"}


# The stories ------------------------------------------------------------------------------------------------


def placed(q: Q, worker: Worker) -> Iterator[None]:
    """A place is open for a single job."""
    where = [{"key": "zone", "op": "in", "values": ["a", "b"]}]
    job = q.submit(queue=worker.name, selector=where, **PLACED)
    q.call("open_place", incarnation=worker.incarnation, job_id=job)
    yield
    (taken,) = claim(worker)
    assert (taken.job_id, taken.complete()) == (job, "done")


def reserved(q: Q, worker: Worker) -> Iterator[None]:
    """A gang is reserved, and no member has been claimed."""
    gang = q.submit_gang(2, queue=worker.name)
    q.call("reserve_gang", gang_id=gang.id, incarnations=[worker.incarnation] * 2)
    yield
    finish(gang, claim(worker))


def planned(q: Q, worker: Worker) -> Iterator[None]:
    """A gang has a planned start. It keeps it, and starts when the one before it ends."""
    first, second = (q.submit_gang(2, queue=worker.name, gpus=1) for _ in range(2))
    claims = start(first, worker)
    devices = q.value(
        f"select array_agg(id) from gangq.device_registry where offered_by = {worker.incarnation}"
    )
    seats = [{"worker": worker.incarnation, "devices": [device], "role": 0} for device in devices]
    refused = {"gate": "room", "need": 2, "have": 0, "of": "member", "holders": [f"g{first.id}"]}
    starts_at = q.value("select extract(epoch from gangq.now() + interval '1 h')::float8")
    more = {"planned": seats, "starts_at": starts_at, "refused": refused, "why": "no room"}
    decide(q, ask=f"g{second.id}", action="plan", **more)
    yield
    assert seats_of(second) == {"kept": False, "seats": 2}
    assert "no room" in str(q.call("explain_gang", gang_id=second.id))
    q.tick()
    assert seats_of(second) == {"kept": False, "seats": 2}
    assert [one.complete() for one in claims] == ["done", "done"]
    q.tick()
    finish(second, claim(worker))


def displaced(q: Q, worker: Worker) -> Iterator[None]:
    """A gang was told to stop. Its seats are kept for another one, which starts there when it has stopped."""
    low, high = (q.submit_gang(2, queue=worker.name, priority=priority) for priority in (0, 5))
    claims = start(low, worker)
    seats = [{"worker": worker.incarnation, "role": 0}] * 2
    decide(q, ask=f"g{high.id}", action="stop", stop=[f"g{low.id}"], lost_s=[1.0], planned=seats)
    yield
    assert seats_of(high) == {"kept": True, "seats": 2}
    ack_all(claims)
    low.skip_backoff()
    q.tick()
    finish(high, claim(worker))
    q.tick()
    finish(low, claim(worker))


def drained(q: Q, worker: Worker) -> Iterator[None]:
    """A member of a gang has failed. When the other has stopped, the gang starts again from its checkpoint."""
    roles = [{"name": "driver", "count": 1}, {"name": "trainer", "count": 1, "gpus": 1}]
    gang = q.submit_gang(queue=worker.name, roles=roles, payload={"lr": 1}, checkpoint_mode="rank0")
    claims = start(gang, worker)
    claims[0].save(7, b"seven")
    worker.beat(*claims, beats=[{"step": 7, "total": 9}, None])
    claims[0].fail()
    yield
    assert worker.beat(claims[1]) == {claims[1].job_id: "preempt"}
    claims[1].ack()
    gang.skip_backoff()
    q.tick()
    again = claim(worker)
    assert [one["payload"] for one in again] == [{"lr": 1}] * 2
    assert again[0].load() == (7, b"seven")
    finish(gang, again)


def lost(q: Q, worker: Worker) -> Iterator[None]:
    """A running gang waits for a place for a member that was lost."""
    gang = q.submit_gang(2, queue=worker.name, failure_policy="restart_member")
    claims = start(gang, worker)
    claims[1].fail()
    yield
    gang.skip_backoff()
    q.tick()
    finish(gang, [claims[0], *claim(worker)])


def limited(q: Q, worker: Worker) -> Iterator[None]:
    """The job that runs is all that a limit allows."""
    q.call("set_queue", name=worker.name, maximum={"jobs": 5})
    first, second = q.submit(count=2, queue=worker.name, limit_key="licence", limit=1)
    q.call("open_place", incarnation=worker.incarnation, job_id=first)
    (taken,) = claim(worker)
    yield
    assert worker.claim() == []
    taken.complete()
    assert worker.take().job_id == second


def tripped(q: Q, worker: Worker) -> Iterator[None]:
    """A job tripped on a device and keeps away from it."""
    job = q.submit(queue=worker.name, gpus=1)
    q.call("open_place", incarnation=worker.incarnation, job_id=job)
    (taken,) = claim(worker)
    (device,) = taken["devices"]
    taken.trip(78, type="Idle", incarnation=worker.incarnation, devices=[device["uuid"]])
    yield
    again = worker.take()
    assert again.job_id == job
    assert again["devices"] != [device]
    again.complete()


def batch(q: Q, worker: Worker) -> Iterator[None]:
    """A batch has not ended; what has happened to it was not delivered yet."""
    q.call("add_notification", target="oncall", queue=worker.name)
    ids = q.submit(count=2, queue=worker.name, name="sweep", tags=["a", "b"])
    first, second = claim(worker, lane="light")
    first.fail(retryable=False)
    yield
    second.complete()
    q.tick()
    (row,) = q.sql("select state, tags, failed, done from gangq.batches where name = 'sweep'")
    assert row == {"state": "failed", "tags": ["a", "b"], "failed": 1, "done": 1}
    told = q.sql("select kind, body from gangq.undelivered where target = 'oncall' order by id")
    assert [row["kind"] for row in told] == ["job_failed", "batch_done"]
    assert told[0]["body"]["job_id"] == ids[0]


def repeated(q: Q, worker: Worker) -> Iterator[None]:
    """The answers of calls were lost: the calls are made again."""
    request = uuid.uuid4()
    calls = (
        lambda: q.call("submit", task="work", queue=worker.name, request_id=request),
        lambda: q.one("submit_unique", task="work", queue=worker.name, unique_key="k")["job_id"],
        lambda: [one.row for one in claim(worker, lane="light", request_id=request)],
    )
    answers = [call() for call in calls]
    assert len(answers[-1]) == 2
    yield
    assert [call() for call in calls] == answers


def serving(q: Q, worker: Worker) -> Iterator[None]:
    """A replica of a service is ready. A new revision takes its place."""
    put(q, payload={"model": "a"}, replicas=1, work={"queue": worker.name})
    q.call("tick", force=True)
    ((old,)) = gangs(q)
    q.call("reserve_gang", gang_id=old["gang_id"], incarnations=[worker.incarnation])
    (taken,) = claim(worker)
    taken.barrier()
    replicas = Replicas(q, worker)
    replicas.claims[taken.job_id] = taken
    replicas.ready(taken)
    yield
    assert [row["gang_id"] for row in endpoints(q)] == [old["gang_id"]]
    put(q, payload={"model": "b"}, work={"queue": worker.name})
    replicas.settle()
    ((new,)) = endpoints(q)
    assert new["gang_id"] != old["gang_id"]
    assert [one["payload"] for one in replicas.of_gang(new["gang_id"])] == [{"model": "b"}]


def retried(q: Q, worker: Worker) -> Iterator[None]:
    """A job backs off. Another has failed for good, and one that waited for it was cancelled."""
    backs_off, failed = q.submit(count=2, queue=worker.name)
    follows = q.submit(queue=worker.name, after=[failed])
    for taken in claim(worker, lane="light"):
        taken.fail(retryable=taken.job_id == backs_off)
    q.call("tick", force=True)
    assert [q.state(job) for job in (backs_off, failed, follows)] == ["scheduled", "failed", "cancelled"]
    yield
    q.later(10)
    q.call("retry", job_ids=[failed])
    q.tick()
    assert [q.state(job) for job in (backs_off, failed, follows)] == ["pending", "pending", "waiting"]
    assert q.job(backs_off)["error"]["message"] == "boom"
    for taken in claim(worker, lane="light"):
        taken.complete({"n": taken["payload"]["n"]})
    q.tick()
    assert [q.job(job)["result"] for job in (backs_off, failed)] == [{"n": 0}, {"n": 1}]
    assert worker.take(lane="light").job_id == follows


def scheduled(q: Q, worker: Worker) -> Iterator[None]:
    """Two schedules are due within a minute; the due time of one is not computed yet."""
    work = {"queue": worker.name, "priority": 5, "name": "report", "tags": ["daily"]}
    for by, when in (("every", {"every": "1 minute"}), ("cron", {"cron": "* * * * *", "tz": "Europe/Oslo"})):
        q.call("set_schedule", name=by, task="report", payload={"by": by}, work=work, due_as="at", **when)
    yield
    q.live_on(70, worker)
    claims = claim(worker, lane="light")
    assert {one["payload"]["by"] for one in claims if one["payload"]["at"]} == {"every", "cron"}
    assert {(one["priority"], one["budget_s"]) for one in claims} == {(5, 77)}


STORIES = (placed, reserved, planned, displaced, drained, lost, limited, tripped, batch, repeated)
LATER = (serving, retried, scheduled)  # They move the clock.


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name.removesuffix(".sql.gz"))
def test_what_is_under_way_goes_on_after_an_upgrade(release: Path, server: Server, empty_dsn: str) -> None:
    assert psql(server, empty_dsn, text_of(release)).returncode == 0
    with connect(empty_dsn) as db, Client(empty_dsn) as client:
        q = ReleaseQ(db)
        q.clock = Clock.install(db)
        q.call("configure", record_decisions=True)
        fleet = []
        for story in (*STORIES, *LATER):
            name = story.__name__
            q.call("set_queue", name=name, min_run_s=0)
            offer = {
                "slots": 2,
                "light": 4,
                "labels": {"zone": "a"},
                "task_options": {"report": {"budget_s": 77}},
            }
            worker = q.worker(name, queues=[name], devices=gpus(1, 1, prefix=name), **offer)
            fleet.append((worker, story(q, worker)))
        for _, story in fleet:
            next(story)
        assert q.violations() == []
        at = q.clock.now()
        migrate(empty_dsn)
        db.execute("drop table public.test_clock")
        q.clock = Clock.install(db)
        q.clock.set(at)
        for row in q.sql("select viewname from pg_views where schemaname = 'gangq'"):
            q.sql(f"select * from gangq.{row['viewname']}")
        for worker, story in fleet:
            worker.beat()
            assert next(story, "told") == "told"
            assert q.violations() == []
        assert q.events("tick_error") == []
        assert not [replay for replay in client.replay() if "cannot be read" in (replay.difference or "")]

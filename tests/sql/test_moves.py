"""What runs on a drained host moves away as a whole once it fits elsewhere, uncharged, to places kept for it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sql.drive import PLACED, Q, ack_all, gpus


def drain(q: Q, name: str, kind: str = "host") -> None:
    q.sql(
        "insert into gangq.cordons (kind, name, drain, since, reason, operator) "
        "values (%(kind)s, %(name)s, true, gangq.now(), 'new disks', 'ops')",
        kind=kind,
        name=name,
    )


@pytest.mark.parametrize("kind", ["host", "worker"])
def test_a_gang_moves_when_there_is_room_elsewhere(q: Q, kind: str) -> None:
    """Its own place on the host that stays counts as free for it."""
    one, two = (
        q.worker("w1", devices=gpus(80000, prefix="a")),
        q.worker("w2", devices=gpus(80000, prefix="b")),
    )
    gang = q.submit_gang(2, gpus=1)
    claims = gang.start(one, two)
    drain(q, "host-w1" if kind == "host" else "w1", kind)
    q.tick()
    assert gang.state == "running", "there is no room for it"
    three = q.worker("w3", devices=gpus(80000, prefix="c"))
    other = q.submit_gang(1, gpus=1, priority=-1)
    q.tick()
    assert other.state == "reserved", "who waits comes first"
    other.claimed_by(three)[0].complete()
    q.tick()
    assert gang.state == "draining"
    (event,) = q.events("move")
    assert event["gang_id"] == gang.id
    assert event["reason"] == f"{kind} {'host-w1' if kind == 'host' else 'w1'} is drained: new disks"
    assert q.submit_gang(1, gpus=1, priority=9).state == "blocked"
    q.tick()
    ack_all(claims)
    q.tick()
    assert gang.state == "reserved"
    assert sorted(gang.placed_on) == ["w2", "w3"]
    members = q.sql("select attempts, stops from gangq.live_jobs where gang_id = %(id)s", id=gang.id)
    assert members == [{"attempts": 0, "stops": 0}] * 2, "nobody is charged"
    assert gang.live["preemptions"] == 0


def test_what_cannot_be_displaced_by_others_is_moved_all_the_same(q: Q) -> None:
    one = q.worker("w1")
    gang = q.submit_gang(1)
    gang.start(one)
    q.sql("update gangq.live_gangs set preemptible = false")
    q.worker("w2")
    drain(q, "host-w1")
    q.tick()
    assert gang.state == "draining"


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_reserved_gang_goes_elsewhere_before_it_begins_and_begins_where_there_is_no_other_place(
    q: Q, claimed: int
) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    q.tick()
    claims = [worker.take() for worker in workers[:claimed]]
    drain(q, "host-w2")
    q.settle()
    assert gang.state == "reserved"
    workers += [q.worker("w3")]
    q.tick()
    assert gang.live["go_at"] is None
    assert len(q.events("move", gang_id=gang.id)) == 1
    ack_all(claims)
    q.tick()
    assert (gang.state, sorted(gang.placed_on)) == ("reserved", ["w1", "w3"])
    members = q.sql("select attempts, stops from gangq.live_jobs where gang_id = %(id)s", id=gang.id)
    assert members == [{"attempts": 0, "stops": 0}] * 2
    drain(q, "host-w3")
    assert len(gang.claimed_by(*workers)) == 2, "there is no third place: it runs there"


def test_a_gang_of_which_a_member_is_done_is_not_moved(q: Q) -> None:
    workers = q.workers(2)
    gang = q.submit_gang(2)
    claims = gang.start(*workers)
    on = {claim.incarnation: claim for claim in claims}
    on[workers[1].incarnation].complete()
    q.worker("w3")
    q.worker("w4")
    drain(q, "host-w1")
    q.tick()
    assert gang.state == "running", "it could not run again"


@pytest.mark.parametrize("paused", ["batch", "batch.nightly"])
def test_what_belongs_to_a_paused_queue_runs_on_until_the_deadline(q: Q, paused: str) -> None:
    """It could not start elsewhere."""
    q.call("set_queue", name="batch.nightly")
    one = q.worker("w1", queues=["batch.nightly"], slots=2)
    gang = q.submit_gang(1, queue="batch.nightly")
    gang.start(one)
    job = q.submit(queue="batch.nightly")
    one.take()
    q.call("set_queue", name=paused, paused=True)
    two = q.worker("w2", queues=["batch.nightly"], slots=2)
    q.call("cordon", host="host-w1", drain=True, deadline=q.clock.now() + timedelta(seconds=60))
    q.live_on(50, one, two)
    assert (gang.state, q.state(job), q.events("move")) == ("running", "running", [])
    q.live_on(20, one, two)
    assert (gang.state, q.state(job)) == ("draining", "preempting")


def test_a_solo_job_moves_when_another_worker_has_room(q: Q) -> None:
    one = q.worker("w1", devices=gpus(80000, prefix="a"))
    job = q.submit(gpus=1)
    claim = one.take()
    drain(q, "host-w1")
    q.tick()
    assert q.state(job) == "running"
    two = q.worker("w2", devices=gpus(80000, prefix="b"))
    q.tick()
    assert q.state(job) == "preempting"
    assert claim.ack() == "pending"
    assert two.take().job_id == job
    assert q.job(job)["attempts"] == 1


@pytest.mark.parametrize("short_of", ["devices", "slots"])
def test_no_more_jobs_are_moved_than_there_is_room_for(q: Q, short_of: str) -> None:
    one = q.worker("w1", slots=3, devices=gpus(*[80000] * 3, prefix="a"))
    jobs = q.submit(count=3, **({"gpus": 1} if short_of == "devices" else PLACED))
    assert len(one.claim()) == 3
    many, few = (3, 2) if short_of == "devices" else (2, 3)
    q.worker("w2", slots=many, devices=gpus(*[80000] * few, prefix="b"))
    drain(q, "host-w1")
    q.tick_once()
    assert sorted(q.state(job) for job in jobs) == ["preempting", "preempting", "running"]


def test_nothing_new_is_placed_on_a_drained_host(q: Q) -> None:
    q.worker("w1")
    drain(q, "host-w1")
    gang = q.submit_gang(1)
    q.tick()
    assert gang.state == "blocked"


def test_who_is_to_be_moved_respects_a_planned_start(q: Q) -> None:
    one, two = q.worker("w1"), q.worker("w2")
    gang = q.submit_gang(1, budget_s=10000)
    gang.start(one)
    busy = q.submit_gang(1, budget_s=60)
    busy.start(two)
    first = q.submit_gang(2, priority=9)
    q.sql("update gangq.queues_table set preempts = false")
    three = q.worker("w3")
    q.tick()
    assert q.sql("select ask from gangq.plans") == [{"ask": f"g{first.id}"}], "w2 and w3, in a minute"
    drain(q, "host-w1")
    q.tick()
    assert gang.state == "running"
    assert three.claim() == []

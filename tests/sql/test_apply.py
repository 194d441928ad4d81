"""apply: whoever decides may decide badly and never unlawfully. Every false decision is sent as a worker would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sql.drive import INVALID, TOO_LARGE, Claim, Gang, Q, Row, Worker, gpus, place, refused


def seats(*workers: Worker, devices: list[list[int]] | None = None, role: int = 0) -> list[Row]:
    """A seat on each of these workers."""
    each = devices or [[] for _ in workers]
    return [
        {"worker": worker.incarnation, "devices": held, "role": role}
        for worker, held in zip(workers, each, strict=True)
    ]


def start(gang: Gang, *workers: Worker, devices: list[list[int]] | None = None) -> Row:
    return {"ask": f"g{gang.id}", "action": "start", "seats": seats(*workers, devices=devices)}


def stop(gang: Gang, units: list[str], *workers: Worker) -> Row:
    return {"ask": f"g{gang.id}", "action": "stop", "stop": units, "planned": seats(*workers)}


def passes(q: Q) -> int:
    return int(q.value("select runs from gangq.lock_rows where name = 'pass'"))


def apply(q: Q, *decisions: Any, **named: Any) -> Row:
    """Send these decisions with no more than a worker's rights."""
    named.setdefault("pass", passes(q))
    q.sql("set role gangq_worker")
    try:
        row: Row = q.one("apply", decisions=list(decisions), **named)
    finally:
        q.sql("reset role")
    return row


def outcome(q: Q, decision: Row) -> str:
    """What came of one decision."""
    row = apply(q, decision)
    assert row["accepted"]
    return str(row["outcomes"][decision["ask"]])


def devices_of(q: Q, *workers: Worker) -> list[int]:
    return [
        row["id"]
        for worker in workers
        for row in q.sql(
            "select id from gangq.device_registry where offered_by = %(w)s order by id", w=worker.incarnation
        )
    ]


def running(q: Q, worker: Worker, *others: Worker, **options: Any) -> tuple[Gang, list[Claim]]:
    """A gang of one that has run for long enough to be told to stop, while these workers are heard too."""
    gang = q.submit_gang(1, **options)
    assert outcome(q, start(gang, worker)) == "done"
    claims = gang.claimed_by(worker)
    q.beyond_min_run(worker, *others)
    return gang, claims


# Starts -----------------------------------------------------------------------------------------------------


def test_a_start_that_is_lawful_is_done(q: Q) -> None:
    one, two = (q.worker(f"w{n}", devices=gpus(80, 80, prefix=f"w{n}-")) for n in (1, 2))
    gang = q.submit_gang(2, gpus=2)
    held = devices_of(q, two), devices_of(q, one)
    assert outcome(q, start(gang, two, one, devices=[*held])) == "done"
    assert gang.placed_on == ["w2", "w1"]
    rows = q.sql(
        "select job_id, array_agg(device_id order by device_id) as held from gangq.device_holds group by 1"
    )
    assert {row["job_id"]: row["held"] for row in rows} == dict(zip(gang.job_ids, held, strict=True))
    assert q.violations() == []


def no_such_worker(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    two.retire()
    return start(gang, one, two)


def a_cordoned_worker(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    q.call("cordon", worker="w2", reason="a fan")
    return start(gang, one, two)


def a_silent_worker(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    q.live_on(100, one, tick=False)
    return start(gang, one, two)


def one_slot_twice(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    return start(gang, one, one)


def too_few(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    return start(gang, one)


def too_many(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    return start(gang, one, two, two)


def another_role(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    return {**start(gang, one, two), "seats": seats(one) + seats(two, role=1)}


def a_paused_queue(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", paused=True)
    return start(gang, one, two)


def above_a_limit(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", maximum={"jobs": 1})
    return start(gang, one, two)


def backing_off(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    q.sql("update gangq.live_gangs set not_before = gangq.now() + interval '1 minute'")
    return start(gang, one, two)


def devices_it_does_not_ask_for(q: Q, gang: Gang, one: Worker, two: Worker) -> Row:
    return start(gang, one, two, devices=[devices_of(q, one)[:1], []])


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (no_such_worker, "busy"),
        (a_cordoned_worker, "busy"),
        (a_silent_worker, "busy"),
        (one_slot_twice, "busy"),
        (too_few, "these 1 members are no epoch"),
        (too_many, "stale"),
        (another_role, "stale"),
        (a_paused_queue, "its queue is paused"),
        (above_a_limit, "does not fit the limits"),
        (backing_off, "stale"),
        (devices_it_does_not_ask_for, "busy"),
    ],
)
def test_a_false_start_places_nobody(q: Q, false: Callable[[Q, Gang, Worker, Worker], Row], why: str) -> None:
    one, two = (q.worker(f"w{n}", devices=gpus(80, 80, prefix=f"w{n}-"), slots=1) for n in (1, 2))
    gang = q.submit_gang(2)
    assert why in outcome(q, false(q, gang, one, two))
    assert (gang.state, gang.row["epoch"]) == ("blocked", 0)
    assert q.sql("select 1 from gangq.device_holds") == []
    assert q.violations() == []


@pytest.mark.parametrize(
    "needs", [{"queue": "lab"}, {"labels": {"gpu": "h100"}}, {"memory_mb": 50}, {"cpus": 1}], ids=str
)
def test_no_member_starts_where_it_is_not_served_or_has_no_room(q: Q, needs: Row) -> None:
    q.call("set_queue", name="lab")
    one = q.worker("w1", queues=["lab", "default"], slots=2, memory_mb=100, cpus=2, labels={"gpu": "h100"})
    two = q.worker("w2", slots=2, memory_mb=99, cpus=1.9)
    gang = q.submit_gang(2, **needs)
    assert outcome(q, start(gang, two, two)) == "busy"
    assert gang.state == "blocked"
    assert outcome(q, start(gang, one, one)) == "done"


def test_no_two_members_get_one_device(q: Q) -> None:
    one = q.worker(devices=gpus(80, 80), slots=2)
    first, second = devices_of(q, one)
    gang = q.submit_gang(2, gpus=1)
    assert outcome(q, start(gang, one, one, devices=[[first], [first]])) == "busy"
    assert outcome(q, start(gang, one, one, devices=[[first], [second]])) == "done"


@pytest.mark.parametrize("held", ["another's", "held", "too small", "twice", "too few", "avoided", "unknown"])
def test_devices_that_it_may_not_have_are_not_given(q: Q, held: str) -> None:
    one = q.worker("w1", devices=gpus(80, 80, 80, 10, prefix="a"), slots=4)
    two = q.worker("w2", devices=gpus(80, prefix="b"), slots=4)
    first, second, third, small = devices_of(q, one)
    if held == "held":
        assert outcome(q, start(q.submit_gang(1, gpus=1), one, devices=[[second]])) == "done"
    gang = q.submit_gang(1, gpus=2, vram_mb=40)
    if held == "avoided":
        q.sql("update gangq.shapes set avoid = array[%(d)s::bigint] where gpus = 2", d=second)
    given = {
        "another's": [first, *devices_of(q, two)],
        "held": [first, second],
        "too small": [first, small],
        "twice": [first, first],
        "too few": [first],
        "avoided": [first, second],
        "unknown": [first, 10**9],
    }[held]
    assert outcome(q, start(gang, one, devices=[given])) == "busy"
    assert gang.state == "blocked"
    assert outcome(q, start(gang, one, devices=[[first, third]])) == "done"


def test_a_required_domain_is_kept_whoever_decides(q: Q) -> None:
    q.call("configure", topology=["rack", "host"])
    a, b, c = (q.worker(name, labels={"rack": name[0]} if name != "c" else {}) for name in ("a1", "b1", "c"))
    a2, d = q.worker("a2", labels={"rack": "a"}), q.worker("d")
    gang = q.submit_gang(2, require="rack")
    assert outcome(q, start(gang, a, b)) == "its members would not share one rack"
    assert outcome(q, start(gang, a, c)) == "its members would not share one rack"
    assert outcome(q, start(gang, c, d)) == "its members would not share one rack", "they are in none"
    assert outcome(q, start(gang, a, a2)) == "done"


def test_a_gang_is_not_kept_apart_from_itself(q: Q) -> None:
    one = q.worker(slots=2)
    gang = q.submit_gang(2, apart="pair", failure_policy="restart_member")
    assert outcome(q, start(gang, one, one)) == "done"
    first, last = gang.claimed_by(one)
    last.fail()
    q.later(60)
    one.beat(first)
    assert outcome(q, start(gang, one)) == "done"


def test_gangs_that_are_to_be_apart_are_never_on_one_host(q: Q) -> None:
    one, two = q.worker("w1", slots=4), q.worker("w2", slots=4)
    first, second = (q.submit_gang(1, apart="pair") for _ in range(2))
    assert outcome(q, start(first, one)) == "done"
    assert outcome(q, start(second, one)) == f"gang g{first.id} is on host-w1, and both are pair"
    assert outcome(q, start(second, two)) == "done"


def test_a_start_of_what_runs_already_is_stale(q: Q) -> None:
    one, two = q.workers(2)
    gang = q.submit_gang(1)
    assert outcome(q, start(gang, one)) == "done"
    assert outcome(q, start(gang, two)) == "stale"
    assert gang.placed_on == ["w1"]


def test_decisions_of_one_pass_cannot_spend_the_same_twice(q: Q) -> None:
    worker = q.worker()
    one, two = q.submit_gang(1), q.submit_gang(1)
    row = apply(q, start(one, worker), start(two, worker))
    assert row["outcomes"] == {f"g{one.id}": "done", f"g{two.id}": "busy"}
    assert row["again"]


# Stops ------------------------------------------------------------------------------------------------------


def test_a_stop_that_is_lawful_tells_its_victim_and_keeps_the_place(q: Q) -> None:
    worker = q.worker()
    low, _ = running(q, worker)
    high = q.submit_gang(1, priority=5)
    assert outcome(q, stop(high, [f"g{low.id}"], worker)) == "done"
    assert low.state == "draining"
    assert [(row["ask"], row["incarnation"]) for row in q.planned_seats(kept=True)] == [
        (f"g{high.id}", worker.incarnation)
    ]
    assert q.events("preempt")[0]["data"]["for"] == high.id


def equal_priority(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1), [f"g{low.id}"], worker)


def not_on_its_seats(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], other)


def not_preemptible(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.sql("update gangq.live_gangs set preemptible = false where id = %(id)s", id=low.id)
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def a_queue_that_is_never_displaced(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", preemptible=False)
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def a_queue_that_displaces_nothing(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", preempts=False)
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def too_young(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", min_run_s=10_000)
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def what_leaves_already(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("preempt_gang", gang_id=low.id)
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def stopped_too_often(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.sql("update gangq.live_jobs set stops = (select max_stops from gangq.settings)")
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"], worker)


def nobody_there(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1, priority=5), ["g999999"], worker)


def nobody_at_all(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1, priority=5), [], worker)


def no_list_of_them(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return {name: said for name, said in nobody_at_all(q, low, worker, other).items() if name != "stop"}


def nine_at_once(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"] * 9, worker)


def what_another_queue_is_guaranteed(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", guaranteed={"jobs": 1})
    q.call("set_queue", name="else")
    return stop(q.submit_gang(1, priority=5, queue="else", wait_for_hardware=True), [f"g{low.id}"], worker)


def what_is_guaranteed_when_others_have_left(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    other.beat()
    second, _ = running(q, other, worker)
    q.call("preempt_gang", gang_id=second.id)
    return what_another_queue_is_guaranteed(q, low, worker, other)


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (equal_priority, "has priority 0"),
        (not_on_its_seats, "is on none of the workers chosen"),
        (not_preemptible, "may not be told to stop"),
        (a_queue_that_is_never_displaced, "may not be told to stop"),
        (a_queue_that_displaces_nothing, "queue default displaces nothing"),
        (too_young, "may not be told to stop"),
        (what_leaves_already, "may not be told to stop"),
        (stopped_too_often, "may not be told to stop"),
        (nobody_there, "busy"),
        (nobody_at_all, "0 units would be told to stop"),
        (no_list_of_them, "0 units would be told to stop"),
        (nine_at_once, "9 units would be told to stop, and 4 is the most"),
        (what_another_queue_is_guaranteed, "queue default would keep less than the 1 jobs it is guaranteed"),
        (what_is_guaranteed_when_others_have_left, "would keep less than the 1 jobs it is guaranteed"),
    ],
)
def test_a_false_stop_tells_nobody(q: Q, false: Callable[[Q, Gang, Worker, Worker], Row], why: str) -> None:
    worker, other = q.workers(2)
    low, _ = running(q, worker)
    decision = false(q, low, worker, other)
    before = q.sql("select id, state from gangq.live_jobs order by id")
    assert why in outcome(q, decision)
    assert q.sql("select id, state from gangq.live_jobs order by id") == before
    assert q.sql("select 1 from gangq.plans") == []


def test_what_a_queue_is_guaranteed_may_go_from_one_of_its_children_to_another(q: Q) -> None:
    for name in ("a.x", "a.y"):
        q.call("set_queue", name=name)
    q.call("set_queue", name="a", guaranteed={"jobs": 1})
    worker = q.worker(queues=["a.x", "a.y"])
    low, _ = running(q, worker, queue="a.x")
    assert outcome(q, stop(q.submit_gang(1, priority=5, queue="a.y"), [f"g{low.id}"], worker)) == "done"


def test_a_surplus_member_of_a_gang_that_stops_stops_with_it(q: Q) -> None:
    workers = q.workers(2)
    low, _ = q.running_gang(*workers, min_size=1, failure_policy="shrink")
    q.beyond_min_run(*workers)
    units = [f"g{low.id}", f"j{low.job_ids[1]}"]
    assert outcome(q, stop(q.submit_gang(2, priority=5), units, *workers)) == "done"
    assert low.states == ["preempting", "preempting"]


def test_who_is_owed_its_place_gets_it_from_any_priority_and_only_up_to_the_guarantee(q: Q) -> None:
    q.call("set_queue", name="owed", guaranteed={"jobs": 1})
    one, two, three = q.workers(3, queues=["default", "owed"])
    first, _ = running(q, one, two, three, priority=9)
    second, _ = running(q, two, one, three, priority=9)
    gang = q.submit_gang(1, queue="owed")
    both = q.submit_gang(2, queue="owed")
    assert "has priority 9" in outcome(q, stop(both, [f"g{first.id}", f"g{second.id}"], one, two))
    inside, _ = running(q, three, one, two, queue="owed", priority=9)
    q.call("set_queue", name="owed", guaranteed={"jobs": 2})
    assert "has priority 9" in outcome(q, stop(gang, [f"g{inside.id}"], three)), "it is owed to both"
    assert outcome(q, stop(gang, [f"g{first.id}"], one)) == "done"
    assert (first.state, second.state) == ("draining", "running")


def test_victims_stop_together_or_not_at_all(q: Q) -> None:
    one, two = q.workers(2)
    low, _ = running(q, one, two)
    done, claims = running(q, two, one)
    claims[0].complete()
    high = q.submit_gang(2, priority=5)
    assert outcome(q, stop(high, [f"g{low.id}", f"g{done.id}"], one, two)) != "done"
    assert low.state == "running"


# Plans and moves --------------------------------------------------------------------------------------------


def test_a_plan_keeps_places_and_ends_with_the_first_pass_that_has_another(q: Q) -> None:
    worker = q.worker()
    running(q, worker)
    gang = q.submit_gang(1)
    at = q.clock.now().timestamp() + 500
    plan = {"ask": f"g{gang.id}", "action": "plan", "planned": seats(worker), "starts_at": at}
    assert outcome(q, plan) == "done"
    assert q.value("select extract(epoch from starts_at)::float8 from gangq.plans") == pytest.approx(at)
    assert [row["incarnation"] for row in q.planned_seats()] == [worker.incarnation]
    apply(q, {"ask": f"g{gang.id}", "action": "wait", "refused": {"gate": "room", "need": 1, "have": 0}})
    assert q.sql("select 1 from gangq.plans") == []


def test_what_runs_gets_no_planned_start(q: Q) -> None:
    worker, other = q.workers(2)
    gang, _ = running(q, worker, other)
    at = q.clock.now().timestamp() + 500
    plan = {"ask": f"g{gang.id}", "action": "plan", "planned": seats(other), "starts_at": at}
    assert outcome(q, plan) == "stale"
    assert q.sql("select 1 from gangq.plans") == []


def test_nothing_is_moved_off_what_is_not_drained(q: Q) -> None:
    one, two = q.workers(2)
    gang, _ = running(q, one)
    move = {"ask": f"g{gang.id}", "action": "move", "stop": [f"g{gang.id}"], "planned": seats(two)}
    assert outcome(q, move) == "stale"
    assert gang.state == "running"
    q.call("cordon", worker="w1", drain=True, reason="a fan")
    assert outcome(q, move) == "done"
    assert gang.state == "draining"


# Single jobs ------------------------------------------------------------------------------------------------


def kind_of(q: Q, job_id: int) -> str:
    """The single jobs that this one is of, as decisions name them."""
    row = q.sql("select shape_id, priority from gangq.live_jobs where id = %(id)s", id=job_id)[0]
    return f"k{row['shape_id']}/{row['priority']}"


def opening(q: Q, job_id: int, *workers: Worker, devices: list[list[int]] | None = None, **seat: Any) -> Row:
    """A place on each of these workers for jobs of the kind of this one."""
    places = [{**place, **seat} for place in seats(*workers, devices=devices)]
    return {"ask": kind_of(q, job_id), "action": "start", "seats": places}


def places(q: Q) -> list[Row]:
    return q.sql("select * from gangq.places order by id")


def filled(worker: Worker) -> list[int]:
    """What a worker finds in its places, without another pass."""
    rows = worker.q.call("claim", incarnation=worker.incarnation, max_jobs=10, lane="placed")
    return [row["job_id"] for row in rows]


def test_a_place_that_is_lawful_is_opened_and_counts_as_its_job_does(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80), slots=3)
    job = q.submit(gpus=1)
    first, second = devices_of(q, worker)
    assert outcome(q, opening(q, job, worker, devices=[[second]])) == "done"
    assert (worker.free["slots"], worker.free["device_ids"]) == (2, [first])
    assert filled(worker) == [job]
    assert (worker.free["slots"], worker.free["device_ids"]) == (2, [first])


def on_no_such_worker(q: Q, job: int, one: Worker, two: Worker) -> Row:
    two.retire()
    return opening(q, job, two, devices=[[]])


def on_a_cordoned_worker(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("cordon", worker="w2", reason="a fan")
    return opening(q, job, two, devices=[devices_of(q, two)[:1]])


def on_a_silent_worker(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.live_on(100, one, tick=False)
    return opening(q, job, two, devices=[devices_of(q, two)[:1]])


def on_a_worker_that_does_not_serve_it(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="else")
    three = q.worker("w3", queues=["else"], devices=gpus(80, prefix="w3-"))
    return opening(q, job, three, devices=[devices_of(q, three)])


def on_a_worker_without_a_slot(q: Q, job: int, one: Worker, two: Worker) -> Row:
    assert outcome(q, start(q.submit_gang(2), one, one)) == "done"
    return opening(q, job, one, devices=[devices_of(q, one)[:1]])


def on_a_worker_without_the_memory(q: Q, job: int, one: Worker, two: Worker) -> Row:
    large = q.submit(gpus=1, memory_mb=5000, wait_for_hardware=True)
    return opening(q, large, one, devices=[devices_of(q, one)[:1]])


def on_a_worker_without_the_cpus(q: Q, job: int, one: Worker, two: Worker) -> Row:
    large = q.submit(gpus=1, cpus=9, wait_for_hardware=True)
    return opening(q, large, one, devices=[devices_of(q, one)[:1]])


def in_a_paused_queue(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", paused=True)
    return opening(q, job, one, devices=[devices_of(q, one)[:1]])


def above_a_maximum(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", maximum={"gpus": 0})
    return opening(q, job, one, devices=[devices_of(q, one)[:1]])


def of_no_submitter_where_they_are_told_apart(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", submitter_maximum={"jobs": 0})
    return opening(q, job, one, devices=[devices_of(q, one)[:1]])


def above_a_submitters_limit(q: Q, job: int, one: Worker, two: Worker) -> Row:
    q.call("set_queue", name="default", submitter_maximum={"jobs": 0})
    q.call("part_submitters")
    return opening(q, job, one, devices=[devices_of(q, one)[:1]])


def with_too_few_devices(q: Q, job: int, one: Worker, two: Worker) -> Row:
    return opening(q, job, one)


def with_too_many_devices(q: Q, job: int, one: Worker, two: Worker) -> Row:
    return opening(q, job, one, devices=[devices_of(q, one)[:2]])


def with_a_device_of_another_worker(q: Q, job: int, one: Worker, two: Worker) -> Row:
    return opening(q, job, one, devices=[devices_of(q, two)[:1]])


def with_a_device_that_there_is_not(q: Q, job: int, one: Worker, two: Worker) -> Row:
    return opening(q, job, one, devices=[[10**9]])


def with_a_device_that_is_too_small(q: Q, job: int, one: Worker, two: Worker) -> Row:
    return opening(q, job, one, devices=[devices_of(q, one)[2:]])


def with_a_device_to_be_avoided(q: Q, job: int, one: Worker, two: Worker) -> Row:
    first = devices_of(q, one)[0]
    q.sql("update gangq.shapes set avoid = array[%(d)s::bigint] where gpus = 1", d=first)
    return opening(q, job, one, devices=[[first]])


def with_a_device_that_is_held(q: Q, job: int, one: Worker, two: Worker) -> Row:
    first = devices_of(q, one)[0]
    gang = q.submit_gang(1, gpus=1)
    assert outcome(q, start(gang, one, devices=[[first]])) == "done"
    return opening(q, job, one, devices=[[first]])


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (on_no_such_worker, "the worker takes nothing now"),
        (on_a_cordoned_worker, "the worker takes nothing now"),
        (on_a_silent_worker, "the worker takes nothing now"),
        (on_a_worker_that_does_not_serve_it, "the worker does not serve it"),
        (on_a_worker_without_a_slot, "no room"),
        (on_a_worker_without_the_memory, "no room"),
        (on_a_worker_without_the_cpus, "no room"),
        (in_a_paused_queue, "its queue is paused"),
        (above_a_maximum, "queue default uses 0 gpus of at most 0"),
        (of_no_submitter_where_they_are_told_apart, "its queue tells submitters apart"),
        (above_a_submitters_limit, "of at most 0"),
        (with_too_few_devices, "its devices are not free"),
        (with_too_many_devices, "its devices are not free"),
        (with_a_device_of_another_worker, "its devices are not free"),
        (with_a_device_that_there_is_not, "its devices are not free"),
        (with_a_device_that_is_too_small, "its devices are not free"),
        (with_a_device_to_be_avoided, "its devices are not free"),
        (with_a_device_that_is_held, "its devices are not free"),
    ],
)
def test_a_place_that_is_false_is_not_opened(
    q: Q, false: Callable[[Q, int, Worker, Worker], Row], why: str
) -> None:
    one, two = (
        q.worker(f"w{n}", devices=gpus(80, 80, 10, prefix=f"w{n}-"), slots=2, memory_mb=1000, cpus=4)
        for n in (1, 2)
    )
    job = q.submit(gpus=1, vram_mb=40, memory_mb=100, cpus=1)
    assert why in outcome(q, false(q, job, one, two))
    assert places(q) == q.sql("select 1 from gangq.device_holds where kind = 'place'") == []
    assert job not in filled(one)
    assert q.state(job) == "pending"
    assert q.violations() == []


def test_a_device_is_given_to_one_place_of_a_pass_and_the_other_seats_are_opened(q: Q) -> None:
    one, two = (q.worker(f"w{n}", devices=gpus(80, prefix=f"w{n}-"), slots=4) for n in (1, 2))
    jobs = q.submit(count=3, gpus=1)
    (first,), (second,) = devices_of(q, one), devices_of(q, two)
    decision = opening(q, jobs[0], one, one, two, devices=[[first], [first], [second]])
    assert outcome(q, decision) == "its devices are not free"
    assert [place["device_ids"] for place in places(q)] == [[first], [second]]


def test_places_of_one_pass_cannot_pass_a_limit_together(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80, 80), slots=3)
    q.call("set_queue", name="default", maximum={"gpus": 2})
    jobs = q.submit(count=3, gpus=1)
    decision = opening(q, jobs[0], *[worker] * 3, devices=[[d] for d in devices_of(q, worker)])
    assert outcome(q, decision) == "queue default uses 2 gpus of at most 2"
    assert len(places(q)) == 2


def test_a_worker_that_another_session_holds_gets_no_place(q: Q, dsn: str) -> None:
    worker = q.worker(devices=gpus(80))
    job = q.submit(gpus=1)
    decision = opening(q, job, worker, devices=[devices_of(q, worker)])
    with q.connected(dsn) as other, other.db.transaction():
        other.sql(
            "select 1 from gangq.incarnations where id = %(id)s for no key update", id=worker.incarnation
        )
        assert outcome(q, decision) == "busy"
        assert places(q) == []
    assert outcome(q, decision) == "done"


def opened(q: Q, worker: Worker, *jobs: int) -> list[int]:
    """The numbers of the places that are opened for these jobs on the first devices of a worker."""
    for job, device in zip(jobs, devices_of(q, worker), strict=False):
        assert outcome(q, opening(q, job, worker, devices=[[device]], refills=True)) == "done"
    return [place["id"] for place in places(q)]


def test_a_place_that_somebody_sits_in_is_not_renewed_as_if_it_were_vacant(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80), slots=2)
    jobs = q.submit(count=2, gpus=1)
    (number,) = opened(q, worker, jobs[0])
    assert filled(worker) == [jobs[0]]
    (before,) = places(q)
    q.later(1)
    decision = opening(q, jobs[1], worker, devices=[before["device_ids"]], place=number, min_priority=7)
    outcome(q, decision)
    assert places(q) == [before]
    assert q.state(jobs[1]) == "pending"


def test_a_place_is_renewed_for_its_own_kind_alone(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80), slots=2)
    mine, other = q.submit(gpus=1), q.submit(gpus=1, task="another")
    (number,) = opened(q, worker, mine)
    (before,) = places(q)
    q.later(1)
    outcome(q, opening(q, other, worker, devices=[before["device_ids"]], place=number, min_priority=7))
    assert places(q) == [before]
    assert outcome(q, opening(q, mine, worker, devices=[before["device_ids"]], place=number)) == "done"
    assert places(q)[0]["until"] > before["until"]
    assert filled(worker) == [mine]


def test_no_kind_refills_the_place_of_another(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80), slots=2)
    mine, _, other = q.submit(gpus=1), q.submit(gpus=1), q.submit(gpus=1, task="another")
    gang = q.submit_gang(1, wait_for_hardware=True)
    (number,) = opened(q, worker, mine)
    assert filled(worker) == [mine]
    (before,) = places(q)
    q.later(8)
    refills = [{"place": number, "min_priority": -1000}]
    for ask in (kind_of(q, other), f"g{gang.id}"):
        apply(q, {"ask": ask, "action": "wait", "refills": refills})
        assert places(q) == [before]
    apply(q, {"ask": kind_of(q, other - 1), "action": "wait", "refills": refills})
    assert places(q)[0]["until"] > before["until"]


def test_closing_a_place_takes_nothing_from_who_sits_there(q: Q) -> None:
    worker = q.worker(devices=gpus(80, 80), slots=2)
    first, second = q.submit(count=2, gpus=1)
    opened(q, worker, first, second)
    (row,) = q.call("claim", incarnation=worker.incarnation, max_jobs=1)
    apply(q, closes=[place["id"] for place in places(q)] + [10**9])
    assert places(q) == []
    assert q.sql("select job_id from gangq.device_holds") == [{"job_id": first}]
    assert (worker.free["slots"], len(worker.free["device_ids"])) == (1, 1)
    assert Claim(q, row, worker.incarnation).complete() == "done"
    assert (worker.free["slots"], len(worker.free["device_ids"])) == (2, 2)


def test_a_place_is_closed_and_a_gang_seated_there_in_one_call(q: Q) -> None:
    worker = q.worker(devices=gpus(80))
    job, gang = q.submit(gpus=1), q.submit_gang(1, gpus=1)
    (number,) = opened(q, worker, job)
    there = start(gang, worker, devices=[devices_of(q, worker)])
    assert outcome(q, there) == "busy", "the place has it"
    assert apply(q, there, closes=[number])["outcomes"] == {f"g{gang.id}": "done"}
    assert (places(q), gang.state, filled(worker)) == ([], "reserved", [gang.job_ids[0]])


def test_a_place_for_a_light_job_leaves_a_sound_state(q: Q) -> None:
    worker = q.worker(slots=2)
    job = q.submit()
    assert outcome(q, opening(q, job, worker)) == "done"
    q.submit_gang(2)
    q.place()
    assert q.state(job) == "pending"
    assert [claim.job_id for claim in worker.claim(lane="light")] == [job]


def stopping(
    q: Q, job: int, units: list[str], *workers: Worker, devices: list[list[int]] | None = None
) -> Row:
    planned = seats(*workers, devices=devices)
    return {"ask": kind_of(q, job), "action": "stop", "stop": units, "planned": planned}


def test_a_stop_for_a_single_job_tells_its_victim_and_keeps_the_place(q: Q) -> None:
    worker = q.worker(devices=gpus(80))
    held = devices_of(q, worker)
    low = q.submit_gang(1, gpus=1)
    claims = low.start(worker)
    q.beyond_min_run(worker)
    high = q.submit(gpus=1, priority=5)
    ask = kind_of(q, high)
    assert outcome(q, stopping(q, high, [f"g{low.id}"], worker, devices=[held])) == "done"
    assert low.state == "draining"
    assert [(row["ask"], row["devices"]) for row in q.planned_seats(kept=True)] == [(ask, held)]
    (event,) = q.events("preempt")
    assert (event["data"]["for_job"], event["reason"]) == (high, "displaced by a single job of priority 5")
    claims[0].ack()
    q.place()
    assert filled(worker) == [high]


def for_one_of_equal_priority(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stopping(q, q.submit(cpus=1), [f"g{low.id}"], worker)


def for_one_that_is_not_there(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    job = q.submit(cpus=1)
    shape = kind_of(q, job).partition("/")[0]
    return {**stopping(q, job, [f"g{low.id}"], worker), "ask": f"{shape}/5"}


def one_that_is_not_on_its_seat(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stopping(q, q.submit(cpus=1, priority=5), [f"g{low.id}"], other)


def one_that_may_not_be_displaced(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.sql("update gangq.live_gangs set preemptible = false where id = %(id)s", id=low.id)
    return stopping(q, q.submit(cpus=1, priority=5), [f"g{low.id}"], worker)


def one_from_a_queue_that_displaces_nothing(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", preempts=False)
    return stopping(q, q.submit(cpus=1, priority=5), [f"g{low.id}"], worker)


def one_that_has_just_begun(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", min_run_s=10_000)
    return stopping(q, q.submit(cpus=1, priority=5), [f"g{low.id}"], worker)


def what_waits_itself(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    waiting = q.submit()
    return stopping(q, q.submit(cpus=1, priority=5), [f"j{waiting}"], worker)


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (for_one_of_equal_priority, "has priority 0, and a single job of priority 0 has 0"),
        (for_one_that_is_not_there, "stale"),
        (one_that_is_not_on_its_seat, "is on none of the workers chosen"),
        (one_that_may_not_be_displaced, "may not be told to stop"),
        (one_from_a_queue_that_displaces_nothing, "queue default displaces nothing"),
        (one_that_has_just_begun, "may not be told to stop"),
        (what_waits_itself, "may not be told to stop"),
    ],
)
def test_a_false_stop_for_a_single_job_tells_nobody(
    q: Q, false: Callable[[Q, Gang, Worker, Worker], Row], why: str
) -> None:
    worker, other = q.workers(2, cpus=1)
    low, _ = running(q, worker, other)
    decision = false(q, low, worker, other)
    before = q.sql("select id, state from gangq.live_jobs order by id")
    assert why in outcome(q, decision)
    assert q.sql("select id, state from gangq.live_jobs order by id") == before
    assert q.sql("select 1 from gangq.plans") == []


@pytest.mark.parametrize("priority", [0, 5])
def test_a_single_job_is_displaced_only_for_one_of_a_higher_priority(q: Q, priority: int) -> None:
    worker = q.worker(cpus=1)
    low = q.submit(cpus=1)
    claim = worker.take()
    q.beyond_min_run(worker)
    other = q.submit(cpus=1, task="other", priority=priority)
    said = outcome(q, stopping(q, other, [f"j{low}"], worker))
    assert (said == "done", claim.live["state"]) == (priority > 0, "preempting" if priority else "running")


def test_a_planned_start_of_a_single_job_is_noted_and_ends_with_the_next_pass(q: Q) -> None:
    worker = q.worker(cpus=1)
    job = q.submit(cpus=1)
    ask = kind_of(q, job)
    at = q.clock.now().timestamp() + 500
    plan = {"ask": ask, "action": "plan", "planned": seats(worker), "starts_at": at}
    assert outcome(q, plan) == "done"
    assert [(row["ask"], row["millicpus"]) for row in q.planned_seats()] == [(ask, 1000)]
    assert outcome(q, {**plan, "ask": ask.replace("/0", "/9")}) == "stale", "none of that priority waits"
    apply(q, {"ask": ask, "action": "wait"})
    assert q.sql("select 1 from gangq.plans") == []


# Passes -----------------------------------------------------------------------------------------------------


def test_a_decision_from_an_older_board_changes_nothing(q: Q) -> None:
    worker = q.worker()
    gang = q.submit_gang(1)
    old = passes(q)
    apply(q)
    row = apply(q, start(gang, worker), **{"pass": old})
    assert (row["accepted"], row["outcomes"]) == (False, {})
    assert gang.state == "blocked"


def test_parts_of_a_pass_are_taken_until_a_newer_one_begins(q: Q) -> None:
    workers = q.workers(4)
    gangs = [q.submit_gang(1) for _ in workers]
    mine = passes(q)
    for part in (1, 2, 3):
        decision = start(gangs[part - 1], workers[part - 1])
        assert apply(q, decision, part=part, last=part == 3, **{"pass": mine})["accepted"]
    apply(q)
    assert not apply(q, start(gangs[3], workers[3]), part=4, **{"pass": mine})["accepted"]
    assert [gang.state for gang in gangs] == ["reserved", "reserved", "reserved", "blocked"]


@pytest.mark.parametrize("part", [1, 2])
def test_a_part_that_is_sent_again_after_a_lost_reply_changes_nothing(q: Q, part: int) -> None:
    worker = q.worker(slots=4, memory_mb=40)
    jobs = q.submit(count=4, memory_mb=10)
    mine = passes(q)
    if part == 2:
        assert apply(q, last=False, **{"pass": mine})["accepted"]
    twice = [
        apply(q, opening(q, jobs[0], worker), part=part, last=False, **{"pass": mine})["accepted"]
        for _ in range(2)
    ]
    assert (twice, len(places(q))) == ([True, False], 1)
    assert apply(q, opening(q, jobs[0], worker), part=part + 1, **{"pass": mine})["accepted"]


def test_a_part_that_leaves_one_out_is_not_taken(q: Q) -> None:
    mine = passes(q)
    assert not apply(q, part=2, **{"pass": mine})["accepted"]
    assert apply(q, part=1, last=False, **{"pass": mine})["accepted"]
    assert not apply(q, part=3, **{"pass": mine})["accepted"]


def test_one_wrong_decision_does_not_keep_the_others_from_being_carried_out(q: Q) -> None:
    one, two = q.workers(2)
    wrong, right = q.submit_gang(1), q.submit_gang(1)
    row = apply(q, {**start(wrong, one), "seats": [{"worker": 1, "devices": ["x"]}]}, start(right, two))
    assert row["outcomes"][f"g{right.id}"] == "done"
    assert (wrong.state, right.state) == ("blocked", "reserved")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"action": "start", "seats": [{"worker": "none", "devices": []}]},
        {"action": "start", "refills": [{"place": "none"}]},
        {"action": "wait", "refused": {"gate": "queue_limit", "limit": "none", "have": 1}},
    ],
)
def test_a_decision_that_cannot_be_read_refuses_its_part_and_says_so(q: Q, nonsense: Row) -> None:
    one = q.worker()
    wrong, right = q.submit_gang(1), q.submit_gang(1)
    with refused(INVALID, "a decision cannot be read"):
        apply(q, start(right, one), {"ask": f"g{wrong.id}", **nonsense})
    assert right.state == "blocked"
    assert apply(q, start(right, one))["outcomes"] == {f"g{right.id}": "done"}


@pytest.mark.parametrize(
    "decisions",
    [{}, "x", [1], [{"ask": "7", "action": "start"}], [{"ask": "g7"}], [{"ask": "j7", "action": "start"}],
     [{"ask": "g7", "action": "stop", "stop": ["x"]}], [{"ask": "g1", "action": "start", "seats": []}] * 51],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_whole(q: Q, decisions: Any) -> None:
    with refused(INVALID):
        q.call("apply", decisions=decisions, **{"pass": passes(q)})


def test_what_is_too_large_is_refused_and_what_is_said_of_a_kind_is_cut(q: Q) -> None:
    gang = q.submit_gang(1)
    wait = {"ask": f"g{gang.id}", "action": "wait", "refused": {"gate": "room", "where": "x" * 100_000}}
    with refused(TOO_LARGE, "the decisions"):
        q.call("apply", decisions=[wait] * 50, **{"pass": passes(q)})
    apply(q, wait)
    assert q.value("select pg_column_size(numbers) from gangq.verdicts") < 10_000


def test_what_is_said_twice_of_one_gang_keeps_no_other_decision_from_being_carried_out(q: Q) -> None:
    one = q.worker()
    first, twice, right = (q.submit_gang(1) for _ in range(3))
    said = [
        {"ask": f"g{gang.id}", "action": "wait", "refused": {"gate": gate}}
        for gang, gate in ((first, "room"), (twice, "quota"), (twice, "paused"))
    ]
    assert apply(q, *said, start(right, one))["outcomes"] == {f"g{right.id}": "done"}
    assert [row["gate"] for row in q.sql("select gate from gangq.verdicts order by ask")] == ["room", "quota"]


@pytest.mark.parametrize("at", ["Infinity", "-Infinity", "NaN"])
def test_no_start_is_planned_for_no_moment(q: Q, at: str) -> None:
    gang = q.submit_gang(1)
    outcome(q, {"ask": f"g{gang.id}", "action": "plan", "planned": [], "starts_at": at})
    assert q.sql("select 1 from gangq.plans") == []


def test_an_unknown_action_is_refused_by_name(q: Q) -> None:
    gang = q.submit_gang(1)
    assert "'dance' is no action" in outcome(q, {"ask": f"g{gang.id}", "action": "dance"})


# Whose turn it is -------------------------------------------------------------------------------------------


def test_one_has_the_turn_until_it_has_seen_all_that_was_asked(q: Q) -> None:
    q.submit_gang(1)
    first, second = q.one("tick", force=True, decides=True), q.one("tick", force=True, decides=True)
    assert (first["decide"], second["decide"]) == (True, False)
    assert apply(q, seen={"asked": 1})["again"], "the second tick came after that board"
    assert not q.one("tick", force=True, decides=True)["decide"], "it goes on"
    assert not apply(q, seen={"asked": 3})["again"]
    assert q.one("tick", force=True, decides=True)["decide"]


def test_whoever_does_not_decide_in_time_loses_the_turn(q: Q) -> None:
    q.submit_gang(1)
    assert q.one("tick", force=True, decides=True)["decide"]
    q.later(1.1)
    assert q.one("tick", force=True, decides=True)["decide"]


def test_a_turn_from_before_the_clock_was_set_back_is_over(q: Q) -> None:
    q.submit_gang(1)
    assert q.one("tick", force=True, decides=True)["decide"]
    q.later(-3600)
    assert q.one("tick", force=True, decides=True)["decide"]


@pytest.mark.parametrize(
    ("role", "decides"), [("gangq_host", False), ("gangq_worker", True), ("gangq_admin", True)]
)
def test_only_who_may_decide_has_the_turn(q: Q, role: str, decides: bool) -> None:
    q.submit_gang(1)
    q.sql(f"set role {role}")
    assert q.one("tick", force=True, decides=True)["decide"] is decides
    q.sql("reset role")


def test_who_cannot_decide_takes_no_turn(q: Q) -> None:
    q.submit_gang(1)
    assert not q.one("tick", force=True)["decide"], "psql, or a library without a decision"
    assert q.one("tick", force=True, decides=True)["decide"]


def test_where_nothing_waits_nobody_has_the_turn(q: Q) -> None:
    q.worker()
    q.submit()
    assert not q.one("tick", force=True, decides=True)["decide"], "a light job waits for no decision"
    q.submit(gpus=1, wait_for_hardware=True)
    assert q.one("tick", force=True, decides=True)["decide"]


def test_a_pass_in_which_every_decision_is_refused_leaves_a_sound_state(q: Q) -> None:
    workers = q.workers(3)
    low, _ = running(q, *workers)
    gangs = [q.submit_gang(2, priority=n) for n in range(3)]
    carry_out = q.decided()
    for worker in workers:
        q.call("cordon", worker=worker.name, reason="a fan")
    q.call("set_queue", name="default", preempts=False)
    carry_out()
    assert [gang.state for gang in (low, *gangs)] == ["running", *["blocked"] * 3]
    assert q.violations() == []
    for worker in workers:
        q.call("uncordon", worker=worker.name)
    assert place(q.db)["placed"] == 1

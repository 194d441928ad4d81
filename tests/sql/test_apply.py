"""apply: whoever decides may decide badly and never unlawfully. Every false decision is sent as a worker would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drive import INVALID, TOO_LARGE, Claim, Gang, Q, Row, Worker, gpus, place, refused


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


def test_gangs_that_are_to_be_apart_are_never_on_one_host(q: Q) -> None:
    one, two = q.worker("w1", slots=4), q.worker("w2", slots=4)
    first, second = (q.submit_gang(1, apart="pair") for _ in range(2))
    assert outcome(q, start(first, one)) == "done"
    assert outcome(q, start(second, one)) == f"gang {first.id} is on host-w1, and both are pair"
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
    assert q.sql("select gang_id, kind from gangq.earmarks") == [{"gang_id": high.id, "kind": "escrow"}]
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


def nine_at_once(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    return stop(q.submit_gang(1, priority=5), [f"g{low.id}"] * 9, worker)


def what_another_queue_is_guaranteed(q: Q, low: Gang, worker: Worker, other: Worker) -> Row:
    q.call("set_queue", name="default", guaranteed={"jobs": 1})
    q.call("set_queue", name="else")
    return stop(q.submit_gang(1, priority=5, queue="else", wait_for_hardware=True), [f"g{low.id}"], worker)


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
        (nine_at_once, "9 units would be told to stop, and 4 is the most"),
        (what_another_queue_is_guaranteed, "queue default would keep less than the 1 jobs it is guaranteed"),
    ],
)
def test_a_false_stop_tells_nobody(q: Q, false: Callable[[Q, Gang, Worker, Worker], Row], why: str) -> None:
    worker, other = q.workers(2)
    low, _ = running(q, worker)
    decision = false(q, low, worker, other)
    before = q.sql("select id, state from gangq.live_jobs order by id")
    assert why in outcome(q, decision)
    assert q.sql("select id, state from gangq.live_jobs order by id") == before
    assert q.sql("select 1 from gangq.earmarks") == []


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
    assert q.value("select count(*) from gangq.earmarks where kind = 'plan'") == 1
    apply(q, {"ask": f"g{gang.id}", "action": "wait", "refused": {"gate": "room", "need": 1, "have": 0}})
    assert q.sql("select 1 from gangq.plans") == q.sql("select 1 from gangq.earmarks") == []


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


def test_one_wrong_decision_does_not_keep_the_others_from_being_carried_out(q: Q) -> None:
    one, two = q.workers(2)
    wrong, right = q.submit_gang(1), q.submit_gang(1)
    nonsense = {**start(wrong, one), "seats": [{"worker": "none", "devices": []}]}
    with refused("22P02"):
        apply(q, nonsense, start(right, two))
    row = apply(q, {**start(wrong, one), "seats": [{"worker": 1, "devices": ["x"]}]}, start(right, two))
    assert row["outcomes"][f"g{right.id}"] == "done"
    assert (wrong.state, right.state) == ("blocked", "reserved")


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
    assert not q.one("tick", force=True, decides=True)["decide"]


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

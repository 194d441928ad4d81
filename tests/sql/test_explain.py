"""Why is it not running: each gate where exactly it is what holds, with its numbers; when; and what would help."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from drive import Q, gpus

Row = dict[str, Any]


def explained(q: Q, **which: int) -> dict[str, Row]:
    """The rows of explain_gang or explain_job by gate; of several of one gate one that holds."""
    (name,) = which
    rows = q.call(f"explain_{name.removesuffix('_id')}", **which)
    assert [row["gate"] for row in rows][-2:] in (["start", "unblock"], [rows[-1]["gate"]])
    return {row["gate"]: row for row in sorted(rows, key=lambda row: row["ok"], reverse=True)}


def holding(gates: dict[str, Row]) -> set[str]:
    return {gate for gate, row in gates.items() if not row["ok"]} - {"state"}


def numbers(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row["numbers"][name] for name in names)


# Every gate, alone ------------------------------------------------------------------------------------------


def test_nothing_holds_a_gang_that_the_next_pass_starts(q: Q) -> None:
    q.worker("a", devices=gpus(100, prefix="A"))
    q.worker("b", devices=gpus(100, prefix="B"))
    gang = q.submit_gang(2, gpus=1)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == set()
    assert numbers(gates["capacity"], "room", "asked", "free_gpus", "asked_gpus") == (2, 2, 2, 2)
    assert gates["start"]["detail"] == "the next pass starts it"


def test_a_running_gang_that_waits_for_a_successor_of_one_member(q: Q) -> None:
    one, two = q.workers(2)
    gang = q.submit_gang(2, failure_policy="restart_member", timeout_s=60)
    gang.start(one, two)
    assert holding(explained(q, gang_id=gang.id)) == set()
    two.report_dead()
    q.live_on(10, one)
    q.call("cordon", worker="w1")
    gates = {row["gate"]: row for row in q.call("explain_gang", gang_id=gang.id)}
    assert holding(gates) == {"missing", "workers"}
    assert gates["missing"]["detail"].startswith(
        "has lacked rank 1 for 10 s; waits for a place; the whole gang"
    )
    assert "0 of 1 worker may take it" in gates["workers"]["detail"]
    q.worker("w3")
    q.tick()
    state, missing = q.call("explain_gang", gang_id=gang.id)
    assert (state["ok"], missing["ok"]) == (True, False)
    assert "has lacked rank 1 for 10 s; reserved, to be claimed within 30 s" in missing["detail"]


def test_a_gang_that_runs_with_fewer_members_says_so(q: Q) -> None:
    gang = q.submit_gang(4, min_size=2)
    gang.start(*q.workers(2))
    assert explained(q, gang_id=gang.id)["state"]["detail"].endswith("epoch 1, with 2 of 4 members")


def test_backing_off(q: Q) -> None:
    q.workers(2)
    gang = q.submit_gang(2)
    q.sql("update gangq.live_gangs set not_before = gangq.now() + interval '90 s', placement_misses = 3")
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"backoff"}
    assert "90 s" in gates["backoff"]["detail"]
    assert "3 reservations not claimed" in gates["backoff"]["detail"]
    assert "90 s more" in gates["unblock"]["detail"]


@pytest.mark.parametrize("paused", ["research", "research.vision"])
def test_a_paused_queue_or_a_paused_ancestor(q: Q, paused: str) -> None:
    q.call("set_queue", name="research.vision")
    q.worker(queues=["research.vision"])
    gang = q.submit_gang(1, queue="research.vision")
    q.call("set_queue", name=paused, paused=True)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"queue"}
    assert gates["queue"]["numbers"]["paused"] == [paused]
    assert gates["unblock"]["detail"] == f"gangq queue resume {paused}"
    q.tick()
    assert q.value("select why from gangq.waiting where kind = 'gang'") == "its queue is paused"


def test_a_draining_queue_works_off_what_waits(q: Q) -> None:
    q.worker()
    gang = q.submit_gang(1)
    q.call("set_queue", name="default", draining=True)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == set()
    assert gates["queue"]["numbers"]["draining"] == ["default"]


@pytest.mark.parametrize(
    ("gate", "limit", "resource", "most", "used", "asked"),
    [
        ("quota", {"maximum": {"gpus": 3}}, "gpus", 3, 2, 2),
        ("running_limit", {"max_running_gangs": 1}, "gangs", 1, 1, 1),
        ("running_limit", {"max_running_jobs": 3}, "jobs", 3, 2, 2),
        ("submitter_limit", {"submitter_maximum": {"gangs": 1}}, "gangs", 1, 1, 1),
    ],
)
def test_a_limit_says_which_queue_limit_used_and_asked(
    q: Q, gate: str, limit: Row, resource: str, most: int, used: int, asked: int
) -> None:
    q.call("set_queue", name="research.vision")
    worker = q.worker(queues=["research.vision"], slots=8, devices=gpus(*[100] * 8))
    q.submit_gang(2, queue="research.vision", gpus=1).start(worker)
    gang = q.submit_gang(2, queue="research.vision", gpus=1)
    assert holding(explained(q, gang_id=gang.id)) == set()
    q.call("set_queue", name="research", **limit)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {gate}
    row = gates[gate]
    assert row["numbers"]["queue"] == "research"
    assert numbers(row, "resource", "limit", "used", "asked") == (resource, most, used, asked)
    assert f"{used + asked - most} {resource} in queue research" in gates["unblock"]["detail"]
    q.tick()
    verdict = q.sql("select gate, why from gangq.waiting where id = %(id)s", id=gang.id)[0]
    assert verdict["gate"] == gate
    assert f"{used} of at most {most} {resource}" in verdict["why"]


def test_a_limit_counts_what_starts_in_the_same_pass(q: Q) -> None:
    q.call("set_queue", name="default", max_running_gangs=1)
    q.workers(2)
    q.submit_gang(1)
    gang = q.submit_gang(1)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"running_limit"}
    assert numbers(gates["running_limit"], "limit", "used", "asked") == (1, 1, 1)


@pytest.mark.parametrize(
    ("fell", "offer", "asked"),
    [
        ("queue", {"queues": ["other"]}, {}),
        ("task", {"tasks": ["render"]}, {}),
        ("labels", {"labels": {"gpu": "a100"}}, {"labels": {"gpu": "h100"}}),
        (
            "selector",
            {"labels": {"zone": "eu"}},
            {"selector": [{"key": "zone", "op": "!=", "values": ["eu"]}]},
        ),
        ("taints", {"taints": ["maintenance"]}, {}),
    ],
)
def test_how_many_workers_fall_to_each_condition(q: Q, fell: str, offer: Row, asked: Row) -> None:
    q.call("set_queue", name="other")
    good: Row = {"labels": {"gpu": "h100"}} if fell == "labels" else {}
    q.worker("bad1", **offer)
    q.worker("bad2", **offer)
    gang = q.submit_gang(1, **asked, wait_for_hardware=True)
    gates = explained(q, gang_id=gang.id)
    assert "workers" in holding(gates)
    assert numbers(gates["workers"], "live", fell, "serving", "open") == (2, 2, 0, 0)
    q.worker("good", **good)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == set()
    assert numbers(gates["workers"], "live", fell, "serving", "open") == (3, 2, 1, 1)
    assert "1 of 3 workers may take it; the others: 2 " in gates["workers"]["detail"]


@pytest.mark.parametrize("barred", ["quarantined", "cordoned", "draining", "passed_over", "silent"])
def test_workers_that_serve_it_and_may_take_nothing(q: Q, barred: str) -> None:
    gang, worker = q.submit_gang(1), q.worker()
    if barred == "quarantined":
        q.call("quarantine", worker="w1")
    elif barred == "cordoned":
        q.call("cordon", host="host-w1")
    elif barred == "draining":
        worker.retire(final=False)
    elif barred == "passed_over":
        q.sql("update gangq.incarnations set passed_over_until = gangq.now() + interval '1 min'")
    else:
        q.later(q.value("select candidate_silence_s from gangq.settings") + 1)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"workers", "capacity"}
    assert numbers(gates["workers"], "serving", "open", barred) == (1, 0, 1)
    assert gates["capacity"]["numbers"]["room"] == 0


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ({"size": 4, "gpus": 2}, {"members": 2, "gpus": 1}),
        ({"size": 3, "gpus": 1, "vram_mb": 200}, {"members": 2, "vram_mb": 100, "gpus": 0}),
        ({"size": 2, "memory_mb": 1500}, {"members": 0, "memory_mb": 1000}),
        ({"size": 4, "cpus": 4}, {"members": 2, "cpus": 2}),
    ],
)
def test_infeasible_ever_with_the_nearest_that_would_fit(q: Q, asked: Row, near: Row) -> None:
    for n in range(2):
        q.worker(f"w{n}", slots=4, memory_mb=1000, cpus=4, devices=gpus(100, 200, prefix=f"W{n}-"))
    gang = q.submit_gang(**asked, wait_for_hardware=True)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"hardware", "capacity"}
    assert gates["hardware"]["numbers"]["feasible"] == near
    assert "would fit with" in gates["hardware"]["detail"]
    assert gates["unblock"]["detail"].startswith(
        f"workers with room for {asked['size'] - near['members']} more"
    )


def test_infeasible_as_it_wants_to_be_placed(q: Q) -> None:
    q.sql("update gangq.settings set topology = '{rack,host}'")
    for n, rack in enumerate("aaabb"):
        q.worker(f"w{n}", labels={"rack": rack})
    gang = q.submit_gang(4, require="rack", wait_for_hardware=True)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"hardware", "fragmentation"}
    assert "the best rack, a, has room for 3 of 4" in gates["hardware"]["detail"]
    assert "room for 1 more member in one rack" in gates["unblock"]["detail"]


@pytest.mark.parametrize(
    ("style", "says"),
    [
        ("hard", "; fails unless it is placed by "),
        ("soft", "; its members run as single jobs unless it is placed by "),
        ("requeue", None),
    ],
)
def test_what_a_gangs_timeout_will_do_to_it_and_when(q: Q, style: str, says: str | None) -> None:
    q.worker()
    gang = q.submit_gang(2, timeout_s=60, timeout_style=style, wait_for_hardware=True)
    at = q.clock.now() + timedelta(seconds=60)

    def told() -> str:
        detail: str = explained(q, gang_id=gang.id)["state"]["detail"]
        return detail.partition("waits to be placed")[2]

    def due(later: float) -> str:
        return (
            says + q.value("select (%(at)s::timestamptz)::text", at=at + timedelta(seconds=later))
            if says
            else ""
        )

    assert told() == due(0)
    q.call("set_queue", name="default", paused=True)
    q.tick()
    q.clock.advance(30)
    assert told() == due(30), "a pause does not count"


def test_too_little_is_free(q: Q) -> None:
    workers = q.workers(3)
    q.submit(count=2)
    for worker in workers[:2]:
        worker.take()
    gang = q.submit_gang(3)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"slots", "capacity"}
    assert numbers(gates["capacity"], "room", "asked") == (1, 3)
    assert "2 free slots more" in gates["unblock"]["detail"]


def test_fragmentation_enough_gpus_in_all_and_none_together(q: Q) -> None:
    workers = [q.worker(f"w{n}", slots=4, devices=gpus(*[100] * 4, prefix=f"W{n}-")) for n in range(2)]
    q.submit(count=2, gpus=2)
    for worker in workers:
        worker.take()
    gang = q.submit_gang(1, gpus=3)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"capacity", "fragmentation"}
    assert numbers(gates["fragmentation"], "free_gpus", "asked_gpus", "room", "asked") == (4, 3, 0, 1)
    assert "4 GPUs free in all, but not together" in gates["fragmentation"]["detail"]


def test_fragmentation_names_the_best_domain(q: Q) -> None:
    q.sql("update gangq.settings set topology = '{rack,host}'")
    workers = [q.worker(f"w{n}", labels={"rack": "ab"[n % 2]}) for n in range(8)]
    q.submit(count=2)
    workers[0].take()
    workers[1].take()
    gang = q.submit_gang(4, require="rack")
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"fragmentation"}
    assert "room for 6 in all, but the best rack, a, has 3 of 4" in gates["fragmentation"]["detail"]
    assert numbers(gates["fragmentation"], "level", "best", "best_room", "asked") == ("rack", "a", 3, 4)
    assert "room for 1 member more in rack a" in gates["unblock"]["detail"]


def test_who_starts_before_it_takes_the_room(q: Q) -> None:
    q.workers(2)
    q.submit_gang(2, priority=3)
    gang = q.submit_gang(1)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"ahead"}
    assert numbers(gates["ahead"], "place", "gangs", "starts", "first") == (2, 1, 1, [1])
    assert "gangq priority 1 g2" in gates["unblock"]["detail"]


def test_kept_for_another_gang_until_its_planned_start(q: Q) -> None:
    workers = q.workers(2)
    q.submit(budget_s=100)
    workers[0].take()
    first = q.submit_gang(2, priority=3)
    q.tick()
    gang = q.submit_gang(1, budget_s=1000)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"kept"}
    until = q.value("select starts_at from gangq.plans")
    assert f"for gang {first.id} until {until.astimezone():%H:%M:%S}" in gates["kept"]["detail"]
    assert "estimate 1000 s" in gates["kept"]["detail"]
    assert f"the start of gang {first.id}" in gates["unblock"]["detail"]
    brief = q.submit_gang(1, budget_s=10)
    assert holding(explained(q, gang_id=brief.id)) == set(), "it ends before"


# When -------------------------------------------------------------------------------------------------------


def test_a_planned_start_says_whose_end_it_waits_for_and_the_basis(q: Q) -> None:
    worker = q.worker(slots=2)
    running = q.submit_gang(2, budget_s=500)
    running.start(worker)
    gang = q.submit_gang(2)
    q.tick()
    start = explained(q, gang_id=gang.id)["start"]
    assert numbers(start, "place", "basis") == (
        1,
        [{"gang_id": running.id, "job_id": None, "basis": "budget of 500 s"}],
    )
    assert 495 <= start["numbers"]["in_s"] <= 500
    assert f"at the end of gang {running.id} (budget of 500 s)" in start["detail"]
    planned = q.value("select starts_at from gangq.plans")
    assert abs(start["numbers"]["in_s"] - (planned - q.clock.now()).total_seconds()) <= 2


def test_an_estimate_rests_on_the_budget_or_on_what_the_task_took(q: Q) -> None:
    worker = q.worker(cpus=4)
    job = q.submit(task="learned", cpus=1, budget_s=1000)
    worker.take()
    gang = q.submit_gang(1)
    start = explained(q, gang_id=gang.id)["start"]
    assert start["numbers"]["basis"] == [{"gang_id": None, "job_id": job, "basis": "budget of 1000 s"}]
    assert 995 <= start["numbers"]["in_s"] <= 1000
    q.sql("insert into gangq.runtimes values ('default', 'learned', 34, 300, gangq.now())")
    start = explained(q, gang_id=gang.id)["start"]
    assert "34 runs of task learned took 300 s" in start["numbers"]["basis"][0]["basis"]
    assert 295 <= start["numbers"]["in_s"] <= 300
    assert f"job {job}" in explained(q, gang_id=gang.id)["unblock"]["detail"]


def test_a_gang_behind_those_with_a_planned_start_says_how_many_come_before_it(q: Q) -> None:
    q.sql("update gangq.settings set reservations = 1")
    worker = q.worker()
    q.submit()
    worker.take()
    gangs = [q.submit_gang(1) for _ in range(3)]
    q.tick()
    gates = explained(q, gang_id=gangs[2].id)
    assert (
        gates["start"]["detail"]
        == "not planned: after 2 gangs before it, of which the first 1 that wait get a planned start"
    )
    assert gates["ahead"]["numbers"]["place"] == 3
    rows = {row["id"]: row for row in q.sql("select * from gangq.waiting where kind = 'gang'")}
    assert [rows[gang.id]["starts_at"] is None for gang in gangs] == [False, True, True]
    assert rows[gangs[0].id]["why"].startswith("place 1 of those with a planned start, in ")
    assert rows[gangs[2].id]["why"] == "waits for capacity"


def test_each_role_has_its_rows(q: Q) -> None:
    q.workers(2)
    q.worker("big", devices=gpus(100), slots=2)
    gang = q.submit_gang(
        None,
        roles=[{"name": "driver", "count": 1}, {"name": "trainer", "count": 2, "gpus": 1}],
        wait_for_hardware=True,
    )
    rows = q.call("explain_gang", gang_id=gang.id)
    roles = {row["numbers"]["role"]: row for row in rows if row["gate"] == "capacity"}
    assert roles["driver"]["ok"]
    assert numbers(roles["trainer"], "room", "asked", "free_gpus", "asked_gpus") == (1, 2, 1, 2)
    (hardware,) = [row for row in rows if row["gate"] == "hardware" and not row["ok"]]
    assert hardware["detail"].startswith("role trainer: ")


def test_explain_writes_nothing_and_a_viewer_may_ask(q: Q) -> None:
    q.worker()
    gang = q.submit_gang(1)
    job = q.submit()
    with q.db.transaction(force_rollback=True):
        q.sql("set transaction read only")
        q.sql("set local role gangq_viewer")
        assert q.call("explain_gang", gang_id=gang.id)
        assert q.call("explain_job", job_id=job)


# Solo jobs --------------------------------------------------------------------------------------------------


def test_nothing_holds_a_job_that_a_worker_has_room_for(q: Q) -> None:
    q.worker()
    gates = explained(q, job_id=q.submit())
    assert holding(gates) == set()
    assert gates["unblock"]["detail"] == "nothing: it is claimable"


def test_a_job_over_its_queues_maximum(q: Q) -> None:
    worker = q.worker(slots=2, devices=gpus(100, 100))
    q.call("set_queue", name="default", maximum={"gpus": 1})
    job = q.submit(count=2, gpus=1)[1]
    worker.take()
    gates = explained(q, job_id=job)
    assert holding(gates) == {"quota"}
    assert numbers(gates["quota"], "limit", "used", "asked") == (1, 1, 1)


def test_a_job_whose_gpus_are_free_but_not_on_one_worker(q: Q) -> None:
    q.worker("a", devices=gpus(100, 100, prefix="A"), slots=2)
    q.worker("b", devices=gpus(100, prefix="B"))
    busy = q.worker("c", devices=gpus(100, 100, 100, prefix="C"), slots=2)
    q.submit(gpus=3)
    busy.take()
    job = q.submit(gpus=3)
    gates = explained(q, job_id=job)
    assert holding(gates) == {"capacity", "fragmentation"}
    assert numbers(gates["fragmentation"], "free_gpus", "asked_gpus", "best") == (3, 3, 2)
    assert gates["unblock"]["detail"] == "1 free GPU more on one worker"


def test_jobs_of_its_kind_before_it_take_the_room(q: Q) -> None:
    q.worker()
    jobs = q.submit(count=3)
    gates = explained(q, job_id=jobs[2])
    assert holding(gates) == {"ahead"}
    assert gates["ahead"]["numbers"] == {"jobs": 2, "place": 3}


def test_a_job_waits_for_what_is_kept_for_a_gang(q: Q) -> None:
    workers = q.workers(2, cpus=4)
    q.submit(cpus=1, budget_s=100)
    workers[0].take()
    first = q.submit_gang(2, priority=3)
    q.tick()
    job = q.submit(budget_s=1000, cpus=1)
    gates = explained(q, job_id=job)
    assert holding(gates) == {"kept"}
    assert gates["kept"]["numbers"]["gangs"][0]["gang_id"] == first.id
    assert "estimate is 1000 s" in gates["kept"]["detail"]
    assert workers[1].claim() == [], "and so it is"


def test_one_session_explains_gangs_on_and_off_the_board_in_any_order(q: Q) -> None:
    q.worker("w1")
    waits = q.submit_gang(2, wait_for_hardware=True)
    later = q.submit_gang(2, wait_for_hardware=True, due_at=q.clock.now() + timedelta(hours=1))
    for gang in (waits, later, waits, later):
        assert q.call("explain_gang", gang_id=gang.id), gang.id

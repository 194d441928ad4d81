"""Why is it not running: what the last pass found, with its numbers and its age; when; and what would help."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from sql.drive import PLACED, Q, gpus

Row = dict[str, Any]


def explained(q: Q, **which: int) -> dict[str, Row]:
    """The rows of explain_gang or explain_job by gate; of several of one gate one that holds."""
    (name,) = which
    rows = q.call(f"explain_{name.removesuffix('_id')}", **which)
    return {row["gate"]: row for row in sorted(rows, key=lambda row: row["ok"], reverse=True)}


def holding(gates: dict[str, Row]) -> set[str]:
    return {gate for gate, row in gates.items() if not row["ok"]} - {"state"}


def numbers(row: Row, *names: str) -> tuple[Any, ...]:
    return tuple(row["numbers"][name] for name in names)


# What the last pass found -----------------------------------------------------------------------------------


def test_the_verdict_says_how_old_it_is_and_that_nobody_has_decided_for_long(q: Q) -> None:
    q.worker(slots=1)
    gang = q.submit_gang(2, wait_for_hardware=True)
    gates = explained(q, gang_id=gang.id)
    assert (gates["verdict"]["detail"], gates["verdict"]["ok"]) == ("no pass has judged it yet", True)
    q.later(11)
    gates = explained(q, gang_id=gang.id)
    assert gates["verdict"]["detail"].startswith("no pass has judged it (nobody has decided yet")
    assert not gates["verdict"]["ok"]
    q.tick()
    q.later(2.4)
    (gate,) = holding(explained(q, gang_id=gang.id)) - {"hardware"}
    assert gate == "infeasible"
    said = explained(q, gang_id=gang.id)[gate]["detail"]
    assert said.endswith("now 1 of its 2 members would fit (decided 2.4 s ago)")
    q.later(60)
    assert "nobody has decided for 1m03s: is a worker" in explained(q, gang_id=gang.id)[gate]["detail"]
    other = q.submit_gang(2, wait_for_hardware=True)
    assert explained(q, gang_id=other.id)[gate]["detail"].startswith("of those of its kind before it: ")


def test_a_verdict_is_written_when_it_changes_and_not_every_pass(q: Q) -> None:
    worker = q.worker(slots=2)
    q.submit_gang(2).start(worker)
    gangs = [q.submit_gang(1 + n % 2, priority=-n % 3) for n in range(9)]
    q.tick()

    def written() -> list[Row]:
        return q.sql(
            "select kind_id, ask, xmin::text, gate, why, unblocks, follows, since from gangq.verdicts order by 1, 2"
        )

    first = written()
    assert len(first) > 2
    for _ in range(3):
        q.later(1)
        worker.beat()
        q.tick()
        assert written() == first
    for gang in gangs:
        gang.cancel()
    q.submit_gang(2)
    q.tick()
    assert len(written()) == 1


def test_single_jobs_have_verdicts_too_once_something_decides_about_them(q: Q) -> None:
    job, other = (q.submit("work", priority=priority, **PLACED) for priority in (5, 0))
    shape = q.value("select distinct shape_id from gangq.live_jobs")
    refused = {"gate": "room", "need": 1, "have": 0, "of": "members"}
    said = [
        {"ask": f"k{shape}/5", "action": "start", "refused": refused, "why": "full", "unblocks": "room"},
        {
            "ask": f"k{shape}/0",
            "action": "wait",
            "refused": {"gate": "apart"},
            "why": "behind",
            "unblocks": "room",
        },
    ]
    q.sql("select gangq.note_verdicts(%(d)s, gangq.now())", d=Jsonb(said))
    rows = q.sql("select kind_id, ask, why from gangq.verdicts order by ask")
    assert [tuple(row.values()) for row in rows] == [(-shape, "", "full"), (-shape, f"k{shape}/0", "behind")]
    gates = explained(q, job_id=job)
    assert gates["room"]["detail"].startswith("of those of its kind before it: full")
    assert gates["unblock"]["detail"] == "room"
    q.worker()
    waits = q.sql("select priority, why, gate from gangq.waiting where kind = 'job' order by priority desc")
    assert [tuple(row.values()) for row in waits] == [(5, "full", "room"), (0, "behind", "apart")]
    q.call("cancel", job_ids=[job, other])
    q.sql("select gangq.forget_old_plans(1, gangq.now())")
    assert q.sql("select * from gangq.verdicts") == []


def test_nothing_holds_a_gang_that_the_next_pass_starts(q: Q) -> None:
    q.worker("a", devices=gpus(100, prefix="A"))
    q.tick()
    gang = q.submit_gang(1, gpus=1)
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) <= {"verdict"}
    assert gates["start"]["detail"] == "the next pass may start it"


def test_what_the_workers_could_not_hold_waits_for_workers_and_for_no_pass(q: Q) -> None:
    asked = {"gang_id": q.submit_gang(2).id}, {"job_id": q.submit(gpus=1)}, {"job_id": q.submit()}

    def unblocks() -> list[str]:
        return [explained(q, **one)["unblock"]["detail"] for one in asked]

    assert unblocks() == ["workers that could hold it: gangq worker"] * 3
    starts = [explained(q, **one)["start"]["detail"] for one in asked[:2]]
    assert starts == ["once workers could hold it"] * 2
    q.call("set_queue", name="other")
    q.worker("elsewhere", queues=["other"])
    assert unblocks() == ["workers that could hold it: gangq worker"] * 3
    q.worker("small")
    assert unblocks()[:2] == ["workers that could hold it: gangq worker"] * 2
    q.worker("here", slots=2, devices=gpus(100))
    assert unblocks() == ["the next pass", "the next pass", "nothing: it is claimable"]


def test_a_running_gang_that_waits_for_a_successor_of_one_member(q: Q) -> None:
    one, two = q.workers(2)
    gang = q.submit_gang(2, failure_policy="restart_member", timeout_s=60)
    gang.start(one, two)
    assert holding(explained(q, gang_id=gang.id)) == set()
    two.report_dead()
    q.live_on(10, one)
    q.call("cordon", worker="w1")
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"missing", "workers"} - set() | (holding(gates) - {"missing", "workers"})
    assert gates["missing"]["detail"].startswith(
        "has lacked rank 1 for 10 s; waits for a place; the whole gang"
    )
    assert "0 of 1 worker may take it; the others: 1 cordoned" in gates["workers"]["detail"]
    (waits,) = q.sql("select id, size, state, since, gate from gangq.waiting")
    assert waits == {
        "id": gang.id,
        "size": 1,
        "state": "running",
        "since": gang.live["missing_since"],
        "gate": "workers",
    }
    q.worker("w3")
    q.tick()
    assert q.sql("select * from gangq.waiting") == []
    state, missing = q.call("explain_gang", gang_id=gang.id)
    assert (state["ok"], missing["ok"]) == (True, False)
    assert "has lacked rank 1 for 10 s; reserved, to be claimed within 30 s" in missing["detail"]


def test_a_gang_that_lacks_a_member_stops_when_explain_says_so_after_a_pause_too(q: Q) -> None:
    one, two = q.workers(2)
    gang = q.submit_gang(2, failure_policy="restart_member", timeout_s=60)
    gang.start(one, two)
    q.call("set_queue", name="default", paused=True)
    two.report_dead()
    q.live_on(180, one)

    def left_s() -> float:
        until = datetime.fromisoformat(explained(q, gang_id=gang.id)["missing"]["numbers"]["until"])
        return (until - q.clock.now()).total_seconds()

    assert 30 < left_s() <= 60
    q.call("set_queue", name="default", paused=False)
    q.live_on(10, one)
    left = left_s()
    assert 20 < left <= 50
    q.live_on(left - 1, one)
    assert gang.state == "running"
    q.live_on(2, one)
    assert gang.state == "draining"


def test_backing_off(q: Q) -> None:
    q.workers(2)
    gang = q.submit_gang(2)
    q.sql("update gangq.live_gangs set not_before = gangq.now() + interval '90 s', placement_misses = 3")
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"backoff"}
    assert "another 1m30s" in gates["backoff"]["detail"]
    assert "3 reservations not claimed" in gates["backoff"]["detail"]
    assert "1m30s more" in gates["unblock"]["detail"]


@pytest.mark.parametrize("paused", ["research", "research.vision"])
def test_a_paused_queue_or_a_paused_ancestor(q: Q, paused: str) -> None:
    q.call("set_queue", name="research.vision")
    q.worker(queues=["research.vision"])
    gang = q.submit_gang(1, queue="research.vision")
    q.call("set_queue", name=paused, paused=True)
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"paused"}
    assert gates["paused"]["detail"].startswith(f"queue {paused} is paused (decided 0.0 s ago)")
    assert gates["unblock"]["detail"] == f"gangq queue resume {paused}"
    assert q.value("select why from gangq.waiting where kind = 'gang'") == f"queue {paused} is paused"


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
    q.call("set_queue", name="research", **limit)
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {gate}
    row = gates[gate]
    assert numbers(row, "where", "of", "limit", "need") == ("research", resource, most, asked)
    assert most - row["numbers"]["have"] == used
    assert "(held by g1)" in row["detail"]
    more = {"gpus": "GPU", "gangs": "gang", "jobs": "job"}[resource]
    assert gates["unblock"]["detail"].startswith(f"{used + asked - most} {more}")
    verdict = q.sql("select gate, why from gangq.waiting where id = %(id)s", id=gang.id)[0]
    assert verdict["gate"] == gate
    assert row["detail"].startswith(verdict["why"])


def test_a_limit_counts_what_starts_in_the_same_pass(q: Q) -> None:
    q.call("set_queue", name="default", max_running_gangs=1)
    q.workers(2)
    q.submit_gang(1)
    gang = q.submit_gang(1)
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"running_limit"}
    assert numbers(gates["running_limit"], "limit", "have", "need") == (1, 0, 1)


# Workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fell", "offer", "asked"),
    [
        ("of other queues", {"queues": ["other"]}, {}),
        ("without task train", {"tasks": ["render"]}, {}),
        ("without labels gpu=h100", {"labels": {"gpu": "a100"}}, {"labels": {"gpu": "h100"}}),
        (
            "outside the selector",
            {"labels": {"zone": "eu"}},
            {"selector": [{"key": "zone", "op": "!=", "values": ["eu"]}]},
        ),
        ("with taints it does not tolerate", {"taints": ["maintenance"]}, {}),
    ],
)
def test_how_many_workers_fall_to_each_condition(q: Q, fell: str, offer: Row, asked: Row) -> None:
    q.call("set_queue", name="other")
    good: Row = {"labels": {"gpu": "h100"}} if "labels" in fell else {}
    q.worker("bad1", **offer)
    q.worker("bad2", **offer)
    gang = q.submit_gang(1, **asked, wait_for_hardware=True)
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"workers", "infeasible", "hardware"}
    assert "no worker serves it: its queue, task, labels" in gates["infeasible"]["detail"]
    assert numbers(gates["workers"], "live", "serving", "open", "others") == (2, 0, 0, {fell: 2})
    taints = "(maintenance: --tolerate maintenance)" if "taints" in fell else ""
    assert gates["workers"]["detail"] == f"0 of 2 workers may take it; the others: 2 {fell} {taints}".rstrip()
    q.worker("good", **good)
    gates = explained(q, gang_id=gang.id)
    assert numbers(gates["workers"], "live", "serving", "open") == (3, 1, 1)
    assert f"1 of 3 workers may take it; the others: 2 {fell}" in gates["workers"]["detail"]


@pytest.mark.parametrize("barred", ["quarantined", "cordoned", "draining", "passed over", "silent"])
def test_workers_that_serve_it_and_may_take_nothing(q: Q, barred: str) -> None:
    gang, worker = q.submit_gang(1), q.worker()
    if barred == "quarantined":
        q.call("quarantine", worker="w1")
    elif barred == "cordoned":
        q.call("cordon", host="host-w1")
    elif barred == "draining":
        worker.retire(final=False)
    elif barred == "passed over":
        q.sql("update gangq.incarnations set passed_over_until = gangq.now() + interval '1 min'")
    else:
        q.later(q.value("select candidate_silence_s from gangq.settings") + 1)
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert numbers(gates["workers"], "serving", "open", "others") == (1, 0, {barred: 1})
    assert "take no new work now: w1" in gates["workers"]["detail"] or gates["workers"]["detail"].startswith(
        "0 of 1 worker may take it"
    )
    assert "gangq uncordon" in gates["unblock"]["detail"]


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
    q.tick()
    gates = explained(q, gang_id=gang.id)
    assert holding(gates) == {"hardware", "infeasible"}
    assert gates["hardware"]["numbers"]["feasible"] == near
    assert "would fit with" in gates["hardware"]["detail"]


def test_each_role_has_its_rows(q: Q) -> None:
    q.workers(2)
    q.worker("big", devices=gpus(100), slots=2)
    roles = [{"name": "driver", "count": 1}, {"name": "trainer", "count": 2, "gpus": 1}]
    gang = q.submit_gang(None, roles=roles, wait_for_hardware=True)
    rows = q.call("explain_gang", gang_id=gang.id)
    said = {row["numbers"]["role"]: row for row in rows if row["gate"] == "workers"}
    assert said["driver"]["detail"].startswith("role driver: 3 of 3 workers may take it")
    (hardware,) = [row for row in rows if row["gate"] == "hardware" and not row["ok"]]
    assert hardware["detail"].startswith("role trainer: ")


# When -------------------------------------------------------------------------------------------------------


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


def test_a_planned_start_says_whose_end_it_waits_for_and_the_basis(q: Q) -> None:
    worker = q.worker(slots=2)
    running = q.submit_gang(2, budget_s=500)
    running.start(worker)
    gang = q.submit_gang(2)
    q.tick()
    start = explained(q, gang_id=gang.id)["start"]
    assert numbers(start, "place", "after") == (1, [{"unit": f"g{running.id}", "by": "budget"}])
    assert 495 <= start["numbers"]["in_s"] <= 500
    assert f"when these have ended: g{running.id} (at the latest then, by its budget)" in start["detail"]
    planned = q.value("select starts_at from gangq.plans")
    assert abs(start["numbers"]["in_s"] - (planned - q.clock.now()).total_seconds()) <= 2


def test_an_estimate_is_called_one_and_says_how_old_it_is(q: Q) -> None:
    worker = q.worker(cpus=4)
    job = q.submit(task="learned", cpus=1, budget_s=1000)
    worker.take()
    gang = q.submit_gang(1)
    q.tick()
    start = explained(q, gang_id=gang.id)["start"]
    assert start["numbers"]["after"] == [{"unit": f"j{job}", "by": "budget"}]
    assert 995 <= start["numbers"]["in_s"] <= 1000
    q.sql("insert into gangq.runtimes values ('default', 'learned', 34, 300, gangq.now())")
    q.later(8)
    worker.beat()
    q.tick()
    start = explained(q, gang_id=gang.id)["start"]
    assert start["numbers"]["after"] == [{"unit": f"j{job}", "by": "history"}]
    assert "an estimate, from what its task took before" in start["detail"]
    assert "90% of 34 runs of task learned took 5m00s at most, learned 8 s ago" in start["detail"]
    assert "at the latest" not in start["detail"]


def test_gangs_before_it_and_how_many_get_a_planned_start(q: Q) -> None:
    q.sql("update gangq.settings set reservations = 1")
    worker = q.worker()
    q.submit(**PLACED)
    worker.take()
    gangs = [q.submit_gang(1) for _ in range(3)]
    q.tick()
    gates = explained(q, gang_id=gangs[2].id)
    assert gates["start"]["detail"].startswith("not planned: the first 1 that wait")
    assert gates["line"]["detail"] == "place 3 in queue default: 2 gangs before it (g1, g2), by priority"
    rows = {row["id"]: row for row in q.sql("select * from gangq.waiting where kind = 'gang'")}
    assert [rows[gang.id]["starts_at"] is None for gang in gangs] == [False, True, True]
    assert rows[gangs[0].id]["why"].startswith("place 1 of those with a planned start, in ")
    assert rows[gangs[2].id]["why"] == (
        "there is room for 0 of its 1 member; for one more the nearest worker, w1, has 0 of 1 slot free (held by j1)"
    )


def test_single_jobs_of_one_priority_have_their_own_planned_start(q: Q) -> None:
    q.sql("update gangq.settings set reservations = 1")
    worker = q.worker(lease_s=1e5)
    q.submit(budget_s=5000, **PLACED)
    worker.take()
    for priority in (5, 0):
        q.submit(budget_s=100, priority=priority, **PLACED)
    q.tick()
    first, second = q.sql("select * from gangq.waiting where kind = 'job' order by priority desc")
    assert first["starts_at"] == q.value("select starts_at from gangq.plans")
    assert first["why"].startswith("place 1 of those with a planned start, in 1h")
    assert second["starts_at"] is None
    assert "planned start" not in second["why"]


@pytest.mark.parametrize(
    ("policy", "places"),
    [("priority", [3, 1, 4, 2]), ("fifo", [1, 2, 3, 4]), ("largest_first", [4, 1, 3, 2])],
)
def test_its_place_is_that_in_the_order_of_its_queue(q: Q, policy: str, places: list[int]) -> None:
    q.call("set_queue", name="default", policy=policy)
    sizes = ((1, 0), (1, 5), (2, 0), (3, 3))
    gangs = [q.submit_gang(size, priority=p, wait_for_hardware=True) for size, p in sizes]
    assert [explained(q, gang_id=g.id)["line"]["numbers"]["place"] for g in gangs] == places


def test_before_it_is_only_what_could_start_now_and_in_a_fair_queue_what_its_submitter_has(q: Q) -> None:
    q.call("set_queue", name="default", policy="fair")
    backs_off, others, gang = (q.submit_gang(1, wait_for_hardware=True) for _ in range(3))
    assert explained(q, gang_id=gang.id)["line"]["numbers"]["place"] == 3
    q.sql("update gangq.live_gangs set submitter = 'other' where id = %(id)s", id=others.id)
    assert explained(q, gang_id=gang.id)["line"]["numbers"]["place"] == 2
    q.sql(
        "update gangq.live_gangs set not_before = gangq.now() + interval '9 s' where id = %(id)s",
        id=backs_off.id,
    )
    assert explained(q, gang_id=gang.id)["line"]["numbers"]["place"] == 1


def test_the_nearest_that_would_fit_leaves_out_devices_that_it_avoids(q: Q) -> None:
    q.worker(devices=gpus(100, 100))
    job = q.submit(gpus=2)
    q.sql("update gangq.shapes set avoid = array(select id from gangq.device_registry where uuid = 'G0')")
    assert explained(q, job_id=job)["hardware"]["numbers"]["feasible"] == {"gpus": 1, "members": 0}


def test_explain_writes_nothing_and_a_viewer_may_ask(q: Q) -> None:
    q.worker()
    gang = q.submit_gang(1)
    job = q.submit()
    with q.db.transaction(force_rollback=True):
        q.sql("set transaction read only")
        q.sql("set local role gangq_viewer")
        assert q.call("explain_gang", gang_id=gang.id)
        assert q.call("explain_job", job_id=job)


@pytest.mark.parametrize("state", ["waiting", "backing off", "blocked", "with roles", "running", "done"])
def test_a_session_may_explain_a_gang_as_often_as_it_likes(q: Q, state: str) -> None:
    """Once only the first call of a session succeeded."""
    worker = q.worker(slots=2)
    asked: Row = {"size": 2}
    if state == "waiting":
        asked["after"] = [q.submit(due_at=q.clock.now() + timedelta(hours=1))]
    elif state == "backing off":
        asked["due_at"] = q.clock.now() + timedelta(hours=1)
    elif state == "with roles":
        asked = {"roles": [{"name": "a", "count": 1}, {"name": "b", "count": 1, "min": 1}]}
    gang = q.submit_gang(**asked)
    if state in ("running", "done"):
        for claim in gang.start(worker):
            if state == "done":
                claim.complete()
    first = q.call("explain_gang", gang_id=gang.id)
    assert first
    assert [q.call("explain_gang", gang_id=gang.id) for _ in range(7)] == [first] * 7


def test_how_it_ended_is_told_of_its_end_and_not_of_an_attempt_before(q: Q) -> None:
    worker = q.worker()
    job, other = q.submit(), q.submit(due_at=q.clock.now() + timedelta(hours=1))
    (claim,) = worker.claim()
    error = {"type": "ValueError", "message": "no"}
    q.call("fail", job_id=claim.job_id, token=claim.token, error=error, retry_in_s=0.1)
    q.later(1)
    q.tick()
    (claim,) = worker.claim()
    claim.complete()
    q.call("cancel", job_ids=[other], reason="not needed")
    assert explained(q, job_id=job)["state"]["detail"] == "it has been done for 0 s"
    assert explained(q, job_id=other)["state"]["detail"] == "it has been cancelled for 0 s: not needed"
    job = q.submit()
    (claim,) = worker.claim()
    q.call("fail", job_id=job, token=claim.token, error=error, retry_in_s=0.1)
    q.later(1)
    q.tick()
    (claim,) = worker.claim()
    q.call("cancel", job_ids=[job])
    q.call("ack_preempted", job_id=job, token=claim.token)
    assert explained(q, job_id=job)["state"]["detail"] == "it has been cancelled for 0 s"


# Jobs that nobody decides about -----------------------------------------------------------------------------


def test_nothing_holds_a_job_that_a_worker_has_room_for(q: Q) -> None:
    q.worker()
    gates = explained(q, job_id=q.submit())
    assert holding(gates) == set()
    assert gates["unblock"]["detail"] == "nothing: it is claimable"
    (waits,) = q.sql("select why from gangq.waiting")
    assert gates["state"]["detail"] == waits["why"] == "waits for a free worker"


def test_a_job_in_a_paused_queue_or_over_its_maximum(q: Q) -> None:
    worker = q.worker(slots=2, devices=gpus(100, 100))
    q.call("set_queue", name="default", maximum={"gpus": 1})
    job = q.submit(count=2, gpus=1)[1]
    worker.take()
    gates = explained(q, job_id=job)
    assert holding(gates) == {"quota"}
    assert numbers(gates["quota"], "limit", "used", "need") == (1, 1, 1)
    q.call("set_queue", name="default", paused=True)
    q.place()
    assert holding(explained(q, job_id=job)) == {"paused"}


def test_a_job_whose_gpus_are_free_but_not_on_one_worker(q: Q) -> None:
    q.worker("a", devices=gpus(100, 100, prefix="A"), slots=2)
    q.worker("b", devices=gpus(100, prefix="B"))
    busy = q.worker("c", devices=gpus(100, 100, 100, prefix="C"), slots=2)
    q.submit(gpus=3)
    busy.take()
    job = q.submit(gpus=3)
    q.tick()
    gates = explained(q, job_id=job)
    assert holding(gates) == {"fragmented"}
    said = (
        "what is free would be enough, were it together: no worker has room for it: the nearest worker, a, has 2 of "
        "3 GPUs free ("
    )
    assert gates["fragmented"]["detail"].startswith(said)
    assert gates["unblock"]["detail"] == "room on one worker: 1 GPU more on a would do"


def test_where_slots_and_gpus_are_taken_both_are_named_with_who_holds_them(q: Q) -> None:
    busy = q.worker("a", devices=gpus(100, 100, prefix="A"))
    holding_it = q.submit(gpus=1, count=2)
    assert len(busy.claim(max_jobs=2)) == 2
    job, gang = q.submit(gpus=1), q.submit_gang(2, gpus=1)
    q.tick()
    held = f"(held by {', '.join(f'j{one}' for one in holding_it)}) ("
    near = f"the nearest worker, a, has 0 of 1 slot and 0 of 1 GPU free {held}"
    gates = explained(q, job_id=job)
    assert gates["room"]["detail"].startswith(f"no worker has room for it: {near}")
    assert gates["unblock"]["detail"] == "room on one worker: 1 slot and 1 GPU more on a would do"
    short = [{"of": "slots", "need": 1, "have": 0}, {"of": "gpus", "need": 1, "have": 0}]
    assert numbers(gates["room"], "nearest", "short") == ("a", short)
    gates = explained(q, gang_id=gang.id)
    assert gates["room"]["detail"].startswith(f"there is room for 0 of its 2 members; for one more {near}")


def test_jobs_of_its_kind_before_it_take_the_room(q: Q) -> None:
    q.worker()
    jobs = q.submit(count=3)
    gates = explained(q, job_id=jobs[2])
    assert holding(gates) == {"line"}
    assert gates["line"]["numbers"] == {"place": 3}


def test_a_job_that_is_given_the_priority_that_explain_names_is_claimable(q: Q) -> None:
    q.worker()
    q.submit(count=2, priority=998)
    q.submit(priority=999)
    job = q.submit()
    said = re.fullmatch(
        rf"3 jobs of its kind claimed first, or a higher priority: gangq priority (\d+) {job}",
        explained(q, job_id=job)["unblock"]["detail"],
    )
    assert said is not None
    q.call("set_priority", priority=int(said[1]), job_ids=[job])
    assert explained(q, job_id=job)["unblock"]["detail"] == "nothing: it is claimable"
    later = q.submit(priority=1000)
    assert explained(q, job_id=later)["unblock"]["detail"] == "1 job of its kind claimed first"
    assert explained(q, job_id=later)["line"]["detail"] == "behind 1 job of its kind"


def test_a_deadline_that_has_passed_is_not_said_in_seconds_below_zero(q: Q) -> None:
    gang, _ = q.submit_gang(1), q.worker()
    q.place()
    q.later(45)
    assert explained(q, gang_id=gang.id)["state"]["detail"].endswith(
        "0 of 1 members claimed, deadline in 0 s"
    )


def test_a_job_waits_for_what_is_kept_for_a_gang(q: Q) -> None:
    workers = q.workers(2, cpus=4)
    q.submit(cpus=1, budget_s=100)
    workers[0].take()
    q.submit_gang(2, priority=3)
    q.tick()
    job = q.submit(budget_s=1000, cpus=1)
    q.tick()
    gates = explained(q, job_id=job)
    assert holding(gates) == {"planned_start"}
    assert "it may run 1000 s, and its room is needed before for g1" in gates["planned_start"]["detail"]
    assert workers[1].claim() == [], "and so it is"


def test_missing_members_are_promised_no_planned_start(q: Q) -> None:
    first, second = q.workers(2)
    gang = q.submit_gang(2, failure_policy="restart_member", checkpoint_mode="each")
    gang.start(first, second)[1].fail()
    second.retire()
    q.sql("update gangq.live_gangs set not_before = null")
    q.place()
    gates = {row["gate"]: row["detail"] for row in q.call("explain_gang", gang_id=gang.id)}
    assert "start" not in gates
    assert gates["missing"].startswith("has lacked rank 1 for 0 s; waits for a place")
    assert gates["unblock"].startswith("room for 1 more")

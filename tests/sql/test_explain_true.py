"""What explain says is so: recomputed from the tables, in situations that differ in what holds a gang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sql.drive import PLACED, Gang, Q, Worker, gpus
from sql.explained import Seen, confirm, is_said

Situation = Callable[[Q], Gang]


def busy(q: Q, slots: int, size: int, **options: Any) -> tuple[Worker, Gang]:
    """A worker that a running gang fills up to so many members."""
    worker = q.worker(slots=slots, lease_s=1e5)
    gang = q.submit_gang(size, **options)
    gang.start(worker)
    return worker, gang


# The situations ---------------------------------------------------------------------------------------------


def full(q: Q) -> Gang:
    busy(q, 2, 2, budget_s=500)
    return q.submit_gang(1)


def half(q: Q) -> Gang:
    busy(q, 4, 2, budget_s=500)
    return q.submit_gang(3)


def two_hosts(q: Q) -> Gang:
    for n in range(2):
        q.worker(f"w{n}", slots=2, lease_s=1e5)
    q.submit(budget_s=300, **PLACED)
    worker = q.sql("select id from gangq.incarnations order by id")[0]
    q.place()
    q.call("claim", incarnation=worker["id"], max_jobs=1)
    return q.submit_gang(4)


def one_host(q: Q) -> Gang:
    for n in range(2):
        worker = q.worker(f"w{n}", slots=2, lease_s=1e5, cpus=8)
        here = [{"key": "worker", "op": "in", "values": [worker.name]}]
        q.submit(cpus=1, budget_s=900, selector=here)
        worker.take()
    return q.submit_gang(2, strategy="strict_pack")


def host_each(q: Q) -> Gang:
    for n in range(3):
        q.worker(f"w{n}", slots=3, lease_s=1e5, cpus=8)
    q.submit_gang(3, cpus=1, budget_s=700).start(*[Worker(q, "", r) for r in registered(q)])
    return q.submit_gang(3, strategy="strict_spread")


def never_a_host_each(q: Q) -> Gang:
    for n in range(2):
        q.worker(f"w{n}", slots=2, lease_s=1e5)
    q.submit_gang(2, budget_s=500, strategy="strict_pack").start(Worker(q, "", registered(q)[0]))
    return q.submit_gang(3, strategy="strict_spread", wait_for_hardware=True)


def never_one_host(q: Q) -> Gang:
    for n in range(2):
        q.worker(f"w{n}", slots=2, lease_s=1e5)
    return q.submit_gang(5, strategy="strict_pack", wait_for_hardware=True)


def beside_a_plan(q: Q) -> Gang:
    for n in range(2):
        q.worker(f"w{n}", slots=3, lease_s=1e5)
    q.submit_gang(2, budget_s=300, strategy="strict_pack").start(Worker(q, "", registered(q)[0]))
    q.submit_gang(6, priority=3)
    return q.submit_gang(5, budget_s=4000)


def registered(q: Q) -> list[dict[str, Any]]:
    return [{"incarnation": r["id"]} for r in q.sql("select id from gangq.incarnations order by id")]


def in_a_rack(q: Q) -> Gang:
    q.sql("update gangq.settings set topology = '{rack,host}'")
    workers = [q.worker(f"w{n}", slots=2, labels={"rack": "ab"[n % 2]}, lease_s=1e5) for n in range(4)]
    q.submit_gang(3, strategy="spread", budget_s=500).start(*workers)
    return q.submit_gang(4, require="rack")


def gpus_taken(q: Q) -> Gang:
    worker = q.worker(slots=8, devices=gpus(*[80] * 4), lease_s=1e5)
    q.submit_gang(2, gpus=1, budget_s=400).start(worker)
    return q.submit_gang(3, gpus=1)


def vram_taken(q: Q) -> Gang:
    worker = q.worker(slots=8, devices=gpus(40, 80, 80), lease_s=1e5)
    q.submit_gang(1, gpus=1, vram_mb=80, budget_s=400).start(worker)
    return q.submit_gang(2, gpus=1, vram_mb=80)


def memory_taken(q: Q) -> Gang:
    worker = q.worker(slots=8, memory_mb=1000, lease_s=1e5)
    q.submit_gang(1, memory_mb=700, budget_s=400).start(worker)
    return q.submit_gang(1, memory_mb=400)


def paused(q: Q) -> Gang:
    q.worker()
    q.call("set_queue", name="default", paused=True)
    return q.submit_gang(1)


def limited(q: Q, **limit: Any) -> Gang:
    busy(q, 8, 2, budget_s=500)
    q.call("set_queue", name="default", **limit)
    return q.submit_gang(2)


def apart(q: Q) -> Gang:
    workers = [q.worker(f"w{n}", slots=2, lease_s=1e5) for n in range(2)]
    q.submit_gang(2, strategy="strict_spread", apart="x", budget_s=600).start(*workers)
    return q.submit_gang(1, apart="x")


def tainted(q: Q) -> Gang:
    q.worker(taints=["debug"], lease_s=1e5)
    return q.submit_gang(1, wait_for_hardware=True)


def labelled(q: Q) -> Gang:
    q.worker(labels={"gpu": "a100"}, lease_s=1e5)
    return q.submit_gang(1, labels={"gpu": "h100"}, wait_for_hardware=True)


def cordoned(q: Q) -> Gang:
    q.worker(lease_s=1e5)
    q.call("cordon", worker="w1")
    return q.submit_gang(1)


def too_large(q: Q) -> Gang:
    q.worker(slots=2, lease_s=1e5)
    return q.submit_gang(3, wait_for_hardware=True)


def young_victim(q: Q) -> Gang:
    busy(q, 1, 1, budget_s=5000)
    return q.submit_gang(1, priority=5)


def stopping(q: Q) -> Gang:
    worker, _ = busy(q, 1, 1, budget_s=5000)
    q.beyond_min_run(worker)
    return q.submit_gang(1, priority=5)


def stopping_still(q: Q) -> Gang:
    gang = stopping(q)
    q.tick()
    return gang


def behind_a_plan(q: Q) -> Gang:
    workers = [q.worker(f"w{n}", lease_s=1e5, cpus=4) for n in range(2)]
    q.submit(cpus=1, budget_s=300)
    workers[0].take()
    q.submit_gang(2, priority=3)
    return q.submit_gang(1, budget_s=4000)


def second_in_line(q: Q) -> Gang:
    busy(q, 1, 1, budget_s=500)
    q.submit_gang(1)
    return q.submit_gang(1)


def fifth_in_line(q: Q) -> Gang:
    busy(q, 1, 1, budget_s=500)
    for _ in range(5):
        q.submit_gang(1)
    return q.submit_gang(1)


def by_history(q: Q) -> Gang:
    busy(q, 1, 1, budget_s=5000)
    q.sql("insert into gangq.runtimes values ('default', 'train', 20, 120, gangq.now())")
    return q.submit_gang(1, task="other")


def outran_history(q: Q) -> Gang:
    worker, _ = busy(q, 1, 1, budget_s=5000)
    q.sql("insert into gangq.runtimes values ('default', 'train', 20, 120, gangq.now())")
    q.later(200)
    worker.beat()
    return q.submit_gang(1, task="other")


def outran_budget(q: Q) -> Gang:
    worker, _ = busy(q, 1, 1, budget_s=50)
    q.later(60)
    worker.beat()
    return q.submit_gang(1)


def of_a_child_queue(q: Q) -> Gang:
    q.call("set_queue", name="a.b")
    worker = q.worker(slots=8, queues=["a.b"], lease_s=1e5)
    q.submit_gang(2, queue="a.b").start(worker)
    q.call("set_queue", name="a", max_running_jobs=3)
    return q.submit_gang(2, queue="a.b")


def elastic(q: Q) -> Gang:
    busy(q, 3, 2, budget_s=500)
    return q.submit_gang(6, min_size=2)


SITUATIONS: dict[str, tuple[Situation, str]] = {
    "nothing is free": (full, "room"),
    "too little is free": (half, "room"),
    "too little on two hosts": (two_hosts, "room"),
    "not on one host": (one_host, "one_host"),
    "not a host for each": (host_each, "hosts"),
    "GPUs are taken": (gpus_taken, "room"),
    "large GPUs are taken": (vram_taken, "room"),
    "memory is taken": (memory_taken, "room"),
    "paused": (paused, "paused"),
    "a maximum": (lambda q: limited(q, maximum={"jobs": 3}), "quota"),
    "a limit on gangs": (lambda q: limited(q, max_running_gangs=1), "running_limit"),
    "a limit on jobs": (lambda q: limited(q, max_running_jobs=3), "running_limit"),
    "a submitter's limit": (lambda q: limited(q, submitter_maximum={"jobs": 3}), "submitter_limit"),
    "a limit of the parent": (of_a_child_queue, "running_limit"),
    "kept apart": (apart, "apart"),
    "all tainted": (tainted, "infeasible"),
    "none with its label": (labelled, "infeasible"),
    "all cordoned": (cordoned, "infeasible"),
    "larger than the fleet": (too_large, "infeasible"),
    "a victim in its minimum run time": (young_victim, "room"),
    "a victim is told to stop": (stopping, "stopping"),
    "a victim has yet to stop": (stopping_still, "stopping"),
    "it would delay a planned start": (behind_a_plan, "planned_start"),
    "a planned start keeps what is free": (beside_a_plan, "room"),
    "never a host for each": (never_a_host_each, "infeasible"),
    "never on one host": (never_one_host, "infeasible"),
    "not in one rack": (in_a_rack, "one_domain"),
    "second in line": (second_in_line, "room"),
    "behind those with a planned start": (fifth_in_line, "room"),
    "an end known from history": (by_history, "room"),
    "history was outrun": (outran_history, "room"),
    "a budget was outrun": (outran_budget, "room"),
    "an elastic gang": (elastic, "room"),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_said_is_so(q: Q, name: str) -> None:
    situation, gate = SITUATIONS[name]
    gang = situation(q)
    q.place()
    seen = Seen(q, gang)
    assert seen.verdict["gate"] == gate
    confirm(seen)
    detail = seen.verdict["detail"]
    if gate == "infeasible":
        said = {"all tainted": "--tolerate debug", "all cordoned": "w1"}.get(name, "")
        assert said in seen.text["workers"] + detail
    elif gate == "one_domain":
        rooms = seen.rooms()
        racks = {"a": rooms["host-w0"] + rooms["host-w2"], "b": rooms["host-w1"] + rooms["host-w3"]}
        best = max(racks, key=lambda rack: racks[rack])
        assert sum(racks.values()) >= seen.shape["min_members"] > racks[best]
        assert f"the roomiest rack, {best}, has room for {racks[best]} of its {seen.size} members" in detail
    if name == "a planned start keeps what is free":
        assert "; beside the planned start of g2 there is room for 0 of them" in detail
    if name == "a victim in its minimum run time":
        began = q.value("select go_at from gangq.live_gangs where id = 1")
        min_run = q.value("select min_run_s from gangq.queues_table where name = 'default'")
        in_s = re.search(
            r"it may have g1 stop once their minimum run time is over \(in (.+?)\)", seen.text["unblock"]
        )
        assert in_s is not None
        assert is_said(in_s[1], min_run - (q.clock.now() - began).total_seconds())


def test_a_running_elastic_gang_says_that_it_does_not_grow(q: Q) -> None:
    gang = q.submit_gang(4, min_size=2)
    gang.start(*q.workers(2))
    (state,) = q.call("explain_gang", gang_id=gang.id)
    assert state["detail"].endswith("with 2 of 4 members: it does not grow while it runs")

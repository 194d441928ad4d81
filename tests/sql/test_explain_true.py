"""What explain says is so: recomputed from the tables, in situations that differ in what holds a gang."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from drive import PLACED, Gang, Q, Worker, gpus
from psycopg.types.json import Jsonb

Row = dict[str, Any]
Situation = Callable[[Q], Gang]


class Seen:
    """An independent reading of the tables."""

    def __init__(self, q: Q, gang: Gang) -> None:
        self.q, self.gang = q, gang
        self.rows = q.call("explain_gang", gang_id=gang.id)
        self.text = {row["gate"]: row["detail"] for row in self.rows}
        self.verdict = next(r for r in self.rows if "decided_at" in (r["numbers"] or {}))
        self.size = gang.row["size"]
        (self.shape,) = q.sql(
            "select s.*, r.strategy, r.min_members, k.apart, k.queue from gangq.live_gangs g "
            "join gangq.gang_kinds k on k.id = g.kind_id join gangq.kind_roles r on r.kind_id = k.id "
            "join gangq.shapes s on s.id = r.shape_id where g.id = %(id)s",
            id=gang.id,
        )

    def rooms(self) -> dict[str, int]:
        """Members for which each host that may be given work has room, counted by hand."""
        found: dict[str, int] = {}
        for w in self.q.sql(
            "select i.*, i.queues @> array[%(queue)s] and i.labels @> %(labels)s and i.taints = '{}' as serves, "
            "not exists (select 1 from gangq.cordons c where c.name in (i.host, i.name)) as open "
            "from gangq.incarnations i where i.ended_at is null and i.quarantined is null and i.state = 'live'",
            queue=self.shape["queue"],
            labels=Jsonb(self.shape["labels"]),
        ):
            jobs = self.q.sql(
                "select s.memory_mb, s.cpus from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
                "where j.incarnation = %(id)s",
                id=w["id"],
            )
            free = self.q.sql(
                "select r.vram_mb from gangq.device_registry r where r.offered_by = %(id)s and not exists "
                "(select 1 from gangq.device_holds h where h.device_id = r.id)",
                id=w["id"],
            )
            room = w["slots"] - len(jobs)
            if self.shape["memory_mb"]:
                left = w["memory_mb"] - sum(job["memory_mb"] for job in jobs)
                room = min(room, left // self.shape["memory_mb"])
            if self.shape["gpus"]:
                usable = [d for d in free if d["vram_mb"] >= self.shape["vram_mb"]]
                room = min(room, len(usable) // self.shape["gpus"])
            if w["serves"] and w["open"]:
                found[w["host"]] = found.get(w["host"], 0) + max(0, room)
        return found

    def holders(self, where: str = "true") -> set[str]:
        """Units that hold something: gangs and jobs alone."""
        rows = self.q.sql(
            "select distinct coalesce('g' || j.gang_id, 'j' || j.id) as unit from gangq.live_jobs j "
            f"left join gangq.live_gangs g on g.id = j.gang_id where j.incarnation is not null and {where}"
        )
        return {row["unit"] for row in rows}


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


def registered(q: Q) -> list[Row]:
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


def in_pieces(q: Q) -> Gang:
    workers = [
        q.worker(f"w{n}", slots=8, devices=gpus(*[80] * 4, prefix=f"{n}-"), lease_s=1e5) for n in (1, 2)
    ]
    q.submit_gang(2, gpus=2, strategy="strict_spread", budget_s=400).start(*workers)
    return q.submit_gang(1, gpus=4)


def slots_here_gpus_there(q: Q) -> Gang:
    w1 = q.worker("w1", slots=1, devices=gpus(80, 80, prefix="1-"), lease_s=1e5)
    q.submit_gang(1, gpus=1, budget_s=400).start(w1)
    q.worker("w2", slots=2, lease_s=1e5)
    return q.submit_gang(1, gpus=1)


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
    "in pieces on two hosts": (in_pieces, "fragmented"),
    "slots here, GPUs there": (slots_here_gpus_there, "fragmented"),
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
    detail, need = seen.verdict["detail"], seen.shape["min_members"]
    rooms = seen.rooms()
    assert re.search(r"\(decided 0\.\d s ago\)$", detail)
    if gate in ("room", "fragmented"):
        assert detail.startswith("what is free would be enough, were it together: ") == (gate != "room")
        room = sum(rooms.values())
        assert room < need
        assert f"there is room for {room} of its {need} member" in detail
        assert f"room for {need - room} more" in seen.text["unblock"]
        if room:
            best = re.search(r"the most on (\S+?)[; ]", detail)
            assert best is not None
            assert rooms[best[1]] == max(rooms.values())
        near = re.search(r"the nearest worker, (\S+), has (.+?) free(?: \(held by (.+?)\))?", detail)
        assert near is not None
        assert all(
            int(have) < int(need)
            for have, need in re.findall(r"(\d+) of (\d+) (?:slot|GPU)", near[2].partition(" GiB")[0])
        )
        there = seen.holders(f"j.incarnation in (select id from gangq.incarnations where name = '{near[1]}')")
        assert there >= {*filter(None, (near[3] or "").split(", "))}
    elif gate == "hosts":
        hosts = sum(room > 0 for room in rooms.values())
        assert sum(rooms.values()) >= need > hosts
        assert detail.startswith(f"{hosts} hosts have room, and each of its {need} members needs another one")
    elif gate == "one_domain":
        racks = {"a": rooms["host-w0"] + rooms["host-w2"], "b": rooms["host-w1"] + rooms["host-w3"]}
        best = max(racks, key=lambda rack: racks[rack])
        assert sum(racks.values()) >= need > racks[best]
        assert f"the roomiest rack, {best}, has room for {racks[best]} of its {need} members" in detail
    elif gate == "one_host":
        assert sum(rooms.values()) >= need > max(rooms.values())
        assert f"has room for {max(rooms.values())} of the {need} that share one" in detail
    elif gate in ("quota", "running_limit", "submitter_limit"):
        limited_by_the_tables(seen)
    elif gate == "paused":
        assert q.value("select paused from gangq.queues_table where name = 'default'")
    elif gate == "apart":
        others = seen.holders(
            f"g.kind_id in (select id from gangq.gang_kinds where apart = '{seen.shape['apart']}')"
        )
        assert sum(rooms.values()) >= need, "there is room, beside the other"
        assert all(other in detail for other in others)
    elif gate == "infeasible":
        assert sum(rooms.values()) < need
        said = {"all tainted": "--tolerate debug", "all cordoned": "w1"}.get(name, "")
        assert said in seen.text["workers"] + detail
        cordon = q.value("select count(*) from gangq.cordons")
        assert ("take no new work now" in detail) == bool(cordon)
    elif gate == "stopping":
        assert seen.holders("j.state = 'preempting'") == {"g1"}
        assert "as soon as these have stopped: g1 (" in detail
        assert seen.text["start"] == "as soon as what was told to stop for it has stopped"
    elif gate == "planned_start":
        (plan,) = q.sql("select * from gangq.plans order by place limit 1")
        assert sum(rooms.values()) >= need
        assert f"needed before for {plan['ask']}" in detail
        in_s = re.search(r", in (\d+) s \(", detail)
        assert in_s is not None
        assert abs(int(in_s[1]) - (plan["starts_at"] - q.clock.now()).total_seconds()) < 2
    planned_by_the_tables(seen, name)
    place_by_the_tables(seen)


def limited_by_the_tables(seen: Seen) -> None:
    numbers = seen.verdict["numbers"]
    (used,) = seen.q.sql(
        "select count(*) as jobs, count(distinct j.gang_id) as gangs from gangq.live_jobs j "
        "where j.incarnation is not null"
    )
    (queue,) = seen.q.sql("select * from gangq.queues_table where name = %(n)s", n=numbers["where"])
    limits = [queue["maximum"], queue["submitter_maximum"]]
    most = {
        "jobs": [queue["max_running_jobs"], *(limit.get("jobs") for limit in limits if limit)],
        "gangs": [queue["max_running_gangs"]],
    }[numbers["of"]]
    assert numbers["limit"] in most
    assert numbers["limit"] - numbers["have"] == used[numbers["of"]]
    assert numbers["have"] < numbers["need"] == (seen.size if numbers["of"] == "jobs" else 1)
    assert set(numbers["holders"]) == seen.holders()


def planned_by_the_tables(seen: Seen, name: str) -> None:
    """The planned start is the plan's; "at the latest" stands only where a budget enforces the end."""
    q, start = seen.q, next(row for row in seen.rows if row["gate"] == "start")
    plans = q.sql("select * from gangq.plans where ask = %(ask)s and not kept", ask=f"g{seen.gang.id}")
    assert bool(plans) == ("in_s" in (start["numbers"] or {}))
    if name == "a victim in its minimum run time":
        began = q.value("select go_at from gangq.live_gangs where id = 1")
        min_run = q.value("select min_run_s from gangq.queues_table where name = 'default'")
        in_s = re.search(
            r"it may have g1 stop once their minimum run time is over \(in (\d+) s\)", seen.text["unblock"]
        )
        assert in_s is not None
        assert abs(min_run - (q.clock.now() - began).total_seconds() - int(in_s[1])) < 2
    if not plans:
        return
    assert abs(start["numbers"]["in_s"] - (plans[0]["starts_at"] - q.clock.now()).total_seconds()) < 2
    ends = {end["unit"]: end["by"] for end in start["numbers"]["after"]}
    assert ends.keys() <= seen.holders() | {f"g{g}" for g in range(1, seen.gang.id)}
    for unit, by in ends.items():
        column = "j.gang_id" if unit[0] == "g" else "j.id"
        (row,) = q.sql(
            "select coalesce(max(g.go_at), max(j.claimed_at)) as began, max(j.budget_s) as budget_s, "
            "max(r.p90_s) as p90_s "
            "from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
            "left join gangq.live_gangs g on g.id = j.gang_id "
            "left join gangq.runtimes r on r.queue = s.queue and r.task = s.task and r.samples >= 10 "
            f"where {column} = %(id)s",
            id=int(unit[1:]),
        )
        if row["began"] is None:
            expected = "plan"
        else:
            runs = (q.clock.now() - row["began"]).total_seconds()
            budget = row["budget_s"] or q.value("select budget_s from gangq.settings")
            by_history = row["p90_s"] is not None and runs < row["p90_s"] < budget
            expected = "history" if by_history else "budget" if runs + 30 < budget else "late"
        assert by == expected, unit
    assert ("at the latest" in start["detail"]) == ("budget" in ends.values())
    assert ("learned" in start["detail"]) == ("history" in ends.values())


def place_by_the_tables(seen: Seen) -> None:
    before = seen.q.value(
        "select count(*) from gangq.live_gangs x join gangq.live_gangs g on g.id = %(id)s "
        "where x.state = 'blocked' and (x.priority, -x.id) > (g.priority, -g.id)",
        id=seen.gang.id,
    )
    assert next(row for row in seen.rows if row["gate"] == "line")["numbers"]["place"] == before + 1


def test_a_running_elastic_gang_says_that_it_does_not_grow(q: Q) -> None:
    gang = q.submit_gang(4, min_size=2)
    gang.start(*q.workers(2))
    (state,) = q.call("explain_gang", gang_id=gang.id)
    assert state["detail"].endswith("with 2 of 4 members: it does not grow while it runs")

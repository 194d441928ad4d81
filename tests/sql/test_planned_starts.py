"""Planned starts: the first that wait are told when, later ones pass only if that delays nobody, nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest
from boards import NOW, Fleet, Held, Kind, Node, Role, Waiting
from drive import Gang, Q, Row, Worker, gpus
from psycopg.types.json import Jsonb


def decide(q: Q, board: dict[str, Any]) -> list[Row]:
    """What a pass would do with this board."""
    return q.sql(
        "select * from gangq.decide_on(jsonb_populate_record(null::gangq.board, %(b)s))", b=Jsonb(board)
    )


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def kept(row: Row) -> dict[int, list[int]]:
    """Of each worker, slots, memory, thousandths of a CPU and GPUs that it must have for the gang in all."""
    return {worker: need for worker, *need in row["kept"]}


def random_work(dice: random.Random) -> tuple[Fleet, list[Held]]:
    """A small fleet and what runs on it."""
    nodes = [
        Node(
            f"h{n}",
            slots=dice.randint(1, 3),
            memory=dice.choice([3, 6]),
            vrams=tuple(dice.choice([10, 40]) for _ in range(dice.randint(0, 3))),
        )
        for n in range(dice.randint(1, 4))
    ]
    fleet, held = Fleet(nodes), []
    for n, node in enumerate(fleet.nodes):
        devices, memory = len(node.vrams), node.memory
        for _ in range(dice.randint(0, node.slots)):
            job = Held(
                n + 1,
                float(dice.randint(1, 6) * 100),
                gpus=dice.randint(0, min(1, devices)),
                memory=dice.randint(0, min(2, memory)),
            )
            devices, memory = devices - job.gpus, memory - job.memory
            held.append(job)
    return fleet, held


def then(fleet: Fleet, held: list[Held], seconds: float) -> Fleet:
    """The fleet as it is when all has ended that ends by then."""
    nodes = []
    for n, node in enumerate(fleet.nodes):
        mine = [job for job in held if job.worker == n + 1]
        free, taken = sorted(node.vrams), 0
        for job in mine:  # as the board deals them out: from the first device on, in the order of the jobs
            if job.ends > seconds:
                del free[taken : taken + job.gpus]
            else:
                taken += job.gpus
        late = [job for job in mine if job.ends > seconds]
        nodes.append(
            Node(
                node.host,
                node.slots - len(late),
                node.memory - sum(job.memory for job in late),
                vrams=tuple(free),
            )
        )
    return Fleet(nodes)


# When -------------------------------------------------------------------------------------------------------


def test_a_pass_sees_only_workers_of_queues_in_which_something_waits(q: Q) -> None:
    q.call("set_queue", name="other")
    q.worker("other", queues=["other"])
    q.worker("here", queues=["other", "default"])
    q.submit_gang(2, wait_for_hardware=True)
    assert q.value("select b.worker_names from gangq.look(200) b") == ["here"]


def test_a_gang_kept_apart_starts_when_the_one_it_is_kept_apart_from_has_ended(q: Q) -> None:
    worker = q.worker(slots=4)
    first = q.submit_gang(1, apart="x", budget_s=500)
    (claim,) = first.start(worker)
    second = q.submit_gang(1, apart="x")
    q.tick()
    assert second.state == "blocked"
    assert q.value("select starts_at from gangq.plans") == first.live["go_at"] + timedelta(seconds=500)
    claim.complete()
    q.tick()
    assert second.state == "reserved"


def test_the_planned_start_is_the_first_end_after_which_the_gang_fits(q: Q) -> None:
    dice, planned = random.Random(1), 0
    for n in range(150):
        fleet, held = random_work(dice)
        strategies = ["pack", "spread", "strict_pack", "strict_spread"]
        kind = Kind(
            tuple(
                Role(
                    dice.randint(1, 3),
                    gpus=dice.choice([0, 1]),
                    vram=dice.choice([0, 20]),
                    memory=dice.choice([0, 1, 3]),
                    strategy=dice.choice(strategies),
                )
                for _ in range(dice.choice([1, 1, 2]))
            )
        )
        (row,) = decide(q, fleet.board(gangs=[Waiting(kind)], held=held, reservations=4))
        ends = sorted({0.0} | {job.ends for job in held})
        first = next((end for end in ends if then(fleet, held, end).placement(kind)), None)
        case = (n, fleet, held, kind)
        if first is None:
            assert (row["action"], row["gate"]) == ("wait", "infeasible"), case
        elif first == 0:
            assert row["action"] == "start", case
        else:
            assert (row["action"], row["starts_at"]) == ("plan", at(first)), case
            planned += 1
    assert planned > 20


def test_only_the_first_so_many_get_a_planned_start(q: Q) -> None:
    fleet = Fleet([Node("h0", 1)])
    gangs = [Waiting(Kind((Role(1),), apart=str(n)), estimate=50) for n in range(6)]
    for most in (0, 1, 4):
        rows = decide(q, fleet.board(gangs=gangs, held=[Held(1, 100)], reservations=most))
        assert [row["action"] for row in rows] == ["plan"] * most + ["wait"] * (6 - most)
        assert [row["starts_at"] for row in rows[:most]] == [at(100 + 50 * n) for n in range(most)], (
            "one after another"
        )
        assert [row["place"] for row in rows[:most]] == list(range(1, most + 1))


def test_what_starts_in_this_very_pass_ends_too(q: Q) -> None:
    fleet = Fleet([Node("h0", 2, vrams=(10, 10))])
    first, second = Waiting(Kind((Role(2, gpus=1),)), estimate=70), Waiting(Kind((Role(1, gpus=2),)))
    rows = decide(q, fleet.board(gangs=[first, second], reservations=1))
    assert [(row["action"], row["starts_at"]) for row in rows] == [("start", None), ("plan", at(70))]


# Who may pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimate", "passes"), [(10, True), (100, True), (101, False), (10000, False)])
def test_a_later_gang_passes_if_it_is_gone_by_then(q: Q, estimate: float, passes: bool) -> None:
    fleet = Fleet([Node("h0", 1), Node("h1", 1)])
    gangs = [Waiting(Kind((Role(2),))), Waiting(Kind((Role(1),)), estimate=estimate)]
    rows = decide(q, fleet.board(gangs=gangs, held=[Held(1, 100)], reservations=1))
    assert rows[0]["starts_at"] == at(100)
    assert rows[1]["action"] == ("start" if passes else "wait")


def test_a_long_gang_passes_on_what_the_planned_one_does_not_need(q: Q) -> None:
    fleet = Fleet([Node("h0", 1), Node("h1", 1), Node("h2", 2)])
    gangs = [
        Waiting(Kind((Role(2, strategy="strict_spread"),), apart="x")),
        Waiting(Kind((Role(2),)), estimate=1e6),
    ]
    rows = decide(
        q, fleet.board(gangs=gangs, held=[Held(1, 100), Held(2, 100), Held(3, 1e5)], reservations=1)
    )
    assert (rows[0]["action"], rows[1]["action"]) == ("plan", "wait")
    rows = decide(
        q,
        fleet.board(
            gangs=[gangs[0], Waiting(Kind((Role(1),)), estimate=1e6)],
            held=[Held(1, 100), Held(2, 100)],
            reservations=1,
        ),
    )
    assert rows[0]["action"] == "plan"
    assert (rows[1]["action"], rows[1]["incarnations"]) == ("start", [3]), "a slot beside the planned one's"


def test_a_device_too_small_for_the_planned_gang_is_not_counted_on(q: Q) -> None:
    """h0 frees its small device; the large one, free now, must stay for whom it is planned."""
    fleet = Fleet([Node("h0", 3, vrams=(10, 40)), Node("h1", 1, vrams=(40,))])
    gangs = [
        Waiting(Kind((Role(2, gpus=1, vram=20),))),
        Waiting(Kind((Role(1, gpus=1, vram=20),)), estimate=1e6),
    ]
    held = [Held(1, 100, gpus=1), Held(2, 100, gpus=1)]
    rows = decide(q, fleet.board(gangs=gangs, held=held, reservations=1))
    assert [(row["action"], row["starts_at"]) for row in rows] == [("plan", at(100)), ("wait", None)]


def test_nothing_that_starts_or_is_planned_delays_a_planned_start(q: Q) -> None:
    """At every planned start its workers have what it needs, whatever else started or was planned before."""
    dice, plans, passed = random.Random(2), 0, 0
    for n in range(150):
        fleet, held = random_work(dice)
        gangs = [
            Waiting(
                Kind(
                    (Role(dice.randint(1, 4), gpus=dice.choice([0, 0, 1]), memory=dice.choice([0, 1, 2])),),
                    apart=None,
                ),
                estimate=float(dice.choice([50, 150, 100, 300, 1000])),
            )
            for _ in range(dice.randint(2, 8))
        ]
        rows = decide(q, fleet.board(gangs=gangs, held=held, reservations=dice.choice([1, 2, 4])))
        started = [row for row in rows if row["action"] == "start"]
        planned = [row for row in rows if row["action"] == "plan"]
        plans, passed = (
            plans + len(planned),
            passed + sum(1 for row in started if planned and row["gang_id"] > planned[0]["gang_id"]),
        )
        for plan in planned:
            when = plan["starts_at"]
            taken: dict[int, Counter[str]] = {w + 1: Counter() for w in range(len(fleet.nodes))}
            for job in held:
                if at(job.ends) > when:
                    taken[job.worker].update(slots=1, memory=job.memory, gpus=job.gpus)
            for row in started:
                gang = gangs[row["gang_id"] - 1]
                if at(gang.estimate) > when:
                    for worker in row["incarnations"]:
                        taken[worker].update(
                            slots=1, memory=gang.kind.roles[0].memory, gpus=gang.kind.roles[0].gpus
                        )
            for other in planned:
                begins, ends = (
                    other["starts_at"],
                    other["starts_at"] + timedelta(seconds=gangs[other["gang_id"] - 1].estimate),
                )
                if begins <= when < ends:
                    for worker, (slots, memory, _, devices) in kept(other).items():
                        taken[worker].update(slots=slots, memory=memory, gpus=devices)
            for worker, use in taken.items():
                node = fleet.nodes[worker - 1]
                assert use["slots"] <= node.slots, (n, worker, plan)
                assert use["memory"] <= node.memory, (n, worker, plan)
                assert use["gpus"] <= len(node.vrams), (n, worker, plan)
    assert plans > 100
    assert passed > 20


# On the tables ----------------------------------------------------------------------------------------------


def lasting(q: Q, gang: Any, seconds: float) -> Any:
    """This gang with that budget."""
    q.sql("update gangq.live_gangs set budget_s = %(s)s where id = %(id)s", s=seconds, id=gang.id)
    return gang


def test_the_plan_and_what_workers_keep_for_it_are_written_as_decided(q: Q) -> None:
    workers = [q.worker(f"w{n}", slots=2, memory_mb=1000, cpus=4, devices=[]) for n in range(2)]
    q.submit(count=2, budget_s=500)
    for worker in workers:
        worker.claim(max_jobs=1)
    gang = q.submit_gang(4, memory_mb=100, cpus=0.5)
    q.tick()
    (plan,) = q.sql("select * from gangq.plans")
    assert (plan["gang_id"], plan["place"], plan["starts_at"]) == (
        gang.id,
        1,
        q.clock.now() + timedelta(seconds=500),
    )
    marks = q.sql("select * from gangq.earmarks order by incarnation")
    assert [m["incarnation"] for m in marks] == [w.incarnation for w in workers]
    for mark in marks:
        assert (mark["gang_id"], mark["kind"], mark["until"]) == (gang.id, "plan", plan["starts_at"])
        assert (mark["slots"], mark["memory_mb"], float(mark["cpus"]), mark["gpus"]) == (2, 200, 1.0, 0), (
            "all it needs there"
        )
    gang.cancel()
    q.tick()
    assert q.sql("select * from gangq.plans") == q.sql("select * from gangq.earmarks") == []


def test_the_estimate_is_the_budget_until_the_tasks_own_history_says_less(q: Q) -> None:
    workers = q.workers(2)
    q.submit(task="long", budget_s=1000)
    q.submit_gang(2, task="wide")
    assert sum(len(w.claim(max_jobs=1)) for w in workers) == 1
    behind = lasting(q, q.submit_gang(1, task="quick"), 5000)
    q.tick()
    assert behind.state == "blocked"
    q.sql(
        "insert into gangq.runtimes (queue, task, samples, p90_s, updated_at) "
        "values ('default', 'quick', 9, 60, gangq.now())"
    )
    q.tick()
    assert behind.state == "blocked", "nine ends are no history"
    q.sql("update gangq.runtimes set samples = 10")
    q.tick()
    assert behind.state == "reserved"


def run_what_is_placed(q: Q, workers: list[Any], claims: dict[Any, float], until: float) -> None:
    """Every worker claims; what has run its time is completed."""
    for worker in workers:
        worker.beat()
        for claim in worker.claim(max_jobs=1):
            claims[claim] = until


def test_a_large_gang_behind_a_stream_of_small_ones_starts_within_one_of_their_budgets(q: Q) -> None:
    workers = q.workers(4)
    now, claims, large, waited = 0.0, {}, None, 0
    for step in range(24):
        for claim in [c for c, ends in claims.items() if ends <= now]:
            claim.complete()
            del claims[claim]
        for _ in range(2):  # more than can run: somebody always waits
            lasting(q, q.submit_gang(1, budget_s=25), 25)
        if step == 4:
            large = lasting(q, q.submit_gang(4, budget_s=25), 25)
        q.settle(2)
        run_what_is_placed(q, workers, claims, now + 20 + 5 * (len(claims) % 2))
        if large is not None and large.state == "running":
            break
        waited += large is not None
        q.later(5)
        now += 5
    assert large is not None
    assert large.state == "running"
    # Eight small ones came before it: two rounds on four workers, and the round it waits for.
    assert waited * 5 <= 90


def test_a_small_gang_behind_a_stream_of_large_ones_starts_in_its_turn(q: Q) -> None:
    workers = q.workers(4)
    now, claims, small, waited = 0.0, {}, None, 0
    for step in range(24):
        for claim in [c for c, ends in claims.items() if ends <= now]:
            claim.complete()
            del claims[claim]
        lasting(q, q.submit_gang(4, budget_s=10), 10)
        if step == 3:
            small = lasting(q, q.submit_gang(1, budget_s=1000), 1000)
        q.settle(2)
        run_what_is_placed(q, workers, claims, now + 10)
        if small is not None and small.state == "running":
            break
        waited += small is not None
        q.later(5)
        now += 5
    assert small is not None
    assert small.state == "running"
    assert waited * 5 <= 60


def test_a_promise_that_is_never_kept_ends_with_the_work_it_waits_for(q: Q) -> None:
    """A worker is kept free for a gang only while something it waits for still runs."""
    workers = q.workers(2)
    q.submit(budget_s=100)
    busy = [c for w in workers for c in w.claim(max_jobs=1)]
    gang = q.submit_gang(2)
    q.tick()
    assert q.value("select count(*) from gangq.earmarks") == 2
    idle = next(w for w in workers if w.incarnation != busy[0].incarnation)
    q.submit(budget_s=1000)
    assert idle.claim() == [], "it would run too long"
    other = next(w for w in workers if w is not idle)
    busy[0].complete()
    other.retire()
    q.tick()
    assert gang.state == "blocked"
    assert q.sql("select * from gangq.earmarks") == [], "it fits nowhere any more: nothing is kept for it"
    assert len(idle.claim()) == 1


def test_a_pause_holds_every_kind_that_waits_in_the_queue(q: Q) -> None:
    q.workers(2)
    q.call("set_queue", name="default", paused=True)
    q.submit_gang(1), q.submit_gang(2), q.submit_gang(2, cpus=1, wait_for_hardware=True)
    q.tick()
    assert [v["gate"] for v in q.sql("select gate from gangq.verdicts")] == ["paused"] * 3


def test_what_a_whole_gang_cannot_have_a_single_member_can(q: Q) -> None:
    workers = q.workers(2)
    running = q.submit_gang(2, failure_policy="restart_member", max_attempts=9)
    q.tick()
    claims = [w.take() for w in workers]
    whole = q.submit_gang(2, failure_policy="restart_member", max_attempts=9, priority=1)
    claims[1].fail()
    q.later(700)
    for worker in workers:
        worker.beat()
    q.tick()
    assert (whole.state, running.state) == ("blocked", "running")
    assert {m["state"] for m in running.members} == {"running", "reserved"}


def test_what_is_kept_is_kept_until_the_start_as_it_is_planned_now(q: Q) -> None:
    late = q.submit(budget_s=5000)
    q.submit(budget_s=1000)
    claims = {claim.job_id: claim for claim in (worker.take() for worker in q.workers(2))}
    gang = q.submit_gang(2)
    for end_s in (5000, 1000):
        q.tick()
        kept = q.sql(
            "select distinct extract(epoch from e.until - gangq.now())::integer as s from gangq.earmarks e "
            "where e.gang_id = %(id)s",
            id=gang.id,
        )
        assert [row["s"] for row in kept] == [end_s]
        if end_s == 5000:
            claims[late].complete()


def promises(q: Q) -> list[Row]:
    """Planned starts, and what is kept for them."""
    return q.sql(
        "select p.gang_id, p.starts_at, e.incarnation, e.until, e.slots from gangq.plans p "
        "left join gangq.earmarks e on e.gang_id = p.gang_id order by 1, 3"
    )


def promised(q: Q, *workers: Worker) -> Gang:
    """A gang that waits for what the first of these workers runs; the others are kept free for it."""
    q.submit(budget_s=100)
    workers[0].take()
    gang = q.submit_gang(len(workers))
    q.tick()
    assert [row["gang_id"] for row in promises(q)] == [gang.id] * len(workers)
    q.submit(count=5, budget_s=1e6)
    assert workers[1].claim() == [], "it would run too long"
    return gang


def test_a_start_that_meets_a_worker_which_is_claiming_keeps_its_plan_and_what_is_kept_for_it(
    q: Q, dsn: str
) -> None:
    workers = q.workers(2)
    gang = promised(q, *workers)
    before = promises(q)
    q.sql("select gangq.complete(array[id], array[token]) from gangq.live_jobs where state = 'running'")
    with q.connected(dsn) as other, other.db.transaction():
        claiming = "select 1 from gangq.incarnations where id = %(id)s for no key update"
        other.sql(claiming, id=workers[1].incarnation)
        assert q.place() == {"placed": 0, "again": True}
        assert promises(q) == before
        assert workers[0].claim() == [], "the place that has become free is still kept"
    assert q.place()["placed"] == 1
    assert gang.state == "reserved"
    assert promises(q) == []


def test_the_end_of_plain_jobs_is_not_that_of_devices_nobody_holds(q: Q) -> None:
    """A plain job holds a share of a slot and nothing else."""
    workers = [q.worker(f"w{n}", slots=3, devices=gpus(80000, prefix=f"w{n}-")) for n in (1, 2)]
    q.submit(gpus=1, budget_s=100)
    workers[1].take()
    q.submit(count=2, budget_s=5000)
    assert [len(w.claim(max_jobs=1)) for w in workers] == [1, 1]
    gang = q.submit_gang(2, gpus=1)
    q.tick()
    assert gang.state == "blocked"
    starts_at = [row["starts_at"] - q.clock.now() for row in q.sql("select starts_at from gangq.plans")]
    assert starts_at == [timedelta(seconds=100)]
    assert q.sql("select gpus, slots from gangq.earmarks") == [{"gpus": 1, "slots": 1}] * 2


def test_a_kind_that_fits_nowhere_is_planned_once_in_a_pass(q: Q) -> None:
    worker = q.worker(slots=8, devices=gpus(*[80000] * 8))
    q.submit(count=8, gpus=1)
    assert len(worker.claim()) == 8
    q.sql(
        "select gangq.submit_gang('t', 8, gpus => 1, "
        'options => \'{"vram_mb": 90000, "wait_for_hardware": true}\') from generate_series(1, 100)'
    )
    q.submit_gang(8, gpus=1)
    with q.db.transaction():
        q.sql("set local track_functions = 'pl'")
        gates = q.sql("select gate, count(*) as n from gangq.decide() group by 1 order by 1")
        planned = q.value("select calls from pg_stat_xact_user_functions where funcname = 'plan_start'")
    assert gates == [{"gate": "capacity", "n": 1}, {"gate": "infeasible", "n": 1}]
    assert planned == 2, "each kind once"

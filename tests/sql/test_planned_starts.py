"""Planned starts: the first that wait are told when, later ones pass only if that delays nobody, nobody starves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sql.drive import PLACED, Claim, Gang, Q, Row, Worker, gpus


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


def lasting(q: Q, gang: Any, seconds: float) -> Any:
    """This gang with that budget."""
    q.sql("update gangq.live_gangs set budget_s = %(s)s where id = %(id)s", s=seconds, id=gang.id)
    return gang


def test_the_plan_and_what_workers_keep_for_it_are_written_as_decided(q: Q) -> None:
    workers = [q.worker(f"w{n}", slots=2, memory_mb=1000, cpus=4, devices=[]) for n in range(2)]
    q.submit(count=2, budget_s=500, **PLACED)
    for worker in workers:
        worker.claim(max_jobs=1)
    gang = q.submit_gang(4, memory_mb=100, cpus=0.5)
    q.tick()
    (plan,) = q.sql("select * from gangq.plans")
    assert (plan["ask"], plan["place"], plan["starts_at"]) == (
        f"g{gang.id}",
        1,
        q.clock.now() + timedelta(seconds=500),
    )
    seats = q.planned_seats()
    assert [seat["incarnation"] for seat in seats] == [w.incarnation for w in workers]
    for seat in seats:
        assert (seat["devices"], seat["slots"], seat["memory_mb"], seat["millicpus"]) == ([], 2, 200, 1000)
    assert q.sql("select seats from gangq.planned") == [{"seats": 4}]
    gang.cancel()
    q.tick()
    assert q.sql("select * from gangq.plans") == []


def test_the_estimate_is_the_budget_until_the_tasks_own_history_says_less(q: Q) -> None:
    workers = q.workers(2)
    q.submit(task="long", budget_s=1000, **PLACED)
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


def run_what_is_placed(
    q: Q, workers: list[Worker], claims: dict[Claim, float], until: float, most: int = 1
) -> None:
    """Every worker claims; what it gets runs until then."""
    for worker in workers:
        worker.beat()
        for claim in worker.claim(max_jobs=most):
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


def done(claim: Claim, worker: Worker) -> list[Claim]:
    """It is done, and what its worker finds in the place that it leaves."""
    rows = worker.q.call(
        "complete_and_claim",
        incarnation=worker.incarnation,
        job_ids=[claim.job_id],
        tokens=[claim.token],
        lane="placed",
    )
    return [Claim(worker.q, row, worker.incarnation) for row in rows if row["outcome"] == "claimed"]


@pytest.mark.parametrize("priority", [0, 100])
def test_a_single_job_of_all_devices_in_a_stream_of_small_ones_starts_within_one_of_their_budgets(
    q: Q, priority: int
) -> None:
    workers = [q.worker(f"w{n}", slots=4, devices=gpus(*[80] * 4, prefix=f"w{n}-")) for n in range(2)]
    q.call("configure", tick_s=10)
    at = {worker.incarnation: worker for worker in workers}
    now, running, large, refilled = 0.0, {}, None, 0
    for step in range(60):
        for claim in [c for c, ends in running.items() if ends <= now]:
            del running[claim]
            for follower in done(claim, at[claim.incarnation]):
                running[follower] = now + 20 + 5 * (len(running) % 4)
                refilled += 1
        # Some always wait, and no more than a round of them.
        while q.value("select count(*) from gangq.live_jobs where state = 'pending' and priority = 0") < 4:
            q.submit(count=3, gpus=1, budget_s=50)
        if step == 12:
            large = q.submit(gpus=4, budget_s=50, priority=priority)
        q.tick()
        run_what_is_placed(q, workers, running, now + 20 + 5 * (step % 4), most=4)
        if large is not None and q.state(large) == "running":
            break
        assert len(running) == 8 or step < 2 or large is not None
        q.later(5)
        now += 5
    assert large is not None
    assert q.state(large) == "running"
    assert now <= 12 * 5 + 50 + (0 if priority else 50), "what came before it has ended"
    assert refilled >= 4, "places were refilled until it came"


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
    q.submit(budget_s=100, **PLACED)
    busy = [c for w in workers for c in w.claim(max_jobs=1)]
    gang = q.submit_gang(2)
    q.tick()
    assert len(q.planned_seats()) == 2
    idle = next(w for w in workers if w.incarnation != busy[0].incarnation)
    q.submit(budget_s=1000, **PLACED)
    assert idle.claim() == [], "it would run too long"
    other = next(w for w in workers if w is not idle)
    busy[0].complete()
    other.retire()
    q.tick()
    assert gang.state == "blocked"
    assert q.sql("select * from gangq.plans") == [], "it fits nowhere any more: nothing is kept for it"
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
    late = q.submit(budget_s=5000, **PLACED)
    q.submit(budget_s=1000, **PLACED)
    claims = {claim.job_id: claim for claim in (worker.take() for worker in q.workers(2))}
    gang = q.submit_gang(2)
    for end_s in (5000, 1000):
        q.tick()
        assert [(seat["ask"], seat["starts_at"] - q.clock.now()) for seat in q.planned_seats()] == [
            (f"g{gang.id}", timedelta(seconds=end_s))
        ] * 2
        if end_s == 5000:
            claims[late].complete()


def planned_for(q: Q, gang: Gang) -> list[Row]:
    """The seats of its planned start."""
    return [seat for seat in q.planned_seats() if seat["ask"] == f"g{gang.id}"]


def promised(q: Q, *workers: Worker) -> Gang:
    """A gang that waits for what the first of these workers runs; the others are kept free for it."""
    q.submit(budget_s=100, **PLACED)
    workers[0].take()
    gang = q.submit_gang(len(workers))
    q.tick()
    assert len(planned_for(q, gang)) == len(workers)
    q.submit(count=5, budget_s=1e6, **PLACED)
    assert workers[1].claim() == [], "it would run too long"
    return gang


def test_a_start_that_meets_a_worker_which_is_claiming_keeps_its_plan_and_what_is_kept_for_it(
    q: Q, dsn: str
) -> None:
    workers = q.workers(2)
    gang = promised(q, *workers)
    before = planned_for(q, gang)
    q.sql("select gangq.complete(array[id], array[token]) from gangq.live_jobs where state = 'running'")
    with q.connected(dsn) as other, other.db.transaction():
        claiming = "select 1 from gangq.incarnations where id = %(id)s for no key update"
        other.sql(claiming, id=workers[1].incarnation)
        assert q.place() == {"placed": 0, "again": True}
        assert planned_for(q, gang) == before
        assert workers[0].claim() == [], "the place that has become free is still kept"
    assert q.place()["placed"] == 1
    assert gang.state == "reserved"
    assert planned_for(q, gang) == []


def test_the_end_of_light_jobs_is_waited_for_by_nobody(q: Q) -> None:
    """A light job holds a light slot and nothing else."""
    workers = [q.worker(f"w{n}", slots=3, devices=gpus(80000, prefix=f"w{n}-")) for n in (1, 2)]
    q.submit(gpus=1, budget_s=100)
    assert sum(len(w.claim()) for w in workers) == 1
    q.submit(count=2, budget_s=5000)
    assert [len(w.claim(max_jobs=1)) for w in workers] == [1, 1]
    gang = q.submit_gang(2, gpus=1)
    q.tick()
    assert gang.state == "blocked"
    starts_at = [row["starts_at"] - q.clock.now() for row in q.sql("select starts_at from gangq.plans")]
    assert starts_at == [timedelta(seconds=100)]
    assert [len(seat["devices"]) for seat in q.planned_seats()] == [1, 1]

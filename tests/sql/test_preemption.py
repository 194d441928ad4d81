"""A gang that cannot start displaces what has a lower priority: as little as possible, and only if it then fits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sql.drive import PLACED, Q, Worker, ack_all, gpus


def fleet(q: Q, count: int, slots: int = 1, devices: int = 0, **offer: Any) -> list[Worker]:
    """Workers w1, w2, ..., each on a host of its own."""
    return [
        q.worker(f"w{n + 1}", slots=slots, devices=gpus(*[80000] * devices, prefix=f"w{n + 1}-"), **offer)
        for n in range(count)
    ]


def displaced(q: Q) -> list[tuple[int | None, int | None]]:
    """Gang or solo job, as the view has them."""
    rows = q.sql("select * from gangq.preemptions order by at, gang_id, job_id")
    return [(row["gang_id"], row["job_id"]) for row in rows]


def test_a_gang_of_lower_priority_makes_room_and_comes_back(q: Q) -> None:
    workers = fleet(q, 2, devices=1)
    low, claims = q.running_gang(*workers, gpus=1)
    for claim in claims:
        claim.save(7)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, gpus=1, priority=5)
    q.tick()
    assert (low.state, high.state) == ("draining", "blocked")
    (event,) = q.events("preempt")
    assert event["gang_id"] == low.id
    assert event["data"]["for"] == high.id
    assert event["data"]["lost_s"] == pytest.approx(620, abs=5), "two devices since the checkpoint"
    assert q.events("drain")[-1]["reason"] == f"displaced by gang g{high.id}"
    ack_all(claims)
    q.tick()
    assert (low.state, high.state) == ("blocked", "reserved")
    winners = high.claimed_by(*workers)
    assert [row["attempts"] for row in low.members] == [0, 0], "nobody is charged"
    assert low.live["preemptions"] == 1
    assert q.planned_seats(kept=True) == []
    q.beyond_min_run(*workers)
    q.tick()
    assert high.state == "running", "it cannot displace its displacer"
    for claim in winners:
        claim.complete()
    assert [claim["checkpoint_step"] for claim in low.start(*workers)] == [7, 7]


WHY_NOT = (
    "equal priority",
    "protected",
    "its queue is",
    "young",
    "does not preempt",
    "no budget",
    "not enough",
)


@pytest.mark.parametrize("why", WHY_NOT)
def test_nobody_is_displaced(q: Q, why: str) -> None:
    workers = fleet(q, 2)
    low, _ = q.running_gang(*workers)
    if why == "protected":
        q.sql("update gangq.live_gangs set preemptible = false")
    if why != "young":
        q.beyond_min_run(*workers)
    if why == "its queue is":
        q.sql("update gangq.queues_table set preemptible = false")
    if why == "does not preempt":
        q.sql("update gangq.queues_table set preempts = false")
    if why == "no budget":
        q.sql("update gangq.settings set preemptions_per_pass = 0")
    size, priority = 3 if why == "not enough" else 2, 0 if why == "equal priority" else 5
    high = q.submit_gang(size, priority=priority, wait_for_hardware=True)
    q.settle()
    assert (low.state, high.state) == ("running", "blocked")
    assert displaced(q) == []


def test_one_victim_that_suffices_is_preferred_to_several_cheaper_ones(q: Q) -> None:
    workers = fleet(q, 4)
    small = [q.running_gang(worker, priority=-5)[0] for worker in workers[:2]]
    large, _ = q.running_gang(*workers[2:], priority=-1)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2)
    q.tick()
    assert displaced(q) == [(large.id, None)]
    assert [gang.state for gang in small] == ["running", "running"]
    assert high.state == "blocked"


def test_the_cheapest_goes_lowest_priority_then_least_lost_then_youngest(q: Q) -> None:
    workers = fleet(q, 5)
    dear, _ = q.running_gang(workers[0], priority=-1)
    lower, _ = q.running_gang(workers[1], priority=-2)
    saved, claims = q.running_gang(workers[2], priority=-2)
    older, _ = q.running_gang(workers[3], priority=-3)
    q.live_on(30, *workers, tick=False)
    younger, _ = q.running_gang(workers[4], priority=-3)
    q.beyond_min_run(*workers)
    claims[0].save(1)
    order = [younger, older, saved, lower, dear]
    for n in range(len(order)):
        q.submit_gang(1, priority=5)
        q.tick()
        assert [gang.state for gang in order] == ["draining"] * (n + 1) + ["running"] * (4 - n)


def test_solo_jobs_are_displaced_too_and_come_back_with_their_attempts(q: Q) -> None:
    workers = fleet(q, 2, slots=2, devices=2)
    jobs = q.submit(count=4, gpus=1)
    claims = [c for worker in workers for c in worker.claim()]
    assert len(claims) == 4
    q.beyond_min_run(*workers)
    high = q.submit_gang(1, gpus=2, priority=1)
    q.tick()
    gone = [job for _, job in displaced(q)]
    assert len(gone) == 2
    assert high.state == "blocked"
    assert {q.job(j)["state"] for j in gone} == {"preempting"}
    on = {q.job(j)["worker"] for j in gone}
    assert len(on) == 1, "both leave the same worker"
    assert {event["data"]["for"] for event in q.events("preempt")} == {high.id}
    for claim in claims:
        if claim.job_id in gone:
            assert claim.ack() == "pending"
    q.tick()
    assert high.state == "reserved"
    assert {q.job(j)["state"] for j in gone} == {"pending"}
    assert {q.job(j)["attempts"] for j in gone} == {0}
    assert set(jobs) >= set(gone)


def test_what_is_freed_is_kept_for_the_gang_it_was_freed_for(q: Q) -> None:
    workers = fleet(q, 2)
    low, claims = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, priority=5)
    q.tick()
    assert [(seat["ask"], seat["incarnation"]) for seat in q.planned_seats(kept=True)] == [
        (f"g{high.id}", worker.incarnation) for worker in workers
    ]
    # A gang of the same priority finds the first place free and does not get it.
    rival = q.submit_gang(1, priority=5)
    claims[0].ack()
    q.tick()
    assert (high.state, rival.state) == ("blocked", "blocked")
    gate = q.value("select gate from gangq.verdicts where kind_id = %(kind)s", kind=high.live["kind_id"])
    assert gate == "stopping"
    claims[1].ack()
    q.tick()
    assert (high.state, low.state, rival.state) == ("reserved", "blocked", "blocked")
    assert len(q.events("preempt")) == 1


def test_what_nobody_takes_up_in_time_is_kept_no_longer(q: Q) -> None:
    workers = fleet(q, 2)
    _, claims = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, priority=5)
    q.tick()
    ack_all(claims)
    workers[0].retire()
    q.live_on(200, workers[1])
    assert q.planned_seats(kept=True) == []
    assert high.state == "blocked"


def test_a_cancelled_gang_keeps_nothing(q: Q) -> None:
    workers = fleet(q, 2)
    q.running_gang(*workers)
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, priority=5)
    q.tick()
    high.cancel()
    assert q.sql("select * from gangq.plans") == []


def test_two_gangs_in_one_pass_displace_different_victims(q: Q) -> None:
    workers = fleet(q, 4)
    lows = [q.running_gang(*workers[:2])[0], q.running_gang(*workers[2:])[0]]
    q.beyond_min_run(*workers)
    highs = [q.submit_gang(2, priority=5), q.submit_gang(2, priority=4)]
    assert sorted(v for d in q.decisions("stop").values() for v in d.stop) == sorted(
        f"g{low.id}" for low in lows
    )
    q.tick()
    rows = q.sql("select for_gang, gang_id from gangq.preemptions")
    assert sorted(row["for_gang"] for row in rows) == [high.id for high in highs]
    assert sorted(row["gang_id"] for row in rows) == [low.id for low in lows]


def test_who_is_displaced_by_a_single_job_is_on_record_with_it(q: Q) -> None:
    workers = fleet(q, 1)
    low, _ = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    job = q.submit(priority=5, **PLACED)
    q.submit(priority=5, **PLACED)
    q.tick()
    (row,) = q.sql("select for_gang, for_job, gang_id, reason from gangq.preemptions")
    assert (row["for_gang"], row["for_job"], row["gang_id"]) == (None, job, low.id)
    assert row["reason"] == "displaced by a single job of priority 5"


def test_what_one_gang_displaces_has_room_for_the_next_too(q: Q) -> None:
    workers = fleet(q, 2)
    low, _ = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    first, second = q.submit_gang(1, priority=5), q.submit_gang(1, priority=4)
    assert {ask: one.stop for ask, one in q.decisions("stop").items()} == {f"g{first.id}": (f"g{low.id}",)}
    assert list(q.decisions("plan")) == [f"g{second.id}"]


def test_a_pass_begins_no_preemption_beyond_its_budget(q: Q) -> None:
    workers = fleet(q, 3)
    for worker in workers:
        q.running_gang(worker)
    q.beyond_min_run(*workers)
    q.sql("update gangq.settings set preemptions_per_pass = 2")
    for _ in workers:
        q.submit_gang(1, priority=5)
    assert len(q.decisions("stop")) == 2


def test_capacity_that_is_leaving_already_is_waited_for(q: Q) -> None:
    workers = fleet(q, 2)
    low, _ = q.running_gang(workers[0])
    other, _ = q.running_gang(workers[1])
    q.beyond_min_run(*workers)
    q.call("preempt_gang", gang_id=other.id)
    high = q.submit_gang(1, priority=5)
    q.tick()
    assert low.state == "running"
    assert displaced(q) == []
    assert q.sql("select ask from gangq.plans") == [{"ask": f"g{high.id}"}]


def test_surplus_members_of_a_gang_that_shrinks_go_before_the_gang_does(q: Q) -> None:
    workers = fleet(q, 3)
    low, claims = q.running_gang(*workers, min_size=1, failure_policy="shrink")
    q.beyond_min_run(*workers)
    high = q.submit_gang(2, priority=5)
    q.tick()
    gone = sorted(job for _, job in displaced(q) if job)
    assert gone == sorted(claim.job_id for claim in claims if claim["rank"] > 0)
    assert [gang for gang, _ in displaced(q)] == [low.id, low.id]
    assert (low.state, low.live["world_size"]) == ("running", 1)
    assert len(q.planned_seats(kept=True)) == 2
    ack_all(claim for claim in claims if claim["rank"] > 0)
    q.tick()
    assert (low.state, high.state) == ("running", "reserved")


def test_all_seats_that_are_kept_on_one_worker_count_as_taken(q: Q) -> None:
    worker = q.worker("w0", slots=2, devices=[])
    _, claims = q.running_gang(worker, worker)
    q.beyond_min_run(worker)
    high = q.submit_gang(2, priority=5)
    q.tick()
    ack_all(claims)
    assert q.sql("select ask, kept, seats from gangq.planned") == [
        {"ask": f"g{high.id}", "kept": True, "seats": 2}
    ]
    assert q.sql("select slots from gangq.open_slots()") == [{"slots": 0}]


def test_a_seat_that_the_release_before_kept_counts_as_one(q: Q) -> None:
    """0.2.0 wrote an element of plans.seats for each seat, and no number."""
    worker = q.worker("w0", slots=2, devices=[])
    _, claims = q.running_gang(worker, worker)
    q.beyond_min_run(worker)
    q.submit_gang(2, priority=5)
    q.tick()
    ack_all(claims)
    q.sql(
        "update gangq.plans p set seats = (select jsonb_agg(s.value - 'slots') "
        "from jsonb_array_elements(p.seats || p.seats) s) returning p.ask"
    )
    assert q.sql("select seats from gangq.planned") == [{"seats": 2}]
    assert q.sql("select slots from gangq.open_slots()") == [{"slots": 0}]


def test_the_whole_gang_goes_when_its_surplus_is_not_enough(q: Q) -> None:
    workers = fleet(q, 3)
    low, _ = q.running_gang(*workers, min_size=2, failure_policy="shrink")
    q.beyond_min_run(*workers)
    high = q.submit_gang(3, priority=5)
    q.tick()
    assert (low.state, high.state) == ("draining", "blocked")
    assert {row["state"] for row in low.members} == {"preempting"}


@pytest.mark.parametrize("size", [1, 2])
def test_of_a_gang_that_shrinks_only_what_leaves_is_waited_for(q: Q, size: int) -> None:
    workers = fleet(q, 3)
    low, claims = q.running_gang(*workers, min_size=2, failure_policy="shrink")
    q.beyond_min_run(*workers)
    last = max(claims, key=lambda claim: claim["rank"])
    assert q.one("shrink_gang", gang_id=low.id, job_ids=[last.job_id])
    high = q.submit_gang(size, priority=5)
    decision = q.decisions()[f"g{high.id}"]
    expected = ("plan", ()) if size == 1 else ("stop", (f"g{low.id}",))
    assert (decision.action, decision.stop) == expected


def test_a_gang_of_which_a_member_is_done_is_left_alone(q: Q) -> None:
    workers = fleet(q, 2)
    _low, claims = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    claims[0].complete()
    high = q.submit_gang(2, priority=5)
    q.tick()
    assert displaced(q) == [], "it could not run again"
    assert high.state == "blocked"


def test_who_was_stopped_as_often_as_allowed_is_left_alone(q: Q) -> None:
    (worker,) = fleet(q, 1)
    q.running_gang(worker)
    q.beyond_min_run(worker)
    q.sql("update gangq.live_jobs set stops = (select max_stops from gangq.settings)")
    q.submit_gang(1, priority=5)
    q.tick()
    assert displaced(q) == []


def test_a_planned_start_is_not_delayed_by_a_preemption(q: Q) -> None:
    """The first in line may not displace; it waits for the end of what runs, and that place is its."""
    q.call("set_queue", name="other")
    q.sql("update gangq.queues_table set preempts = false where name = 'other'")
    worker = q.worker("w1", queues=["default", "other"])
    low, _ = q.running_gang(worker)
    q.beyond_min_run(worker)
    first = q.submit_gang(1, queue="other", priority=9)
    q.submit_gang(1, priority=5)
    q.tick()
    assert q.sql("select ask from gangq.plans where place = 1") == [{"ask": f"g{first.id}"}]
    assert low.state == "running"
    assert displaced(q) == []


def test_explain_names_whom_it_waits_for(q: Q) -> None:
    workers = fleet(q, 1)
    low, _ = q.running_gang(*workers)
    q.beyond_min_run(*workers)
    high = q.submit_gang(1, priority=5)
    q.tick()
    rows = {row["gate"]: row for row in q.call("explain_gang", gang_id=high.id)}
    assert f"it starts as soon as these have stopped: g{low.id} (decided" in rows["stopping"]["detail"]
    assert rows["unblock"]["detail"] == f"the end of g{low.id}"
    q.place()
    rows = {row["gate"]: row for row in q.call("explain_gang", gang_id=high.id)}
    assert f"as soon as these have stopped: g{low.id}" in rows["stopping"]["detail"]


@pytest.mark.own_database
def test_to_explain_a_gang_reads_nothing_of_what_happened_long_ago(q: Q) -> None:
    workers = fleet(q, 1)
    q.running_gang(*workers)
    q.beyond_min_run(*workers)
    gang = q.submit_gang(1, priority=5)
    q.tick()
    read = (
        "select coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) from pg_stat_xact_user_tables "
        "where relname ~ '^events'"
    )
    with q.db.transaction():
        before = q.value(read)
        assert q.call("explain_gang", gang_id=gang.id)
        assert q.value(read) == before


# Against brute force ----------------------------------------------------------------------------------------


class Fleet:
    """A small random fleet full of random work, and what one gang more would need of it, in plain Python."""

    def __init__(self, q: Q, seed: int) -> None:
        self.q = q
        self.rng = rng = random.Random(seed)
        self.workers: list[Worker] = []
        for n in range(rng.randint(2, 4)):
            devices = gpus(*[rng.choice((40, 80)) for _ in range(rng.randint(0, 3))], prefix=f"{n}-")
            offer = {"slots": rng.randint(1, 4), "memory_mb": rng.choice((4000, 8000)), "devices": devices}
            self.workers.append(q.worker(f"w{n}", host=f"h{n // rng.randint(1, 2)}", **offer))
        for _ in range(10):
            shape = self.shape()
            shape["priority"] = rng.choice((-3, -2, -2, -1, 0, 0, 0, 1))
            if rng.random() < 0.6:
                q.submit(wait_for_hardware=True, **shape)
            else:
                q.submit_gang(rng.randint(1, 2), wait_for_hardware=True, **shape)
        for _ in range(2):
            q.place()
            for worker in self.workers:
                # As worker.claim() does, without a pass before each.
                q.call("claim", incarnation=worker.incarnation, max_jobs=10)
        q.call(
            "cancel",
            job_ids=[r["id"] for r in q.sql("select id from gangq.live_jobs where state = 'pending'")],
            gang_ids=[r["id"] for r in q.sql("select id from gangq.live_gangs where state = 'blocked'")],
        )
        self.asked = self.shape() | {"memory_mb": rng.choice((1000, 3000))}
        self.size = rng.randint(1, 3)
        self.strategy = rng.choice(("pack", "pack", "spread", "strict_pack", "strict_spread"))
        self.gang = q.submit_gang(self.size, priority=1, wait_for_hardware=True, **self.asked)
        q.sql(
            "update gangq.kind_roles set strategy = %(strategy)s where kind_id = %(kind)s",
            strategy=self.strategy,
            kind=self.gang.live["kind_id"],
        )
        self.units: dict[int, int] = {}
        self.held: dict[int, list[dict[str, Any]]] = {}
        self.rows = {worker.incarnation: worker.row for worker in self.workers}
        self.devices = q.sql(
            "select r.id, r.vram_mb, r.offered_by, h.job_id from gangq.device_registry r "
            "left join gangq.device_holds h on h.device_id = r.id"
        )
        for row in q.sql(
            "select coalesce(j.gang_id, -j.id) as unit, j.priority, j.id, j.incarnation, s.memory_mb "
            "from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id where j.state = 'running'"
        ):
            self.units[row["unit"]] = row["priority"]
            self.held.setdefault(row["unit"], []).append(row)

    def shape(self) -> dict[str, Any]:
        rng = self.rng
        count = rng.choice((0, 1, 1, 2))
        vram_mb = rng.choice((0, 80)) if count else 0
        return {"gpus": count, "vram_mb": vram_mb, "memory_mb": rng.choice((500, 1000, 2000))}

    def fits_without(self, gone: tuple[int, ...]) -> bool:
        """Whether the gang fits once these units are gone, counted by hand."""
        left = [row for unit, rows in self.held.items() if unit not in gone for row in rows]
        staying = {row["id"] for row in left}
        rooms: dict[str, int] = {}
        for incarnation, worker in self.rows.items():
            here = [row for row in left if row["incarnation"] == incarnation]
            room = worker["slots"] - len(here)
            room = min(
                room, (worker["memory_mb"] - sum(row["memory_mb"] for row in here)) // self.asked["memory_mb"]
            )
            if self.asked["gpus"]:
                usable = [
                    d
                    for d in self.devices
                    if d["offered_by"] == incarnation
                    and d["vram_mb"] >= self.asked["vram_mb"]
                    and d["job_id"] not in staying
                ]
                room = min(room, len(usable) // self.asked["gpus"])
            rooms[worker["host"]] = rooms.get(worker["host"], 0) + room
        if self.strategy == "strict_pack":
            return max(rooms.values()) >= self.size
        if self.strategy == "strict_spread":
            return sum(room > 0 for room in rooms.values()) >= self.size
        return sum(rooms.values()) >= self.size


@pytest.mark.slow
def test_victims_suffice_and_are_minimal_and_are_found_whenever_there_are_any(q: Q) -> None:
    q.sql("update gangq.queues_table set min_run_s = 0")
    tally = {"none": 0, "one": 0, "several": 0}
    for seed in range(50):
        with q.db.transaction(force_rollback=True):
            fleet = Fleet(q, seed)
            if fleet.fits_without(()):
                continue
            lower = [unit for unit, priority in fleet.units.items() if priority < 1]
            found = [
                [int(unit[1:]) if unit[0] == "g" else -int(unit[1:]) for unit in one.stop]
                for one in q.decisions("stop").values()
            ]
            if not fleet.fits_without(tuple(lower)):
                assert found == [], seed
                tally["none"] += 1
                continue
            assert len(found) == 1, (seed, found)
            victims = found[0]
            assert set(victims) <= set(lower), seed
            assert fleet.fits_without(tuple(victims)), (seed, "enough")
            for spared in victims:
                assert not fleet.fits_without(tuple(v for v in victims if v != spared)), (seed, "minimal")
            alone = [fleet.units[unit] for unit in lower if fleet.fits_without((unit,))]
            if alone:
                assert [fleet.units[v] for v in victims] == [min(alone)], (
                    seed,
                    "one, of the lowest priority",
                )
            else:
                assert len(victims) > 1
            tally["one" if alone else "several"] += 1
    assert min(tally.values()) >= 5, tally

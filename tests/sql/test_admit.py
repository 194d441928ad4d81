"""Gangs are placed: all or nothing, packed, in order, with planned starts; and reservations that go stale."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, MISSING, PLACED, WRONG_STATE, Q, Worker, gpus, refused


def hosts_of(q: Q, gang: Any) -> list[str]:
    return [m["host"] for m in gang.members]


# All or nothing ---------------------------------------------------------------------------------------------


def test_a_gang_is_reserved_whole_or_not_at_all(q: Q) -> None:
    gang = q.submit_gang(4)
    q.workers(3)
    q.tick()
    assert gang.states == ["blocked"] * 4
    fourth = q.worker("w4")
    q.tick()
    assert gang.states == ["reserved"] * 4
    assert len(set(gang.placed_on)) == 4
    assert (gang.row["epoch"], gang.state) == (1, "reserved")
    assert fourth.free["slots"] == 0


def test_a_reservation_wakes_each_chosen_worker_and_is_an_event(q: Q, dsn: str) -> None:
    gang = q.submit_gang(2)
    workers = q.workers(2)
    with psycopg.connect(dsn, autocommit=True) as ear:
        for worker in workers:
            ear.execute(f"listen gangq_{worker.incarnation}")
        q.tick()
        told = {(n.channel, n.payload) for n in ear.notifies(timeout=2, stop_after=2)}
    assert told == {(f"gangq_{w.incarnation}", "claim") for w in workers}
    (event,) = q.events("reserve")
    assert (event["gang_id"], event["epoch"]) == (gang.id, 1)
    assert event["data"]["hosts"] == {"host-w1": 1, "host-w2": 1}


def test_a_member_needs_all_of_its_devices_on_one_worker(q: Q) -> None:
    gang = q.submit_gang(2, gpus=2)
    q.worker("a", slots=4, devices=gpus(1, 1, 1))
    q.worker("b", devices=gpus(1, prefix="H"))
    q.tick()
    assert gang.state == "blocked", "4 devices, but only one pair on one worker"
    q.worker("c", devices=gpus(1, 1, prefix="I"))
    q.tick()
    assert gang.state == "reserved"
    held = q.sql("select job_id, count(*) as n from gangq.device_holds group by job_id")
    assert {row["n"] for row in held} == {2}


def test_the_members_devices_are_held_from_the_reservation_on(q: Q) -> None:
    q.submit_gang(2, gpus=1)
    worker = q.worker(slots=3, devices=gpus(1, 1))
    q.tick()
    q.submit(gpus=1)
    claims = worker.claim()
    assert [c["gang_id"] is not None for c in claims] == [True, True]
    assert len({d["uuid"] for c in claims for d in c["devices"]}) == 2


# Packing ----------------------------------------------------------------------------------------------------


def test_members_go_on_as_few_hosts_as_possible_with_contiguous_ranks(q: Q) -> None:
    gang = q.submit_gang(6)
    for host, slots in (("h1", 2), ("h2", 4), ("h3", 1), ("h4", 3)):
        q.worker(host, host=host, slots=slots)
    q.tick()
    assert hosts_of(q, gang) == ["h2"] * 4 + ["h1"] * 2, "the last host is the tightest that holds the rest"


def test_a_small_gang_does_not_break_up_a_large_host(q: Q) -> None:
    gang = q.submit_gang(2)
    for host, slots in (("large", 8), ("right", 2), ("small", 1)):
        q.worker(host, host=host, slots=slots)
    q.tick()
    assert hosts_of(q, gang) == ["right", "right"]


def test_ranks_are_contiguous_per_host_when_a_host_has_several_workers(q: Q) -> None:
    gang = q.submit_gang(4, gpus=1)
    for n in range(4):
        q.worker(f"w{n}", host=f"h{n % 2}", devices=gpus(1, prefix=f"D{n}"))
    q.tick()
    hosts = hosts_of(q, gang)
    assert hosts in (["h0", "h0", "h1", "h1"], ["h1", "h1", "h0", "h0"])


# Order ------------------------------------------------------------------------------------------------------


def placed(q: Q, *gangs: Any) -> list[bool]:
    return [g.state == "reserved" for g in gangs]


def test_priority_comes_before_size(q: Q) -> None:
    large, small = q.submit_gang(3, priority=0), q.submit_gang(2, priority=1)
    q.workers(3)
    q.tick()
    assert placed(q, large, small) == [False, True]


def test_within_a_priority_the_oldest_goes_first_by_default(q: Q) -> None:
    small, large = q.submit_gang(2), q.submit_gang(3)
    q.workers(3)
    q.tick()
    assert placed(q, small, large) == [True, False]


def test_in_a_largest_first_queue_the_largest_goes_first_within_a_priority(q: Q) -> None:
    q.call("set_queue", name="default", policy="largest_first")
    small, large = q.submit_gang(2), q.submit_gang(3)
    q.workers(3)
    q.tick()
    assert placed(q, small, large) == [False, True]


def test_in_a_fifo_queue_the_oldest_goes_first(q: Q) -> None:
    q.call("set_queue", name="default", policy="fifo")
    small, large = q.submit_gang(2), q.submit_gang(3)
    q.workers(3)
    q.tick()
    assert placed(q, small, large) == [True, False]


def test_in_a_fifo_queue_the_oldest_goes_first_however_many_are_more_urgent(q: Q) -> None:
    q.call("set_queue", name="default", policy="fifo")
    oldest = q.submit_gang(1)
    q.sql("select gangq.submit_gang('train', 1, priority => 5) from generate_series(1, 201)")
    q.worker()
    q.tick()
    assert oldest.state == "reserved"


@pytest.mark.own_database
@pytest.mark.parametrize(("policy", "index"), [("fifo", "live_gangs_by_age"), ("fair", "live_gangs_blocked")])
def test_of_5000_gangs_of_a_kind_a_pass_reads_as_many_as_it_may_place(q: Q, policy: str, index: str) -> None:
    q.call("set_queue", name="default", policy=policy)
    q.submit_gang(1)
    with q.db.transaction(force_rollback=True):
        q.sql(
            "insert into gangq.live_gangs select (jsonb_populate_record(g, jsonb_build_object("
            "'id', g.id + n, 'order_key', g.order_key + n))).* from gangq.live_gangs g, generate_series(1, 5000) n"
        )
        q.sql("analyze gangq.live_gangs")
        counted = (
            "select pg_stat_get_xact_numscans(%(index)s::regclass) as scans, seq_tup_read + idx_tup_fetch as rows "
            "from pg_stat_xact_user_tables where relid = 'gangq.live_gangs'::regclass"
        )
        (before,) = q.sql(counted, index=f"gangq.{index}")
        assert q.value("select json_array_length(gangq.board() -> 'asks')") == 200
        (after,) = q.sql(counted, index=f"gangq.{index}")
        assert after["scans"] - before["scans"] == 1
        assert after["rows"] - before["rows"] < 1000


def test_equal_gangs_go_by_age(q: Q) -> None:
    first, second = q.submit_gang(2), q.submit_gang(2)
    q.workers(3)
    q.tick()
    assert placed(q, first, second) == [True, False]


def test_queues_take_turns_within_a_priority(q: Q) -> None:
    q.call("set_queue", name="other")
    here = [q.submit_gang(1) for _ in range(3)]
    there = [q.submit_gang(1, queue="other") for _ in range(3)]
    for n in range(4):
        q.worker(f"w{n}", queues=["default", "other"])
    q.tick()
    assert placed(q, *here, *there) == [True, True, False, True, True, False]


def test_capacity_is_subtracted_after_each_placement(q: Q) -> None:
    gangs = [q.submit_gang(2, gpus=1, memory_mb=100, cpus=0.5) for _ in range(3)]
    q.worker(slots=10, memory_mb=10000, cpus=10, devices=gpus(1, 1, 1, 1))
    q.tick()
    assert placed(q, *gangs) == [True, True, False]
    assert list(q.decisions("plan")) == [f"g{gangs[2].id}"], "the third has to wait"


def test_a_shape_that_did_not_fit_does_not_keep_a_smaller_gang_of_it_from_fitting(q: Q) -> None:
    large, equal, small = q.submit_gang(5), q.submit_gang(5), q.submit_gang(2)
    q.workers(3)
    q.tick()
    assert placed(q, large, equal, small) == [False, False, True]


def test_a_gang_backing_off_or_due_later_is_not_placed_before_its_time(q: Q) -> None:
    due = q.clock.now().timestamp() + 60
    gang = q.submit_gang(1, due_at=q.value("select to_timestamp(%(due)s)", due=due))
    worker = q.worker()
    q.tick()
    assert gang.state == "blocked"
    assert q.one("tick", force=True)["next_in_s"] <= 60
    q.live_on(61, worker)
    assert gang.state == "reserved"


# Candidates -------------------------------------------------------------------------------------------------


def test_a_worker_silent_for_longer_than_15_s_is_no_candidate(q: Q) -> None:
    gang = q.submit_gang(1)
    worker = q.worker()
    q.later(16)
    q.tick()
    assert gang.state == "blocked"
    worker.beat()
    q.tick()
    assert gang.state == "reserved"


@pytest.mark.parametrize(
    "how", ["draining", "quarantined", "retired", "dead", "of another queue", "of other tasks"]
)
def test_a_worker_that_takes_nothing_is_no_candidate(q: Q, how: str) -> None:
    q.call("set_queue", name="other")
    worker = q.worker(
        queues=["other"] if how == "of another queue" else ["default"],
        tasks=["other"] if how == "of other tasks" else None,
    )
    if how == "draining":
        worker.retire(final=False)
    elif how == "quarantined":
        q.call("quarantine", worker="w1")
    elif how == "retired":
        worker.retire()
    elif how == "dead":
        worker.report_dead()
    gang = q.submit_gang(1, wait_for_hardware=True)
    q.tick()
    assert gang.state == "blocked"


# What waits for a planned start ------------------------------------------------------------------------------


def test_a_stream_of_smaller_work_does_not_starve_a_gang(q: Q) -> None:
    workers = q.workers(3)
    q.submit(count=3, **PLACED)
    running = [w.take() for w in workers]
    gang = q.submit_gang(3)
    q.tick()
    for _ in range(10):  # there is always another solo job, and it always fits at once
        q.submit(count=3, budget_s=1e6, **PLACED)
        if running:
            running.pop().complete()
        for worker in workers:
            worker.beat()
            assert [c for c in worker.claim() if c["gang_id"] is None] == []
        q.tick()
        if gang.state == "running":
            break
    assert gang.state == "running"
    assert f"g{gang.id}" not in [seat["ask"] for seat in q.planned_seats()], (
        "the promise ends with the placement"
    )


def test_a_higher_priority_solo_job_still_runs_on_a_worker_of_a_planned_start(q: Q) -> None:
    workers = q.workers(2)
    q.submit(**PLACED)
    q.place()
    busy = next(claim for worker in workers for claim in worker.claim())
    (idle,) = (worker for worker in workers if worker.incarnation != busy.incarnation)
    q.submit_gang(2)
    q.tick()
    assert len(q.planned_seats()) == 2
    q.submit(budget_s=1e6, **PLACED)
    assert idle.claim() == []
    urgent = q.submit(priority=1, budget_s=1e6, **PLACED)
    assert idle.take().job_id == urgent
    busy.complete()


def test_a_smaller_gang_behind_does_not_take_what_is_kept_for_the_first(q: Q) -> None:
    workers = q.workers(3)
    q.submit(**PLACED)
    workers[0].take()
    first, behind = q.submit_gang(3, priority=1), q.submit_gang(2)
    q.sql("update gangq.live_gangs set budget_s = 100000 where id = %(id)s", id=behind.id)
    q.tick()
    assert placed(q, first, behind) == [False, False], "it would still run when the first is to start"
    q.sql("update gangq.live_gangs set budget_s = 60 where id = %(id)s", id=behind.id)
    q.tick()
    assert placed(q, first, behind) == [False, True], "it ends before that"


def test_workers_beyond_what_the_first_gang_needs_are_not_kept(q: Q) -> None:
    workers = q.workers(4)
    q.submit(count=2, **PLACED)
    for worker in workers[:2]:
        worker.take()
    q.submit_gang(3)
    q.tick()
    assert len(q.planned_seats()) == 3
    q.submit(count=4, budget_s=1e6, **PLACED)
    assert sum(len(w.claim()) for w in workers) == 1


def test_a_gang_that_could_never_fit_keeps_nothing(q: Q) -> None:
    q.submit_gang(5)
    workers = q.workers(2)
    q.tick()
    q.submit(count=2, **PLACED)
    assert [len(w.claim()) for w in workers] == [1, 1]


def test_a_planned_start_goes_when_its_gang_is_cancelled(q: Q) -> None:
    workers = q.workers(2)
    q.submit(**PLACED)
    workers[0].take()
    gang = q.submit_gang(2)
    q.tick()
    gang.cancel()
    q.submit(budget_s=1e6, **PLACED)
    assert len(workers[1].claim()) == 1


# reserve_gang and rollback_gang called directly -------------------------------------------------------------


def test_reserve_gang_refuses_what_cannot_be(q: Q) -> None:
    gang, (a, b) = q.submit_gang(2), q.workers(2)
    ids = [a.incarnation, b.incarnation]
    with refused(MISSING, "999"):
        q.call("reserve_gang", gang_id=999, incarnations=ids)
    with refused(INVALID, "1 worker given for 2 members"):
        q.call("reserve_gang", gang_id=gang.id, incarnations=ids[:1])
    with refused(INVALID, "0 workers"):
        q.call("reserve_gang", gang_id=gang.id, incarnations=None)
    assert q.one("reserve_gang", gang_id=gang.id, incarnations=[a.incarnation, a.incarnation]) is False, (
        "one slot"
    )
    assert q.one("reserve_gang", gang_id=gang.id, incarnations=[a.incarnation, 999]) is False
    assert gang.states == ["blocked", "blocked"]
    assert q.one("reserve_gang", gang_id=gang.id, incarnations=ids) is True
    with refused(WRONG_STATE, "reserved"):
        q.call("reserve_gang", gang_id=gang.id, incarnations=ids)


def test_reserve_gang_does_not_wait_for_a_worker_that_is_claiming(q: Q) -> None:
    gang, worker = q.submit_gang(1), q.worker()
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.incarnations for update")
        q.sql("set lock_timeout = '1s'")
        assert q.one("reserve_gang", gang_id=gang.id, incarnations=[worker.incarnation]) is False
        assert q.place() == {"placed": 0, "again": True}
    assert q.place() == {"placed": 1, "again": False}


def test_rollback_gang_takes_back_only_what_nobody_started(q: Q) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    assert q.one("rollback_gang", gang_id=gang.id) is False
    q.tick()
    assert q.one("rollback_gang", gang_id=gang.id, reason="test") is True
    assert (gang.states, gang.placed_on) == (["blocked"] * 2, [None] * 2)
    assert q.one("rollback_gang", gang_id=gang.id) is False, "twice changes nothing"
    gang.skip_backoff()
    gang.start(*workers)
    assert q.one("rollback_gang", gang_id=gang.id) is False
    assert gang.state == "running"
    with refused(MISSING):
        q.call("rollback_gang", gang_id=999)


# Claim deadlines --------------------------------------------------------------------------------------------


def miss_deadline(q: Q, *workers: Worker) -> None:
    for _ in range(3):
        q.later(10.5)
        for worker in workers:
            worker.beat()
    q.tick()


def test_a_deadline_missed_by_all_rolls_the_gang_back_uncharged_and_passes_the_workers_over(q: Q) -> None:
    gang, workers = q.submit_gang(2, gpus=1), q.workers(0)
    workers = [q.worker(f"w{n}", devices=gpus(1, prefix=f"D{n}")) for n in range(2)]
    q.tick()
    miss_deadline(q, *workers)
    assert (gang.state, gang.row["placement_misses"], gang.row["attempts"]) == ("blocked", 1, 0)
    assert [m["attempts"] for m in gang.members] == [0, 0]
    assert q.sql("select * from gangq.device_holds") == []
    assert gang.row["not_before"] > q.clock.now()
    assert [e["gang_id"] for e in q.events("rollback")] == [gang.id]
    assert all(w.row["passed_over_until"] > q.clock.now() for w in workers)
    q.live_on(50, *workers)
    assert gang.state == "blocked", "both are passed over for 60 s"
    q.live_on(20, *workers)
    assert (gang.state, gang.row["epoch"]) == ("reserved", 2)


def test_a_passed_over_worker_still_claims_solo_jobs(q: Q) -> None:
    q.submit_gang(1)
    worker = q.worker()
    q.tick()
    miss_deadline(q, worker)
    q.submit()
    worker.take()


def test_a_deadline_missed_with_siblings_claimed_drains_the_gang_uncharged(q: Q) -> None:
    gang, workers = q.submit_gang(3), q.workers(3)
    q.tick()
    claims = gang.claimed_by(*workers[:2])
    miss_deadline(q, *workers)
    assert (gang.state, gang.row["drain_cause"]) == ("draining", "placement_miss")
    assert sorted(gang.states) == ["blocked", "preempting", "preempting"]
    assert workers[2].claim() == [], "too late: the reservation is gone"
    assert [c.ack() for c in claims] == ["preempted", "preempted"]
    assert (gang.state, gang.row["placement_misses"], gang.row["attempts"]) == ("blocked", 1, 0)
    assert [m["attempts"] for m in gang.members] == [0, 0, 0]
    assert workers[2].row["passed_over_until"] > q.clock.now()
    assert workers[0].row["passed_over_until"] is None, "only the silent one is passed over"
    gate = {row["gate"]: row for row in q.call("explain_gang", gang_id=gang.id)}["backoff"]
    assert "1 reservation not claimed in time" in gate["detail"]


def test_the_gangs_own_claim_deadline_counts(q: Q) -> None:
    gang, worker = q.submit_gang(1, claim_deadline_s=5), q.worker()
    q.tick()
    q.later(4)
    q.tick()
    assert gang.state == "reserved"
    q.later(2)
    worker.beat()
    q.tick()
    assert gang.state == "blocked"


def test_placement_misses_back_off_longer_each_time_within_bounds(q: Q) -> None:
    gang, worker = q.submit_gang(1), q.worker()
    for miss in range(1, 12):
        q.sql("update gangq.incarnations set passed_over_until = null")
        gang.skip_backoff()
        worker.beat()
        q.tick()
        assert gang.state == "reserved"
        miss_deadline(q, worker)
        delay = (gang.row["not_before"] - q.clock.now()).total_seconds()
        longest = min(300, 2 ** (miss - 1))
        assert longest / 2 <= delay <= longest, f"miss {miss}"


def test_a_reservation_on_a_worker_that_starts_to_drain_is_taken_back_at_once(q: Q) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    q.tick()
    workers[0].retire(final=False)
    q.tick()
    assert gang.state == "blocked"

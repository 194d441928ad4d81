"""A worker takes work: order, fit, accounting, repeated requests, the barrier."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

from sql.drive import ENDED, INVALID, MISSING, STALE, WRONG_ISOLATION, WRONG_STATE, Q, gpus, refused

# Order ------------------------------------------------------------------------------------------------------


def test_higher_priority_first_then_first_in_first_out(q: Q) -> None:
    low = q.submit(count=2, priority=-5)
    normal = q.submit(count=2)
    high = q.submit(count=2, priority=1000, task="other")
    worker = q.worker(prefetch=10)
    assert [c.job_id for c in worker.claim()] == [*high, *normal, *low]


def test_shapes_are_merged_in_order_not_taken_one_after_another(q: Q) -> None:
    ids = [q.submit(task=f"t{n % 3}") for n in range(9)]
    worker = q.worker(light=20)
    assert [c.job_id for c in worker.claim(max_jobs=20)] == ids


def test_a_job_that_went_back_to_the_front_is_first_of_its_priority_only(q: Q) -> None:
    q.submit(count=3)
    worker = q.worker()
    first = worker.take()
    first.requeue(front=True)
    assert worker.take().job_id == first.job_id
    urgent = q.submit(priority=1)
    worker.beat()
    q.worker("w2").take()
    assert q.state(urgent) == "running"


def test_a_job_that_was_handed_back_keeps_its_place(q: Q) -> None:
    ids = q.submit(count=3)
    worker = q.worker()
    worker.take().release()
    assert worker.take().job_id == ids[0]


def test_max_jobs_bounds_a_claim(q: Q) -> None:
    q.submit(count=5)
    worker = q.worker(prefetch=10)
    assert len(worker.claim(max_jobs=2)) == 2
    assert len(worker.claim(max_jobs=10)) == 3
    assert worker.claim() == []
    for bad in (0, -1, 1001, None):
        with refused(INVALID, "max_jobs"):
            worker.claim(max_jobs=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("port", [0, -1, 65536, None])
def test_a_port_that_no_rendezvous_can_have_is_refused(q: Q, port: int | None) -> None:
    q.submit_gang(1)
    worker = q.worker()
    q.tick()
    with refused(INVALID, f"port is {'null' if port is None else port}; it must be 1 to 65535"):
        worker.claim(ports=[20, port])
    claim = worker.take()
    if port is not None:
        with refused(INVALID, "port is"):
            q.call("barrier", job_id=claim.job_id, token=claim.token, port=port)


# What does not fit is skipped -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [
        {"gpus": 2},
        {"gpus": 1, "vram_mb": 9000},
        {"memory_mb": 1001},
        {"cpus": 2.001},
        {"labels": {"gpu": "h100"}},
        {"labels": {"site": "b"}},
        {"task": "foreign"},
        {"queue": "elsewhere"},
        {"queue": "paused"},
    ],
)
def test_jobs_that_do_not_fit_are_passed_by_for_the_ones_that_do(q: Q, needs: dict[str, Any]) -> None:
    q.call("set_queue", name="elsewhere")
    q.call("set_queue", name="paused", paused=True)
    too_much = q.submit(count=3, priority=100, **needs)
    fits = q.submit(gpus=1, vram_mb=8000, memory_mb=1000, cpus=2, labels={"site": "a"})
    worker = q.worker(
        queues=["default", "paused"],
        tasks=["work"],
        labels={"site": "a", "rack": 3},
        memory_mb=1000,
        cpus=2,
        devices=gpus(8000),
    )
    assert [c.job_id for c in worker.claim()] == [fits]
    assert {q.state(i) for i in too_much} == {"pending"}


def test_a_paused_queue_starts_nothing_until_it_is_opened(q: Q) -> None:
    q.submit()
    gang = q.submit_gang(1)
    placed = q.submit(cpus=1)
    worker = q.worker(slots=2, light=1, cpus=1)
    q.call("set_queue", name="default", paused=True)
    q.tick()
    assert (worker.claim(), gang.state) == ([], "blocked")
    q.call("set_queue", name="default", paused=False)
    q.tick()
    assert len(worker.claim()) == 3
    assert (gang.state, q.state(placed)) == ("running", "running")


def test_blocked_scheduled_and_waiting_jobs_are_not_claimed(q: Q) -> None:
    q.submit_gang(1)
    q.submit(due_at="2999-01-01")
    first = q.submit()
    q.submit(after=[first])
    assert [c.job_id for c in q.worker(prefetch=10).claim()] == [first]


# Accounting -------------------------------------------------------------------------------------------------


def test_the_light_slot_holds_as_many_jobs_as_are_prefetched_beside_a_placed_one(q: Q) -> None:
    q.submit(count=5)
    q.submit(cpus=1)
    worker = q.worker(prefetch=3, cpus=4)
    assert sorted(c["light"] for c in worker.claim()) == [False, True, True, True]
    assert worker.claim() == []
    assert (worker.free["slots"], worker.free["light"]) == (0, 0)


def test_a_job_that_needs_more_than_a_slot_is_not_prefetched(q: Q) -> None:
    q.submit(count=2, cpus=1)
    worker = q.worker(prefetch=3, cpus=4)
    claim = worker.claim()
    assert len(claim) == 1
    assert worker.claim() == []
    claim[0].complete()
    assert len(worker.claim()) == 1


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("along", [False, True], ids=["claimed", "claimed with a completion"])
def test_jobs_that_hold_devices_are_never_prefetched_whatever_is_free(q: Q, slots: int, along: bool) -> None:
    worker = q.worker(slots=slots, prefetch=100, devices=gpus(*[1000] * 8), memory_mb=1 << 20, cpus=64)
    if along:
        q.submit(count=slots, gpus=1, vram_mb=10)
        done = worker.claim(max_jobs=slots)
        q.submit(count=20, gpus=1, vram_mb=10)
        rows = q.call(
            "complete_and_claim",
            incarnation=worker.incarnation,
            job_ids=[c.job_id for c in done],
            tokens=[c.token for c in done],
            max_jobs=100,
        )
        assert [row["outcome"] for row in rows] == ["done"] * slots + ["claimed"] * slots
    else:
        q.submit(count=20, gpus=1, vram_mb=10)
        assert len(worker.claim(max_jobs=100)) == slots
    held = q.sql("select job_id, count(*) as devices from gangq.device_holds group by job_id")
    assert [row["devices"] for row in held] == [1] * slots, "the other devices stay free"
    # What needs no device does not wait for them: it has a slot of its own.
    q.submit(count=20, priority=5)
    assert len(worker.claim(max_jobs=100)) == 20
    assert worker.free["slots"] == 0


def test_of_a_mixed_backlog_the_light_slot_is_filled_and_each_placed_slot_beside_it(q: Q) -> None:
    q.submit(count=5, priority=1)
    q.submit(count=5, gpus=1)
    worker = q.worker(prefetch=100, devices=gpus(1000, 1000))
    claims = worker.claim(max_jobs=100)
    assert [q.job(c.job_id)["gpus"] for c in claims] == [1] * 2 + [0] * 5


def test_memory_and_fractional_cpus_are_spent_and_come_back(q: Q) -> None:
    q.submit(count=4, memory_mb=300, cpus=0.5)
    worker = q.worker(slots=10, memory_mb=1000, cpus=8)
    claims = worker.claim()
    assert len(claims) == 3, "the fourth needs 300 MiB of the 100 that are left"
    assert (worker.free["memory_mb"], float(worker.free["cpus"])) == (100, 6.5)
    claims[0].fail()
    assert worker.free["memory_mb"] == 400


def test_cpus_alone_can_be_what_is_short(q: Q) -> None:
    q.submit(count=4, cpus=0.4)
    assert len(q.worker(slots=10, cpus=1).claim()) == 2


def test_devices_are_whole_and_the_smallest_that_suffices_is_taken(q: Q) -> None:
    small, large, any_size = (
        q.submit(gpus=1, vram_mb=20000),
        q.submit(gpus=1, vram_mb=40000),
        q.submit(gpus=1),
    )
    worker = q.worker(slots=4, devices=gpus(80000, 24000, 48000, 8000))
    got = {c.job_id: [d["uuid"] for d in c["devices"]] for c in worker.claim()}
    assert got == {small: ["G1"], large: ["G2"], any_size: ["G3"]}
    held = q.sql("select uuid, job_id from gangq.devices where state = 'held'")
    assert {row["job_id"]: [row["uuid"]] for row in held} == got


def test_vram_is_per_device_not_summed(q: Q) -> None:
    q.submit(gpus=1, vram_mb=40000)
    assert q.worker(devices=gpus(24000, 24000)).claim() == []


def test_two_devices_each_large_enough_are_found_among_small_ones(q: Q) -> None:
    q.submit(gpus=2, vram_mb=20000)
    claim = q.worker(devices=gpus(8000, 24000, 8000, 24000)).take()
    assert [d["uuid"] for d in claim["devices"]] == ["G1", "G3"]
    assert {d["source"] for d in claim["devices"]} == {"nvml"}


def test_a_device_is_held_by_one_job_at_most(q: Q) -> None:
    q.submit(count=3, gpus=1)
    worker = q.worker(slots=5, devices=gpus(8000, 8000))
    claims = worker.claim()
    assert len({d["uuid"] for c in claims for d in c["devices"]}) == 2
    assert worker.claim() == []
    with pytest.raises(psycopg.errors.UniqueViolation):
        q.sql(
            "insert into gangq.device_holds (device_id, kind, job_id, since) "
            "select device_id, 'job', 999, now() from gangq.device_holds limit 1"
        )
    claims[0].complete()
    assert len(worker.claim()) == 1


def test_reserved_members_count_as_used(q: Q) -> None:
    q.submit_gang(1, gpus=1, memory_mb=500)
    worker = q.worker(slots=2, memory_mb=800, devices=gpus(8000, 8000))
    q.tick()
    assert (worker.free["slots"], worker.free["memory_mb"], len(worker.free["device_ids"])) == (1, 300, 1)
    q.submit(memory_mb=500)
    q.submit(gpus=2)
    assert [c["task"] for c in worker.claim(max_jobs=1)] == ["train"], "members come first"
    assert worker.claim() == []


def test_preempting_counts_as_used_and_preempted_does_not(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    a = q.worker("a", host="h1", devices=gpus(8000))
    b = q.worker("b", host="h2", devices=gpus(8000, prefix="H"))
    claims = gang.start(a, b)
    waiting = q.submit(count=2, gpus=1)
    claims[0].fail()
    assert sorted(gang.states) == ["preempted", "preempting"]
    got = a.claim() + b.claim()
    assert [c.job_id for c in got] == waiting[:1], (
        "the stopped member's device is free, the stopping one's is not"
    )
    claims[1].ack()
    assert [c.job_id for c in a.claim() + b.claim()] == waiting[1:]


@pytest.mark.parametrize("needs", [{"gpus": 1}, {"memory_mb": 600}, {"cpus": 0.6}, {}])
def test_a_solo_job_told_to_stop_still_counts_until_it_is_proven_stopped(q: Q, needs: dict[str, Any]) -> None:
    q.submit(count=2, **needs)
    worker = q.worker(slots=2 if needs else 1, memory_mb=1000, cpus=1, devices=gpus(8000))
    claim = worker.take()
    q.call("cancel", job_ids=[claim.job_id])
    assert worker.claim() == []
    claim.ack()
    assert len(worker.claim()) == 1


# Repeated requests ------------------------------------------------------------------------------------------


def test_a_repeated_request_returns_the_same_claims_and_burns_nothing(q: Q) -> None:
    q.submit(count=3, gpus=1)
    worker = q.worker(slots=3, devices=gpus(1, 1, 1))
    request = uuid.uuid4()
    first = worker.claim(max_jobs=2, request_id=request)
    again = worker.claim(max_jobs=2, request_id=request)
    assert [c.row for c in again] == [c.row for c in first]
    assert {q.job(c.job_id)["attempts"] for c in first} == {1}
    assert q.value("select count(*) from gangq.live_jobs where state = 'pending'") == 1
    assert len(worker.claim(request_id=uuid.uuid4())) == 1


def test_a_repeated_request_of_a_gang_returns_the_members_again(q: Q) -> None:
    q.submit_gang(2)
    worker = q.worker(slots=2)
    q.tick()
    request = uuid.uuid4()
    first = worker.claim(request_id=request)
    assert [c.row for c in worker.claim(request_id=request)] == [c.row for c in first]
    assert [c["rank"] for c in first] == [0, 1]


def test_a_repeated_request_of_another_incarnation_never_gets_the_old_ones_claims(q: Q) -> None:
    q.submit(count=2)
    old = q.worker("a")
    request = uuid.uuid4()
    held = old.take(request_id=request)
    other = q.worker("b")
    assert other.take(request_id=request).job_id != held.job_id
    old.report_dead()
    new = q.worker("a")
    claim = new.take(request_id=request)
    assert claim.job_id == held.job_id, "freed, and claimed anew"
    assert claim.token != held.token
    assert q.job(claim.job_id)["attempts"] == 1


def test_a_repeated_request_returns_also_what_was_told_to_stop_meanwhile(q: Q) -> None:
    q.submit()
    worker = q.worker()
    request = uuid.uuid4()
    claim = worker.take(request_id=request)
    q.call("cancel", job_ids=[claim.job_id])
    assert worker.take(request_id=request)["state"] == "preempting"


def test_tokens_are_unique_and_grow(q: Q) -> None:
    q.submit(count=20)
    tokens = [c.token for c in q.worker(prefetch=20).claim(max_jobs=20)]
    assert tokens == sorted(set(tokens))
    assert tokens[-1] < 2**53, "a JSON number holds it"


# Who may claim ----------------------------------------------------------------------------------------------


def test_an_ended_or_unknown_incarnation_claims_nothing(q: Q) -> None:
    q.submit()
    worker = q.worker()
    worker.retire()
    with refused(ENDED, "w1"):
        worker.claim()
    with refused(MISSING, "4711"):
        q.call("claim", incarnation=4711)
    with refused(MISSING):
        q.call("claim", incarnation=None)


def test_a_worker_whose_lease_ended_must_heartbeat_before_it_claims(q: Q) -> None:
    q.submit()
    worker = q.worker()
    q.later(121)
    with refused(ENDED, "lease"):
        worker.claim()
    worker.beat()
    worker.take()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("verb", ["claim", "apply", "tick", "reserve_gang"])
def test_verbs_that_count_after_a_lock_refuse_an_older_snapshot(q: Q, level: str, verb: str) -> None:
    gang, worker = q.submit_gang(1), q.worker()
    named = {
        "claim": {"incarnation": worker.incarnation},
        "reserve_gang": {"gang_id": gang.id, "incarnations": [worker.incarnation]},
        "apply": {"pass": 0, "decisions": []},
    }.get(verb, {})
    with refused(WRONG_ISOLATION, level.upper()), q.db.transaction():
        q.sql(f"set transaction isolation level {level}")
        q.call(verb, **named)


# Gang members and the barrier -------------------------------------------------------------------------------


def test_only_the_chosen_worker_gets_a_reserved_member(q: Q) -> None:
    gang = q.submit_gang(1)
    a, b = q.workers(2)
    q.tick()
    (chosen,) = gang.placed_on
    other = b if chosen == "w1" else a
    assert other.claim() == []
    claim = (a if chosen == "w1" else b).take()
    assert (claim["rank"], claim["world_size"], claim["epoch"], claim["attempt"]) == (0, 1, 1, 1)


@pytest.mark.parametrize("how", ["stopping", "quarantined"])
def test_a_worker_that_takes_nothing_more_gets_no_reserved_member_and_its_gang_is_placed_anew(
    q: Q, how: str
) -> None:
    gang = q.submit_gang(2)
    first, second = q.workers(2)
    q.tick()
    assert gang.state == "reserved"
    if how == "stopping":
        first.retire(final=False)
    else:
        q.call("quarantine", worker="w1", reason="its fan rattles")
    assert first.claim() == []
    second.take()
    third = q.worker("w3")
    q.live_on(1, second, third)
    q.tick()
    assert first.claim() == []
    assert "w1" not in gang.placed_on


def test_no_member_may_begin_before_the_last_has_claimed(q: Q, dsn: str) -> None:
    gang = q.submit_gang(3)
    workers = q.workers(3)
    q.tick()
    first, second = gang.claimed_by(*workers[:2])
    assert {row["go"] for row in first.barrier()} == {False}
    assert gang.state == "reserved"
    with psycopg.connect(dsn, autocommit=True) as ear:
        for worker in workers:
            ear.execute(f"listen gangq_{worker.incarnation}")
        third = workers[2].take()
        told = {(n.channel, n.payload) for n in ear.notifies(timeout=2, stop_after=3)}
    assert told == {(f"gangq_{w.incarnation}", "go") for w in workers}
    for claim in (first, second, third):
        assert {row["go"] for row in claim.barrier()} == {True}
    assert gang.state == "running"


def test_who_asks_at_the_barrier_late_is_told_the_same_although_others_are_done(q: Q) -> None:
    gang = q.submit_gang(3)
    workers = [q.worker("a1", "hosta"), q.worker("a2", "hosta"), q.worker("b1", "hostb")]
    q.tick()
    claims = gang.claimed_by(*workers)
    before = claims[1].barrier()
    assert {row["worker"] for row in before} == {"a1", "a2", "b1"}
    claims[0].complete()
    claims[2].complete()
    assert claims[1].barrier() == before


def test_the_barrier_tells_who_is_who(q: Q) -> None:
    gang = q.submit_gang(3)
    q.worker("a", host="h1", address="10.0.0.1", slots=2)
    q.worker("b", host="h2", slots=1)
    q.tick()
    claims = [
        c
        for name in ("a", "b")
        for c in [
            c
            for row in [q.sql("select id from gangq.incarnations where name = %(n)s", n=name)[0]]
            for c in q.call("claim", incarnation=row["id"], max_jobs=5, ports=[4000, 4001])
        ]
    ]
    zero = next(c for c in claims if c["rank"] == 0)
    assert zero["master_port"] == 4000
    assert [c["master_port"] for c in claims if c["rank"] > 0] == [None, None]
    rows = q.call("barrier", job_id=zero["job_id"], token=zero["token"])
    assert [
        (r["rank"], r["worker"], r["host"], r["local_rank"], r["node_rank"], r["local_world_size"])
        for r in rows
    ] == [(0, "a", "h1", 0, 0, 2), (1, "a", "h1", 1, 0, 2), (2, "b", "h2", 0, 1, 1)]
    assert [r["job_id_of_rank"] for r in rows] == gang.job_ids
    assert {(r["master_addr"], r["master_port"], r["epoch"]) for r in rows} == {("10.0.0.1", 4000, 1)}


def test_members_beyond_max_jobs_stay_reserved_for_the_next_claim(q: Q) -> None:
    gang = q.submit_gang(3)
    worker = q.worker(slots=3)
    q.tick()
    assert [c["rank"] for c in worker.claim(max_jobs=2)] == [0, 1]
    assert gang.state == "reserved"
    assert [c["rank"] for c in worker.claim(max_jobs=2)] == [2]
    assert gang.state == "running"


def test_two_gangs_on_one_host_get_different_ports(q: Q) -> None:
    q.submit_gang(1)
    q.submit_gang(1)
    worker = q.worker(slots=2)
    q.tick()
    ports = [c["master_port"] for c in worker.claim(ports=[5000, 5001])]
    assert sorted(ports) == [5000, 5001]


def test_a_port_that_an_other_gang_on_the_host_uses_is_not_taken_twice(q: Q) -> None:
    first, second = q.submit_gang(1), q.submit_gang(1)
    a, b = q.worker("a", host="h"), q.worker("b", host="h")
    q.tick()
    assert a.take(ports=[6000])["master_port"] == 6000
    with refused(WRONG_STATE, "6000"):
        b.take(ports=[6000])
    assert sorted([first.state, second.state]) == ["reserved", "running"], (
        "nothing of the refused claim stays"
    )
    assert b.take(ports=[6001])["master_port"] == 6001


@pytest.mark.parametrize("how", ["old token", "no token", "told to stop", "no such job"])
def test_the_barrier_refuses_a_claim_that_is_none(q: Q, how: str) -> None:
    gang = q.submit_gang(2)
    a, b = q.workers(2)
    claims = gang.start(a, b)
    job_id, token, code = claims[1].job_id, claims[1].token, STALE
    if how == "old token":
        token = claims[0].token
    elif how == "no token":
        token = None
    elif how == "told to stop":
        claims[0].fail()
    else:
        job_id, code = 987, MISSING
    with refused(code):
        q.call("barrier", job_id=job_id, token=token)


def test_a_solo_job_has_no_barrier(q: Q) -> None:
    job = q.submit()
    claim = q.worker().take()
    with refused(WRONG_STATE, f"job {job} is not a member of a gang"):
        claim.barrier()

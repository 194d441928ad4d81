"""What people read in psql: the views, explain, and violations that are not blind."""

from __future__ import annotations

from datetime import timedelta

import pytest

from databases import connect
from gangq import schema
from sql.drive import MISSING, PLACED, Q, gpus, refused


def only(q: Q, text: str, **values: object) -> dict:
    rows = q.sql(text, **values)
    assert len(rows) == 1, rows
    return rows[0]


def test_jobs_shows_where_a_job_runs_and_how_far_it_is(q: Q) -> None:
    q.submit(gpus=1, vram_mb=8000)
    worker = q.worker("alice", host="h1", devices=gpus(8000))
    claim = worker.take()
    worker.beat(claim, beats=[{"step": 3, "total": 10}])
    row = only(q, "select * from gangq.jobs")
    assert (row["state"], row["worker"], row["host"], row["token"]) == ("running", "alice", "h1", claim.token)
    assert (row["gpus"], row["vram_mb"], row["attempts"], row["progress"]) == (
        1,
        8000,
        1,
        {"step": 3, "total": 10},
    )
    claim.complete({"ok": True})
    row = only(q, "select * from gangq.jobs")
    assert (row["state"], row["worker"], row["result"]) == ("done", "alice", {"ok": True})


def test_gangs_shows_a_gang_through_its_life(q: Q) -> None:
    gang = q.submit_gang(2, name="digits")
    workers = q.workers(2)
    claims = gang.start(*workers)
    row = only(q, "select * from gangq.gangs")
    assert (row["name"], row["state"], row["size"], row["epoch"]) == ("digits", "running", 2, 1)
    assert row["hosts"] == ["host-w1", "host-w2"]
    for claim in claims:
        claim.complete()
    row = only(q, "select * from gangq.gangs")
    assert (row["name"], row["state"]) == ("digits", "done")
    assert row["finished_at"] is not None


def test_workers_shows_the_latest_incarnation_of_each_name(q: Q) -> None:
    q.worker("a").retire()
    again = q.worker("a", slots=3, devices=gpus(1, 1))
    q.submit(gpus=1)
    again.take()
    row = only(q, "select * from gangq.workers")
    assert (row["incarnation"], row["state"], row["slots"], row["used_slots"], row["gpus"]) == (
        again.incarnation,
        "live",
        3,
        1,
        2,
    )
    again.retire(final=False)
    assert only(q, "select state from gangq.workers")["state"] == "draining"
    again.report_dead()
    assert only(q, "select state from gangq.workers")["state"] == "dead"


def test_devices_shows_free_held_quarantined_and_withdrawn(q: Q) -> None:
    worker = q.worker(devices=gpus(1, 2, 3, source="declared"))
    q.submit(gpus=1, vram_mb=3)
    claim = worker.take()
    q.call("quarantine", device_uuid="G0", reason="ECC")
    rows = {r["uuid"]: r for r in q.sql("select * from gangq.devices")}
    assert [rows[f"G{n}"]["state"] for n in range(3)] == ["quarantined", "free", "held"]
    assert (rows["G0"]["reason"], rows["G2"]["job_id"], rows["G1"]["source"]) == (
        "ECC",
        claim.job_id,
        "declared",
    )
    worker.retire()
    rows = {r["uuid"]: r["state"] for r in q.sql("select * from gangq.devices")}
    assert rows == {"G0": "quarantined", "G1": "withdrawn", "G2": "withdrawn"}


READINGS = {
    "ok": {"gpu_pct": 99, "throttle": [], "recovery_action": 0, "ecc_uncorrectable": 0},
    "degraded: throttled": {"throttle": ["hw_thermal"]},
    "degraded: asks for a reset": {"recovery_action": 1},
    "degraded: memory errors": {"ecc_uncorrectable": 3},
    "ok: the driver does not say": {"throttle": None, "recovery_action": None, "ecc_uncorrectable": None},
    "ok: nothing that we know": {"recovery_action": "reset", "ecc_uncorrectable": {"total": 7}},
}


@pytest.mark.parametrize("what", READINGS)
def test_devices_shows_the_latest_reading_and_what_it_says_of_the_devices_health(q: Q, what: str) -> None:
    worker = q.worker(devices=gpus(1, 2))
    row = only(q, "select * from gangq.devices where uuid = 'G0'")
    assert (row["health"], row["reading"], row["read_at"], row["trips_day"]) == ("ok", None, None, 0)
    reading = {"uuid": "G0", **READINGS[what]}
    q.call("heartbeat", incarnation=worker.incarnation, readings=[reading])
    rows = {r["uuid"]: r for r in q.sql("select * from gangq.devices")}
    assert rows["G0"]["health"] == what.split(":")[0]
    assert {key: rows["G0"]["reading"].get(key) for key in READINGS[what]} == READINGS[what]
    assert rows["G0"]["read_at"] == q.clock.now()
    assert (rows["G1"]["health"], rows["G1"]["reading"]) == ("ok", None)


def test_workers_shows_the_model_and_the_last_beat_of_what_it_runs_now(q: Q) -> None:
    q.submit(count=2, model="llama")
    worker = q.worker()
    assert only(q, "select model, last_beat_at from gangq.workers") == {"model": None, "last_beat_at": None}
    claim = worker.take(model="llama")
    worker.beat(claim, beats=[{"step": 1}])
    beaten = q.clock.now()
    q.later(7)
    worker.beat(claim)
    assert only(q, "select model, last_beat_at from gangq.workers") == {
        "model": "llama",
        "last_beat_at": beaten,
    }
    claim.complete()
    assert {r["model"] for r in q.sql("select model from gangq.jobs")} == {"llama"}, "also of one that ended"
    worker.take(model="llama")
    assert only(q, "select last_beat_at from gangq.workers")["last_beat_at"] is None


def test_capacity_adds_up_per_queue_and_host(q: Q) -> None:
    q.call("set_queue", name="gpu")
    for name in ("a", "b"):
        q.worker(
            name,
            host="h1",
            slots=2,
            memory_mb=1000,
            cpus=4,
            queues=["default", "gpu"],
            devices=gpus(1, prefix=name),
        )
    q.submit(gpus=1, memory_mb=300, cpus=1.5)
    q.place()
    q.call("claim", incarnation=1)
    rows = {r["queue"]: r for r in q.sql("select * from gangq.capacity")}
    assert set(rows) == {"default", "gpu"}
    row = rows["gpu"]
    assert (row["workers"], row["slots"], row["free_slots"], row["gpus"], row["free_gpus"]) == (2, 4, 3, 2, 1)
    assert (row["memory_mb"], row["free_memory_mb"], float(row["cpus"]), float(row["free_cpus"])) == (
        2000,
        1700,
        8,
        6.5,
    )


def test_waiting_says_what_waits_and_why(q: Q) -> None:
    first = q.submit(count=2)
    q.submit(after=[first[0]])
    q.submit(due_at=q.clock.now() + timedelta(hours=3, minutes=5))
    q.submit(gpus=1)
    q.submit_gang(4)
    worker = q.worker()
    worker.take()
    rows = {
        (r["kind"], r["state"], r["task"]): r
        for r in q.sql("select * from gangq.waiting where task <> 'work' or state <> 'pending'")
    }
    assert rows[("job", "waiting", "work")]["why"] == "waits for other jobs"
    assert rows[("job", "scheduled", "work")]["why"] == "due later, the first in 3h05m"
    assert "1 of its 4 members" in rows[("gang", "blocked", "train")]["why"]
    pending = {r["why"] for r in q.sql("select why from gangq.waiting where state = 'pending'")}
    assert "waits for a free worker" in pending
    assert any("0 of 1" in why for why in pending), "a job that no worker could hold says so"
    q.call("set_queue", name="default", paused=True)
    assert {r["why"] for r in q.sql("select why from gangq.waiting where state = 'pending'")} == {
        "its queue is paused"
    }


def test_waiting_does_not_repeat_a_limit_once_nothing_decides_about_a_job(q: Q) -> None:
    """A job of a queue without limits is light, and no pass takes back what an earlier one found."""
    worker = q.worker()
    q.call("set_queue", name="default", max_running_jobs=1)
    q.submit(count=2)
    worker.take()
    q.place()
    assert only(q, "select gate from gangq.waiting") == {"gate": "running_limit"}
    q.call("set_queue", name="default", max_running_jobs=None)
    assert only(q, "select why, gate from gangq.waiting") == {"why": "waits for a free worker", "gate": None}
    q.call("set_queue", name="default", policy="fair")
    q.place()
    assert only(q, "select gate from gangq.waiting") == {"gate": "room"}


def test_running_names_the_task_that_the_gang_has_in_gangs(q: Q) -> None:
    """The roles have tasks of their own; the gang's is that of the first."""
    q.submit(task="second", due_at="2999-01-01")
    roles = [{"name": name, "count": 1, "task": name} for name in ("first", "second")]
    gang = q.submit_gang(roles=roles)
    gang.start(q.worker(slots=2))
    assert gang.row["task"] == only(q, "select task from gangq.running")["task"] == "first"


def test_a_drain_counts_no_member_that_had_stopped_before_it(q: Q) -> None:
    gang = q.submit_gang(3, min_size=1)
    claims = gang.start(*q.workers(3))
    q.call("shrink_gang", gang_id=gang.id, job_ids=[claims[2].job_id])
    claims[2].ack()
    gang.cancel()
    for claim in claims[:2]:
        claim.ack()
    assert only(q, "select moved, acked, forced, dead from gangq.drains") == {
        "moved": 2,
        "acked": 2,
        "forced": 0,
        "dead": 0,
    }


def test_waiting_calls_seats_that_are_kept_until_others_have_stopped_no_planned_start(q: Q) -> None:
    worker = q.worker(lease_s=1e5)
    q.submit_gang(1, budget_s=5000).start(worker)
    q.beyond_min_run(worker)
    q.submit_gang(1, priority=5)
    q.place()
    assert only(q, "select kept from gangq.plans") == {"kept": True}
    row = only(q, "select why, gate, starts_at from gangq.waiting")
    assert row == {
        "why": "it starts as soon as these have stopped: g1",
        "gate": "stopping",
        "starts_at": None,
    }


def test_a_device_is_silent_in_the_fleet_when_its_worker_is_not_heard(q: Q) -> None:
    q.worker(devices=gpus(1))
    assert only(q, "select state, free_slots from gangq.fleet") == {"state": "free", "free_slots": 1}
    q.later(16)
    assert only(q, "select state, free_slots from gangq.fleet") == {"state": "silent", "free_slots": None}


def test_a_worker_whose_turn_a_fair_order_decides_is_not_idle_beside_work(q: Q) -> None:
    worker = q.worker()
    q.submit()
    q.live_on(120, worker, tick=False)
    assert only(q, "select worker from gangq.idle_beside_work()") == {"worker": "w1"}
    q.call("set_queue", name="default", policy="fair")
    assert q.call("idle_beside_work") == []


def test_a_worker_that_a_planned_start_needs_is_not_idle_beside_work(q: Q) -> None:
    busy, planned = q.workers(2)
    q.submit(budget_s=500, **PLACED)
    busy.take()
    q.submit_gang(2, priority=3)
    q.submit(budget_s=4000, **PLACED)
    q.live_on(120, busy, planned)
    assert q.call("idle_beside_work") == []
    q.sql("delete from gangq.plans")
    assert only(q, "select worker from gangq.idle_beside_work()") == {"worker": "w2"}


def test_timeline_is_a_gangs_life_in_order(q: Q) -> None:
    gang, workers = q.submit_gang(2), q.workers(2)
    claims = gang.start(*workers)
    claims[0].fail("boom")
    claims[1].ack()
    for claim in gang.restart(*workers):
        claim.complete()
    rows = q.sql("select * from gangq.timeline where gang_id = %(id)s", id=gang.id)
    assert [(r["epoch"], r["what"]) for r in rows] == [
        (0, "submit"), (1, "reserve"), (1, "claim"), (1, "claim"), (1, "go"), (1, "drain"), (1, "ack"), (1, ""
        "drained"),
        (2, "reserve"), (2, "claim"), (2, "claim"), (2, "go"), (2, "done"), (2, "done"), (2, "end"),
    ]  # fmt: skip
    assert rows[2]["host"].startswith("host-w")
    assert rows[2]["rank"] is not None


def test_explain_gang_names_the_gate_that_holds_it(q: Q) -> None:
    def holding(gang_id: int) -> set[str]:
        return {row["gate"] for row in q.call("explain_gang", gang_id=gang_id) if not row["ok"]} - {"state"}

    gang = q.submit_gang(2)
    assert holding(gang.id) == {"workers", "hardware"}
    q.later(11)
    assert holding(gang.id) == {"verdict", "workers", "hardware"}, "nobody decides"
    workers = q.workers(2)
    q.submit(priority=1, **PLACED)
    busy = next(claim for worker in workers for claim in worker.claim())
    q.tick()
    assert holding(gang.id) == {"room"}
    ahead = q.submit_gang(2, priority=5)
    q.tick()
    assert holding(gang.id) == {"room"}
    assert "place 2 in queue default: 1 gang before it (g2)" in str(q.call("explain_gang", gang_id=gang.id))
    q.call("set_queue", name="default", paused=True)
    q.tick()
    assert holding(gang.id) == {"paused"}
    busy.complete()
    gang.cancel()
    (row,) = q.call("explain_gang", gang_id=gang.id)
    assert "cancelled" in row["detail"]
    ahead.cancel()
    with refused(MISSING):
        q.call("explain_gang", gang_id=99)


def test_explain_job_says_why_it_waits_and_sends_members_to_their_gang(q: Q) -> None:
    gang = q.submit_gang(1, after=[q.submit()])
    gates = [row["gate"] for row in q.call("explain_job", job_id=gang.job_ids[0])]
    assert gates[0] == "gang"
    job = q.submit(gpus=2)
    held = {row["gate"] for row in q.call("explain_job", job_id=job) if not row["ok"]}
    assert "workers" in held
    for state_of in (q.submit(due_at="2999-01-01"), q.submit(after=[job])):
        assert q.call("explain_job", job_id=state_of)[0]["ok"] is False
    with refused(MISSING):
        q.call("explain_job", job_id=99)


def test_schema_version_is_a_migrations_name(q: Q) -> None:
    assert q.one("schema_version") == schema.migrations()[-1].name


# Violations are not blind -----------------------------------------------------------------------------------

CORRUPTIONS = {
    "members match size": "update gangq.live_gangs set size = 7 where id = 1",
    "gang state matches its members": "update gangq.live_jobs set state = 'blocked', incarnation = null, "
    "token = null where gang_id = 1 and rank = 0",
    "placed gangs have an epoch": "update gangq.live_gangs set world_size = null where id = 1",
    "ranks of an epoch are contiguous": "update gangq.live_jobs set epoch_rank = 1 where gang_id = 1 and rank = 1",
    "member of a live gang": "update gangq.live_jobs set gang_id = 999 where gang_id = 1 and rank = 0",
    "held by a known incarnation": "update gangq.live_jobs set incarnation = 999 where gang_id is null "
    "and state = 'running'",
    "within capacity": "update gangq.incarnations set memory_mb = 50",
    "holds as many devices as it asks for": "delete from gangq.device_holds where job_id in (select id "
    "from gangq.live_jobs where gang_id is null)",
    "device held by a placed job": "update gangq.device_holds set job_id = 999",
    "device is not one it avoids": "update gangq.shapes set avoid = array(select id from gangq.device_registry)",
    "device large enough": "update gangq.device_registry set vram_mb = 1",
    "worker may run it": "update gangq.incarnations set queues = '{}'",
    "token is unique": "update gangq.live_jobs set token = 5 where token is not null",
    "order key matches priority": "update gangq.live_jobs set priority = 9 where state = 'pending'",
    "waits for a live job": "update gangq.dependencies set on_job_id = 999, settled = true",
    "waits for as many as it says": "delete from gangq.dependencies",
    "holds devices of its own worker": "delete from gangq.device_claimants",
    "rank within its gang": "update gangq.live_jobs set rank = 99 where gang_id = 1 and rank = 1",
    "order key of a gang matches priority": "update gangq.live_gangs set priority = 9",
    "a gang that runs has begun an epoch": "update gangq.live_gangs set epoch = 0",
    "gang is of a known kind": "update gangq.live_gangs set kind_id = 999",
    "gang asks for levels that exist": "update gangq.gang_kinds set require = 'rack'",
    "live worker has a lease": "delete from gangq.leases",
    "ended worker holds nothing beyond its lease": "with late as (update gangq.leases set "
    "expires_at = gangq.now() - interval '1 hour') update gangq.incarnations set state = 'dead', "
    "ended_at = gangq.now() - interval '1 hour'",
    "counters are not negative": "update gangq.live_jobs set crashes = -1",
    "charged no more than it may spend": "update gangq.live_jobs set attempts = max_attempts + 1",
    "told to stop while it stops": "update gangq.live_jobs set told_at = gangq.now() where state = 'running'",
    "finished when it has ended": "update gangq.live_jobs set finished_at = gangq.now() where state = 'running'",
    "an open batch has a live job": "insert into gangq.batches_table (id, name, shape_id, size, submitter, login, "
    "submitted_at) select 1, 'b', 1, 1, 'x', 'x', last_at - interval '1 hour' from gangq.tick_state",
    "a batch that has ended has no live job": "with b as (update gangq.live_jobs set batch_id = 1) "
    "insert into gangq.batches_table values (1, 'b', '{}', 1, 1, 'x', 'x', gangq.now(), gangq.now(), 'short')",
    "replicas are whole gangs": "update gangq.services_table set replicas = 3",
    "has its rows": "delete from gangq.tick_state",
}


@pytest.fixture
def busy(q: Q) -> Q:
    """A gang of two and a solo job that run with devices, a pending job, one that waits, and a service."""
    gang = q.submit_gang(2, gpus=1, vram_mb=100)
    worker = q.worker(slots=4, memory_mb=100, devices=gpus(100, 100, 100))
    gang.start(worker)
    q.submit(gpus=1, vram_mb=100, memory_mb=100)
    worker.take()
    q.submit(after=[q.submit(cpus=100, wait_for_hardware=True)])
    q.tick()
    q.call("set_service", name="chat", task="serve", gang=2)
    return q


def broken_by(busy: Q, corruption: str, dsn: str) -> set[str]:
    """The rules that are broken after this. On a connection of its own, because a session that sets
    session_replication_role forgets all its plans: that would cost the next test 100 ms.
    """
    with connect(dsn) as conn, conn.transaction(force_rollback=True):
        q = Q(conn, busy.clock)
        q.sql("set local session_replication_role = replica")
        q.sql(corruption)
        return {row["rule"] for row in q.violations()}


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_a_broken_invariant_is_seen(busy: Q, dsn: str, rule: str) -> None:
    assert busy.violations() == []
    assert rule in broken_by(busy, CORRUPTIONS[rule], dsn)


@pytest.mark.parametrize(
    ("rule", "corruption"),
    [
        ("counters are not negative", "update gangq.live_gangs set attempts = -1"),
        ("counters are not negative", "update gangq.live_jobs set max_attempts = -3"),
        ("charged no more than it may spend", "update gangq.live_gangs set attempts = max_attempts + 1"),
        ("gang is of a known kind", "delete from gangq.kind_roles"),
        *(
            ("has its rows", f"delete from gangq.{table}")
            for table in ("settings", "transitions", "lock_rows", "sequence_base")
        ),
    ],
)
def test_another_way_to_break_a_rule_is_seen(busy: Q, dsn: str, rule: str, corruption: str) -> None:
    assert rule in broken_by(busy, corruption, dsn)


def test_a_running_job_moved_by_hand_to_another_worker_is_seen(busy: Q) -> None:
    other = busy.worker("other", slots=4, memory_mb=100, devices=gpus(100, 100, 100, prefix="H"))
    assert busy.violations() == []
    with busy.db.transaction(force_rollback=True):
        (moved,) = busy.sql(
            "update gangq.live_jobs set incarnation = %(other)s where gang_id is null and state = 'running' "
            "returning id",
            other=other.incarnation,
        )
        assert [(row["rule"], row["subject"]) for row in busy.violations()] == [
            ("holds devices of its own worker", f"job {moved['id']}")
        ]


def test_every_rule_of_violations_is_tried(q: Q) -> None:
    definition = q.value("select pg_get_viewdef('gangq.violations'::regclass)")
    import re

    # The only texts of several words that stand alone.
    rules = set(re.findall(r"'([a-z]+(?: [a-z]+)+)'::text(?:,| AS rule|\s+ELSE)", definition))
    assert rules == set(CORRUPTIONS)

"""Lock order: schedules, services, gangs, jobs, worker names, worker rows, queues, limit keys. Who keeps to it sees
no deadlock.

One test calls the verbs at random from several threads. The other holds that every verb that locks is among these.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from gangq.decider.schedules import plan_schedules
from interleaving.sessions import DEADLINE_S, ROW_BY_ROW, Arena, Connection, Later, call, value
from sql.drive import in_steps, place, tick

pytestmark = pytest.mark.slow

SECONDS = 60.0 if os.environ.get("GANGQ_SOAK") == "1" else 1.5
AT_MOST_S = SECONDS + 40.0  # on a machine that is busy with other things
# What a verb may answer somebody who comes too late, or too early, or finds a row busy.
EXPECTED = {"GQ001", "GQ002", "GQ003", "GQ004", "GQ005", "GQ006", "55P03"}


def test_a_batch_completed_in_any_order_meets_a_batch_locked_in_order_without_a_deadlock(meeting):
    worker = meeting.worker("w1", slots=3)
    low, middle, high = (meeting.running(worker) for _ in range(3))
    blocker = meeting.connect(autocommit=False)
    blocker.execute("select 1 from gangq.live_jobs where id = %s for update", (middle[0],))
    in_order = Later(
        meeting.connect(),
        lambda conn: (
            conn.execute(
                "select from gangq.live_jobs where id = any(%s) order by id for update",
                ([low[0], middle[0], high[0]],),
            ).rowcount
        ),
    ).start(meeting.db)
    assert in_order.waited
    # Given backwards: taken as given, it would hold the high one and wait for the low one.
    backwards = Later(
        meeting.connect(**ROW_BY_ROW),
        lambda conn: call(conn, "complete", job_ids=[high[0], low[0]], tokens=[high[1], low[1]]),
    ).start(meeting.db)
    assert backwards.waited
    blocker.commit()
    assert in_order.join().sqlstate is None
    assert {r["outcome"] for r in backwards.join().result()} == {"done"}


# The verbs that give the others something to meet over.
WEIGHTS = {
    "do_claim": 15,
    "do_tick": 8,
    "do_complete": 2,
    "do_submit_gang": 4,
    "do_unquarantine": 8,
    "do_set_service": 2,
    "do_open_place": 3,
    "do_report_ready": 5,
    "do_report_load": 3,
    "do_save_checkpoint": 3,
    "do_trip": 3,
    "do_set_queue": 3,
    "do_set_limit": 3,
}
QUEUES = ("default", "limited", "limited.more")
KEYS = ("a", "b")
MEMBERS = "g.state = 'running'"
REPLICAS = "g.service is not null"


class Fleet:
    """What the threads know: who lives, and the claims heard of. Shared on purpose, stale on purpose."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: dict[str, int] = {}
        self.claims: list[tuple[int, int, int]] = []  # job, token, incarnation
        self.gangs: list[int] = []
        self.jobs: list[int] = []
        self.seen: dict[str, int] = {}
        self.faults: list[str] = []
        self.over = threading.Event()

    def some(self, things: list[Any], rng: random.Random, most: int = 3) -> list[Any]:
        with self.lock:
            recent = things[-24:]
        return rng.sample(recent, min(len(recent), rng.randint(1, most)))


class Busybody(threading.Thread):
    """Calls verbs at random until it is over."""

    def __init__(self, arena: Arena, fleet: Fleet, seed: int) -> None:
        super().__init__(name=f"busybody {seed}", daemon=True)
        self.rng = random.Random(seed)
        # A deadlock is found before those give up that wait for 100 ms at most.
        self.conn = arena.connect(statement_timeout="10000", deadlock_timeout="20")
        self.fleet = fleet

    def run(self) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [WEIGHTS.get(name, 1) for name in names]
        while not self.fleet.over.is_set():
            (name,) = self.rng.choices(names, weights)
            try:
                getattr(self, name)()
                outcome = "ok"
            except psycopg.Error as e:
                outcome = e.sqlstate or "connection"
                if outcome not in EXPECTED:
                    self.fleet.faults.append(f"{name}: {e}")
            with self.fleet.lock:
                self.fleet.seen[name] = self.fleet.seen.get(name, 0) + (outcome == "ok")

    def call(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        with self.conn.transaction():
            rows = call(self.conn, verb, **arguments)
            # Others queue up for what it has locked: then an order that is not kept shows.
            if self.rng.random() < 0.2:
                time.sleep(0.01)
        return rows

    def a_worker(self) -> tuple[str, int]:
        with self.fleet.lock:
            alive = list(self.fleet.workers.items())
        if not alive:
            return "nobody", -1
        return self.rng.choice(alive)

    def pairs(self) -> tuple[list[int], list[int]]:
        chosen = self.fleet.some(self.fleet.claims, self.rng) or [(-1, -1, -1)]
        return [c[0] for c in chosen], [c[1] for c in chosen]

    def claim_of(self, jobs: str) -> dict[str, int]:
        """One that holds at this moment: old ones would hardly ever get through."""
        rows = self.conn.execute(
            "select j.id as job_id, j.token from gangq.live_jobs j join gangq.live_gangs g on g.id = j.gang_id "
            f"where j.state = 'running' and {jobs} order by random() limit 1"
        ).fetchall()
        return rows[0] if rows else {"job_id": -1, "token": -1}

    def a_name(self) -> str:
        """Of a schedule, a service or a target of notifications."""
        return self.rng.choice("uvw")

    def some_names(self) -> list[str]:
        """In any order."""
        return self.rng.sample("wvu", self.rng.randint(1, 3))

    def limits(self) -> dict[str, Any]:
        """What a submission says of its queue and its limit key."""
        key = {"limit_key": self.rng.choice(KEYS), "limit": 9} if self.rng.random() < 0.8 else {}
        return {"queue": self.rng.choice(QUEUES), **key}

    def remember(self, incarnation: int, rows: list[dict[str, Any]]) -> None:
        # A replica goes on until its service stops it.
        claims = [r for r in rows if r["token"] and r["task"] != "serve"]
        with self.fleet.lock:
            self.fleet.claims.extend((r["job_id"], r["token"], incarnation) for r in claims)

    def do_register_worker(self, name: str = "") -> None:
        name = name or f"w{self.rng.randrange(4)}"
        # Two workers a host, and both see the host's devices.
        host = f"h{int(name[1]) // 2}"
        devices = [{"uuid": f"{host}-{n}", "index": n, "vram_mb": 1000} for n in range(4)]
        self.rng.shuffle(devices)
        (row,) = self.call(
            "register_worker",
            name=name,
            host=host,
            queues=list(QUEUES),
            slots=3,
            light=3,
            devices=devices,
        )
        with self.fleet.lock:
            self.fleet.workers[name] = row["incarnation"]

    def do_submit(self) -> None:
        after = self.fleet.some(self.fleet.jobs, self.rng, 2) if self.rng.random() < 0.3 else []
        (row,) = self.call("submit", task="t", gpus=self.rng.choice([0, 0, 1]), after=after, **self.limits())
        with self.fleet.lock:
            self.fleet.jobs.append(row["submit"])

    def do_submit_unique(self) -> None:
        self.call("submit_unique", unique_key=self.a_name(), task="t", replaces=self.rng.random() < 0.5)

    def do_submit_unique_gang(self) -> None:
        self.call("submit_unique_gang", unique_key=self.a_name(), task="t", size=2, **self.limits())

    def do_submit_gang(self) -> None:
        (row,) = self.call(
            "submit_gang",
            task="t",
            size=self.rng.randint(1, 4),
            gpus=self.rng.choice([0, 1]),
            max_attempts=50,
            **self.rng.choice([{}, {"min_size": 1, "failure_policy": "shrink"}]),
            **self.limits(),
        )
        with self.fleet.lock:
            self.fleet.gangs.append(row["gang_id"])
            self.fleet.jobs.extend(row["job_ids"])

    def do_claim(self) -> None:
        incarnation = self.a_worker()[1]
        rows = self.call("claim", incarnation=incarnation, max_jobs=self.rng.randint(1, 3), sleep=True)
        self.remember(incarnation, rows)

    def do_complete_and_claim(self) -> None:
        chosen = self.fleet.some(self.fleet.claims, self.rng) or [(-1, -1, -1)]
        mine = [c for c in chosen if c[2] == chosen[0][2]]
        rows = self.call(
            "complete_and_claim",
            incarnation=chosen[0][2],
            job_ids=[c[0] for c in mine],
            tokens=[c[1] for c in mine],
            strict=False,
        )
        self.remember(chosen[0][2], rows)

    def do_barrier(self) -> None:
        self.call("barrier", **self.claim_of(MEMBERS))

    def do_report_ready(self) -> None:
        self.call("report_ready", **self.claim_of(REPLICAS), ready=self.rng.random() < 0.8, port=8000)

    def do_report_load(self) -> None:
        self.call("report_load", **self.claim_of(REPLICAS), load=1)

    def do_append_log(self) -> None:
        jobs, tokens = self.pairs()
        self.call("append_log", job_ids=jobs, tokens=tokens, seqs=[1] * len(jobs), chunks=["x"] * len(jobs))

    def do_heartbeat(self) -> None:
        jobs, tokens = self.pairs()
        self.call("heartbeat", incarnation=self.a_worker()[1], job_ids=jobs, tokens=tokens)

    def do_complete(self) -> None:
        jobs, tokens = self.pairs()
        self.call("complete", job_ids=jobs, tokens=tokens, strict=False)

    def do_fail(self) -> None:
        jobs, tokens = self.pairs()
        self.call("fail", job_id=jobs[0], token=tokens[0])

    def do_trip(self) -> None:
        ((job, token, incarnation),) = self.fleet.some(self.fleet.claims, self.rng, 1) or [(-1, -1, -1)]
        error = {"type": "Stall", "message": "m"}
        self.call("trip", incarnation=incarnation, job_id=job, token=token, code=76, error=error)

    def do_snooze(self) -> None:
        jobs, tokens = self.pairs()
        self.call("snooze", job_id=jobs[0], token=tokens[0], for_s=1)

    def do_requeue(self) -> None:
        jobs, tokens = self.pairs()
        self.call("requeue", job_id=jobs[0], token=tokens[0])

    def do_release(self) -> None:
        jobs, tokens = self.pairs()
        self.call("release", job_ids=jobs, tokens=tokens)

    def do_ack_preempted(self) -> None:
        jobs, tokens = self.pairs()
        self.call("ack_preempted", job_id=jobs[0], token=tokens[0])

    def do_save_checkpoint(self) -> None:
        self.call("save_checkpoint", **self.claim_of(MEMBERS), step=self.rng.randrange(5), data=b"x")

    def do_cancel(self) -> None:
        if self.rng.random() < 0.5:
            self.call("cancel", gang_ids=self.fleet.some(self.fleet.gangs, self.rng, 2))
        else:
            self.call("cancel", job_ids=self.fleet.some(self.fleet.jobs, self.rng, 2))

    def do_retry(self) -> None:
        gang_ids = self.fleet.some(self.fleet.gangs, self.rng, 2)
        self.call("cancel", gang_ids=gang_ids)
        self.call("retry", gang_ids=gang_ids)

    def do_retry_failed(self) -> None:
        self.call("retry_failed", task="t", most=3)

    def do_set_priority(self) -> None:
        self.call(
            "set_priority",
            priority=self.rng.randint(-2, 2),
            gang_ids=self.fleet.some(self.fleet.gangs, self.rng, 3),
        )

    def do_preempt_gang(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            value(self.conn, "preempt_gang", gang_id=gang_id)

    def do_rollback_gang(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            value(self.conn, "rollback_gang", gang_id=gang_id)

    def do_retire_worker(self) -> None:
        name, incarnation = self.a_worker()
        self.call("retire_worker", incarnation=incarnation, final=self.rng.random() < 0.7)
        self.restart(name, incarnation)

    def restart(self, name: str, incarnation: int) -> None:
        self.call("report_dead", worker=name, incarnation=incarnation, evidence={"by": "test"})
        self.do_register_worker(name)

    def do_report_dead(self) -> None:
        self.restart(*self.a_worker())

    def do_report_stuck(self) -> None:
        name, incarnation = self.a_worker()
        self.call("report_stuck", worker=name, incarnation=incarnation, evidence={"by": "test"})
        self.restart(name, incarnation)

    def do_bounce(self) -> None:
        name, incarnation = self.a_worker()
        self.call("bounce", incarnation=incarnation, host=f"h{int(name[1]) // 2}")

    def do_quarantine(self) -> None:
        self.call("quarantine", device_uuid=f"h{self.rng.randrange(2)}-{self.rng.randrange(4)}")

    def do_unquarantine(self) -> None:
        if self.rng.random() < 0.5:
            self.call("unquarantine", device_uuid=f"h{self.rng.randrange(2)}-{self.rng.randrange(4)}")
        else:  # One that was stuck stays quarantined when it registers again.
            self.call("unquarantine", worker=f"w{self.rng.randrange(4)}")

    def do_cordon(self) -> None:
        host = f"h{self.rng.randrange(2)}"
        self.call("cordon", host=host, drain=self.rng.random() < 0.5)
        self.call("uncordon", host=host)

    def do_set_taints(self) -> None:
        worker = self.a_worker()[0]
        self.call("set_taints", worker=worker, taints=["a"])
        self.call("set_taints", worker=worker, taints=[])

    def do_set_queue(self) -> None:
        self.call(
            "set_queue",
            name=self.rng.choice(QUEUES[1:]),
            max_running_jobs=self.rng.randint(5, 20),
            rate=self.rng.choice(["100/1s", "200/1s"]),
        )

    def do_set_limit(self) -> None:
        self.call("set_limit", key=self.rng.choice(KEYS), most=self.rng.randint(5, 20))

    def do_set_task(self) -> None:
        self.call("set_task", task="t", budget_s=self.rng.randint(1000, 2000))

    def do_resume_task(self) -> None:
        self.call("pause_task", task="t")
        self.call("resume_task", task="t")

    def do_configure(self) -> None:
        self.call("configure", bounces_per_hour=self.rng.randint(3, 9))

    def do_reserve_gang(self) -> None:
        workers = [self.a_worker()[1] for _ in range(self.rng.randint(1, 4))]
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            self.call("reserve_gang", gang_id=gang_id, incarnations=workers)

    def do_open_place(self) -> None:
        (row,) = self.call("submit", task="t", gpus=1, **self.limits())
        self.call("open_place", incarnation=self.a_worker()[1], job_id=row["submit"])

    def do_displace_job(self) -> None:
        self.call("displace_job", job_id=self.pairs()[0][0])

    def do_shrink_gang(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            self.call("shrink_gang", gang_id=gang_id, job_ids=self.pairs()[0][:1])

    def do_complete_drain(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            self.call("complete_drain", gang_id=gang_id)

    def do_set_service(self) -> None:
        self.call(
            "set_service",
            name=self.a_name(),
            task="serve",
            replicas=self.rng.randint(1, 3),
            gang=2 if self.rng.random() < 0.1 else 1,
            work={"priority": 1000, "queue": QUEUES[-1], "limit_key": KEYS[0], "limit": 9},
            options={"linger_s": 0},
        )

    def do_stop_service(self) -> None:
        self.call("stop_service", name=self.a_name())

    def do_delete_service(self) -> None:
        self.call("delete_service", name=self.a_name())

    def do_roll_back_service(self) -> None:
        self.call("roll_back_service", name=self.a_name(), to_revision=1)

    def do_declare_services(self) -> None:
        self.call("declare_services", source="app", names=self.some_names())

    def do_set_schedule(self) -> None:
        when = {"every": timedelta(seconds=1)} if self.rng.random() < 0.7 else {"cron": "* * * * *"}
        size = {"size": 2} if self.rng.random() < 0.5 else {}
        self.call("set_schedule", name=self.a_name(), task="t", work={**size, **self.limits()}, **when)

    def do_pause_schedule(self) -> None:
        self.call("pause_schedule", name=self.a_name())

    def do_resume_schedule(self) -> None:
        self.call("resume_schedule", name=self.a_name())

    def do_forget_schedule(self) -> None:
        self.call("forget_schedule", name=self.a_name())

    def do_run_schedule_now(self) -> None:
        self.call("run_schedule_now", name=self.a_name())

    def do_declare_schedules(self) -> None:
        self.call("declare_schedules", source="app", names=self.some_names())

    def do_plan_schedules(self) -> None:
        in_steps(self.conn, plan_schedules())

    def do_apply(self) -> None:
        place(self.conn)

    def do_promote_due(self) -> None:
        self.call("promote_due")

    def do_add_notification(self) -> None:
        self.call("add_notification", target=self.a_name())

    def do_remove_notification(self) -> None:
        self.call("remove_notification", target=self.a_name())

    def do_retry_notifications(self) -> None:
        self.call("retry_notifications", target=self.a_name())

    def do_fetch_notification(self) -> None:
        target = self.a_name()
        self.call("test_notification", target=target)  # So that there is one.
        self.call("fetch_notification", target=target)

    def do_acknowledge_notification(self) -> None:
        target = self.a_name()
        (found,) = self.call("fetch_notification", target=target)
        self.call(
            "acknowledge_notification",
            target=target,
            id=found["id"] or -1,
            delivery=found["delivery"] or 1,
            error=self.rng.choice([None, "HTTP 500"]),
        )

    def do_reap_expired(self) -> None:
        self.call("reap_expired")

    def do_time_out(self) -> None:
        self.call("time_out")

    def do_flag_dead_workers(self) -> None:
        self.call("flag_dead_workers")

    def do_tick(self) -> None:
        tick(self.conn)


def deadlocks(watcher: Connection, ended: list[int]) -> int:
    """How many this database has seen, with those that a tick has caught, once these sessions have ended."""
    deadline = time.monotonic() + DEADLINE_S
    while watcher.execute("select from pg_stat_activity where pid = any (%s)", (ended,)).fetchall():
        assert time.monotonic() < deadline, "a session goes on"
        time.sleep(0.01)
    (row,) = watcher.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ).fetchall()
    return int(row["deadlocks"])


@pytest.mark.own_database  # Its sessions end when they are closed.
def test_six_threads_calling_verbs_at_random_see_no_deadlock_and_break_nothing(
    meeting: Arena, db: Connection
):
    before = deadlocks(db, [])
    call(db, "set_queue", name=QUEUES[-1])
    fleet = Fleet()
    threads = [Busybody(meeting, fleet, seed) for seed in range(6)]
    threads[0].do_register_worker()
    began = time.monotonic()
    for thread in threads:
        thread.start()

    def unproven() -> list[str]:
        """What did not happen yet, without which it means nothing: each verb got through, and gangs did run."""
        with fleet.lock:
            missing = [name for name in dir(Busybody) if name.startswith("do_") and not fleet.seen.get(name)]
        seen = db.execute("select distinct kind from gangq.events").fetchall()
        return missing + sorted({"go", "scheduled", "service_ready"} - {row["kind"] for row in seen})

    try:
        while (passed := time.monotonic() - began) < SECONDS or (passed < AT_MOST_S and unproven()):
            assert meeting.violations() == []
            meeting.clock.advance(1)
            time.sleep(0.2)
    finally:
        fleet.over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), f"{thread.name} hangs"
    assert fleet.faults == []
    sessions = [thread.conn.info.backend_pid for thread in threads]
    meeting.close()
    assert deadlocks(db, sessions) == before
    assert meeting.violations() == []
    assert unproven() == []


# The doors that lock rows and have no `do_`, and why not.
WITHOUT = {
    "keep_partitions": "it locks tables, each for 100 ms at most",
}
# What an update or delete locks is not seen: such a door is given its `do_` by who writes it.
LOCKS = re.compile(r"\bfor\s+(?:no\s+key\s+update|update|key\s+share|share)\b")


def locking_doors(db: Connection) -> set[str]:
    """Functions that a role may call and that lock rows, themselves or by what they call."""
    rows = db.execute(
        "select p.proname as name, p.prosrc as body, exists (select from pg_roles r where r.rolname like "
        "'gangq\\_%' and has_function_privilege(r.oid, p.oid, 'execute')) as door "
        "from pg_proc p where p.pronamespace = 'gangq'::regnamespace and p.prokind = 'f'"
    ).fetchall()
    bodies = {row["name"]: re.sub(r"--[^\n]*|'[^']*'", "", row["body"]) for row in rows}
    calls = {
        name: set(re.findall(r"gangq\.(\w+)\s*\(", body)) & bodies.keys() for name, body in bodies.items()
    }
    locking = {name for name, body in bodies.items() if LOCKS.search(body)}
    while more := {name for name in bodies if name not in locking and calls[name] & locking}:
        locking |= more
    return locking & {row["name"] for row in rows if row["door"]}


def test_every_door_that_locks_is_called_at_random_or_says_why_not(db: Connection) -> None:
    called = {name.removeprefix("do_") for name in dir(Busybody) if name.startswith("do_")}
    locking = locking_doors(db)
    assert locking - called == set(WITHOUT)

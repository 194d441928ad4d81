"""Lock order: gangs by id, jobs by id, then worker rows. Whoever keeps to it never sees a deadlock."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import psycopg

from interleaving.sessions import ROW_BY_ROW, Arena, Connection, Later, call, value
from sql.drive import tick

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


class Fleet:
    """What the threads know: who lives, and the claims heard of. Shared on purpose, stale on purpose."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.workers: dict[str, int] = {}
        self.claims: list[tuple[int, int]] = []
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
        self.conn = arena.connect(statement_timeout="10000")
        self.fleet = fleet

    def run(self) -> None:
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [
            4 if name in ("do_claim", "do_complete", "do_tick", "do_submit_gang") else 1 for name in names
        ]
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
        return call(self.conn, verb, **arguments)

    def a_worker(self) -> tuple[str, int]:
        with self.fleet.lock:
            alive = list(self.fleet.workers.items())
        if not alive:
            return "nobody", -1
        return self.rng.choice(alive)

    def pairs(self) -> tuple[list[int], list[int]]:
        chosen = self.fleet.some(self.fleet.claims, self.rng) or [(-1, -1)]
        return [c[0] for c in chosen], [c[1] for c in chosen]

    def do_register(self) -> None:
        name = f"w{self.rng.randrange(4)}"
        # Two workers a host, and both see the host's devices.
        host = f"h{int(name[1]) // 2}"
        devices = [{"uuid": f"{host}-{n}", "index": n, "vram_mb": 1000} for n in range(4)]
        self.rng.shuffle(devices)
        (row,) = self.call(
            "register_worker",
            name=name,
            host=host,
            queues=["default"],
            slots=3,
            devices=devices,
        )
        with self.fleet.lock:
            self.fleet.workers[name] = row["incarnation"]

    def do_submit(self) -> None:
        after = self.fleet.some(self.fleet.jobs, self.rng, 2) if self.rng.random() < 0.3 else []
        (row,) = self.call("submit", task="t", gpus=self.rng.choice([0, 0, 1]), after=after)
        with self.fleet.lock:
            self.fleet.jobs.append(row["submit"])

    def do_submit_gang(self) -> None:
        (row,) = self.call(
            "submit_gang",
            task="t",
            size=self.rng.randint(1, 4),
            gpus=self.rng.choice([0, 1]),
            max_attempts=50,
        )
        with self.fleet.lock:
            self.fleet.gangs.append(row["gang_id"])
            self.fleet.jobs.extend(row["job_ids"])

    def do_claim(self) -> None:
        rows = self.call("claim", incarnation=self.a_worker()[1], max_jobs=self.rng.randint(1, 3), sleep=True)
        with self.fleet.lock:
            self.fleet.claims.extend((r["job_id"], r["token"]) for r in rows)

    def do_heartbeat(self) -> None:
        jobs, tokens = self.pairs()
        self.call("heartbeat", incarnation=self.a_worker()[1], job_ids=jobs, tokens=tokens)

    def do_complete(self) -> None:
        jobs, tokens = self.pairs()
        self.call("complete", job_ids=jobs, tokens=tokens, strict=False)

    def do_fail(self) -> None:
        jobs, tokens = self.pairs()
        self.call("fail", job_id=jobs[0], token=tokens[0])

    def do_snooze(self) -> None:
        jobs, tokens = self.pairs()
        self.call("snooze", job_id=jobs[0], token=tokens[0], for_s=1)

    def do_requeue(self) -> None:
        jobs, tokens = self.pairs()
        self.call("requeue", job_id=jobs[0], token=tokens[0])

    def do_release(self) -> None:
        jobs, tokens = self.pairs()
        self.call("release", job_ids=jobs, tokens=tokens)

    def do_ack(self) -> None:
        jobs, tokens = self.pairs()
        self.call("ack_preempted", job_id=jobs[0], token=tokens[0])

    def do_checkpoint(self) -> None:
        jobs, tokens = self.pairs()
        self.call("save_checkpoint", job_id=jobs[0], token=tokens[0], step=self.rng.randrange(5), data=b"x")

    def do_cancel(self) -> None:
        if self.rng.random() < 0.5:
            self.call("cancel", gang_ids=self.fleet.some(self.fleet.gangs, self.rng, 2))
        else:
            self.call("cancel", job_ids=self.fleet.some(self.fleet.jobs, self.rng, 2))

    def do_retry(self) -> None:
        self.call("retry", gang_ids=self.fleet.some(self.fleet.gangs, self.rng, 2))

    def do_set_priority(self) -> None:
        self.call(
            "set_priority",
            priority=self.rng.randint(-2, 2),
            gang_ids=self.fleet.some(self.fleet.gangs, self.rng, 3),
        )

    def do_preempt(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            value(self.conn, "preempt_gang", gang_id=gang_id)

    def do_rollback(self) -> None:
        for gang_id in self.fleet.some(self.fleet.gangs, self.rng, 1):
            value(self.conn, "rollback_gang", gang_id=gang_id)

    def do_retire(self) -> None:
        self.call("retire_worker", incarnation=self.a_worker()[1], final=self.rng.random() < 0.7)

    def do_report_dead(self) -> None:
        name, incarnation = self.a_worker()
        self.call("report_dead", worker=name, incarnation=incarnation, evidence={"by": "test"})

    def do_quarantine(self) -> None:
        uuid = f"h{self.rng.randrange(2)}-{self.rng.randrange(4)}"
        try:
            self.call("quarantine", device_uuid=uuid)
        finally:
            self.call("unquarantine", device_uuid=uuid)

    def do_tick(self) -> None:
        tick(self.conn)


def test_six_threads_calling_verbs_at_random_see_no_deadlock_and_break_nothing(
    meeting: Arena, db: Connection
):
    fleet = Fleet()
    threads = [Busybody(meeting, fleet, seed) for seed in range(6)]
    threads[0].do_register()
    began = time.monotonic()
    for thread in threads:
        thread.start()

    def unproven() -> list[str]:
        """What did not happen yet, without which it means nothing: each verb got through, and gangs did run."""
        with fleet.lock:
            missing = [name for name in dir(Busybody) if name.startswith("do_") and not fleet.seen.get(name)]
        went = db.execute("select 1 from gangq.events where kind = 'go' limit 1").fetchall()
        return missing if went else [*missing, "go"]

    try:
        while (passed := time.monotonic() - began) < SECONDS or (passed < AT_MOST_S and unproven()):
            assert meeting.violations() == []
            time.sleep(0.2)
    finally:
        fleet.over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), f"{thread.name} hangs"
    assert fleet.faults == []
    assert meeting.violations() == []
    assert unproven() == []

"""Every job exactly once, every gang as a whole, whoever dies meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from interleaving.sessions import Arena, Connection, call, value
from sql.drive import tick

DEADLINE_S = 60.0


def test_40_jobs_and_8_claimers_run_every_job_exactly_once(meeting: Arena):
    names = [f"w{n}" for n in range(8)]
    incarnations = [meeting.worker(name) for name in names]
    jobs = [meeting.job() for _ in range(40)]
    started: list[int] = []
    together = threading.Barrier(8)

    def work(incarnation: int) -> None:
        conn = meeting.connect()
        together.wait(10)
        while rows := call(conn, "claim", incarnation=incarnation):
            (row,) = rows
            started.append(row["job_id"])
            outcome = call(conn, "complete", job_ids=[row["job_id"]], tokens=[row["token"]])
            assert outcome == [{"job_id": row["job_id"], "outcome": "done"}]

    threads = [
        threading.Thread(target=work, args=(i,), name=f"claimer {i}", daemon=True) for i in incarnations
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert Counter(started) == Counter(jobs)
    ended = meeting.db.execute("select job_id, state, attempts from gangq.history order by job_id").fetchall()
    assert ended == [{"job_id": job, "state": "done", "attempts": 1} for job in sorted(jobs)]
    assert meeting.violations() == []


class Simulated(threading.Thread):
    """A worker of one slot that claims, waits at the barrier, completes, obeys, and now and then dies."""

    def __init__(
        self, conn: Connection, name: str, seed: int, stop: threading.Event, faults: list[str]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.conn = conn
        self.stop = stop
        self.faults = faults
        self.rng = random.Random(seed)
        self.incarnation = -1
        self.held: dict[str, Any] | None = None
        self.gone = False
        self.may_die = True

    def run(self) -> None:
        try:
            self.register()
            while not self.stop.is_set():
                try:
                    self.step()
                except psycopg.Error as e:
                    if e.sqlstate in ("GQ003", "GQ004"):
                        continue  # told to stop meanwhile; the heartbeat says what
                    if e.sqlstate == "GQ005":
                        self.register()  # the lease ended: a new life, without the old work
                    elif e.sqlstate != "55P03":
                        raise
        except Exception as e:
            self.faults.append(f"{self.name}: {e!r}")

    def register(self) -> None:
        self.held = None
        while not self.stop.is_set():
            try:
                (row,) = call(
                    self.conn, "register_worker", name=self.name, host=self.name, queues=["default"]
                )
            except psycopg.Error as e:
                if e.sqlstate != "GQ006":
                    raise
                # Its last life died in silence: wait until its lease is judged.
                self.stop.wait(0.05)
                continue
            self.incarnation = row["incarnation"]
            return

    def dies(self) -> None:
        """By proof, or in silence until the lease ends."""
        if self.rng.random() < 0.7:
            call(
                self.conn,
                "report_dead",
                worker=self.name,
                incarnation=self.incarnation,
                evidence={"by": "its next incarnation"},
            )
        self.register()

    def step(self) -> None:
        if self.held is None:
            rows = call(self.conn, "claim", incarnation=self.incarnation, sleep=True)
            if not rows:
                call(self.conn, "heartbeat", incarnation=self.incarnation)
                self.stop.wait(0.01)
                return
            self.held = rows[0]
        if self.may_die and self.rng.random() < 0.05:
            self.dies()
            return
        job, token = self.held["job_id"], self.held["token"]
        answers = call(self.conn, "heartbeat", incarnation=self.incarnation, job_ids=[job], tokens=[token])
        action = next(a["action"] for a in answers if a["token"] == token)
        if action == "lost":
            self.held = None
        elif action in ("preempt", "cancel"):
            value(self.conn, "ack_preempted", job_id=job, token=token)
            self.held = None
        else:
            peers = call(self.conn, "barrier", job_id=job, token=token)
            if peers[0]["go"]:
                # All or nothing: whoever may begin sees every rank, each with a worker or already done.
                if [p["rank"] for p in peers] != list(range(self.held["world_size"])):
                    self.faults.append(f"job {job} went with ranks {[p['rank'] for p in peers]}")
                call(self.conn, "complete", job_ids=[job], tokens=[token])
                self.held = None
            else:
                self.stop.wait(0.005)


PARTLY_STARTED = """
select g.id, g.epoch, array_agg(j.state order by j.rank) as states
from gangq.live_gangs g left join gangq.live_jobs j on j.gang_id = g.id
where g.state in ('reserved', 'running')
group by g.id
having count(j.id) <> g.size
  or (g.go_at is not null and bool_or(j.state not in ('running', 'done')))
  or (g.go_at is null and bool_or(j.state not in ('reserved', 'running')))
"""


@pytest.mark.slow
def test_40_gangs_on_8_workers_all_finish_though_workers_die_and_none_is_ever_partly_started(meeting: Arena):
    rng = random.Random(2)
    db = meeting.db
    call(db, "configure", gang_backoff_s=0, pass_over_s=0, candidate_silence_s=3600)
    call(db, "set_queue", name="default", backoff_s=0, backoff_max_s=0)
    sizes = [rng.randint(1, 8) for _ in range(40)]
    for size in sizes:
        meeting.gang(size, max_attempts=500, max_crashes=500)
    faults: list[str] = []
    stop = threading.Event()
    fleet = [Simulated(meeting.connect(), f"w{n}", n, stop, faults) for n in range(8)]
    ticker, checker = meeting.connect(), meeting.connect()
    looks = 0
    began = time.monotonic()
    for worker in fleet:
        worker.start()
    try:
        while time.monotonic() < began + DEADLINE_S and not faults:
            tick(ticker)
            # Eight minutes of theirs in a second of ours: who died in silence is judged soon.
            meeting.clock.advance(5)
            assert checker.execute(PARTLY_STARTED).fetchall() == []
            looks += 1
            if looks % 10 == 0:
                assert meeting.violations() == []
            failed = checker.execute("select id, reason from gangq.gangs where state = 'failed'").fetchall()
            for gang in failed:
                # The one honest reason: a member had finished when a sibling was lost. It runs again.
                assert "was already done when the gang drained" in gang["reason"]
                call(ticker, "retry", gang_ids=[gang["id"]])
            left = checker.execute("select count(*) as n from gangq.live_gangs").fetchone()
            assert left is not None
            if left["n"] <= 5:
                # No worker is killed while the last few gangs finish.
                for worker in fleet:
                    worker.may_die = False
            if left["n"] == 0:
                break
    finally:
        stop.set()
        for worker in fleet:
            worker.join(10)
    assert faults == []
    assert meeting.violations() == []
    assert looks > 20
    ended = db.execute("select size from gangq.gangs where state = 'done'").fetchall()
    assert Counter(e["size"] for e in ended) == Counter(sizes)
    members = db.execute("select count(*) as n from gangq.jobs where state = 'done'").fetchone()
    completed = db.execute(
        "select job_id, epoch from gangq.events where kind = 'done' group by 1, 2 having count(*) > 1"
    ).fetchall()
    assert completed == []
    deaths = db.execute(
        "select count(*) filter (where kind = 'dead') as proven, "
        "count(*) filter (where kind = 'reap') as judged from gangq.events"
    ).fetchone()
    assert members is not None
    assert deaths is not None
    assert members["n"] == sum(sizes)
    assert deaths["proven"] >= 3
    assert deaths["judged"] >= 1

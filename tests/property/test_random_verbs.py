"""Long random sequences of verbs, with time moving, replies lost and workers dying, against a small model.

After every step no invariant is broken and the model agrees. Hypothesis shrinks what fails to a short story.
The profile of `make test` is always the same walk; GANGQ_SOAK=1 walks much further, another way each time.
"""

from __future__ import annotations

import contextlib
import random
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.types.json import Jsonb

from interleaving.sessions import Connection, call, value
from property.model import Gang, Job, Model, Worker
from soaking import SOAK
from sql.drive import tick

PROFILE: dict[str, Any] = (
    {"max_examples": 1500, "stateful_step_count": 120}
    if SOAK
    else {"max_examples": 5, "stateful_step_count": 60, "derandomize": True}
)
ROUNDS = 1 if SOAK else 20
LEASE_S = 120
STALE = ("GQ002", "GQ003", "GQ004", "GQ005")
WAIT_S = 900  # longer than anything backs off, or waits for one that will not come

POLICIES = ("restart_member", "shrink", "restart_gang", "fail")

picks = st.integers(min_value=0, max_value=999)


class Verbs(RuleBasedStateMachine):
    """Rules are verbs; `pick` numbers choose among what the model knows."""

    clock: Any
    db: Connection
    restore: Callable[[], None]  # empties the installation
    start: Any  # when each walk begins
    seen: Counter[str]  # events of all walks, by kind

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now = 0.0
        self.numbers = random.Random(0)
        self.old: list[tuple[int, int, int]] = []  # job, token, incarnation: every claim ever heard of
        self.completed: set[tuple[int, int]] = set()

    # Helpers ------------------------------------------------------------------------------------------------

    def call(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        return call(self.db, verb, **arguments)

    def alive(self) -> list[Worker]:
        return [w for w in self.model.workers.values() if w.alive]

    def current(self) -> list[tuple[int, int, int]]:
        return [c for c in self.old if self.model.jobs[c[0]].owner == c[1]]

    def stale(self) -> list[tuple[int, int, int]]:
        return [c for c in self.old if self.model.jobs[c[0]].owner != c[1]]

    @staticmethod
    def pick(things: list[Any], number: int) -> Any:
        return things[number % len(things)]

    def fingerprint(self) -> str:
        """Everything a job verb could change."""
        row = self.db.execute(
            "select md5(string_agg(t, '|' order by t)) as m from ("
            "  select j::text as t from gangq.live_jobs j union all select g::text from gangq.live_gangs g"
            "  union all select h::text from gangq.history h"
            "  union all select d::text from gangq.device_holds d"
            "  union all select c::text from gangq.checkpoints c) x"
        ).fetchone()
        assert row is not None
        return str(row["m"])

    @contextlib.contextmanager
    def may_refuse(self, *sqlstates: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as e:
            if e.sqlstate not in sqlstates:
                raise

    # The world ----------------------------------------------------------------------------------------------

    @initialize(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4), pick=picks)
    def begin(self, sizes: list[int], pick: int) -> None:
        """Three workers at work: most stories are about what happens to work that runs."""
        self.restore()
        # So that work is displaced, too.
        call(self.db, "set_queue", name="default", min_run_s=0)
        self.clock.set(self.start)
        for n in range(3):
            self.register(n)
        for nth, size in enumerate(sizes):
            if nth % 2:
                self.submit_roles(pick + nth, POLICIES[(pick + size) % 4], 0, "requeue")
            else:
                self.submit_gang(pick + nth, size, 0, False)
        self.submit(pick, 3, 0, False)
        self.everybody_claims(2)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.everything_ends()
        for row in self.db.execute("select kind, count(*) as n from gangq.events group by kind").fetchall():
            self.seen[row["kind"]] += row["n"]

    @rule(seconds=st.sampled_from([1, 4, 20, 50]), times=st.integers(1, 4))
    def time_passes(self, seconds: int, times: int) -> None:
        """Living workers keep their leases, and somebody runs the tick."""
        for _ in range(times):
            self.clock.advance(seconds)
            self.now += seconds
            for worker in self.alive():
                self.beat(worker)
            self.tick()

    @rule(seconds=st.sampled_from([10, 100, 200]))
    def nobody_is_heard(self, seconds: int) -> None:
        """An outage, when it is long: no heartbeats, no ticks."""
        self.clock.advance(seconds)
        self.now += seconds

    def beat(self, worker: Worker) -> list[dict[str, Any]]:
        """A correct worker: what is lost it kills at once."""
        with self.may_refuse("GQ005"):
            rows = self.call(
                "heartbeat",
                incarnation=worker.incarnation,
                job_ids=list(worker.holds),
                tokens=list(worker.holds.values()),
            )
            worker.heard_at = self.now
            for row in rows:
                if row["action"] == "lost":
                    worker.holds.pop(row["job_id"], None)
            return sorted(rows, key=lambda row: (row["job_id"], row["token"]))
        worker.alive = False
        return []

    @precondition(lambda self: len(self.alive()) < 4)
    @rule(pick=picks)
    def register(self, pick: int) -> None:
        name = f"w{pick % 4}"
        devices = [{"uuid": f"{name}-{n}", "index": n, "vram_mb": 1000 * (n + 1)} for n in range(2)]
        with self.may_refuse("GQ006"):
            (row,) = self.call(
                "register_worker",
                name=name,
                host=f"h{pick % 2}",
                queues=["default"],
                slots=3,
                prefetch=1 + pick % 2,
                memory_mb=4000,
                devices=devices,
            )
            self.model.workers[row["incarnation"]] = Worker(name, row["incarnation"], self.now, LEASE_S)

    @precondition(lambda self: self.alive())
    @rule(pick=picks, how=st.sampled_from(["silent", "dead", "retire", "drain"]))
    def worker_goes(self, pick: int, how: str) -> None:
        """Falls silent (its work is dead before its lease ends), is proven dead, or stops as asked."""
        worker = self.pick(self.alive(), pick)
        if how == "silent":
            worker.alive = False
            return
        if how == "drain":
            self.call("retire_worker", incarnation=worker.incarnation, final=False)
            return
        worker.alive = False
        worker.holds.clear()
        if how == "dead":
            self.call(
                "report_dead", worker=worker.name, incarnation=worker.incarnation, evidence={"by": "test"}
            )
        else:
            self.call("retire_worker", incarnation=worker.incarnation)
        if pick % 2:
            self.register(int(worker.name[1]))

    def everything_ends(self) -> None:
        """Once the operators let go and all workers do as they are told, no work is left behind."""
        self.uncordon(0)
        left: list[Any] = []
        waited = 0
        while waited < WAIT_S:
            for number in range(4):
                if not any(w.name == f"w{number}" for w in self.alive()):
                    self.register(number)
            self.everybody_claims(2)
            acted = sum(self.works(worker) for worker in self.alive())
            left = self.db.execute("select * from gangq.live_jobs order by gang_id, rank").fetchall()
            if not left:
                break
            if not acted:
                waited += 45
                self.time_passes(45, 1)
                # What was told to stop before and could not confirm it is forced to, and leaves its devices in doubt.
                for row in self.db.execute(
                    "select r.uuid from gangq.device_holds h join gangq.device_registry r on r.id = h.device_id "
                    "where h.kind = 'quarantine'"
                ).fetchall():
                    self.call("unquarantine", device_uuid=row["uuid"])
                self.retire_the_drained()
        self.the_model_agrees()
        assert left == [], self.db.execute("select * from gangq.live_gangs").fetchall()

    def retire_the_drained(self) -> None:
        for row in self.db.execute(
            "select i.id from gangq.incarnations i where i.state = 'draining' and i.ended_at is null "
            "and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id)"
        ).fetchall():
            self.call("retire_worker", incarnation=row["id"])
            self.model.workers[row["id"]].alive = False

    def works(self, worker: Worker) -> int:
        """What a worker that behaves does with what it has: stop what it is told to stop, finish the rest."""
        acted = 0
        for row in self.beat(worker):
            job_id, token = row["job_id"], row["token"]
            with self.may_refuse(*STALE):
                if row["action"] in ("preempt", "cancel"):
                    value(self.db, "ack_preempted", job_id=job_id, token=token)
                elif row["action"] == "continue" and (row["gang_id"] is None or self.whole(job_id, token)):
                    self.call("complete", job_ids=[job_id], tokens=[token])
                    self.completed.add((job_id, token))
                else:
                    continue
                self.model.stopped(job_id, token)
                acted += 1
        return acted

    def whole(self, job_id: int, token: int) -> bool:
        """Whether its gang may begin, or go on: a new rank 0 says where it is to be found."""
        rows = self.call("barrier", job_id=job_id, token=token, port=20000 + job_id)
        assert [r["rank"] for r in rows] == list(range(len(rows)))
        return bool(rows[0]["go"])

    # Work comes ---------------------------------------------------------------------------------------------

    @rule(pick=picks, count=st.integers(1, 3), priority=st.integers(-1, 1), wait=st.booleans())
    def submit(self, pick: int, count: int, priority: int, wait: bool) -> None:
        after = [self.pick(list(self.model.jobs), pick)] if wait and self.model.jobs else []
        with self.may_refuse("GQ001"):  # what it waits for has failed
            rows = self.call(
                "submit",
                task="t",
                payloads=["{}"] * count,
                priority=priority,
                gpus=pick % 2,
                vram_mb=1500 * (pick % 2) * (pick % 3 == 0),
                max_attempts=2 + pick % 3,
                after=after,
            )
            self.model.submitted([r["submit"] for r in rows])

    @rule(pick=picks, size=st.integers(1, 4), priority=st.integers(-1, 1), wait=st.booleans())
    def submit_gang(self, pick: int, size: int, priority: int, wait: bool) -> None:
        after = [self.pick(list(self.model.jobs), pick)] if wait and pick % 3 == 0 and self.model.jobs else []
        self.enters(
            Gang([], [size], [size], ("restart_gang", "restart_member", "fail")[pick % 3]),
            size=size,
            gpus=pick % 2,
            memory_mb=700 * (pick % 3),
            max_attempts=2 + pick % 4,
            after=after,
            priority=priority,
            checkpoint_mode=("each", "rank0")[pick % 2],
        )

    @rule(
        pick=picks,
        policy=st.sampled_from(POLICIES),
        priority=st.integers(-1, 1),
        style=st.sampled_from(["requeue", "hard", "soft"]),
    )
    def submit_roles(self, pick: int, policy: str, priority: int, style: str) -> None:
        """A driver and its executors, more or fewer of them; or members alike of which some can be spared."""
        most, least = 2 + pick % 3, 1 + pick % 2
        limits: dict[str, Any] = {"timeout_s": 60, "timeout_style": style} if pick % 2 else {}
        gpus = pick // 2 % 2
        if pick % 3:
            executors = {"name": "executor", "count": most, "min": least, "gpus": gpus}
            limits["roles"] = Jsonb([{"name": "driver", "count": 1, "task": "drive"}, executors])
            limits["completion"] = ("driver", "executor", None)[pick // 3 % 3]
            gang = Gang([], [1, least], [1, most], policy, style == "soft")
        else:
            gang = Gang([], [least], [most], policy, style == "soft")
            limits |= {"size": most, "min_size": least, "gpus": gpus}
        self.enters(gang, max_attempts=3, priority=priority, **limits)

    def enters(self, gang: Gang, **asked: Any) -> None:
        with self.may_refuse("GQ001"):
            (row,) = self.call("submit_gang", task="g", failure_policy=gang.policy, **asked)
            gang.ids = list(row["job_ids"])
            self.model.submitted(gang.ids, row["gang_id"], gang)

    @precondition(lambda self: self.model.jobs)
    @rule(
        pick=picks,
        what=st.sampled_from(
            ["cancel", "retry", "set_priority", "rollback", "quarantine", "cordon", "uncordon"]
        ),
    )
    def somebody_interferes(self, pick: int, what: str) -> None:
        getattr(self, what)(pick)

    @precondition(lambda self: self.model.gangs)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        for nth, gang_id in enumerate(self.model.gangs):
            if pick % 2 or nth % 3 == pick % 3:
                with self.may_refuse("GQ002"):
                    self.call("preempt_gang", gang_id=gang_id)

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(pick=picks)
    def one_is_silent_and_the_others_go_on(self, pick: int) -> None:
        """What it runs is its own until its lease ends, however eager the others are."""
        self.pick(self.alive(), pick).alive = False
        for _ in range(2 + pick % 6):
            self.time_passes(25, 1)
            self.everybody_claims(pick)

    @precondition(lambda self: self.model.gangs)
    @rule(pick=picks)
    def nobody_acknowledges(self, pick: int) -> None:
        """Gangs are told to stop, their workers are heard, and no word comes until the drain is forced."""
        self.preempt(pick)
        self.time_passes(50, 4)

    def rollback(self, pick: int) -> None:
        for gang_id in self.model.gangs:
            with self.may_refuse("GQ002"):
                self.call("rollback_gang", gang_id=gang_id)

    def cordon(self, pick: int) -> None:
        name = {"worker": f"w{pick % 4}"} if pick % 3 else {"host": f"h{pick % 2}"}
        drain = pick % 5 < 3
        deadline = self.clock.now() + timedelta(seconds=pick % 100 + 1) if drain and pick % 4 == 3 else None
        with self.may_refuse("GQ002"):
            self.call("cordon", drain=drain, deadline=deadline, **name)

    @precondition(lambda self: self.current())
    @rule(pick=picks)
    def a_worker_is_drained(self, pick: int) -> None:
        """What it runs moves as a whole to where there is room, or stops at the deadline."""
        worker = self.model.workers[self.pick(self.current(), pick)[2]]
        deadline = self.clock.now() + timedelta(seconds=5) if pick % 4 == 0 else None
        self.call("cordon", worker=worker.name, drain=True, deadline=deadline)
        self.time_passes(20, 1)
        self.acknowledge_all()
        self.everybody_claims(pick)
        if pick % 3:
            self.uncordon(pick)

    def uncordon(self, pick: int) -> None:
        for row in self.db.execute("select kind, name from gangq.cordons").fetchall():
            self.call("uncordon", **{row["kind"]: row["name"]})

    def quarantine(self, pick: int) -> None:
        with self.may_refuse("GQ002", "GQ004"):
            self.call(
                "unquarantine" if pick % 2 else "quarantine", device_uuid=f"w{pick % 4}-{pick // 2 % 2}"
            )

    def cancel(self, pick: int) -> None:
        job: Job = self.pick(list(self.model.jobs.values()), pick)
        if job.gang is None:
            self.call("cancel", job_ids=[job.id])
        else:
            self.call("cancel", gang_ids=[job.gang])

    def retry(self, pick: int) -> None:
        jobs = list(self.model.jobs.values())
        # What never began and what still runs is refused: seldom.
        job: Job = self.pick([job for job in jobs if job.tokens and not job.owner] or jobs, pick)
        # Of a gang that became single jobs nothing is left to retry.
        with self.may_refuse("GQ004", "GQ002"):
            self.call("retry", **({"job_ids": [job.id]} if job.gang is None else {"gang_ids": [job.gang]}))

    def set_priority(self, pick: int) -> None:
        job: Job = self.pick(list(self.model.jobs.values()), pick)
        which = {"job_ids": [job.id]} if job.gang is None else {"gang_ids": [job.gang]}
        with self.may_refuse("GQ002"):
            self.call("set_priority", priority=pick % 5 - 2, **which)

    # Work is done -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.workers)
    @rule(pick=picks, most=st.integers(1, 3), lose=st.booleans())
    def claim(self, pick: int, most: int, lose: bool) -> None:
        worker: Worker = self.pick(list(self.model.workers.values()), pick)
        request = uuid.UUID(int=self.numbers.getrandbits(128))
        with self.may_refuse("GQ005"):
            first = self.call("claim", incarnation=worker.incarnation, request_id=request, max_jobs=most)
            self.heard_of(worker, first)
            if lose and first:
                before = self.fingerprint()
                again = self.call("claim", incarnation=worker.incarnation, request_id=request, max_jobs=most)
                assert [(r["job_id"], r["token"]) for r in again] == [
                    (r["job_id"], r["token"]) for r in first
                ]
                assert self.fingerprint() == before

    @precondition(lambda self: self.alive())
    @rule(pick=picks)
    def everybody_claims(self, pick: int) -> None:
        """In turn and after a tick, so that gangs get past their barriers."""
        self.tick()
        for worker in self.alive():
            with self.may_refuse("GQ005"):
                self.heard_of(
                    worker, self.call("claim", incarnation=worker.incarnation, max_jobs=1 + pick % 3)
                )

    def heard_of(self, worker: Worker, claims: list[dict[str, Any]]) -> None:
        # Tokens rise from call to call; within one call they need not follow the order of its rows.
        for row in sorted(claims, key=lambda r: r["token"]):
            self.model.claimed(worker.incarnation, row["job_id"], row["token"], self.now)
        # By job: a walk repeated must choose the same ones.
        self.old += sorted((row["job_id"], row["token"], worker.incarnation) for row in claims)

    def ends(self, verb: str, pick: int, **more: Any) -> str | None:
        """The owner of a claim ends it, with a verb that takes one job and one token."""
        job_id, token, _ = self.pick(self.current(), pick)
        with self.may_refuse("GQ004"):
            answer = value(self.db, verb, job_id=job_id, token=token, **more)
            assert answer != "repeated"
            self.model.stopped(job_id, token)
            assert value(self.db, verb, job_id=job_id, token=token, **more) == "repeated"
            return str(answer)
        return None

    @precondition(lambda self: self.current())
    @rule(pick=picks, several=st.booleans())
    def complete(self, pick: int, several: bool) -> None:
        chosen = self.current()[: 1 + pick % 4] if several else [self.pick(self.current(), pick)]
        jobs, tokens = [c[0] for c in chosen], [c[1] for c in chosen]
        before = self.fingerprint()
        with self.may_refuse("GQ004"):
            assert {r["outcome"] for r in self.call("complete", job_ids=jobs, tokens=tokens)} == {"done"}
            for job_id, token in zip(jobs, tokens, strict=True):
                self.model.stopped(job_id, token)
                self.completed.add((job_id, token))
            before = self.fingerprint()
            again = self.call("complete", job_ids=jobs, tokens=tokens)
            assert {r["outcome"] for r in again} == {"repeated"}
        # Also when the barrier of one of them is shut: then none is done.
        assert self.fingerprint() == before

    @precondition(lambda self: self.current())
    @rule(pick=picks)
    def an_attempt_fails(self, pick: int) -> None:
        """That of a single job, if one runs: members fail in other rules, too."""
        rows = self.db.execute("select id from gangq.live_jobs where gang_id is null").fetchall()
        singles = {row["id"] for row in rows}
        places = [nth for nth, (job_id, *_) in enumerate(self.current()) if job_id in singles] or [pick]
        self.ends("fail", places[pick % len(places)])

    @precondition(lambda self: self.current())
    @rule(
        pick=picks,
        how=st.sampled_from(
            ["fail for good", "port taken", "snooze", "requeue", "trip", "ack", "ack all", "release"]
        ),
    )
    def an_attempt_ends_early(self, pick: int, how: str) -> None:
        match how:
            case "fail for good":
                self.ends("fail", pick, retryable=False)
            case "port taken":
                self.ends("fail", pick, cause="port_taken")
            case "snooze":
                self.ends("snooze", pick, for_s=pick % 7)
            case "requeue":
                self.ends("requeue", pick, front=pick % 2 == 0)
            case "trip":
                self.trip(pick)
            case "ack":
                self.ends("ack_preempted", pick)
            case "ack all":
                self.acknowledge_all()
            case _:
                self.release(pick)

    @precondition(lambda self: self.elastic())
    @rule(pick=picks)
    def a_gang_is_shrunk(self, pick: int) -> None:
        job_id, _, _ = self.pick(self.elastic(), pick)
        self.call("shrink_gang", gang_id=self.model.jobs[job_id].gang, job_ids=[job_id])
        if pick % 4:
            self.acknowledge_all()
        if pick % 3:
            self.time_passes(50, 1)
            self.everybody_claims(pick)

    @precondition(lambda self: self.lasting())
    @rule(pick=picks, how=st.sampled_from(["fail", "requeue", "trip", "its worker dies"]))
    def a_member_is_lost_and_the_others_go_on(self, pick: int, how: str) -> None:
        lasting = self.lasting()
        elastic = [claim for claim in self.elastic() if claim in lasting]
        job_id, token, incarnation = self.pick(elastic or lasting, pick)
        if how == "its worker dies":
            worker = self.model.workers[incarnation]
            if worker.alive:
                worker.alive = False
                worker.holds.clear()
                self.call("report_dead", worker=worker.name, incarnation=incarnation, evidence={"by": "test"})
        elif how == "trip":
            self.trip(self.current().index((job_id, token, incarnation)))
        else:
            value(self.db, how, job_id=job_id, token=token)
            self.model.stopped(job_id, token)
        if pick % 3:
            self.time_passes(50, 1)
            self.everybody_claims(pick)

    def lasting(self) -> list[tuple[int, int, int]]:
        """Claims of gangs that one lost member need not stop."""
        members = [c for c in self.current() if self.model.jobs[c[0]].gang is not None]
        return [c for c in members if self.gang_of(c).policy in ("restart_member", "shrink")]

    def elastic(self) -> list[tuple[int, int, int]]:
        """Claims of gangs that can do with fewer members."""
        members = [c for c in self.current() if self.model.jobs[c[0]].gang is not None]
        return [c for c in members if self.gang_of(c).least != self.gang_of(c).most]

    def gang_of(self, claim: tuple[int, int, int]) -> Gang:
        gang_id = self.model.jobs[claim[0]].gang
        assert gang_id is not None
        return self.model.gangs[gang_id]

    def trip(self, pick: int) -> None:
        """The job alone is dead, or the whole worker will be within seconds."""
        job_id, token, incarnation = self.pick(self.current(), pick)
        gone_in = 15 if pick % 3 == 0 else None
        answer = value(
            self.db,
            "trip",
            incarnation=incarnation,
            job_id=job_id,
            token=token,
            code=(75, 85, 86)[pick // 3 % 3],
            error={"type": "Tripped"},
            exit_in_s=gone_in,
        )
        assert answer not in ("held", "notify", "repeated")
        if gone_in is None:
            self.model.stopped(job_id, token)
        else:
            worker = self.model.workers[incarnation]
            worker.alive = False
            worker.lease_s = min(worker.lease_s, self.now + gone_in - worker.heard_at)

    def acknowledge_all(self) -> None:
        for job_id, token, _ in self.current():
            with self.may_refuse("GQ004", "GQ003"):
                value(self.db, "ack_preempted", job_id=job_id, token=token)
                self.model.stopped(job_id, token)

    def release(self, pick: int) -> None:
        chosen = self.current()[: 1 + pick % 3]
        rows = self.call("release", job_ids=[c[0] for c in chosen], tokens=[c[1] for c in chosen])
        assert {r["outcome"] for r in rows} == {"released"}
        for job_id, token, _ in chosen:
            self.model.stopped(job_id, token)

    @precondition(lambda self: self.current())
    @rule(pick=picks, step=st.integers(0, 3))
    def save_checkpoint(self, pick: int, step: int) -> None:
        job_id, token, _ = self.pick(self.current(), pick)
        self.call("save_checkpoint", job_id=job_id, token=token, step=step, data=b"x")
        self.call("load_checkpoint", job_id=job_id, token=token)
        self.call("inputs", job_id=job_id, token=token)

    @precondition(lambda self: self.stale())
    @rule(pick=picks)
    def a_zombie_calls_with_an_old_token(self, pick: int) -> None:
        """Whatever it says, nothing changes. The newest of its claims: the job may be running again by now."""
        job_id, token, incarnation = self.pick(self.stale()[-6:], pick)
        one = {"job_id": job_id, "token": token}
        several = {"job_ids": [job_id], "tokens": [token]}
        before = self.fingerprint()
        (row,) = self.call("complete", strict=False, **several)
        # It may be told that it is done only if it is.
        assert row["outcome"] == ("repeated" if (job_id, token) in self.completed else "stale")
        for verb in ("fail", "requeue", "ack_preempted"):
            with self.may_refuse(*STALE):
                assert value(self.db, verb, **one) == "repeated"
        with self.may_refuse(*STALE):
            self.call("save_checkpoint", step=9, data=b"zombie", **one)
            raise AssertionError("a zombie saved a checkpoint")
        (row,) = self.call("release", **several)
        assert row["outcome"] in ("stale", "repeated")
        with self.may_refuse(*STALE):
            rows = self.call("heartbeat", incarnation=incarnation, **several)
            assert [r["action"] for r in rows if r["token"] == token] == ["lost"]
            self.model.workers[incarnation].heard_at = self.now
        assert self.fingerprint() == before

    # The scheduler ------------------------------------------------------------------------------------------

    @rule()
    def tick(self) -> None:
        self.no_step_that_a_tick_leaves_out_has_something_to_do()
        for _ in range(10):
            row = tick(self.db)
            assert row["ran"]
            if not row["again"]:
                break
        held = self.db.execute("select id, token from gangq.live_jobs").fetchall()
        self.model.owners({r["id"]: r["token"] for r in held})
        # Work whose lease the database has judged over was killed by its worker before that.
        for worker in self.model.workers.values():
            if not worker.lease_live(self.now):
                worker.holds.clear()

    def no_step_that_a_tick_leaves_out_has_something_to_do(self) -> None:
        with self.db.transaction(force_rollback=True):
            left_out = self.db.execute(
                "select s.name from gangq.tick_steps(gangq.now()) s where not s.due and not s.at_work"
            ).fetchall()
            steps = [row["name"] for row in left_out]
            done = self.db.execute(
                "select s.name, gangq.tick_step(s.name, true) as done from unnest(%s::text[]) as s(name)",
                [steps],
            ).fetchall()
        assert {row["name"] for row in done if row["done"]} == set()

    # What must hold after every step ------------------------------------------------------------------------

    @invariant()
    def nothing_is_broken(self) -> None:
        broken = self.db.execute("select * from gangq.violations").fetchall()
        assert broken == []
        failed = self.db.execute("select reason, data from gangq.events where kind = 'tick_error'").fetchall()
        assert failed == []

    @invariant()
    def every_attempt_is_on_record_once(self) -> None:
        rows = self.db.execute(
            "select job_id, token, ended_at is null as runs, cause from gangq.attempts"
        ).fetchall()
        found = Counter((row["job_id"], row["token"]) for row in rows)
        assert [claim for claim, times in found.items() if times > 1] == []
        assert {(job, token) for job, token, _ in self.old} <= found.keys()
        assert {row["runs"] == (row["cause"] is None) for row in rows} <= {True}

    @invariant()
    def the_model_agrees(self) -> None:
        live = self.db.execute(
            "select id, gang_id, rank, state, token, attempts, max_attempts, crashes, max_crashes, trips, "
            "max_trips from gangq.live_jobs order by gang_id, rank"
        ).fetchall()
        running = self.db.execute(
            "select g.id, g.world_size, array_agg(j.rank order by j.rank) as ranks, "
            "array_agg(j.state order by j.rank) as states, "
            "array_agg(gangq.in_epoch(j, g) order by j.rank) as parts "
            "from gangq.live_gangs g join gangq.live_jobs j on j.gang_id = g.id "
            "where g.state = 'running' group by g.id"
        ).fetchall()
        ended = self.db.execute(
            "select job_id, coalesce(token::text, 'never') || finished_at as key, h::text as whole "
            "from gangq.history h"
        ).fetchall()
        self.model.members({r["id"]: r["gang_id"] for r in live})
        self.model.owners({r["id"]: r["token"] for r in live})
        self.model.conserved([r["id"] for r in live], {r["job_id"] for r in ended})
        self.model.immutable({(r["job_id"], r["key"]): r["whole"] for r in ended})
        assert len(ended) == len(self.model.endings), "two endings of one job at the same moment"
        for r in live:
            # A gang's member may stand one over its limit only until its gang's drain is complete.
            over = 1 if r["gang_id"] is not None else 0
            assert 0 <= r["attempts"] <= r["max_attempts"], r
            assert r["crashes"] <= r["max_crashes"] + over, r
            assert r["trips"] <= r["max_trips"] + over, r
        for gang in running:
            members = list(zip(gang["ranks"], gang["states"], gang["parts"], strict=True))
            self.model.gone(gang["id"], gang["world_size"], members)
        # The next step happens a moment later, as it would.
        self.clock.advance(0.001)
        self.now += 0.001


def unlisted(db: Connection) -> list[Any]:
    """Changes of state that gangq.transitions does not say of the function that made them."""
    return db.execute(
        "select c.verb, string_agg(c.pair, ' ' order by c.pair) as pairs from public.changes c "
        "where c.pair !~ '^(.*)>\\1$' and c.verb not in ('tick', 'apply') "
        "and not exists (select from gangq.transitions t where t.verb = c.verb "
        "and t.old_state || '>' || t.new_state = c.pair) group by 1 order by 1"
    ).fetchall()


@pytest.mark.slow
@pytest.mark.timeout(3600 if SOAK else 600)
def test_no_sequence_of_verbs_breaks_an_invariant_or_surprises_the_model(
    database: Any, db: Connection, clock: Any
):
    # A walk repeated must go the same way: no chance in how long things back off.
    db.execute(
        "create or replace function gangq.backoff(base_s real, max_s real, nth integer) returns interval "
        "language sql as $$ select make_interval(secs => least(max_s, base_s * power(2, least(nth, 9)))) $$"
    )

    db.execute("create table public.changes (pair text, verb text, primary key (pair, verb))")
    db.execute(
        "create function public.note_change() returns trigger language plpgsql as $$ begin "
        "insert into public.changes select coalesce(old.state, '') || '>' || new.state, "
        "substring(current_query() from 'gangq\\.(\\w+)\\(') on conflict do nothing; return null; end $$"
    )
    db.execute(
        "create trigger note_change after insert or update of state on gangq.live_jobs for each row "
        "execute function public.note_change()"
    )

    class Walk(Verbs):
        pass

    Walk.db, Walk.clock, Walk.start, Walk.seen = db, clock, clock.now(), Counter()
    # A database for every walk would cost more than the walk.
    Walk.restore = database.kept.restore
    wanted = {"go", "drain", "ack", "force", "reap", "rollback", "retry", "release", "dead"}
    wanted |= {"shrink", "replace", "preempt", "timeout", "split", "trip"}
    # Hypothesis draws from the constants of all modules that are loaded, so the same seed goes other ways beside
    # other tests: as many walks as it takes to come to everything.
    for nth in range(ROUNDS):
        run_state_machine_as_test(
            seed(nth)(Walk),
            settings=settings(
                **PROFILE,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
        missing = wanted - set(Walk.seen)
        if not missing:
            assert str(unlisted(db)) == "[]"
            return
    raise AssertionError(f"the walks never came to {missing}: they prove less than they claim")

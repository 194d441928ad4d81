"""A thin driver for the SQL verbs: no client library, so that what fails here is SQL.

`Q` calls verbs by name with named arguments, cast to what `pg_proc` declares. `Worker` and `Claim` carry the
incarnation and the token, so that a test reads as what a worker says and not as parameter lists.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from gangq.client import sync
from gangq.client.sync import run
from gangq.client.verb import Steps
from gangq.decider.passes import run_pass, run_passes
from gangq.decider.schedules import plan_schedules
from gangq.placement.board import Board
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision

Row = dict[str, Any]
T = TypeVar("T")

# What a gangq verb answers with, by meaning.
INVALID, MISSING, STALE, WRONG_STATE = "GQ001", "GQ002", "GQ003", "GQ004"
ENDED, NAME_TAKEN, TOO_LARGE, WRONG_ISOLATION = "GQ005", "GQ006", "GQ007", "GQ008"
NOT_ALLOWED = "42501"

# A single job that asks for a model is placed by a decision, and any worker can load a model.
PLACED = {"model": "any"}


@contextlib.contextmanager
def refused(sqlstate: str, mentioning: str = "") -> Iterator[psycopg.Error]:
    """Expect a typed error: its SQLSTATE, something its text names, and (class GQ) a hint on what to do."""
    with pytest.raises(psycopg.Error) as caught:
        yield caught  # type: ignore[misc]
    error = caught.value
    assert error.sqlstate == sqlstate, f"{error.sqlstate}: {error}"
    assert mentioning in str(error)
    if sqlstate.startswith("GQ"):
        assert error.diag.message_hint, f"no hint: {error}"


def with_settings(verb: str, named: Row) -> Row:
    """The arguments of set_queue, set_task or configure as they are called: what is no argument is a setting."""
    arguments = {"set_queue": {"name"}, "set_task": {"task", "forget"}, "configure": set()}[verb]
    plain = {name: value for name, value in named.items() if name in arguments}
    return {**plain, "settings": {name: value for name, value in named.items() if name not in plain}}


def with_options(named: Row, arguments: Iterable[str]) -> Row:
    """The arguments of a verb as it is called: what is none of these is an option."""
    given = {name: value for name, value in named.items() if name in arguments}
    options = {name: _plain(value) for name, value in named.items() if name not in arguments}
    return {**given, "options": {**given.get("options", {}), **options}} if options else given


def _plain(value: Any) -> Any:
    """As JSON has it, or as the text of what JSON does not have."""
    if isinstance(value, uuid.UUID) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value.obj if isinstance(value, Jsonb) else value


def gpus(*vram_mb: int, prefix: str = "G", source: str = "nvml") -> list[Row]:
    """Devices of these sizes, uuid prefix0, prefix1, ..."""
    return [
        {"uuid": f"{prefix}{n}", "index": n, "vram_mb": vram, "model": "test", "source": source}
        for n, vram in enumerate(vram_mb)
    ]


def a_role(db: psycopg.Connection[Row], name: str, *groups: str, login: bool = False) -> str:
    """A role of the server, which other tests may have made before, in these groups alone; its name."""
    if not db.execute("select 1 from pg_roles where rolname = %s", [name]).fetchall():
        db.execute(f"create role {name}")
    db.execute(f"alter role {name} {'login' if login else 'nologin'}")
    held = db.execute(
        "select g.rolname from pg_auth_members m join pg_roles g on g.oid = m.roleid "
        "where m.member = %s::regrole",
        [name],
    )
    for row in held.fetchall():
        db.execute(f"revoke {row['rolname']} from {name}")
    for group in groups:
        db.execute(f"grant {group} to {name}")
    return name


def in_steps(db: psycopg.Connection[Any], steps: Steps[T], answer: Any = None) -> T:
    """Do what several statements do, one after the other, without the pauses between them."""
    return sync.in_steps(lambda query: run(db, query), steps, answer, pause=lambda _: None)


def place(db: psycopg.Connection[Row]) -> Row:
    """One pass, nothing else of a tick: how many gangs it placed, and whether there is more to do."""
    passed = in_steps(db, run_pass())
    return {"placed": passed.placed, "again": passed.again}


def tick(db: psycopg.Connection[Row]) -> Row:
    """One forced tick, and a pass where it asks for one: again is true where either wants to go on."""
    with db.cursor(row_factory=dict_row) as cursor:
        row: Row = cursor.execute("select * from gangq.tick(force => true, decides => true)").fetchall()[0]
    if row["unplanned"]:
        row["again"] |= in_steps(db, plan_schedules())
    if row["decide"]:
        row["again"] |= in_steps(db, run_passes()).again
    return row


class Q:
    """One connection's view of gangq."""

    _signatures: dict[str, dict[str, str]] = {}  # noqa: RUF012  the same for every database of a run

    def __init__(self, db: psycopg.Connection[Row], clock: Any = None) -> None:
        self.db = db
        self.clock = clock
        if not self._signatures:
            for row in db.execute(
                "select p.proname, a.name, format_type(a.type, null) as type from pg_proc p "
                "left join lateral unnest(p.proargnames[1:p.pronargs], p.proargtypes::oid[]) as a(name, "
                "type) "
                "on a.name is not null where p.pronamespace = 'gangq'::regnamespace"
            ):
                types = self._signatures.setdefault(row["proname"], {})
                if row["name"] is not None:
                    types[row["name"]] = row["type"]

    # Calling ------------------------------------------------------------------------------------------------

    def sql(self, text: str, **values: Any) -> list[Row]:
        """Run any SQL as the owner; the rows, or [] where there are none."""
        cursor = self.db.execute(text, values or None)
        return cursor.fetchall() if cursor.description else []

    def value(self, text: str, **values: Any) -> Any:
        """The first column of the first row."""
        rows = self.sql(text, **values)
        assert rows, f"no row: {text}"
        return next(iter(rows[0].values()))

    def call(self, verb: str, **named: Any) -> list[Row]:
        """Call a verb with named arguments."""
        assert verb in self._signatures, f"no such verb {verb}"
        types = self._signatures[verb]
        if "settings" in types:
            named = with_settings(verb, named)
        elif "options" in types:
            named = with_options(named, types)
        arguments = ", ".join(f"{name} => %({name})s::{types[name]}" for name in named)
        values = {name: _json(value, types[name]) for name, value in named.items()}
        return self.db.execute(f"select * from gangq.{verb}({arguments})", values).fetchall()

    def one(self, verb: str, **named: Any) -> Any:
        """The only row of a verb; its value when the row has one column."""
        rows = self.call(verb, **named)
        assert len(rows) == 1, f"{verb} returned {rows}"
        return next(iter(rows[0].values())) if len(rows[0]) == 1 else rows[0]

    # Submitting and looking ---------------------------------------------------------------------------------

    def submit(self, task: str = "work", count: int = 1, **options: Any) -> Any:
        """The id of one solo job, or the ids of several."""
        options.setdefault("payloads", [{"n": n} for n in range(count)])
        ids = [row["submit"] for row in self.call("submit", task=task, **options)]
        return ids[0] if count == 1 and len(ids) == 1 else ids

    def submit_gang(self, size: int | None = None, task: str = "train", **options: Any) -> Gang:
        row = self.one("submit_gang", task=task, size=size, **options)
        return Gang(self, row["gang_id"], row["job_ids"], row["note"])

    def running_gang(
        self, *workers: Worker, size: int | None = None, **options: Any
    ) -> tuple[Gang, list[Claim]]:
        """A gang that has started on these workers."""
        gang = self.submit_gang(size or len(workers), **options)
        return gang, gang.start(*workers)

    def job(self, job_id: int) -> Row:
        """The job as the view shows it."""
        row: Row = self.sql("select * from gangq.jobs where id = %(id)s", id=job_id)[0]
        return row

    def state(self, job_id: int) -> str:
        return str(self.job(job_id)["state"])

    def events(self, kind: str | None = None, **where: Any) -> list[Row]:
        rows = self.sql("select * from gangq.events order by id")
        if kind is not None:
            rows = [row for row in rows if row["kind"] == kind]
        return [row for row in rows if all(row[key] == value for key, value in where.items())]

    def violations(self) -> list[Row]:
        return self.sql("select * from gangq.violations")

    # Time and maintenance -----------------------------------------------------------------------------------

    def tick(self) -> Row:
        """One forced tick and what is decided after it, repeated while it says that there is more."""
        for _ in range(20):
            row = self.tick_once()
            if not row["again"]:
                return row
        raise AssertionError("tick always wants to run again")

    def place(self) -> Row:
        """One pass, nothing else of a tick."""
        return place(self.db)

    def decisions(self, action: str = "") -> dict[str, Decision]:
        """What is decided on the board as it is, without effects; of one action or all."""
        found = decide(Board.from_json(self.value("select gangq.board() as board")))
        return {one.ask: one for one in found if action in ("", one.action)}

    def decided(self) -> Callable[[], dict[str, str]]:
        """What is decided on the board as it is now: the function carries it out, and says what came of each."""
        steps = run_pass()
        board = run(self.db, next(steps))
        return lambda: in_steps(self.db, steps, board).outcomes

    def tick_once(self) -> Row:
        """One forced tick, and what is decided after it."""
        row = tick(self.db)
        assert row["ran"], row
        return row

    def settle(self, rounds: int = 4) -> None:
        """Ticks, so that what one tick set free is seen by the next."""
        for _ in range(rounds):
            self.tick()

    def later(self, seconds: float) -> None:
        """Move the database's clock."""
        self.clock.advance(seconds)

    def live_on(self, seconds: float, *workers: Worker, step: float = 10.0, tick: bool = True) -> None:
        """Let time pass as it does in a healthy fleet: these workers heartbeat, and ticks run."""
        while seconds > 0:
            self.later(min(step, seconds))
            seconds -= step
            for worker in workers:
                worker.beat()
            if tick:
                self.tick()

    def beyond_min_run(self, *workers: Worker) -> None:
        """Let the minimum run time of what runs pass."""
        self.live_on(310, *workers, step=30, tick=False)

    def single_waits(self) -> bool:
        """Whether a single job waits that a decision has to place; False too where this login may not ask."""
        may = "select has_function_privilege('gangq.single_waits()', 'execute')"
        return bool(self.value(may) and self.value("select gangq.single_waits()"))

    def planned_seats(self, kept: bool = False) -> list[Row]:
        """The seats of planned starts, by ask and worker; kept: those of what others stop for."""
        return self.sql(
            "select p.ask, p.starts_at, (s ->> 'worker')::bigint as incarnation, s -> 'devices' as devices, "
            "(s ->> 'slots')::integer as slots, (s ->> 'memory_mb')::integer as memory_mb, "
            "(s ->> 'millicpus')::integer as millicpus "
            "from gangq.plans p cross join lateral jsonb_array_elements(p.seats) s "
            "where p.kept = %(kept)s order by 1, 3",
            kept=kept,
        )

    # Workers ------------------------------------------------------------------------------------------------

    def worker(self, name: str = "w1", host: str | None = None, **offer: Any) -> Worker:
        """A worker takes as many light jobs as it has slots for placed ones, unless the test says otherwise."""
        offer.setdefault("queues", ["default"])
        offer.setdefault("light", 1 if offer.get("prefetch", 1) > 1 else offer.get("slots", 1))
        row = self.one("register_worker", name=name, host=host or f"host-{name}", **offer)
        return Worker(self, name, row)

    def workers(self, count: int, **offer: Any) -> list[Worker]:
        return [self.worker(f"w{n + 1}", **offer) for n in range(count)]

    @contextlib.contextmanager
    def connected(self, dsn: str) -> Iterator[Q]:
        """A second connection to the same database."""
        with psycopg.connect(dsn, autocommit=True, row_factory=psycopg.rows.dict_row) as other:
            yield Q(other, self.clock)


class Worker:
    """A live incarnation, and what it says."""

    def __init__(self, q: Q, name: str, registration: Row) -> None:
        self.q, self.name, self.registration = q, name, registration
        self.incarnation: int = registration["incarnation"]

    def claim(self, max_jobs: int = 10, **named: Any) -> list[Claim]:
        """Claim; where single jobs wait to be placed, a pass has just opened places for them.

        A worker's login may not ask whether any wait: its test runs a pass itself.
        """
        named.setdefault("request_id", uuid.uuid4())
        if named.get("lane") != "light" and self.q.single_waits():
            self.q.place()
        rows = self.q.call("claim", incarnation=self.incarnation, max_jobs=max_jobs, **named)
        return [Claim(self.q, row, self.incarnation) for row in rows]

    def take(self, **named: Any) -> Claim:
        """Claim, and expect exactly one job."""
        claims = self.claim(**{"max_jobs": 1, **named})
        assert len(claims) == 1, f"{self.name} got {[c.row for c in claims]}"
        return claims[0]

    def beat(self, *claims: Claim, beats: list[Row | None] | None = None, **more: Any) -> dict[int, str]:
        """Heartbeat; what to do, by job."""
        rows = self.q.call(
            "heartbeat",
            incarnation=self.incarnation,
            job_ids=[c.job_id for c in claims],
            tokens=[c.token for c in claims],
            beats=beats,
            **more,
        )
        return {row["job_id"]: row["action"] for row in rows}

    def retire(self, final: bool = True) -> None:
        self.q.call("retire_worker", incarnation=self.incarnation, final=final)

    def report_dead(self) -> int:
        return int(
            self.q.one(
                "report_dead",
                worker=self.name,
                incarnation=self.incarnation,
                evidence={"by": "test", "checked": "every process it started is gone"},
            )
        )

    @property
    def row(self) -> Row:
        return self.q.sql("select * from gangq.incarnations where id = %(id)s", id=self.incarnation)[0]

    @property
    def free(self) -> Row:
        return self.q.sql("select * from gangq.free_capacity(array[%(id)s::bigint])", id=self.incarnation)[0]


class Claim:
    """A claimed job and its token."""

    def __init__(self, q: Q, row: Row, incarnation: int | None = None) -> None:
        self.q, self.row, self.incarnation = q, row, incarnation
        self.job_id: int = row["job_id"]
        self.token: int = row["token"]

    def __getitem__(self, column: str) -> Any:
        return self.row[column]

    def __repr__(self) -> str:
        return f"Claim(job {self.job_id}, token {self.token})"

    def complete(self, result: Any = None, strict: bool = True) -> str:
        rows = self.q.call(
            "complete", job_ids=[self.job_id], tokens=[self.token], results=[result], strict=strict
        )
        assert [row["job_id"] for row in rows] == [self.job_id]
        return str(rows[0]["outcome"])

    def fail(self, message: str = "boom", **named: Any) -> str:
        return str(
            self.q.one("fail", job_id=self.job_id, token=self.token, error={"message": message}, **named)
        )

    def snooze(self, for_s: Any = 60) -> str:
        state: str = self.q.one("snooze", job_id=self.job_id, token=self.token, for_s=for_s)
        return state

    def requeue(self, message: str = "stalled", **named: Any) -> str:
        return str(
            self.q.one("requeue", job_id=self.job_id, token=self.token, error={"message": message}, **named)
        )

    def trip(self, code: int = 76, message: str = "stalled", type: str = "Stalled", **named: Any) -> str:
        """Trip as a watchdog of its worker does; with exit_in_s the whole worker goes."""
        named.setdefault("incarnation", self.incarnation)
        error = {"type": type, "message": message}
        return str(self.q.one("trip", job_id=self.job_id, token=self.token, code=code, error=error, **named))

    def suspect(self, kind: str = "stall", **evidence: Any) -> str:
        named = {"incarnation": self.incarnation, "class": kind, "evidence": evidence}
        return str(self.q.one("suspect", job_id=self.job_id, token=self.token, **named))

    def release(self) -> str:
        return str(self.q.one("release", job_ids=[self.job_id], tokens=[self.token])["outcome"])

    def ack(self) -> str:
        return str(self.q.one("ack_preempted", job_id=self.job_id, token=self.token))

    def save(self, step: int, data: bytes = b"state", **more: Any) -> None:
        self.q.call("save_checkpoint", job_id=self.job_id, token=self.token, step=step, data=data, **more)

    def load(self) -> tuple[int, bytes] | None:
        rows = self.q.call("load_checkpoint", job_id=self.job_id, token=self.token)
        return (rows[0]["step"], rows[0]["data"]) if rows else None

    def barrier(self) -> list[Row]:
        return self.q.call("barrier", job_id=self.job_id, token=self.token)

    @property
    def live(self) -> Row:
        return self.q.sql("select * from gangq.live_jobs where id = %(id)s", id=self.job_id)[0]


class Gang:
    """A submitted gang."""

    def __init__(self, q: Q, gang_id: int, job_ids: list[int], note: str | None) -> None:
        self.q, self.id, self.job_ids, self.note = q, gang_id, job_ids, note

    @property
    def row(self) -> Row:
        return self.q.sql("select * from gangq.gangs where id = %(id)s", id=self.id)[0]

    @property
    def state(self) -> str:
        return str(self.row["state"])

    @property
    def live(self) -> Row:
        return self.q.sql("select * from gangq.live_gangs where id = %(id)s", id=self.id)[0]

    @property
    def members(self) -> list[Row]:
        """Members as the view shows them, by rank."""
        return self.q.sql("select * from gangq.jobs where gang_id = %(id)s order by rank", id=self.id)

    @property
    def states(self) -> list[str]:
        return [row["state"] for row in self.members]

    @property
    def placed_on(self) -> list[str]:
        """The worker of each rank."""
        return [row["worker"] for row in self.members]

    def claimed_by(self, *workers: Worker) -> list[Claim]:
        """Let these workers claim; the gang's claims by rank."""
        claims = [c for w in workers for c in w.claim() if c["gang_id"] == self.id]
        return sorted(claims, key=lambda c: c["rank"])

    def start(self, *workers: Worker) -> list[Claim]:
        """Place it and let these workers claim it: it runs."""
        self.q.tick()
        assert self.state == "reserved", self.q.call("explain_gang", gang_id=self.id)
        claims = self.claimed_by(*workers)
        assert self.state == "running"
        return claims

    def restart(self, *workers: Worker) -> list[Claim]:
        """After a drain: let its backoff pass, place it again and let it run."""
        assert self.state == "blocked", self.state
        self.skip_backoff()
        return self.start(*workers)

    def skip_backoff(self) -> None:
        """Take the delay away instead of waiting for it, so that workers need no heartbeats meanwhile."""
        self.q.sql("update gangq.live_gangs set not_before = null where id = %(id)s", id=self.id)

    def cancel(self, reason: str | None = None) -> str:
        return str(self.q.one("cancel", gang_ids=[self.id], reason=reason)["state"])


def ack_all(claims: Iterable[Claim]) -> list[str]:
    return [claim.ack() for claim in claims]


def _json(value: Any, declared: str) -> Any:
    if declared == "jsonb":
        return None if value is None else Jsonb(value)
    if declared == "jsonb[]" and value is not None:
        return [None if element is None else Jsonb(element) for element in value]
    return value

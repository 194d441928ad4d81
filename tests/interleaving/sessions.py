"""Two sessions that meet: one holds its transaction open while the other calls; the test says who goes on.

Nothing here sleeps for luck. The second session runs in a thread; the test waits until PostgreSQL says that
it waits for a lock of the first, or until it has returned, and only then ends the first one's transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from sql.drive import place, tick, with_options, with_settings

Row = dict[str, Any]
Connection = psycopg.Connection[Row]
Verb = Callable[[Connection], Any]
DEADLINE_S = 15.0

# Settings of a session that plans as for a large table: row by row from the index, in the order of the arrays.
# Before PostgreSQL 18 such a plan looks dear enough to be compiled at every call, while the other waits for a lock.
ROW_BY_ROW = {"jit": "off", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off"}

# Both orders of a pair, and both ways the transaction of the first may end.
first_of_two = pytest.mark.parametrize("turn", [0, 1], ids=["first_a", "first_b"])
both_ends = pytest.mark.parametrize("end", ["commit", "rollback"])


def call(conn: psycopg.Connection[Any], verb: str, **arguments: Any) -> list[Row]:
    """Call one function of the schema with named arguments and return its rows; a plain value too.

    `Q` of sql/drive.py has one connection, and casts every argument to the type that the function declares. Here any
    of several sessions calls, and the server finds the types, as it does for other clients.
    """
    if verb in ("set_queue", "set_task", "configure"):
        arguments = with_settings(verb, arguments)
    elif verb in ("submit", "submit_gang", "submit_unique", "submit_unique_gang", "register_worker"):
        taken = conn.execute(
            "select proargnames[:pronargs] from pg_proc where oid = %s::regproc", [f"gangq.{verb}"]
        ).fetchone()
        arguments = with_options(arguments, next(iter(taken.values() if isinstance(taken, dict) else taken)))
    named = ", ".join(f"{name} => %({name})s" for name in arguments)
    adapted = {
        name: Jsonb(value) if isinstance(value, dict) or name == "devices" else value
        for name, value in arguments.items()
    }
    with conn.cursor(row_factory=dict_row) as cursor:
        cursor.execute(f"select * from gangq.{verb}({named})", adapted)
        return cursor.fetchall()


def value(conn: psycopg.Connection[Any], verb: str, **arguments: Any) -> Any:
    """Call a function that returns one plain value."""
    (row,) = call(conn, verb, **arguments)
    return row[verb]


def verb(name: str, /, **arguments: Any) -> Verb:
    """That call, to be made by whoever is given it."""
    return lambda conn: value(conn, name, **arguments)


class Later:
    """A call in a thread: what it returned or raised, whether it waited for a lock, and how long it took."""

    def __init__(self, conn: Connection, work: Callable[[Connection], Any]) -> None:
        self.value: Any = None
        self.error: psycopg.Error | None = None
        self.waited = False
        self.seconds = 0.0
        self._conn = conn
        self._work = work
        self._thread = threading.Thread(target=self._run, name="second session", daemon=True)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self.value = self._work(self._conn)
        except psycopg.Error as e:
            self.error = e
        finally:
            self.seconds = time.monotonic() - began

    def start(self, watcher: Connection) -> Later:
        """Start it, and return once it has come back or PostgreSQL shows it waiting for a lock."""
        pid = self._conn.info.backend_pid
        self._thread.start()
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if not self._thread.is_alive():
                return self
            blockers = watcher.execute(
                "select wait_event_type = 'Lock' and cardinality(pg_blocking_pids(pid)) > 0 as waits "
                "from pg_stat_activity where pid = %s",
                (pid,),
            ).fetchone()
            if blockers and blockers["waits"]:
                self.waited = True
                return self
            self._thread.join(0.005)
        raise AssertionError("the second session neither returned nor waited for a lock")

    def join(self) -> Later:
        """Wait for its end."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the second session never came back"
        return self

    @property
    def sqlstate(self) -> str | None:
        """SQLSTATE of the error it ended with; None: it succeeded."""
        return self.error.sqlstate if self.error else None

    def result(self) -> Any:
        """What it returned; raises what it raised."""
        if self.error:
            raise self.error
        return self.value


class Meeting:
    """What came of a pair: `first` is what the one in the open transaction returned, `later` is the other."""

    def __init__(self, first: Any, later: Later) -> None:
        self.first = first
        self.later = later


class Arena:
    """A database with workers and work in it, sessions to call from, and questions about what came of it."""

    def __init__(self, dsn: str, db: Connection, clock: Any) -> None:
        self.dsn = dsn
        self.db = db
        self.clock = clock
        self._open: list[Connection] = []

    def connect(self, *, autocommit: bool = True, **options: str) -> Connection:
        """Another session; `options` are settings of it."""
        settings = " ".join(f"-c {name}={text}" for name, text in options.items())
        conn = psycopg.connect(self.dsn, autocommit=autocommit, row_factory=dict_row, options=settings)
        self._open.append(conn)
        return conn

    def close(self) -> None:
        """Close every session."""
        for conn in self._open:
            conn.close()

    def meet(
        self, first: Callable[[Connection], Any], second: Callable[[Connection], Any], end: str = "commit"
    ) -> Meeting:
        """Call `first` and leave its transaction open; call `second`; then end the first.

        Neither may ever see a deadlock, and no invariant may be broken afterwards.
        """
        holder = self.connect(autocommit=False)
        returned = first(holder)
        later = Later(self.connect(), second).start(self.db)
        if end == "commit":
            holder.commit()
        else:
            holder.rollback()
        later.join()
        assert later.sqlstate != "40P01", f"deadlock: {later.error}"
        assert self.violations() == []
        return Meeting(returned, later)

    # What the tests set up ----------------------------------------------------------------------------------

    def worker(self, name: str, **offers: Any) -> int:
        """Register a worker; returns its incarnation."""
        offers.setdefault("host", name)
        offers.setdefault("light", 1 if offers.get("prefetch", 1) > 1 else offers.get("slots", 1))
        offers.setdefault("queues", ["default"])
        (row,) = call(self.db, "register_worker", name=name, **offers)
        incarnation: int = row["incarnation"]
        return incarnation

    def job(self, **arguments: Any) -> int:
        """Submit a solo job."""
        arguments.setdefault("task", "t")
        (row,) = call(self.db, "submit", **arguments)
        job_id: int = row["submit"]
        return job_id

    def gang(self, size: int, **arguments: Any) -> tuple[int, list[int]]:
        """Submit a gang; returns its id and its members' ids by rank."""
        arguments.setdefault("task", "t")
        (row,) = call(self.db, "submit_gang", size=size, **arguments)
        return row["gang_id"], row["job_ids"]

    def claim(self, incarnation: int, **arguments: Any) -> list[Row]:
        """Claim for a worker; where single jobs wait to be placed, after a pass."""
        if value(self.db, "single_waits"):
            self.place()
        return call(self.db, "claim", incarnation=incarnation, **arguments)

    def place(self) -> Row:
        """One pass."""
        return place(self.db)

    def running(self, incarnation: int, **arguments: Any) -> tuple[int, int]:
        """A solo job that this worker runs: its id and token."""
        job_id = self.job(**arguments)
        (row,) = self.claim(incarnation)
        assert row["job_id"] == job_id
        return job_id, row["token"]

    def running_gang(self, incarnations: list[int], **arguments: Any) -> tuple[int, list[int], list[int]]:
        """A gang with one member on each of these workers, past its barrier: id, members, their tokens."""
        gang_id, members = self.gang(len(incarnations), **arguments)
        assert value(self.db, "reserve_gang", gang_id=gang_id, incarnations=incarnations)
        tokens = {
            row["job_id"]: row["token"]
            for i in dict.fromkeys(incarnations)
            for row in self.claim(i, max_jobs=len(incarnations))
        }
        return gang_id, members, [tokens[m] for m in members]

    # What they ask ------------------------------------------------------------------------------------------

    def violations(self) -> list[Row]:
        """Broken invariants, and steps of a tick that failed."""
        return self.db.execute(
            "select rule, subject, detail from gangq.violations union all "
            "select kind, data ->> 'step', reason from gangq.events where kind = 'tick_error'"
        ).fetchall()

    def state(self, job_id: int) -> str:
        """State of a job, live or ended."""
        row = self.db.execute("select state from gangq.jobs where id = %s", (job_id,)).fetchone()
        assert row is not None
        return str(row["state"])

    def row(self, job_id: int) -> Row:
        """The whole row of a job in the view."""
        row = self.db.execute("select * from gangq.jobs where id = %s", (job_id,)).fetchone()
        assert row is not None
        return row

    def gang_row(self, gang_id: int) -> Row:
        """The whole row of a gang in the view."""
        row = self.db.execute("select * from gangq.gangs where id = %s", (gang_id,)).fetchone()
        assert row is not None
        return row

    def tick(self) -> Row:
        """All maintenance, whenever the last one was."""
        return tick(self.db)


@contextmanager
def arena(dsn: str, db: Connection, clock: Any) -> Iterator[Arena]:
    """An arena whose sessions are closed afterwards."""
    made = Arena(dsn, db, clock)
    try:
        yield made
    finally:
        made.close()


def meet(arena: Arena, a: Verb, b: Verb, turn: int, end: str) -> tuple[Meeting, Any, Any]:
    """Let them meet; the meeting, and what `a` and `b` returned (or the error of the second)."""
    met = arena.meet(a, b, end) if turn == 0 else arena.meet(b, a, end)
    second = met.later.error or met.later.value
    return (met, met.first, second) if turn == 0 else (met, second, met.first)


def placed(conn: Connection) -> int:
    """Jobs on workers, and places that wait for one."""
    row = conn.execute(
        "select (select count(*) from gangq.live_jobs where incarnation is not null) "
        "+ (select count(*) from gangq.places where job_id is null) as n"
    ).fetchone()
    assert row is not None
    return int(row["n"])


def claim_all(meeting: Arena, incarnations: list[int], jobs: set[int]) -> int:
    """Have these workers place, claim and complete all the jobs at once; returns how many were ever seen placed."""
    done: set[int] = set()
    seen: list[int] = []
    faults: list[str] = []
    together = threading.Barrier(len(incarnations))

    def work(incarnation: int) -> None:
        conn = meeting.connect()
        try:
            together.wait(10)
            while len(done) < len(jobs):
                place(conn)
                rows = call(conn, "claim", incarnation=incarnation, max_jobs=2)
                seen.append(placed(conn))
                if rows:
                    ids = [row["job_id"] for row in rows]
                    call(conn, "complete", job_ids=ids, tokens=[row["token"] for row in rows])
                    done.update(ids)
        except psycopg.Error as e:
            faults.append(repr(e))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in incarnations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert done == jobs
    return max(seen)

"""The databases of the tests: a copy of the template for one test, or one that many tests use in turn.

Most of what an SQL test costs is a new backend: it compiles and plans each function of the schema again, 100 of
160 ms. So most SQL tests get a *kept* database, whose backends outlive the connections to them (`Backends`). There is
one with a test's clock and one without. After each test `Kept.put_back` puts the template's rows back. A change that
it cannot put back it notices: then the database is dropped, and the next test gets a new one.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.pq.abc import PGconn
from psycopg.rows import dict_row

from gangq.embedded import Server

Connection = psycopg.Connection[dict[str, Any]]
OwnServer = Callable[..., AbstractContextManager[Server]]
"""What the fixture `own_server` is."""

TESTS_IN_A_DATABASE = 100
"""So many dead rows do not slow it down yet."""
_OTHERS_LEAVE_WITHIN_S = 0.2
_LOCKS_ARE_FREE_WITHIN_S = 20
"""A test that ran out of its time may have left a transaction open: whoever puts the rows back must not hang."""

_numbers = itertools.count(1)


def connect(dsn: str) -> Connection:
    """An autocommit connection whose rows are dicts."""
    return psycopg.connect(dsn, autocommit=True, row_factory=dict_row)


class Clock:
    """The database's clock, standing still until it is moved."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    @classmethod
    def install(cls, conn: Connection) -> Clock:
        """Replace gangq.now(), as the schema's owner, by a clock that the test moves."""
        with conn.transaction():
            # Outside of schema gangq, so that a test may migrate again; readable by every role.
            conn.execute("create table public.test_clock (at timestamptz not null)")
            conn.execute("insert into public.test_clock values (clock_timestamp())")
            conn.execute("grant select on public.test_clock to public")
            conn.execute(
                "create or replace function gangq.now() returns timestamptz language sql volatile "
                "return (select at from public.test_clock)"
            )
        return cls(conn)

    def now(self) -> datetime:
        """The time that gangq.now() returns."""
        row = self._conn.execute("select at from public.test_clock").fetchone()
        assert row is not None
        at: datetime = row["at"]
        return at

    def advance(self, seconds: float) -> datetime:
        """Move it forward, or back for negative seconds; return the new time."""
        return self.set(self.now() + timedelta(seconds=seconds))

    def set(self, at: datetime) -> datetime:
        """Move it to `at`."""
        self._conn.execute("update public.test_clock set at = %s", (at,))
        return at

    def set_to_now(self) -> None:
        """Move it to the true time."""
        self._conn.execute("update public.test_clock set at = clock_timestamp()")


class Databases:
    """Makes and drops the databases of one server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._open = ExitStack()
        # One connection for each would cost a fifth of making a database.
        self._maker = self._open.enter_context(psycopg.connect(server.dsn("postgres"), autocommit=True))
        self._strategy = "strategy file_copy" if server.binaries.major >= 15 else ""
        self._kept: dict[bool, Kept] = {}

    def make(self, template: str) -> str:
        """Make a copy of `template`; return its name."""
        name = f"test_{next(_numbers)}"
        self._maker.execute(f"create database {name} template {template} {self._strategy}".encode())
        return name

    def drop(self, name: str) -> None:
        self._maker.execute(f"drop database if exists {name} with (force)".encode())

    @contextmanager
    def own(self, template: str) -> Iterator[str]:
        """The DSN of a copy of `template`, dropped afterwards."""
        name = self.make(template)
        yield self._server.dsn(name)
        self.drop(name)

    @contextmanager
    def kept(self, template: str, clock: bool = True) -> Iterator[Kept]:
        """The kept copy of `template` with or without a test's clock, dropped afterwards if it cannot be put back."""
        if clock not in self._kept:
            name = self.make(template)
            self._kept[clock] = Kept(name, self._server.dsn(name), clock)
        with self._kept[clock].backends.lent():
            yield self._kept[clock]
        if self._kept[clock].put_back() is not None:
            self._drop_kept(clock)

    def _drop_kept(self, clock: bool) -> None:
        kept = self._kept.pop(clock)
        kept.close()
        self.drop(kept.name)

    def close(self) -> None:
        for clock in list(self._kept):
            self._drop_kept(clock)
        self._open.close()


_BEGUN_WITH = "_begun_with"


def check_psycopg(conn: psycopg.Connection[Any]) -> None:
    """Refuse a psycopg without the private names that `Backends` needs."""
    missing = [name for name in ("_connect_gen", "_closed") if not hasattr(conn, name)]
    if missing:
        raise pytest.UsageError(
            f"psycopg {psycopg.__version__} has no Connection.{missing[0]}, by which tests keep their backends: "
            "adapt Backends in tests/databases.py, or install psycopg 3.2 or 3.3"
        )


class Backends:
    """The superuser's backends of one database. While they are lent, psycopg's `connect` takes a free one that was
    begun with the same parameters; `close` rolls back, resets all of the session but its plans, and gives it back.

    Tests and library connect in hundreds of places, so psycopg itself is patched, in two private names that 3.2 and
    3.3 have. `_connect_gen` is where `connect` opens the socket: its options are read before and applied after.
    `_closed` says that `close` was called: without it a connection whose backend went back would count as broken.
    """

    MOST = 4
    """So many are kept; a plan takes memory."""

    def __init__(self, name: str, user: str) -> None:
        self._whose = {"dbname": name, "user": user}
        self._free: defaultdict[str, list[PGconn]] = defaultdict(list)
        self._lock = threading.Lock()
        self._process = os.getpid()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Until the end of the block. Connections of asyncio are their own."""
        begin, end = psycopg.Connection._connect_gen, psycopg.Connection.close

        def begin_or_take(
            cls: type[psycopg.Connection[Any]], conninfo: str = "", **more: Any
        ) -> Generator[Any, Any, psycopg.Connection[Any]]:
            if not self._are_of(conninfo):
                return (yield from begin.__func__(cls, conninfo, **more))  # type: ignore[attr-defined]
            kept = self._take(conninfo)
            if kept is None:
                made = yield from begin.__func__(cls, conninfo, **more)  # type: ignore[attr-defined]
            else:
                made = cls(kept)
            setattr(made, _BEGUN_WITH, conninfo)
            return made

        def give_back(conn: psycopg.Connection[Any]) -> None:
            conninfo, pgconn = getattr(conn, _BEGUN_WITH, None), conn.pgconn
            if conninfo is None or conn.closed or not self._are_of(conninfo) or not _reset(pgconn):
                end(conn)
                return
            conn._closed, conn.pgconn = True, _finished()
            with self._lock:
                free = self._free[conninfo]
                free.append(pgconn)
                if len(free) > self.MOST:
                    free.pop().finish()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(psycopg.Connection, "_connect_gen", classmethod(begin_or_take))
            patch.setattr(psycopg.Connection, "close", give_back)
            yield

    def _are_of(self, conninfo: str) -> bool:
        """False in a forked child: the kept sockets belong to its parent, and using them would garble both."""
        return os.getpid() == self._process and self._whose.items() <= conninfo_to_dict(conninfo).items()

    def _take(self, conninfo: str) -> PGconn | None:
        with self._lock:
            while self._free[conninfo]:
                pgconn = self._free[conninfo].pop()
                if pgconn.exec_(b"").status == ExecStatus.EMPTY_QUERY:
                    while pgconn.notifies():
                        pass
                    return pgconn
                pgconn.finish()  # Somebody has terminated it.
        return None

    def pids(self) -> list[int]:
        """Those that nobody has."""
        return [pgconn.backend_pid for free in self._free.values() for pgconn in free]

    def close(self) -> None:
        """End those that nobody has."""
        for free in self._free.values():
            while free:
                free.pop().finish()


_RESET = (
    "reset session authorization; reset all; reset role; close all; deallocate all; unlisten *; "
    "discard temp; discard sequences; select pg_advisory_unlock_all()"
)


def _reset(pgconn: PGconn) -> bool:
    """Undo what a session may have set; False where that cannot be done."""
    if pgconn.pipeline_status != PipelineStatus.OFF:
        return False
    if pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
        pgconn.exec_(b"rollback")
    return (
        pgconn.transaction_status == TransactionStatus.IDLE
        and pgconn.exec_(_RESET.encode()).status == ExecStatus.TUPLES_OK
    )


def _finished() -> PGconn:
    """What a closed connection has."""
    made = psycopg.pq.PGconn.connect_start(b"host=/nowhere")
    made.finish()
    return made


class Kept:
    """A copy of the template that many tests use in turn, with a test's clock or without."""

    def __init__(self, name: str, dsn: str, clock: bool) -> None:
        self.name = name
        self.dsn = dsn
        self._tests = 0
        # Of its own: setting session_replication_role throws all plans of a session away.
        self._keeper = connect(dsn)
        check_psycopg(self._keeper)
        self._keeper.execute(f"set lock_timeout = '{_LOCKS_ARE_FREE_WITHIN_S}s'")
        self.backends = Backends(name, self._keeper.info.user)
        if clock:
            Clock.install(self._keeper)
        _install(self._keeper)

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The rows of a query that is asked after every test. It is planned once: that is most of what it costs."""
        return self._keeper.execute(query.encode(), prepare=True).fetchall()

    def restore(self) -> None:
        """Put the template's rows and sequences back."""
        self._keeper.execute("select kept.restore()")

    def put_back(self) -> str | None:
        """Make this database as it was; or say why that cannot be done, or is not worth it."""
        self._tests += 1
        if self._tests >= TESTS_IN_A_DATABASE:
            return "many tests have used it"
        try:
            reason = self._differs()
        except psycopg.OperationalError:
            return "a test has cut its connections"
        deadline = time.monotonic() + _OTHERS_LEAVE_WITHIN_S
        # A backend needs a moment to see that its connection is closed.
        while reason == "others are connected" and time.monotonic() < deadline:
            time.sleep(0.005)
            reason = self._differs()
        if reason is None:
            self.restore()
        return reason

    def _differs(self) -> str | None:
        row = self._keeper.execute("select kept.differs(%s) as reason", [self.backends.pids()]).fetchone()
        assert row is not None
        reason: str | None = row["reason"]
        return reason

    def close(self) -> None:
        """Close its connections."""
        self.backends.close()
        self._keeper.close()


_TABLES = """
select c.oid, c.relname as name,
  (select string_agg(quote_ident(a.attname), ', ') from pg_attribute a
   where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = '') as columns
from pg_class c
where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'r'
order by c.relname
"""

_SEQUENCES = """
select format('gangq.%I', c.relname) as name from pg_class c
where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'S'
order by c.relname
"""

# What statistics the planner has: who measures plans has run vacuum or analyze, or autovacuum has.
_STATISTICS = """
select md5(string_agg(c.oid || ' ' || c.relpages || ' ' || c.reltuples, ' ' order by c.oid))
from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind in ('r', 'i')
"""

_INSTALL = """
create table kept.ddl (tag text);
create table kept.statistics as {statistics};
create function kept.note_ddl() returns event_trigger language plpgsql security definer
set search_path = pg_catalog as $f$
begin
  if tg_event = 'sql_drop' or exists (select from pg_event_trigger_ddl_commands()) then
    insert into kept.ddl values (tg_tag);
  end if;
end $f$;
create function kept.restore() returns void language plpgsql as $f$
begin
  {steps}
end $f$;
-- Why the rows alone are not enough.
create function kept.differs(kept integer[]) returns text language plpgsql as $f$
begin
  if exists (select from kept.ddl) then
    return 'a test has changed the schema';
  elsif exists (
    select from pg_stat_activity a
    where a.datname = current_database() and a.backend_type = 'client backend'
      and a.pid <> pg_backend_pid() and a.pid <> all (differs.kept)) then
    return 'others are connected';
  elsif exists (select from pg_prepared_xacts x where x.database = current_database()) then
    return 'a transaction is prepared';
  elsif exists (
    select from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase
    where d.datname = current_database()) then
    return 'the database has settings';
  elsif ({statistics}) <> (select md5 from kept.statistics) then
    return 'the planner has other statistics';
  end if;
  return null;
end $f$;
create event trigger note_ddl on ddl_command_end execute function kept.note_ddl();
create event trigger note_drop on sql_drop execute function kept.note_ddl();
set session_replication_role = replica;
"""


def _install(keeper: Connection) -> None:
    """Remember the rows and sequences of schema gangq, and from now on whether anything changes the schema."""
    steps = []
    keeper.execute("create schema kept")
    for table in keeper.execute(_TABLES).fetchall():
        name, columns = table["name"], table["columns"]
        steps.append(f"delete from gangq.{name};")
        if keeper.execute(f"select from gangq.{name}".encode()).fetchall():
            keeper.execute(f"create table kept.{name} as table gangq.{name}".encode())
            steps.append(
                f"insert into gangq.{name} ({columns}) overriding system value select {columns} from kept.{name};"
            )
    for sequence in keeper.execute(_SEQUENCES).fetchall():
        last = keeper.execute(f"select last_value, is_called from {sequence['name']}".encode()).fetchone()
        assert last is not None
        steps.append(f"perform setval('{sequence['name']}', {last['last_value']}, {last['is_called']});")
    keeper.execute(_INSTALL.format(statistics=_STATISTICS, steps="\n  ".join(steps)).encode())

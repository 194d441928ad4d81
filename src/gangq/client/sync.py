"""The client: one method per SQL function and view."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.abc import PQGen

from gangq.client import calls, core
from gangq.client.calls import Query, Steps
from gangq.client.line import Line
from gangq.client.sent import Sent, Statements
from gangq.errors import DatabaseUnreachable, GangqError

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

P = ParamSpec("P")
R = TypeVar("R")

_KEPT = 16  # cursors at most: each keeps its last answer


class _Pooled(psycopg.Connection[Any]):
    """A connection that knows when it was made or last used: time.time()."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used_at = time.time()
        self.deadline: core.Deadline | None = None
        self.statements: Statements | None = None
        core.number_statements_apart(self)
        self.add_notice_handler(core.log_warnings())
        self._kept: dict[str, tuple[bytes, psycopg.Cursor[Any]]] = {}

    def wait(self, gen: PQGen[R], *args: Any, **more: Any) -> R:
        """As psycopg's, for no longer than the deadline; then the connection is closed."""
        if self.deadline is None:
            return super().wait(gen, *args, **more)
        try:
            return super().wait(self.deadline.limit(gen), *args, **more)
        except core.NoAnswer:
            self.pgconn.finish()
            raise

    def stop_preparing(self) -> None:
        """Use no prepared statement from here on."""
        self.prepare_threshold = None
        self.statements = None

    def run_again(self, query: Query[R]) -> R:
        """As `_run`, with the cursor that was used for this statement before. Only for who has the connection alone.

        A new cursor finds out anew how each parameter is sent and each column is read, which is half of what a
        submission costs its client. psycopg knows a statement again by its very bytes.
        """
        known = self._kept.get(query.text)
        if known is None:
            if len(self._kept) == _KEPT:
                self._kept.clear()
            known = self._kept[query.text] = query.text.encode(), self.cursor(row_factory=query.factory)
        text, cursor = known
        return query.read(cursor.execute(text, query.params).fetchall())

    def close(self) -> None:
        self._kept.clear()
        super().close()


def run(conn: psycopg.Connection[Any], query: Query[R]) -> R:
    """Send one query over a connection."""
    with conn.cursor(row_factory=query.factory) as cursor:
        # Text from modules of this package only; values travel as parameters.
        return query.read(cursor.execute(query.text.encode(), query.params).fetchall())


def in_steps(
    send: Callable[[Query[Any]], Any],
    steps: Steps[R],
    answer: Any = None,
    pause: Callable[[float], object] = time.sleep,
) -> R:
    """Send one query after the other, each made from the answers to those before. `answer`: to the last it asked."""
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            result: R = end.value
            return result
        answer = pause(step) if isinstance(step, float) else send(step)


def _verb(build: Callable[P, Query[R]]) -> Callable[Concatenate[Client, P], R]:
    @functools.wraps(build)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.execute(build(*args, **kwargs))

    method.__signature__ = core.same_parameters(build)  # type: ignore[attr-defined]
    return method


class Client:
    """Calls gangq's SQL functions on a pool of autocommit connections, or on one. Safe to share between threads.

    - `dsn`: a URI or `key=value` string; `parameters` are libpq's (host=..., sslmode=...) and win over it.
      What neither says comes from libpq's environment (PGHOST, ...).
    - `min_size`, `max_size`: connections kept, and at most. With `max_size=1` there is no pool, and no threads
      of one: calls take turns on the one connection (but a call amid another of its own thread, as a signal's
      handler makes it, has one for itself).
    - `max_idle_s`: connections above `min_size` that nobody used for so long are closed.
    - `timeout_s`: how long a call may take, from its beginning to its answer; then `DatabaseUnreachable`, the
      connection is closed, and whether the call took effect is unknown. Of that at most `connect_s` are spent on
      waiting for a connection, and at most 3 s more on finding out why there was none. Verbs with `connection` take
      as long as that connection allows. A submission whose connection breaks before the answer is sent again, once
      and before its time is up; its `request_id` keeps it from being carried out twice.
    - `prepare`: use prepared statements; None: unless GANGQ_PREPARE=off. Where they turn out not to last (PgBouncer
      in transaction mode before 1.21) the client goes on without them by itself.

    Connects at the first call and reconnects by itself. Methods are named as the SQL functions, take their
    arguments by keyword, and return frozen rows (`gangq.client.rows`). Every error is a `GangqError`:
    `DatabaseUnreachable` when there is no connection, and it names the database but never a password.
    Verbs that take `connection` run inside that connection's transaction and never end it.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        min_size: int = 1,
        max_size: int = 4,
        timeout_s: float = 60.0,
        connect_s: float = 10.0,
        max_idle_s: float = 10.0,
        prepare: bool | None = None,
        **parameters: Any,
    ) -> None:
        self.target = core.target(dsn, parameters, prepare)
        self.timeout_s = timeout_s
        self._connect_s = min(connect_s, timeout_s)
        self._prepare = self.target.prepare
        self._sizes = (min(min_size, max_size), max_size)
        self._max_idle_s = max_idle_s
        self._lock = threading.Lock()
        self._pool: ConnectionPool[_Pooled] | Line[_Pooled] | None = None
        self._pid = os.getpid()
        self.lines = core.Lines()
        """Where answers are waited for, of the verbs without `connection`. Nothing hangs up by itself."""

    def __repr__(self) -> str:
        return f"<Client of {self.target}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def connect_listener(self) -> psycopg.Connection[Any]:
        """Return a new connection of its own, autocommit, for LISTEN; the caller closes it."""
        return self._connect(self.target.conninfo)

    @contextlib.contextmanager
    def connection(self, where: str = "") -> Iterator[psycopg.Connection[Any]]:
        """Lend an autocommit connection of the pool. psycopg's errors inside become `GangqError`s."""
        pool, conn = self._lend()
        try:
            yield conn
        except psycopg.Error as e:
            raise self.target.failed(e, where) from e
        finally:
            self._take_back(pool, conn)

    def _lend(self, first: bool = False) -> tuple[ConnectionPool[_Pooled] | Line[_Pooled], _Pooled]:
        pool = self._open()
        try:
            lent = pool.getconn(first=True) if first and isinstance(pool, Line) else pool.getconn()
        except psycopg.OperationalError:  # What both raise when there is none in time, or they were closed.
            raise self._no_connection() from None
        if not self._prepare and lent.prepare_threshold is not None:
            lent.stop_preparing()
        return pool, lent

    @staticmethod
    def _take_back(pool: ConnectionPool[_Pooled] | Line[_Pooled], conn: _Pooled) -> None:
        conn.deadline = None
        if conn.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE and not conn.closed:
            with contextlib.suppress(psycopg.Error):
                conn.rollback()
        conn.used_at = time.time()
        pool.putconn(conn)

    def _check(self, conn: _Pooled) -> None:
        if conn.used_at < self.lines.hung_up_at:
            conn.close()
            raise psycopg.OperationalError("connections of its age have fallen silent")
        if core.doubtful(conn, conn.used_at):
            conn.deadline = core.Deadline(self._connect_s)
            try:
                with self.lines.expecting(conn):
                    core.ask(conn)
            finally:
                conn.deadline = None

    def execute(self, query: Query[R]) -> R:
        """Run one description of `gangq.client.calls`; the methods below do just this."""
        if query.steps is not None:
            return in_steps(self.execute, query.steps())
        if query.connection is None:
            deadline = core.Deadline(self.timeout_s)
            try:
                return self._run_once(query, deadline)
            except psycopg.Error as e:
                if query.repeatable and core.answer_lost(e) and not deadline.is_over:
                    return self._again(query, deadline, e)
                if not self._unprepared(e):
                    raise self.target.failed(e, query.name) from e
            try:
                return self._run_once(query, deadline)
            except psycopg.Error as e:
                raise self.target.failed(e, query.name) from e
        conn = core.unwrap(query.connection, psycopg.Connection)
        try:
            return run(conn, query)
        except psycopg.Error as e:
            raise self.target.failed(e, query.name) from e

    def _run_once(self, query: Query[R], deadline: core.Deadline) -> R:
        pool, lent = self._lend(query.first)
        lent.deadline = deadline
        try:
            with self.lines.expecting(lent):
                return lent.run_again(query) if query.often else run(lent, query)
        except core.NoAnswer:
            self.lines.hung_up_at = time.time()
            raise
        finally:
            self._take_back(pool, lent)

    def _again(self, query: Query[R], deadline: core.Deadline, lost: psycopg.Error) -> R:
        """Send a call again whose answer was lost."""
        self.lines.hung_up_at = time.time()  # What breaks one connection breaks those that are idle.
        try:
            return self._run_once(query, deadline)
        except (psycopg.Error, GangqError) as e:
            # Nor does a refusal say what came of the first call: it may still be under way.
            raise self.target.failed(lost, query.name) from e

    def _unprepared(self, error: psycopg.Error) -> bool:
        """Whether the call may be repeated because only its prepared statement was refused; none is used again."""
        if error.sqlstate not in core.PREPARED_STATEMENT_TROUBLE or not self.target.prepare:
            return False
        if self._prepare:
            self._prepare = False
            core.log_unprepared(self.target)
        return True

    def _send(self, query: Query[R]) -> Sent[R]:
        # For gangq.client.sent.send(), which says what it does: tasks that overlap are what AsyncClient has instead.
        pool, lent = self._lend(query.first)
        try:
            self.lines.expect(lent)
            try:
                self._statements(lent).send(query)
            except BaseException:
                self.lines.answered(lent)
                raise
        except BaseException as e:
            self._take_back(pool, lent)
            if isinstance(e, psycopg.Error):
                self._unprepared(e)
                raise self.target.failed(e, query.name) from e
            raise

        def give_back() -> None:
            self.lines.answered(lent)
            self._take_back(pool, lent)

        def failure(problem: psycopg.Error) -> GangqError:
            self._unprepared(problem)
            return self.target.failed(problem, query.name)

        sent = Sent(
            query,
            self._statements(lent),
            give_back,
            failure,
            pool.reading if isinstance(pool, Line) else contextlib.nullcontext,
        )
        if isinstance(pool, Line) and not pool.leave(sent.receive):
            sent.receive()
        return sent

    def _statements(self, conn: _Pooled) -> Statements:
        if conn.statements is None:
            conn.statements = Statements(conn, self._prepare)
        return conn.statements

    def _open(self) -> ConnectionPool[_Pooled] | Line[_Pooled]:
        with self._lock:
            if self._pid != os.getpid():
                # Forked: the pool's threads live in the parent only, and its sockets are the parent's.
                self._pool, self._pid = None, os.getpid()
            if self._pool is None and self._sizes[1] == 1:
                self._pool = Line(self._connect_line, self._check, self._connect_s)
            if self._pool is None:
                from psycopg_pool import ConnectionPool

                # The pool would try in the background until the timeout and then not say why.
                limit_s = core.connect_limit_s(self.target, self._connect_s)
                self._connect(self.target.conninfo, connect_timeout=limit_s).close()
                self._pool = ConnectionPool(
                    self.target.conninfo,
                    connection_class=_Pooled,
                    kwargs=self.target.kwargs,
                    min_size=self._sizes[0],
                    max_size=self._sizes[1],
                    max_idle=self._max_idle_s,
                    timeout=self._connect_s,
                    # Given up soon, because its delay doubles: the next call then starts a new attempt at
                    # once, and a long outage is not followed by a long wait.
                    reconnect_timeout=self._connect_s,
                    check=self._check,
                    num_workers=2,
                    name="gangq-client",
                    open=True,
                )
            return self._pool

    def _connect_line(self) -> _Pooled:
        # Meanwhile others wait for it: no longer than a call may wait.
        limit_s = core.connect_limit_s(self.target, self._connect_s)
        try:
            return _Pooled.connect(self.target.conninfo, **self.target.kwargs, connect_timeout=limit_s)
        except psycopg.Error as e:
            raise self.target.unreachable(e) from e

    def _connect(self, conninfo: str, **more: Any) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(conninfo, **self.target.kwargs, **more)
        except psycopg.Error as e:
            raise self.target.unreachable(e) from e

    def _no_connection(self) -> GangqError:
        """Why the pool had none: ask the server itself, since the pool does not tell."""
        try:
            self._connect(self.target.conninfo, connect_timeout=3).close()
        except GangqError as e:
            return e
        return DatabaseUnreachable(core.exhausted(self.target, self._sizes[1], self._connect_s))

    submit = _verb(calls.submit)
    submit_gang = _verb(calls.submit_gang)
    submit_child = _verb(calls.submit_child)
    submit_child_gang = _verb(calls.submit_child_gang)
    cancel = _verb(calls.cancel)
    retry = _verb(calls.retry)
    set_priority = _verb(calls.set_priority)
    set_queue = _verb(calls.set_queue)
    configure = _verb(calls.configure)
    set_task = _verb(calls.set_task)
    register_worker = _verb(calls.register_worker)
    heartbeat = _verb(calls.heartbeat)
    claim = _verb(calls.claim)
    barrier = _verb(calls.barrier)
    complete = _verb(calls.complete)
    complete_and_claim = _verb(calls.complete_and_claim)
    fail = _verb(calls.fail)
    requeue = _verb(calls.requeue)
    release = _verb(calls.release)
    ack_preempted = _verb(calls.ack_preempted)
    save_checkpoint = _verb(calls.save_checkpoint)
    load_checkpoint = _verb(calls.load_checkpoint)
    append_log = _verb(calls.append_log)
    retire_worker = _verb(calls.retire_worker)
    watch_terms = _verb(calls.watch_terms)
    learn_gap = _verb(calls.learn_gap)
    trip = _verb(calls.trip)
    suspect = _verb(calls.suspect)
    predecessor = _verb(calls.predecessor)
    report_dead = _verb(calls.report_dead)
    unproven = _verb(calls.unproven)
    report_stuck = _verb(calls.report_stuck)
    bounce = _verb(calls.bounce)
    bounced = _verb(calls.bounced)
    quarantine = _verb(calls.quarantine)
    unquarantine = _verb(calls.unquarantine)
    cordon = _verb(calls.cordon)
    uncordon = _verb(calls.uncordon)
    set_taints = _verb(calls.set_taints)
    board = _verb(calls.board)
    apply = _verb(calls.apply)
    reserve_gang = _verb(calls.reserve_gang)
    reserve_members = _verb(calls.reserve_members)
    rollback_gang = _verb(calls.rollback_gang)
    preempt_gang = _verb(calls.preempt_gang)
    displace_job = _verb(calls.displace_job)
    shrink_gang = _verb(calls.shrink_gang)
    complete_drain = _verb(calls.complete_drain)
    reap_expired = _verb(calls.reap_expired)
    flag_dead_workers = _verb(calls.flag_dead_workers)
    promote_due = _verb(calls.promote_due)
    time_out = _verb(calls.time_out)
    tick = _verb(calls.tick)
    explain_gang = _verb(calls.explain_gang)
    explain_job = _verb(calls.explain_job)
    explain_now = _verb(calls.explain_now)
    plan = _verb(calls.plan)
    replay = _verb(calls.replay)
    schema_version = _verb(calls.schema_version)
    jobs = _verb(calls.jobs)
    gangs = _verb(calls.gangs)
    job = _verb(calls.job)
    gang = _verb(calls.gang)
    job_states = _verb(calls.job_states)
    gang_states = _verb(calls.gang_states)
    workers = _verb(calls.workers)
    devices = _verb(calls.devices)
    waiting = _verb(calls.waiting)
    timeline = _verb(calls.timeline)
    drains = _verb(calls.drains)
    capacity = _verb(calls.capacity)
    violations = _verb(calls.violations)
    events = _verb(calls.events)
    trips = _verb(calls.trips)
    flagged = _verb(calls.flagged)
    cordoned = _verb(calls.cordoned)
    evidence = _verb(calls.evidence)
    logs = _verb(calls.logs)
    queues = _verb(calls.queues)
    tasks = _verb(calls.tasks)
    retention = _verb(calls.retention)

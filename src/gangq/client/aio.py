"""The async client: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from gangq.client import calls, core
from gangq.client.calls import Query, Steps
from gangq.errors import DatabaseUnreachable, GangqError

P = ParamSpec("P")
R = TypeVar("R")


class _Pooled(psycopg.AsyncConnection[Any]):
    """A connection that knows when it was made or last used: time.time()."""

    deadline: core.Deadline | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used_at = time.time()
        core.number_statements_apart(self)
        self.add_notice_handler(core.log_warnings())

    async def wait(self, gen: PQGen[R], *args: Any, **more: Any) -> R:
        """As psycopg's, for no longer than the deadline; then the connection is closed."""
        if self.deadline is None:
            return await super().wait(gen, *args, **more)
        try:
            return await super().wait(self.deadline.limit(gen), *args, **more)
        except core.NoAnswer:
            self.pgconn.finish()
            raise


def _verb(build: Callable[P, Query[R]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    @functools.wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.execute(build(*args, **kwargs))

    method.__signature__ = core.same_parameters(build)  # type: ignore[attr-defined]
    return method


class AsyncClient:
    """`Client` for asyncio: the same constructor, the same methods, awaited. Close it before its event loop
    ends.

    Verbs that take `connection` want an async one: psycopg's AsyncConnection or AsyncCursor, SQLAlchemy's
    AsyncConnection or AsyncSession.
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
        self._silent_at = 0.0
        self._sizes = (min(min_size, max_size), max_size)
        self._max_idle_s = max_idle_s
        self._lock: asyncio.Lock | None = None
        self._pool: AsyncConnectionPool[_Pooled] | None = None
        self._home: tuple[int, asyncio.AbstractEventLoop | None] = (os.getpid(), None)

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.target}>"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        pool, self._pool, self._lock = self._pool, None, None
        if pool is not None:
            await pool.close()

    async def connect_listener(self) -> psycopg.AsyncConnection[Any]:
        """Return a new connection of its own, autocommit, for LISTEN; the caller closes it."""
        return await self._connect(self.target.conninfo)

    @contextlib.asynccontextmanager
    async def connection(self, where: str = "") -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend an autocommit connection of the pool. psycopg's errors inside become `GangqError`s."""
        async with self._lent() as conn:
            try:
                yield conn
            except psycopg.Error as e:
                raise self.target.failed(e, where) from e

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[_Pooled]:
        pool = await self._open()
        try:
            conn = await pool.getconn()
        except (PoolTimeout, PoolClosed):
            raise await self._no_connection() from None
        if not self._prepare:
            conn.prepare_threshold = None
        try:
            yield conn
        finally:
            conn.deadline = None
            if conn.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE and not conn.closed:
                with contextlib.suppress(psycopg.Error):
                    await conn.rollback()
            conn.used_at = time.time()
            await pool.putconn(conn)

    async def execute(self, query: Query[R]) -> R:
        """Run one description of `gangq.client.calls`; the methods below do just this."""
        if query.steps is not None:
            return await self._in_steps(query.steps())
        if query.connection is None:
            deadline = core.Deadline(self.timeout_s)
            try:
                return await self._run_once(query, deadline)
            except psycopg.Error as e:
                if query.repeatable and core.answer_lost(e) and not deadline.is_over:
                    return await self._again(query, deadline, e)
                if not self._unprepared(e):
                    raise self.target.failed(e, query.name) from e
            try:
                return await self._run_once(query, deadline)
            except psycopg.Error as e:
                raise self.target.failed(e, query.name) from e
        given: Any = query.connection
        if hasattr(given, "sync_session"):  # SQLAlchemy AsyncSession: its connection() has to be awaited
            given = await given.connection()
        conn = core.unwrap(given, psycopg.AsyncConnection)
        try:
            return await self._run(conn, query)
        except psycopg.Error as e:
            raise self.target.failed(e, query.name) from e

    async def _in_steps(self, steps: Steps[R]) -> R:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = await (asyncio.sleep(step) if isinstance(step, float) else self.execute(step))

    async def _run_once(self, query: Query[R], deadline: core.Deadline) -> R:
        async with self._lent() as conn:
            conn.deadline = deadline
            try:
                return await self._run(conn, query)
            except core.NoAnswer:
                self._silent_at = time.time()
                raise

    async def _again(self, query: Query[R], deadline: core.Deadline, lost: psycopg.Error) -> R:
        """Send a call again whose answer was lost."""
        self._silent_at = time.time()  # What breaks one connection breaks those that are idle.
        try:
            return await self._run_once(query, deadline)
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

    async def _check(self, conn: _Pooled) -> None:
        if conn.used_at < self._silent_at:
            await conn.close()
            raise psycopg.OperationalError("connections of its age have fallen silent")
        if core.doubtful(conn, conn.used_at):
            conn.deadline = core.Deadline(self._connect_s)
            try:
                await AsyncConnectionPool.check_connection(conn)
            finally:
                conn.deadline = None

    @staticmethod
    async def _run(conn: psycopg.AsyncConnection[Any], query: Query[R]) -> R:
        async with conn.cursor(row_factory=query.factory) as cursor:
            await cursor.execute(query.text.encode(), query.params)
            return query.read(await cursor.fetchall())

    async def _open(self) -> AsyncConnectionPool[_Pooled]:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            # Forked, or another event loop: the pool's tasks do not run here, and its sockets are not ours.
            self._pool, self._lock, self._home = None, None, home
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._pool is None:
                # The pool would try in the background until the timeout and then not say why.
                limit_s = core.connect_limit_s(self.target, self._connect_s)
                await (await self._connect(self.target.conninfo, connect_timeout=limit_s)).close()
                pool = AsyncConnectionPool(
                    self.target.conninfo,
                    connection_class=_Pooled,
                    kwargs=self.target.kwargs,
                    min_size=self._sizes[0],
                    max_size=self._sizes[1],
                    max_idle=self._max_idle_s,
                    timeout=self._connect_s,
                    # See Client: a long outage must not be followed by a long wait.
                    reconnect_timeout=self._connect_s,
                    check=self._check,
                    num_workers=2,
                    name="gangq-async-client",
                    open=False,
                )
                await pool.open()
                self._pool = pool
            return self._pool

    async def _connect(self, conninfo: str, **more: Any) -> psycopg.AsyncConnection[Any]:
        try:
            return await psycopg.AsyncConnection.connect(conninfo, **self.target.kwargs, **more)
        except psycopg.Error as e:
            raise self.target.unreachable(e) from e

    async def _no_connection(self) -> GangqError:
        """Why the pool had none: ask the server itself, since the pool does not tell."""
        try:
            await (await self._connect(self.target.conninfo, connect_timeout=3)).close()
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

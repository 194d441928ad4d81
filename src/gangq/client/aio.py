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
from gangq.client.base import Attempts, BaseClient
from gangq.client.calls import Query, Steps
from gangq.errors import GangqError

P = ParamSpec("P")
R = TypeVar("R")


class AsyncConnection(psycopg.AsyncConnection[Any]):
    """`gangq.client.sync.Connection` for asyncio."""

    deadline: core.Deadline | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used_at = time.time()
        core.number_statements_apart(self)
        self.add_notice_handler(core.log_warnings())

    async def wait(self, gen: PQGen[R], *args: Any, **more: Any) -> R:
        """As psycopg's, for no longer than the deadline; then the connection is closed."""
        if self.deadline is not None:
            gen = self.deadline.limit(gen)
        try:
            answer = await super().wait(gen, *args, **more)
        except core.NoAnswer:
            self.pgconn.finish()
            raise
        self.used_at = time.time()
        return answer


async def run(conn: psycopg.AsyncConnection[Any], query: Query[R]) -> R:
    """Send one query over a connection."""
    async with conn.cursor(row_factory=query.factory) as cursor:
        await cursor.execute(query.text.encode(), query.params)
        return query.read(await cursor.fetchall())


def _verb(build: Callable[P, Query[R]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]]:
    @functools.wraps(build)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.execute(build(*args, **kwargs))

    method.__signature__ = core.same_parameters(build)  # type: ignore[attr-defined]
    return method


class AsyncClient(BaseClient):
    """`Client` for asyncio: the same constructor, the same methods, awaited. Close it before its event loop
    ends.

    Verbs that take `connection` want an async one: psycopg's AsyncConnection or AsyncCursor, SQLAlchemy's
    AsyncConnection or AsyncSession.
    """

    _pool: AsyncConnectionPool[AsyncConnection] | None
    _opening: asyncio.Lock

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def connect_listener(self) -> AsyncConnection:
        """Return a new connection of its own, autocommit, for LISTEN; the caller closes it."""
        return await self._connect()

    @contextlib.asynccontextmanager
    async def connection(self, where: str = "") -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        """Lend an autocommit connection of the pool. psycopg's errors inside become `GangqError`s."""
        async with self._lent() as conn:
            try:
                yield conn
            except psycopg.Error as e:
                raise self.target.failed(e, where) from e

    async def execute(self, query: Query[R]) -> R:
        """Run one description of `gangq.client.calls`; the methods below do just this."""
        if query.steps is not None:
            return await self._in_steps(query.steps())
        if query.connection is not None:
            given: Any = query.connection
            if hasattr(given, "sync_session"):  # SQLAlchemy AsyncSession: its connection() has to be awaited
                given = await given.connection()
            conn = core.unwrap(given, psycopg.AsyncConnection)
            try:
                return await run(conn, query)
            except psycopg.Error as e:
                raise self.target.failed(e, query.name) from e
        attempts = Attempts(self, query)
        while True:
            try:
                async with self._lent() as lent:
                    lent.deadline = attempts.begin()
                    return await run(lent, query)
            except (psycopg.Error, GangqError) as e:
                attempts.failed(e)

    async def _in_steps(self, steps: Steps[R]) -> R:
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = await (asyncio.sleep(step) if isinstance(step, float) else self.execute(step))

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection]:
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
            await pool.putconn(conn)

    async def _open(self) -> AsyncConnectionPool[AsyncConnection]:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            self._pool, self._home, self._opening = None, home, asyncio.Lock()
        async with self._opening:
            if self._pool is None:
                # The pool would try in the background until the timeout and then not say why.
                await (await self._connect()).close()
                pool = AsyncConnectionPool(
                    connection_class=AsyncConnection, check=self._check, open=False, **self._pool_args
                )
                await pool.open()
                self._pool = pool
            return self._pool

    async def _check(self, conn: AsyncConnection) -> None:
        if self._doubts(conn):
            conn.deadline = core.Deadline(self._connect_s)
            try:
                await conn.execute("")
            finally:
                conn.deadline = None

    async def _connect(self, **more: Any) -> AsyncConnection:
        try:
            return await AsyncConnection.connect(**{**self._connect_args, **more})
        except psycopg.Error as e:
            raise self.target.unreachable(e) from e

    async def _no_connection(self) -> GangqError:
        """Why the pool had none: ask the server itself, since the pool does not tell."""
        try:
            await (await self._connect(connect_timeout=3)).close()
        except GangqError as e:
            return e
        return self._exhausted()

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

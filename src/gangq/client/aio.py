"""The async client: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from gangq.client import core
from gangq.client.base import Attempts, BaseClient
from gangq.client.verb import Query, Steps
from gangq.client.verbs import Verbs
from gangq.errors import GangqError

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


class AsyncClient(Verbs, BaseClient):
    """`Client` for asyncio: the same constructor, the same methods, awaited. Close it before its event loop
    ends.

    Verbs that take `connection` want an async one: psycopg's AsyncConnection or AsyncCursor, SQLAlchemy's
    AsyncConnection or AsyncSession.
    """

    _pool: AsyncConnectionPool[AsyncConnection] | None
    _opening: asyncio.Task[AsyncConnectionPool[AsyncConnection]] | None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        pool, self._pool = self._pool, None
        self._closed = pool
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

    async def execute(self, query: Query[R] | Steps[R]) -> R:
        """Carry out a query of `gangq.client.verbs`, or several in steps; the verbs do just this."""
        if not isinstance(query, Query):
            return await self._in_steps(query)
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
        problem: GangqError | None = None
        while True:
            try:
                step = steps.send(answer) if problem is None else steps.throw(problem)
            except StopIteration as end:
                result: R = end.value
                return result
            answer = problem = None
            try:
                answer = await (asyncio.sleep(step) if isinstance(step, float) else self.execute(step))
            except GangqError as e:
                problem = e

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection]:
        pool, conn = await self._borrow()
        try:
            yield conn
        finally:
            conn.deadline = None
            await pool.putconn(conn)
            if conn.closed:
                await self._drop(pool)

    async def _borrow(self) -> tuple[AsyncConnectionPool[AsyncConnection], AsyncConnection]:
        while True:
            try:
                pool = await self._open()
                conn = await pool.getconn()
            except PoolTimeout:
                raise await self._no_connection() from None
            except PoolClosed:
                if pool is self._closed:
                    raise self._closed_meanwhile() from None
                continue  # Another call has found a connection of it broken.
            if not self._prepare:
                conn.prepare_threshold = None
            try:
                if core.doubtful(conn, conn.used_at):
                    conn.deadline = core.Deadline(self._connect_s)
                    await conn.execute("")
                return pool, conn
            except psycopg.Error:
                await pool.putconn(conn)
                await self._drop(pool)

    async def _drop(self, pool: AsyncConnectionPool[AsyncConnection]) -> None:
        # See Client.
        if self._pool is pool:
            self._pool = None
        await pool.close(timeout=0.1)

    async def _open(self) -> AsyncConnectionPool[AsyncConnection]:
        home = (os.getpid(), asyncio.get_running_loop())
        if self._home != home:
            self._pool, self._home, self._opening = None, home, None
        if self._pool is not None:
            return self._pool
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._opened())
        # All calls that begin meanwhile wait for this one attempt; the cancelling of one of them ends it for none.
        return await asyncio.shield(self._opening)

    async def _opened(self) -> AsyncConnectionPool[AsyncConnection]:
        # The pool would try in the background until the timeout and then not say why.
        await (await self._connect()).close()
        pool = AsyncConnectionPool(connection_class=AsyncConnection, open=False, **self._pool_args)
        # With its first connection made a call has no reason to begin another. The pool's workers take the
        # cancelling of such a one for an error and go on, and asyncio.run() would wait for them for ever.
        await pool.open(wait=True, timeout=pool.timeout)
        self._pool = pool
        return pool

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

"""The async client: the methods of `Client`, awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg_pool import AsyncConnectionPool

from gangq.client import core
from gangq.client.base import Attempts, BaseClient, Calls
from gangq.client.verb import Query, Steps
from gangq.client.verbs import Verbs

R = TypeVar("R")


class AsyncConnection(core.Timed, psycopg.AsyncConnection[Any]):
    """A connection of `AsyncClient`."""

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


async def finish(calls: Calls[R]) -> R:
    """Carry out what both clients do."""
    result: Any = None
    problem: BaseException | None = None
    while True:
        try:
            call = calls.send(result) if problem is None else calls.throw(problem)
        except StopIteration as end:
            returned: R = end.value
            return returned
        result = problem = None
        try:
            result = await call
        except BaseException as e:
            problem = e


def here() -> object:
    """The process and event loop that this runs in."""
    return os.getpid(), asyncio.get_running_loop()


class AsyncClient(Verbs, BaseClient):
    """`Client` for asyncio: the same constructor, the same methods, awaited. Close it before its event loop
    ends.

    Verbs that take `connection` want an async one: psycopg's AsyncConnection or AsyncCursor, SQLAlchemy's
    AsyncConnection or AsyncSession.
    """

    _pool: AsyncConnectionPool[AsyncConnection] | None
    _opening: asyncio.Task[AsyncConnectionPool[AsyncConnection]] | None = None
    _execute_on = staticmethod(run)
    _here = staticmethod(here)
    _pause = staticmethod(asyncio.sleep)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        if self._opening is not None and self._home == self._here():
            # Calls wait for this attempt to connect, or have left it behind when they were cancelled.
            await asyncio.gather(self._opening, return_exceptions=True)
        await finish(self._shut())

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
        return await finish(self._carry_out(query))

    async def _execute_pooled(self, query: Query[R], attempts: Attempts) -> R:
        async with self._lent() as lent:
            lent.deadline = attempts.begin()
            return await run(lent, query)

    async def _unwrap(self, given: Any) -> Any:
        if hasattr(given, "sync_session"):  # SQLAlchemy AsyncSession: its connection() has to be awaited
            given = await given.connection()
        return core.unwrap(given, psycopg.AsyncConnection)

    async def _wait_for(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.to_thread(function, *args)

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection]:
        pool, conn = await finish(self._borrow())
        try:
            yield conn
        finally:
            await finish(self._give_back(pool, conn))

    async def _open(self) -> AsyncConnectionPool[AsyncConnection]:
        if self._home != self._here():
            self._pool, self._home, self._opening = None, self._here(), None
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

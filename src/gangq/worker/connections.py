"""The two connections of a worker, each with one owner.

The main thread claims and reports over one (:class:`MainClient`). The control loop has the other
(:class:`ListeningClient`): over that one it renews the lease, ticks and listens, and makes the calls of all other
threads (:class:`ControlClient`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from gangq.client import Client, aio, core, sync
from gangq.client.aio import AsyncClient, AsyncConnection
from gangq.client.base import probe
from gangq.client.sync import Connection
from gangq.client.verb import Query, Steps

if TYPE_CHECKING:
    from gangq.worker.control import Control

R = TypeVar("R")


class MainClient(Client):
    """A `Client` with one connection and no threads of a pool, for one thread."""

    _own: Connection | None = None

    def __init__(self, dsn: str | None = None, **options: Any) -> None:
        super().__init__(dsn, max_size=1, **options)
        self._turn = threading.RLock()

    def close(self) -> None:
        """Close the connection. A later call connects again."""
        with self._turn:
            if self._own is not None:
                self._own.close()
            self._own = None

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Connection]:
        with self._turn:
            if self._busy:
                # The handler of a signal, amid a call of its own thread that cannot end before it.
                with self._connect() as another:
                    yield another
                return
            self._busy.add(threading.get_ident())
            try:
                self._own = own = self._tried()
                if not self._prepare:
                    own.prepare_threshold = None
                try:
                    yield own
                finally:
                    own.deadline = None
            finally:
                self._busy.clear()

    def _tried(self) -> Connection:
        if self._home != os.getpid():
            # A fork of a handler: the connection belongs to its parent.
            self._own, self._home = None, os.getpid()
        if (own := self._own) is not None and not own.closed:
            with contextlib.suppress(psycopg.Error):
                sync.finish(probe(own, self._connect_s))
                return own
            own.close()
        return self._connect()


class ListeningClient(AsyncClient):
    """An `AsyncClient` with one connection, which also listens; for one event loop.

    Its calls take turns. Notifications are read with the answer of a call, and between two calls as they come.
    """

    def __init__(self, dsn: str | None, **options: Any) -> None:
        super().__init__(dsn, max_size=1, **options)
        self.on_notification: Callable[[str, str], object] = lambda _channel, _payload: None
        """Called in the loop for each notification, with channel and payload."""
        self._own: AsyncConnection | None = None
        self._watched = -1
        self._calls = asyncio.Lock()
        self._channels: tuple[str, ...] = ()
        self.news = asyncio.Event()
        """Set when something has arrived between two calls, or the connection is a new one."""
        self.number = 0
        """How many connections it has made."""

    async def listen(self, *channels: str) -> None:
        """From now on listen on these channels and no other, through all reconnects."""
        async with self._lent() as conn:
            conn.deadline = core.Deadline(self.timeout_s)
            self._channels = channels
            await self._tell(conn, "unlisten *", *map(_listen, channels))

    async def read(self) -> None:
        """Read what has arrived; where that is nothing, ask whether the connection still leads anywhere."""
        self.news.clear()
        async with self._lent():
            pass

    async def close(self) -> None:
        """Close the connection; calls in progress fail."""
        self._unwatch()
        own, self._own = self._own, None
        if own is not None:
            await own.close()

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection]:
        async with self._calls:
            self._unwatch()
            self._own = own = await self._tried()
            if not self._prepare:
                own.prepare_threshold = None
            try:
                yield own
            finally:
                own.deadline = None
                self._watch(own)

    async def _tried(self) -> AsyncConnection:
        if (own := self._own) is not None and not own.closed:
            with contextlib.suppress(psycopg.Error):
                await aio.finish(probe(own, self._connect_s))
                return own
            await own.close()
        own = await self._connect()
        self.number += 1
        self.news.set()
        own.add_notify_handler(self._noted)
        own.deadline = core.Deadline(self._connect_s)
        try:
            await self._tell(own, *map(_listen, self._channels))
        except BaseException as problem:
            # Cancelled here, it would be nobody's.
            await own.close()
            if isinstance(problem, psycopg.Error):
                raise self.target.unreachable(problem) from problem
            raise
        return own

    @staticmethod
    async def _tell(conn: AsyncConnection, *statements: str) -> None:
        for statement in statements:
            await conn.execute(statement.encode())

    def _noted(self, note: psycopg.Notify) -> None:
        self.on_notification(note.channel, note.payload)

    def _watch(self, conn: AsyncConnection) -> None:
        if conn.closed:
            return
        # What came with the last answer and behind it has been read from the socket, which will not tell again.
        while (note := conn.pgconn.notifies()) is not None:
            self.on_notification(note.relname.decode(), note.extra.decode())
        self._watched = conn.fileno()
        asyncio.get_running_loop().add_reader(self._watched, self._arrived)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = -1

    def _arrived(self) -> None:
        # Whatever it is, a call reads it.
        self._unwatch()
        self.news.set()


def _listen(channel: str) -> str:
    return f'listen "{channel}"'


class ControlClient(Client):
    """A `Client` whose calls the control loop makes over its connection: for every thread but the loop's."""

    def __init__(self, control: Control, dsn: str | None, **options: Any) -> None:
        super().__init__(dsn, **options)
        self._control = control

    def execute(self, query: Query[R] | Steps[R]) -> R:
        """As `Client.execute`. What is to run in a transaction of the caller's runs in the caller's thread."""
        if isinstance(query, Query) and query.steps is None and query.connection is None:
            return self._control.wait(self._control.client.execute(query))
        return super().execute(query)

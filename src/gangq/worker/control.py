"""The control thread: an event loop that does all that a worker does beside running handlers.

The main thread may be inside a handler for hours. Each duty meanwhile is a task of this loop: the lease, the
listener, the tick and the decision, the epochs, the socket, the drain. Nothing in it may wait but with ``await``.

A worker has two connections, each with one owner. The main thread claims and reports over one (:class:`MainClient`).
The control loop has the other (:class:`ListeningClient`): over that one it renews the lease, ticks and listens, and
makes the calls of all other threads (:class:`ControlClient`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psycopg

from gangq import logqueue
from gangq.client import Client, aio, core, sync
from gangq.client.aio import AsyncClient, AsyncConnection
from gangq.client.base import probe
from gangq.client.sync import Connection
from gangq.client.verb import Query, Steps
from gangq.errors import DatabaseUnreachable

log = logging.getLogger("gangq.worker.control")

_STOP_S = 2.0
_CALLS = 4
"""Threads for what a task cannot await, at most."""
_LOOKUPS = 2

T = TypeVar("T")


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

    def execute(self, query: Query[T] | Steps[T]) -> T:
        """As `Client.execute`. What is to run in a transaction of the caller's runs in the caller's thread."""
        if isinstance(query, Query) and query.steps is None and query.connection is None:
            return self._control.wait(self._control.client.execute(query))
        return super().execute(query)


class Control:
    """The loop and its thread."""

    def __init__(self, client: Client, name: str) -> None:
        """``client`` says where the database is, and how long its calls may take. ``name`` is the worker's: the
        connection is called ``gangq worker NAME`` in ``pg_stat_activity``.
        """
        options: dict[str, Any] = {
            "timeout_s": client.timeout_s,
            "connect_s": client._connect_s,
            "prepare": client._prepare,
            "application_name": f"gangq worker {name}"[:63],
        }
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop
        self._calls = ThreadPoolExecutor(_CALLS, thread_name_prefix="gangq-call")
        self._thread = threading.Thread(target=self._run, name="gangq-control", daemon=True)
        self.client = ListeningClient(client.target.conninfo, **options)
        """For tasks of the loop."""
        self.for_threads = ControlClient(self, client.target.conninfo, **options)
        """The same for threads."""

    def start(self) -> None:
        """Start the thread. Before that there is nothing to call."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_fault)
        # The loop looks up the names of hosts there.
        self._loop.set_default_executor(ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="gangq-lookup"))
        self._thread.start()

    def stop(self) -> None:
        """End all tasks, close the connection, end the thread."""
        if not self._thread.is_alive():
            return
        with contextlib.suppress(TimeoutError, CancelledError, DatabaseUnreachable):
            self._submit(self._end()).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def set_timeout(self, seconds: float) -> None:
        """So long may the answer to a call take."""
        self.client.timeout_s = self.for_threads.timeout_s = seconds

    # -- for other threads -----------------------------------------------------------------------------------

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have the loop run it, and return what it returns.

        Raises:
            DatabaseUnreachable: the loop has ended.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the control loop would wait for itself")
        try:
            return self._submit(coroutine).result()
        except CancelledError:
            raise DatabaseUnreachable("this worker has stopped, and makes no more calls") from None

    def soon(self, act: Callable[..., object], *arguments: object) -> None:
        """Have the loop call it. Returns at once."""
        with contextlib.suppress(RuntimeError):  # It has ended, and whatever this was for with it.
            self._loop.call_soon_threadsafe(act, *arguments)

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """Have the loop call ``act()`` whenever there is something to read from ``fd``."""
        self.soon(self._loop.add_reader, fd, act)

    def unwatch(self, fd: int) -> None:
        """No more of that. Returns once the loop does not look at ``fd`` any more."""

        async def leave() -> None:
            self._loop.remove_reader(fd)

        with contextlib.suppress(DatabaseUnreachable):
            self.wait(leave())

    def spawn(self, coroutine: Coroutine[Any, Any, object], name: str) -> Future[object]:
        """Have the loop run it beside everything else, until it returns or is cancelled."""

        def ended(future: Future[object]) -> None:
            if not future.cancelled() and (problem := future.exception()) is not None:
                log.error("task_fault", extra={"task": name}, exc_info=problem)

        future = self._submit(coroutine)
        future.add_done_callback(ended)
        return future

    # -- for tasks of the loop -------------------------------------------------------------------------------

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """What ``function`` returns, which may wait for calls that this loop makes for threads.

        In the loop's own threads, as by ``asyncio.to_thread``, such waits would leave none to look up the host of
        the database, and the call that they wait for would never begin.
        """
        return await self._loop.run_in_executor(self._calls, function, *arguments)

    # -- inside ----------------------------------------------------------------------------------------------

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if os.getpid() != self._pid:
            coroutine.close()
            raise DatabaseUnreachable("a fork of a handler has no connection but in its main thread")
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise DatabaseUnreachable("this worker has stopped, and makes no more calls") from None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException:
            # A handler has closed its files, say. Nothing renews the lease any more, or hears a signal.
            log.critical("control_loop_broken", exc_info=True)
            logqueue.flush()
            os._exit(1)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _end(self) -> None:
        # First the connection: a call that is cancelled would ask the server to cancel it too, and wait for that.
        await self.client.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()


def _fault(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if isinstance(context.get("exception"), asyncio.CancelledError):
        return  # Python 3.11 calls it a fault of a stream's callback that its task was cancelled.
    log.error(
        "control_fault",
        extra={"about": context.get("message", "")},
        exc_info=context.get("exception"),
    )

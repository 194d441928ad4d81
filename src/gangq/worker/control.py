"""The control thread: an event loop that does all that a worker does beside running handlers.

The main thread may be inside a handler for hours. Each duty meanwhile is a task of this loop: the lease, the
listener, the tick and the decision, the epochs, the socket, the drain. Nothing in it may wait but with ``await``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gangq.client import Client
from gangq.errors import DatabaseUnreachable
from gangq.worker.connections import ControlClient, ListeningClient

log = logging.getLogger("gangq.worker.control")

_STOP_S = 2.0
_CALLS = 4
"""Threads for what a task cannot await, at most."""
_LOOKUPS = 2

T = TypeVar("T")


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

    @property
    def timeout_s(self) -> float:
        """How long the answer to a call may take."""
        return self.client.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
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
        finally:
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

"""One connection listens while a page is open. It wakes the streams of all open pages when something may have
changed.

The connection listens to three kinds of channels of NOTIFY. gangq_wake: a submission wakes a sleeping worker.
gangq_tick: a submission of placed work asks for a tick. gangq_<incarnation>: one worker is told to claim or to stop.

Four changes send no notification, because the lock of NOTIFY would serialize the commits of a busy fleet: a light job
that no worker sleeps for, an end that nothing waits for, a beat, and a line of output. For these the connection asks
gangq.change_mark() every 5 s, which takes 1 ms. Pages are refreshed only if its answer differs from the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import psycopg

from gangq.client import AsyncClient
from gangq.errors import GangqError

log = logging.getLogger("gangq.web.live")

PACE_S = 0.5
"""The least time between two refreshes of a page, whatever the rate of notifications."""
_POLL_S = 5.0
"""The time between two calls of gangq.change_mark(), and before a lost connection is made again."""
_REFRESH_AT_LEAST_S = 120.0
"""The most time between two refreshes of a page: the age of a last beat grows though nothing changes."""


class Live:
    """The connection and its subscribers. It is closed up to 5 s after the last subscriber has gone, so that loading
    the next page does not connect again.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._subscribers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._listening = False
        self._closed = False

    async def changes(self) -> AsyncIterator[bool]:
        """Yields True after changes, at most twice a second, until it is closed. The first True comes when the
        connection listens, because something may have changed since the page was read: so each page is fetched twice
        when it is opened. Without a change it yields False every 5 s: writing it to a browser that has gone fails,
        which ends the stream.
        """
        changed = asyncio.Event()
        if self._listening:
            changed.set()
        self._subscribers.add(changed)
        if not self._closed and self._task is None:
            self._task = asyncio.create_task(self._run(), name="gangq-web-live")
        try:
            refreshed_at = time.monotonic()
            while not self._closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _POLL_S)
                refresh = changed.is_set() or time.monotonic() - refreshed_at >= _REFRESH_AT_LEAST_S
                changed.clear()
                yield refresh
                if refresh:
                    refreshed_at = time.monotonic()
                    await asyncio.sleep(PACE_S)
        finally:
            self._subscribers.discard(changed)

    async def close(self) -> None:
        """Stop listening, and end the streams of all subscribers."""
        self._closed = True
        self._wake_all()
        while (task := self._task) is not None:
            # An error of the connection at this moment can replace the cancellation: cancel again.
            task.cancel()
            await asyncio.wait([task], timeout=1)

    def _wake_all(self) -> None:
        for changed in self._subscribers:
            changed.set()

    async def _run(self) -> None:
        try:
            while self._subscribers and not self._closed:
                try:
                    async with await self._client.connect_listener() as conn:
                        await self._listen(conn)
                except (psycopg.Error, GangqError) as problem:
                    log.warning("listener_lost", extra={"error": str(problem)})
                    self._wake_all()
                    await asyncio.sleep(_POLL_S)
        finally:
            self._task = None

    async def _listen(self, conn: psycopg.AsyncConnection[object]) -> None:
        await conn.execute("listen gangq_wake")
        await conn.execute("listen gangq_tick")
        known: set[int] = set()
        mark: object = None
        try:
            while self._subscribers and not self._closed:
                found = await (await conn.execute("select gangq.change_mark()")).fetchone()
                if found != mark:
                    known = await self._listen_to_workers(conn, known)
                    # Notifications sent before the connection listened to a worker's channel are lost.
                    self._listening = True
                    self._wake_all()
                mark = found
                async for _ in conn.notifies(timeout=_POLL_S):
                    self._wake_all()
        finally:
            self._listening = False

    async def _listen_to_workers(self, conn: psycopg.AsyncConnection[object], known: set[int]) -> set[int]:
        live = {
            row.incarnation
            for row in await self._client.workers()
            if row.state in ("live", "draining", "silent")
        }
        for incarnation in live - known:
            await conn.execute(f'listen "gangq_{incarnation:d}"'.encode())
        for incarnation in known - live:
            await conn.execute(f'unlisten "gangq_{incarnation:d}"'.encode())
        return live

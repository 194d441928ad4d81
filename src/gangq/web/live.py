"""One connection that listens while a page is open, and tells all pages that something may have changed.

It hears what the database tells workers: submissions that wake whoever sleeps (gangq_wake), calls for a tick, which
each submission of placed work makes (gangq_tick), and what is said to each worker (gangq_<incarnation>: claim, stop,
go). A light job that no worker sleeps for, and an end that nothing waits for, are told to nobody, because the lock of
NOTIFY would make every commit of a busy fleet wait for the others: pages are told every 5 s all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import psycopg

from gangq.client import AsyncClient
from gangq.errors import GangqError

log = logging.getLogger("gangq.web.live")

PACE_S = 0.5
"""Pages are told at most so often, whatever the rate of notifications."""
_ALL_THE_SAME_S = 5.0
_AGAIN_S = 2.0


class Live:
    """Tells subscribers; connected while there are any, and for up to 5 s after the last has gone: mostly the same
    person loads the next page.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._subscribers: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None
        self._listening = False
        self._closed = False

    async def changes(self) -> AsyncIterator[None]:
        """Yields after changes, at most twice a second, until it is closed; and once when it listens, because
        something may have changed since the page was read.
        """
        changed = asyncio.Event()
        if self._listening:
            changed.set()
        self._subscribers.add(changed)
        if not self._closed and self._task is None:
            self._task = asyncio.create_task(self._run(), name="gangq-web-live")
        try:
            while not self._closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _ALL_THE_SAME_S)
                changed.clear()
                yield
                await asyncio.sleep(PACE_S)
        finally:
            self._subscribers.discard(changed)

    async def close(self) -> None:
        """Stop listening, and end the streams of all subscribers."""
        self._closed = True
        self._tell()
        while (task := self._task) is not None:
            # An error of the connection in this very moment can take the place of the cancelling.
            task.cancel()
            await asyncio.wait([task], timeout=1)

    def _tell(self) -> None:
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
                    await asyncio.sleep(_AGAIN_S)
        finally:
            self._task = None

    async def _listen(self, conn: psycopg.AsyncConnection[object]) -> None:
        await conn.execute("listen gangq_wake")
        await conn.execute("listen gangq_tick")
        known: set[int] = set()
        try:
            while self._subscribers and not self._closed:
                workers = await self._client.workers()
                live = {row.incarnation for row in workers if row.state in ("live", "draining", "silent")}
                for incarnation in live - known:
                    await conn.execute(f'listen "gangq_{incarnation:d}"'.encode())
                for incarnation in known - live:
                    await conn.execute(f'unlisten "gangq_{incarnation:d}"'.encode())
                if not self._listening or live != known:
                    # What was said before somebody listened was heard by nobody.
                    self._listening = True
                    self._tell()
                known = live
                async for _ in conn.notifies(timeout=_ALL_THE_SAME_S):
                    self._tell()
        finally:
            self._listening = False

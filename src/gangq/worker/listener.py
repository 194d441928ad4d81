"""LISTEN: notifications wake the worker at once.

A notification is a hint. Whatever is missed (while reconnecting, through a pooler that swallows LISTEN) is found by
the polls behind every hint, so this task may fail in any way and only make things slower. It polls everything once
on every new connection, because what was sent before is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

import psycopg

from gangq.client.core import Deadline
from gangq.client.verb import Query
from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.repeating import backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.listener")

_PROBE_S = 10.0
_SELF_TEST_S = 2.0
_STEADY_S = 30.0
_TEST_AGAIN_S = 60.0
WAKE_CHANNEL = "gangq_wake"


def _notify(channel: str) -> Query[None]:
    return Query("notify", "select pg_notify(%(channel)s, '')", {"channel": channel}, lambda _: None)


class Listener:
    """Calls ``handlers[payload]()`` for notifications to this incarnation, and ``handlers['wake']()`` for
    those to sleepers of one of its queues. A task of the control loop.
    """

    def __init__(
        self, session: Session, queues: list[str], handlers: Mapping[str, Callable[[], None]]
    ) -> None:
        self._session = session
        self._client = session.control.client
        self._channel = f"gangq_{session.incarnation}"
        self._queues = frozenset(queues)
        self._handlers = handlers
        self.notifications_lost = False
        """True when LISTEN is accepted and nothing arrives: a transaction pooler stands in between."""

    async def run(self) -> None:
        """Listen until cancelled."""
        self._client.on_notification = self._on_notification
        pauses = backoff(0.05, 5.0)
        while True:
            since = time.monotonic()
            try:
                await self._listen()
            except (psycopg.Error, GangqError) as problem:
                log.warning("listener_lost", extra={"error": str(problem).strip()})
            except Exception:
                log.exception("listener_fault")
            if time.monotonic() - since > _STEADY_S:
                pauses = backoff(0.05, 5.0)
            # Behind a pooler no notification arrives. Test again now and then: the DSN may lead elsewhere by now.
            await asyncio.sleep(_TEST_AGAIN_S if self.notifications_lost else next(pauses))

    async def _listen(self) -> None:
        """Returns once the connection was replaced, or if no notification arrives."""
        client = self._client
        self.notifications_lost = not await self._is_delivered()
        if self.notifications_lost:
            await client.listen()
            log.warning(
                "notifications_lost",
                extra={
                    "advice": "no notification arrives through this DSN, as behind PgBouncer in "
                    "transaction mode: the worker polls every second instead; give it a direct DSN to "
                    "wake in milliseconds"
                },
            )
            return
        await client.listen(self._channel, WAKE_CHANNEL)
        number = client.number
        for payload in self._handlers:
            self._handle(payload)
        log.info("listening", extra={"channel": self._channel})
        while client.number == number:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.news.wait(), _PROBE_S)
            signs.alive()
            # A half-open connection looks like silence; only a call tells the two apart.
            await client.read()

    async def _is_delivered(self) -> bool:
        """Whether a connection that only listens receives what the other one sends.

        A connection that also makes calls proves nothing: a pooler in transaction mode delivers notifications with
        the answer of a call.
        """
        channel = f"{self._channel}_probe"
        async with await self._client.connect_listener() as other:
            other.deadline = Deadline(self._session.answer_s)
            await other.execute(f'listen "{channel}"'.encode())
            await self._client.execute(_notify(channel))
            other.deadline = None
            async for _ in other.notifies(timeout=_SELF_TEST_S, stop_after=1):
                return True
            # The LISTEN would stay on the pooler's server connection.
            other.deadline = Deadline(self._session.answer_s)
            await other.execute(b"unlisten *")
        return False

    def _on_notification(self, channel: str, payload: str) -> None:
        if channel == WAKE_CHANNEL:
            if payload in self._queues:
                self._handle("wake")
        elif channel == self._channel:
            self._handle(payload)

    def _handle(self, payload: str) -> None:
        handler = self._handlers.get(payload)
        if handler is not None:
            handler()

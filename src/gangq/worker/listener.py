"""The worker's ear: one connection that does nothing but LISTEN.

A notification is a hint. Whatever is missed (while reconnecting, through a pooler that swallows LISTEN) is
found by the polls behind every hint, so this thread may fail in any way and only make things slower. It polls
everything once after every (re)connect, because what was sent in between is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import psycopg

from gangq.client.verb import Query
from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.retry import backoff
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.sync import Connection

log = logging.getLogger("gangq.worker.listener")

_PROBE_S = 10.0
_SELF_TEST_S = 2.0
_STEADY_S = 30.0
_HELLO = "hello"
WAKE_CHANNEL = "gangq_wake"


def _hello(channel: str) -> Query[None]:
    return Query(
        "notify",
        "select pg_notify(%(channel)s, %(hello)s)",
        {"channel": channel, "hello": _HELLO},
        lambda _: None,
    )


class Listener:
    """Calls ``handlers[payload]()`` for notifications to this incarnation, and ``handlers['wake']()`` for
    those to sleepers of one of its queues.
    """

    def __init__(
        self, session: Session, queues: list[str], handlers: Mapping[str, Callable[[], None]]
    ) -> None:
        self._session = session
        self._channel = f"gangq_{session.incarnation}"
        self._queues = frozenset(queues)
        self._handlers = handlers
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.deaf = False
        """True when LISTEN is accepted and nothing arrives: a transaction pooler stands in between."""
        self._thread = threading.Thread(target=self._run, name="gangq-listener", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Hang up. Closing the connection from here ends a wait for notifications at once."""
        self._stop.set()
        with self._lock:
            connection = self._connection
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    def _run(self) -> None:
        waits = backoff(0.05, 5.0)
        while not self._stop.is_set():
            since = time.monotonic()
            try:
                self._listen()
            except (psycopg.Error, GangqError) as problem:
                if self._stop.is_set():
                    return
                log.warning("listener_lost", extra={"error": str(problem).strip()})
            except Exception:
                log.exception("listener_fault")
            if time.monotonic() - since > _STEADY_S:
                waits = backoff(0.05, 5.0)
            # Behind a pooler there is nothing to hear; ask again now and then, the DSN may have moved.
            self._stop.wait(60.0 if self.deaf else next(waits))

    def _listen(self) -> None:
        answer_s = self._session.terms.answer_s
        connection = self._session.client.connect_listener()
        with self._lock:
            self._connection = connection
        with contextlib.closing(connection):
            if self._stop.is_set():
                return
            with connection.within(answer_s):
                connection.execute(f'listen "{self._channel}"'.encode())
                connection.execute(f'listen "{WAKE_CHANNEL}"'.encode())
            # From another connection: a pooler in transaction mode delivers to a connection what it sends itself.
            self._session.client.execute(_hello(self._channel))
            self._everything()
            self.deaf = not self._hears_hello(connection)
            if self.deaf:
                # Of no use to anybody, and it stays on the pooler's connection, which is most likely this one still.
                with connection.within(answer_s):
                    connection.execute("unlisten *")
                log.warning(
                    "listener_deaf",
                    extra={
                        "advice": "LISTEN reaches no one through this DSN, as behind PgBouncer in "
                        "transaction mode: the worker polls every second instead; give it a direct DSN to "
                        "wake in milliseconds"
                    },
                )
                return
            log.info("listening", extra={"channel": self._channel})
            while not self._stop.is_set():
                self._dispatch(connection, _PROBE_S)
                signs.alive()
                # A half-open connection looks like silence; only asking tells the two apart.
                with connection.within(answer_s):
                    connection.execute("select 1")

    def _hears_hello(self, connection: Connection) -> bool:
        until = time.monotonic() + _SELF_TEST_S
        while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
            if _HELLO in self._dispatch(connection, left, stop_after=1):
                return True
        return self._stop.is_set()

    def _dispatch(self, connection: Connection, timeout: float, stop_after: int | None = None) -> set[str]:
        heard: set[str] = set()
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            # The whole list first: breaking out of the generator would drop the rest of a packet.
            for notification in list(connection.notifies(timeout=left, stop_after=1)):
                heard.add(notification.payload)
                if notification.channel == WAKE_CHANNEL:
                    if notification.payload in self._queues:
                        self._handle("wake")
                else:
                    self._handle(notification.payload)
            if stop_after is not None and heard:
                break
        return heard

    def _handle(self, payload: str) -> None:
        handler = self._handlers.get(payload)
        if handler is not None:
            handler()

    def _everything(self) -> None:
        for payload in self._handlers:
            self._handle(payload)

"""One connection, lent to one call at a time: what a client of size 1 has instead of a pool.

Most clients that matter for speed are of this kind: a worker's, a submitter's. A pool would have three threads for
its one connection, and lending from it costs as much as a fifth of a call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import psycopg

C = TypeVar("C", bound=psycopg.Connection[Any])

_NOBODY = 0
"""Who holds a connection on which an answer is outstanding that its caller reads later. No thread has this number."""


class Taken(psycopg.OperationalError):
    """The connection did not become free in time, or the client was closed."""


class Line(Generic[C]):
    """Lends its connection to who asked first, and makes it anew where it is broken. Thread-safe."""

    def __init__(self, connect: Callable[[], C], check: Callable[[C], None], timeout_s: float) -> None:
        """``connect`` makes a connection; ``check`` raises psycopg's error for one that must not be lent again;
        ``timeout_s`` is how long to wait for it.
        """
        self._connect = connect
        self._check = check
        self._timeout_s = timeout_s
        # The handler of a signal may run while its own thread has it.
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._closed = False
        # Whoever waits is handed the connection by name. Threads that merely wake for it lose it again and again to
        # the one that gave it back and calls on at once: a heartbeat could wait until its lease is over.
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._threads: set[int] = set()
        """Those that hold the connection or wait for it."""
        self._read: Callable[[float], None] | None = None
        self._connection: C | None = None

    def getconn(self, *, first: bool = False) -> C:
        """Borrow it, with ``first`` before all others who wait; :meth:`putconn` gives it back.

        Raises:
            Taken: nobody gave it back in time.
            Exception: what ``connect`` raises.
        """
        if threading.get_ident() in self._threads:
            # The handler of a signal, amid a call of its own thread that cannot end before it: one of its own.
            return self._connect()
        self._take(first)
        try:
            if self._closed:
                raise Taken("this client was closed")
            known = self._connection
            if known is not None:
                try:
                    self._check(known)
                except psycopg.Error:
                    self._drop()
                else:
                    return known
            self._connection = made = self._connect()
            return made
        except BaseException:
            self._give()
            raise

    def putconn(self, connection: C) -> None:
        """Give it back, broken or not."""
        if connection is not self._connection:
            _close(connection)
            return
        if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._drop()
        self._give()

    def leave(self, read: Callable[[float], None]) -> bool:
        """Its holder goes on to other things, with an answer outstanding. Whoever wants the connection next calls
        ``read(timeout_s)``, which waits for that answer and gives the connection back; within, :meth:`reading`.
        False: somebody waits already, and the holder itself has to.
        """
        with self._lock:
            if self._waiting:
                return False
            if self._holder is not None:
                self._threads.discard(self._holder)
            self._holder = _NOBODY
            self._read = read
            return True

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what ``read()`` does in the thread that does it, until the connection is given back."""
        me = threading.get_ident()
        with self._lock:
            waits = me in self._threads
            self._threads.add(me)
        try:
            yield
        finally:
            if not waits:
                with self._lock:
                    self._threads.discard(me)

    def close(self) -> None:
        """Lend it no more. A call in progress finishes."""
        self._closed = True
        self._close_if_free()

    def _take(self, first: bool) -> None:
        me = threading.get_ident()
        with self._lock:
            self._threads.add(me)
            if self._holder is None:
                self._holder = me
                return
            mine = me, threading.Lock()
            mine[1].acquire()
            (self._waiting.appendleft if first else self._waiting.append)(mine)
            read = self._read
        try:
            until = time.monotonic() + self._timeout_s
            if read is not None:
                read(self._timeout_s)
            if not mine[1].acquire(timeout=max(0.0, until - time.monotonic())):
                raise Taken("the connection did not become free in time")
        except BaseException:
            # A signal's handler may raise here too. Nobody may hand the connection to one who has gone.
            with self._lock:
                handed_over = mine not in self._waiting
                if not handed_over:
                    self._waiting.remove(mine)
                    self._threads.discard(me)
            if handed_over:
                self._give()
            raise

    def _give(self) -> None:
        self._hand_on()
        # Not before: close() may come between a look and the handing on.
        if self._closed:
            self._close_if_free()

    def _hand_on(self) -> None:
        with self._lock:
            if self._holder is not None:
                self._threads.discard(self._holder)
            self._read = None
            if self._waiting:
                self._holder, next_in_line = self._waiting.popleft()
                next_in_line.release()
            else:
                self._holder = None

    def _close_if_free(self) -> None:
        with self._lock:
            if self._holder is not None:
                return
            self._holder = threading.get_ident()
        self._drop()
        self._hand_on()

    def _drop(self) -> None:
        known, self._connection = self._connection, None
        if known is not None:
            _close(known)


def _close(connection: psycopg.Connection[Any]) -> None:
    with contextlib.suppress(psycopg.Error):
        connection.close()

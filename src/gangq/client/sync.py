"""The client: one method per SQL function and view."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg.abc import PQGen

from gangq.client import base, core
from gangq.client.base import Attempts, BaseClient, Calls
from gangq.client.verb import Query, Steps
from gangq.client.verbs import Verbs

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

R = TypeVar("R")


class Connection(core.Timed, psycopg.Connection[Any]):
    """A connection of `Client`."""

    def wait(self, gen: PQGen[R], *args: Any, **more: Any) -> R:
        """As psycopg's, for no longer than the deadline; then the connection is closed."""
        if self.deadline is not None:
            gen = self.deadline.limit(gen)
        try:
            answer = super().wait(gen, *args, **more)
        except core.NoAnswer:
            self.pgconn.finish()
            raise
        self.used_at = time.time()
        return answer


def run(conn: psycopg.Connection[Any], query: Query[R]) -> R:
    """Send one query over a connection."""
    with conn.cursor(row_factory=query.factory) as cursor:
        # Text from modules of this package only; values travel as parameters.
        return query.read(cursor.execute(query.text.encode(), query.params).fetchall())


def finish(calls: Calls[R]) -> R:
    """Carry out what both clients do."""
    result: Any = None
    try:
        while True:
            result = calls.send(result)
    except StopIteration as end:
        returned: R = end.value
        return returned


def in_steps(
    send: Callable[[Query[Any]], Any],
    steps: Steps[R],
    answer: Any = None,
    pause: Callable[[float], object] = time.sleep,
) -> R:
    """Carry out `steps`, whose queries `send` sends. `answer`: to a query that they have given already."""
    return finish(base.in_steps(send, pause, steps, answer))


class Client(Verbs, BaseClient):
    """Calls gangq's SQL functions on a pool of autocommit connections. Safe to share between threads.

    - `dsn`: a URI or `key=value` string; `parameters` are libpq's (host=..., sslmode=...) and win over it.
      What neither says comes from libpq's environment (PGHOST, ...).
    - `min_size`, `max_size`: connections kept, and at most; with `max_size=1` calls take turns (but a
      call amid another of its own thread, as a signal's handler makes it, has one for itself). Connections above
      `min_size` that nobody used for 10 s are closed.
    - `timeout_s`: how long the answer to a call may take; then `DatabaseUnreachable`, the connection is closed, and
      whether the call took effect is unknown. Before it is sent it may wait `connect_s` for a connection, and 3 s
      more to find out why there was none. Verbs with `connection` take as long as that connection allows. A
      submission whose connection breaks before the answer is sent again, once and before its time is up; its
      `request_id` keeps it from being carried out twice.
    - `prepare`: use prepared statements; None: unless GANGQ_PREPARE=off. Where they turn out not to last (PgBouncer
      in transaction mode before 1.21) the client goes on without them by itself.
    - `through`: the context of a job. `submit`, `submit_gang` and those with a unique key then go through the job's
      worker, on behalf of whoever submitted the job, and every other verb raises `InvalidInput`, unless it is given a
      `connection`.

    Connects at the first call and reconnects by itself. Methods are named as the SQL functions, take their
    arguments by keyword, and return named tuples (`gangq.client.rows`). Every error is a `GangqError`:
    `DatabaseUnreachable` when there is no connection, and it names the database but never a password.
    Verbs that take `connection` run inside that connection's transaction and never end it. Of those that read a view
    (`jobs`, `gangs`, `events` ...) all filters given must hold; `limit`: at most so many rows, None for all.
    """

    _pool: ConnectionPool[Connection] | None
    _execute_on = staticmethod(run)
    _here = staticmethod(os.getpid)
    _pause = staticmethod(time.sleep)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; calls in progress finish. A later call connects again."""
        finish(self._shut())

    def connect_listener(self) -> Connection:
        """Return a new connection of its own, autocommit, for LISTEN; the caller closes it."""
        return self._connect()

    @contextlib.contextmanager
    def connection(self, where: str = "") -> Iterator[psycopg.Connection[Any]]:
        """Lend an autocommit connection of the pool. psycopg's errors inside become `GangqError`s."""
        with self._lent() as conn:
            try:
                yield conn
            except psycopg.Error as e:
                raise self.target.failed(e, where) from e

    def execute(self, query: Query[R] | Steps[R]) -> R:
        """Carry out a query of `gangq.client.verbs`, or several in steps; the verbs do just this."""
        return finish(self._carry_out(query))

    def _execute_pooled(self, query: Query[R], attempts: Attempts) -> R:
        with self._lent() as lent:
            lent.deadline = attempts.begin()
            return run(lent, query)

    def _unwrap(self, given: object) -> Any:
        return core.unwrap(given, psycopg.Connection)

    def _wait_for(self, function: Callable[..., R], *args: Any) -> R:
        return function(*args)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Connection]:
        me = threading.get_ident()
        if me in self._busy:
            # The handler of a signal, amid a call of its own thread that cannot end before it.
            with self._connect() as own:
                yield own
            return
        if self._sizes[1] == 1:
            self._busy.add(me)
        try:
            pool, conn = finish(self._borrow())
            try:
                yield conn
            finally:
                finish(self._give_back(pool, conn))
        finally:
            self._busy.discard(me)

    def _open(self) -> ConnectionPool[Connection]:
        from psycopg_pool import ConnectionPool

        with self._lock:
            if self._home != self._here():
                self._pool, self._home = None, self._here()
            if self._pool is not None:
                return self._pool
        # The pool would try in the background until the timeout and then not say why.
        self._connect().close()
        with self._lock:
            if self._pool is None:
                self._pool = ConnectionPool(connection_class=Connection, open=True, **self._pool_args)
            return self._pool

    def _connect(self, **more: Any) -> Connection:
        try:
            return Connection.connect(**{**self._connect_args, **more})
        except psycopg.Error as e:
            raise self.target.unreachable(e) from e

"""What `Client` and `AsyncClient` share: their options, and all that they do, written once.

What they do is written as generators (:data:`Calls`). Each `yield` gives what a function of psycopg or of its pool
has returned, and receives the result of that: `Client` sends back what it is given, `AsyncClient` awaits it first.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg

from gangq.client import core
from gangq.client.inside import through_worker
from gangq.client.verb import Query, Steps
from gangq.durations import Duration, seconds
from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput

if TYPE_CHECKING:
    from gangq.context import Context

log = logging.getLogger("gangq.client")

R = TypeVar("R")

_MAX_IDLE_S = 10.0
"""A connection of the pool above `min_size` that nobody used for so long is closed."""

Calls = Generator[Any, Any, R]
"""Yields what each call returned, is sent its result, and returns the result of all."""


def in_steps(
    send: Callable[[Query[Any]], Any], pause: Callable[[float], Any], steps: Steps[R], answer: Any = None
) -> Calls[R]:
    """Send one query after the other, each made from the answers to those before; errors are raised in `steps`.
    `answer`: to a query that `steps` has given already.
    """
    problem: GangqError | None = None
    while True:
        try:
            step = steps.send(answer) if problem is None else steps.throw(problem)
        except StopIteration as end:
            result: R = end.value
            return result
        answer = problem = None
        try:
            answer = yield pause(step) if isinstance(step, int | float) else send(step)
        except GangqError as e:
            problem = e


def probe(conn: Any, seconds: float) -> Calls[None]:
    """Have the server answer within `seconds`, if the connection may be broken. Raises psycopg's Error."""
    if core.doubtful(conn, conn.used_at):
        conn.deadline = core.Deadline(seconds)
        try:
            yield conn.execute("")
        finally:
            conn.deadline = None


class BaseClient:
    """The options of a client, what it has learned of its connections, and what becomes of a call."""

    # What is a function in one client and a coroutine in the other.
    _connect: Callable[..., Any]
    _execute_on: Callable[..., Any]
    _execute_pooled: Callable[..., Any]
    _here: Callable[[], object]
    _open: Callable[[], Any]
    _pause: Callable[[float], Any]
    _unwrap: Callable[[object], Any]
    _wait_for: Callable[..., Any]
    execute: Callable[..., Any]

    def __init__(
        self,
        dsn: str | None = None,
        *,
        min_size: int = 1,
        max_size: int = 4,
        timeout_s: Duration = 60.0,
        connect_s: Duration = 10.0,
        prepare: bool | None = None,
        through: Context | None = None,
        **parameters: Any,
    ) -> None:
        if max_size < 1 or min_size < 0:
            raise InvalidInput(f"min_size is {min_size} and max_size {max_size}: at least 0 and 1")
        self.target = core.target(dsn, parameters, prepare)
        self.timeout_s = seconds(timeout_s, "timeout_s")
        self.through = through
        self._connect_s = min(seconds(connect_s, "connect_s"), self.timeout_s)
        self._prepare = self.target.prepare
        self._sizes = (min(min_size, max_size), max_size)

        self._lock = threading.Lock()
        self._busy: set[int] = set()
        """The threads that have, or wait for, the only connection there may be."""
        self._pool: Any = None
        self._closed: Any = None
        """The pool that `close` closed."""
        self._home: object = os.getpid()
        """Where the pool was made. Its threads or tasks run nowhere else, and its sockets belong to that process."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.target}>"

    @property
    def _connect_args(self) -> dict[str, Any]:
        # Making a connection takes no longer than a call may wait for one: whole seconds, at least 2.
        most = max(2, math.ceil(self._connect_s))
        limit = min(self.target.connect_timeout_s or most, most)
        return {"conninfo": self.target.conninfo, **self.target.kwargs, "connect_timeout": limit}

    @property
    def _pool_args(self) -> dict[str, Any]:
        kwargs = self._connect_args
        return {
            "conninfo": kwargs.pop("conninfo"),
            "kwargs": kwargs,
            "min_size": self._sizes[0],
            "max_size": self._sizes[1],
            "max_idle": _MAX_IDLE_S,
            "timeout": self._connect_s,
            # Given up soon, because its delay doubles: the next call then starts a new attempt at once, and a long
            # outage is not followed by a long wait.
            "reconnect_timeout": self._connect_s,
            "num_workers": 1 if self._sizes[1] == 1 else 2,
            "name": "gangq-client",
        }

    # A call

    def _carry_out(self, query: Query[R] | Steps[R]) -> Calls[R]:
        """A query, or several in steps."""
        result: R
        if not isinstance(query, Query):
            return (yield from in_steps(self.execute, self._pause, query))
        if self.through is not None and query.connection is None:
            result = yield self._wait_for(through_worker, self.through, query)
            return result
        if query.steps is not None:
            return (yield from in_steps(self.execute, self._pause, query.steps()))
        if query.connection is not None:
            conn = yield self._unwrap(query.connection)
            try:
                result = yield self._execute_on(conn, query)
                return result
            except psycopg.Error as e:
                raise self.target.failed(e, query.name) from e
        attempts = Attempts(self, query)
        while True:
            try:
                result = yield self._execute_pooled(query, attempts)
                return result
            except (psycopg.Error, GangqError) as e:
                attempts.failed(e)

    # Connections of the pool

    def _borrow(self) -> Calls[tuple[Any, Any]]:
        """The pool, and a connection of it that works."""
        from psycopg_pool import PoolClosed, PoolTimeout

        while True:
            try:
                pool = yield self._open()
                conn = yield pool.getconn()
            except PoolTimeout:
                raise (yield from self._why_none()) from None
            except PoolClosed:
                if pool is self._closed:
                    raise DatabaseUnreachable(
                        f"the client of {self.target} was closed while this call waited"
                    ) from None
                continue  # Another call has found a connection of it broken.
            if not self._prepare:
                conn.prepare_threshold = None
            try:
                yield from probe(conn, self._connect_s)
                return pool, conn
            except BaseException as e:
                yield pool.putconn(conn)
                if not isinstance(e, psycopg.Error):
                    raise
                yield from self._drop(pool)

    def _give_back(self, pool: Any, conn: Any) -> Calls[None]:
        conn.deadline = None
        yield pool.putconn(conn)
        if conn.closed:
            yield from self._drop(pool)

    def _drop(self, pool: Any) -> Calls[None]:
        """Close a pool one of whose connections broke, because the idle ones have most likely broken too. The next
        call opens a new pool, and learns at once whether the server answers.

        The pool's own `check` asks with each call, which costs a fifth of a submission. Where it is made to ask only
        of connections at rest, a call after a restart takes 1 s with two of them and 7 s with four, each call in an
        outage 10 s; and asyncio.run() waits for ever for a pool that replaces a connection and was not closed.
        """
        with self._lock:
            if self._pool is pool:
                self._pool = None
        yield pool.close(timeout=0.1)

    def _shut(self) -> Calls[None]:
        with self._lock:
            pool, self._pool = self._pool, None
            self._closed = pool
        # In a forked child it is the parent's, whose connections closing it would end; and nothing of a pool can be
        # awaited in another event loop.
        if pool is not None and self._home == self._here():
            yield pool.close()

    def _why_none(self) -> Calls[GangqError]:
        """Why the pool had no connection: ask the server itself, since the pool does not tell."""
        try:
            conn = yield self._connect(connect_timeout=3)
        except GangqError as e:
            return e
        yield conn.close()
        return DatabaseUnreachable(
            f"none of the {self._sizes[1]} connections to {self.target} became free in {self._connect_s:g} s; the "
            "server answers: use a larger max_size, or find what holds them"
        )


class Attempts:
    """The attempts at one call: how long they may take together, and whether there is another one."""

    def __init__(self, client: BaseClient, query: Query[Any]) -> None:
        self._client = client
        self._query = query
        self._deadline: core.Deadline | None = None
        self._lost: psycopg.Error | None = None
        self._refused = False

    def begin(self) -> core.Deadline:
        """The call is about to be sent."""
        self._deadline = self._deadline or core.Deadline(self._client.timeout_s)
        return self._deadline

    def failed(self, problem: psycopg.Error | GangqError) -> None:
        """Return if the call is to be made again; raise its error otherwise."""
        client, query = self._client, self._query
        if self._lost is not None:
            # The first call may still be carried out, whatever this one was told: its outcome remains unknown.
            raise client.target.failed(self._lost, query.name) from problem
        if isinstance(problem, GangqError):
            raise problem
        over = self._deadline is not None and self._deadline.is_over
        if query.repeatable and core.answer_lost(problem) and not over:
            self._lost = problem
        elif self._is_unprepared(problem):
            self._refused = True
        else:
            raise client.target.failed(problem, query.name) from problem

    def _is_unprepared(self, problem: psycopg.Error) -> bool:
        """Whether only its prepared statement was refused; none is used again."""
        client = self._client
        if (
            self._refused
            or problem.sqlstate not in core.PREPARED_STATEMENT_TROUBLE
            or not client.target.prepare
        ):
            return False
        if client._prepare:
            client._prepare = False
            log.warning(
                "prepared statements do not last on %s, as behind PgBouncer in transaction mode: going on without "
                "them",
                client.target,
                extra={"event": "prepare_turned_off"},
            )
        return True

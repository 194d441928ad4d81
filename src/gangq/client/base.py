"""What `Client` and `AsyncClient` share: their options, and what becomes of a call that failed."""

from __future__ import annotations

import logging
import math
import os
import threading
from typing import Any

import psycopg

from gangq.client import core
from gangq.client.verb import Query
from gangq.errors import DatabaseUnreachable, GangqError

log = logging.getLogger("gangq.client")


class BaseClient:
    """The options of a client, and what it has learned of its connections."""

    def __init__(
        self,
        dsn: str | None = None,
        *,
        min_size: int = 1,
        max_size: int = 4,
        timeout_s: float = 60.0,
        connect_s: float = 10.0,
        max_idle_s: float = 10.0,
        prepare: bool | None = None,
        **parameters: Any,
    ) -> None:
        self.target = core.target(dsn, parameters, prepare)
        self.timeout_s = timeout_s
        self._connect_s = min(connect_s, timeout_s)
        self._prepare = self.target.prepare
        self._sizes = (min(min_size, max_size), max_size)
        self._max_idle_s = max_idle_s

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
            "max_idle": self._max_idle_s,
            "timeout": self._connect_s,
            # Given up soon, because its delay doubles: the next call then starts a new attempt at once, and a long
            # outage is not followed by a long wait.
            "reconnect_timeout": self._connect_s,
            "num_workers": 1 if self._sizes[1] == 1 else 2,
            "name": "gangq-client",
        }

    def _closed_meanwhile(self) -> GangqError:
        return DatabaseUnreachable(f"the client of {self.target} was closed while this call waited")

    def _exhausted(self) -> GangqError:
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
            # Nor does a refusal say what came of the first call: it may still be under way.
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

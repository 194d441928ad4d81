"""Reports a trip to the database, over a connection of its own: the thread that hangs may hold the worker's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gangq.errors import GangqError, IncarnationEnded, NotFound, StaleToken
from gangq.proc.within import within
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.verdicts import Trip, error_of

if TYPE_CHECKING:
    from gangq.client.core import Target
    from gangq.client.verb import Query

log = logging.getLogger("gangq.watchdogs.trip")

T = TypeVar("T")

NOT_OURS = (StaleToken, IncarnationEnded, NotFound)
"""What the database says where the claim is not this worker's any more."""
_RETRY_S = 0.25


class TripReporter:
    """``database``: a conninfo, URI or `Target`; ``incarnation``: the worker's; ``database_s``: connect, lock and
    statement timeout, each.
    """

    def __init__(self, database: str | Target, incarnation: int, database_s: float = 2.0) -> None:
        """Raises `InvalidInput` for a number or a database address that makes no sense."""
        from gangq.client import core

        self._target = core.target(database, {}) if isinstance(database, str) else database
        self._incarnation = incarnation
        self._database_s = length_s("database_s", database_s, most=60)

    def tell(
        self,
        trip: Trip,
        *,
        job_id: int,
        token: int,
        evidence: Mapping[str, Any],
        within_s: float,
        exit_in_s: float | None = None,
    ) -> str | None:
        """Tell the database of a trip (SQL: gangq.trip); return the outcome, None if it did not answer within
        ``within_s`` seconds. Repeated until then: a repeat changes nothing.

        ``exit_in_s`` None: the work is proven dead already, and this process lives on.

        Raises:
            StaleToken, IncarnationEnded, NotFound: the claim is not this worker's any more.
        """
        from gangq.client.verbs import Verbs

        def query() -> Query[str]:
            return Verbs.trip(
                incarnation=self._incarnation,
                job_id=job_id,
                token=token,
                code=int(trip.code),
                error=error_of(trip, evidence),
                evidence=evidence,
                devices=trip.devices,
                exit_in_s=exit_in_s,
                class_=trip.cls,
            )

        limit_s = max(0.0, within_s)
        until = time.monotonic() + limit_s
        try:
            return within(limit_s, lambda: self._repeat(query, until), "gangq-trip")
        except NOT_OURS:
            raise
        except Exception as problem:
            # A schema without the verb, or a login without the right to it: another try would fail too.
            log.error("database_refused", extra={"error": str(problem)})
            return None

    def _repeat(self, query: Callable[[], Query[T]], until: float) -> T | None:
        while True:
            try:
                return self._execute(query())
            except GangqError as problem:
                if not problem.retryable:
                    raise
                log.warning("database_silent", extra={"error": str(problem)})
            if time.monotonic() + _RETRY_S >= until:
                return None
            time.sleep(_RETRY_S)

    def _execute(self, query: Query[T]) -> T:
        import psycopg
        from psycopg.conninfo import make_conninfo

        limit_s = max(1, round(self._database_s))
        limit_ms = round(self._database_s * 1000)
        conninfo = make_conninfo(
            self._target.conninfo,
            connect_timeout=limit_s,
            tcp_user_timeout=limit_ms,
            application_name="gangq trip",
        )
        kwargs = {**self._target.kwargs, "autocommit": True, "prepare_threshold": None}
        try:
            connection = psycopg.connect(conninfo, **kwargs)
        except psycopg.Error as problem:
            raise self._target.unreachable(problem) from problem
        try:
            with connection, connection.transaction():
                # In the transaction and not at connecting: PgBouncer refuses to pass them on.
                connection.execute(
                    f"set local lock_timeout = {limit_ms}; set local statement_timeout = {limit_ms}; "
                    # Should this host freeze between two messages, its locks must not outlive it by much.
                    f"set local idle_in_transaction_session_timeout = {limit_ms}"
                )
                with connection.cursor(row_factory=query.factory) as cursor:
                    return query.read(cursor.execute(query.text, query.params).fetchall())
        except psycopg.Error as problem:
            raise self._target.failed(problem, query.name) from problem

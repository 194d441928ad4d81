"""Reports a trip to the database, over a connection of its own: the thread that hangs may hold the worker's."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gangq.errors import GangqError, IncarnationEnded, NotFound, StaleToken
from gangq.proc.within import within

if TYPE_CHECKING:
    from gangq.client.core import Target

log = logging.getLogger("gangq.watchdogs.trip")

NOT_OURS = (StaleToken, IncarnationEnded, NotFound)
"""What the database says where the claim is not this worker's any more."""
_DATABASE_S = 2
"""Connect, lock and statement timeout, each."""
_RETRY_S = 0.25


def tell(target: Target, told: Mapping[str, Any], within_s: float) -> str | None:
    """Tell the database of a trip (SQL: gangq.trip, which takes ``told``); return the outcome, None if it did not
    answer within ``within_s`` seconds. Repeated until then: a repeat changes nothing.

    Raises:
        StaleToken, IncarnationEnded, NotFound: the claim is not this worker's any more.
    """
    limit_s = max(0.0, within_s)
    until = time.monotonic() + limit_s

    def repeat() -> str | None:
        while True:
            try:
                return _execute(target, told)
            except GangqError as problem:
                if not problem.retryable:
                    raise
                log.warning("database_silent", extra={"error": str(problem)})
            if time.monotonic() + _RETRY_S >= until:
                return None
            time.sleep(_RETRY_S)

    try:
        return within(limit_s, repeat, "gangq-trip")
    except NOT_OURS:
        raise
    except Exception as problem:
        # A schema without the verb, or a login without the right to it: another try would fail too.
        log.error("database_refused", extra={"error": str(problem)})
        return None


def _execute(target: Target, told: Mapping[str, Any]) -> str:
    import psycopg
    from psycopg.conninfo import make_conninfo

    from gangq.client.sync import run
    from gangq.client.verbs import Verbs

    query = Verbs.trip(**told)
    limit_ms = 1000 * _DATABASE_S
    conninfo = make_conninfo(
        target.conninfo,
        connect_timeout=_DATABASE_S,
        tcp_user_timeout=limit_ms,
        application_name="gangq trip",
    )
    kwargs = {**target.kwargs, "autocommit": True, "prepare_threshold": None}
    try:
        connection = psycopg.connect(conninfo, **kwargs)
    except psycopg.Error as problem:
        raise target.unreachable(problem) from problem
    try:
        with connection, connection.transaction():
            # In the transaction and not at connecting: PgBouncer refuses to pass them on.
            connection.execute(
                f"set local lock_timeout = {limit_ms}; set local statement_timeout = {limit_ms}; "
                # Should this host freeze between two messages, its locks must not outlive it by much.
                f"set local idle_in_transaction_session_timeout = {limit_ms}"
            )
            return run(connection, query)
    except psycopg.Error as problem:
        raise target.failed(problem, query.name) from problem

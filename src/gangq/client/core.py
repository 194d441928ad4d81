"""What the sync and the async client share: where the database is, how to connect, whose connection it is."""

from __future__ import annotations

import inspect
import logging
import os
import random
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput, translate

# A half-open connection must be noticed by itself. Keepalives find it while idle, the user timeout while data
# is unacknowledged; either alone leaves a case that hangs for ever.
_DEFAULTS: dict[str, Any] = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15000,
    "connect_timeout": 10,
    "application_name": "gangq",
}

_TRUSTED_S = 1.0

_server_log = logging.getLogger("gangq.server")

R = TypeVar("R")


NOTE = "GQ100"
"""The SQLSTATE of notices that are for people to read."""


def log_warnings() -> Callable[[psycopg.errors.Diagnostic], None]:
    """Return a notice handler that logs what the database wants somebody to act on: a worker that went silent, a host
    that needs a reboot, a step of the tick that failed; and once a connection, each note on what was submitted.
    """
    noted: set[str | None] = set()

    def log(diagnostic: psycopg.errors.Diagnostic) -> None:
        text = diagnostic.message_primary
        note = diagnostic.sqlstate == NOTE
        if diagnostic.severity_nonlocalized == "WARNING" or (note and text not in noted):
            _server_log.warning("%s", text)
        if note:
            noted.add(text)

    return log


@dataclass(frozen=True)
class Target:
    """A database and how to connect to it. `str()` names it without its password; `repr()` is the same."""

    conninfo: str
    name: str
    password: str | None
    prepare: bool

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of psycopg's connect, beside the conninfo."""
        # Behind PgBouncer 1.20 or older, prepared statements of several clients collide in one backend.
        return {
            "autocommit": True,
            "prepare_threshold": 5 if self.prepare else None,
        }

    @property
    def connect_timeout_s(self) -> int | None:
        """How long making a connection may take, per host; None: for ever."""
        given = int(conninfo_to_dict(self.conninfo).get("connect_timeout") or _DEFAULTS["connect_timeout"])
        return given if given > 0 else None

    def unreachable(self, error: BaseException) -> GangqError:
        """Return the error for a connection that could not be made."""
        reason = " ".join(str(error).split())
        if self.password:
            reason = reason.replace(self.password, "***")
        return DatabaseUnreachable(
            f"cannot connect to {self}: {reason or type(error).__name__}. Check that the server runs and "
            "accepts this login, and that --dsn or GANGQ_DSN names the right one"
        )

    def failed(self, error: psycopg.Error, where: str) -> GangqError:
        """Return the error for a call that failed."""
        return translate(error, where, str(self))


def target(dsn: str | None, parameters: dict[str, Any], prepare: bool | None = None) -> Target:
    """Make a `Target` of a URI or `key=value` string and libpq parameters; what neither says, libpq's
    environment does.

    `prepare` None: prepared statements are used unless GANGQ_PREPARE=off. Raises `InvalidInput`.
    """
    libpq = psycopg.pq.Conninfo.get_defaults()
    unknown = sorted(set(parameters) - {option.keyword.decode() for option in libpq})
    if unknown:
        raise InvalidInput(
            f"there is no option {unknown[0]!r}: neither the client nor libpq has one of that name (the pool's are "
            "min_size and max_size, libpq's host, port, user, sslmode and others)"
        )
    given, conninfo = _parsed(dsn or "", parameters)
    seen = {option.keyword.decode(): option.val.decode() for option in libpq if option.val}
    seen |= {key: str(value) for key, value in given.items() if value is not None}
    if prepare is None:
        prepare = os.environ.get("GANGQ_PREPARE", "on").strip().lower() not in ("off", "0", "false", "no")
    return Target(conninfo, _named(seen), seen.get("password"), prepare)


def _parsed(dsn: str, parameters: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What is given, and the conninfo with our defaults for what is not."""
    try:
        given = conninfo_to_dict(dsn, **parameters)
        wanted = {**_DEFAULTS, **given}
        if "," in str(given.get("host", "")):
            # Several hosts are a cluster with failover: without this we would stay on a demoted primary.
            wanted.setdefault("target_session_attrs", "read-write")
        conninfo = make_conninfo(**wanted)
        if _misread(dsn, given):
            raise psycopg.ProgrammingError
    except (psycopg.ProgrammingError, psycopg.OperationalError):
        # Not chained and not quoted: with an unescaped character in the password, libpq's message holds a
        # piece of it.
        raise InvalidInput(
            "the database address cannot be parsed: it is postgresql://user:password@host:5432/dbname (in "
            "which @ : / # ? % of the password are written %40 %3A %2F %23 %3F %25) or key=value pairs such "
            "as host=db dbname=jobs"
        ) from None
    timeout = given.get("connect_timeout")
    try:
        int(timeout or 0)
    except ValueError:
        raise InvalidInput(f"connect_timeout is {timeout!r}: it is a whole number of seconds") from None
    return given, conninfo


def _misread(dsn: str, given: dict[str, Any]) -> bool:
    """A slash in the password ends the host: the rest would become port and dbname, and be shown as such."""
    ports = str(given.get("port", "")).replace(",", "")
    stray = any("@" in str(given.get(key, "")) for key in ("host", "dbname"))
    return (ports != "" and not ports.isdigit()) or ("://" in dsn and stray)


def _named(seen: dict[str, str]) -> str:
    """A database as messages call it."""
    user = seen.get("user", "")
    host = seen.get("host") or seen.get("hostaddr") or "the local socket"
    name = f"database {seen.get('dbname') or user or '(default)'} at {host}:{seen.get('port', '5432')}"
    return f"{name} as {user}" if user else name


class NoAnswer(psycopg.OperationalError):
    """The call's time was up before the answer came."""


class Deadline:
    """When a call that is sent now has to have its answer."""

    __slots__ = ("_at", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._at

    def limit(self, steps: PQGen[R]) -> PQGen[R]:
        """Wait as `steps` does, and raise `NoAnswer` once the time is up.

        TCP notices a peer that acknowledges nothing. A server or proxy that hangs acknowledges everything and
        answers nothing. psycopg resumes the generator ten times a second while it waits.
        """
        try:
            waits_for = next(steps)
            while True:
                ready = yield waits_for
                if not ready and self.is_over:
                    raise NoAnswer(f"no answer came in {self._seconds:g} s, so the connection was closed")
                waits_for = steps.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result


def answer_lost(error: psycopg.Error) -> bool:
    """Whether the connection broke before the answer to a call came, or the server said that it goes away."""
    return (
        isinstance(error, psycopg.OperationalError)
        and not isinstance(error, NoAnswer)
        and (error.sqlstate is None or error.sqlstate.startswith(("08", "57P")))
    )


PREPARED_STATEMENT_TROUBLE = ("26000", "42P05")
"""There is no such statement, or there is one already: a pooler gave the session another connection to the server.
Nothing was executed.
"""


def number_statements_apart(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Have the prepared statements of `connection` numbered from a random number on.

    psycopg calls them _pg3_0, _pg3_1, ... on every connection. Behind a pooler that hands connections on between
    transactions, one client would execute what another has prepared under the same name. The counter is private to
    psycopg, which has no setting for this: where it is called otherwise, nothing changes, and a test fails.
    """
    statements = getattr(connection, "_prepared", None)
    if hasattr(statements, "_prepared_idx"):
        statements._prepared_idx = random.getrandbits(48)  # type: ignore[union-attr]


class Timed:
    """What a connection of psycopg becomes that knows when it was made or last answered (time.time()), and how long
    it may wait.
    """

    deadline: Deadline | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used_at = time.time()
        connection: Any = self
        number_statements_apart(connection)
        connection.add_notice_handler(log_warnings())


def doubtful(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], used_at: float) -> bool:
    """Whether a pooled connection last used at `used_at` (time.time()) has to be tried before it is lent.

    A server that goes away says so, and a connection that nobody reads then has something to read. Only
    a connection that was cut in silence needs asking, which costs a round trip: done once it was idle for 1 s.
    Raises psycopg's OperationalError where it is known to be broken.
    """
    # Not the monotonic clock: that stands still while the machine sleeps, and the server does not.
    if not 0 <= time.time() - used_at < _TRUSTED_S or not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def unwrap(connection: object, kind: type[Any]) -> Any:
    """Return the psycopg connection inside what a caller passed as `connection=`.

    Takes a psycopg connection or cursor, a SQLAlchemy Connection or Session, or a Django connection; `kind`
    is the psycopg class wanted. Raises `InvalidInput`, naming what to pass, for everything else.
    """
    found: Any = connection
    for _ in range(8):
        if isinstance(found, kind):
            return found
        if found is None or isinstance(found, (psycopg.Connection, psycopg.AsyncConnection)):
            break
        found = _inside(found)
    wanted = "an async psycopg" if kind is psycopg.AsyncConnection else "a psycopg"
    raise InvalidInput(
        f"connection is {type(connection).__module__}.{type(connection).__qualname__}, in which there is not "
        f"{wanted} connection: pass psycopg 3's connection or cursor, a SQLAlchemy Connection or Session "
        "whose URL begins with postgresql+psycopg://, or a Django connection with psycopg 3 installed; the "
        "sync client takes sync ones, the async client async ones"
    )


def _inside(wrapper: Any) -> Any:
    if hasattr(wrapper, "ensure_connection"):  # Django connects on first use
        wrapper.ensure_connection()
        return wrapper.connection
    if getattr(wrapper, "sync_connection", None) is not None:  # SQLAlchemy AsyncConnection
        return wrapper.sync_connection
    if hasattr(wrapper, "driver_connection"):  # SQLAlchemy's pool proxy
        return wrapper.driver_connection
    if (
        hasattr(wrapper, "in_transaction")
        and hasattr(wrapper, "exec_driver_sql")
        and not wrapper.in_transaction()
    ):
        # SQLAlchemy begins on its own first statement, not on ours: without this its commit() would do
        # nothing and our work would vanish.
        wrapper.begin()
    inner = getattr(wrapper, "connection", None)
    if callable(inner) and not inspect.iscoroutinefunction(inner):  # SQLAlchemy Session
        return inner()
    return None if callable(inner) else inner

"""The one exception tree of gangq, and the one place where PostgreSQL's errors become it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    from gangq.durations import Duration


class GangqError(Exception):
    """Base of every error that gangq raises on purpose.

    `retryable` says whether the same call may succeed a moment later without anybody doing anything.
    """

    retryable = False


class InvalidInput(GangqError, ValueError):
    """An argument is out of range or malformed (GQ001)."""


class NotFound(GangqError, LookupError):
    """No such job, gang, queue, worker or device (GQ002)."""


class UnknownTask(NotFound):
    """No task of that name is declared in this App."""


class StaleToken(GangqError):
    """The claim this call speaks for is over (GQ003): nothing was changed; stop the work, report nothing."""


class WrongState(GangqError):
    """Not allowed in the state the job, gang or device is in (GQ004)."""


class IncarnationEnded(GangqError):
    """This worker incarnation has ended, or its lease has (GQ005): kill its work and register again."""


class WorkerNameTaken(GangqError):
    """A live incarnation holds this worker name (GQ006).

    `holder` describes it: incarnation, host, boot_id, pid, identity, silent_s and lease_left_s (seconds).
    """

    def __init__(self, message: str, holder: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.holder: dict[str, Any] = dict(holder or {})


class TooLarge(InvalidInput):
    """A payload, result or checkpoint, or a login's number of distinct requirements, is over its limit (GQ007)."""


class WrongIsolation(GangqError):
    """claim, apply and tick need READ COMMITTED (GQ008)."""


class Busy(GangqError):
    """Something held a lock for too long, or a deadlock was broken: nothing was changed, call again."""

    retryable = True


class NotAllowed(GangqError):
    """This database login lacks the role that the call needs."""


class Unfit(GangqError):
    """This host, or this worker on it, must not take work (exit code 88); the message says why and what to do."""


class HookFailed(GangqError):
    """A hook of `App.on_worker_start` raised: no handler runs in its process. A worker ends with exit code 1."""


class SchemaMismatch(GangqError):
    """The schema in the database and this library do not fit; the message says which side to upgrade."""


class DatabaseUnreachable(GangqError):
    """No connection to the database, or it broke during a call (whether that call took effect is unknown).

    A submission is safe to repeat only with a `request_id` of your own, given to the first call too.
    """

    retryable = True


class NotSerializable(InvalidInput, TypeError):
    """A payload, result or beat is not JSON; the message names the type and where it sits."""


class ResultNotStored(GangqError):
    """The job is done, but what its handler returned could not be stored; the message says why.

    In the database `{"gangq_note": "..."}` stands in place of the result.
    """

    KEY = "gangq_note"

    def __init__(self, message: str, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(GangqError):
    """The job or gang ended as failed. `error` is the last error kept (type, message, traceback, ...)."""

    def __init__(
        self, message: str, job_id: int | None = None, error: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.error: dict[str, Any] = dict(error or {})


class JobCancelled(GangqError):
    """The job or gang was cancelled before it was done. `reason`: why, in the words of who cancelled it."""

    def __init__(self, message: str, job_id: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.reason = reason


class Stopped(GangqError):
    """Raised inside a handler by `ctx.raise_if_stopping()` once it has been told to stop."""


class RetryLater(GangqError):
    """Raise it in a handler to end this attempt and have the next one begin after `delay`. The attempt counts.

    `delay`: see `gangq.durations.Duration`. `reason` is kept as the error. The job fails when its attempts are spent,
    whatever the task's `Retry` says of other errors.
    """

    def __init__(self, delay: Duration, reason: str = "to be tried again later") -> None:
        from gangq.durations import seconds  # Which needs the errors above.

        super().__init__(reason)
        self.delay_s = seconds(delay, "the delay", most=1e7)


class Snoozed(SystemExit):
    """What `ctx.snooze` raises to leave the handler. It is no error: `except Exception` does not catch it, and a
    program that `gangq run` started ends with status 0.
    """

    def __init__(self, for_s: float) -> None:
        super().__init__(0)
        self.for_s = for_s


class Fail(GangqError):
    """Raise it in a handler to fail the job at once: no further attempt can help. Its text is kept as the error."""


class WaitTimeout(GangqError, TimeoutError):
    """The job or gang has not ended in the time that was given; nothing was done to it."""


class EmbeddedError(GangqError):
    """The private PostgreSQL cannot be found, started, reached or stopped; the message says what to do."""


class WorkerGone(GangqError):
    """The worker that runs this job does not answer on its socket."""


class Unrunnable(GangqError):
    """No attempt of a job can begin: a command's payload is malformed, or the App is in no module that a child could
    import.
    """


class CommandStartError(GangqError):
    """A command could not be started; nothing of it runs.

    ``argv0`` and ``cwd`` are what was tried, ``errno`` the system's reason (0 if it had none), ``stage``
    where it failed: ``exec`` (no such program, or not executable), ``cwd`` (its directory), ``log`` (its log
    file), ``deadline`` (too late to start it at all), ``timeout`` (a file system that does not answer, most often) or
    ``guardian`` (this host cannot start processes).
    """

    def __init__(self, message: str, *, argv0: str, cwd: str, stage: str, code: int) -> None:
        super().__init__(message)
        self.argv0 = argv0
        self.cwd = cwd
        self.stage = stage
        self.errno = code


class DeviceSpecError(GangqError, ValueError):
    """A device declaration that cannot be read; the message names it and the accepted forms."""

    def __init__(self, spec: str, reason: str) -> None:
        super().__init__(
            f"cannot read the device declaration {spec!r}: {reason}. Write COUNTxSIZE with a unit of MiB, "
            "GiB, TiB, MB, GB or TB, several separated by commas (2x24GiB, 1x80GB, 2x24GiB,1x80GiB), or none "
            "for a worker without devices."
        )
        self.spec = spec


class DriverUnavailable(GangqError):
    """A driver library gave no list of devices; the message says why and what to do.

    `absent` is true where the host simply has no such driver, which is no reason to warn anybody.
    """

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class Unsupported(GangqError):
    """This platform cannot do what was asked."""


_MIGRATE = "Run `gangq migrate` as the schema's owner, then try again."

WHO_READS = (
    "Its submitter, gangq_admin and the login whose worker runs it may; in a shared queue every submitter."
)
"""Who may read the payload, result, error and output of a job."""

_BY_SQLSTATE: dict[str, type[GangqError]] = {
    "GQ001": InvalidInput,
    "GQ002": NotFound,
    "GQ003": StaleToken,
    "GQ004": WrongState,
    "GQ005": IncarnationEnded,
    "GQ006": WorkerNameTaken,
    "GQ007": TooLarge,
    "GQ008": WrongIsolation,
    "55P03": Busy,  # lock_not_available
    "40P01": Busy,  # deadlock_detected
    "40001": Busy,  # serialization_failure
    "57014": Busy,  # query_canceled: statement_timeout, or an administrator
    "42501": NotAllowed,
    "42883": SchemaMismatch,  # undefined_function
    "3F000": SchemaMismatch,  # invalid_schema_name
    "42P01": SchemaMismatch,  # undefined_table
    "42703": SchemaMismatch,  # undefined_column
    "0A000": SchemaMismatch,  # cached plan must not change result type: code was rebuilt under us
    "25006": DatabaseUnreachable,  # read_only_sql_transaction: we talk to a standby
    "53300": DatabaseUnreachable,  # too_many_connections
}
_BY_CLASS: dict[str, type[GangqError]] = {
    "22": InvalidInput,  # data exceptions: text with a NUL, a number out of range
    "08": DatabaseUnreachable,
    "57": DatabaseUnreachable,  # shutting down, starting up
}
_ADVICE: dict[str, str] = {
    "42501": (
        "The roles: gangq_viewer reads all but payloads, results, errors and output; gangq_submitter submits, and "
        "cancels, retries and reads what it submitted; gangq_worker runs jobs; gangq_host restarts workers; "
        "gangq_notifier delivers notifications; gangq_admin may do everything. "
        "`gangq doctor` shows which of them this login has."
    ),
    "42883": _MIGRATE,
    "3F000": _MIGRATE,
    "42P01": _MIGRATE,
    "42703": _MIGRATE,
    "0A000": "The schema was migrated while this connection was open: call again, or restart this process.",
    "25006": "This server is a standby; point the DSN at the primary (target_session_attrs=read-write).",
    "55P03": "Somebody else holds the row; nothing was changed, call again.",
    "40P01": "Nothing was changed, call again.",
    "40001": "Nothing was changed, call again.",
}


def translate(error: psycopg.Error, where: str = "", target: str = "") -> GangqError:
    """Return the gangq exception for what psycopg raised; the caller raises it from `error`.

    The message is the server's own, then its hint. `where` names the call and `target` the database (without
    a password), for those errors whose reader needs to know. An error nobody foresaw becomes a plain
    `GangqError` with its SQLSTATE.
    """
    # Who calls this has it loaded. At the top it would make every child that never sees a database load it too.
    import psycopg

    state = error.sqlstate or ""
    diag = error.diag
    message = (diag.message_primary or str(error)).strip()
    hint = (diag.message_hint or _ADVICE.get(state, "")).strip()
    kind = _BY_SQLSTATE.get(state) or _BY_CLASS.get(state[:2])
    if state == "XX000" and message.startswith("cache lookup failed for function"):
        # A call that waited while `gangq migrate` rebuilt the function it had already looked up.
        return Busy("The schema was migrated during this call. Nothing was changed, call again.")
    if kind is None and isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)) and not state:
        kind = DatabaseUnreachable
    if kind is None and isinstance(error, psycopg.DataError):
        kind = InvalidInput
    if kind is DatabaseUnreachable:
        during = f" during {where}; whether it took effect is unknown" if where else ""
        return DatabaseUnreachable(
            _joined(f"lost {target or 'the database'}{during}".rstrip() + f": {message}", hint)
        )
    if kind is WorkerNameTaken:
        return WorkerNameTaken(_joined(message, hint), _holder(diag.message_detail))
    if kind is None:
        return GangqError(_joined(f"{where or 'the database'}: {message} (SQLSTATE {state or 'none'})", hint))
    return kind(_joined(message, hint))


def _joined(message: str, hint: str) -> str:
    if not hint:
        return message
    return f"{message}{'' if message.endswith(('.', '!', '?')) else '.'} {hint}"


def _holder(detail: str | None) -> dict[str, Any]:
    try:
        holder = json.loads(detail or "{}")
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}

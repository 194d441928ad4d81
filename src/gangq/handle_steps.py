"""What can be done with a job, gang or batch by its id: each a generator of steps (a query, or seconds to wait).

`gangq.handles` makes methods of them.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gangq.client.rows import BatchRow, EventRow, GangRow, JobRow, StateChange, TimelineRow
from gangq.client.verb import Steps, Verb
from gangq.client.verbs import Verbs
from gangq.durations import Duration, seconds
from gangq.errors import (
    WHO_READS,
    GangqError,
    JobCancelled,
    JobFailed,
    NotAllowed,
    NotFound,
    ResultNotStored,
    WaitTimeout,
)
from gangq.status import (
    ENDED,
    WAITS,
    Status,
    batch_in_words,
    error_in_words,
    holding,
    phrase,
    slowest,
    why_it_waits,
)

logger = logging.getLogger("gangq.handles")

R = TypeVar("R")
T = TypeVar("T")
Row = TypeVar("Row", JobRow, GangRow, BatchRow)

# Polling starts fast enough for a job of milliseconds and ends slow enough for a thousand waiters.
_FIRST_POLL_S = 0.02
_LAST_POLL_S = 0.5
# Whoever waits for hours should not be woken by a database restart.
_OUTAGE_TOLERATED_S = 300.0


class Handle(Generic[R, Row]):
    """A job, gang or batch by its id; it returns R, and its view shows it as `Row`. Handles are equal if they are of
    one App and name the same: ids of two databases say nothing about each other.
    """

    kind: str

    def __init__(self, client: Callable[[], Any], id: int, existed: bool = False) -> None:
        self._client = client
        self.id = id
        self.existed = existed
        self.seen: Status | None = None
        """What it was when it was last asked for."""

    @property
    def phrase(self) -> str:
        """How it is written in a sentence."""
        return phrase(self.kind, self.id)

    def __repr__(self) -> str:
        # It does not ask: a log or a debugger must not wait for a database.
        return f"<{self.phrase.capitalize() if self.seen is None else self.seen}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle) or type(other) is not type(self):
            return False
        return (other.id, other._client) == (self.id, self._client)

    def __hash__(self) -> int:
        return hash((type(self), self.id))


class Limit:
    """How long somebody waits."""

    def __init__(self, timeout: Duration | None) -> None:
        self.s = None if timeout is None else seconds(timeout, "timeout")
        self._until = None if self.s is None else time.monotonic() + self.s

    def left(self) -> float | None:
        """Return the seconds that are left; None: without end."""
        return None if self._until is None else self._until - time.monotonic()


def first_ended(
    handles: Sequence[Handle[Any, Any]], limit: Limit, before_pause: Callable[[], object] = lambda: None
) -> Steps[dict[Handle[Any, Any], str]]:
    """Wait until some of these have ended; return those with their states."""
    delay, lost_at = _FIRST_POLL_S, None
    states: Mapping[Handle[Any, Any], str] = {}
    first = handles[0]
    while True:
        try:
            states = yield from _states(handles)
            lost_at = None
        except GangqError as e:
            lost_at = lost_at or time.monotonic()
            if not e.retryable or time.monotonic() - lost_at > _OUTAGE_TOLERATED_S:
                raise
            logger.warning(
                "waiting for %s: %s",
                first.phrase,
                e,
                extra={"event": "wait_retry", f"{first.kind}_id": first.id},
            )
        else:
            ended = {handle: state for handle, state in states.items() if state in ENDED}
            if ended:
                return ended
        left = limit.left()
        if left is not None and left <= 0:
            others = f" and {len(handles) - 1} more have" if handles[1:] else " has"
            raise WaitTimeout(
                f"{first.phrase}{others} not ended within {limit.s:g} s; {first.phrase} is "
                f"{states.get(first, 'not seen yet')}"
            )
        before_pause()
        # Half of it random: a thousand waiters must not ask in step.
        pause = delay * random.uniform(0.5, 1.0)
        yield pause if left is None else min(pause, left)
        delay = min(delay * 1.5, _LAST_POLL_S)


def _states(handles: Sequence[Handle[Any, Any]]) -> Steps[dict[Handle[Any, Any], str]]:
    verbs: Mapping[str, Verb[..., dict[int, str]]] = {
        "job": Verbs.job_states,
        "gang": Verbs.gang_states,
        "batch": Verbs.batch_states,
    }
    found: dict[Handle[Any, Any], str] = {}
    for kind, states in verbs.items():
        asked = {handle.id: handle for handle in handles if handle.kind == kind}
        known = (yield from states(ids=[*asked])) if asked else {}
        for id, handle in asked.items():
            if id not in known:
                raise NotFound(
                    f"{handle.phrase} does not exist: the transaction that submitted it is not committed (or was "
                    "rolled back), it is older than its retention, or this is another database"
                )
            found[handle] = str(known[id])
    return found


def _failure(what: str, job: JobRow | None, reason: str | None = None) -> JobFailed:
    error = (job.error if job else None) or {}
    said = error_in_words(error)
    text = f"{what} failed"
    if job is not None and job.gang_id is None:
        text += f" after {job.attempts} of {job.max_attempts} attempts"
    for part in (reason, said):
        text += f": {part}" if part else ""
    return JobFailed(text, job.id if job else None, error)


def _may_read(job: JobRow, what: str) -> None:
    """Raise `NotAllowed` if what belongs to this job is None only because it is not shown to this login."""
    if not job.readable:
        raise NotAllowed(f"this login may not read {what} of job {job.id} (task {job.task}). {WHO_READS}")


def _stored(job: JobRow) -> Any:
    _may_read(job, "the result")
    match job.result:
        case {ResultNotStored.KEY: str(note), **others} if not others:
            raise ResultNotStored(
                f"job {job.id} (task {job.task}) is done, its result is not stored: {note}", job.id
            )
    return job.result


# Steps of a job ---------------------------------------------------------------------------------------------


def wait(handle: Handle[Any, Any], timeout: Duration | None = None) -> Steps[str]:
    """Wait until it has ended; return its state: done, failed or cancelled.

    `timeout`: seconds, "90s" or a timedelta, None for ever; then `WaitTimeout`. A database outage of up to five
    minutes is waited out. While the database does not answer, it takes longer than `timeout`: as long as the client
    gives the call that is under way (`connect_s`, `timeout_s`).
    """
    return (yield from first_ended([handle], Limit(timeout)))[handle]


def _at_its_end(
    handle: Handle[Any, Any],
    timeout: Duration | None,
    read: Callable[[Handle[Any, Any]], Steps[T]],
    states: Callable[[T], Iterable[str]],
) -> Steps[T]:
    """Wait until it has ended; return what `read` finds then. It may have been retried between the two: then it is
    waited for again.
    """
    limit = Limit(timeout)
    while True:
        yield from first_ended([handle], limit)
        found = yield from read(handle)
        if ENDED.issuperset(states(found)):
            return found


def result(handle: Handle[R, Any], timeout: Duration | None = None) -> Steps[R]:
    """Wait, and return what the handler returned (for a command: its exit status, as stored).

    Raises `JobFailed` (with the last error), `JobCancelled`, `WaitTimeout`, `NotAllowed` (this login may not read
    it), or `ResultNotStored`: it is done, and what it returned was no JSON or too large.
    """
    job = yield from _at_its_end(handle, timeout, row, lambda job: [job.state])
    if job.state == "done":
        stored: R = _stored(job)
        return stored
    reason = _own_words(job)
    if job.state == "cancelled":
        reason = yield from _cancelled_because(job, reason)
    raise _problem(job, f"job {job.id} (task {job.task})", reason)


def _own_words(job: JobRow) -> str | None:
    """Why the job was cancelled, as its own row says it."""
    message = (job.error or {}).get("message")
    return None if message is None else str(message)


def _problem(job: JobRow, what: str, cancelled_because: str | None) -> JobFailed | JobCancelled:
    """What is raised for a job that has failed, or was cancelled."""
    if job.state == "failed":
        return _failure(what, job, None if job.readable else "this login may not read its error")
    return JobCancelled(f"{what} was cancelled" + _because(cancelled_because), job.id, cancelled_because)


def _cancelled_because(ended: JobRow | GangRow, otherwise: str | None) -> Steps[str | None]:
    """Why it was cancelled: in the words of who did it, else `otherwise`. A member is cancelled with its gang."""
    gang_id = ended.id if isinstance(ended, GangRow) else ended.gang_id
    job_id = ended.id if gang_id is None else None
    events = yield from Verbs.events(job_id=job_id, gang_id=gang_id, kind="cancel", limit=None)
    said = [event.reason for event in events if event.reason]
    return said[-1] if said else otherwise


def cancel(handle: Handle[Any, Any], reason: str | None = None) -> Steps[str]:
    """Cancel it; return its state now: while it is being stopped a job is `preempting`, and a gang `draining`."""
    return (yield from _state_after(handle, (yield from Verbs.cancel(**_named(handle), reason=reason))))


def retry(handle: Handle[Any, Any]) -> Steps[str]:
    """Run it again under the same id; return its state now. A job may have ended in any way, done ones included; a
    gang must have failed or been cancelled.

    `gangq.jobs` then shows a job's new ending; the old one stays in `gangq.history`.
    """
    return (yield from _state_after(handle, (yield from Verbs.retry(**_named(handle)))))


def _named(handle: Handle[Any, Any]) -> dict[str, Any]:
    """As an argument of the verbs that take jobs and gangs."""
    return {f"{handle.kind}_ids": [handle.id]}


def _state_after(handle: Handle[Any, Any], changed: Sequence[StateChange]) -> Steps[str]:
    """Of a job as the verb says it: a second statement could fail although the first one has taken effect."""
    return str(changed[0].state) if handle.kind == "job" else (yield from state(handle))


def state(handle: Handle[Any, Any]) -> Steps[str]:
    """Return its state now.

    That of a batch is waiting (no job has started), running, then failed if a job has failed, cancelled if one was
    cancelled, else done.
    """
    return str((yield from row(handle)).state)


def row(handle: Handle[Any, Row]) -> Steps[Row]:
    """Return it as `gangq.jobs`, `gangq.gangs` or `gangq.batches` shows it. A batch says there how many of its jobs
    are waiting, running, done, failed and cancelled.
    """
    found: Row = yield from _ROW[handle.kind](id=handle.id)
    handle.seen = Status.of(found)
    return found


_ROW: Mapping[str, Verb[..., Any]] = {"job": Verbs.job, "gang": Verbs.gang, "batch": Verbs.batch}


def status(handle: Handle[Any, Any]) -> Steps[Status]:
    """Return its task and state, and its progress (of a gang that of its slowest member, of a batch how many of its
    jobs are done, failed and running), why it waits, or why it failed.
    """
    found = yield from row(handle)
    if handle.kind == "batch":
        return Status.of(found)
    why = ""
    if found.state in WAITS:
        asked = (
            Verbs.explain_job(job_id=found.id)
            if handle.kind == "job"
            else Verbs.explain_gang(gang_id=found.id)
        )
        why = why_it_waits(holding((yield from asked)))
    elif handle.kind == "gang" and found.state == "running":
        why = slowest((yield from _members(found.id)))
    handle.seen = Status.of(found, why)
    return handle.seen


def events(handle: Handle[Any, Any]) -> Steps[list[EventRow]]:
    """Return what happened to it, in order: to a job only what is out of the ordinary, to a gang everything."""
    asked: dict[str, Any] = {f"{handle.kind}_id": handle.id}
    return (yield from Verbs.events(**asked, limit=None))


def logs(handle: Handle[Any, Any]) -> Steps[str]:
    """Return the output of its latest attempt of which some is kept. Raises `NotAllowed`.

    Of a handler inside the worker that is what it printed or logged to `sys.stdout` and `sys.stderr`, and its
    threads too; what a subprocess or a C library wrote is in the worker's own output only.
    """
    return (yield from _logs(handle.id))


def _logs(job_id: int) -> Steps[str]:
    _may_read((yield from Verbs.job(id=job_id)), "the output")
    kept = yield from Verbs.logs(job_id=job_id)
    latest = max((chunk.token for chunk in kept), default=0)
    return "".join(chunk.chunk for chunk in kept if chunk.token == latest)


# Steps of a gang --------------------------------------------------------------------------------------------


def gang_results(handle: Handle[R, Any], timeout: Duration | None = None) -> Steps[list[R]]:
    """Wait, and return what each member returned, by rank.

    Raises `JobFailed` (with the error of a member that failed), `JobCancelled`, `WaitTimeout`, `NotAllowed` or
    `ResultNotStored`, as `result` of a job does.
    """
    gang = yield from _at_its_end(handle, timeout, row, lambda gang: [gang.state])
    members = yield from _members(handle.id)
    if gang.state == "done":
        return [_stored(member) for member in members]
    what = f"{handle.phrase} (task {gang.task})"
    if gang.state == "failed":
        culprit = next((m for m in members if m.state == "failed" and m.error), None)
        culprit = culprit or next((m for m in members if m.error), None)
        raise _failure(what, culprit, gang.reason)
    reason = yield from _cancelled_because(gang, gang.reason)
    raise JobCancelled(f"{what} was cancelled" + _because(reason), reason=reason)


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def gang_result(handle: Handle[R, Any], timeout: Duration | None = None) -> Steps[R]:
    """Wait, and return what rank 0 returned; raises as `results` does."""
    return (yield from gang_results(handle, timeout))[0]


def gang_timeline(handle: Handle[Any, Any]) -> Steps[list[TimelineRow]]:
    """Return the gang's life in order, by epoch."""
    return (yield from Verbs.timeline(gang_id=handle.id))


def gang_logs(handle: Handle[Any, Any]) -> Steps[list[str]]:
    """Return the output of each member as of a job, by rank."""
    found = []
    for member in (yield from _members(handle.id)):
        found.append((yield from _logs(member.id)))
    return found


def _members(gang_id: int) -> Steps[list[JobRow]]:
    found = yield from Verbs.jobs(gang_id=gang_id, limit=None)
    return sorted(found, key=lambda member: member.rank or 0)


def member_ids(gang_id: int) -> Steps[list[int]]:
    """Return the ids of a gang's members, by rank. Raises `NotFound`."""
    found = yield from _members(gang_id)
    if not found:
        raise NotFound(
            f"gang g{gang_id} does not exist: never committed, past its retention, or another database"
        )
    return [member.id for member in found]


# Steps of a batch -------------------------------------------------------------------------------------------


def batch_results(
    handle: Handle[R, Any], timeout: Duration | None = None, *, return_exceptions: bool = False
) -> Steps[list[R]]:
    """Wait, and return what each job returned, in order.

    Raises `JobFailed` or `JobCancelled` for the first job that is not done, and `WaitTimeout`, `NotAllowed` or
    `ResultNotStored`, as `result` of a job does. `return_exceptions`: what would be raised for a job stands in its
    place, as with `asyncio.gather`.
    """
    jobs = yield from _at_its_end(handle, timeout, _batch_jobs, lambda jobs: [job.state for job in jobs])
    batch = yield from row(handle)
    if return_exceptions:
        return [_stored_or_problem(job) for job in jobs]
    culprit = next((job for job in jobs if job.state != "done"), None)
    if culprit is None:
        return [_stored(job) for job in jobs]
    what = f"{handle.phrase} ({batch.name}, {batch_in_words(batch)}): job {culprit.id} (index {culprit.array_index})"
    reason = _own_words(culprit)
    if culprit.state == "cancelled":
        reason = yield from _cancelled_because(culprit, reason)
    raise _problem(culprit, what, reason)


def _batch_jobs(handle: Handle[Any, Any]) -> Steps[list[JobRow]]:
    return sorted((yield from Verbs.jobs(batch_id=handle.id, limit=None)), key=lambda job: job.id)


def _stored_or_problem(job: JobRow) -> Any:
    if job.state != "done":
        return _problem(job, f"job {job.id} (task {job.task})", _own_words(job))
    try:
        return _stored(job)
    except (NotAllowed, ResultNotStored) as problem:
        return problem


def batch_cancel(handle: Handle[Any, Any], reason: str | None = None) -> Steps[str]:
    """Cancel the jobs that have not ended; return the batch's state now: `running` while some are being stopped."""
    states = yield from Verbs.job_states(batch_id=handle.id)
    live = sorted(id for id, state in states.items() if state not in ENDED)
    if live:
        yield from Verbs.cancel(job_ids=live, reason=reason)
    return (yield from state(handle))


def batch_retry_failed(handle: Handle[Any, Any]) -> Steps[int]:
    """Run the jobs that have failed again, under their ids; return how many."""
    changed = yield from Verbs.retry_failed(batch_id=handle.id)
    return sum(1 for change in changed if change.state != "left")


def batch_job_ids(batch_id: int) -> Steps[list[int]]:
    """Return the ids of a batch's jobs, in order. Raises `NotFound`."""
    yield from Verbs.batch(id=batch_id)
    return sorted((yield from Verbs.job_states(batch_id=batch_id)))

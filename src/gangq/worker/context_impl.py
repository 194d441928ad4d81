"""The :class:`gangq.context.Context` of a handler that runs inside the worker process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from gangq.client.rows import GangSubmitted
from gangq.client.verb import Verb
from gangq.client.verbs import Verbs
from gangq.context import Checkpoint, Context, DeviceInfo, GangInfo, JobInfo
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput, Stopped
from gangq.worker import handler_info
from gangq.worker.jobs import ActiveJob
from gangq.worker.results import dumps_result
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.context import Logger


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # not generic before Python 3.11


class _JobLogger(_Adapter):
    """Adds fields of the job to every record, and keeps those that the handler gives (`extra=`)."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """As `LoggerAdapter`, which drops the caller's fields."""
        return msg, {**kwargs, "extra": {**(kwargs.get("extra") or {}), **(self.extra or {})}}


def job_log(info: JobInfo, gang: GangInfo | None) -> Logger:
    """A logger that says on every record whose it is."""
    extra: dict[str, object] = {"job": info.id, "token": info.token}
    if gang is not None:
        extra |= {"gang": gang.id, "epoch": gang.epoch, "rank": gang.rank}
    return _JobLogger(logging.getLogger(f"gangq.task.{info.task}"), extra)


def call_each(callbacks: Sequence[Callable[[GangInfo], None]], gang: GangInfo, log: Logger) -> None:
    """Call every callback for a new epoch. What one raises is logged."""
    for callback in callbacks:
        try:
            callback(gang)
        except Exception:
            log.exception("on_gang_change_failed")


class StopFlag:
    """Whether to stop, and whether the handler has *seen* that it should.

    A handler that returns None after it saw the flag has broken off its loop; one that never looked has done
    its work to the end. Only the first must not be taken for done.
    """

    def __init__(self, event: threading.Event) -> None:
        self._event = event
        self.seen = False

    def look(self) -> bool:
        """The flag, for the handler."""
        if self._event.is_set():
            self.seen = True
        return self.seen

    def wait(self, timeout: Duration | None) -> bool:
        """The flag, once it is up or the time is."""
        self._event.wait(None if timeout is None else seconds(timeout, "timeout"))
        return self.look()


class InlineContext(Context):
    """Answers from the claim; what the handler stores goes over the worker's own connections."""

    def __init__(self, session: Session, job: ActiveJob, gang: GangInfo | None) -> None:
        self._session = session
        self._active = job
        self._info: JobInfo | None = None
        self._changed: threading.Event | None = None
        self._callbacks: list[Callable[[GangInfo], None]] = []
        if job.gang is None:
            job.gang = gang
        if job.gang is not None:
            job.on_gang = self._gang_changed
        self._loaded_for: int | None = None
        self._checkpoint: Checkpoint | None = None
        self._inputs: dict[int, Any] | None = None
        self._lock = threading.Lock()
        # Made for those who ask, as in the job: they cost more than a small job.
        self._made_lock = threading.Lock()
        self._flag: StopFlag | None = None

    @property
    def stop_flag(self) -> StopFlag:
        """The one flag of this job: what any thread of the handler has seen counts."""
        with self._made_lock:
            if self._flag is None:
                self._flag = StopFlag(self._active.stopping)
            return self._flag

    @property
    def job(self) -> JobInfo:
        if self._info is None:
            self._info = handler_info.job_info(self._active)
        return self._info

    @property
    def gang(self) -> GangInfo | None:
        return self._active.gang

    @property
    def gang_changed(self) -> threading.Event:
        with self._made_lock:
            if self._changed is None:
                self._changed = threading.Event()
            return self._changed

    def on_gang_change(self, callback: Callable[[GangInfo], None]) -> None:
        self._callbacks.append(callback)

    def _gang_changed(self, gang: GangInfo) -> None:
        self.gang_changed.set()
        call_each(self._callbacks, gang, self.log)

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return handler_info.device_infos(self._active)

    @property
    def checkpoint(self) -> Checkpoint | None:
        with self._lock:
            gang = self._active.gang
            epoch = 0 if gang is None else gang.epoch
            if self._loaded_for != epoch:
                self._checkpoint = self._fetch_checkpoint()
                if self._active.must_end and self._checkpoint is None:
                    # The stop came before an answer. None would mean "from the beginning", which may be wrong.
                    self.stop_flag.look()
                    raise Stopped(f"job {self._active.id} was told to stop while it loaded its checkpoint")
                self._loaded_for = epoch
            return self._checkpoint

    def _fetch_checkpoint(self) -> Checkpoint | None:
        job, session = self._active, self._session
        return handler_info.fetch_checkpoint(session, job, session.directory / f"{job.id}-{job.token}")

    @property
    def inputs(self) -> dict[int, Any]:
        with self._lock:
            if self._inputs is None:
                found = handler_info.fetch_inputs(self._session, self._active)
                self._inputs = handler_info.inputs_from_wire(found)
            return self._inputs

    @property
    def log(self) -> Logger:
        return job_log(self.job, self._active.gang)

    def beat(
        self, step: int | None = None, total: int | None = None, phase: str | None = None, **data: Any
    ) -> None:
        self._active.beat(progress(step, total, phase, data))

    def set_model(self, name: str | None) -> None:
        self._session.model = name

    @property
    def stopping(self) -> bool:
        return self.stop_flag.look()

    def wait_stopping(self, timeout: Duration | None = None) -> bool:
        return self.stop_flag.wait(timeout)

    def save_checkpoint(self, step: int, data: bytes) -> None:
        handler_info.store_checkpoint(self._session, self._active, step, data)

    def submit_child(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return submit_child(self._session, self._active, verb, arguments)

    def complete(self, connection: object, result: Any = None) -> None:
        self._session.thread_client.complete(
            job_ids=[self._active.id],
            tokens=[self._active.token],
            results=[dumps_result(result, f"the result of job {self._active.id}")],
            connection=connection,
        )
        # Before the caller commits: the heartbeat that finds the claim gone may be the very next thing.
        self._active.completed_by_handler = True


def submit_child(session: Session, job: ActiveJob, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Submit in the job's name; see `Context.submit_child`."""
    verbs: dict[str, Verb[..., Any]] = {"submit": Verbs.submit_child, "submit_gang": Verbs.submit_child_gang}
    declared = verbs.get(verb)
    if declared is None:
        raise InvalidInput(f"a job submits with submit or submit_gang, not with {verb!r}")
    try:
        query = declared(job_id=job.id, token=job.token, **arguments)
    except TypeError as problem:
        raise InvalidInput(f"{verb}: {problem}") from problem
    made = session.thread_client.execute(query)
    if isinstance(made, GangSubmitted):
        return made._asdict()
    return {"job_ids": made, "gang_id": None, "note": None}


def progress(step: int | None, total: int | None, phase: str | None, data: dict[str, Any]) -> dict[str, Any]:
    """A beat as it is stored: what was given, without the rest."""
    named = {"step": step, "total": total, "phase": phase}
    return {**{name: value for name, value in named.items() if value is not None}, **data}

"""What the :class:`gangq.context.Context` of every job has in common, and that of a handler in the worker's process.

:class:`InlineContext` is made by :mod:`gangq.worker.runner_inline`. The one of a child process, which talks to the
worker over a socket, is in :mod:`gangq.worker.child_context`; the one of tests is `gangq.testing.FakeContext`.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from gangq.client import Client
from gangq.client.encoding import dumps
from gangq.client.submitter_verbs import new_request_id
from gangq.client.verb import Verb
from gangq.client.verbs import Verbs
from gangq.context import Checkpoint, Context, DeviceInfo, GangInfo, JobInfo, ServiceInfo
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput, Snoozed, WrongState
from gangq.worker import handler_info
from gangq.worker.jobs import ActiveJob
from gangq.worker.results import dumps_result
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.context import Logger

SUBMITS: dict[str, Verb[..., Any]] = {
    verb.name: verb
    for verb in (Verbs.submit, Verbs.submit_gang, Verbs.submit_unique, Verbs.submit_unique_gang)
}
"""What a job may call."""


class _JobLogger(logging.LoggerAdapter[logging.Logger]):
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


class HandlerContext(Context):
    """What a context does wherever its handler runs. How it talks to the worker is what the subclasses add.

    A subclass sets :attr:`_gang` for each new epoch and calls :meth:`_gang_changed` then.
    """

    _poll_s: ClassVar[float] = 3600.0
    """How often :meth:`_poll` has to be called for a stop to be noticed in time."""

    def __init__(self) -> None:
        self._gang: GangInfo | None = None
        """Its place in its gang, as far as it is known here."""
        self.stop_seen = False
        """Whether any thread of the handler has seen that it should stop. One that returns None after that has broken
        off its loop; one that never looked has done its work to the end. Only the first must not be taken for done.
        """
        self._callbacks: list[Callable[[GangInfo], None]] = []
        self._loaded_for: int | None = None
        """The epoch whose checkpoint is loaded, 0 without a gang; None: none is."""
        self._checkpoint: Checkpoint | None = None
        self._inputs: dict[int, Any] | None = None
        self._lock = threading.RLock()
        self._made_lock = threading.Lock()
        self._changed: threading.Event | None = None

    # -- how it talks to the worker --------------------------------------------------------------------------

    @property
    @abstractmethod
    def _stop_event(self) -> threading.Event:
        """Set once it has to stop."""

    @abstractmethod
    def _load_checkpoint(self) -> Checkpoint | None:
        """The checkpoint of the present epoch. None where there is none, or the stop came before the answer."""

    @abstractmethod
    def _load_inputs(self) -> dict[int, Any]:
        """What came of the jobs it waited for."""

    @abstractmethod
    def _send_beat(self, data: dict[str, Any]) -> None:
        """Pass a beat on. Never raises."""

    @abstractmethod
    def _say_completed(self) -> None:
        """The handler has completed the job in its own transaction, which it is about to commit."""

    def _say_snoozed(self, for_s: float) -> None:
        """The handler is about to leave with `Snoozed`, where whoever runs it does not see that."""

    def _poll(self) -> None:
        """Ask for a stop and a new epoch, where these do not arrive by themselves."""

    def _follow_gang(self) -> None:
        """From now on learn of new epochs without :meth:`_poll`."""

    @property
    def told_to_stop(self) -> bool:
        """Whether it has to stop, for those who are not its handler: asks nobody, and is not seen by it."""
        return self._stop_event.is_set()

    # -- the same everywhere ---------------------------------------------------------------------------------

    @property
    def gang(self) -> GangInfo | None:
        if self._gang is not None:
            self._poll()
        return self._gang

    @property
    def gang_changed(self) -> threading.Event:
        self._follow_gang()
        with self._made_lock:
            if self._changed is None:
                self._changed = threading.Event()
            return self._changed

    def on_gang_change(self, callback: Callable[[GangInfo], None]) -> None:
        self._callbacks.append(callback)
        self._follow_gang()

    def _gang_changed(self, gang: GangInfo) -> None:
        self.gang_changed.set()
        call_each(self._callbacks, gang, self.log)

    @property
    def checkpoint(self) -> Checkpoint | None:
        gang = self.gang
        epoch = 0 if gang is None else gang.epoch
        with self._lock:
            if self._loaded_for != epoch:
                self._checkpoint = self._load_checkpoint()
                self._loaded_for = epoch
            return self._checkpoint

    @property
    def inputs(self) -> dict[int, Any]:
        with self._lock:
            if self._inputs is None:
                self._inputs = self._load_inputs()
            return self._inputs

    @property
    def log(self) -> Logger:
        return job_log(self.job, self._gang)

    def beat(
        self, step: int | None = None, total: int | None = None, phase: str | None = None, **data: Any
    ) -> None:
        self._send_beat(progress(step, total, phase, data))

    @property
    def stopping(self) -> bool:
        self._poll()
        if self._stop_event.is_set():
            self.stop_seen = True
        return self.stop_seen

    def wait_stopping(self, timeout: Duration | None = None) -> bool:
        until = math.inf if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        while not self.stopping and (left := until - time.monotonic()) > 0:
            self._stop_event.wait(min(left, self._poll_s))
        return self.stopping

    def snooze(self, delay: Duration) -> NoReturn:
        for_s = seconds(delay, "the delay", most=1e7)
        if self._gang is not None:
            raise no_snooze(self.job.id, self._gang.id)
        self._say_snoozed(for_s)
        raise Snoozed(for_s)

    def complete(self, connection: object, result: Any = None) -> None:
        # A client without an address: with the caller's connection it needs none.
        Client().complete(
            job_ids=[self.job.id],
            tokens=[self.job.token],
            results=[dumps_result(result, f"the result of job {self.job.id}")],
            connection=connection,
        )
        # Before the caller commits: the heartbeat that finds the claim gone may be the very next thing.
        self._say_completed()


class InlineContext(HandlerContext):
    """For a handler in the worker's own process: answers from the claim, and calls over the worker's connections."""

    def __init__(self, session: Session, job: ActiveJob) -> None:
        super().__init__()
        self._session = session
        self._active = job
        self._info: JobInfo | None = None
        self._directory: Path | None = None
        """Where its checkpoint lies as a file; None: it has not asked for one."""
        self._telling = threading.Lock()
        if job.gang is not None:
            self._gang = job.follow_gang(self._gang_changes)

    def _gang_changes(self, gang: GangInfo) -> None:
        self._gang = gang
        # Not here: this is the control loop, which renews the lease and makes the calls of a callback.
        threading.Thread(target=self._call_back, args=(gang,), name="gangq-gang", daemon=True).start()

    def _call_back(self, gang: GangInfo) -> None:
        with self._telling:
            self._gang_changed(gang)

    @property
    def job(self) -> JobInfo:
        if self._info is None:
            self._info = handler_info.job_info(self._active)
        return self._info

    @property
    def _stop_event(self) -> threading.Event:
        return self._active.stopping

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return handler_info.device_infos(self._active)

    @property
    def service(self) -> ServiceInfo | None:
        return None if self._active.replica is None else self._active.replica.service

    def ready(self, ready: bool = True, *, port: int | None = None) -> None:
        if self._active.replica is not None:
            self._active.replica.ready(ready, port)

    def load(self, load: float) -> None:
        if self._active.replica is not None:
            self._active.replica.busy(load)

    def _load_checkpoint(self) -> Checkpoint | None:
        job, session = self._active, self._session
        self._directory = session.directory / f"{job.id}-{job.token}"
        return handler_info.fetch_checkpoint(session, job, self._directory)

    def close(self) -> None:
        """The handler has returned: no file of it stays."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _load_inputs(self) -> dict[int, Any]:
        return handler_info.inputs_from_wire(handler_info.fetch_inputs(self._session, self._active))

    def _send_beat(self, data: dict[str, Any]) -> None:
        self._active.beat(data)

    def set_model(self, name: str | None) -> None:
        self._session.model = name

    def save_checkpoint(self, step: int, data: bytes) -> None:
        handler_info.store_checkpoint(self._session, self._active, step, data)

    def submit_child(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return submit_child(self._session, self._active, verb, arguments)

    def _say_completed(self) -> None:
        self._active.say_completed()


def no_snooze(job_id: int, gang_id: int) -> WrongState:
    """The refusal of what a member asks for that only a single job may."""
    return WrongState(
        f"job {job_id} is a member of gang g{gang_id}, and a member cannot be snoozed: the others of its gang would "
        "wait for it. Fail, and the gang is drained and placed again as a whole."
    )


def submit_child(session: Session, job: ActiveJob, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Submit on behalf of the job's submitter; see `Context.submit_child`."""
    declared = SUBMITS.get(verb)
    if declared is None:
        raise InvalidInput(f"a job submits with {', '.join(SUBMITS)}, not with {verb!r}")
    options = _options(arguments.get("options"), verb)
    given = {**arguments, "options": options}
    with_id = given if "request_id" in declared.types else options
    with_id["request_id"] = with_id.get("request_id") or new_request_id()
    options |= {"parent": job.id, "parent_token": job.token}
    made = session.thread_client.execute(declared.of_encoded({**given, "options": dumps(options, "options")}))
    return {"job_ids": made} if isinstance(made, list) else made._asdict()


def _options(given: object, verb: str) -> dict[str, Any]:
    """The options that a job has encoded."""
    try:
        options = json.loads(given) if isinstance(given, str) else given or {}
    except ValueError as problem:
        raise InvalidInput(f"the options of {verb} are no JSON: {problem}") from problem
    if not isinstance(options, dict):
        raise InvalidInput(f"the options of {verb} are one JSON object, not {given!r:.100}")
    return options


def progress(step: int | None, total: int | None, phase: str | None, data: dict[str, Any]) -> dict[str, Any]:
    """A beat as it is stored: what was given, without the rest."""
    named = {"step": step, "total": total, "phase": phase}
    return {**{name: value for name, value in named.items() if value is not None}, **data}

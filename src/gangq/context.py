"""What a handler is told about its job, and what it may say back.

A handler receives a `Context` as its first argument; `gangq.current()` finds it from anywhere inside. The
worker implements it twice with one meaning: in its own process for inline handlers, over the Unix socket in
`GANGQ_SOCKET` for children.
"""

from __future__ import annotations

import contextvars
import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from gangq.durations import Duration
from gangq.errors import GangqError, Stopped

if TYPE_CHECKING:
    import logging

    Logger = logging.LoggerAdapter[logging.Logger]


@dataclass(frozen=True)
class JobInfo:
    """The job a handler works on. `payload` is what was submitted; `budget_s` is None without a budget.

    `index`: its place in its batch, from 0; None: it is of no batch.
    """

    id: int
    token: int
    attempt: int
    max_attempts: int
    queue: str
    task: str
    priority: int = 0
    payload: Mapping[str, Any] = field(default_factory=dict)
    budget_s: float | None = None
    index: int | None = None


@dataclass(frozen=True)
class Peer:
    """One member of the gang, this one included."""

    rank: int
    job_id: int
    host: str
    worker: str
    role: str = "member"


@dataclass(frozen=True)
class GangInfo:
    """Who this member is in its gang. `epoch` rises with every reservation: fence side effects with it.

    `peers` lists every member of this epoch by rank; rank 0 is to be found at `master_addr`:`master_port`.
    `role_rank` is this member's rank among those of its role.
    """

    id: int
    epoch: int
    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    local_world_size: int
    peers: tuple[Peer, ...]
    master_addr: str
    master_port: int
    role: str = "member"
    role_rank: int = 0


@dataclass(frozen=True)
class ServiceInfo:
    """The service that this replica belongs to. `port`: one that is free for it on its host, to listen at; `health`:
    the path or URL that its worker polls, None: the replica calls `Context.ready` itself.
    """

    name: str
    revision: int
    port: int
    health: str | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """A device this job holds alone. `index` is the host's; `source` is nvml, amdsmi or declared."""

    uuid: str
    index: int
    vram_mb: int
    source: str = "declared"


@dataclass(frozen=True)
class Checkpoint:
    """The state an earlier attempt saved: at which `step`, its bytes, and a file with the same bytes."""

    step: int
    data: bytes
    path: Path


class Context(ABC):
    """What a handler uses: facts about its job, and the few things it may tell gangq.

    Every method is safe to call from any thread of the handler.
    """

    @property
    @abstractmethod
    def job(self) -> JobInfo:
        """The job."""

    @property
    def token(self) -> int:
        """The fencing token of this attempt: larger than that of every earlier one, never reused."""
        return self.job.token

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1."""
        return self.job.attempt

    @property
    def index(self) -> int | None:
        """The place of this job in its batch, from 0; None: it is of no batch."""
        return self.job.index

    @property
    @abstractmethod
    def gang(self) -> GangInfo | None:
        """Its place in its gang; None for a solo job. Replaced as a whole when a new epoch begins around it."""

    @property
    def gang_changed(self) -> threading.Event:
        """Set when `gang` has become another one while this member runs; clear it before you look.

        That is so when another member was replaced (failure policy restart_member) or the gang goes on with fewer
        (shrink, or surplus members displaced). From then on `checkpoint` is what the new epoch restores. Never
        set for a solo job.
        """
        return threading.Event()

    def on_gang_change(self, callback: Callable[[GangInfo], None]) -> None:  # noqa: B027 - a solo job has no gang
        """Have `callback` called with each new `gang`, in a thread of gangq; what it raises is only logged."""

    @property
    def service(self) -> ServiceInfo | None:
        """The service that this replica belongs to; None: it is no replica of one."""
        return None

    def ready(self, ready: bool = True, *, port: int | None = None) -> None:  # noqa: B027 - only replicas serve
        """Take requests from now on, or no more: its gang is in `gangq.endpoints` while all its members are ready.

        `port` [`service.port`]: where it listens; 0: nowhere (a rank that works behind another one). Where the
        service has a health URL its worker says so instead. Does nothing for what is no replica, or was told to stop.
        """

    def load(self, load: float) -> None:  # noqa: B027
        """Say how busy this replica is, 0 or more; 1 is as much as it should have. The latest is sent once a second
        at most, and forgotten after 60 s: say it again. Does nothing for what is no replica.
        """

    @property
    @abstractmethod
    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices it holds; the visible-devices variables are already set to them."""

    @property
    @abstractmethod
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint to resume from, of the present epoch; None: start from the beginning."""

    @property
    @abstractmethod
    def inputs(self) -> Mapping[int, Any]:
        """What came of the jobs that this one was submitted to wait for, by id: the result of each.

        In place of a result stands, as a value, `JobFailed`, `JobCancelled`, `ResultNotStored`, or `NotAllowed` where
        the submitter of this job may not read it. A gang is there by its members. A job that history has dropped, or
        that has not ended because this one was retried by hand, is missing. Asked for once, when first used.
        SQL: gangq.inputs. Raises `StaleToken` when the claim is over, and `TooLarge` for more than 16 MiB.
        """

    @property
    @abstractmethod
    def log(self) -> Logger:
        """A logger that adds job, token, gang and rank to every record."""

    @abstractmethod
    def beat(
        self, step: int | None = None, total: int | None = None, phase: str | None = None, **data: Any
    ) -> None:
        """Report progress: cheap, never waits for the database; the next heartbeat carries the latest one.

        From the first beat on the stall watchdog expects the next one in time. `phase` tells it what to make
        of a silence: "load" and "save" may take as long as loading may, "long" is exempt for an hour, "wait" until
        the next beat (for a lock, a quota, a peer), any other word is work like "run". `step` is compared between
        the members of a gang. Never raises: NaN and infinity become null, scalars of numpy and torch numbers, other
        things that JSON does not have their repr, cut short. Of a beat over 16 KiB only step, total, phase and `loss`
        are kept. The log says so once.
        """

    @abstractmethod
    def set_model(self, name: str | None) -> None:
        """Say which model this process has loaded: jobs that need it start here if there is room.

        A job submitted with `model` says so by itself when it begins. In a child process this changes nothing:
        what it loaded ends with it.
        """

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """True once this job has been told to stop: save what you need and return or raise `Stopped`."""

    @abstractmethod
    def wait_stopping(self, timeout: Duration | None = None) -> bool:
        """Sleep until told to stop, or `timeout` (seconds, "90s", a timedelta; None: for ever); return `stopping`."""

    def raise_if_stopping(self) -> None:
        """Raise `Stopped` once this job has been told to stop: the short way out of a deep loop."""
        if self.stopping:
            raise Stopped(f"job {self.job.id} was told to stop")

    @abstractmethod
    def snooze(self, delay: Duration) -> NoReturn:
        """Hand the job back, to be run again after `delay`: leave the handler by raising `Snoozed`.

        For a job that finds that it has to wait: for a file, a quota, a service. A snooze is counted, and no attempt,
        crash or stop; past `max_snoozes` [100] the job fails. Call it in the handler's own thread. A program that is
        no handler ends with status 0. Raises `WrongState` in a gang, whose other members would wait: a gang is
        drained instead. SQL: gangq.snooze.
        """

    @abstractmethod
    def save_checkpoint(self, step: int, data: bytes) -> None:
        """Store `data` as the state at `step`; returns once it is committed (SQL: gangq.save_checkpoint).

        Raises `StaleToken` when the claim is over and `TooLarge` over the limit [1 MiB]: save larger ones to
        shared storage, and only their address here.
        """

    @abstractmethod
    def complete(self, connection: object, result: Any = None) -> None:
        """Finish this job inside the transaction of `connection`: its effects and `done` commit together.

        Takes what `submit(connection=)` takes and never commits it. Return from the handler after committing;
        what it returns then is ignored. Raises `StaleToken` when the claim is over: roll back.
        """

    @abstractmethod
    def submit_child(self, verb: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """For an App inside the job: call `verb` (submit, submit_gang, ...) for the job.

        `arguments` are the parameters of its query. Returns the columns of the SQL function by name, and of submit
        the ids as job_ids. Raises `StaleToken` when the claim is over, and what the verb raises.
        """


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("gangq_context", default=None)
_of_process: Context | None = None
# Where a child finds its worker: a module with `connect() -> Context`. Imported by name and only when needed,
# because nothing but a child of a worker should pay for it.
_CHILD_MODULE = "gangq.worker.child_context"


def current() -> Context:
    """Return the Context of the job this code runs for: a handler's, or a command's over `GANGQ_SOCKET`.

    Works in the handler, in threads it started, and in any process below a command. Raises `GangqError`
    outside of a job.
    """
    context = find_current()
    if context is not None:
        return context
    raise GangqError("no job runs here: call gangq.current() in a handler or in a command that gangq started")


def find_current() -> Context | None:
    """Return what `current` returns, and None outside of a job."""
    global _of_process
    context = _current.get() or _of_process
    if context is None and os.environ.get("GANGQ_SOCKET"):
        context = _of_process = cast("Context", importlib.import_module(_CHILD_MODULE).connect())
    return context


def runs_handler() -> bool:
    """Whether a handler runs in this process now."""
    return _of_process is not None


def set_current_of_task(context: Context) -> None:
    """For a process of many jobs: make it the one that `current()` returns in this task of asyncio, and in what that
    starts in it.
    """
    _current.set(context)


def set_current(context: Context | None) -> None:
    """For the worker: make `context` the one that `current()` returns here; None when the handler has ended.

    An inline worker runs one handler at a time, so threads the handler starts (which begin with an empty
    contextvars context) find it too.
    """
    global _of_process
    _current.set(context)
    _of_process = context

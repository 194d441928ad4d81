"""What the three watchdogs have in common: one long-lived thread each, started and stopped per job by writing an
attribute.

A worker runs thousands of small jobs a second, so nothing is created, woken or joined per job: the thread polls.

The watchdog of a finished job must never end the next one. So a trip begins under the same lock under which a job
ends. If the job was over first, nothing happens. If the trip was first, :meth:`Watch.stop` does not return before the
process has ended or the trip was called off.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypedDict, TypeVar

from gangq import logqueue
from gangq.errors import GangqError
from gangq.proc.clock import boottime
from gangq.watchdogs import pending, signs
from gangq.watchdogs.findings import OnSuspect, OnTrip, Suspicion, Trip
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.pauses import PauseMeter
from gangq.watchdogs.trip import leave_now

if TYPE_CHECKING:
    from typing import Self, Unpack

_FAULT_WAIT_S = 60.0
_SUSPICIONS_KEPT = 100

J = TypeVar("J", bound="Watched")


class Setup(TypedDict, total=False):
    """What every watchdog's constructor takes besides its own limits.

    ``name`` is that of the thread. ``clock`` is in seconds, those asleep included; ``poll_s`` is how long
    the thread waits. ``on_trip`` carries a trip out [dump stacks, exit]; ``on_suspect`` is called
    with suspicions. ``pauses`` measures the pauses of this process. ``threads`` [true] false: none is started, so
    nothing is seen but by :meth:`Watch.check`, which also passes suspicions on in the thread that calls it.
    """

    name: str
    clock: Callable[[], float]
    poll_s: float
    on_trip: OnTrip | None
    on_suspect: OnSuspect | None
    pauses: PauseMeter | None
    threads: bool


class Watched:
    """One job under one watchdog."""

    __slots__ = ("job", "paused", "since", "suspected")

    def __init__(self, since: float, paused: float, job: Any) -> None:
        self.since = since
        self.paused = paused
        """Pauses counted before it began."""
        self.job = job
        self.suspected = False

    def ran_s(self, now: float, paused: float) -> float:
        """How long it has been running, pauses not counted, seconds."""
        return now - self.since - (paused - self.paused)


class Watch(ABC, Generic[J]):
    """A thread that looks at the present job every ``poll_s`` seconds; see the module for what that guarantees.

    A context manager around one job: entering starts unless :meth:`start` did, leaving stops. The same object
    serves any number of jobs, one at a time.
    """

    _class: ClassVar[str]
    """The class of a suspicion that names none, and the name of its log. A trip has the class of its code, and one
    watchdog may have several codes.
    """
    _thread_name: ClassVar[str]
    _default_poll_s: ClassVar[float] = 0.5

    def __init__(self, **setup: Unpack[Setup]) -> None:
        """Raises `InvalidInput` for a number that makes no sense, by name."""
        self.name = setup.get("name", self._thread_name)
        self._clock = setup.get("clock", boottime)
        self.pauses = setup.get("pauses") or PauseMeter(name=self.name, clock=self._clock)
        """The pauses of this process that the thread has met; they move every deadline."""
        self._threads = setup.get("threads", True)
        self._closing = threading.Event()
        self._poll_s = length_s("poll_s", setup.get("poll_s", self._default_poll_s), most=3600)
        self._on_trip = setup.get("on_trip") or leave_now
        self._on_suspect = setup.get("on_suspect")
        self._log = logging.getLogger(f"gangq.watchdogs.{self._class}")
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._job: J | None = None
        self._tripping: int | None = None
        self._thread: threading.Thread | None = None
        self._suspicions: _SuspicionQueue | None = None

    # -- per job ---------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Self:
        """Watch a job with what the constructor was given."""

    def stop(self) -> None:
        """The job is over. Returns at once, unless a trip of it has begun: then only once that was called off.

        A trip that is carried out ends the process, and this call with it.
        """
        with self._lock:
            self._job = None
            if self._tripping is not None:
                self._settle()

    def close(self) -> None:
        """Stop, and end the thread. Not needed at the end of a process: the thread is a daemon."""
        self._closing.set()
        self.stop()
        thread, suspicions = self._thread, self._suspicions
        if suspicions is not None:
            suspicions.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * self._poll_s)

    def __enter__(self) -> Self:
        if self._job is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def watching(self) -> bool:
        """Whether a job is being watched."""
        return self._job is not None

    def check(self, now: float | None = None) -> None:
        """Look at the present job once, at the instant ``now`` [the clock's]: what the thread does every ``poll_s``
        seconds.
        """
        job = self._job
        if job is not None:
            with logqueue.lines_about(job.job):
                self._look(job, self._clock() if now is None else now)

    # -- for the watchdogs -----------------------------------------------------------------------------------

    @abstractmethod
    def _look(self, job: J, now: float) -> None:
        """Judge the present job, and suspect or trip it."""

    def _begin(self, job: J) -> None:
        with self._lock:
            if self._closing.is_set():
                raise GangqError(f"{self.name} is closed: make a new one for further jobs")
            if self._tripping is not None:
                self._settle()
            self._job = job
        if self._thread is None and self._threads:
            self._spawn()

    def _settle(self) -> None:
        # What a trip itself calls (a test's, or a worker's that ends the job in the trip) must not wait for it.
        while self._tripping is not None and self._tripping != threading.get_ident():
            self._settled.wait()

    def _suspect(self, job: J, message: str, evidence: Mapping[str, Any], cls: str | None = None) -> None:
        cls = cls or self._class
        if self._on_suspect is not None:
            self._tell(self._on_suspect, Suspicion(cls, message, evidence, job.job))
        self._log.warning("suspect", extra={"class": cls, "reason": message})

    def _tell(self, on_suspect: OnSuspect, suspicion: Suspicion) -> None:
        if not self._threads:
            on_suspect(suspicion)
            return
        if self._suspicions is None:
            try:
                self._suspicions = _SuspicionQueue(f"{self.name}-tell", on_suspect, self._log)
            except RuntimeError as problem:
                # No thread can be started, perhaps because the job has used up all pids. Watching must go on, so
                # that this job can be ended.
                self._log.warning(
                    "suspicion_not_reported", extra={"class": suspicion.cls, "error": str(problem)}
                )
                return
        self._suspicions.put(suspicion)

    def _trip(self, job: J, trip: Trip) -> None:
        """Carry out a trip of ``job``, unless the job is over; returns once it was called off."""
        with self._lock:
            if self._job is not job:
                return
            self._tripping = threading.get_ident()
        self._log.critical(
            "trip",
            extra={"code": int(trip.code), "class": trip.cls, "reason": trip.reason},
        )
        logqueue.flush()  # What carries it out may be a program's own, and end the process at once.
        carried_out = False
        try:
            carried_out = self._on_trip(trip)
        finally:
            self.pauses.resume()
            with self._lock:
                self._tripping = None
                if carried_out and self._job is job:
                    self._job = None
                self._settled.notify_all()
        if not carried_out:
            self._log.warning("trip_called_off", extra={"class": trip.cls})

    # -- the thread ------------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                logqueue.start(*logqueue.WATCHDOGS)
                try:
                    thread.start()
                except RuntimeError:
                    logqueue.stop()
                    raise
                # Only now: where none could be started, the next job has to try again.
                self._thread = thread

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            logqueue.stop()

    def _watch(self) -> None:
        faults = 0
        while not self._closing.is_set():
            signs.alive()
            if self._job is not None:
                pending.keep_place()
            try:
                self.check()
                faults = 0
            except Exception as problem:
                # A fault of a sensor must neither end the job nor leave it unwatched.
                faults += 1
                self._log.error("watchdog_fault", extra={"faults": faults}, exc_info=problem)
            self.pauses.wait(
                self._closing.wait, min(self._poll_s * 2 ** min(faults, 10), max(_FAULT_WAIT_S, self._poll_s))
            )


class _SuspicionQueue:
    """Passes suspicions on, in a thread of its own: who is told may be waiting for a database that hangs, and
    meanwhile the watchdog has to watch.
    """

    def __init__(self, name: str, tell: OnSuspect, log: logging.Logger) -> None:
        self._tell = tell
        self._log = log
        self._due: queue.Queue[Suspicion | None] = queue.Queue(_SUSPICIONS_KEPT)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, suspicion: Suspicion) -> None:
        """Pass it on when there is time; dropped where a hundred wait already."""
        try:
            self._due.put_nowait(suspicion)
        except queue.Full:
            self._log.warning("suspicion_not_reported", extra={"class": suspicion.cls})

    def close(self) -> None:
        """End the thread once it has passed on what waits."""
        try:
            self._due.put_nowait(None)
        except queue.Full:
            return

    def _run(self) -> None:
        while (suspicion := self._due.get()) is not None:
            with logqueue.lines_about(suspicion.job):
                try:
                    self._tell(suspicion)
                except Exception as problem:
                    self._log.warning(
                        "suspicion_not_reported", extra={"class": suspicion.cls, "error": str(problem)}
                    )

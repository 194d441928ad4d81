"""One incarnation of a worker, as its threads share it.

Who writes which state; all threads read it:

- ``kill_at``: the control loop, when a heartbeat was answered.
- ``table``: main thread, control loop and ``gangq-job-*`` add the jobs they claim; the thread that reports a job
  removes it.
- ``ended``: the thread whose call was answered "this incarnation has ended", mostly the control loop.
- ``closing``: the main thread, when it is done with the incarnation.
- ``stuck``: the thread that waits for the job's process.
- ``tripping``: a watchdog's thread that begins to end this process, and takes it back if the trip is called off.
- ``model``: the main thread.
- ``on_replica``: the main thread, before any job runs.
- notes on disk: the control loop ``lapsed`` (which it takes back) and ``drained``; ``gangq-exit-work`` ``exited``.

There are two connections, so there are two clients. The main thread uses :attr:`Session.main_client`; every other
thread uses ``control.for_threads``. Code that runs in either takes :attr:`Session.thread_client`, which is the one of
the two that belongs to the calling thread. Tasks of the control loop await ``control.client``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from gangq.proc import statefile
from gangq.proc.clock import boottime
from gangq.worker.jobs import JobTable

if TYPE_CHECKING:
    from gangq.client import Client
    from gangq.client.rows import Registration
    from gangq.worker.control import Control

log = logging.getLogger("gangq.worker.session")


CleanStop = Literal["lapsed", "drained", "exited"]
"""Why a process ended work that had done nothing wrong.

- ``lapsed``: no renewal in time.
- ``drained``: its operator stopped it.
- ``exited``: `HardExit` ended a handler that nothing else could end.
"""


def clean_stop_reason(directory: Path, incarnation: int, uid: int) -> str | None:
    """What :meth:`Session.note` of a worker of that user left there for that incarnation, if anything."""
    whys: tuple[str, ...] = get_args(CleanStop)
    for why in whys:
        if statefile.read(directory, why, uid=uid) == str(incarnation).encode():
            return why
    return None


class Session:
    """An incarnation from its registration until it has ended."""

    def __init__(
        self,
        client: Client,
        terms: Registration,
        *,
        name: str,
        host: str,
        mark: str,
        directory: Path,
        sent_at: float,
        control: Control,
        cgroups: str | None = None,
    ) -> None:
        """``client`` is for the thread that makes this session, the main thread."""
        self.main_client = client
        """For the main thread alone."""
        self._main_thread = threading.get_ident()
        self.control = control
        self.terms = terms
        """What the database told this incarnation when it registered."""
        self.name = name
        self.host = host
        self.mark = mark
        self.directory = directory
        self.cgroups = cgroups
        """Where each command gets a control group of its own; None: this host allows none."""
        self.table = JobTable()
        self.on_replica: Callable[[], None] = lambda: None
        """Called when a replica of a service has begun, or has said something."""
        self.ended = threading.Event()
        """Set once the database has ended this incarnation: whatever it still ran is lost."""
        self.closing = threading.Event()
        """Set once the worker is done with this incarnation: its threads stop."""
        self.stuck: dict[int, tuple[int, ...]] = {}
        """By token, the pids of jobs that survived SIGKILL."""
        self.tripping = 0
        """How many watchdogs are about to end this process. The exit code of one of them counts, and no other thread
        may exit first.
        """
        self.model: str | None = None
        """The model this process has loaded, for the next claim."""
        self._lock = threading.Lock()
        self._loops: list[Callable[[], object]] = []
        self._notes: set[str] = set()
        self._kill_at = sent_at + terms.lease_granted_s - terms.lease_margin_s

    @property
    def thread_client(self) -> Client:
        """The client of the calling thread: :attr:`main_client` or ``control.for_threads``."""
        return self.main_client if threading.get_ident() == self._main_thread else self.control.for_threads

    @property
    def incarnation(self) -> int:
        """Its number."""
        return self.terms.incarnation

    @property
    def answer_s(self) -> float:
        """How long an answer may take before the connection counts as dead: longer than any verb waits, and short
        enough to renew the lease over a new connection before any work has to stop.
        """
        terms = self.terms
        return max(3.0, min(30.0, (terms.lease_granted_s - terms.lease_margin_s - terms.grace_s) / 2))

    @property
    def kill_at(self) -> float:
        """When its work has to be dead unless the lease is renewed, in seconds of CLOCK_BOOTTIME."""
        return self._kill_at

    @property
    def renewed_at(self) -> float:
        """When the last renewal that was accepted was sent, in seconds of CLOCK_BOOTTIME."""
        return self._kill_at - self.terms.lease_granted_s + self.terms.lease_margin_s

    def renewed(self, sent_at: float) -> None:
        """A heartbeat sent at this instant was answered: the lease runs from then, not from the answer."""
        with self._lock:
            lasts_s = self.terms.lease_granted_s - self.terms.lease_margin_s
            self._kill_at = max(self._kill_at, sent_at + lasts_s)
            kill_at = self._kill_at
        # First what runs: taking the note back may fail on a disk that is full or read-only.
        self.table.each(lambda job: job.extend(kill_at, self.terms.grace_s))
        self._take_back("lapsed")

    def note(self, why: CleanStop) -> None:
        """Note on disk, for the next incarnation, that this process stops its jobs through no fault of theirs. It is
        read if this process ends without reporting so to the database.
        """
        with self._lock:
            if why in self._notes:
                return
            self._notes.add(why)
        try:
            statefile.write(self.directory, why, str(self.incarnation).encode())
        except OSError as problem:
            log.warning("note_not_written", extra={"note": why, "error": str(problem)})

    def _take_back(self, why: CleanStop) -> None:
        with self._lock:
            if why not in self._notes:
                return
            self._notes.discard(why)
        try:
            (self.directory / why).unlink(missing_ok=True)
        except OSError as problem:
            log.warning("note_not_removed", extra={"note": why, "error": str(problem)})

    def lapsing(self) -> bool:
        """Whether what runs has to be asked to stop, because the lease may end before it is renewed."""
        return boottime() >= self.kill_at - self.terms.grace_s

    def lapsed(self) -> bool:
        """Whether everything of this incarnation has to be dead."""
        return boottime() >= self.kill_at

    @contextlib.contextmanager
    def trip_in_progress(self) -> Iterator[None]:
        """With one more watchdog about to end this process."""
        with self._lock:
            self.tripping += 1
        try:
            yield
        finally:
            with self._lock:
                self.tripping -= 1

    def end(self, why: str) -> None:
        """The database has ended this incarnation. A repeat is harmless."""
        if self.ended.is_set():
            return
        # A heartbeat that was in flight while this worker retired gets this answer too; that is no error.
        if not self.closing.is_set():
            log.error("incarnation_ended", extra={"incarnation": self.incarnation, "reason": why})
        self.ended.set()
        self.table.each(lambda job: job.lose(why))
        self.wake()

    def on_wake(self, look: Callable[[], object]) -> None:
        """Have :meth:`wake` call ``look()``, in any thread. For the claim loops."""
        self._loops.append(look)

    def wake(self) -> None:
        """Make every claim loop claim: there may be a job for it, or a slot has become free."""
        for look in self._loops:
            look()

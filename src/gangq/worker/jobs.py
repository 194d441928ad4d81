"""The claims a worker holds, and the one place where being told to stop and starting meet.

Several threads act on a job: the lease keeper brings orders, the listener brings the opening of the
barrier, a drain tells everybody to stop, and the runner starts and ends it. :class:`ActiveJob` makes each
race between them end the same way: an order that comes before the work starts keeps it from starting, one
that comes later reaches the work.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gangq import logqueue
from gangq.watchdogs import signs
from gangq.worker.results import as_progress

if TYPE_CHECKING:
    from gangq.client.rows import Claim
    from gangq.context import GangInfo
    from gangq.worker.options import Lane
    from gangq.worker.replicas import Replica

log = logging.getLogger("gangq.worker.jobs")

StopReason = Literal["preempt", "cancel", "drain", "directory", "lease"]
"""Why it has to stop: an order of the database (preempt, cancel), this worker's drain, its lost directory, or a
lease about to end.
"""

BEAT_BYTES = 16 << 10
"""What one beat may hold; more is left out of it."""


class Work(Protocol):
    """What runs for a job: a handler in this process, or a command."""

    def stop(self, grace_s: float) -> None:
        """Ask it to end within the grace, and see to it that it does."""

    def lose(self) -> None:
        """The claim is lost: end the work now."""

    def set_deadline(self, at: float, grace_s: float) -> None:
        """The lease was renewed: from now on it dies at that moment (CLOCK_BOOTTIME), asked to end a grace before."""


class ActiveJob:
    """One claim, from its arrival to its final report."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.claimed_at_ns = time.time_ns()
        self.id = claim.job_id
        self.token = claim.token
        self.lane: Lane = "light" if claim.light else "placed"
        self.result: Any = None
        """Its result, once it is done, until it is reported. Of the thread that reports it."""
        # Any thread may read these. They are written here alone, under the lock.
        self.stop_reason: StopReason | None = None
        self.told_by_server = False
        self.lost: str | None = None
        self.reporting = False
        self.completed_by_handler = False
        self.gang: GangInfo | None = None
        """Its place in its gang, once its barrier has opened."""
        self.replica: Replica | None = None
        """What it says as a replica of a service, once its barrier has opened."""
        self.work_end: dict[str, Any] | None = None
        """How a handler in a child process has ended, as it said over the socket: ``kind`` is a
        :data:`gangq.worker.endings.WorkEnd`.
        """
        self._lock = threading.Lock()
        self._work: Work | None = None
        self._on_gang: Callable[[GangInfo], None] | None = None
        self._on_beat: Callable[[dict[str, Any]], None] | None = None
        self._last_beat: dict[str, Any] | None = None
        """The latest one, sent or not."""
        self._beat: dict[str, Any] | None = None
        self._beat_noted = False
        # Made when first used: a small job ends without using them, and they cost more than running it.
        self._key: str | None = None
        self._stopping: threading.Event | None = None
        self._wake: threading.Event | None = None

    @property
    def key(self) -> str:
        """Proves to the worker's socket that a process belongs to this job."""
        with self._lock:
            if self._key is None:
                self._key = secrets.token_hex(16)
            return self._key

    @property
    def stopping(self) -> threading.Event:
        """Set once it has to stop."""
        with self._lock:
            if self._stopping is None:
                self._stopping = threading.Event()
            return self._stopping

    @property
    def wake(self) -> threading.Event:
        """Set whenever something happened that a wait at the barrier should look at."""
        with self._lock:
            if self._wake is None:
                self._wake = threading.Event()
            return self._wake

    @property
    def extra(self) -> dict[str, Any]:
        """What every log line about this job carries."""
        return {
            "job": self.id,
            "token": self.token,
            "task": self.claim.task,
            "gang": self.claim.gang_id,
            "epoch": self.claim.epoch if self.gang is None else self.gang.epoch,
            "rank": self.claim.rank if self.gang is None else self.gang.rank,
        }

    @property
    def ports(self) -> list[int]:
        """The ports that its worker holds bound for it until its code starts."""
        held = [self.claim.master_port, None if self.replica is None else self.replica.service.port]
        return [port for port in held if port is not None]

    # -- orders ----------------------------------------------------------------------------------------------

    def tell_stop(self, reason: StopReason, grace_s: float, *, unless_begun: bool = False) -> None:
        """Stop within the grace. The first reason is kept, but for a lease that may be renewed yet; an order of the
        database is remembered anyway, because it decides what is reported at the end. ``unless_begun``: work that
        runs goes on.
        """
        with self._lock:
            if unless_begun and self._work is not None:
                return
            self.told_by_server = self.told_by_server or reason in ("preempt", "cancel")
            told = self.stop_reason not in (None, "lease") or self.stop_reason == reason
            if told or self.lost is not None or self.reporting:
                return
            self.stop_reason = reason
            work = self._work
        log.info("job_told_to_stop", extra={**self.extra, "reason": reason, "started": work is not None})
        self.stopping.set()
        self.wake.set()
        # The lease's own deadline is the limit, until it is renewed.
        if work is not None and reason != "lease":
            work.stop(grace_s)

    def hasten(self) -> None:
        """Whatever is left of its grace is over."""
        with self._lock:
            work, reason = self._work, self.stop_reason
        if work is not None and reason not in (None, "lease"):
            work.stop(0.0)

    def lose(self, reason: str) -> None:
        """The claim is lost: kill the work, report nothing."""
        with self._lock:
            if self.lost is not None or self.reporting:
                return
            if self.completed_by_handler:
                return  # The handler has completed it in its own transaction, and is about to return.
            self.lost = reason
            work = self._work
        log.error("job_lost", extra={**self.extra, "reason": reason, "started": work is not None})
        self.stopping.set()
        self.wake.set()
        if work is not None:
            work.lose()

    def extend(self, kill_at: float, grace_s: float) -> None:
        """Pass a renewed lease on to the work."""
        with self._lock:
            work = self._work
        if work is not None:
            work.set_deadline(kill_at, grace_s)

    @property
    def must_end(self) -> bool:
        """Whether it was told to stop, or its claim is lost. It must not start any more."""
        return self.stop_reason is not None or self.lost is not None

    # -- the runner's side -----------------------------------------------------------------------------------

    def start(self, work: Work) -> bool:
        """From now on orders go to ``work``; False when one has come already, and nothing may start."""
        with self._lock:
            if self.must_end:
                return False
            self._work = work
            return True

    def begin_report(self) -> None:
        """Nothing of it runs any more: only its report is left, and neither orders nor its work change that."""
        with self._lock:
            self._work = None
            self.reporting = True

    # -- its gang --------------------------------------------------------------------------------------------

    def enter_gang(self, gang: GangInfo, replica: Replica | None) -> None:
        """Its barrier has opened."""
        with self._lock:
            self.gang, self.replica = gang, replica

    def change_gang(self, gang: GangInfo) -> None:
        """A new epoch has begun around it."""
        with self._lock:
            self.gang, tell = gang, self._on_gang
        log.info("epoch_changed", extra={**self.extra, "world_size": gang.world_size})
        if tell is not None:
            tell(gang)

    def follow_gang(self, callback: Callable[[GangInfo], None]) -> GangInfo | None:
        """The present epoch; ``callback`` is called with each new one. For the context of a handler in this
        process.
        """
        with self._lock:
            self._on_gang = callback
            return self.gang

    # -- what its work says ----------------------------------------------------------------------------------

    def say_completed(self) -> None:
        """Its handler has completed it in its own transaction, and is about to return."""
        with self._lock:
            self.completed_by_handler = True

    def say_end(self, work_end: dict[str, Any]) -> None:
        """Its handler has ended like this. The last word counts, until its report has begun."""
        with self._lock:
            if not self.reporting:
                self.work_end = work_end
        self.wake.set()

    # -- progress --------------------------------------------------------------------------------------------

    def beat(self, data: dict[str, Any]) -> None:
        """Progress, for the next heartbeat; only the latest is kept. Never raises: see `as_progress`."""
        signs.alive()
        data, why = as_progress(data, BEAT_BYTES)
        if why is not None and not self._beat_noted:
            self._beat_noted = True
            log.warning("beat_not_stored_whole", extra={**self.extra, "why": why})
        with self._lock:
            self._beat = self._last_beat = data
            on_beat = self._on_beat
        if on_beat is not None:
            on_beat(data)

    def follow_beats(self, callback: Callable[[dict[str, Any]], None] | None) -> dict[str, Any] | None:
        """The latest beat; ``callback`` is called with each further one. For the watchdogs of this job."""
        with self._lock:
            self._on_beat = callback
            return self._last_beat

    def take_beat(self) -> dict[str, Any] | None:
        """The latest beat that has not been sent, which then counts as sent."""
        with self._lock:
            beat, self._beat = self._beat, None
            return beat

    def put_beat_back(self, beat: dict[str, Any] | None) -> None:
        """The heartbeat that carried it had no answer: send it again unless a newer one has come."""
        with self._lock:
            if self._beat is None:
                self._beat = beat


class JobTable:
    """The claims held, by job and token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[tuple[int, int], ActiveJob] = {}
        self.added = 0
        """How many claims have arrived."""
        self._changed = threading.Condition(self._lock)

    def add(self, *jobs: ActiveJob) -> None:
        """Claims have arrived."""
        with self._lock:
            self.added += len(jobs)
            for job in jobs:
                self._jobs[job.id, job.token] = job

    def remove(self, *jobs: ActiveJob) -> None:
        """They were reported."""
        with self._changed:
            for job in jobs:
                self._jobs.pop((job.id, job.token), None)
            if not self._jobs:
                self._changed.notify_all()

    def get(self, job_id: int, token: int) -> ActiveJob | None:
        """That claim, if it is held."""
        with self._lock:
            return self._jobs.get((job_id, token))

    def by_key(self, key: str) -> ActiveJob | None:
        """The job whose processes know this key."""
        for job in self.snapshot():
            if secrets.compare_digest(job.key, key):
                return job
        return None

    def snapshot(self) -> list[ActiveJob]:
        """All of them, now."""
        with self._lock:
            return list(self._jobs.values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._jobs)

    def count(self, lane: Lane | None) -> int:
        """How many of them have a slot of this lane; None: of either."""
        return sum(lane is None or job.lane == lane for job in self.snapshot())

    def each(self, act: Callable[[ActiveJob], None], only: Iterable[ActiveJob] | None = None) -> None:
        """Do something to every claim; a fault with one of them is no reason to pass over the others."""
        for job in self.snapshot() if only is None else only:
            with logqueue.lines_about(job):
                try:
                    act(job)
                except Exception:
                    log.exception("order_failed")

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no claim is held; False when the time is up first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

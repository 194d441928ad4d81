"""The worker's side of a process in which the async jobs of one task run together, in one event loop.

The process is a :class:`gangq.worker.child.Child`, as that of any handler. It gets its orders as
:mod:`gangq.worker.shared_orders` says. A job in it is a :class:`SharedJob`, which its runner handles as it does a
child. If the process is killed over one job, the others go back uncharged.

A process without jobs is kept for the next job. Nothing renews its deadline meanwhile, so its
guardian ends it at the one that its last job had.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gangq.proc import bounded_log
from gangq.proc.clock import boottime
from gangq.watchdogs import ExitCode, Trip
from gangq.worker.child import Exit
from gangq.worker.jobs import ActiveJob
from gangq.worker.output import LogReader
from gangq.worker.runner_inline import CANCELLED_S
from gangq.worker.shared_orders import Begin, Orders, Stop
from gangq.worker.watching import CommandTrip, Watching

if TYPE_CHECKING:
    from gangq.worker.child import Child
    from gangq.worker.control import Control

log = logging.getLogger("gangq.worker.shared")

_MOST_JOBS = 1000
"""After so many jobs a process is replaced, so that what its handlers leak does not grow for ever."""
_HOLDER_S = 3.0
_SPARE_S = 2.0
"""A process that its guardian ends this soon gets no further job."""
_END_S = 2.0


class SharedProcess:
    """One such process. Thread-safe."""

    def __init__(self, control: Control) -> None:
        self.key = secrets.token_hex(16)
        """Proves to the worker's socket that a request comes from it."""
        self.jobs: dict[str, SharedJob] = {}
        """By the key of the job."""
        self.over: ActiveJob | None = None
        """The job that it was killed over."""
        self.taken = 0
        self.child: Child
        self.closing = contextlib.ExitStack()
        self.orders = Orders(control)
        self._lock = threading.Lock()
        self._stop_at = float("inf")

    @property
    def extra(self) -> dict[str, Any]:
        """What log lines about it carry."""
        return {"pid": self.child.pid, "jobs": [shared.job.id for shared in list(self.jobs.values())]}

    @property
    def usable(self) -> bool:
        """Whether it can be given a further job."""
        if self.over is not None or self.taken >= _MOST_JOBS or self.child.poll() is not None:
            return False
        return not self.ending

    def set_deadline(self, at: float, grace_s: float) -> None:
        """Move the instant of its SIGKILL, which is that of the lease."""
        # A later deadline does not take back the SIGTERM of an earlier one.
        if not self.ending:
            self._stop_at = at - grace_s
        self.child.set_deadline(at, grace_s)

    @property
    def ending(self) -> bool:
        """Whether its guardian has told it to stop, or is about to. Nothing renews the deadline of an idle one."""
        return boottime() > self._stop_at - _SPARE_S

    def kill(self, over: ActiveJob) -> None:
        """SIGKILL to all of it now, over one of its jobs. The first one counts."""
        with self._lock:
            if self.over is None:
                self.over = over
                log.error("shared_process_killed", extra={**self.extra, **over.extra})
        self.child.kill()

    def end(self) -> None:
        """End it, which has no jobs, and wait until it is gone."""
        self.child.stop(_END_S)
        self.child.wait(_END_S)
        self.child.close()
        self.closing.close()

    def holder(self) -> SharedJob | None:
        """Ask which of its jobs holds its event loop, if the loop does not run."""
        try:
            key = self.orders.who_holds().result(_HOLDER_S)
        except TimeoutError:
            return None
        return self.jobs.get(key or "")


class SharedJob:
    """One job in such a process. As much of a :class:`gangq.worker.child.Child` as its runner uses of one."""

    not_kept: str | None = None
    """Only its process knows what of its output could not be kept, and logs that."""

    def __init__(self, process: SharedProcess, job: ActiveJob, log_path: str) -> None:
        self.process = process
        self.job = job
        self.pid = process.child.pid
        self.trip: SharedTrip | None = None
        self._log_path = log_path
        self._log = LogReader(log_path)
        self._kill_at = float("inf")

    def set_deadline(self, at: float, grace_s: float) -> None:
        """Of the whole process."""
        self.process.set_deadline(at, grace_s)

    def stop(self, grace_s: float) -> None:
        """Tell it to stop, and cancel it after the grace. A second later the process is killed over it."""
        self.process.orders.give(Stop(self.job.key, grace_s))
        self._kill_at = min(self._kill_at, boottime() + grace_s + CANCELLED_S)

    def lose(self) -> None:
        """Cancel it: other jobs run in its process."""
        self.stop(0.0)

    def kill(self) -> None:
        """Kill the process over it."""
        self.process.kill(self.job)

    def poll(self) -> Exit | None:
        """How it ended, or None while it runs. Never waits."""
        if (end := self.job.work_end) is not None:
            # At the end of the lease its guardian may be the first to tell it to stop.
            by_guardian = end["kind"] == "stopped" and self.process.ending
            return Exit(int(end["kind"] == "error"), None, True, cause="deadline" if by_guardian else "exit")
        return self.process.child.poll()

    def wait(self, timeout: float) -> Exit | None:
        """As :meth:`poll`, waiting up to ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while True:
            self.job.wake.clear()
            if (ended := self.poll()) is not None:
                if self.job.work_end is None and ended.tree_dead:
                    with contextlib.suppress(OSError):
                        bounded_log.unroll(self._log_path)
                return ended
            if boottime() >= self._kill_at:
                self.kill()
            if (left := until - time.monotonic()) <= 0:
                return None
            self.job.wake.wait(left)

    def read_new_output(self, limit: int) -> bytes:
        """What it has printed since the last call."""
        return self._log.read_new(limit)

    def log_tail(self, count: int) -> bytes:
        """The last of its output. If its process has ended, then also what that said outside of any job."""
        found = self._log.last(count)
        if self.job.work_end is None and self.process.child.poll() is not None:
            found += self.process.child.log_tail(count)
        return found[-count:]


class SharedTrip(CommandTrip):
    """Carries out the trip of a job in a shared process, which ends with it.

    While one job holds the event loop no other one can beat. So a stall of any of them is a stall of that one.
    """

    def __init__(self, watching: Watching, shared: SharedJob) -> None:
        super().__init__(watching, shared.job, shared)
        self._shared = shared
        shared.trip = self

    @property
    def over(self) -> ActiveJob | None:
        """The other job that its process was killed over."""
        over = self._shared.process.over
        return None if over is self._shared.job else over

    def __call__(self, trip: Trip) -> bool:
        """False if the class only notifies, or if the database holds the trip back."""
        holder = self._shared.process.holder() if trip.code is ExitCode.STALL else None
        if holder is None or holder.trip is None:
            return super().__call__(trip)
        who = f"job {holder.job.id} (task {holder.job.claim.task!r})"
        loop = f"{who} holds the event loop of its process: it blocks where it should await"
        return CommandTrip.__call__(
            holder.trip, replace(trip, job=holder.job, evidence={**trip.evidence, "loop": loop})
        )


class SharedProcesses:
    """The processes of a worker's async tasks, one for each task. Thread-safe."""

    def __init__(self, control: Control, attach: Callable[[SharedProcess], Callable[[], object]]) -> None:
        """``attach(process)`` has the worker's socket know it; what that returns is called at its end."""
        self._control = control
        self._attach = attach
        self._processes: dict[str, SharedProcess] = {}
        self._locks: dict[str, threading.Lock] = {}
        """One for each task: what starts or ends a process may hang, and keeps no job of another task waiting."""

    @contextlib.contextmanager
    def joined(
        self, job: ActiveJob, begin: Begin, start: Callable[[SharedProcess], object]
    ) -> Iterator[SharedJob]:
        """With the job begun in the process of its task. If there is none, ``start()`` sets its child and its
        deadline, and has ``closing`` undo what has to be undone.

        Raises:
            CommandStartError: it cannot run.
        """
        task = job.claim.task
        lock = self._locks.setdefault(task, threading.Lock())
        with lock:
            process = self._processes.get(task)
            if process is None or not process.usable:
                if process is not None and not process.jobs:
                    process.end()
                process = self._processes[task] = self._started(start)
            process.taken += 1
            shared = process.jobs[job.key] = SharedJob(process, job, begin.log)
        process.orders.give(begin)
        try:
            yield shared
        finally:
            with lock:
                del process.jobs[job.key]
                ends = not process.jobs and not process.usable
                if ends and self._processes.get(task) is process:
                    del self._processes[task]
            if ends:
                process.end()

    def close(self) -> None:
        """End the processes that have no job."""
        ending = []
        for task, lock in list(self._locks.items()):
            with lock:
                process = self._processes.get(task)
                if process is not None and not process.jobs:
                    ending.append(self._processes.pop(task))
        for process in ending:
            process.child.stop(_END_S)
        for process in ending:
            process.end()

    def _started(self, start: Callable[[SharedProcess], object]) -> SharedProcess:
        process = SharedProcess(self._control)
        process.closing.callback(self._attach(process))
        try:
            start(process)
        except BaseException:
            process.closing.close()
            raise
        return process

"""Running all that waits, in this process, with real workers one after another.

Its tests start processes: they are in `make test-slow`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gangq import logqueue
from gangq.app import App, AsyncApp
from gangq.client.rows import JobRow, WaitingRow
from gangq.commands import COMMAND
from gangq.context import runs_handler, set_current
from gangq.durations import Duration, seconds
from gangq.errors import GangqError, InvalidInput, WaitTimeout
from gangq.schema import check_version
from gangq.watchdogs.codes import ExitCode
from gangq.worker.child_main import app_target
from gangq.worker.control import MainClient
from gangq.worker.fitness import EXPECT_VARIABLE
from gangq.worker.main import Worker
from gangq.worker.options import WorkerOptions, usable_cpus, usable_memory_mb
from gangq.worker.session import Session

_ENDED = ("done", "failed", "cancelled")
_LEASE_S = 3600.0
"""Long, because a debugger may hold all threads of this process."""
_VRAM_MB = 24 * 1024
"""Of a declared device, where no job says how much it needs."""
_LOOK_S = 0.05
_TOLD_S = 1.0
"""The time between two looks at a handler that is told to stop: see `_Run._end_at`."""
_now = time.monotonic
_alone = threading.Lock()
"""Held by a drain. The workers of this process have one name, and each reports an earlier one of its name dead."""


@dataclass(frozen=True)
class Drained:
    """What `drain` did: the jobs that `ended`, the first to end first, and what is `waiting` and why."""

    ended: list[JobRow]
    waiting: list[WaitingRow]

    @property
    def failed(self) -> list[JobRow]:
        """The jobs that failed; `error` says of what."""
        return [job for job in self.ended if job.state == "failed"]

    def __str__(self) -> str:
        states = Counter(job.state for job in self.ended)
        parts = [f"{states[state]} {state}" for state in _ENDED if states[state]] or ["nothing ran"]
        for row in self.waiting:
            which = f"gang g{row.id}" if row.kind == "gang" else f"{row.size} of {row.task}"
            parts.append(f"{which} {row.state}: {row.why}")
        return "; ".join(parts)


def drain(
    app: App | AsyncApp,
    *,
    timeout: Duration = 60.0,
    devices: str | None = None,
    labels: Mapping[str, Any] | None = None,
    taints: Sequence[str] = (),
) -> Drained:
    """Run all that waits in the App's database, here, until nothing more can run; return what came of it.

    Workers do it, one after another, each as `gangq worker --once` does:

    1. Light jobs run in this thread, one after another, on a worker with the labels that they ask for.
    2. Placed single jobs run in this thread, too, on a worker with those labels and just the (declared) GPUs they
       ask for. Its memory and CPUs are those of this machine, or what they ask for where that is more.
    3. The members of a gang run at the same time, in child processes that import the App. So do jobs of tasks with
       `isolate=True`, and commands. What a test has patched is not patched there.

    Then all of it again, for what has been submitted meanwhile. What is due later is left: move the clock.

    - `timeout`: how long everything may take: seconds, "90s" or a timedelta. A handler that still runs is told to
      stop, and two seconds later interrupted by an exception; its job is handed back.
    - `devices`: what placed work finds in place of what it asks for, "2x24GiB" or "none". A job that holds some of
      several devices runs in a child process.
    - `labels` and `taints` of the workers, beside the labels that jobs ask for.

    Watchdogs work as in any worker: one that trips ends the process that runs the handler, which is this one. In the
    databases of `gangq_database` they only report.

    Raises `WaitTimeout`; `InvalidInput` for a gang where no other process could find the App, and where another drain
    runs in this process: call it after that one, not inside a handler.
    """
    made = _Drain(
        app if isinstance(app, App) else app._app, seconds(timeout, "timeout"), devices, labels or {}, taints
    )
    if not _alone.acquire(blocking=False):
        raise InvalidInput(
            "a drain runs in this process already, and it also runs what is submitted meanwhile"
        )
    try:
        return made.run()
    finally:
        _alone.release()


class _Drain:
    def __init__(
        self, app: App, timeout: float, devices: str | None, labels: Mapping[str, Any], taints: Sequence[str]
    ) -> None:
        self._app = app
        self._timeout = timeout
        self._until = _now() + timeout
        self._devices = devices
        self._labels = labels
        self._taints = taints
        self._reasons: dict[object, WaitingRow] = {}
        """Why what the last workers left waits: said while they lived."""

    def run(self) -> Drained:
        client = self._app.client
        before = {(job.id, job.finished_at) for job in self._jobs(*_ENDED)}
        while self._round():
            pass
        ended = [job for job in self._jobs(*_ENDED) if (job.id, job.finished_at) not in before]
        ended.sort(key=lambda job: (job.finished_at, job.id))
        return Drained(ended, [self._reasons.get(_which(row), row) for row in client.waiting()])

    def _round(self) -> bool:
        """Let workers run what waits now; whether that has changed anything."""
        self._tick()
        first = self._jobs("pending", "blocked")
        for jobs in self._shapes():
            if not _asks(jobs[0]):
                self._serve(jobs[:1], {job.queue for job in jobs}, slots=0, light=1)
        for jobs in self._shapes():
            self._serve(jobs[:1], {job.queue for job in jobs}, slots=1, light=0)
        gangs = defaultdict[int, list[JobRow]](list)
        for job in self._jobs("blocked"):
            gangs[job.gang_id or 0].append(job)
        for gang_id, members in sorted(gangs.items()):
            self._require_reachable(gang_id, members)
            self._serve(members, {member.queue for member in members}, slots=len(members), light=0)
        if not first:
            return False
        self._tick()
        return [_spent(job) for job in first] != [_spent(job) for job in self._jobs("pending", "blocked")]

    def _tick(self) -> None:
        """Have the database do what is due: jobs become pending whose time has come."""
        turn: int | None = None
        while True:
            report = self._app.client.tick(force=True, turn=turn)
            turn = report.next_turn
            if report.ran and not report.again:
                return
            if _now() >= self._until:
                raise WaitTimeout(f"drain has not ended within {self._timeout:g} s")
            time.sleep(min(report.next_in_s or 0.0, 0.1))

    def _jobs(self, *states: str) -> list[JobRow]:
        return self._app.client.jobs(state=states, limit=None)

    def _shapes(self) -> list[list[JobRow]]:
        """The single jobs that wait, those that ask for the same together. Commands have a worker of
        their own, without an App.
        """
        shapes = defaultdict[Any, list[JobRow]](list)
        for job in self._jobs("pending"):
            labels = json.dumps(job.labels, sort_keys=True)
            needs = job.gpus, job.vram_mb, job.memory_mb, job.cpus, labels
            shapes[needs, job.task == COMMAND].append(job)
        return [jobs for _, jobs in sorted(shapes.items(), key=lambda shape: shape[0])]

    def _require_reachable(self, gang_id: int, members: Sequence[JobRow]) -> None:
        size, task = len(members), members[0].task
        if size == 1 or all(member.task == COMMAND for member in members):
            return
        try:
            app_target(self._app)
        except GangqError:
            raise InvalidInput(
                f"gang g{gang_id} (task {task!r}) has {size} members. They run at the same time, in child processes, "
                "and those could not find this App: keep it in a variable of a module, outside of test functions. "
                f"Or call the handler of one member: run(task, context=FakeContext(gang=(0, {size})))"
            ) from None

    def _serve(self, held: Sequence[JobRow], queues: Set[str], *, slots: int, light: int) -> None:
        """Have one worker run what it can; it has room for the jobs of `held` at once."""
        devices = _declared(held) if self._devices is None else self._devices
        options = WorkerOptions(
            queues=sorted(queues),
            name=f"drain-{os.getpid()}",
            slots=slots,
            light=light,
            devices=devices if slots else "none",
            memory_mb=max(usable_memory_mb(), sum(job.memory_mb for job in held)),
            cpus=max(usable_cpus(), sum(job.cpus for job in held)),
            labels={**{name: value for job in held for name, value in job.labels.items()}, **self._labels},
            taints=self._taints,
            lease_s=_LEASE_S,
            once=True,
        )
        # Commands need no App, so one that no child process could find is no hindrance.
        app = None if held and all(job.task == COMMAND for job in held) else self._app
        with logqueue.running(*logqueue.WORKER):
            client = MainClient(
                self._app.client.target.conninfo, timeout_s=30.0, application_name="gangq drain"
            )
            try:
                check_version(client)
                run = _Run(app, options, client)
                code = run.until(self._until)
            finally:
                client.close()
        if run.timed_out:
            raise WaitTimeout(f"drain has not ended within {self._timeout:g} s: {run.timed_out}")
        if run.interrupted:
            raise KeyboardInterrupt
        tasks = {job.task for job in held}
        self._reasons |= {_which(row): row for row in run.waiting if row.task in tasks}
        if code != 0:
            raise GangqError(f"the worker ended with code {code}: see its log")


def _asks(job: JobRow) -> bool:
    return bool(job.gpus or job.memory_mb or job.cpus or job.model)


def _which(row: WaitingRow) -> object:
    return row.kind, row.id, row.queue, row.task, row.state, row.since


def _spent(job: JobRow) -> tuple[object, ...]:
    """What changes with every attempt that has ended."""
    return job.id, job.state, job.attempts, job.crashes, job.trips, job.stops, job.snoozes


def _declared(jobs: Sequence[JobRow]) -> str:
    gpus = sum(job.gpus for job in jobs)
    vram_mb = max((job.vram_mb for job in jobs), default=0) or _VRAM_MB
    return f"{gpus}x{vram_mb}MiB" if gpus else "none"


class _Interrupted(BaseException):
    """Raised in a handler that has to end now. No `except Exception` of it gets in the way."""


class _Run:
    """A worker whose handler can be interrupted, so that its end need not be the end of this process."""

    def __init__(self, app: App | None, options: WorkerOptions, client: MainClient) -> None:
        self._thread = threading.get_ident()
        self._session: Session | None = None
        self.waiting: list[WaitingRow] = []
        """What it has left, and why."""
        self.interrupted = False
        """Whether SIGINT has come."""
        self.timed_out: str | None = None
        """Set once the time is up: what ran then."""
        self.worker = Worker(
            app,
            options,
            client,
            # It says of this machine what drain's declared devices are not.
            environ={name: value for name, value in os.environ.items() if name != EXPECT_VARIABLE},
            signals=_CtrlC(self),
            on_registered=self._registered,
            before_retire=self._retiring,
        )

    def until(self, until: float) -> int:
        """Run the worker, to its end at `until` (of `_now`) at the latest; return its exit code."""
        ended = threading.Event()
        clock = threading.Thread(target=self._end_at, args=(until, ended), name="gangq-drain", daemon=True)
        clock.start()
        try:
            return self.worker.run()
        except _Interrupted:
            # The handler has ended between the look and the exception, which has hit the worker: it ends without a
            # report. `timed_out` or `interrupted` is set, and that is what the caller is told.
            set_current(None)
            return ExitCode.LOST
        finally:
            ended.set()
            clock.join()

    def interrupt(self) -> None:
        """SIGINT has come: interrupt the handler and end the worker."""
        if not (self.interrupted or self.timed_out):
            self.interrupted = True
            # Not here: the main thread may hold a lock that this needs.
            threading.Thread(target=self.worker.stop, name="gangq-stop", daemon=True).start()
        if runs_handler():
            raise _Interrupted

    def _registered(self, session: Session) -> None:
        self._session = session

    def _retiring(self, session: Session) -> None:
        self.waiting = session.thread_client.waiting()

    def _end_at(self, until: float, ended: threading.Event) -> None:
        """End the run if it goes on at `until`, in these steps:

        1. The worker is stopped: it takes no more jobs, and tells its handlers to stop.
        2. A handler that runs here gets one look of `_TOLD_S` after all jobs must end.
        3. Then it is interrupted, again at each look, because it may catch that.
        4. Where no handler runs here, what is left are child processes: the worker is stopped once more, which ends
           them without a grace.
        """
        while _now() < until:
            if ended.wait(_LOOK_S):
                return
        running = [] if self._session is None else self._session.table.snapshot()
        names = ", ".join(f"job {job.id} (task {job.claim.task!r})" for job in running)
        self.timed_out = f"{names or 'no job'} ran then"
        self.worker.stop()
        had_notice = False
        while not ended.wait(_TOLD_S):
            if not runs_handler():
                self.worker.stop()  # The second call ends child processes without a grace.
            elif had_notice:
                self.timed_out = f"{names} ran then, and was interrupted"
                self._interrupt_handler()
            else:
                had_notice = all(job.must_end for job in running)

    def _interrupt_handler(self) -> None:
        if self._thread == threading.main_thread().ident:
            # A signal also ends the call in which it waits.
            signal.pthread_kill(self._thread, signal.SIGINT)
        else:
            thread, error = ctypes.c_ulong(self._thread), ctypes.py_object(_Interrupted)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)


class _CtrlC:
    """`Signals` of a run: SIGINT alone; other signals are left as they are."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        # Made once, so that it can be told from another.
        self._own = self._hear
        self._before: Any = None

    def install(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._own)

    def renew(self) -> None:
        # In another thread than the main one nothing was taken.
        if self._before is not None and signal.getsignal(signal.SIGINT) is not self._own:
            signal.signal(signal.SIGINT, self._own)

    def stop(self) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self._run.interrupt()

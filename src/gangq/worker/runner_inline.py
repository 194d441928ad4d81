"""Running a handler inside the worker process, in its main thread, one at a time.

A Python thread cannot be stopped; a process can. So a handler that must end and does not takes the process
with it: exit 79 when it was told to stop and its grace is over, 77 when its claim is no longer ours. For both
a kernel timer is set (:class:`gangq.watchdogs.deadman.Deadman`) before Python tries to exit.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gangq import logqueue, tracing
from gangq.context import GangInfo, set_current
from gangq.coroutines import Interrupt, run_to_end
from gangq.errors import GangqError
from gangq.proc.clock import boottime
from gangq.watchdogs import ExitCode
from gangq.watchdogs.deadman import Deadman
from gangq.worker.context_impl import InlineContext
from gangq.worker.endings import Ending, Returned, attempt, ending_of, report_as_said, work_end
from gangq.worker.gangs import PortHolder, wait_for_go
from gangq.worker.jobs import ActiveJob
from gangq.worker.liveness import Liveness
from gangq.worker.output import Capture, Output
from gangq.worker.reporter import Reporter
from gangq.worker.results import dumps_result
from gangq.worker.session import Session
from gangq.worker.watching import JobWatch

if TYPE_CHECKING:
    from gangq.task_options import WatchOptions

log = logging.getLogger("gangq.worker.inline")

_EVIDENCE_S = 1.0
CANCELLED_S = 1.0
"""How long a coroutine that is cancelled at the end of its grace may go on."""
_STACKS_S = 0.2
_TRIP_S = 0.05
"""How often to see whether a trip was called off."""


class HardExit:
    """Ends this process from any thread, after one second of work at most."""

    def __init__(
        self,
        session: Session,
        reporter: Reporter,
        deadman: Deadman,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._session = session
        self._reporter = reporter
        self._deadman = deadman
        self._leave = leave

    def __call__(self, code: int, why: str, job: ActiveJob) -> None:
        """Write down where every thread stands, hand back what was never started, exit with ``code``.

        If a watchdog is about to end this process with a code of its own, it does nothing and returns. That trip may
        be called off, so call again until the process has ended. No job may begin until it returns.
        """
        if self._session.tripping:
            return
        self._deadman.arm(min(boottime() + 2 * _EVIDENCE_S, max(self._session.kill_at, boottime())), code)
        log.critical("hard_exit", extra={**job.extra, "code": code, "reason": why})
        work = threading.Thread(
            target=self._write_evidence_and_release, args=(job,), name="gangq-exit-work", daemon=True
        )
        work.start()
        work.join(_EVIDENCE_S)
        logqueue.flush()
        if self._session.tripping:
            # This trip began within that second. It has a timer of its own, and its code counts.
            self._deadman.arm(max(self._session.kill_at, boottime()), code)
            while self._session.tripping:
                time.sleep(_TRIP_S)
        self._leave(code)

    def _write_evidence_and_release(self, job: ActiveJob) -> None:
        # What runs in children ends with this process, through no fault of its own.
        self._session.note("exited")
        try:
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        except (OSError, ValueError, AttributeError):
            log.info("no_stack_dump")
        try:
            self._reporter.flush()
            # The other jobs of its lane have not begun, and the main thread begins none of them: it waits in
            # InlineWork.end(). Those of the other lane run in children until those are gone.
            # What has ended and is still here is held by an open transaction: to hand it back would wait for that.
            others = [
                one
                for one in self._session.table.snapshot()
                if one is not job and one.lane == job.lane and not one.reporting
            ]
            if others and not self._session.ended.is_set():
                self._session.control.for_threads.release(
                    job_ids=[other.id for other in others],
                    tokens=[other.token for other in others],
                    reason="its worker had to exit before it came to this job",
                )
        except GangqError as problem:
            log.warning("release_not_reported", extra={"error": str(problem)})


class InlineWork:
    """The running handler, as orders reach it."""

    def __init__(self, session: Session, job: ActiveJob, deadman: Deadman, hard_exit: HardExit) -> None:
        self._job = job
        self._deadman = deadman
        self._exit = hard_exit
        self._lock = threading.Lock()
        self._active = False
        self._leaving = False
        self._kill_at = session.kill_at
        self._stop_by: float | None = None
        self._timer: threading.Timer | None = None
        self._interrupt: Interrupt | None = None

    def begin(self) -> None:
        """The handler is about to run: from here on orders are obeyed, and this process dies with its lease."""
        with self._lock:
            self._active = True
            self._arm()

    def interruptible(self, interrupt: Interrupt | None) -> None:
        """From now on, until None is given, this cancels the handler, which is a coroutine."""
        self._interrupt = interrupt

    def end(self) -> None:
        """The handler has returned. The switch stays on: see :meth:`InlineRunner.rest`.

        Where this process is about to exit, this returns only if a trip holds the exit up: the exit hands back the
        jobs that have not begun, so none may begin meanwhile.
        """
        while True:
            with self._lock:
                if not self._leaving:
                    self._active = False
                    if self._timer is not None:
                        self._timer.cancel()
                    return
            time.sleep(_TRIP_S)

    def stop(self, grace_s: float) -> None:
        """``ctx.stopping`` is up already; see to it that the handler is gone when the grace is over."""
        with self._lock:
            stop_by = boottime() + grace_s
            if not self._active or (self._stop_by is not None and self._stop_by <= stop_by):
                return
            self._stop_by = stop_by
            self._arm()
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer(grace_s, self._grace_is_over)

    def lose(self) -> None:
        """End this process: nothing else ends the handler."""
        reason = self._job.lost or ""
        with self._lock:
            if not self._active:
                return
        # Not in this thread: it may be the control loop's, through which the exit hands back what has not begun.
        exit_thread = threading.Thread(
            target=self._end_process, args=(ExitCode.LOST, reason), name="gangq-exit", daemon=True
        )
        try:
            exit_thread.start()
        except (RuntimeError, MemoryError) as problem:
            self._end_by_timer(reason, problem)

    def set_deadline(self, at: float, grace_s: float) -> None:
        """The lease was renewed."""
        del grace_s
        with self._lock:
            self._kill_at = max(self._kill_at, at)
            if self._active:
                self._arm()

    def _set_timer(self, after_s: float, act: Callable[[], object]) -> None:
        self._timer = threading.Timer(after_s, act)
        self._timer.name = "gangq-grace"
        self._timer.daemon = True
        self._timer.start()

    def _grace_is_over(self) -> None:
        with self._lock:
            interrupt = self._interrupt
            if self._active and interrupt is not None:
                # A coroutine can be cancelled, and has a second for what it does then.
                self._set_timer(CANCELLED_S, self._unstopped)
                interrupt()
                return
        self._unstopped()

    def _unstopped(self) -> None:
        self._end_process(ExitCode.UNSTOPPED, "it was told to stop and did not stop within its grace")

    def _end_process(self, code: int, why: str) -> None:
        """End this process unless the handler returns first. For a thread of its own."""
        while True:
            with self._lock:
                if not self._active or self._leaving:
                    return
                self._leaving = True
            # If this raises, the timer that it has set ends the process.
            self._exit(code, why, self._job)
            with self._lock:
                self._leaving = False
            time.sleep(_TRIP_S)

    def _end_by_timer(self, why: str, problem: Exception) -> None:
        """No thread can be started: have the kernel end this process. The lease may still be renewed, but from now on
        nothing moves the timer.
        """
        with self._lock:
            if not self._active or self._leaving:
                return
            self._leaving = True
            # Where a watchdog is about to end this process, it has that long to do so with its own code.
            self._deadman.arm(
                min(boottime() + 2 * _EVIDENCE_S, self._kill_at), ExitCode.LOST, dump_before_s=_STACKS_S
            )
        extra = {**self._job.extra, "code": int(ExitCode.LOST), "reason": why, "error": str(problem)}
        log.critical("hard_exit", extra=extra)

    def _arm(self) -> None:
        if self._leaving:
            return  # The exit has set the timer.
        # The timer thread comes first and leaves evidence; the switch is for when no Python runs.
        hardest = None if self._stop_by is None else self._stop_by + 2 * _EVIDENCE_S
        if hardest is not None and hardest < self._kill_at:
            self._deadman.arm(hardest, ExitCode.UNSTOPPED, dump_before_s=_STACKS_S)
        else:
            self._deadman.arm(self._kill_at, ExitCode.LOST, dump_before_s=_STACKS_S)


class InlineRunner:
    """Runs claimed jobs one after another."""

    def __init__(
        self,
        session: Session,
        reporter: Reporter,
        ports: PortHolder,
        deadman: Deadman,
        hard_exit: HardExit,
        watch: JobWatch,
        liveness: Liveness,
        capture: Capture,
    ) -> None:
        self._session = session
        self._reporter = reporter
        self._ports = ports
        self._deadman = deadman
        self._hard_exit = hard_exit
        self._watch = watch
        self._liveness = liveness
        self._capture = capture

    def rest(self) -> None:
        """No handler runs, and what comes next may take its time: this process need not die with its lease.

        Between two handlers of one batch the switch stays on, because setting it costs more than a small job
        does. Between them the timer is not moved ahead: call this before anything that may wait.
        """
        self._deadman.disarm()

    def run(
        self,
        job: ActiveJob,
        handler: Callable[..., Any],
        options: WatchOptions | None = None,
        *,
        more_follow: bool = False,
    ) -> None:
        """Run one job to its end and report it. Whatever it does, this returns or the process ends.

        1. A member of a gang waits for the others. Then its timer is switched on, and orders reach the job.
        2. The watchdogs are switched on.
        3. The handler is called.
        4. The capture of its output ends, then the watchdogs, then the rest. Where a watchdog was about to end the
           process, this never returns.
        5. The job is reported.

        ``options``: how patient its task wants the watchdogs to be. With ``more_follow`` another job comes at
        once, or a :meth:`rest`.
        """
        work = self._admitted(job)
        if work is None:
            self.rest()
            job.begin_report()
            self._reporter.stopped(job)
            return
        try:
            context = InlineContext(self._session, job)
            self._switch_on(job, options)
            set_current(context)
            # Where its spans are sent at once, that may wait: it counts as the handler's time.
            spans = tracing.begin(job, self._session.name)
            with spans.active():
                run = partial(run_to_end, begun=work.interruptible)
                returned = attempt(handler, context, job.claim.payload, run)
            spans.end(returned[1])
            context.close()
        finally:
            set_current(None)
            output = self._switch_off(job, work)
        if output is not None:
            self.rest()
            output.finish()
        self._report(job, context, returned, more_follow)

    def _admitted(self, job: ActiveJob) -> InlineWork | None:
        """What orders reach it through from now on, once its gang is complete; None: it must not start any more."""
        session = self._session
        if session.lapsing():
            job.tell_stop("lease", 0.0)
        if job.claim.gang_id is not None:
            self.rest()
            gang = wait_for_go(session, job, self._ports)
            self._ports.release(*job.ports)
            if gang is None:
                return None
        work = InlineWork(session, job, self._deadman, self._hard_exit)
        work.begin()  # First: an order that reached it before would be lost, because none is given twice.
        if not job.start(work):
            return None
        work.set_deadline(
            session.kill_at, session.terms.grace_s
        )  # A renewal since it was made has gone past it.
        return work

    def _switch_on(self, job: ActiveJob, options: WatchOptions | None) -> None:
        if job.claim.model is not None:
            self._session.model = job.claim.model
        self._liveness.job(job.id, job.token)
        self._watch.begin(job, options)
        self._capture.begin(job)

    def _switch_off(self, job: ActiveJob, work: InlineWork) -> Output | None:
        """After a fault in between too: what is left on would end this process over a job that is over. Returns what
        the job has printed.
        """
        output = self._capture.end()
        self._watch.end()
        self._liveness.job(0, 0)
        job.begin_report()
        work.end()
        return output

    def _report(self, job: ActiveJob, context: InlineContext, returned: Returned, more_follow: bool) -> None:
        result, problem, _ = returned
        if problem is None and not job.must_end and not job.completed_by_handler:
            if result is not None:
                # Encoded here and once: what is sent is what was found to be in order.
                result = dumps_result(result, f"the result of task {job.claim.task!r}")
            self._done(job, result, more_follow)
            return
        self.rest()
        said = work_end(context, *returned)
        ending = ending_of(job, said["kind"])
        if ending is Ending.STOPPED and problem is not None:
            log.info("stopped_by_raising", extra={**job.extra, "error": repr(problem)[:500]})
        report_as_said(
            self._reporter,
            job,
            ending,
            said,
            lambda job, result: self._done(job, result, more_follow),
            cause="port_taken" if _port_taken(problem, job.gang) else "error",
        )

    def _done(self, job: ActiveJob, result: Any, more_follow: bool) -> None:
        if not more_follow:
            self.rest()
        self._reporter.done(job, result, more_follow=more_follow)


def _port_taken(problem: BaseException | None, gang: GangInfo | None) -> bool:
    return (
        gang is not None
        and gang.rank == 0
        and isinstance(problem, OSError)
        and problem.errno == errno.EADDRINUSE
    )

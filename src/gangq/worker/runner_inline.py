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
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gangq import logqueue, tracing
from gangq.context import GangInfo, set_current
from gangq.coroutines import Interrupt, run_to_end
from gangq.errors import GangqError, Snoozed
from gangq.hooks import hooks_of
from gangq.proc.clock import boottime
from gangq.retry import NEVER, Again, after
from gangq.signatures import misfit, unfinished
from gangq.tasks import CoroutineTask
from gangq.watchdogs import ExitCode
from gangq.watchdogs.deadman import Deadman
from gangq.worker.barrier import wait_for_go
from gangq.worker.context_impl import InlineContext
from gangq.worker.endings import Attempt, Ending, Outcome, ending_of
from gangq.worker.jobs import ActiveJob, StopReason
from gangq.worker.liveness import Liveness
from gangq.worker.output import Capture
from gangq.worker.ports import PortHolder
from gangq.worker.reporter import Reporter, clean, describe
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

        Unless a watchdog is at it already: then the process ends within seconds, with the watchdog's code.
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
            # The other jobs of its lane have not begun; those of the other lane run in children until those are gone.
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
        self._kill_at = session.kill_at
        self._stop_by: float | None = None
        self._timer: threading.Timer | None = None
        self._interrupt: Interrupt | None = None

    def begin(self) -> None:
        """The handler is about to run: from here on this process dies with its lease."""
        with self._lock:
            self._active = True
            self._arm()

    def interruptible(self, interrupt: Interrupt | None) -> None:
        """From now on, until None is given, this cancels the handler, which is a coroutine."""
        self._interrupt = interrupt

    def end(self) -> None:
        """The handler has returned. The switch stays on: see :meth:`InlineRunner.rest`."""
        with self._lock:
            self._active = False
            if self._timer is not None:
                self._timer.cancel()

    def stop(self, reason: StopReason, grace_s: float) -> None:
        """``ctx.stopping`` is up already; see to it that the handler is gone when the grace is over."""
        if reason == "lease":
            return  # The lease's own deadline is the limit, until it is renewed.
        with self._lock:
            stop_by = boottime() + grace_s
            if not self._active or (self._stop_by is not None and self._stop_by <= stop_by):
                return
            self._stop_by = stop_by
            self._arm()
            if self._timer is not None:
                self._timer.cancel()
            self._set_timer(grace_s, self._grace_is_over)

    def lose(self, reason: str) -> None:
        """End this process: nothing else ends the handler."""
        with self._lock:
            if not self._active:
                return
        # Not in this thread: it may be the control loop's, through which the exit hands back what has not begun.
        threading.Thread(
            target=self._exit, args=(ExitCode.LOST, reason, self._job), name="gangq-exit", daemon=True
        ).start()

    def extend(self, kill_at: float, grace_s: float) -> None:
        """The lease was renewed."""
        del grace_s
        with self._lock:
            self._kill_at = kill_at
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
        with self._lock:
            if not self._active:
                return
        self._exit(ExitCode.UNSTOPPED, "it was told to stop and did not stop within its grace", self._job)

    def _arm(self) -> None:
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
        self._pid = os.getpid()

    def rest(self) -> None:
        """No handler runs, and what comes next may take its time: this process need not die with its lease.

        Between two handlers of one batch the switch stays on, because setting it costs more than a small job
        does. Between them the timer is not moved ahead, so nothing that may wait is done before a rest.
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

        1. A member of a gang waits for the others. From ``job.start`` on, orders reach the job through `InlineWork`.
        2. What may end this process over the job is switched on: its timer, then the watchdogs.
        3. The handler is called.
        4. The same is switched off, the watchdogs first. Where one was about to end the process, this never returns.
        5. The job is reported.

        ``options``: how patient its task wants the watchdogs to be. With ``more_follow`` another job comes at
        once, or a :meth:`rest`.
        """
        session, claim = self._session, job.claim
        gang: GangInfo | None = None
        if session.lapsing():
            job.tell_stop("lease", 0.0)
        if claim.gang_id is not None:
            self.rest()
            gang = wait_for_go(session, job, self._ports)
            for port in job.ports:
                self._ports.release(port)
        work = InlineWork(session, job, self._deadman, self._hard_exit)
        if (claim.gang_id is not None and gang is None) or not job.start(work):
            self._not_started(job)
            return
        context = InlineContext(session, job)
        if claim.model is not None:
            session.model = claim.model
        work.begin()
        self._liveness.job(job.id, job.token)
        self._watch.begin(job, options)
        set_current(context)
        self._capture.begin(job)
        # Where its spans are sent at once, that may wait: it counts as the handler's time.
        spans = tracing.begin(job, session.name)
        with spans.active():
            result, problem, again = self._call(handler, context, job, work)
        spans.end(problem)
        set_current(None)
        output = self._capture.end()
        self._watch.end()
        self._liveness.job(0, 0)
        job.end_work()
        work.end()
        if output is not None:
            self.rest()
            output.finish()
        self._report(job, context, result, problem, again, more_follow)

    def _call(
        self, handler: Callable[..., Any], context: InlineContext, job: ActiveJob, work: InlineWork
    ) -> tuple[Any, BaseException | None, Again | None]:
        """What the handler returned; or what it raised, and what follows from that."""
        payload = job.claim.payload
        result: Any = None
        problem: BaseException | None = None
        again: Again | None = None
        hooks = hooks_of(handler)
        try:
            if hooks is not None:
                hooks.started(context)
            result = handler(context, **payload) if payload else handler(context)
            if isinstance(handler, CoroutineTask):
                result = run_to_end(result, work.interruptible)
        except BaseException as raised:
            # SystemExit and KeyboardInterrupt too: nothing that a handler raises may end the worker.
            problem = raised
        else:
            if result is not None and (why := unfinished(result)) is not None:
                result, problem = None, HandlerUnfit(why)
        if problem is not None:
            again = what_follows(problem, handler, payload, job.claim.attempt)
        if os.getpid() != self._pid:
            # A fork of the handler came back here. It is not a worker and must not become one; no clean-up
            # either, the connections belong to its parent.
            os._exit(problem.code if isinstance(problem, SystemExit) and isinstance(problem.code, int) else 1)
        if hooks is not None:
            hooks.ended(context, result, problem, again)
        return result, problem, again

    def _not_started(self, job: ActiveJob) -> None:
        self.rest()
        job.end_work()
        self._reporter.stopped(job)

    def _report(
        self,
        job: ActiveJob,
        context: InlineContext,
        result: Any,
        problem: BaseException | None,
        again: Again | None,
        more_follow: bool,
    ) -> None:
        if problem is None and not job.must_end and not job.completed_by_handler:
            self._done(job, result, more_follow)
            return
        self.rest()
        told_to_stop = job.stop_reason is not None
        outcome: Outcome = "result"
        if told_to_stop and (problem is not None or (context.stop_seen and result is None)):
            outcome = "stopped"
        elif isinstance(problem, Snoozed):
            outcome = "snoozed"
        elif problem is not None:
            outcome = "error"
        lost = job.lost is not None
        ending = ending_of(
            Attempt(outcome, lost=lost, completed=job.completed_by_handler, told_to_stop=told_to_stop)
        )
        if ending is Ending.NOTHING:
            self._reporter.forget(job)
        elif ending is Ending.COMMITTED_OR_FAILED:
            self._reporter.completed_by_handler(job, None if problem is None else error_of_exception(problem))
        elif ending is Ending.STOPPED:
            if problem is not None:
                log.info("stopped_by_raising", extra={**job.extra, "error": repr(problem)[:500]})
            self._reporter.stopped(job)
        elif isinstance(problem, Snoozed):
            self._reporter.snoozed(job, problem.for_s)
        elif problem is not None and again is not None:
            cause = "port_taken" if _port_taken(problem, job.gang) else "error"
            self._reporter.failed(job, error_of_exception(problem), again=again, cause=cause)
        else:
            self._done(job, result, more_follow)

    def _done(self, job: ActiveJob, result: Any, more_follow: bool) -> None:
        if result is not None:
            # Encoded here and once: what is sent is what was found to be in order.
            result = dumps_result(result, f"the result of task {job.claim.task!r}")
        if not more_follow:
            self.rest()
        self._reporter.done(job, result, more_follow=more_follow)


class HandlerUnfit(TypeError):
    """The handler cannot run any job: calling it runs nothing."""


def what_follows(
    problem: BaseException,
    handler: Callable[..., Any] | None,
    payload: Mapping[str, Any] | None,
    attempt: int,
) -> Again:
    """What follows from what a handler raised. No further attempt where the payload does not fit its parameters."""
    if isinstance(problem, HandlerUnfit):
        return NEVER
    if isinstance(problem, TypeError) and handler is not None:
        function = getattr(handler, "function", handler)
        if misfit(function, payload or {}) is not None:
            return NEVER
    return after(getattr(handler, "retry", None), problem, attempt)


def error_of_exception(problem: BaseException) -> dict[str, Any]:
    """What is kept of an exception. Never raises: a traceback that cannot be formatted is left out."""
    try:
        trace = clean("".join(traceback.format_exception(type(problem), problem, problem.__traceback__)))
    except BaseException:
        trace = "(the traceback could not be formatted)"
    try:
        message = str(problem)
    except BaseException:
        message = "(its message could not be formatted)"
    if isinstance(problem, SystemExit):
        message = f"the handler called sys.exit({message or 0}): return instead, or raise what is wrong"
    return describe(type(problem).__qualname__, message, traceback=trace)


def _port_taken(problem: BaseException, gang: GangInfo | None) -> bool:
    return (
        gang is not None
        and gang.rank == 0
        and isinstance(problem, OSError)
        and problem.errno == errno.EADDRINUSE
    )

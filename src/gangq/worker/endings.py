"""How an attempt ends: what follows from what its handler returned or raised, and what is reported; one decision for
handlers in the main thread, handlers in child processes and commands.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, get_args

from gangq.coroutines import run_to_end
from gangq.errors import CommandStartError, Snoozed
from gangq.hooks import hooks_of
from gangq.proc import cgroup
from gangq.retry import AGAIN, NEVER, Again, after
from gangq.signatures import misfit, unfinished
from gangq.tasks import CoroutineTask
from gangq.watchdogs import ExitCode, Trip
from gangq.worker.reporter import Reporter
from gangq.worker.results import describe, dumps_result

if TYPE_CHECKING:
    from gangq.context import GangInfo
    from gangq.worker.child import Exit
    from gangq.worker.context_impl import HandlerContext
    from gangq.worker.jobs import ActiveJob, StopReason
    from gangq.worker.watching import CommandTrip

_PORT_TAKEN_WITHIN_S = 120.0

WorkEnd = Literal["result", "error", "stopped", "snoozed", "exit 0"]
"""How the work ended, as it says itself: it returned, it raised, it stopped as asked, it is to run again later; a
command exited with 0.
"""
WORK_ENDS = frozenset(get_args(WorkEnd)) - {"exit 0"}
"""What a handler in a child process may say."""

Returned = tuple[Any, BaseException | None, Again | None]
"""What a handler returned or raised, and what follows from that."""

Done = Callable[["ActiveJob", Any], object]
"""Reports that a job is done, with its result as JSON text or None."""


class HandlerUnfit(TypeError):
    """The handler cannot run any job: calling it runs nothing."""


# -- what follows from what a handler returned or raised ---------------------------------------------------


def attempt(
    handler: Callable[..., Any],
    context: HandlerContext,
    payload: Mapping[str, Any] | None,
    run: Callable[[Any], Any] = run_to_end,
) -> Returned:
    """Call the handler, with the hooks of its App around it. ``run`` returns what the coroutine of an async handler
    returns.
    """
    pid, hooks = os.getpid(), hooks_of(handler)
    result: Any = None
    problem: BaseException | None = None
    try:
        if hooks is not None:
            hooks.started(context)
        result = handler(context, **payload) if payload else handler(context)
        if isinstance(handler, CoroutineTask):
            result = run(result)
    except BaseException as raised:
        # SystemExit and KeyboardInterrupt too: nothing that a handler raises may end the worker.
        problem = raised
    return conclude(handler, context, result, problem, pid)


def conclude(
    handler: Callable[..., Any], context: HandlerContext, result: Any, problem: BaseException | None, pid: int
) -> Returned:
    """What follows from that, when the hooks of its end were called. ``pid``: the process that called the handler."""
    again: Again | None = None
    if problem is None and result is not None and (why := unfinished(result)) is not None:
        result, problem = None, HandlerUnfit(why)
    if problem is not None:
        again = what_follows(problem, handler, context.job.payload, context.attempt)
    if os.getpid() != pid:
        # A fork of the handler came back here. It is not a worker, must not become one, and has nothing to say about
        # the job; no clean-up either, the connections belong to its parent.
        os._exit(problem.code if isinstance(problem, SystemExit) and isinstance(problem.code, int) else 1)
    if (hooks := hooks_of(handler)) is not None:
        hooks.ended(context, result, problem, again)
    return result, problem, again


def what_follows(
    problem: BaseException, handler: Any, payload: Mapping[str, Any] | None, attempt: int
) -> Again:
    """What follows from what a handler raised: a function, the task that declares one, or None where none was found.
    No further attempt where the payload does not fit its parameters.
    """
    if isinstance(problem, HandlerUnfit):
        return NEVER
    if isinstance(problem, TypeError) and handler is not None:
        function = getattr(handler, "function", handler)
        if misfit(function, payload or {}) is not None:
            return NEVER
    return after(getattr(handler, "retry", None), problem, attempt)


def work_end(
    context: HandlerContext, result: Any, problem: BaseException | None, again: Again | None
) -> dict[str, Any]:
    """How a handler ended, in the words in which a child process says it: ``kind`` is a :data:`WorkEnd`."""
    if problem is None:
        broken_off = context.stop_seen and result is None
        return {"kind": "stopped"} if broken_off else {"kind": "result", "result": result}
    if context.told_to_stop:
        return {"kind": "stopped", "error": error_of_exception(problem)}
    if isinstance(problem, Snoozed):
        return {"kind": "snoozed", "for_s": problem.for_s}
    again = again or AGAIN
    error = error_of_exception(problem)
    return {"kind": "error", "error": error, "retryable": again.retryable, "retry_in_s": again.delay_s}


def error_of_exception(problem: BaseException) -> dict[str, Any]:
    """What is kept of an exception. Never raises: a traceback that cannot be formatted is left out."""
    try:
        trace = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    except BaseException:
        trace = "(the traceback could not be formatted)"
    try:
        message = str(problem)
    except BaseException:
        message = "(its message could not be formatted)"
    if isinstance(problem, SystemExit):
        message = f"the handler called sys.exit({message or 0}): return instead, or raise what is wrong"
    return describe(type(problem).__qualname__, message, traceback=trace)


# -- what is reported --------------------------------------------------------------------------------------


class Ending(Enum):
    """What is reported of an attempt."""

    NOTHING = "its claim is lost: the database knows more than this worker"
    COMMITTED_OR_FAILED = (
        "the handler completed the job in its own transaction, which it may not have committed"
    )
    DONE = "done"
    TRIPPED = "a watchdog ended it"
    STOPPED = "it was told to stop, and did"
    SNOOZED = "it handed itself back, to be run again later"
    ERROR = "it failed, and said how"
    FAILED = "it failed, and said nothing"


def ending_of(
    job: ActiveJob,
    said: WorkEnd | None,
    *,
    trip: ExitCode | None = None,
    cause: str = "exit",
    socket_gone: bool = False,
) -> Ending:
    """Decide what to report of an attempt, once nothing of it runs any more. The first rule that fits decides.

    ``trip``: the code of the watchdog that tripped. ``cause``: what ended the process, as in
    :class:`gangq.worker.child.Exit`. ``socket_gone``: it could not reach its worker, whose socket is gone.
    """
    if job.lost is not None:
        return Ending.NOTHING
    if job.completed_by_handler:
        return Ending.COMMITTED_OR_FAILED
    if said == "result":
        return Ending.DONE
    # A process that exited by itself while the watchdog decided was not ended by it. Out of memory is different: the
    # kernel killed it, and the trip says so.
    if trip is not None and (cause != "exit" or trip is ExitCode.MEMORY):
        return Ending.TRIPPED
    # Its guardian ended it: the lease was about to end, or the worker had died.
    if cause in ("deadline", "orphan"):
        return Ending.STOPPED
    if job.stop_reason is not None and (cause in ("stop", "kill") or said == "stopped"):
        return Ending.STOPPED
    if said == "snoozed":
        return Ending.SNOOZED
    if said == "error":
        return Ending.ERROR
    if said == "exit 0":
        return Ending.DONE
    # What it could not say or ask may be why it failed.
    return Ending.STOPPED if socket_gone else Ending.FAILED


def report_as_said(
    reporter: Reporter,
    job: ActiveJob,
    ending: Ending,
    said: Mapping[str, Any],
    done: Done,
    *,
    cause: str = "error",
    unless_told: StopReason | None = None,
    log_tail: str | None = None,
) -> None:
    """Report an ending for which the work has words of its own: ``said``, as :func:`work_end` makes them."""
    if ending is Ending.NOTHING:
        reporter.forget(job)
    elif ending is Ending.COMMITTED_OR_FAILED:
        reporter.completed_by_handler(job, said.get("error"))
    elif ending is Ending.DONE:
        result = said.get("result")
        # Encoded here and once: what is sent is what was found to be in order.
        done(job, None if result is None else dumps_result(result, f"the result of task {job.claim.task!r}"))
    elif ending is Ending.STOPPED:
        reporter.stopped(job, unless_told=unless_told)
    elif ending is Ending.SNOOZED:
        reporter.snoozed(job, said["for_s"])
    else:
        error = {"host": socket.gethostname(), **said["error"]}
        if log_tail is not None:
            error["log_tail"] = log_tail
        again = Again(said.get("retryable") is not False, said.get("retry_in_s"))
        reporter.failed(job, error, again=again, cause=cause)


# -- of a command, or of a handler in a child process, once nothing of it is left ----------------------------


def report(
    reporter: Reporter,
    job: ActiveJob,
    ended: Exit,
    done: Done,
    *,
    tail: str,
    ran_s: float,
    is_handler: bool,
    tripped: CommandTrip,
    socket_gone: bool = False,
) -> None:
    """Report a job whose processes are gone; ``done(job, result)`` if it is done.

    ``tail`` is the last of its output. ``is_handler``: it has to say how it ended; for a command its exit status
    does. ``socket_gone``: the socket of its worker was gone when it ended.
    """
    said: WorkEnd | None = (job.work_end or {}).get("kind")
    if said is None and ended.code == 0 and not is_handler:
        said = "exit 0"
    # Several jobs of a process may trip at once: it was ended over the first one.
    trip = tripped.trip if tripped.over is None else None
    code = None if trip is None else trip.code
    ending = ending_of(job, said, trip=code, cause=ended.cause, socket_gone=socket_gone)
    cause = "port_taken" if _port_taken(job.gang, tail, ran_s) else "error"
    if ending is Ending.TRIPPED and trip is not None:
        reporter.tripped(job, trip, {**tripped.evidence, "log_tail": tail})
    elif ending is not Ending.FAILED:
        by_guardian = ended.cause in ("deadline", "orphan")
        report_as_said(
            reporter,
            job,
            ending,
            job.work_end or {},
            done,
            cause=cause,
            unless_told="lease" if by_guardian or not socket_gone else "directory",
            log_tail=tail,
        )
    elif (over := tripped.over) is not None:
        why = f"its process was ended over job {over.id}, which ran there too"
        reporter.failed(job, describe("OtherJob", why), cause="other_job")
    else:
        # As a shell would put it.
        status = ended.code if ended.signal is None else 128 + ended.signal
        described = describe("ExitStatus", how(ended), exit_status=status, log_tail=tail)
        reporter.failed(job, described, cause=cause)


def report_not_started(reporter: Reporter, job: ActiveJob, problem: CommandStartError | None = None) -> None:
    """Report a job of which nothing ran: it was told to stop, or could not be started."""
    job.begin_report()
    if problem is None:
        reporter.stopped(job)
    elif problem.stage == "deadline":
        reporter.stopped(job, unless_told="lease")
    else:
        reporter.failed(job, describe("CommandStartError", str(problem)))


def note_out_of_memory(
    tripped: CommandTrip, job: ActiveJob, ended: Exit, oom_kills_before: int | None
) -> None:
    """A process that the kernel has killed for want of memory counts as tripped, unless a watchdog was first."""
    if tripped.trip is None and _out_of_memory(ended, oom_kills_before):
        message = "the kernel killed a process of it for want of memory"
        tripped.trip = Trip(ExitCode.MEMORY, "OutOfMemory", message, job=job)


def _out_of_memory(ended: Exit, oom_kills_before: int | None) -> bool:
    """Whether it died of the kernel's hunt for memory: a plain SIGKILL looks the same but for the counter."""
    if ended.signal != signal.SIGKILL or ended.cause != "exit" or oom_kills_before is None:
        return False
    return (cgroup.oom_kills(cgroup.find("memory")) or 0) > oom_kills_before


def how(ended: Exit) -> str:
    """How it ended, in words."""
    if ended.cause == "guardian_lost":
        return "its guardian process was killed, and the command with it; its exit status is not known"
    if ended.signal is not None:
        try:
            return f"killed by {signal.Signals(ended.signal).name}"
        except ValueError:
            return f"killed by signal {ended.signal}"
    if ended.code == 0:
        return "exited with 0 without having said how its handler ended"
    return f"exited with {ended.code}"


def _port_taken(gang: GangInfo | None, tail: str, ran_s: float) -> bool:
    """Whether rank 0 ended because another program had taken its rendezvous port, which is no fault of the job."""
    if gang is None or gang.rank != 0 or ran_s > _PORT_TAKEN_WITHIN_S:
        return False
    taken = "EADDRINUSE" in tail or "Address already in use" in tail
    return taken and str(gang.master_port) in tail

"""What is reported of a command, or of a handler in a child process, once nothing of it is left."""

from __future__ import annotations

import signal

from gangq.context import GangInfo
from gangq.errors import CommandStartError
from gangq.gpu.memory import container_memory
from gangq.watchdogs import ExitCode, Trip
from gangq.worker.child import Exit
from gangq.worker.endings import Done, Ending, WorkEnd, ending_of, report_as_said
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.results import describe
from gangq.worker.watching import CommandTrip

_PORT_TAKEN_WITHIN_S = 120.0


def report(
    reporter: Reporter,
    job: ActiveJob,
    exit: Exit,
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
    if said is None and exit.code == 0 and not is_handler:
        said = "exit 0"
    # Several jobs of a process may trip at once: it was ended over the first one.
    trip = tripped.trip if tripped.over is None else None
    code = None if trip is None else trip.code
    ending = ending_of(job, said, trip=code, cause=exit.cause, socket_gone=socket_gone)
    cause = "port_taken" if _port_taken(job.gang, tail, ran_s) else "error"
    if ending is Ending.TRIPPED and trip is not None:
        reporter.tripped(job, trip, {**tripped.evidence, "log_tail": tail})
    elif ending is not Ending.FAILED:
        by_guardian = exit.cause in ("deadline", "orphan")
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
        status = exit.code if exit.signal is None else 128 + exit.signal
        described = describe("ExitStatus", how(exit), exit_status=status, log_tail=tail)
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
    return (container_memory().oom_kills or 0) > oom_kills_before


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

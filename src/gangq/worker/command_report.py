"""What is reported of a command, or of a handler in a child process, once nothing of it is left."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from gangq.context import GangInfo
from gangq.errors import CommandStartError
from gangq.gpu.memory import container_memory
from gangq.watchdogs import ExitCode, Trip
from gangq.worker.child import Exit
from gangq.worker.endings import Done, Ending, WorkEnd, ending_of, report_as_said
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter, describe
from gangq.worker.watching import CommandTrip

_PORT_TAKEN_WITHIN_S = 120.0


@dataclass(frozen=True)
class Ended:
    """A job whose processes are gone."""

    job: ActiveJob
    exit: Exit
    tail: str
    """The last of its output."""
    ran_s: float
    gang: GangInfo | None
    is_handler: bool
    """Whether it has to say how it ended; for a command its exit status does."""
    tripped: CommandTrip
    socket_gone: bool = False
    """Whether the socket of its worker was gone when it ended."""

    @property
    def trip(self) -> Trip | None:
        """The one that ended it. Several jobs of a process may trip at once: it was ended over the first one."""
        return self.tripped.trip if self.tripped.over is None else None

    @property
    def ending(self) -> Ending:
        """What to report."""
        said: WorkEnd | None = (self.job.work_end or {}).get("kind")
        if said is None and self.exit.code == 0 and not self.is_handler:
            said = "exit 0"
        code = None if self.trip is None else self.trip.code
        return ending_of(self.job, said, trip=code, cause=self.exit.cause, socket_gone=self.socket_gone)


def report(reporter: Reporter, ended: Ended, done: Done) -> None:
    """Report it; ``done(job, result)`` if it is done."""
    job, trip, ending = ended.job, ended.trip, ended.ending
    cause = "port_taken" if _port_taken(ended) else "error"
    if ending is Ending.TRIPPED and trip is not None:
        reporter.tripped(job, trip, {**ended.tripped.evidence, "log_tail": ended.tail})
    elif ending is not Ending.FAILED:
        by_guardian = ended.exit.cause in ("deadline", "orphan")
        report_as_said(
            reporter,
            job,
            ending,
            job.work_end or {},
            done,
            cause=cause,
            unless_told="lease" if by_guardian or not ended.socket_gone else "directory",
            log_tail=ended.tail,
        )
    elif (over := ended.tripped.over) is not None:
        why = f"its process was ended over job {over.id}, which ran there too"
        reporter.failed(job, describe("OtherJob", why), cause="other_job")
    else:
        status = _status(ended.exit)
        described = describe("ExitStatus", how(ended.exit), exit_status=status, log_tail=ended.tail)
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


def _status(ended: Exit) -> int | None:
    """As a shell would put it."""
    return 128 + ended.signal if ended.signal is not None else ended.code


def _port_taken(ended: Ended) -> bool:
    """Whether rank 0 ended because another program had taken its rendezvous port, which is no fault of the job."""
    gang = ended.gang
    if gang is None or gang.rank != 0 or ended.ran_s > _PORT_TAKEN_WITHIN_S:
        return False
    taken = "EADDRINUSE" in ended.tail or "Address already in use" in ended.tail
    return taken and str(gang.master_port) in ended.tail

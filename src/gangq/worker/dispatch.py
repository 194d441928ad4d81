"""Which code runs for a claimed job, and where: a handler here, a handler in a child process, or a command."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gangq import logqueue
from gangq.app import App
from gangq.commands import COMMAND
from gangq.errors import UnknownTask, Unrunnable
from gangq.retry import Again
from gangq.tasks import CoroutineTask
from gangq.worker.endings import Done
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.results import describe
from gangq.worker.runner_command import Command, CommandRunner
from gangq.worker.runner_inline import InlineRunner

if TYPE_CHECKING:
    from gangq.tasks import Task

log = logging.getLogger("gangq.worker.dispatch")


class Dispatcher:
    """Runs claimed jobs. Thread-safe."""

    def __init__(
        self,
        app: App | None,
        target: str | None,
        devices: int,
        commands: CommandRunner,
        reporter: Reporter,
        ports: PortHolder,
        unreachable: str | None = None,
    ) -> None:
        """``target`` (``module:app``) is where children find the app; None: nowhere, and ``unreachable`` says why.
        ``devices`` is how many this worker offers.
        """
        self._app = app
        self._target = target
        self._devices = devices
        self._commands = commands
        self._reporter = reporter
        self._ports = ports
        self._unreachable = unreachable

    def run(
        self, job: ActiveJob, inline: InlineRunner | None, done: Done, *, more_follow: bool = False
    ) -> None:
        """Run one job to its end and report it; ``done`` is for one that is done in a child.

        ``inline`` is the runner of the main thread, for the main thread; None: the job runs in a child.
        ``more_follow``: another job of the main thread waits to be run.
        """
        if log.isEnabledFor(logging.DEBUG):
            if inline is not None:
                inline.rest()  # To write a line may wait for its reader.
            log.debug("job_begins", extra=job.extra)
        with logqueue.lines_about(job):
            try:
                self._run(job, inline, done, more_follow)
            except Exception as problem:
                # A fault of ours, or of this host (no space left, no more threads). Nothing of the job runs any more:
                # a runner whose job survives SIGKILL does not come back here.
                log.exception("runner_fault", extra=job.extra)
                job.begin_report()
                if inline is not None:
                    inline.rest()
                self._reporter.failed(
                    job,
                    describe(type(problem).__qualname__, f"its worker could not run it: {problem}"),
                    again=Again(not isinstance(problem, Unrunnable)),
                )
            finally:
                # Its runner lets go of them just before its code begins, which may not have come to pass.
                self._ports.release(*job.ports)

    def _run(self, job: ActiveJob, inline: InlineRunner | None, done: Done, more_follow: bool) -> None:
        task = job.claim.task
        found = None if task == COMMAND else self._find(task)
        if inline is not None:
            if found is not None and not found.isolate and self._owns_all_or_none(job):
                inline.run(job, found, found.watch, more_follow=more_follow)
                return
            inline.rest()
        if found is None:
            self._commands.run(job, Command.of_payload(job.claim.payload), done)
            return
        if self._target is None:
            raise Unrunnable(self._unreachable)
        shared = isinstance(found, CoroutineTask) and not found.isolate and _is_like_any_other(job)
        self._commands.run(job, Command.of_handler(self._target, task, found.watch, shared), done)

    def _find(self, task: str) -> Task[..., Any]:
        if self._app is None:
            raise UnknownTask(f"task {task!r} is not known to this worker, which runs commands only")
        return self._app.get_task(task)

    def _owns_all_or_none(self, job: ActiveJob) -> bool:
        """Whether this process may serve the job itself. A GPU runtime reads its visible devices once per
        process: a job that holds some of this worker's devices and not others needs a process of its own.
        """
        return len(job.claim.devices) in (0, self._devices)


def _is_like_any_other(job: ActiveJob) -> bool:
    """Whether a process may run it beside other jobs: it has no devices, which are visible or not to a whole process,
    and is in no gang, whose environment is its own.
    """
    return not job.claim.devices and job.claim.gang_id is None

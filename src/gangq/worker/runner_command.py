"""Running a command, or a Python handler in a child process, under a guardian.

The order at the end is the point of it all: the process tree is confirmed gone, then its log is stored, then
the database is told. Capacity that is given away earlier is given away twice.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gangq import tracing
from gangq.context import Checkpoint
from gangq.errors import CommandStartError, Stopped, Unrunnable
from gangq.gpu import Detection
from gangq.proc import cgroup, procfs, statefile
from gangq.proc.proof import HostIdentity
from gangq.watchdogs import dumps
from gangq.worker import child_main, handler_info
from gangq.worker.child import Child, Exit
from gangq.worker.drain import Drain
from gangq.worker.endings import Done, how, note_out_of_memory, report, report_not_started
from gangq.worker.environment import Surroundings, for_child, for_shared, scrubbed, visible_devices
from gangq.worker.forkserver import ForkServer
from gangq.worker.gangs import PortHolder, wait_for_go
from gangq.worker.jobs import ActiveJob
from gangq.worker.output import LogShipper, log_sizes
from gangq.worker.repeating import until_answered
from gangq.worker.reporter import Reporter
from gangq.worker.results import clean
from gangq.worker.session import Session
from gangq.worker.shared import SharedJob, SharedProcess, SharedProcesses, SharedTrip
from gangq.worker.shared_orders import Begin
from gangq.worker.socket_server import SocketServer
from gangq.worker.watching import CommandTrip, JobWatch, Watching

if TYPE_CHECKING:
    from gangq.task_options import WatchOptions

log = logging.getLogger("gangq.worker.command")

_TAIL_BYTES = 8192
_SLICE_S = 0.5
_STUCK_SLICE_S = 1.0
_PROOF_S = 40.0
"""After a fault of this worker, how long to wait for the end of a command before it counts as beyond SIGKILL: longer
than its guardian waits.
"""


@dataclass(frozen=True)
class Command:
    """What to start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str | None
    target: str | None = None
    """Where the App of a handler is (``module:app``); None: it is no handler."""
    watch: WatchOptions | None = None
    shared: bool = False
    """Whether it runs in one process with the other jobs of its task."""

    @classmethod
    def of_payload(cls, payload: Any) -> Command:
        """A submitted command: ``{"argv": [...], "shell": false, "env": {}, "cwd": null}``.

        Raises:
            Unrunnable: it is not of that form; the message says what is wrong.
        """
        if not isinstance(payload, dict):
            raise Unrunnable(f"a command's payload is an object with argv, not {payload!r}")
        argv, env, cwd = payload.get("argv"), payload.get("env") or {}, payload.get("cwd")
        if not isinstance(argv, list) or not argv or not all(isinstance(arg, str) for arg in argv):
            raise Unrunnable(f"argv is {argv!r}: a list of strings, the program first")
        if not isinstance(env, dict) or not all(
            isinstance(value, str) and "=" not in name for name, value in env.items()
        ):
            raise Unrunnable("env is an object of names and strings")
        # Who a process is, is said by its worker. `submit` in SQL takes any payload, hence here.
        ours = sorted(name for name in env if name.startswith("GANGQ_"))
        if ours:
            log.warning("variables_dropped", extra={"names": ours})
            env = {name: value for name, value in env.items() if name not in ours}
        if cwd is not None and not isinstance(cwd, str):
            raise Unrunnable(f"cwd is {cwd!r}: a path, or null for the worker's own directory")
        if payload.get("shell"):
            argv = ["/bin/sh", "-c", " ".join(argv)]
        return cls(argv, env, cwd)

    @classmethod
    def of_handler(
        cls, target: str, task: str, watch: WatchOptions | None = None, shared: bool = False
    ) -> Command:
        """The Python handler of this task, found at ``module:app`` or ``/path/to/file.py:app``."""
        argv, env = child_main.program("gangq.worker.child_main", target, task)
        return cls(argv, env, None, target=target, watch=watch, shared=shared)


class _Ready(NamedTuple):
    """What a job needs to start."""

    checkpoint: Checkpoint | None
    forks: ForkServer | None
    """What to fork it from; None: it is executed."""


class CommandRunner:
    """Runs commands, each in the thread that calls :meth:`run`."""

    def __init__(
        self,
        session: Session,
        reporter: Reporter,
        ports: PortHolder,
        detection: Detection,
        server: SocketServer,
        watching: Watching,
        drain: Drain,
        surroundings: Surroundings,
        guarded: Callable[[int], Callable[[], None]] = lambda _: lambda: None,
    ) -> None:
        """``guarded(pid)`` is called for every guardian; what it returns is called once that guardian has ended."""
        self._guarded = guarded
        self._surroundings = surroundings
        self._watching = watching
        self._drain = drain
        self._session = session
        self._reporter = reporter
        self._ports = ports
        self._detection = detection
        self._server = server
        shown = detection.visible_env(detection.devices)
        environ = {"PYTHONUNBUFFERED": "1", **scrubbed(surroundings.environ), **shown}
        self._forks = ForkServer(environ, surroundings.directory, session.mark)
        self._shared = SharedProcesses(session.control, server.attach)
        self._numbers = iter(range(1, sys.maxsize))
        self._lock = threading.Lock()

    def close(self) -> None:
        """End what is kept for the next job. What runs goes on."""
        self._shared.close()
        self._forks.close()

    def run(self, job: ActiveJob, command: Command, done: Done) -> None:
        """Run one job to its end and report it: ``done(job, result)`` if it is done."""
        directory = self._session.directory / f"{job.id}-{job.token}"
        try:
            try:
                directory.mkdir(mode=0o700)
            except FileNotFoundError:
                self._hand_back_without_directory(job)
                report_not_started(self._reporter, job)
                return
            self._run(job, command, directory, done)
        finally:
            self._server.withdraw(job)
            shutil.rmtree(directory, ignore_errors=True)

    def _hand_back_without_directory(self, job: ActiveJob) -> bool:
        """If this worker's directory is gone, have the job, of which nothing runs, handed back."""
        if self._session.directory.is_dir():
            return False
        self._drain.directory_gone(self._session.directory)
        job.tell_stop(self._drain.reason, 0.0)
        return True

    def _run(self, job: ActiveJob, command: Command, directory: Path, done: Done) -> None:
        """1. Wait for what it needs to start. 2. Start it. 3. Wait until nothing of it is left. 4. Report it."""
        ready = self._made_ready(job, command, directory)
        if ready is None:
            report_not_started(self._reporter, job)
            return
        spans = tracing.begin(job, self._session.name)
        begun = self._begun(job, command, directory, ready, spans.traceparent)
        self._ports.release(*job.ports)
        started_at = time.monotonic()
        oom_kills = cgroup.oom_kills(cgroup.find("memory"))
        try:
            with begun as (child, tripped):
                gone = self._until_gone(job, child, command, tripped)
                if not gone.tree_dead:
                    return
                tail = clean(child.log_tail(_TAIL_BYTES).decode("utf-8", "replace"))
        except CommandStartError as problem:
            spans.end(str(problem))
            report_not_started(
                self._reporter, job, None if self._hand_back_without_directory(job) else problem
            )
            return
        handed_back = job.stop_reason is not None or (job.work_end or {}).get("kind") in (
            "stopped",
            "snoozed",
        )
        spans.end(None if gone.code == 0 or handed_back else how(gone))
        note_out_of_memory(tripped, job, gone, oom_kills)
        report(
            self._reporter,
            job,
            gone,
            done,
            tail=tail,
            ran_s=time.monotonic() - started_at,
            is_handler=command.target is not None,
            tripped=tripped,
            socket_gone=not self._session.directory.is_dir(),
        )

    def _made_ready(self, job: ActiveJob, command: Command, directory: Path) -> _Ready | None:
        """Wait for the fork server, the checkpoint and the gang, and announce the job. None: it is not to start."""
        session = self._session
        if session.lapsing():
            job.tell_stop("lease", 0.0)
        # First of all: what it is given from here on, its budget among it, is not spent on an import.
        forked = command.target is not None and self._forks.warm(
            command.target, lambda: job.must_end or session.ended.is_set()
        )
        try:
            checkpoint = None if job.must_end else handler_info.fetch_checkpoint(session, job, directory)
        except Stopped:
            return None
        may_go = job.claim.gang_id is None or wait_for_go(session, job, self._ports) is not None
        if job.must_end or session.ended.is_set() or not may_go:
            return None
        self._server.announce(job, checkpoint)
        return _Ready(checkpoint, self._forks if forked else None)

    def _begun(
        self, job: ActiveJob, command: Command, directory: Path, ready: _Ready, trace: str | None
    ) -> contextlib.AbstractContextManager[tuple[Child | SharedJob, CommandTrip]]:
        """The job in a process; it is started on entering."""
        if command.shared:
            return self._in_shared(job, command, directory, ready.forks, trace)
        env = for_child(
            job,
            base=self._surroundings.environ,
            own=command.env,
            devices=visible_devices(self._detection, job.claim.devices),
            checkpoint=ready.checkpoint,
            socket_path=self._server.path,
            traceparent=trace,
        )
        return self._alone(job, command, env, directory, ready.forks)

    @contextlib.contextmanager
    def _alone(
        self, job: ActiveJob, command: Command, env: dict[str, str], directory: Path, forks: ForkServer | None
    ) -> Iterator[tuple[Child, CommandTrip]]:
        """With a process of its own for the job."""
        child = self._start(job, command, env, directory / "output", forks)
        with child, self._known(child):
            yield child, CommandTrip(self._watching, job, child)

    @contextlib.contextmanager
    def _in_shared(
        self, job: ActiveJob, command: Command, directory: Path, forks: ForkServer | None, trace: str | None
    ) -> Iterator[tuple[SharedJob, CommandTrip]]:
        """With the job in the process that runs those of its task."""
        session = self._session

        def start(process: SharedProcess) -> None:
            env = for_shared(
                process.key,
                base=self._surroundings.environ,
                own=command.env,
                devices=visible_devices(self._detection, []),
                socket_path=self._server.path,
            )
            log_path = session.directory / f"{process.key}.output"
            process.closing.callback(statefile.remove, session.directory, log_path.name)
            process.child = self._start(job, command, env, log_path, forks)
            process.closing.enter_context(self._known(process.child))
            process.set_deadline(session.kill_at, session.terms.grace_s)

        begin = Begin(job.key, str(directory / "output"), log_sizes(session.terms), trace)
        with self._shared.joined(job, begin, start) as shared:
            yield shared, SharedTrip(self._watching, shared)

    @contextlib.contextmanager
    def _known(self, child: Child) -> Iterator[None]:
        """With its guardian known to those who look after this worker's processes."""
        over = self._guarded(child.guardian_pid)
        try:
            with self._watching.excluding(child.guardian_pid):
                yield
        finally:
            over()
            statefile.remove(self._session.directory, dumps.path_of(self._session.directory, child.pid).name)

    def _start(
        self, job: ActiveJob, command: Command, env: dict[str, str], log_path: Path, forks: ForkServer | None
    ) -> Child:
        session = self._session
        home = session.cgroups
        head, tail = log_sizes(session.terms)
        with self._lock:
            number = next(self._numbers)
        return Child.start(
            command.argv,
            env,
            cwd=self._surroundings.path(command.cwd),
            log_path=log_path,
            mark=f"{session.mark}/{number}",
            deadline_boottime=session.kill_at,
            grace_s=session.terms.grace_s,
            orphan_grace_s=min(procfs.ORPHAN_GRACE_S, session.terms.grace_s),
            log_head=head,
            log_tail=tail,
            group=None if home is None else f"{home}/{cgroup.name(session.mark, job.id, job.token)}",
            forks=forks,
        )

    def _until_gone(
        self, job: ActiveJob, child: Child | SharedJob, command: Command, tripped: CommandTrip
    ) -> Exit:
        """Watch it, and wait until its whole tree is gone; see :meth:`_tree_gone`.

        After a fault of this worker the tree is killed first, and the fault is raised when that is gone: a job is
        reported only then.
        """
        shipper = LogShipper(self._session, job, child.read_new_output)
        fault: Exception | None = None
        try:
            ended = self._watched(job, child, command, tripped, shipper)
        except Exception as problem:
            fault = problem
            log.error("job_ended_after_fault", extra={**job.extra, "error": repr(fault)})
            ended = self._killed(job, child)
        gone = self._tree_gone(job, child, ended)
        if gone.tree_dead and fault is not None:
            raise fault
        if gone.tree_dead:
            shipper.finish(child.not_kept)
        return gone

    def _watched(
        self,
        job: ActiveJob,
        child: Child | SharedJob,
        command: Command,
        tripped: CommandTrip,
        shipper: LogShipper,
    ) -> Exit:
        session = self._session
        watch = JobWatch(self._watching, tripped, pids=lambda: [child.pid])
        try:
            if job.start(child):
                # A renewal between the start and this line went past it.
                child.set_deadline(session.kill_at, session.terms.grace_s)
                watch.begin(job, command.watch)
            else:
                child.stop(session.terms.grace_s if job.lost is None else 0.0)
            while (ended := child.wait(_SLICE_S)) is None:
                shipper.ship()
        finally:
            watch.close()
        return ended

    def _killed(self, job: ActiveJob, child: Child | SharedJob) -> Exit:
        """Kill it, and wait until it has ended or counts as beyond SIGKILL."""
        told = False
        stuck_at = time.monotonic() + _PROOF_S
        while time.monotonic() < stuck_at:
            with self._end_faults(job):
                if not told:
                    child.stop(0.0)
                    told = True
                if (ended := child.wait(_SLICE_S)) is not None:
                    return ended
        return Exit(None, None, False, (child.pid,), "stuck")

    def _tree_gone(self, job: ActiveJob, child: Child | SharedJob, ended: Exit) -> Exit:
        """Its end once no process of it is left.

        What is alive and beyond SIGKILL has its worker end with 87, so that its end is proven from outside. Nothing
        may be said about such a job, because its devices are not free. The main thread has to end then: in it this
        returns although ``tree_dead`` is False.
        """
        while not ended.tree_dead:
            self._unkillable(job, ended.stuck or (child.pid,))
            if threading.current_thread() is threading.main_thread():
                return ended
            time.sleep(_STUCK_SLICE_S)
            with self._end_faults(job):
                ended = child.wait(_SLICE_S) or ended
        self._session.stuck.pop(job.token, None)
        job.begin_report()
        return ended

    @contextlib.contextmanager
    def _end_faults(self, job: ActiveJob) -> Iterator[None]:
        """A fault in here is logged: its processes may be alive, and what has failed may work a moment later."""
        try:
            yield
        except Exception:
            log.exception("end_fault", extra=job.extra)
            time.sleep(_SLICE_S)

    def _unkillable(self, job: ActiveJob, pids: Sequence[int]) -> None:
        """Report it, so that worker and devices are out of service, before this worker begins to end with 87. A
        repeat changes nothing.
        """
        session = self._session
        if job.token in session.stuck:
            return
        session.stuck[job.token] = tuple(pids)
        log.critical("command_stuck", extra={**job.extra, "pids": pids})
        try:
            evidence = {
                "by": "its worker",
                "pid": pids[0],
                "job": job.id,
                "boot_id": HostIdentity.here().boot_id,
                "threads": {str(pid): procfs.threads(pid) for pid in pids[:8]},
            }
            until_answered(
                lambda: session.thread_client.report_stuck(
                    worker=session.name, incarnation=session.incarnation, evidence=evidence
                ),
                "report_stuck",
                lambda: session.ended.is_set() or session.lapsed(),
            )
        except Exception as problem:
            log.error("stuck_not_reported", extra={**job.extra, "error": str(problem)})
        self._drain.begin()

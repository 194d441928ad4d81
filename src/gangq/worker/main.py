"""A worker: registers, claims, runs, keeps its lease, and stops as asked.

The main thread claims and runs handlers, because a handler may need it (signals, GUI toolkits, CUDA). Beside
it run daemon threads with one duty each: the lease, the ear, the tick, results, the socket, the drain. An
incarnation is a :class:`gangq.worker.session.Session`; when the database ends it, the worker makes sure that
nothing of it runs any more and registers anew.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq import private
from gangq.app import COMMAND, App
from gangq.client import Client
from gangq.errors import GangqError, IncarnationEnded, UnknownTask
from gangq.gpu import detect, device_sampler
from gangq.watchdogs import ExitCode, signs
from gangq.watchdogs.deadman import Deadman, boottime
from gangq.worker import fitness, host_record, procfs
from gangq.worker.child_main import app_target
from gangq.worker.claims import AlongUnderWay, ClaimSource
from gangq.worker.drain import Drain
from gangq.worker.epochs import EpochWatch
from gangq.worker.forks import ForkGuard
from gangq.worker.held import HeldReports
from gangq.worker.jobs import ActiveJob
from gangq.worker.lease import LeaseKeeper, LeaseWatch
from gangq.worker.lines import LineWatch
from gangq.worker.listener import Listener
from gangq.worker.liveness import Liveness
from gangq.worker.maintenance import Maintenance
from gangq.worker.options import WorkerOptions
from gangq.worker.output import Capture
from gangq.worker.ports import PortHolder
from gangq.worker.registration import PROCESS_MARK, register
from gangq.worker.reporter import Reporter, describe
from gangq.worker.retry import TRANSIENT, backoff, until_answered
from gangq.worker.runner_command import Command, CommandRunner
from gangq.worker.runner_inline import HardExit, InlineRunner
from gangq.worker.session import Session
from gangq.worker.signals import SignalWatch
from gangq.worker.socket_server import SocketServer
from gangq.worker.watching import JobWatch, ProcessTrip, Watching

if TYPE_CHECKING:
    from gangq.app import Task
    from gangq.client.rows import Claim, Outcome

log = logging.getLogger("gangq.worker")

_SOCKET_PATH_MAX = 100
_JOIN_S = 2.0
_DOUBT_S = 1.0
"""How long to wait before looking again whether the driver answers."""
_CONNECTION_S = 3.0
_FEW = 16


class _Unrunnable(GangqError):
    """No attempt can begin: the payload is malformed, or the App is in no module that a child could import."""


class Worker:
    """One worker process. :meth:`run` blocks until it has stopped."""

    def __init__(
        self,
        app: App | None,
        options: WorkerOptions,
        client: Client,
        *,
        target: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """``target`` (``module:app``) is where child processes find the app [searched for when needed]."""
        self.app = app
        self.options = options.resolved()
        self.client = client
        self._target = target
        self._environ = dict(os.environ) if environ is None else dict(environ)
        self._drain = Drain(self.options.drain_timeout_s)
        self._signals = SignalWatch(self.stop)
        self._deadman: Deadman | None = None
        self._liveness = Liveness.of_environment(dump_file=_stderr())
        # Not imported for this: most workers have no private server.
        embedded = sys.modules.get("gangq.embedded")
        for pid in [] if embedded is None else embedded.started_here:
            self._liveness.spare(pid)
        self._detection = detect(self.options.devices, worker=self.options.name, environ=self._environ)
        self.slots = self._default_slots() if self.options.slots is None else self.options.slots
        """How many jobs run at once."""
        self._ports = PortHolder(min(self.slots, 16))
        for warning in self._detection.warnings:
            log.warning("devices", extra={"advice": warning})
        self._sampler = device_sampler(self._detection, self._environ)
        self._waiting: deque[ActiveJob] = deque()
        self._homeless = False
        self._forks: ForkGuard | None = None

    @property
    def kind(self) -> str:
        """``inline`` (handlers in this process, one slot) or ``command`` (everything in child processes)."""
        return "inline" if self.app is not None and self.slots == 1 else "command"

    def _default_slots(self) -> int:
        """One for each device, or devices would lie idle that no job can ask for.

        Several jobs need a process each. Where a handler's process could not find the App, it stays at one.
        """
        wanted = 1 if self.options.prefetch > 1 else max(1, len(self._detection.devices))
        if wanted > 1 and self.app is not None and self._target is None:
            try:
                app_target(self.app)
            except GangqError as problem:
                log.warning("one_slot", extra={"devices": wanted, "reason": str(problem)})
                return 1
        return wanted

    @property
    def tasks(self) -> list[str]:
        """The tasks it can run."""
        own = {} if self.app is None else self.app.tasks
        names = {name for name, task in own.items() if task.function is not None}
        return sorted(names | ({COMMAND} if self.options.commands else set()))

    @property
    def task_options(self) -> dict[str, dict[str, Any]]:
        """What they are declared with, per task that is declared."""
        own = {} if self.app is None else self.app.tasks
        return {name: task.defaults.declared() for name, task in own.items() if task.function is not None}

    def stop(self) -> None:
        """Drain; a second call skips the grace. From any thread."""
        self._drain.request()

    def run(self) -> int:
        """Serve until stopped and return the exit code: 0, or 87 when a process could not be killed.

        Raises:
            Unfit: this host or worker must not take work; the message says why (exit code 88).
            WorkerNameTaken: another live worker has this name.
            GangqError: the database is not there or refuses.
        """
        in_main = threading.current_thread() is threading.main_thread()
        shown = self._detection.visible_env(self._detection.devices, environ=self._environ)
        former = {name: os.environ.get(name) for name in (procfs.MARK_VARIABLE, *shown)}
        if in_main:
            self._signals.install()
        if self.kind == "inline":
            self._deadman = Deadman(dump_file=_stderr())
            self._forks = ForkGuard()
            self._forks.install()
            # For handlers in this process, before any of them initialises a GPU runtime.
            os.environ.update(shown)
        closed = private.close(procfs.work_name(PROCESS_MARK) if in_main else None)
        directory = _private_directory()
        lines = LineWatch(self.client.lines)
        lines.start()
        self._liveness.start()
        self._sampler.start()
        # What was imported stays. To look through all of it for garbage, now and then, would hold the jobs for 20 ms.
        gc.collect()
        gc.freeze()
        try:
            fitness.check(self.client, self.options, self._detection, self._environ)
            code = self._incarnations(directory, lines)
            return ExitCode.LOST if code == 0 and self._homeless else code
        finally:
            gc.unfreeze()
            self._liveness.stop()
            self._sampler.stop()
            lines.stop()
            self._ports.close()
            if in_main:
                self._signals.stop()
            shutil.rmtree(directory, ignore_errors=True)
            private.reopen(closed)
            if self._forks is not None:
                self._forks.stop()
            for name, value in former.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    # -- incarnations ----------------------------------------------------------------------------------------

    def _incarnations(self, directory: Path, lines: LineWatch) -> int:
        model: str | None = None
        first = True
        while True:
            session = self._register(directory, patient=not first)
            if session is None:
                return 0
            first = False
            session.model = model
            self._liveness.registered(
                worker=session.name,
                host=session.host,
                incarnation=session.incarnation,
                mark=session.mark,
                directory=directory,
                dsn=self.client.target.conninfo,
                lease_s=session.terms.lease_s,
            )
            lines.answer_s = session.terms.answer_s
            with self._threads(session) as (serve, held):
                serve()
                self._settle(session, held)
                if session.stuck:
                    log.critical("exit_stuck", extra={"pids": sorted(sum(session.stuck.values(), ()))})
                    return ExitCode.UNKILLABLE
                model = session.model
                # Asked once: a heartbeat right behind our own retirement hears of it; no reason to begin anew.
                ended = session.ended.is_set()
                if ended or self._retire(session):
                    self._liveness.ended()
                if not ended:
                    log.info("stopped", extra={"worker": session.name, "incarnation": session.incarnation})
                    return 0
            if self._drain.requested.is_set():
                return 0

    def _register(self, directory: Path, patient: bool) -> Session | None:
        """A new incarnation. The first one fails at once where there is no database; a worker that has run
        waits for it to come back.
        """
        waits = backoff(0.1, 5.0)
        while True:
            try:
                return register(
                    self.client,
                    self.options,
                    kind=self.kind,
                    slots=self.slots,
                    tasks=self.tasks,
                    task_options=self.task_options,
                    detection=self._detection,
                    directory=directory,
                )
            except TRANSIENT as problem:
                if not patient:
                    raise
                log.warning("registration_failed", extra={"error": str(problem)})
                if self._drain.requested.wait(next(waits)):
                    return None

    @contextlib.contextmanager
    def _threads(self, session: Session) -> Iterator[tuple[Callable[[], None], HeldReports]]:
        """The threads around one incarnation; yields what the main thread does meanwhile, and the reports held up."""
        reporter = Reporter(session, lambda: self._drain.impatient(session))
        watching = Watching(session, self._detection, self._sampler)
        epochs = EpochWatch(session, self._ports)
        keeper = LeaseKeeper(session, watching, epochs)
        maintenance = Maintenance(session)
        server = SocketServer(session, session.directory / host_record.SOCKET)
        listener: Listener | None = None
        claims = ClaimSource(session, keeper, self._ports, lambda: listener is not None and not listener.deaf)

        def claim() -> None:
            claims.awake(kept=True)
            session.work.set()

        def go() -> None:
            jobs = session.table.snapshot()
            for job in jobs:
                job.wake.set()
            if any(job.gang is not None for job in jobs):
                keeper.beat_now()  # A new epoch may have begun around one that runs.

        if self.options.connections > 1:
            listener = Listener(
                session,
                list(self.options.queues),
                {
                    "claim": claim,
                    "wake": session.work.set,
                    "stop": keeper.beat_now,
                    "go": go,
                    "tick": maintenance.ask,
                },
            )
        commands = CommandRunner(
            session,
            reporter,
            self._ports,
            self._detection,
            server,
            watching,
            self.stop,
            lambda: self._leave_homeless(session),
            self._liveness.guardian,
        )
        drainer = threading.Thread(
            target=self._drain.run, args=(session, reporter, self._waiting), name="gangq-drain", daemon=True
        )

        def serve() -> None:
            if self._deadman is not None:
                hard_exit = HardExit(session, reporter, self._deadman)
                watch = JobWatch(watching, ProcessTrip(watching, reporter))
                capture = Capture(session)
                inline = InlineRunner(
                    session, reporter, self._ports, self._deadman, hard_exit, watch, self._liveness, capture
                )
                capture.install()
                try:
                    self._serve_inline(session, claims, inline, commands, reporter)
                finally:
                    capture.remove()
                    watch.close()
            else:
                self._serve_commands(session, claims, commands, reporter)

        server.start()
        keeper.start()
        epochs.start()
        LeaseWatch(session).start()
        reporter.start()
        if listener is not None:
            listener.start()
        maintenance.start()
        drainer.start()
        try:
            yield serve, reporter.held
        finally:
            session.closing.set()
            for part in (keeper, epochs, reporter, listener, maintenance, server):
                if part is not None:
                    part.stop()
            drainer.join(_JOIN_S)

    # -- serving ---------------------------------------------------------------------------------------------

    def _serve_inline(
        self,
        session: Session,
        claims: ClaimSource,
        inline: InlineRunner,
        commands: CommandRunner,
        reporter: Reporter,
    ) -> None:
        waiting, prefetch = self._waiting, self.options.prefetch
        few = max(prefetch // 4, min(prefetch, _FEW))

        def along(finished: Sequence[ActiveJob]) -> Sequence[Outcome] | None:
            if not self._claiming(session):
                return None
            # Of small jobs the first few are enough to begin with, and sooner there: the next call brings the others.
            answer = claims.take_along(finished, few if reporter.flowing else prefetch)
            if answer is None:
                return None
            waiting.extend(self._taken(session, claims, answer[1]))
            return answer[0]

        def ahead(finished: Sequence[ActiveJob]) -> AlongUnderWay | None:
            if not self._claiming(session):
                return None
            # Not more than half, so that one half runs while the other is reported and claimed.
            return claims.send_along(finished, (prefetch + 1) // 2, arrived)

        def arrived(rows: Sequence[Claim]) -> None:
            waiting.extend(self._taken(session, claims, rows))

        reporter.along, reporter.more = along, lambda: waiting
        if prefetch > 1:
            reporter.ahead, reporter.ahead_after = ahead, (prefetch + 1) // 2
        while self._serving(session):
            signs.alive()
            claims.pace()
            session.work.clear()
            jobs = self._take(session, claims, prefetch)
            if not jobs:
                if self.options.once and not claims.unsure and not self._sampler.doubtful():
                    return
                session.work.wait(claims.wait_s)
                continue
            waiting.extend(jobs)
            settled = False
            while waiting or not settled:  # A drain may take away what a call under way has just brought.
                self._run_waiting(inline, commands, reporter)
                inline.rest()
                settled = reporter.settle()

    def _serve_commands(
        self, session: Session, claims: ClaimSource, commands: CommandRunner, reporter: Reporter
    ) -> None:
        claiming = threading.Lock()

        def start(job: ActiveJob) -> None:
            threading.Thread(
                target=self._run_thread,
                args=(session, job, commands, reporter),
                name=f"gangq-job-{job.id}",
                daemon=True,
            ).start()

        def along(finished: Sequence[ActiveJob]) -> Sequence[Outcome] | None:
            # While the main thread claims, which may take it a while, the report goes out alone.
            if not self._claiming(session) or not claiming.acquire(blocking=False):
                return None
            try:
                free = self.slots - len(session.table) + len(finished)
                answer = claims.take_along(finished, free) if free > 0 else None
                jobs = () if answer is None else self._taken(session, claims, answer[1])
            finally:
                claiming.release()
            for job in jobs:
                start(job)
            return None if answer is None else answer[0]

        reporter.along = along
        while self._serving(session):
            claims.pace()
            session.work.clear()
            with claiming:
                free = self.slots - len(session.table)
                jobs = self._take(session, claims, free) if free > 0 else []
            if free <= 0:
                session.work.wait(1.0)
                continue
            for job in jobs:
                start(job)
            if not jobs:
                empty = not claims.unsure and not len(session.table) and not self._sampler.doubtful()
                if self.options.once and empty:
                    return
                session.work.wait(claims.wait_s)

    def _serving(self, session: Session) -> bool:
        if session.ended.is_set() or self._drain.requested.is_set():
            return False
        if session.directory.is_dir():
            return True
        self._leave_homeless(session)
        return False

    def _leave_homeless(self, session: Session) -> None:
        """Somebody has removed the directory of sockets and logs, and no job can run here any more: what has not
        begun is handed back, and the next process has a new directory.
        """
        if self._homeless:
            return
        self._homeless = True
        log.critical(
            "directory_gone",
            extra={
                "directory": str(session.directory),
                "advice": "keep cleaners of temporary files away from it, or set XDG_RUNTIME_DIR",
            },
        )
        self.stop()

    def _claiming(self, session: Session) -> bool:
        """Whether to begin more. Not while the driver does not answer for a device: whether that is broken is seen
        within a minute, and what runs is left alone.
        """
        return self._serving(session) and not self._sampler.doubtful()

    def _take(self, session: Session, claims: ClaimSource, most: int) -> list[ActiveJob]:
        if not self._claiming(session) and not claims.unsure:
            claims.wait_s = _DOUBT_S
            return []
        return self._taken(session, claims, claims.take(most))

    def _taken(self, session: Session, claims: ClaimSource, rows: Sequence[Claim]) -> list[ActiveJob]:
        jobs = [ActiveJob(claim) for claim in rows]
        session.table.add(*jobs)
        claims.settled()
        if self._drain.requested.is_set():
            # Claimed before it was, and not begun: nothing of them has to be waited for.
            session.table.each(lambda job: job.tell_stop("drain", 0.0), jobs)
        if session.ended.is_set():
            # Who ended it has told those in the table, and these may not have been in it.
            session.table.each(lambda job: job.lose("its worker's incarnation has ended"), jobs)
        return jobs

    def _run_waiting(self, inline: InlineRunner, commands: CommandRunner, reporter: Reporter) -> None:
        while self._waiting:
            try:
                job = self._waiting.popleft()
            except IndexError:  # A drain takes from the other end.
                return
            self._run_one(job, inline, commands, reporter)

    def _run_thread(
        self, session: Session, job: ActiveJob, commands: CommandRunner, reporter: Reporter
    ) -> None:
        try:
            self._run_one(job, None, commands, reporter)
        finally:
            session.work.set()

    def _run_one(
        self, job: ActiveJob, inline: InlineRunner | None, commands: CommandRunner, reporter: Reporter
    ) -> None:
        if log.isEnabledFor(logging.DEBUG):
            if inline is not None:
                inline.rest()  # Writing a line may wait for whoever reads them.
            log.debug("job_begins", extra=job.extra)
        try:
            self._dispatch(job, inline, commands)
        except Exception as problem:
            # A fault of ours, or of this host (no space left, no more threads). Nothing of the job runs: both
            # runners see to that on their way out.
            log.exception("runner_fault", extra=job.extra)
            job.end_work()
            if inline is not None:
                inline.rest()
            reporter.failed(
                job,
                describe(type(problem).__qualname__, f"its worker could not run it: {problem}"),
                retryable=not isinstance(problem, _Unrunnable),
            )
        finally:
            if inline is not None:
                self._signals.renew()

    def _dispatch(self, job: ActiveJob, inline: InlineRunner | None, commands: CommandRunner) -> None:
        task = job.claim.task
        found = None if task == COMMAND else self._find(task)
        if inline is not None:
            if found is not None and not found.isolate and self._owns_all_or_none(job):
                inline.run(job, found, found.watch, more_follow=bool(self._waiting))
                return
            inline.rest()
        if found is None:
            commands.run(job, self._command(job))
            return
        if self._target is None:
            try:
                self._target = app_target(self.app)
            except GangqError as problem:
                raise _Unrunnable(str(problem)) from None
        commands.run(job, Command.of_handler(self._target, task, found.watch))

    @staticmethod
    def _command(job: ActiveJob) -> Command:
        try:
            return Command.of_payload(job.claim.payload)
        except ValueError as problem:
            raise _Unrunnable(str(problem)) from None

    def _find(self, task: str) -> Task[..., Any]:
        if self.app is None:
            raise UnknownTask(f"task {task!r} is not known to this worker, which runs commands only")
        return self.app.get_task(task)

    def _owns_all_or_none(self, job: ActiveJob) -> bool:
        """Whether this process may serve the job itself. A GPU runtime reads its visible devices once per
        process: a job that holds some of this worker's devices and not others needs a process of its own.
        """
        held = len(job.claim.devices)
        return held in (0, len(self._detection.devices))

    # -- the end ---------------------------------------------------------------------------------------------

    def _settle(self, session: Session, held: HeldReports) -> None:
        """Wait until nothing of this incarnation runs, or only what nothing can kill; and one grace at most until
        what has ended is reported, where an open transaction is in the way.
        """
        until: float | None = None
        while not session.table.wait_empty(0.2):
            left = len(session.table) - len(session.stuck)
            if left <= 0:
                return
            if left > len(held):
                until = None
            elif until is None:
                until = boottime() + session.terms.grace_s
            elif boottime() > until:
                log.error("reports_unsaid", extra={"jobs": left, "advice": "they will run again"})
                return

    def _retire(self, session: Session) -> bool:
        """Whether the database knows that this incarnation is over; else the supervisor says so."""
        until = boottime() + session.terms.grace_s
        try:
            answered = until_answered(
                lambda: (session.client.retire_worker(incarnation=session.incarnation, final=True), True),
                "retire_worker",
                lambda: session.ended.is_set() or self._drain.urgent.is_set() or boottime() > until,
            )
        except IncarnationEnded:
            return True
        except GangqError as problem:
            log.warning("not_retired", extra={"error": str(problem)})
            return False
        return answered is not None


def run_worker(
    app: App | None = None,
    *,
    dsn: str | None = None,
    target: str | None = None,
    stop_event: threading.Event | None = None,
    client: Client | None = None,
    **options: Any,
) -> int:
    """Run a worker until it is stopped; returns its exit code.

    ``app`` is what it runs (None: commands only), ``dsn`` where [the app's, else GANGQ_DSN]; ``stop_event``
    drains it when set. The remaining options are those of :class:`gangq.worker.options.WorkerOptions`.

    Raises:
        WorkerNameTaken: two live workers cannot have one name.
        SchemaMismatch: the database's schema is older or newer than this library.
        DatabaseUnreachable: there is no database.
        InvalidInput: an option that no worker could have.
    """
    chosen = WorkerOptions(**options).resolved()
    own = client is None
    if client is None:
        conninfo = dsn or (app.given_dsn if app is not None else None) or private.given_dsn()
        if conninfo is None or conninfo == private.EMBEDDED:
            # Not at the top: most workers have no private server.
            from gangq.embedded import resolve_dsn

            conninfo = resolve_dsn(conninfo)
        # A call that waits long for a connection is a heartbeat that comes late: rather ask again.
        client = Client(
            conninfo,
            # Its calls take turns: each is short, and a fleet of thousands needs as many connections as it has
            # workers, twice that with those that listen.
            max_size=1,
            connect_s=_CONNECTION_S,
            application_name=f"gangq worker {chosen.name}"[:63],
        )
    try:
        _check_schema(client)
        worker = Worker(app, chosen, client, target=target)
        if stop_event is not None:
            threading.Thread(
                target=_stop_when, args=(stop_event, worker), name="gangq-stop", daemon=True
            ).start()
        return worker.run()
    finally:
        if own:
            client.close()


def _stop_when(event: threading.Event, worker: Worker) -> None:
    event.wait()
    worker.stop()


def _check_schema(client: Client) -> None:
    from gangq.schema import check_version

    check_version(client)


def _stderr() -> Any:
    """Standard error, if it is a file that a stack can be written to without the interpreter."""
    try:
        sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None
    return sys.stderr


def _private_directory() -> Path:
    """A 0700 directory for the socket, logs and checkpoints of this process; short enough for a socket."""
    problem: OSError | None = None
    for place in host_record.places():
        if len(str(place)) + len(host_record.DIRECTORY_PREFIX) + 12 > _SOCKET_PATH_MAX:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=host_record.DIRECTORY_PREFIX, dir=place))
        except OSError as refused:
            problem = refused
    raise GangqError(
        f"this worker finds no place for its socket and logs ({problem}): set XDG_RUNTIME_DIR or TMPDIR to a "
        "directory it can write, with a path of less than 80 characters"
    )

"""A worker: registers, claims, runs, keeps its lease, and stops as asked.

The main thread claims and runs the handlers of one lane, because a handler may need it (signals, GUI toolkits,
CUDA). What the other lane runs is in child processes. The control loop (:mod:`gangq.worker.control`) claims for it,
and does all else: the lease, the listener, the tick, the socket, the drain. An incarnation is a
:class:`gangq.worker.session.Session`; when the database ends it, the worker makes sure that nothing of it runs any
more and registers anew.
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
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gangq import logqueue, private
from gangq.app import App
from gangq.client import Client
from gangq.commands import COMMAND
from gangq.errors import GangqError, IncarnationEnded
from gangq.gpu import SamplerProcess
from gangq.proc import procfs
from gangq.proc.clock import boottime
from gangq.schema import check_version, resolve_dsn
from gangq.task_options import declared
from gangq.watchdogs import ExitCode
from gangq.watchdogs.deadman import Deadman
from gangq.worker import fitness, host_record
from gangq.worker.child_main import app_target
from gangq.worker.control import Control, MainClient
from gangq.worker.drain import Drain
from gangq.worker.environment import Surroundings
from gangq.worker.gangs import PortHolder
from gangq.worker.incarnation import Incarnation
from gangq.worker.jobs import ActiveJob
from gangq.worker.liveness import Liveness
from gangq.worker.metrics import WorkerMetrics
from gangq.worker.options import WorkerOptions, choose_lanes
from gangq.worker.registration import PROCESS_MARK, register
from gangq.worker.repeating import TRANSIENT, backoff, until_answered
from gangq.worker.reporter import HeldReports
from gangq.worker.schedules import ScheduleStore
from gangq.worker.session import Session
from gangq.worker.signals import ForkGuard, Signals, SignalWatch

log = logging.getLogger("gangq.worker")

_SOCKET_PATH_MAX = 100
_CONNECTION_S = 3.0
_ANSWER_S = 30.0
"""How long an answer may take until the worker has registered."""


class Worker:
    """One worker process. :meth:`run` blocks until it has stopped. Its public parts serve all its incarnations."""

    def __init__(
        self,
        app: App | None,
        options: WorkerOptions,
        client: Client,
        *,
        target: str | None = None,
        environ: Mapping[str, str] | None = None,
        signals: Signals | None = None,
        on_registered: Callable[[Session], object] = lambda _: None,
        before_retire: Callable[[Session], object] = lambda _: None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """``target`` (``module:app``) is where child processes find the app [searched for]. ``pause``
        waits for a driver that does not answer, and says true once the worker was told to stop.

        ``signals`` stop it [SIGTERM and SIGINT]. The other two are told of each incarnation, in the main thread.
        """
        self.app = app
        self.options = options.resolved()
        self.control = Control(client, self.options.name)
        self.target = target
        """Where child processes find the app, ``module:app``; None: nowhere."""
        self.unreachable: str | None = None
        """Why no child process could find it; None: it can."""
        if app is not None and target is None:
            try:
                self.target = app_target(app)
            except GangqError as problem:
                self.unreachable = str(problem)
        self._environ = dict(os.environ) if environ is None else dict(environ)
        self.drain = Drain(self.options.drain_timeout_s)
        self.signals = signals or SignalWatch(self.control, self.stop)
        self._on_registered = on_registered
        self._before_retire = before_retire
        self.deadman: Deadman | None = None
        """Ends the process at a deadline; None where no handler runs in it."""
        self.surroundings: Surroundings
        self.schedules = ScheduleStore(app, self.target or self.options.name)
        self.waiting: deque[ActiveJob] = deque()
        """Jobs claimed for the main thread and not begun."""
        self.liveness = Liveness.of_environment(dump_file=_stderr())
        # Not imported for this: most workers have no private server.
        embedded = sys.modules.get("gangq.embedded")
        for pid in [] if embedded is None else embedded.started_here:
            self.liveness.spare(pid)
        self.detection = fitness.devices_of(self.options, self._environ, pause=pause)
        self.lanes = choose_lanes(
            self.options, len(self.detection.devices), app is not None, self.unreachable
        )
        """How many jobs run at once, and where."""
        self.client = client
        if self.options.connections == 1 or self.lanes.main is None:
            client.close()
            self.client = self.control.for_threads
        self.ports = PortHolder(min(self.lanes.slots, 16))
        for warning in self.detection.warnings:
            log.warning("devices", extra={"advice": warning})
        self.sampler = SamplerProcess(self.detection, self._environ)
        self.metrics = WorkerMetrics(self.lanes, self.detection, self.sampler, self.drain)
        self._forks: ForkGuard | None = None

    def stop(self) -> None:
        """Drain; a second call skips the grace. From any thread."""
        self.drain.request()

    def run(self) -> int:
        """Serve until stopped and return the exit code: 0; 77 when its directory was removed; 87 when a process could
        not be killed.

        Raises:
            Unfit: this host or worker must not take work; the message says why (exit code 88).
            HookFailed: a hook of `App.on_worker_start` raised (exit code 1).
            WorkerNameTaken: another live worker has this name.
            GangqError: the database is not there or refuses.
        """
        with self._running() as directory:
            fitness.check(self.client, self.options, self.detection, self._environ)
            with self._hooks():
                code = self._incarnations(directory)
        return ExitCode.LOST if code == 0 and self.drain.without_directory else code

    @contextlib.contextmanager
    def _running(self) -> Iterator[Path]:
        """With the threads of this process and its private directory."""
        in_main = threading.current_thread() is threading.main_thread()
        # Light jobs see no device; placed ones in the main thread see all of them.
        devices = self.detection.devices if self.lanes.main == "placed" else ()
        shown = self.detection.visible_env(devices, environ=self._environ)
        # What was opened is closed, the last first, even if something after it cannot be opened: this process may
        # live on as something else than a worker.
        with contextlib.ExitStack() as closing:
            closing.callback(self.ports.close)
            directory = _private_directory()
            closing.callback(shutil.rmtree, directory, ignore_errors=True)
            self.control.start()
            closing.callback(self.control.stop)
            if self.options.metrics is not None:
                closing.callback(self.metrics.serve(self.options.metrics).close)
            if in_main:
                self.signals.install()
                closing.callback(self.signals.stop)
            closing.callback(
                _put_back, {name: os.environ.get(name) for name in (procfs.MARK_VARIABLE, *shown)}
            )
            if self.lanes.main is not None:
                self.deadman = Deadman(dump_file=_stderr())
                closing.callback(self.deadman.disarm)  # An error right after a handler has left it set.
                self._forks = ForkGuard()
                self._forks.install()
                closing.callback(self._forks.stop)
                # For handlers in this process, before any of them initialises a GPU runtime.
                os.environ.update(shown)
            self.surroundings = Surroundings.here()
            closing.callback(
                private.reopen, private.close(procfs.work_name(PROCESS_MARK) if in_main else None)
            )
            # The sampler first: while it stops, which may take seconds, no signs of life are expected any more.
            self.sampler.start()
            closing.callback(self.sampler.stop)
            self.liveness.start()
            closing.callback(self.liveness.stop)
            # What was imported stays. To look through all of it for garbage, now and then, would hold the jobs for
            # 20 ms.
            gc.collect()
            gc.freeze()
            closing.callback(gc.unfreeze)
            yield directory

    @contextlib.contextmanager
    def _hooks(self) -> Iterator[None]:
        """Before the first handler of this process and after the last one, where it runs any.

        Raises:
            HookFailed: no handler may run here.
        """
        if self.app is None or self.lanes.main is None:
            yield
            return
        self.app.hooks.worker_started()
        try:
            yield
        finally:
            self.app.hooks.worker_stopped()

    # -- incarnations ----------------------------------------------------------------------------------------

    def _incarnations(self, directory: Path) -> int:
        model: str | None = None
        first = True
        while True:
            session = self._register(directory, patient=not first)
            if session is None:
                return 0
            first = False
            session.model = model
            self.metrics.session = session
            self._on_registered(session)
            self.liveness.registered(
                worker=session.name,
                host=session.host,
                incarnation=session.incarnation,
                mark=session.mark,
                directory=directory,
                dsn=self.client.target.conninfo,
                lease_s=session.terms.lease_granted_s,
            )
            self.client.timeout_s = session.answer_s
            self.control.set_timeout(session.answer_s)
            incarnation = Incarnation(self, session)
            with incarnation.running():
                incarnation.serve()
                self._settle(session, incarnation.held)
                if session.stuck:
                    log.critical("exit_stuck", extra={"pids": sorted(sum(session.stuck.values(), ()))})
                    return ExitCode.UNKILLABLE
                model = session.model
                # Read once: a heartbeat right after our own retirement sets it too, which is no reason to begin anew.
                ended = session.ended.is_set()
                if ended or self._retire(session):
                    self.liveness.ended()
                if not ended:
                    log.info("stopped", extra={"worker": session.name, "incarnation": session.incarnation})
                    return 0
            if self.drain.requested.is_set():
                return 0

    def _register(self, directory: Path, patient: bool) -> Session | None:
        """A new incarnation; None: this worker is to stop. The first one fails at once where there is no database; a
        worker that has run waits for it to come back.
        """
        own = {} if self.app is None else self.app.tasks
        options = {name: declared(task.defaults) for name, task in own.items() if task.function is not None}
        pauses = backoff(0.1, 5.0)
        while True:
            if not directory.is_dir():
                self.drain.directory_gone(directory)
                return None
            try:
                return register(
                    self.client,
                    self.control,
                    self.options,
                    lanes=self.lanes,
                    tasks=sorted({*options, COMMAND} if self.options.commands else options),
                    task_options=options,
                    detection=self.detection,
                    directory=directory,
                )
            except TRANSIENT as problem:
                if not patient:
                    raise
                log.warning("registration_failed", extra={"error": str(problem)})
                if self.drain.requested.wait(next(pauses)):
                    return None

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
                # Something runs. It only seemed that all is held up: a report that was answered leaves the table
                # first, and `held` a moment later.
                until = None
            elif until is None:
                until = boottime() + session.terms.grace_s
            elif boottime() > until:
                log.error("ends_not_reported", extra={"jobs": left, "advice": "they will run again"})
                return

    def _retire(self, session: Session) -> bool:
        """Whether the database knows that this incarnation is over; else the supervisor says so."""
        self._before_retire(session)
        until = boottime() + session.terms.grace_s
        try:
            answered = until_answered(
                lambda: (
                    session.main_client.retire_worker(incarnation=session.incarnation, final=True),
                    True,
                ),
                "retire_worker",
                lambda: session.ended.is_set() or self.drain.urgent.is_set() or boottime() > until,
            )
        except IncarnationEnded:
            return True
        except GangqError as problem:
            log.warning("not_retired", extra={"error": str(problem)})
            return False
        return answered is not None


@logqueue.running(*logqueue.WORKER)
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
        DriverUnavailable: a driver did not answer for five minutes.
        InvalidInput: an option that no worker could have.
    """
    chosen = WorkerOptions(**options).resolved()
    own = client is None
    if client is None:
        conninfo = dsn or (app.given_dsn if app is not None else None) or private.given_dsn()
        if conninfo is None or conninfo == private.EMBEDDED:
            conninfo = resolve_dsn(conninfo)
        # A call that waits long for a connection is a heartbeat that comes late: rather ask again.
        client = MainClient(
            conninfo,
            timeout_s=_ANSWER_S,
            connect_s=_CONNECTION_S,
            application_name=f"gangq worker {chosen.name[:36]}: main thread",
        )
    try:
        check_version(client)
        pause = time.sleep if stop_event is None else stop_event.wait
        worker = Worker(app, chosen, client, target=target, pause=pause)
        if stop_event is not None:
            if stop_event.is_set():
                return 0

            def stop_when_set() -> None:
                stop_event.wait()
                worker.stop()

            threading.Thread(target=stop_when_set, name="gangq-stop", daemon=True).start()
        return worker.run()
    finally:
        if own:
            client.close()


def _put_back(variables: Mapping[str, str | None]) -> None:
    """Give these variables the values that they had; None: it was not set."""
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


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

"""The tasks around one incarnation of a worker, and what its main thread does meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gangq.worker import host_record
from gangq.worker.claims import ClaimSource, TaskWakes, ThreadWakes, W
from gangq.worker.dispatch import Dispatcher
from gangq.worker.gangs import EpochWatch
from gangq.worker.lease import LeaseKeeper, watch_lease
from gangq.worker.listener import Listener
from gangq.worker.loops import ChildProcessLoop, Intake, MainThreadLoop, NothingLeft
from gangq.worker.maintenance import Maintenance
from gangq.worker.options import Lane
from gangq.worker.output import Capture
from gangq.worker.replicas import ReplicaWatch
from gangq.worker.reporter import Reporter
from gangq.worker.runner_command import CommandRunner
from gangq.worker.runner_inline import HardExit, InlineRunner
from gangq.worker.session import Session
from gangq.worker.socket_server import SocketServer
from gangq.worker.watching import JobWatch, ProcessTrip, Watching

if TYPE_CHECKING:
    from gangq.worker.main import Worker


class Incarnation:
    """The parts that work for one session. In the context :meth:`running` the main thread calls :meth:`serve`."""

    def __init__(self, worker: Worker, session: Session) -> None:
        # The order matters in two places: the keeper needs `_watching` and `_epochs`, and `on_replica` is set before
        # any job runs. The commands need most of the rest, so they come last.
        self._worker = worker
        self._session = session
        self._reporter = Reporter(session, lambda: worker.drain.impatient(session))
        self._watching = Watching(session, worker.detection, worker.sampler, worker.metrics.tripped)
        self._epochs = EpochWatch(session, worker.ports)
        self._keeper = LeaseKeeper(session, self._watching, self._epochs)
        self._maintenance = Maintenance(session)
        self._replicas = ReplicaWatch(session)
        session.on_replica = self._replicas.changed
        self._server = SocketServer(session, session.directory / host_record.SOCKET)
        self._sources: list[ClaimSource[Any]] = []
        self._listener = Listener(session, list(worker.options.queues), self._on_notification())
        self._commands = CommandRunner(
            session,
            self._reporter,
            worker.ports,
            worker.detection,
            self._server,
            self._watching,
            worker.drain,
            worker.surroundings,
            worker.liveness.guardian,
        )
        self.held = self._reporter.held
        """Reports that an open transaction holds up."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """With all tasks running; they are cancelled at the end."""
        worker, control = self._worker, self._worker.control
        control.wait(self._server.start())
        tasks = [
            control.spawn(self._keeper.run(), "lease"),
            control.spawn(watch_lease(self._session), "lease watch"),
            control.spawn(self._listener.run(), "listener"),
            control.spawn(self._maintenance.run(), "tick"),
            control.spawn(self._epochs.run(), "epochs"),
            control.spawn(self._replicas.run(), "replicas"),
            control.spawn(worker.schedules.run(self._session), "schedules"),
            control.spawn(worker.drain.run(self._session, self._reporter, worker.waiting), "drain"),
        ]
        try:
            yield
        finally:
            self._session.closing.set()
            for task in tasks:
                task.cancel()
            control.wait(self._server.stop())
            self._reporter.stop()
            self._commands.close()

    def serve(self) -> None:
        """Claim and run jobs until the worker stops. For the main thread."""
        worker = self._worker
        main, slots = worker.lanes.main, worker.lanes.children
        intake = Intake(self._session, worker.drain, worker.sampler)
        dispatcher = Dispatcher(
            worker.app,
            worker.target,
            len(worker.detection.devices),
            self._commands,
            self._reporter,
            worker.ports,
            worker.unreachable,
        )
        left = NothingLeft(intake, worker.lanes.slots > 0) if worker.options.once else None
        children: ChildProcessLoop | None = None
        own = None if main is None else self._source(main, ThreadWakes())
        if slots:
            children = ChildProcessLoop(
                intake,
                self._source(worker.lanes.of_children, TaskWakes(worker.control)),
                self._reporter,
                dispatcher,
                slots,
                left=left if own is None else None,
                # The main thread's loop, where there is one, decides that nothing is left. It sleeps until it is
                # woken, so this one wakes it on becoming idle.
                found_nothing=own.wakes.set if left and own else None,
            )
        if own is None:
            assert children is not None
            worker.control.wait(children.run())
            return
        if left is not None:
            left.children = children
        with self._inline() as inline, self._beside(children):
            MainThreadLoop(
                intake,
                own,
                self._reporter,
                dispatcher,
                inline,
                worker.signals,
                worker.waiting,
                prefetch=worker.options.prefetch if main == "light" else 1,
                left=left,
            ).run()

    @contextlib.contextmanager
    def _beside(self, children: ChildProcessLoop | None) -> Iterator[None]:
        """With the other lane claimed for; what it has claimed is in the job table at the end."""
        if children is None:
            yield
            return
        running = self._worker.control.spawn(children.run(), "claims")
        try:
            yield
        finally:
            children.stop()
            running.result()

    @contextlib.contextmanager
    def _inline(self) -> Iterator[InlineRunner]:
        """What runs handlers in the main thread, and watches them."""
        worker, session, reporter = self._worker, self._session, self._reporter
        assert worker.deadman is not None
        hard_exit = HardExit(session, reporter, worker.deadman)
        watch = JobWatch(self._watching, ProcessTrip(self._watching, reporter))
        capture = Capture(session)
        capture.install()
        try:
            yield InlineRunner(
                session,
                reporter,
                worker.ports,
                worker.deadman,
                hard_exit,
                watch,
                worker.liveness,
                capture,
            )
        finally:
            capture.remove()
            watch.close()

    # -- claiming, and what wakes it -------------------------------------------------------------------------

    def _source(self, lane: Lane | None, wakes: W) -> ClaimSource[W]:
        source = ClaimSource(
            self._session,
            self._keeper,
            self._worker.ports,
            wakes,
            self._gets_notifications,
            lane=lane,
            light_slot_free=self._has_free_light_slot,
        )
        self._sources.append(source)
        return source

    def _gets_notifications(self) -> bool:
        return not self._listener.notifications_lost

    def _has_free_light_slot(self) -> bool:
        jobs = self._session.table.snapshot()
        running = sum(job.lane == "light" and not job.reporting for job in jobs)
        return running < self._worker.lanes.light

    def _on_notification(self) -> Mapping[str, Callable[[], None]]:
        return {
            "claim": self._claim,
            "light": lambda: self._claim_light(kept=True),
            "wake": lambda: self._claim_light(kept=False),
            "stop": self._keeper.beat_now,
            "go": self._go,
            "tick": self._maintenance.ask,
        }

    def _claim(self) -> None:
        for source in self._sources:
            source.wake(kept=source.lane != "light")

    def _claim_light(self, kept: bool) -> None:
        for source in self._sources:
            if source.lane != "placed":
                source.wake(kept=kept)

    def _go(self) -> None:
        jobs = self._session.table.snapshot()
        for job in jobs:
            job.wake.set()
        if any(job.gang is not None for job in jobs):
            self._keeper.beat_now()  # A new epoch may have begun around one that runs.

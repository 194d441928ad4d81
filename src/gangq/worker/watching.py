"""The watchdogs over this worker's jobs, and what happens here when one trips.

A handler in this process can only be ended together with it: evidence, then one statement, then the exit
(:class:`gangq.watchdogs.trip.TripPath`). A command's tree can be killed alone: it is, and the database is told once
it is gone; the worker and its other jobs go on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gangq.errors import GangqError
from gangq.gpu import Detection, SamplerProcess
from gangq.proc import statefile
from gangq.proc.clock import boottime
from gangq.proc.within import within
from gangq.watchdogs import (
    GpuHealthWatchdog,
    StallWatchdog,
    Suspicion,
    Terms,
    Trip,
    Watchdog,
    WorkSensors,
    waits,
)
from gangq.watchdogs.activity import HostActivity
from gangq.watchdogs.evidence import collect
from gangq.watchdogs.sensors import Calibration
from gangq.watchdogs.trip import TripPath
from gangq.worker.limits import Limits, LimitsTable

if TYPE_CHECKING:
    from gangq.task_options import WatchOptions
    from gangq.worker.child import Child
    from gangq.worker.jobs import ActiveJob
    from gangq.worker.reporter import Reporter
    from gangq.worker.session import Session
    from gangq.worker.shared import SharedJob

log = logging.getLogger("gangq.worker.watching")

_READINGS_EVERY_S = 10.0
_TELL_S = 2.0
_TAIL_BYTES = 8192
_NEVER_S = 1e9


class Watching:
    """What the watchdogs of one incarnation share: limits, the sampler, and the session."""

    def __init__(
        self,
        session: Session,
        detection: Detection,
        sampler: SamplerProcess,
        tripped: Callable[[str, str], object] = lambda _cls, _outcome: None,
    ) -> None:
        """``tripped(class, outcome)`` is called for each trip that does not end this process."""
        self.session = session
        self.tripped = tripped
        self.sampler = sampler
        self.limits = LimitsTable(session)
        self.calibration = Calibration()
        self._models = {device.uuid: device.model for device in detection.devices}
        self._readings_at = 0.0
        self._excluded: set[int] = set()
        # Whatever this process starts is its own to the driver, the sampler excepted.
        family = HostActivity(own=True, ignored=sampler.pids)
        sampler.watch(self._models, family.pids)

    @contextlib.contextmanager
    def excluding(self, pid: int) -> Iterator[None]:
        """As long as this lasts, the process ``pid`` and all below it are not of the handler in the main thread."""
        self._excluded.add(pid)
        try:
            yield
        finally:
            self._excluded.discard(pid)

    def strangers(self) -> list[int]:
        """Pids below this process that are, with all below them, not of the handler in its main thread."""
        return [*self.sampler.pids(), *tuple(self._excluded)]

    def uuids(self, job: ActiveJob) -> tuple[str, ...]:
        """The devices it holds."""
        return tuple(str(device["uuid"]) for device in job.claim.devices)

    def device_class(self, job: ActiveJob) -> str:
        """The model of its devices; empty: it holds none, or the model is not known."""
        return next((self._models.get(uuid, "") for uuid in self.uuids(job)), "")

    def limits_of(self, job: ActiveJob, options: WatchOptions | None) -> Limits:
        """What the watchdogs allow it, as far as that is known: never waits."""
        return self.limits.of(job.claim, options, self.device_class(job))

    def suspect(self, suspicion: Suspicion, *, notify: bool = False, tripping: bool = False) -> str | None:
        """Tell the database; returns ``noted`` or ``held``, None when it did not answer. ``notify``: it would
        have been tripped, were this class not one that only reports. ``tripping``: it is ended now unless
        the answer is ``held``.
        """
        job: ActiveJob = suspicion.job

        def tell() -> str:
            said: str = self.session.control.for_threads.suspect(
                incarnation=self.session.incarnation,
                job_id=job.id,
                token=job.token,
                class_=suspicion.cls,
                evidence={"message": suspicion.message, **suspicion.evidence},
                notify=notify or None,
                tripping=tripping or None,
            )
            return said

        try:
            # A server that hangs must not keep hung work alive.
            return within(_TELL_S, tell, "gangq-suspect")
        except GangqError as problem:
            log.warning("suspicion_not_reported", extra={**job.extra, "error": str(problem)})
            return None

    def only_notifies(self, trip: Trip, job: ActiveJob, evidence: Mapping[str, Any]) -> bool:
        """Whether such trips only notify; then this one is put on record."""
        if trip.cls not in self.limits_of(job, None).notify_only:
            return False
        self.suspect(suspicion_of(trip, evidence), notify=True)
        self.tripped(trip.cls, "notify")
        return True

    def readings(self) -> list[dict[str, Any]] | None:
        """The devices' readings for a heartbeat, every ten seconds; None: not now, or there are none."""
        now = boottime()
        if now - self._readings_at < _READINGS_EVERY_S:
            return None
        found = [reading.as_json() for reading in self.sampler.readings().values()]
        if not found:
            return None
        self._readings_at = now
        return found


def suspicion_of(trip: Trip, evidence: Mapping[str, Any]) -> Suspicion:
    """A trip that may not be carried out, as something to put on record."""
    return Suspicion(trip.cls, trip.message, {"reason": trip.reason, **evidence}, trip.job)


def terms_of(job: ActiveJob, limits: Limits) -> Terms:
    """What the stall and health watchdogs allow it."""
    return Terms(
        stall_timeout_s=limits.stall_timeout_s,
        learn=limits.learn,
        load_grace_s=limits.load_grace_s,
        long_phase_s=limits.long_phase_s,
        # A replica without requests leaves its devices idle.
        window_s=limits.health_window_s if job.replica is None else _NEVER_S,
    )


class JobWatch:
    """The three watchdogs over one job at a time.

    ================  ==================================  =========================================================
    watchdog          runs                                sees
    ================  ==================================  =========================================================
    budget            from `begin` to `end`               the clock
    stall             from the first beat, if any comes   the beats, and whether `WorkSensors` see work meanwhile
    health            from `begin`, if the job has GPUs   the GPUs' readings, work on the CPUs, and the beats' phases
    ================  ==================================  =========================================================

    What each finds goes to ``on_trip``, which ends the job, or to `Watching.suspect`, which puts it on record. One
    `JobWatch` watches the main thread's jobs one after another; each job in a child process has one of its own.
    """

    def __init__(
        self,
        watching: Watching,
        on_trip: Callable[[Trip], bool],
        *,
        pids: Callable[[], Iterable[int]] | None = None,
    ) -> None:
        """``pids``: what to watch [this process without the library's own threads, and what it started]."""
        self._watching = watching
        self._pids = pids
        self._on_trip = on_trip
        more: dict[str, Any] = {"on_trip": on_trip, "on_suspect": self._suspect}
        self._budget = Watchdog(**more)
        self._stall = StallWatchdog(**more)
        self._health = GpuHealthWatchdog(**more)
        self._without_devices = self._sensors = self._sensors_of(())
        self._job: ActiveJob | None = None
        self._options: WatchOptions | None = None
        self._starting = threading.Lock()

    def _sensors_of(self, uuids: tuple[str, ...]) -> WorkSensors:
        watching = self._watching
        return WorkSensors(
            self._pids,
            ignored=watching.strangers,
            uuids=uuids,
            sampler=watching.sampler if uuids else None,
            calibration=watching.calibration,
        )

    def _suspect(self, suspicion: Suspicion) -> None:
        """Put it on record with what the job waits in: it says which member of a hung gang stopped first."""
        if self._pids is None:
            seen = waits.of_handler()
        else:
            seen = waits.of_processes(self._pids(), self._watching.session.directory)
        self._watching.suspect(replace(suspicion, evidence={**suspicion.evidence, **seen.as_json()}))

    def begin(self, job: ActiveJob, options: WatchOptions | None) -> None:
        """Its code is about to run.

        For every job of thousands a second: only what such a job needs is started. The stall watchdog is inert
        until the first beat anyway, and the health watchdog until there are devices.
        """
        watching = self._watching
        self._job, self._options = job, options
        if job.claim.devices:
            limits = watching.limits.ask_for(job.claim, options, watching.device_class(job))
            self._sensors = self._sensors_of(watching.uuids(job))
            self._health.start(terms_of(job, limits), sensors=self._sensors, job=job)
        else:
            limits = watching.limits.ask_for(job.claim, options, "")
            self._sensors = self._without_devices
        own = job.claim.budget_s
        self._budget.start(budget_s=limits.budget_s if own is None else own, job=job)
        beat = job.follow_beats(self._first_beat)
        if beat is not None:
            # A command beats as soon as it runs, which may have been before this.
            self._first_beat(beat)

    def _first_beat(self, beat: dict[str, Any]) -> None:
        job = self._job
        if job is None:
            return
        limits = self._watching.limits_of(job, self._options)
        with self._starting:
            if self._job is job and not self._stall.watching:
                self._stall.start(terms_of(job, limits), sensors=self._sensors, job=job)
                job.follow_beats(self._on_beat)
        self._on_beat(beat)

    def _on_beat(self, beat: dict[str, Any]) -> None:
        step, total, phase, loss = (beat.get(name) for name in ("step", "total", "phase", "loss"))
        self._stall.beat(step, total, phase, loss)
        self._health.beat(step, total, phase, loss)

    def end(self) -> None:
        """Its code runs no more. From here on nothing that was seen of it can end the next one."""
        with self._starting:
            job, self._job = self._job, None
        if job is None:
            return
        job.follow_beats(None)
        self._budget.stop()
        if job.claim.devices:
            self._health.stop()
        if self._stall.watching:
            longest_s, beats = self._stall.learned
            self._stall.stop()
            if beats:
                task, device_class = job.claim.task, self._watching.device_class(job)
                self._watching.limits.learned(task, device_class, longest_s, beats)

    def close(self) -> None:
        """End the threads."""
        self.end()
        for watchdog in (self._budget, self._stall, self._health):
            watchdog.close()


class CommandTrip:
    """Carries out the trip of a command: kills its tree. Its runner reports the trip once the tree is gone."""

    def __init__(self, watching: Watching, job: ActiveJob, child: Child | SharedJob) -> None:
        self._watching = watching
        self._job = job
        self._child = child
        self._one = threading.Lock()
        self.trip: Trip | None = None
        self.evidence: dict[str, Any] = {}

    @property
    def over(self) -> ActiveJob | None:
        """The other job that its process was killed over."""
        return None

    def __call__(self, trip: Trip) -> bool:
        """False if the class only notifies, or if the database holds the trip back."""
        with self._one:
            # Two watchdogs may trip at once: the first one counts.
            return self.trip is not None or self._kill(trip)

    def _kill(self, trip: Trip) -> bool:
        job, watching = self._job, self._watching
        evidence = collect(
            HostActivity(lambda: [self._child.pid]).pids,
            trip=trip,
            log_tail=lambda: self._child.log_tail(_TAIL_BYTES),
            directory=watching.session.directory,
        )
        if watching.only_notifies(trip, job, evidence):
            return False
        suspicion = suspicion_of(trip, evidence)
        if trip.code.may_be_held and watching.suspect(suspicion, tripping=True) == "held":
            watching.tripped(trip.cls, "held")
            return False
        self.trip, self.evidence = trip, evidence
        self._child.kill()
        watching.tripped(trip.cls, "trip")
        log.critical("command_tripped", extra={**job.extra, "code": int(trip.code), "reason": trip.message})
        return True


class ProcessTrip:
    """Carries out the trip of a handler in this process: nothing but the end of the process ends it."""

    def __init__(self, watching: Watching, reporter: Reporter) -> None:
        self._watching = watching
        # First report the jobs that are done: their results are in this process, and they must not run again.
        self._path = TripPath(
            watching.session.main_client.target,
            watching.session.incarnation,
            first=reporter.flush,
            ignored=watching.sampler.pids,
            keep=self._keep,
        )

    def _keep(self, what: Mapping[str, Any] | None) -> None:
        """Store it in this worker's directory: its supervisor, its next incarnation or the bouncer reports it."""
        directory = self._watching.session.directory
        if what is None:
            statefile.remove(directory, statefile.TRIP)
            return
        data = json.dumps(what, default=str).encode()
        if len(data) > statefile.REPORT_BYTES:
            dropped = {
                "dropped": f"{len(data)} bytes of evidence; {statefile.REPORT_BYTES} are kept on the host"
            }
            data = json.dumps({**what, "evidence": dropped}, default=str).encode()
        statefile.write(directory, statefile.TRIP, data)

    def __call__(self, trip: Trip) -> bool:
        """Ends this process with the trip's code; False where the trip was called off."""
        job: ActiveJob = trip.job
        if self._watching.only_notifies(trip, job, trip.evidence):
            return False
        # The statement ends the incarnation. A heartbeat that is answered so must not exit first, with another code.
        session = self._watching.session
        with session.trip_in_progress():
            ended = self._path(trip, job_id=job.id, token=job.token)
        if not ended:
            self._watching.tripped(trip.cls, "held")
        return ended

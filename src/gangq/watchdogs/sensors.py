"""Where samples come from: the host side of one job, and its devices through a device sampler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gangq.proc.clock import boottime
from gangq.watchdogs.activity import HostActivity
from gangq.watchdogs.idle import ENERGY_S, Sample, power_w
from gangq.watchdogs.steps import PythonSteps

if TYPE_CHECKING:
    from gangq.gpu.reading import DeviceReading
    from gangq.gpu.sampler_process import SamplerProcess

_IDLE_PCT = 1.0
_CONTEXT_MB = 100


class Calibration:
    """What has been learned of devices in this process, to be shared by all sensors of a worker. Thread-safe.

    A driver that cannot see a process reads 0 % for it, as it does for an idle one. So zeros count only once
    this process has seen something else from that device, by the same way of counting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str | None]] = set()
        self._idle_w: dict[str, float] = {}
        self._last: dict[str, DeviceReading] = {}
        self._idle_since: dict[str, DeviceReading] = {}
        """Where the idle stretch began over which the energy counter is read next."""

    def learn(self, reading: DeviceReading) -> None:
        """Take one more reading into account; those of a device come in the order of time."""
        with self._lock:
            last = self._last.get(reading.uuid)
            if last is not None and reading.at <= last.at:
                return
            self._last[reading.uuid] = reading
            since = self._idle_since.pop(reading.uuid, None)
            if reading.gpu_pct is None:
                return
            if reading.gpu_pct > 0:
                self._seen.add((reading.uuid, reading.gpu_scope))
            memory_mb = reading.used_mb if reading.own_mb is None else reading.own_mb
            if reading.gpu_pct > _IDLE_PCT or memory_mb is None or memory_mb <= _CONTEXT_MB:
                # With a program's memory on it a device keeps its clocks up: only then is its idle power what
                # dead work can be measured by.
                return
            watts = power_w(since, reading)
            if watts is not None:
                self._idle_w[reading.uuid] = min(watts, self._idle_w.get(reading.uuid, watts))
            if reading.gpu_pct == 0:
                begins = since is None or reading.at - since.at >= ENERGY_S
                self._idle_since[reading.uuid] = reading if begins or since is None else since

    def last_at(self, uuid: str) -> float:
        """When the latest reading of that device was taken that has been learned from; 0: none was."""
        with self._lock:
            last = self._last.get(uuid)
            return 0.0 if last is None else last.at

    def trusted(self, reading: DeviceReading) -> bool:
        """Whether that way of counting has been seen above zero on that device."""
        with self._lock:
            return (reading.uuid, reading.gpu_scope) in self._seen

    def idle_w(self) -> dict[str, float]:
        """What each device draws when it holds a program and does nothing, as far as seen, watts."""
        with self._lock:
            return dict(self._idle_w)


class WorkSensors:
    """What a watchdog looks through: the sensors of one job. Called from watchdog threads, which run nothing else
    meanwhile.

    - ``pids``: the roots of its processes (everything below them counts too); None for work in this process.
    - ``own``: this process does the work [True without ``pids``].
    - ``ignored``: pids that are not the job's although they are below it, such as a sampler's.
    - ``uuids``: the devices it holds; ``sampler``: who reads them.
    - ``calibration``: what was learned of them before; one per worker process.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]] | None = None,
        *,
        own: bool | None = None,
        ignored: Callable[[], Iterable[int]] | None = None,
        uuids: Iterable[str] = (),
        sampler: SamplerProcess | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.uuids = tuple(uuids)
        self.sampler = sampler
        self._clock = clock
        self._calibration = calibration or Calibration()
        own = pids is None if own is None else own
        self._steps = PythonSteps(clock) if own else None
        self._host = HostActivity(pids, own=own, ignored=ignored, clock=clock)

    @property
    def got_on_at(self) -> float | None:
        """When Python was last seen to get on in the process that does the work; None: it never was, or it cannot
        be known.
        """
        return None if self._steps is None else self._steps.at

    def look(self) -> None:
        """Take note of what the devices do, so that later samples can be trusted, and of whether Python gets on;
        cheap, and often called.
        """
        if self._steps is not None:
            self._steps.look()
        if self.sampler is not None:
            for uuid in self.uuids:
                for reading in self.sampler.history(uuid, self._calibration.last_at(uuid)):
                    self._calibration.learn(reading)

    def sample(self, since: float | None = None) -> Sample:
        """Return what is to be seen now, with the device readings taken after ``since`` [the latest ones]."""
        self.look()
        readings: list[DeviceReading] = []
        latest = self.sampler.readings() if self.sampler is not None else {}
        for uuid in self.uuids:
            fresh = [] if self.sampler is None or since is None else self.sampler.history(uuid, since)
            if not fresh and uuid in latest:
                fresh = [latest[uuid]]
            readings += fresh
        host = self._host.sample()
        trusted = {reading.uuid for reading in readings if self._calibration.trusted(reading)}
        return Sample(
            self._clock(),
            host,
            tuple(readings),
            self.uuids,
            frozenset(trusted),
            self._calibration.idle_w(),
            None if self._steps is None else self._steps.count,
        )

"""A virtual clock, scripted sensors and a scripted device sampler: what the watchdogs' rules are driven by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gangq.gpu.reading import DeviceEvent, DeviceReading
from gangq.watchdogs import Suspicion, Trip
from gangq.watchdogs.activity import IO_BYTES, HostSample
from gangq.watchdogs.counters import Counters
from gangq.watchdogs.idle import Sample

GPU = "GPU-1"


class Clock:
    """Stands still until it is moved."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass
class Sampler:
    """What a device sampler says, as the test sets it: the reading is made anew whenever it is asked for."""

    clock: Callable[[], float]
    now: dict[str, DeviceReading] = field(default_factory=dict)
    kept: dict[str, list[DeviceReading]] = field(default_factory=dict)
    happened: list[DeviceEvent] = field(default_factory=list)

    def set(self, uuid: str = GPU, *, busy_before: bool = True, **values: Any) -> None:
        """From now on the device reads so; ``busy_before``: it has been seen busy, so that 0 counts."""
        values.setdefault("gpu_pct", 0.0)
        values.setdefault("gpu_scope", "device" if values["gpu_pct"] is not None else None)
        self.now[uuid] = DeviceReading(uuid, self.clock(), **values)
        if busy_before:
            seen = replace(self.now[uuid], at=self.clock() - 100, gpu_pct=90.0)
            self.kept.setdefault(uuid, []).insert(0, seen)

    def flash(self, uuid: str = GPU, **values: Any) -> None:
        """It reads so for one reading, a tenth of a second ago, and as before again."""
        at = self.clock() - 0.1
        self.kept.setdefault(uuid, []).append(replace(self.now[uuid], at=at, **values))

    def readings(self) -> dict[str, DeviceReading]:
        return {uuid: replace(reading, at=self.clock()) for uuid, reading in self.now.items()}

    def history(self, uuid: str, since: float) -> list[DeviceReading]:
        now = [reading for name, reading in self.readings().items() if name == uuid]
        return [reading for reading in [*self.kept.get(uuid, []), *now] if reading.at > since]

    def events(self, since: float) -> list[DeviceEvent]:
        return [event for event in self.happened if event.at > since]

    def event(self, kind: str = "xid", *, fatal: bool = True, uuid: str | None = GPU, **more: Any) -> None:
        """It happens now."""
        values: dict[str, Any] = {
            "code": 79,
            "application": False,
            "bucket": "reboot",
            "advice": "reboot",
            **more,
        }
        self.happened.append(DeviceEvent(uuid, self.clock(), kind, fatal=fatal, **values))  # type: ignore[arg-type]


class Scene:
    """Sensors whose host side is scripted: ``moving`` True, False, or None for unknown."""

    def __init__(self, clock: Callable[[], float], sampler: Sampler | None = None) -> None:
        from gangq.watchdogs.sensors import Calibration

        self.clock = clock
        self.sampler = sampler
        self.uuids = tuple(sampler.now) if sampler is not None else ()
        self.moving: bool | None = False
        self.cpu_share = 0.0
        self.waiting = False
        """Whether it waits for a lock that somebody else holds."""
        self.python_steps: int | None = None
        """How many looks found that Python got on; None: another process does the work."""
        self.got_on_at: float | None = None
        self.samples = 0
        self.first: list[DeviceReading] = []
        """What the next sample sees besides, such as readings from before the job."""
        self.on_sample: Callable[[], object] = lambda: None
        self._calibration = Calibration()
        self._at = clock()
        self._io = 0
        self._cpu = 0.0

    def look(self) -> None:
        if self.sampler is not None:
            for uuid in self.uuids:
                for reading in self.sampler.history(uuid, self._calibration.last_at(uuid)):
                    self._calibration.learn(reading)

    def sample(self, since: float | None = None) -> Sample:
        self.look()
        self.samples += 1
        self.on_sample()
        now = self.clock()
        self._io += int((now - self._at) * IO_BYTES) if self.moving else 0
        self._cpu += (now - self._at) * self.cpu_share
        self._at = now
        counters = Counters(io_bytes=self._io, cpu_s=self._cpu, switches={1: 0})
        locked = frozenset([1] if self.waiting else [])
        host = HostSample(
            now, {(1, 1): counters}, locked=locked, unknown="hidden" if self.moving is None else None
        )
        readings, self.first = self.first, []
        if self.sampler is not None:
            latest = self.sampler.readings()
            for uuid in self.uuids:
                if uuid in latest:
                    fresh = [] if since is None else self.sampler.history(uuid, since)
                    readings += fresh or [latest[uuid]]
        trusted = frozenset(r.uuid for r in readings if self._calibration.trusted(r))
        return Sample(
            now, host, tuple(readings), self.uuids, trusted, self._calibration.idle_w(), self.python_steps
        )


class Record:
    """What was tripped and suspected. Trips are called off while ``call_off``."""

    def __init__(self, call_off: bool = False) -> None:
        self.trips: list[Trip] = []
        self.suspicions: list[Suspicion] = []
        self.call_off = call_off

    def trip(self, trip: Trip) -> bool:
        self.trips.append(trip)
        return not self.call_off

    @property
    def reasons(self) -> list[str]:
        return [trip.reason for trip in self.trips]


class World:
    """A job under one watchdog that looks only when the test lets time pass, through scripted sensors.

    ``kind`` is its class. With ``device`` the job holds one, which idles and has been seen busy before this job.
    """

    def __init__(
        self, kind: Callable[..., Any], *, device: bool = True, call_off: bool = False, **options: Any
    ) -> None:
        self.clock = Clock()
        self.record = Record(call_off)
        self.sampler = Sampler(self.clock)
        if device:
            self.sampler.set()
        self.scene = Scene(self.clock, self.sampler)
        self.dog = kind(
            clock=self.clock,
            sensors=self.scene,
            threads=False,
            on_trip=self.record.trip,
            on_suspect=self.record.suspicions.append,
            **options,
        )
        self.dog.start()

    def run(self, seconds: float, *, step: float = 1.0) -> None:
        drive(self.dog, self.clock, seconds, step=step)

    @property
    def reasons(self) -> list[str]:
        return self.record.reasons

    @property
    def suspected(self) -> list[str]:
        """The classes of what was suspected."""
        return [suspicion.cls for suspicion in self.record.suspicions]


def drive(dog: Any, clock: Clock, seconds: float, *, step: float = 1.0) -> None:
    """Let virtual time pass, with a look every ``step``."""
    until = clock.now + seconds
    while clock.now < until - 1e-9:
        clock.now = min(clock.now + step, until)
        dog.check(clock.now)

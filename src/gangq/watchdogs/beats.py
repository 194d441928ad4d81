"""The beats of a job, as the watchdogs that take them into account keep them."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.sensors import WorkSensors
from gangq.watchdogs.watch import Setup, Watch, Watched

if TYPE_CHECKING:
    from typing import Self

LOAD_GRACE_S = 1200.0
LONG_PHASE_S = 3600.0
WAIT_FACTOR = 3.0
"""What only waits gets this many times the time of what is silent."""
WARM_UP_BEATS = 5
"""The gaps between so many first beats teach nothing: they hold compilation and first touches."""

_WORD_CHARS = 200


class Beat(NamedTuple):
    """The latest beat. One object, replaced as a whole: who reads it needs no lock. ``phase_since`` is when its phase
    began, moved by the pauses since.
    """

    number: int
    at: float
    paused: float
    step: int | None
    total: int | None
    phase: str | None
    loss: float | None
    phase_since: float

    def as_json(self) -> dict[str, Any]:
        """Return it for evidence."""
        said = {name: inert(getattr(self, name)) for name in ("step", "total", "phase", "loss")}
        return {"number": self.number, "at": round(self.at, 3), **said}


def inert(value: Any) -> Any:
    """What can be kept of something that a program handed over, without touching it: to be asked anything, a
    tensor on a device waits for work that may never end.
    """
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else repr(value)
    return value[:_WORD_CHARS] if type(value) is str else type(value).__name__


@dataclass(frozen=True)
class Terms:
    """What one job is allowed; see its watchdog for what it means."""

    load_grace_s: float = LOAD_GRACE_S
    long_phase_s: float = LONG_PHASE_S

    def __post_init__(self) -> None:
        """Raises `InvalidInput` for a number that makes no sense, by name."""
        length_s("load_grace_s", self.load_grace_s, zero=True)
        length_s("long_phase_s", self.long_phase_s)


class Beaten(Watched):
    """A job that may beat."""

    __slots__ = ("last", "longest_s", "pending", "sensors")

    def __init__(self, since: float, paused: float, job: Any, sensors: WorkSensors) -> None:
        super().__init__(since, paused, job)
        self.sensors = sensors
        self.last: Beat | None = None
        self.longest_s = 0.0
        """The longest gap between two beats that is known."""
        self.pending: tuple[float, float] | None = None
        """The longest new gap, and the pauses counted when it began: its pauses may not be known yet."""


B = TypeVar("B", bound=Beaten)
T = TypeVar("T", bound=Terms)


class BeatWatch(Watch[B], Generic[B, T]):
    """A watchdog that is told of beats, and looks through sensors."""

    def __init__(self, terms: T, sensors: WorkSensors | None, setup: Setup) -> None:
        super().__init__(**setup)
        self._terms = terms
        self._sensors = sensors or WorkSensors(clock=self._clock)
        self._latest: B | None = None

    @abstractmethod
    def _watched(self, since: float, paused: float, job: Any, sensors: WorkSensors, terms: T) -> B:
        """What is known of a job that begins."""

    def start(
        self, *, sensors: WorkSensors | None = None, job: Any = None, **limits: float | bool | None
    ) -> Self:
        """A job begins. What is None or not given, of these and of the limits, is as the constructor was told.

        Args:
            sensors: what it is looked at through [this process, without devices].
            job: what a verdict names.
            **limits: numbers of the constructor (``load_grace_s``, ``stall_timeout_s`` ...), for this job alone.

        Raises:
            InvalidInput: a number that makes no sense, by name.
        """
        changed: dict[str, Any] = {}
        # Made for every job, so without a call.
        for name in limits:
            if limits[name] is not None:
                changed[name] = limits[name]
        terms = replace(self._terms, **changed) if changed else self._terms
        watched = self._watched(self._clock(), self.pauses.total_s, job, sensors or self._sensors, terms)
        self._latest = watched
        self._begin(watched)
        return self

    def beat(
        self,
        step: int | None = None,
        total: int | None = None,
        phase: str | None = None,
        loss: float | None = None,
    ) -> None:
        """The job is alive, and about to do ``phase``. About a microsecond, takes no lock, never waits."""
        job = self._job
        if job is None:
            return
        # It is compared below, and comparing an object of the program could run any code.
        phase = phase if isinstance(phase, str) else None
        now, paused = self._clock(), self.pauses.total_s
        last = job.last
        number, since = 1, now
        if last is not None:
            number = last.number + 1
            if phase == last.phase:
                since = last.phase_since + paused - last.paused
            if number > WARM_UP_BEATS and last.phase in (None, "run"):
                gap = now - last.at
                if gap > job.longest_s and (job.pending is None or gap > job.pending[0]):
                    job.pending = (gap, last.paused)
        job.last = Beat(number, now, paused, step, total, phase, loss, since)

"""The beats of a job, as the watchdogs that take them into account keep them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from gangq.watchdogs.numbers import factor, length_s
from gangq.watchdogs.sensors import WorkSensors
from gangq.watchdogs.watch import Setup, Watch, Watched

if TYPE_CHECKING:
    from typing import Self

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
    """What `StallWatchdog` and `GpuHealthWatchdog` allow one job; they say what each number means, and each of them
    needs some only.
    """

    load_grace_s: float = 1200.0
    long_phase_s: float = 3600.0
    stall_timeout_s: float | None = None
    """None: the default, 120."""
    learn: bool | None = None
    """Whether the stall timeout may grow; None: only if it is not given."""
    confirm_s: float = 10.0
    overdue_factor: float = 10.0
    window_s: float = 300.0
    """How long devices may be idle with nothing moving, seconds."""

    def __post_init__(self) -> None:
        """Raises `InvalidInput` for a number that makes no sense, by name."""
        length_s("load_grace_s", self.load_grace_s, zero=True)
        length_s("long_phase_s", self.long_phase_s)
        if self.stall_timeout_s is not None:
            length_s("stall_timeout_s", self.stall_timeout_s)
        length_s("confirm_s", self.confirm_s)
        factor("overdue_factor", self.overdue_factor)
        length_s("window_s", self.window_s)


class Beaten(Watched):
    """A job that may beat."""

    __slots__ = ("last", "longest_s", "new_gap", "sensors", "terms")

    def __init__(self, since: float, paused: float, job: Any, sensors: WorkSensors, terms: Terms) -> None:
        super().__init__(since, paused, job)
        self.sensors = sensors
        self.terms = terms
        self.last: Beat | None = None
        self.longest_s = 0.0
        """The longest gap between two beats that is known."""
        self.new_gap: tuple[float, float] | None = None
        """A longer one, not looked at yet, and the pauses counted when it began: its own may not be known yet."""


B = TypeVar("B", bound=Beaten)


class BeatWatch(Watch[B], Generic[B]):
    """A watchdog that is told of beats, and looks through sensors."""

    _watched: type[B]
    """What is known of one job."""

    def __init__(self, terms: Terms, sensors: WorkSensors | None, setup: Setup) -> None:
        super().__init__(**setup)
        self._terms = terms
        self._sensors = sensors or WorkSensors(clock=self._clock)

    def start(
        self, terms: Terms | None = None, *, sensors: WorkSensors | None = None, job: Any = None
    ) -> Self:
        """A job begins: what it is allowed, what it is looked at through [both as the constructor was told], and
        what trips and suspicions name.
        """
        self._begin(
            self._watched(
                self._clock(), self.pauses.total_s, job, sensors or self._sensors, terms or self._terms
            )
        )
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
                if gap > job.longest_s and (job.new_gap is None or gap > job.new_gap[0]):
                    job.new_gap = (gap, last.paused)
        job.last = Beat(number, now, paused, step, total, phase, loss, since)

"""The one definition of idle, which both the stall and the health watchdog judge by.

A verdict has three values. *Idle* needs every signal there is, over the whole window: each device known, trusted
and quiet in every sample, and the host known and still between any two. One thing that moved makes it *not
idle*. If nothing moved and something cannot be known it is *unknown*, and no job is tripped for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gangq.watchdogs.activity import HostSample, Movement, movement

if TYPE_CHECKING:
    from gangq.gpu.reading import DeviceReading

QUIET_PCT = 5.0
"""Utilisation up to which a device counts as quiet, percent."""

ENERGY_S = 2.0
"""The least time over which an energy counter tells a power, seconds: some count in lumps."""

_LEAST_W = 1.0
"""A card always draws more: less is a counter or a sensor that does not count."""
_PCIE_KB_S = 40_000
"""An H100 with nothing to do shows up to 15,300 in single readings; a model that loads shows millions."""
_DEVICE_MB = 16
_POWER_FACTOR = 2.0
_STALE_S = 10.0
_LEAST_READINGS = 2
_SPIN_GPU_PCT = 90.0
_SPIN_MEMORY_PCT = 1.0
_SPIN_POWER_FACTOR = 1.2
_CPU_WORKS = 0.02
"""Cores that work without devices has to use: next to none, because a busy host or a small cgroup leaves no more."""
_CPU_COMPUTES = 0.1
"""Cores that Python beside an idle device has to use to compute rather than to poll."""


@dataclass(frozen=True)
class Sample:
    """Everything that is seen of a job at one instant (boottime seconds).

    ``host`` is None where the host side is not sampled. ``devices`` are the readings of the devices it holds
    taken since the sample before, any number for each. ``held`` are those devices' uuids (empty: those of
    ``devices``), ``calibrated`` those whose utilisation has been seen above zero before, and ``idle_w`` what
    each draws when it has a program's memory and nothing to do, watts. ``python_steps`` counts the looks at which
    Python had got on in this process (:mod:`gangq.watchdogs.steps`); None where it is not the one watched.
    """

    at: float
    host: HostSample | None = None
    devices: tuple[DeviceReading, ...] = ()
    held: tuple[str, ...] = ()
    calibrated: frozenset[str] = frozenset()
    idle_w: Mapping[str, float] = field(default_factory=dict)
    python_steps: int | None = None

    @property
    def uuids(self) -> tuple[str, ...]:
        """The devices that have to be known for a verdict."""
        return self.held or tuple(dict.fromkeys(reading.uuid for reading in self.devices))


@dataclass(frozen=True)
class Verdict:
    """``idle`` True, False, or None: cannot be known; ``why`` in a sentence.

    ``waiting`` (then ``idle`` is False) says that the devices were quiet and nothing moved, but something waits in
    a way that may be legitimate: sleeps, polls in a loop, or wants a lock that another program holds.
    ``known`` says whether any sensor at all could tell something; ``spinning`` whether every device was busy
    in the way that dead work is: without touching memory, and hardly warmer than idle, while the host side was
    not seen to move.
    """

    idle: bool | None
    why: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    known: bool = False
    spinning: bool = False
    waiting: bool = False


def judge(window: Sequence[Sample]) -> Verdict:
    """Judge a window of samples, oldest first. Pure: the same samples give the same verdict."""
    if len(window) < 2:
        return Verdict(None, "one look is no window")
    busy: list[str] = []
    unknown: list[str] = []
    waits: list[str] = []
    known = False
    for uuid in dict.fromkeys(uuid for sample in window for uuid in sample.uuids):
        signs = list(_device_signs(uuid, window))
        busy += [why for moved, why in signs if moved]
        unknown += [why for moved, why in signs if moved is None]
        known = known or any(reading.gpu_pct is not None for reading in _readings(uuid, window))
    pairs = list(_movements(window))
    moves = [move for move, _ in pairs]
    known = known or any(move.moved is not None for move in moves)
    devices = any(sample.uuids for sample in window)
    for moved, why in _host_signs(pairs, devices):
        (busy if moved else unknown if moved is None else waits).append(why)
    evidence = summary(window, moves)
    if busy:
        # A job that still reads or writes may be feeding a kernel that waits for that data.
        spinning = spins(window) and not any(move.moved for move in moves)
        return Verdict(False, busy[0], evidence, known, spinning)
    if unknown:
        return Verdict(None, unknown[0], evidence, known)
    if waits:
        return Verdict(False, waits[0], evidence, known, waiting=True)
    quiet = "the devices were quiet" if devices else "no device was held"
    return Verdict(
        True, f"{quiet} and nothing moved in {window[-1].at - window[0].at:.1f} s", evidence, known
    )


def spins(window: Sequence[Sample]) -> bool:
    """Whether every device was busy in every sample like a kernel that waits for what never comes: at least
    90 % utilisation, memory traffic at most 1 %, and no more than 1.2 times its idle power. Unknown is no, and
    what may be a neighbour's is unknown.
    """
    uuids = {uuid for sample in window for uuid in sample.uuids}
    for uuid in uuids:
        readings = _readings(uuid, window)
        idle_w = window[-1].idle_w.get(uuid)
        if len({reading.at for reading in readings}) < _LEAST_READINGS or idle_w is None:
            return False
        for reading, watts in zip(readings, _watts(readings), strict=True):
            if (
                (reading.gpu_scope == "device" and reading.shared)
                or reading.gpu_pct is None
                or reading.gpu_pct < _SPIN_GPU_PCT
                or reading.memory_pct is None
                or reading.memory_pct > _SPIN_MEMORY_PCT
                or watts is None
                or watts > _SPIN_POWER_FACTOR * idle_w
            ):
                return False
    return bool(uuids)


def power_w(before: DeviceReading | None, after: DeviceReading) -> float | None:
    """What a device drew between two readings, by its energy counter if they are at least `ENERGY_S` apart; else
    what it says it draws; watts. None: neither is known, or it would be next to nothing.
    """
    if before is not None and before.energy_mj is not None and after.energy_mj is not None:
        elapsed = after.at - before.at
        if elapsed >= ENERGY_S:
            watts = (after.energy_mj - before.energy_mj) / elapsed / 1000
            if watts >= _LEAST_W:
                return watts
    return after.power_w if after.power_w is not None and after.power_w >= _LEAST_W else None


def summary(window: Sequence[Sample], moves: Iterable[Movement] = (), most: int = 20) -> dict[str, Any]:
    """A window as evidence: its latest samples, at most ``most`` of each kind."""
    readings = [reading for sample in window for reading in sample.devices]
    return {
        "window_s": round(window[-1].at - window[0].at, 2) if window else 0,
        "samples": len(window),
        "host": [move.as_json() for move in list(moves)[-most:]],
        "devices": [
            {
                "uuid": reading.uuid,
                "at": round(reading.at, 2),
                "gpu_pct": reading.gpu_pct,
                "scope": reading.gpu_scope,
                "memory_pct": reading.memory_pct,
                "power_w": reading.power_w,
                "used_mb": reading.used_mb,
                "own_mb": reading.own_mb,
                "unknown": dict(reading.unknown),
            }
            for reading in readings[-most:]
        ],
        "calibrated": sorted(window[-1].calibrated) if window else [],
    }


def _movements(window: Sequence[Sample]) -> Iterator[tuple[Movement, bool]]:
    """What happened between any two samples, and whether Python got on there."""
    if any(sample.host is None for sample in window):
        return
    for before, after in pairwise(window):
        if before.host is not None and after.host is not None and after.host.at > before.host.at:
            got_on = before.python_steps is not None and after.python_steps not in (None, before.python_steps)
            yield movement(before.host, after.host), got_on


def _readings(uuid: str, window: Sequence[Sample]) -> list[DeviceReading]:
    return [reading for sample in window for reading in sample.devices if reading.uuid == uuid]


def _watts(readings: Sequence[DeviceReading]) -> list[float | None]:
    found = []
    for number, after in enumerate(readings):
        long_before = (r for r in reversed(readings[:number]) if after.at - r.at >= ENERGY_S)
        found.append(power_w(next(long_before, None), after))
    return found


def _device_signs(uuid: str, window: Sequence[Sample]) -> Iterator[tuple[bool | None, str]]:
    """What each sample says about one device: (True, why) busy, (None, why) unknown; nothing for quiet."""
    readings = _readings(uuid, window)
    idle_w = window[-1].idle_w.get(uuid)
    for sample in window:
        if not any(r.uuid == uuid and sample.at - r.at <= _STALE_S for r in sample.devices):
            yield None, f"device {uuid} gave no reading"
    if len({reading.at for reading in readings}) < _LEAST_READINGS:
        yield None, f"device {uuid} was read fewer than {_LEAST_READINGS} times"
    if uuid not in window[-1].calibrated:
        yield None, f"device {uuid} has never been seen busy by this process: its zeros prove nothing"
    for reading, watts in zip(readings, _watts(readings), strict=True):
        if (busy := _busy(reading)) is not None:
            yield True, busy
        elif watts is not None and idle_w is not None and watts > _POWER_FACTOR * idle_w:
            yield True, f"device {uuid} draws {watts:.0f} W, idle it draws {idle_w:.0f}"
        elif reading.gpu_pct is None:
            reason = reading.unknown.get("gpu_pct", "the driver does not say")
            yield None, f"utilisation of device {uuid}: {reason}"
        elif reading.gpu_scope == "device" and reading.shared:
            yield None, f"device {uuid} is shared and its utilisation is everybody's"
    for before, after in pairwise(readings):
        for name in ("used_mb", "own_mb"):
            old, new = getattr(before, name), getattr(after, name)
            if old is not None and new is not None and abs(new - old) > _DEVICE_MB:
                yield True, f"memory of device {uuid} went from {old} to {new} MiB"


def _host_signs(pairs: Sequence[tuple[Movement, bool]], devices: bool) -> Iterator[tuple[bool | None, str]]:
    """What happened on the host between any two samples: (True, why) work, (None, why) unknown, (False, why) a wait
    that may be legitimate; nothing for silence. ``devices``: whether the job holds any.
    """
    if not pairs:
        yield None, "the host side was not sampled throughout"
    for move, got_on in pairs:
        if move.moved:
            yield True, move.why
        elif move.cpu_share >= (_CPU_COMPUTES if devices else _CPU_WORKS) and (got_on or not devices):
            # For work without devices the processor is the device. Beside a device a thread that stays in one call
            # may spin in vain; one that comes back from it to Python computes.
            yield True, f"{move.cpu_share:.2f} cores at work"
        elif move.moved is None:
            yield None, move.why
        elif got_on:
            yield False, "Python waits in a loop"
        elif move.waits is not None:
            yield False, move.waits


def _busy(reading: DeviceReading) -> str | None:
    for value, limit, what in (
        (reading.gpu_pct, QUIET_PCT, "% busy"),
        (reading.memory_pct, QUIET_PCT, "% of the time at its memory"),
        (reading.pcie_kb_s, _PCIE_KB_S, "kB/s over PCIe"),
    ):
        if value is not None and value > limit:
            return f"device {reading.uuid} was {value:g} {what}"
    return None

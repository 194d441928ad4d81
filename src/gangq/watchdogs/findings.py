"""What a watchdog reports: a suspicion, or a trip."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gangq.watchdogs.codes import ExitCode


@dataclass(frozen=True)
class Suspicion:
    """Something is on its way to a trip. Nothing is stopped for it.

    ``cls`` is budget, stall, health or fault; ``message`` one sentence; ``job`` whatever the watchdog's
    ``start`` was given.
    """

    cls: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    job: Any = None


@dataclass(frozen=True)
class Trip:
    """A job is to be ended.

    ``reason`` is a stable word (budget, idle, waits, spin, no_progress, or the kind of a device event), ``message``
    one sentence for people, ``devices`` the uuids to blame, ``application`` whether the fault is of a class
    that programs cause (the device then stays in use), ``job`` whatever the watchdog's ``start`` was given.
    """

    code: ExitCode
    reason: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    application: bool = False
    job: Any = None

    @property
    def cls(self) -> str:
        """Its class: budget, stall, health or fault; memory, where the kernel ended a command."""
        return self.code.word

    def as_json(self) -> dict[str, Any]:
        """Return what is to be kept of it as evidence."""
        return {
            "code": int(self.code),
            "class": self.cls,
            "reason": self.reason,
            "message": self.message,
            "application": self.application,
            "devices_blamed": list(self.devices),
            "seen": dict(self.evidence),
        }


_TYPES = {"budget": "OverBudget", "stall": "Stalled", "health": "Wedged", "fault": "DeviceFault"}


def sentence(trip: Trip, evidence: Mapping[str, Any]) -> str:
    """What a person needs to know first, as a sentence without its subject: `waited 126 s in recv() of allreduce
    at train.py:88; GPU 0 %, 3 looks`. ``evidence`` as `collect` returns it; without a place the trip's message.
    Where another job is the cause, ``loop`` of the trip's evidence says which.
    """
    said = _without_cause(trip, evidence)
    return f"{said}; {trip.evidence['loop']}" if "loop" in trip.evidence else said


def _without_cause(trip: Trip, evidence: Mapping[str, Any]) -> str:
    place, silence_s = evidence.get("place"), trip.evidence.get("silence_s", trip.evidence.get("quiet_s"))
    if not place:
        return trip.message
    if silence_s is None or not trip.code.may_be_held:
        return f"{trip.message}; it was in {place}"
    window = trip.evidence.get("window") or trip.evidence.get("samples") or {}
    percents = [reading.get("gpu_pct") for reading in window.get("devices", ())]
    known = [percent for percent in percents if percent is not None]
    seen = [f"GPU {max(known):g} %"] if known else ["GPU unknown"] if percents else []
    looks = window.get("samples")
    seen += [f"{looks} looks"] if looks else []
    verb = "waited" if trip.reason in ("idle", "waits") else "made no progress for"
    return f"{verb} {silence_s:.0f} s in {place}" + (f"; {', '.join(seen)}" if seen else "")


def error_of(trip: Trip, evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The error that is kept of a job that tripped, as ``gangq.fail`` and ``gangq.trip`` take it."""
    return {
        "type": _TYPES.get(trip.cls, trip.code.name.title()),
        "message": sentence(trip, evidence),
        "reason": trip.reason,
        "code": int(trip.code),
        "host": socket.gethostname(),
    }


OnTrip = Callable[[Trip], bool]
"""Carries a trip out. Normally never returns, because the process is gone; True: carried out (the job is over
although this process lives on); False: called off, and the watchdog watches on.
"""

OnSuspect = Callable[[Suspicion], object]
"""Is told of a suspicion, in a thread of its own: however long it takes, no trip waits for it."""

"""Watchdogs: what ends a job that no longer gets anywhere, and says why.

Three threads, each a context manager around one job and usable without a queue: `Watchdog` (wall clock),
`StallWatchdog` (no progress), `GpuHealthWatchdog` (idle or broken devices). They share one definition of idle
(`gangq.watchdogs.idle`) and one trip path (`gangq.watchdogs.trip`). `Deadman` and `Backstop` hold when no Python
runs any more.

What is named here is imported when it is first used: the supervisor needs the exit codes and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangq.errors import Unsupported
    from gangq.watchdogs.activity import HostActivity, HostSample
    from gangq.watchdogs.backstop import Backstop
    from gangq.watchdogs.budget import Watchdog
    from gangq.watchdogs.codes import NOTIFY_CLASSES, ExitCode
    from gangq.watchdogs.deadman import Deadman
    from gangq.watchdogs.evidence import collect
    from gangq.watchdogs.health import GpuHealthWatchdog
    from gangq.watchdogs.idle import Sample, Verdict, judge
    from gangq.watchdogs.pauses import PauseMeter
    from gangq.watchdogs.sensors import Calibration, Sensors, WorkSensors
    from gangq.watchdogs.stall import StallWatchdog
    from gangq.watchdogs.trip import TripPath, leave_now
    from gangq.watchdogs.verdicts import OnSuspect, OnTrip, Suspicion, Trip, error_of

_HOME = {
    "Backstop": "backstop",
    "Calibration": "sensors",
    "Deadman": "deadman",
    "ExitCode": "codes",
    "GpuHealthWatchdog": "health",
    "HostActivity": "activity",
    "HostSample": "activity",
    "NOTIFY_CLASSES": "codes",
    "OnSuspect": "verdicts",
    "OnTrip": "verdicts",
    "PauseMeter": "pauses",
    "Sample": "idle",
    "Sensors": "sensors",
    "StallWatchdog": "stall",
    "Suspicion": "verdicts",
    "Trip": "verdicts",
    "TripPath": "trip",
    "Unsupported": "deadman",
    "Verdict": "idle",
    "Watchdog": "budget",
    "WorkSensors": "sensors",
    "collect": "evidence",
    "error_of": "verdicts",
    "judge": "idle",
    "leave_now": "trip",
}

__all__ = [
    "NOTIFY_CLASSES",
    "Backstop",
    "Calibration",
    "Deadman",
    "ExitCode",
    "GpuHealthWatchdog",
    "HostActivity",
    "HostSample",
    "OnSuspect",
    "OnTrip",
    "PauseMeter",
    "Sample",
    "Sensors",
    "StallWatchdog",
    "Suspicion",
    "Trip",
    "TripPath",
    "Unsupported",
    "Verdict",
    "Watchdog",
    "WorkSensors",
    "collect",
    "error_of",
    "judge",
    "leave_now",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gangq.watchdogs' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"gangq.watchdogs.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

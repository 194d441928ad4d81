"""Watchdogs: what ends a job that no longer gets anywhere, and says why.

Three threads, each a context manager around one job and usable without a queue: `Watchdog` (wall clock),
`StallWatchdog` (no progress), `GpuHealthWatchdog` (idle or broken devices). They share one definition of idle
(`gangq.watchdogs.idle`) and one trip path (`gangq.watchdogs.trip`). `Deadman` and `Backstop` hold when no Python
runs any more.

What is named here is imported when it is first used: most commands need the exit codes and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangq.errors import Unsupported as Unsupported
    from gangq.watchdogs.activity import HostActivity as HostActivity
    from gangq.watchdogs.activity import HostSample as HostSample
    from gangq.watchdogs.backstop import Backstop as Backstop
    from gangq.watchdogs.budget import Watchdog as Watchdog
    from gangq.watchdogs.codes import NOTIFY_CLASSES as NOTIFY_CLASSES
    from gangq.watchdogs.codes import ExitCode as ExitCode
    from gangq.watchdogs.deadman import Deadman as Deadman
    from gangq.watchdogs.evidence import collect as collect
    from gangq.watchdogs.health import GpuHealthWatchdog as GpuHealthWatchdog
    from gangq.watchdogs.idle import Sample as Sample
    from gangq.watchdogs.idle import Verdict as Verdict
    from gangq.watchdogs.idle import judge as judge
    from gangq.watchdogs.pauses import PauseMeter as PauseMeter
    from gangq.watchdogs.sensors import Calibration as Calibration
    from gangq.watchdogs.sensors import WorkSensors as WorkSensors
    from gangq.watchdogs.stall import StallWatchdog as StallWatchdog
    from gangq.watchdogs.trip import TripPath as TripPath
    from gangq.watchdogs.trip import leave_now as leave_now
    from gangq.watchdogs.verdicts import OnSuspect as OnSuspect
    from gangq.watchdogs.verdicts import OnTrip as OnTrip
    from gangq.watchdogs.verdicts import Suspicion as Suspicion
    from gangq.watchdogs.verdicts import Trip as Trip
    from gangq.watchdogs.verdicts import error_of as error_of

_HOME = {
    name: module
    for module, names in {
        "gangq.errors": "Unsupported",
        "gangq.watchdogs.activity": "HostActivity HostSample",
        "gangq.watchdogs.backstop": "Backstop",
        "gangq.watchdogs.budget": "Watchdog",
        "gangq.watchdogs.codes": "NOTIFY_CLASSES ExitCode",
        "gangq.watchdogs.deadman": "Deadman",
        "gangq.watchdogs.evidence": "collect",
        "gangq.watchdogs.health": "GpuHealthWatchdog",
        "gangq.watchdogs.idle": "Sample Verdict judge",
        "gangq.watchdogs.pauses": "PauseMeter",
        "gangq.watchdogs.sensors": "Calibration WorkSensors",
        "gangq.watchdogs.stall": "StallWatchdog",
        "gangq.watchdogs.trip": "TripPath leave_now",
        "gangq.watchdogs.verdicts": "OnSuspect OnTrip Suspicion Trip error_of",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gangq.watchdogs' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

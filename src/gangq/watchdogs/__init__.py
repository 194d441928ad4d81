"""Watchdogs: what ends a job that no longer gets anywhere, and says why.

Three threads, each a context manager around one job and usable without a queue: `Watchdog` (wall clock),
`StallWatchdog` (no progress), `GpuHealthWatchdog` (idle or broken devices). They share one definition of idle
(`gangq.watchdogs.idle`) and one trip path (`gangq.watchdogs.trip`). A `Deadman` and a `Backstop` hold when
no Python runs any more.

What is named here is imported when it is first used: most commands need the exit codes and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangq.watchdogs.backstop import Backstop as Backstop
    from gangq.watchdogs.beats import Terms as Terms
    from gangq.watchdogs.budget import Watchdog as Watchdog
    from gangq.watchdogs.codes import ExitCode as ExitCode
    from gangq.watchdogs.health import GpuHealthWatchdog as GpuHealthWatchdog
    from gangq.watchdogs.sensors import WorkSensors as WorkSensors
    from gangq.watchdogs.stall import StallWatchdog as StallWatchdog
    from gangq.watchdogs.verdicts import Suspicion as Suspicion
    from gangq.watchdogs.verdicts import Trip as Trip

_HOME = {
    "Backstop": "backstop",
    "ExitCode": "codes",
    "GpuHealthWatchdog": "health",
    "StallWatchdog": "stall",
    "Suspicion": "verdicts",
    "Terms": "beats",
    "Trip": "verdicts",
    "Watchdog": "budget",
    "WorkSensors": "sensors",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'gangq.watchdogs' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"gangq.watchdogs.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

"""Watchdogs: what ends a job that no longer gets anywhere, and says why.

Three threads, each a context manager around one job and usable without a queue: `Watchdog` (wall clock),
`StallWatchdog` (no progress), `GpuHealthWatchdog` (idle or broken devices). The way from a beat that does not come to
an exit with 76, each step in one file:

1. ``beats``: `BeatWatch.beat` keeps the latest beat, whoever sends it (a worker: `JobWatch` of ``gangq.worker``).
2. ``watch``: the thread calls `Watch.check` once a second, and so the watchdog's `_look`.
3. ``stall``: silent for too long, it takes samples until they are a window, and decides what follows (`_outcome`).
4. ``sensors``: takes a sample: devices, host (``activity``, from ``counters`` of a ``family``), Python (``steps``).
5. ``idle``: `judge` says of a window whether the job is idle. ``health`` asks the same of its own.
6. ``watch``: `Watch._trip` has the trip (``findings``) carried out, unless the job is over by now.
7. ``trip``: `TripPath` does that in six steps. It needs ``deadman`` (a kernel timer), ``pending`` (holds the main
   thread) and ``evidence`` (with ``waits`` and ``dumps``). The last step is the exit.

Beside that way:

- ``budget`` and ``health`` begin at 2. ``pauses`` of this process move the deadlines of all three.
- ``backstop`` ends a process in which no Python runs any more: no thread of it gives ``signs`` of life.
- ``codes`` says what follows from each exit code; ``numbers`` refuses settings that make no sense.

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
    from gangq.watchdogs.findings import Suspicion as Suspicion
    from gangq.watchdogs.findings import Trip as Trip
    from gangq.watchdogs.health import GpuHealthWatchdog as GpuHealthWatchdog
    from gangq.watchdogs.sensors import WorkSensors as WorkSensors
    from gangq.watchdogs.stall import StallWatchdog as StallWatchdog

_HOME = {
    "Backstop": "backstop",
    "ExitCode": "codes",
    "GpuHealthWatchdog": "health",
    "StallWatchdog": "stall",
    "Suspicion": "findings",
    "Terms": "beats",
    "Trip": "findings",
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

"""The clock of leases and deadlines."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime() -> float:
    """Seconds since boot, those asleep included. Where there is no such clock (macOS, which runs no workers) the
    monotonic one.
    """
    return time.clock_gettime(_CLOCK)

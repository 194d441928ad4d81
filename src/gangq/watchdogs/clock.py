"""The clocks that deadlines are counted on."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds since boot, those asleep included: the clock of leases and deadlines.

    Where there is no such clock (macOS, which runs no workers) the monotonic one.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))

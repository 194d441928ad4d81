"""Asks driver libraries for their devices, in a process that its caller can afford to lose.

    python -m gangq.gpu.probe TIMEOUT_S nvml amdsmi

asks one after the other until one has devices, and prints a JSON object a line for each: `devices`, `warnings`, and
`problem` (null, or why there is no answer) with `absent` (the host has no such driver). A call into a wedged driver
never returns, and no Python exception can end it; `gangq.gpu.detect` kills this process instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from gangq.errors import DriverUnavailable
from gangq.gpu.driver import Driver
from gangq.gpu.nvml import NvmlDriver
from gangq.gpu.rocm import AmdsmiDriver


def answer(driver: Driver) -> dict[str, Any]:
    """Return what the driver says as the object this program prints; never raises."""
    try:
        devices = [device.as_json() for device in driver.devices()]
    except DriverUnavailable as error:
        return {"devices": [], "warnings": driver.warnings, "problem": str(error), "absent": error.absent}
    except Exception as error:
        problem = (
            f"{driver.library} failed ({type(error).__name__}: {error}): see what the driver's own tool says"
        )
        return {"devices": [], "warnings": driver.warnings, "problem": problem, "absent": False}
    return {"devices": devices, "warnings": driver.warnings, "problem": None, "absent": False}


def main(argv: list[str]) -> int:
    """Probe the drivers named in `argv` after the seconds that end this process."""
    # The caller kills this process at its own timeout. Should the caller die first, the kernel's default
    # action for the alarm ends it even inside a driver call.
    signal.setitimer(signal.ITIMER_REAL, float(argv[0]))
    # Driver libraries and bindings print where they like; the answers get a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for name in argv[1:]:
            said = answer(NvmlDriver() if name == "nvml" else AmdsmiDriver())
            print(json.dumps(said), file=out, flush=True)
            if said["problem"] is None:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

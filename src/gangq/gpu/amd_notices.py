"""AMD's notifications as data: which of them say that work on the device is over."""

from __future__ import annotations

from gangq.gpu.faults import Fault
from gangq.gpu.reading import EventKind

NOTICES: dict[str, tuple[int, EventKind, Fault]] = {
    "VMFAULT": (
        1,
        "page_fault",
        Fault("a page fault of the device, mostly an illegal access", "restart_app", application=True),
    ),
    "GPU_PRE_RESET": (
        3,
        "reset",
        Fault("the driver resets the device, all work on it is lost", "restart_app", fatal=True),
    ),
    "GPU_POST_RESET": (
        4,
        "reset",
        Fault("the driver has reset the device", "restart_app"),
    ),
}
"""Name in amdsmi, its number, the kind of event, and what it means."""

BY_CODE: dict[int, Fault] = {code: fault for code, _, fault in NOTICES.values()}
"""The same by number."""

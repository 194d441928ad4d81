"""What can befall a device, and what to do for it, as data.

A fault is fatal where work on the device cannot go on. What only may go wrong (an unknown code, a link error, a
page that will be replaced at the next reset) is a suspicion: the driver's recovery action, or the job's own
silence, decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gangq.gpu.reading import EventKind

Bucket = Literal[
    "ignore",
    "restart_app",
    "workflow",
    "reset_gpu",
    "reboot",
    "restart_vm",
    "power",
    "software",
    "support",
    "recovery",
    "driver",
    "unknown",
]

REMEDIES: dict[Bucket, str] = {
    "ignore": "nothing to do",
    "restart_app": "run the program again; if it comes back on this device only, suspect the device",
    "workflow": "see what the driver says the device needs (nvidia-smi -q, GPU Recovery Action), then decide",
    "reset_gpu": "reset the device once nothing uses it (nvidia-smi -r, amd-smi reset --gpureset)",
    "reboot": "reboot the host; if it comes back, have the card and its slot inspected",
    "restart_vm": "restart the virtual machine",
    "power": "check the power cables of the card",
    "software": "update the driver and its libraries, then run the program again",
    "support": "collect nvidia-bug-report.sh and ask the vendor",
    "recovery": "the driver changed what the device needs: read its recovery action",
    "driver": "look at dmesg; if nvidia-smi or amd-smi hangs as well, reboot the host",
    "unknown": "look the code up in the vendor's list; the driver's recovery action says whether it matters",
}
"""What to do, by class of remedy."""


@dataclass(frozen=True)
class Fault:
    """One kind of fault: its class of remedy, whether work can go on, whether the program is the likely cause."""

    what: str
    bucket: Bucket
    fatal: bool = False
    application: bool = False

    @property
    def advice(self) -> str:
        """What it is and what to do, as one sentence."""
        return f"{self.what}: {REMEDIES[self.bucket]}"


# NVIDIA's Xid codes. The buckets are those of the vendor's catalogue.
_XID_WHAT = {
    13: "a graphics engine exception, mostly an illegal access by the program",
    31: "a page fault of the device, mostly an illegal access by the program",
    32: "a corrupted push buffer",
    38: "a driver firmware error",
    43: "the device stopped processing for one program",
    44: "a fault during a context switch",
    45: "the driver cleaned up after a program that ended with work pending",
    46: "the device stopped processing",
    48: "a double-bit ECC error",
    54: "auxiliary power is missing",
    62: "the device's microcontroller halted",
    63: "a bad memory row or page will be replaced at the next reset",
    64: "a bad memory row or page could not be replaced",
    69: "a graphics engine class error",
    74: "an NVLink error",
    78: "a virtual GPU could not start",
    79: "the device has fallen off the bus",
    92: "a high rate of single-bit ECC errors",
    94: "a contained uncorrectable memory error, which ended one program",
    95: "an uncontained uncorrectable memory error",
    109: "a context switch timed out",
    110: "a security fault",
    119: "the device's system processor (GSP) does not answer",
    120: "an error in the device's system processor (GSP)",
    136: "an NVLink training failure",
    140: "an unrecovered ECC error",
    143: "the device failed to initialise",
    151: "a key rotation failed",
    154: "the recovery action of the device changed",
}
_XIDS: dict[Bucket, tuple[int, ...]] = {
    "restart_app": (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88),
        *(89, 94, *range(96, 106), *range(126, 136), 139),
    ),
    "ignore": (37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 160, 161),
    "reset_gpu": (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "workflow": (45, 48, 74, *range(144, 151)),
    "reboot": (79,),
    "power": (54,),
    "software": (78,),
    "support": (142,),
    "restart_vm": (151,),
    "recovery": (154,),
}
_FATAL_BUCKETS: frozenset[Bucket] = frozenset({"reset_gpu", "reboot", "restart_vm", "power"})
# The catalogue leaves a double-bit error to the administrator; for the work on the device it is the end.
_FATAL_XIDS = frozenset({48})
# What a program's own bug causes never puts a device out of service.
_XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 94})


def _xid(code: int, bucket: Bucket) -> Fault:
    what = f"Xid {code}" + (f", {_XID_WHAT[code]}" if code in _XID_WHAT else "")
    fatal = bucket in _FATAL_BUCKETS or code in _FATAL_XIDS
    return Fault(what, bucket, fatal, code in _XIDS_OF_PROGRAMS)


FAULTS: dict[tuple[EventKind, int | None], Fault] = {
    **{("xid", code): _xid(code, bucket) for bucket, codes in _XIDS.items() for code in codes},
    ("xid", None): Fault("Xid {}", "unknown"),
    ("lost", None): Fault("the device is lost, the driver no longer reaches it", "reboot", fatal=True),
    ("reset_required", None): Fault(
        "the device needs a reset before it works again", "reset_gpu", fatal=True
    ),
    ("unavailable", None): Fault("the driver declares the device unavailable", "reset_gpu", fatal=True),
    ("ecc", None): Fault(
        "uncorrectable memory errors appeared while the device was in use", "reset_gpu", fatal=True
    ),
    ("ecc", 0x800): Fault("bad memory of the device could not be replaced", "support"),
    ("poison", None): Fault("poisoned data was contained", "restart_app"),
    ("poison", 0x2000): Fault("poisoned data reached the device's engines", "reset_gpu", fatal=True),
    # NVML's field 230. Drain actions leave running work alone, so they are no reason to end it. An action that is
    # newer than this table is taken seriously, but is not fatal.
    ("recovery", None): Fault("the driver asks for recovery action {}", "workflow"),
    ("recovery", 0): Fault("no recovery is needed", "ignore"),
    ("recovery", 1): Fault("the driver asks for a reset of the device", "reset_gpu", fatal=True),
    ("recovery", 2): Fault("the driver asks for a reboot of the node", "reboot", fatal=True),
    ("recovery", 3): Fault("the driver asks to stop peer-to-peer work on the device", "workflow"),
    ("recovery", 4): Fault("the driver asks to let work end and then reset the device", "reset_gpu"),
    ("recovery", 5): Fault("the driver asks to recover the IMEX domain", "workflow"),
    ("recovery", 6): Fault("the driver asks for a reset of the device's bus", "reboot", fatal=True),
    ("recovery", 7): Fault("the driver asks for a reboot of the system", "reboot", fatal=True),
    # The notifications of AMD's driver.
    ("page_fault", None): Fault(
        "a page fault of the device, mostly an illegal access", "restart_app", application=True
    ),
    ("reset", None): Fault("the driver has reset the device", "restart_app"),
    ("reset", 3): Fault("the driver resets the device, all work on it is lost", "restart_app", fatal=True),
    ("count", None): Fault("the driver lists fewer devices than before", "workflow"),
    ("driver_hang", None): Fault("a driver call did not return", "driver"),
}
"""By kind and code of the event; with None for all other codes of that kind."""

HANG_AGAIN = Fault("driver calls for the device hang again and again", "driver", fatal=True)
UNKILLABLE = Fault(
    "a driver call does not return and the process in it survives SIGKILL: it is stuck in the kernel",
    "reboot",
    fatal=True,
)


def judge(kind: EventKind, code: int | None) -> Fault:
    """Return what an event means; for `driver_hang`, the first one."""
    fault = FAULTS.get((kind, code)) or FAULTS[kind, None]
    return replace(fault, what=fault.what.format(code))

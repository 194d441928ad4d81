"""NVIDIA's Xid codes as data: what each asks for.

Buckets are those of the vendor's catalogue. `fatal` marks the codes after which running work cannot go on;
`application` those that a program's own bug causes, so that they never put a device out of service. A code that
is not here is a suspicion, and the driver's recovery action decides.
"""

from __future__ import annotations

from gangq.gpu.faults import Bucket, Fault

_WHAT = {
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

_BUCKETS: dict[Bucket, tuple[int, ...]] = {
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
_FATAL_CODES = frozenset({48})
_APPLICATION = frozenset({13, 31, 43, 45, 94})


def _fault(code: int, bucket: Bucket) -> Fault:
    what = f"Xid {code}" + (f", {_WHAT[code]}" if code in _WHAT else "")
    return Fault(what, bucket, bucket in _FATAL_BUCKETS or code in _FATAL_CODES, code in _APPLICATION)


XIDS: dict[int, Fault] = {code: _fault(code, bucket) for bucket, codes in _BUCKETS.items() for code in codes}
"""Every code of the catalogue that has a bucket."""


def xid(code: int) -> Fault:
    """Return what an Xid means; an unknown one is not fatal."""
    return XIDS.get(code) or _fault(code, "unknown")

"""What can befall a device, and what to do for it: everything but the Xids and AMD's notifications as data.

A fault is fatal where work on the device cannot go on. What only may go wrong (an unknown code, a link error, a
page that will be replaced at the next reset) is a suspicion: the driver's recovery action, or the job's own
silence, decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


RECOVERY: dict[int, Fault] = {
    0: Fault("no recovery is needed", "ignore"),
    1: Fault("the driver asks for a reset of the device", "reset_gpu", fatal=True),
    2: Fault("the driver asks for a reboot of the node", "reboot", fatal=True),
    3: Fault("the driver asks to stop peer-to-peer work on the device", "workflow"),
    4: Fault("the driver asks to let work end and then reset the device", "reset_gpu"),
    5: Fault("the driver asks to recover the IMEX domain", "workflow"),
    6: Fault("the driver asks for a reset of the device's bus", "reboot", fatal=True),
    7: Fault("the driver asks for a reboot of the system", "reboot", fatal=True),
}
"""NVML's field 230. Drain actions leave running work alone, so they are no reason to end it."""


def recovery(action: int) -> Fault:
    """Return what a recovery action means; an action newer than this table is taken seriously but not fatal."""
    return RECOVERY.get(action) or Fault(f"the driver asks for recovery action {action}", "workflow")


LOST = Fault("the device is lost, the driver no longer reaches it", "reboot", fatal=True)
RESET_REQUIRED = Fault("the device needs a reset before it works again", "reset_gpu", fatal=True)
UNAVAILABLE = Fault("the driver declares the device unavailable", "reset_gpu", fatal=True)
ECC = Fault("uncorrectable memory errors appeared while the device was in use", "reset_gpu", fatal=True)
FATAL_POISON = Fault("poisoned data reached the device's engines", "reset_gpu", fatal=True)
POISON = Fault("poisoned data was contained", "restart_app")
RETIREMENT_FAILED = Fault("bad memory of the device could not be replaced", "support")
COUNT = Fault("the driver lists fewer devices than before", "workflow")
HANG = Fault("a driver call did not return", "driver")
HANG_AGAIN = Fault("driver calls for the device hang again and again", "driver", fatal=True)
UNKILLABLE = Fault(
    "a driver call does not return and the process in it survives SIGKILL: it is stuck in the kernel",
    "reboot",
    fatal=True,
)

"""What a GPU device is to gangq, and what every driver binding must be able to say about one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Source = Literal["nvml", "amdsmi", "declared"]
"""Where a device is known from: NVIDIA's library, AMD's library, or the operator's declaration."""


@dataclass(frozen=True)
class Device:
    """One schedulable GPU: a whole card, or one MIG instance of a card that is in MIG mode.

    `uuid` is the identity that the database keys on. `index` is only for people: it is unique within one
    detection and equals the driver's own index as long as no card before it is in MIG mode. `vram_mb` is in
    MiB (2**20 bytes), as the driver counts it. `link` names the devices that NVLink or XGMI joins, each with
    each, by the UUID of the first of them; None: it is joined with none, or it is not known.
    """

    index: int
    uuid: str
    vram_mb: int
    model: str
    source: Source
    mig: bool = False
    link: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the device as the plain object that `register_worker` takes."""
        return asdict(self)


class Driver(Protocol):
    """One way to learn which devices there are and to hand some of them to a process.

    `warnings` is what the last `devices()` call wants the operator to know, one sentence each.
    """

    name: Source
    library: str
    warnings: list[str]

    def devices(self) -> list[Device]:
        """List the devices this process may use, after the operator's own restriction.

        May block for as long as the driver likes: call it in a process that can be killed. Raises
        `DriverUnavailable` where there is no driver, or one that does not work.
        """
        ...

    def visible_env(self, devices: Iterable[Device]) -> dict[str, str]:
        """Return the environment that shows a child process exactly these devices, in this order.

        No devices hides all of them: a job that holds none must not touch one.
        """
        ...

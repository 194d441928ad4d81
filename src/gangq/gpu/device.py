"""What a GPU device is to gangq."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

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

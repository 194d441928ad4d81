"""What a GPU sampler says: readings of one device at one instant, and events that befell it.

A value that the driver does not give is None (`throttle`: empty) and `unknown` says why. It is never 0: a watchdog
that takes silence for idleness kills healthy jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Scope = Literal["process", "mig", "device"]
"""Whose work a utilisation counts: that of the watched processes, of a MIG instance, or of everybody."""

EventKind = Literal[
    "xid",
    "lost",
    "reset_required",
    "reset",
    "recovery",
    "ecc",
    "unavailable",
    "poison",
    "page_fault",
    "driver_hang",
    "count",
]
"""What an event is: `count` is a driver that lists fewer devices than before, the others are what they say."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at one instant.

    `at` is in seconds of the boottime clock. `gpu_pct` is the busiest moment since the previous reading, where
    the driver keeps samples, in percent; `gpu_scope` says whose (None where that is unknown; a MIG instance's
    reading is `mig`, though no driver tells its utilisation).
    `memory_pct` is the share of time in which memory was read or written. `used_mb`, `total_mb` and `own_mb`
    (the watched processes') are MiB; `energy_mj` counts millijoules since the driver was loaded and
    `pcie_kb_s` both directions. `throttle` names what holds the clocks down against the device's interest
    (heat, power brake), not idleness or a power cap. `ecc_uncorrectable` counts since the last reset (of
    a MIG instance, the errors of its SRAM); `recovery_action` is NVML's field 230 (0: none).
    `shared` is true where processes that are not watched use
    the device too. `unknown` maps the name of each missing value to the reason: `not_supported`,
    `function_not_found` (an older driver), `not_available` ("N/A"), `library_mismatch`, `no_own_process` (the
    driver lists none of the watched processes on a shared device), `no_permission`, `not_found` (the driver
    knows no such thing), `timeout` (no answer), `failed: ...`.
    """

    uuid: str
    at: float
    gpu_pct: float | None = None
    gpu_scope: Scope | None = None
    memory_pct: float | None = None
    used_mb: int | None = None
    total_mb: int | None = None
    own_mb: int | None = None
    energy_mj: int | None = None
    pcie_kb_s: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    throttle: tuple[str, ...] = ()
    ecc_uncorrectable: int | None = None
    recovery_action: int | None = None
    shared: bool = False
    unknown: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def nothing(cls, uuid: str, at: float, reason: str) -> DeviceReading:
        """Return a reading in which every value is unknown for the same reason."""
        return cls(uuid, at, unknown=dict.fromkeys(VALUES, reason))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceReading:
        """Return the reading that `as_json` gave."""
        return cls(**{**data, "throttle": tuple(data.get("throttle", ()))})

    def as_json(self) -> dict[str, Any]:
        """Return the reading as the plain object that a heartbeat takes."""
        return {**asdict(self), "throttle": list(self.throttle)}


_ALWAYS_THERE = ("uuid", "at", "gpu_scope", "shared", "unknown")
VALUES = tuple(field.name for field in fields(DeviceReading) if field.name not in _ALWAYS_THERE)
"""The names that `DeviceReading.unknown` may hold."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """Something that befell a device, or the whole driver (`uuid` None).

    `at` is when this process learned of it, in seconds of the boottime clock; no two events of one sampler have
    the same. `code` is, by `kind`, the Xid, the recovery action, the driver's return code or event type, or the
    number of devices, new errors or recent hangs. `fatal` means that work on the device cannot go on;
    `application` that the program is the likely cause and the hardware is not to be blamed for it. `bucket` is
    the class of remedy (see `gangq.gpu.faults.REMEDIES`), `advice` a sentence for the person who reads it.
    """

    uuid: str | None
    at: float
    kind: EventKind
    code: int | None
    fatal: bool
    application: bool
    bucket: str
    advice: str

    def as_json(self) -> dict[str, Any]:
        """Return the event as a plain object for evidence."""
        return asdict(self)

"""GPU devices: which there are, what they are called, and how a process is shown some of them."""

from gangq.gpu.declared import DeviceSpecError, declared_uuid, parse_declared
from gangq.gpu.detection import Detection, detect
from gangq.gpu.device import Device, Driver, DriverUnavailable, Source

__all__ = [
    "Detection",
    "Device",
    "DeviceSpecError",
    "Driver",
    "DriverUnavailable",
    "Source",
    "declared_uuid",
    "detect",
    "parse_declared",
]

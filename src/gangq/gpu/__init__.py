"""GPU devices: which there are, what they are called, how a process is shown some, and how they fare."""

from gangq.errors import DeviceSpecError, DriverUnavailable
from gangq.gpu.declared import declared_uuid, parse_declared
from gangq.gpu.detection import Detection, detect
from gangq.gpu.device import Device, Driver, Source
from gangq.gpu.faults import REMEDIES, Bucket, Fault
from gangq.gpu.memory import ContainerMemory, container_memory
from gangq.gpu.reading import DeviceEvent, DeviceReading
from gangq.gpu.sampler import DeviceSampler
from gangq.gpu.sampler_process import SamplerProcess
from gangq.gpu.xid import XIDS, xid

__all__ = [
    "REMEDIES",
    "XIDS",
    "Bucket",
    "ContainerMemory",
    "Detection",
    "Device",
    "DeviceEvent",
    "DeviceReading",
    "DeviceSampler",
    "DeviceSpecError",
    "Driver",
    "DriverUnavailable",
    "Fault",
    "SamplerProcess",
    "Source",
    "container_memory",
    "declared_uuid",
    "detect",
    "parse_declared",
    "xid",
]

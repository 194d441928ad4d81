"""GPU devices: which there are, what they are called, how a process is shown some, and how they fare.

A call into a wedged driver never returns. So a worker makes none: two processes that it can give up make them.

=====================  ===========================================================================================
process                its files
=====================  ===========================================================================================
the probe, at start    ``probe``; it lists devices by ``nvml`` or ``rocm``, with ``driver``
the sampling process   ``sampling``; it reads them by ``nvml_readings`` or ``rocm_readings``, with ``reader``
the worker             ``detection`` asks the probe. ``sampler_process`` owns the sampling process
                       (``sampling_child``); what it said is in ``sampler_state``, with ``findings``
both sides             ``current_call``, ``reading``, ``device``
a table                ``faults``
=====================  ===========================================================================================

Where something new goes:

===================  =============================================================================================
a value              a field of ``reading.DeviceReading``; both readers
a kind of event      ``reading.EventKind`` and its meaning in ``faults.FAULTS``; the reader that notices it, or
                     ``findings`` where readings tell it
an Xid               its bucket and its words in ``faults``; a notification of AMD: in ``rocm_readings.NOTICES`` too
a driver             a ``driver.Driver`` and a ``reader.Reader``, as in ``nvml`` and ``nvml_readings``;
                     ``device.Source``, ``detection``, and where ``probe``, ``sampling`` and ``sampler_process``
                     choose by name
===================  =============================================================================================
"""

from gangq.errors import DeviceSpecError, DriverUnavailable
from gangq.gpu.declared import declared_uuid, parse_declared
from gangq.gpu.detection import Detection, detect
from gangq.gpu.device import Device
from gangq.gpu.reading import DeviceEvent, DeviceReading
from gangq.gpu.sampler_process import SamplerProcess

__all__ = [
    "Detection",
    "Device",
    "DeviceEvent",
    "DeviceReading",
    "DeviceSpecError",
    "DriverUnavailable",
    "SamplerProcess",
    "declared_uuid",
    "detect",
    "parse_declared",
]

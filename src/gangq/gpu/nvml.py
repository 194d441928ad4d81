"""NVIDIA devices through NVML (the `pynvml` module of nvidia-ml-py, extra `gangq[nvidia]`)."""

from __future__ import annotations

import contextlib
import warnings as python_warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gangq.errors import DriverUnavailable
from gangq.gpu.device import Device, Source
from gangq.gpu.driver import Candidate, Driver, enforced_elsewhere, entries, linked

# nvmlInit's return codes that an operator can do something about.
_ADVICE = {
    4: "no permission: let this user read and write /dev/nvidia* (systemd: DeviceAllow=char-nvidia* rw)",
    9: "the kernel driver is not loaded: run modprobe nvidia (or ignore this if no card is fitted)",
    17: "the operating system refused it: look at dmesg for NVRM lines",
    18: "the driver was upgraded under a running system: reload the nvidia modules or reboot the host",
    999: "unknown driver error: look at dmesg for NVRM and Xid lines; reboot if nvidia-smi fails too",
}


def text(value: object) -> str:
    """Return a driver's string as str: older bindings hand out bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class NvmlDriver(Driver):
    """Cards and MIG instances as NVML lists them."""

    name: Source = "nvml"
    library = "libnvidia-ml.so.1"
    loaded = Path("/proc/driver/nvidia/version")
    """There while the kernel's driver is loaded."""

    def devices(self) -> list[Device]:
        """List the cards, or the MIG instances of those in MIG mode."""
        self.warnings = []
        nvml = self.attach()
        try:
            count = int(nvml.nvmlDeviceGetCount())
            if count == 0:
                raise DriverUnavailable("the NVIDIA driver lists no card", absent=True)
            candidates = self._restricted(self._candidates(nvml, count), count)
            return linked(candidates, lambda one, other: self._joined(nvml, one, other))
        finally:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()

    def visible_env(self, devices: Iterable[Device]) -> dict[str, str]:
        """Set CUDA_VISIBLE_DEVICES to UUIDs.

        Never to indexes: CUDA counts fastest card first and NVML by bus, and a lost card renumbers both, so
        an index may mean a card that belongs to another job.
        """
        return {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in devices)}

    def attach(self) -> Any:
        """Return the binding with NVML initialised; raises `DriverUnavailable`. Blocks as the driver likes."""
        try:
            # The retired `pynvml` distribution makes the import warn, which under -W error would look like a
            # missing binding.
            with python_warnings.catch_warnings():
                python_warnings.simplefilter("ignore")
                import pynvml
        except ImportError as error:
            if not self.loaded.exists():
                raise DriverUnavailable("no NVIDIA driver and no nvidia-ml-py", absent=True) from error
            raise DriverUnavailable(
                "an NVIDIA driver is loaded but its Python binding cannot be imported "
                f"({error}): pip install 'gangq[nvidia]', or declare the devices with --devices"
            ) from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            code = getattr(error, "value", None)
            if code == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                if not self.loaded.exists():
                    raise DriverUnavailable("no NVIDIA driver", absent=True) from error
                raise DriverUnavailable(
                    f"an NVIDIA driver is loaded but {self.library} is not found: in a container, set "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility; on a host, install the driver's libraries"
                ) from error
            advice = _ADVICE.get(code or 0, "see what nvidia-smi says")
            raise DriverUnavailable(f"{self.library} cannot start ({error}): {advice}") from error
        return pynvml

    def _candidates(self, nvml: Any, count: int) -> list[Candidate]:
        candidates: list[Candidate] = []
        index = 0
        for ordinal in range(count):
            try:
                found = self._card(nvml, ordinal, index)
            # Not only NVMLError: a binding newer than its driver raises exceptions of its own.
            except Exception as error:
                self.warnings.append(
                    f"NVIDIA GPU {ordinal} of {count} is left out, it does not answer ({error}). Look at "
                    "dmesg for its Xid; a lost GPU needs a reset (nvidia-smi -r) or a reboot of the host."
                )
                index += 1
                continue
            candidates.extend(found)
            index += len(found)
        return candidates

    def _card(self, nvml: Any, ordinal: int, index: int) -> list[Candidate]:
        """Return the card itself, or its MIG instances where it is in MIG mode; the first gets `index`."""
        handle = nvml.nvmlDeviceGetHandleByIndex(ordinal)
        uuid = text(nvml.nvmlDeviceGetUUID(handle))
        if not self._in_mig_mode(nvml, handle):
            return [Candidate(self._device(nvml, handle, index, uuid, mig=False), ordinal, (uuid,), handle)]
        found: list[Candidate] = []
        for slot in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
                mig_uuid = text(nvml.nvmlDeviceGetUUID(instance))
                device = self._device(nvml, instance, index + len(found), mig_uuid, mig=True)
            # Slots are sparse: a destroyed instance leaves a hole.
            except nvml.NVMLError_NotFound:
                continue
            except Exception as error:
                self.warnings.append(
                    f"MIG slot {slot} of NVIDIA GPU {ordinal} is left out, it does not answer ({error}). "
                    "Compare with nvidia-smi -L, and give this worker access to the instance."
                )
                continue
            found.append(Candidate(device, ordinal, (mig_uuid, uuid)))
        if not found:
            self.warnings.append(
                f"NVIDIA GPU {ordinal} is in MIG mode and shows no usable MIG instance, so nothing can run "
                "on it: create some (nvidia-smi mig -cgi ... -C) or turn MIG mode off (nvidia-smi -mig 0)."
            )
        return found

    def _device(self, nvml: Any, handle: Any, index: int, uuid: str, *, mig: bool) -> Device:
        model = text(nvml.nvmlDeviceGetName(handle))
        try:
            vram_mb = int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // 2**20
        except nvml.NVMLError_NotSupported:
            vram_mb = 0
        vram_mb = self._vram_mb(vram_mb, model, uuid)
        return Device(index, uuid, vram_mb, model, self.name, mig)

    def _joined(self, nvml: Any, one: Candidate, other: Candidate) -> bool:
        """Say whether NVLink joins two cards, by a bridge or through NVSwitch; False where it is not known.

        A MIG instance reaches nothing by NVLink.
        """
        if one.device.mig or other.device.mig:
            return False
        try:
            status = nvml.nvmlDeviceGetP2PStatus(one.handle, other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        # Not only NVMLError: see _candidates. The devices are of use without their links.
        except Exception:
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def _in_mig_mode(self, nvml: Any, handle: Any) -> bool:
        try:
            current, _pending = nvml.nvmlDeviceGetMigMode(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return False
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def _restricted(self, candidates: list[Candidate], count: int) -> list[Candidate]:
        container = self._environ.get("NVIDIA_VISIBLE_DEVICES")
        if container is not None and not enforced_elsewhere(container, count):
            candidates = self._restrict(candidates, "NVIDIA_VISIBLE_DEVICES")
        cuda = self._environ.get("CUDA_VISIBLE_DEVICES")
        if (
            cuda is not None
            and any(entry.isdecimal() for entry in entries(cuda))
            and self._environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
            and len({c.device.model for c in candidates if not c.device.mig}) > 1
        ):
            self.warnings.append(
                f"CUDA_VISIBLE_DEVICES={cuda!r} gives indexes on a host with different models, where CUDA "
                "counts the fastest card first; gangq reads them as nvidia-smi counts. List UUIDs, or set "
                "CUDA_DEVICE_ORDER=PCI_BUS_ID."
            )
        return self._restrict(candidates, "CUDA_VISIBLE_DEVICES")

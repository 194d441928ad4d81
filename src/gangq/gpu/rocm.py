"""AMD devices through the `amdsmi` binding (extra `gangq[rocm]`)."""

from __future__ import annotations

import contextlib
import re
import socket
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gangq.errors import DriverUnavailable
from gangq.gpu.device import Device, Source
from gangq.gpu.driver import Candidate, Driver, linked

# What the ROCm runtime calls a card: GPU- and 16 hex digits. amd-smi's own UUID is another number.
_RUNTIME_UUID = re.compile(r"GPU-[0-9a-f]{16}")
# AMDSMI_STATUS_NOT_SUPPORTED
_NOT_SUPPORTED = 2
_NOT_KNOWN = 2**64 - 1


class AmdsmiDriver(Driver):
    """Cards and compute partitions as libamd_smi lists them."""

    name: Source = "amdsmi"
    library = "libamd_smi.so"
    loaded = Path("/dev/kfd")
    """There while the kernel's driver is loaded."""

    def devices(self) -> list[Device]:
        """List the cards and compute partitions."""
        self.warnings = []
        smi = self.attach()
        try:
            candidates = self._restricted(self.candidates(smi))
            hives = {candidate.device.uuid: self._hive(smi, candidate) for candidate in candidates}
        finally:
            with contextlib.suppress(Exception):
                smi.amdsmi_shut_down()
        return linked(candidates, lambda one, other: hives[one.device.uuid] == hives[other.device.uuid] != 0)

    def visible_env(self, devices: Iterable[Device]) -> dict[str, str]:
        """Set ROCR_VISIBLE_DEVICES to runtime UUIDs (an index for a partition, which shares its card's UUID).

        HIP_VISIBLE_DEVICES counts within what ROCR_VISIBLE_DEVICES shows. It is set too, to all of that,
        because one inherited from the worker's own environment would hide the job's devices again.
        """
        chosen = list(devices)
        return {
            "ROCR_VISIBLE_DEVICES": ",".join(
                device.uuid if _RUNTIME_UUID.fullmatch(device.uuid) else str(device.index)
                for device in chosen
            ),
            "HIP_VISIBLE_DEVICES": ",".join(str(position) for position in range(len(chosen))),
        }

    def attach(self) -> Any:
        """Return the binding, initialised; raises `DriverUnavailable`. Blocks for as long as the driver likes."""
        try:
            import amdsmi
        # Without libamd_smi.so the import raises KeyError, with another release's AttributeError.
        except Exception as error:
            if not self.loaded.exists():
                raise DriverUnavailable("no AMD driver", absent=True) from error
            raise DriverUnavailable(
                f"an AMD GPU driver is loaded but amdsmi cannot be imported ({type(error).__name__}: "
                f"{error}): pip install 'gangq[rocm]' in the installed ROCm's version, and amd-smi-lib"
            ) from error
        try:
            amdsmi.amdsmi_init()
        except Exception as error:
            raise DriverUnavailable(
                f"{self.library} cannot start ({_one_line(error)}): see what amd-smi list says; the user of "
                "this worker must be in the groups render and video",
                absent=not self.loaded.exists(),
            ) from error
        return amdsmi

    def candidates(self, smi: Any) -> list[Candidate]:
        """List every card and partition with its handle, before the operator's restriction."""
        handles = list(smi.amdsmi_get_processor_handles())
        if not handles:
            raise DriverUnavailable("the AMD driver lists no card", absent=True)
        found: list[tuple[int, Device, Any]] = []
        for position, handle in enumerate(handles):
            try:
                found.append((*self._device(smi, handle, position), handle))
            except Exception as error:
                self.warnings.append(
                    f"AMD GPU {position} of {len(handles)} is left out, it does not answer "
                    f"({_one_line(error)}). Look at dmesg for amdgpu lines; it may need amd-smi reset "
                    "--gpureset or a reboot of the host."
                )
        # Partitions of one card carry the card's UUID, and the runtime then takes the first of them for it.
        shared = {uuid for uuid, count in Counter(device.uuid for _, device, _ in found).items() if count > 1}
        candidates = []
        for ordinal, device, handle in sorted(found, key=lambda row: row[0]):
            unique = replace(device, uuid=f"{device.uuid}/{ordinal}") if device.uuid in shared else device
            candidates.append(Candidate(unique, ordinal, (unique.uuid,), handle))
        return candidates

    def _device(self, smi: Any, handle: Any, position: int) -> tuple[int, Device]:
        asic = smi.amdsmi_get_gpu_asic_info(handle)
        serial = str(asic.get("asic_serial", "N/A"))
        listed: dict[str, Any] = {}
        # Not in every release; the serial number is the same 16 digits.
        with contextlib.suppress(AttributeError, smi.AmdSmiException):
            listed = smi.amdsmi_get_gpu_enumeration_info(handle)
        hip_id = listed.get("hip_id")
        ordinal = hip_id if isinstance(hip_id, int) else position
        uuid = str(listed.get("hip_uuid") or "").lower().replace("gpu-", "GPU-", 1)
        if not _RUNTIME_UUID.fullmatch(uuid):
            uuid = f"GPU-{serial.lower().removeprefix('0x').zfill(16)}"
        if not _RUNTIME_UUID.fullmatch(uuid) or int(uuid.removeprefix("GPU-"), 16) == 0:
            # Consumer cards may have no serial number; host and bus address at least stay put.
            uuid = f"PCI-{socket.gethostname()}-{smi.amdsmi_get_gpu_device_bdf(handle)}"
        model = str(asic.get("market_name", "N/A"))
        try:
            vram_mb = int(smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM)) // 2**20
        except smi.AmdSmiLibraryException as error:
            if error.get_error_code() != _NOT_SUPPORTED:
                raise
            vram_mb = 0
        vram_mb = self._vram_mb(vram_mb, model, uuid)
        return ordinal, Device(ordinal, uuid, vram_mb, model, self.name)

    def _hive(self, smi: Any, candidate: Candidate) -> int:
        """Return the number of the cards that XGMI joins with this one; 0 where there are none, or it is not known.

        Partitions have none: those of one card are not joined by XGMI, and amdsmi tells them the card's.
        """
        if "/" in candidate.device.uuid:
            return 0
        try:
            hive = smi.amdsmi_get_xgmi_info(candidate.handle)["xgmi_hive_id"]
        # The devices are of use without their links.
        except Exception:
            return 0
        # Other releases say "N/A", and this is what the library writes for it.
        return hive if isinstance(hive, int) and hive != _NOT_KNOWN else 0

    def _restricted(self, candidates: list[Candidate]) -> list[Candidate]:
        candidates = self._restrict(candidates, "ROCR_VISIBLE_DEVICES")
        if "ROCR_VISIBLE_DEVICES" in self._environ:
            # HIP counts again from 0 within what the runtime shows it.
            candidates = [replace(c, ordinal=position) for position, c in enumerate(candidates)]
        # HIP reads CUDA_VISIBLE_DEVICES only where its own variable is not set.
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in self._environ else "CUDA_VISIBLE_DEVICES"
        return self._restrict(candidates, hip)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

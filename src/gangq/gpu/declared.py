"""Devices that the operator declares where no driver answers: `--devices 2x24GiB`."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Iterable, Mapping

from gangq.errors import DeviceSpecError
from gangq.gpu.device import Device, Source
from gangq.gpu.driver import Driver, entries

_NAMESPACE = uuid.UUID("5d0f3c1e-5f0c-5e57-9a3b-6761676e6771")
_ITEM = re.compile(
    r"(?P<count>\d{1,4})x(?P<size>\d{1,9}(?:\.\d{1,3})?)(?P<unit>[kmgt]i?b)", re.IGNORECASE | re.ASCII
)
_UNIT_BYTES = {
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MAX_DEVICES = 1024
_MAX_VRAM_MB = 2**31 - 1


def declared_uuid(host: str, worker: str, index: int) -> str:
    """Return the stable identity of a declared device: the same host, worker and index give the same one."""
    return f"DECLARED-{uuid.uuid5(_NAMESPACE, json.dumps([host, worker, index]))}"


def parse_declared(spec: str, *, host: str | None = None, worker: str = "") -> tuple[Device, ...]:
    """Read a declaration such as "2x24GiB" or "2x24GiB,1x80GB"; "none" declares a worker without devices.

    `host` (default: this machine's name) and `worker` go into each device's `declared_uuid`. Sizes end up in
    MiB, rounded down; GB counts in powers of ten and GiB in powers of two. Raises `DeviceSpecError`.
    """
    host = socket.gethostname() if host is None else host
    if spec.strip().lower() == "none":
        return ()
    sizes: list[int] = []
    for item in (part.strip() for part in spec.split(",")):
        match = _ITEM.fullmatch(item)
        if match is None or match["unit"].lower() not in _UNIT_BYTES:
            raise DeviceSpecError(spec, f"{item!r} is not COUNTxSIZE" if item else "an item is empty")
        count = int(match["count"])
        whole, _, fraction = match["size"].partition(".")
        thousandths = int(whole) * 1000 + int(fraction.ljust(3, "0"))
        vram_mb = thousandths * _UNIT_BYTES[match["unit"].lower()] // (1000 * 2**20)
        if not 1 <= vram_mb <= _MAX_VRAM_MB:
            raise DeviceSpecError(spec, f"{item!r} gives {vram_mb} MiB a device, outside 1..{_MAX_VRAM_MB}")
        if count < 1 or len(sizes) + count > _MAX_DEVICES:
            raise DeviceSpecError(spec, f"{item!r} leads outside 1..{_MAX_DEVICES} devices a worker")
        sizes.extend([vram_mb] * count)
    return tuple(
        Device(index, declared_uuid(host, worker, index), vram_mb, "declared", "declared")
        for index, vram_mb in enumerate(sizes)
    )


class DeclaredDriver(Driver):
    """The operator's word instead of a driver."""

    name: Source = "declared"
    library = "--devices"

    def __init__(
        self, spec: str = "none", *, environ: Mapping[str, str] | None = None, worker: str = ""
    ) -> None:
        super().__init__(environ)
        self._spec = spec
        self._worker = worker

    def _listed(self) -> list[str] | None:
        value = self._environ.get("CUDA_VISIBLE_DEVICES")
        return None if value is None else entries(value)

    def devices(self) -> list[Device]:
        """Return the declared devices; warns where CUDA_VISIBLE_DEVICES lists fewer of them."""
        devices = list(parse_declared(self._spec, worker=self._worker))
        listed = self._listed()
        self.warnings = []
        if listed is not None and len(listed) < len(devices):
            self.warnings.append(
                f"{len(devices)} devices are declared with --devices {self._spec}, but CUDA_VISIBLE_DEVICES="
                f"{self._environ['CUDA_VISIBLE_DEVICES']!r} shows this worker {len(listed)}: jobs on the "
                "others will see none. Make the two agree, or unset CUDA_VISIBLE_DEVICES."
            )
        return devices

    def visible_env(self, devices: Iterable[Device]) -> dict[str, str]:
        """Set CUDA_VISIBLE_DEVICES to the devices' indexes.

        Where the worker itself runs under a CUDA_VISIBLE_DEVICES of, say, "2,3", declared device 0 is the
        card called 2: the child must not get a card that its worker was not given.
        """
        listed = self._listed()
        wanted = [device.index for device in devices]
        if listed is None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, wanted))}
        return {"CUDA_VISIBLE_DEVICES": ",".join(listed[i] for i in wanted if i < len(listed))}

"""Readings and events of NVIDIA devices, through the true binding. Runs in the sampler's process only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gangq.gpu.current_call import Noted
from gangq.gpu.nvml import NvmlDriver, text
from gangq.gpu.reader import DeviceGone, Notice, Reader, Use, Values, address, scoped, use
from gangq.gpu.reading import DeviceReading, EventKind
from gangq.proc.clock import boottime

_REASONS = {3: "not_supported", 4: "no_permission", 6: "not_found", 10: "timeout", 13: "function_not_found"}
_GONE: dict[int, EventKind] = {15: "lost", 16: "reset_required", 28: "lost"}
_NOT_SUPPORTED, _NOT_FOUND, _TIMEOUT = 3, 6, 10
# No process worked: as an error of its own, or as a success without entries, which the binding raises too.
_NO_SAMPLE = (_NOT_FOUND, 0)
_RECOVERY_FIELD = 230

# Clocks held down for these reasons cost the job speed; idleness, a power cap and settings do not count.
_THROTTLE = {0x8: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}

_DOUBLE_BIT, _XID, _RETIREMENT_FAILURE = 0x2, 0x8, 0x800
_POISON, _FATAL_POISON, _UNAVAILABLE, _RECOVERY = 0x1000, 0x2000, 0x4000, 0x8000
_EVENTS = _DOUBLE_BIT | _XID | _RETIREMENT_FAILURE | _POISON | _FATAL_POISON | _UNAVAILABLE | _RECOVERY

# What an event says of an error in memory that containment may have kept inside one MIG instance.
_DOUBLE_BIT_XID = 48
_NO_INSTANCE = 0xFFFFFFFF
_UNCORRECTED, _VOLATILE, _SRAM = 1, 0, 7

_UTILISATION, _MEMORY_UTILISATION = 1, 2
_SAMPLE_S = 1.0


@dataclass
class _Handle:
    """A device, the card it is on, and where its sample buffers were last read to (driver's microseconds)."""

    device: Any
    card: Any
    mig: bool
    gpu_instance: int | None = None
    seen: dict[int, int] = field(default_factory=dict)
    processes_seen: int = 0
    # Own processes of now that the driver has once seen at work: how busy (percent), and when that was read
    # (boottime). Only for them is silence a zero.
    visible: dict[int, tuple[float, float]] = field(default_factory=dict)


def _passed(stamp: int) -> int:
    """A sample's time; 0, as before the first look, where the host's clock, by which the driver stamps samples, was
    set back behind it: until it gets there the driver would have no newer sample, and a busy process seem idle.
    """
    return stamp if stamp <= time.time() * 1e6 else 0


class NvmlReader(Reader):
    """Reads devices by UUID, whatever CUDA_VISIBLE_DEVICES and lost cards do to their numbers."""

    _code = "value"
    _reasons = _REASONS
    _no_event = frozenset({_TIMEOUT})

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        poll_s: float = 1.0,
        begin: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``begin`` is told the name of every driver call before it is made."""
        super().__init__()
        self._begin = begin
        self._driver = NvmlDriver(environ)
        self._poll_us = int(poll_s * 1e6)
        self._nvml: Any = None
        self._handles: dict[str, _Handle] = {}
        self._card_of: dict[str, int] = {}
        self._events: Any = None

    def open(self) -> None:
        """Initialise NVML."""
        self._nvml = Noted(self._driver.attach(), self._begin)

    def _event_handle(self, uuid: str) -> Any:
        return self._handle(uuid).card

    def _subscribe(self, handle: Any) -> None:
        wanted = self._nvml.nvmlDeviceGetSupportedEventTypes(handle) & _EVENTS
        self._events = self._events or self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(handle, wanted, self._events)

    def _count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def _forget(self, uuid: str) -> None:
        # A device that comes back has another handle, of which no events are delivered. Those of the former one are
        # its own until then: the Xid often comes just after the reading that failed.
        self._handles.pop(uuid, None)
        self._subscribed.discard(self._card_of.get(uuid, 0))

    def _wait(self, timeout_ms: int) -> Any:
        return self._nvml.nvmlEventSetWait(self._events, timeout_ms)

    def _notices(self, data: Any) -> list[Notice]:
        notice = self._event(int(data.eventType), int(data.eventData))
        return [Notice(uuid, *notice) for uuid in self._befallen(data)] if notice else []

    def _befallen(self, data: Any) -> list[str]:
        """Return the devices that an event of a card is about: a MIG instance's is none of its neighbours'.

        A card that is not watched and does not say its name is none: an event without a device is the whole
        driver's, and would end every job of the worker.
        """
        card = address(data.device)
        watched = [uuid for uuid, its_card in self._card_of.items() if its_card == card]
        if not watched:
            name = self._uuid(data.device)
            return [] if name is None else [name]
        # A binding from before MIG does not know the field.
        instance, kind = int(getattr(data, "gpuInstanceId", _NO_INSTANCE)), int(data.eventType)
        memory = kind == _DOUBLE_BIT or (kind == _XID and int(data.eventData) == _DOUBLE_BIT_XID)
        befallen = []
        for uuid in watched:
            handle = self._handles.get(uuid)
            its_own = handle.gpu_instance if handle is not None else None
            if not uuid.startswith("MIG-"):
                befallen.append(uuid)
            elif instance != _NO_INSTANCE:
                if its_own in (None, instance):
                    befallen.append(uuid)
            # Where an error was not contained, Xid 95 and the recovery action say so of every instance.
            elif not memory:
                befallen.append(uuid)
        return befallen

    def _event(self, kind: int, data: int) -> tuple[EventKind, int | None] | None:
        if kind == _XID:
            return "xid", data
        if kind in (_DOUBLE_BIT, _RETIREMENT_FAILURE):
            return "ecc", kind
        if kind in (_POISON, _FATAL_POISON):
            return "poison", kind
        if kind == _UNAVAILABLE:
            return "unavailable", None
        # A changed recovery action is read by the next round.
        return None

    def _uuid(self, handle: Any) -> str | None:
        try:
            return text(self._nvml.nvmlDeviceGetUUID(handle))
        except Exception:
            return None

    def _call(self, uuid: str, name: str, *args: Any) -> Any:
        """Call a function of the binding; raises `DeviceGone` where it says that the device is."""
        try:
            return getattr(self._nvml, name)(*args)
        except self._nvml.NVMLError as error:
            kind = _GONE.get(getattr(error, "value", 0))
            if kind is not None:
                raise DeviceGone(Notice(uuid, kind, error.value)) from error
            raise

    def _handle(self, uuid: str) -> _Handle:
        found = self._handles.get(uuid)
        if found is not None:
            return found
        mig = uuid.startswith("MIG-")
        try:
            device = self._nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        except self._nvml.NVMLError as error:
            if error.value != _NOT_FOUND and error.value not in _GONE:
                raise
            device = self._search(uuid, error, mig=mig)
        card = self._call(uuid, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device) if mig else device
        found = self._handles[uuid] = _Handle(device, card, mig, self._gpu_instance(device) if mig else None)
        self._card_of[uuid] = address(card)
        return found

    def _search(self, uuid: str, refused: Exception, *, mig: bool) -> Any:
        """Look through every card for a device that the driver did not find by its name.

        That lookup goes through the other cards on its way, and what it answers may be about one of them. So the
        device is gone (`DeviceGone`) only where no card that answers has it, and every other one says itself
        that it is gone; where one does not answer for another reason, `refused` is raised.
        """
        nvml = self._nvml
        gone, doubt = _NOT_FOUND, False
        for ordinal in range(int(nvml.nvmlDeviceGetCount())):
            try:
                card = nvml.nvmlDeviceGetHandleByIndex(ordinal)
                for device in self._instances(card) if mig else [card]:
                    if text(nvml.nvmlDeviceGetUUID(device)) == uuid:
                        return device
            except nvml.NVMLError as error:
                if error.value in _GONE:
                    gone = error.value
                else:
                    doubt = True
        if doubt:
            raise refused
        raise DeviceGone(Notice(uuid, _GONE.get(gone, "lost"), gone)) from refused

    def _instances(self, card: Any) -> list[Any]:
        nvml = self._nvml
        found = []
        try:
            slots = int(nvml.nvmlDeviceGetMaxMigDeviceCount(card))
        except nvml.NVMLError as error:
            if error.value != _NOT_SUPPORTED:
                raise
            return []
        for slot in range(slots):
            try:
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot))
            except nvml.NVMLError as error:
                # A slot without an instance, and a card that is not in MIG mode.
                if error.value not in (_NOT_FOUND, _NOT_SUPPORTED):
                    raise
        return found

    def _gpu_instance(self, device: Any) -> int | None:
        try:
            return int(self._nvml.nvmlDeviceGetGpuInstanceId(device))
        except Exception:
            return None

    def _read(self, uuid: str, at: float, pids: Collection[int]) -> DeviceReading:
        handle = self._handle(uuid)
        values = Values(self._reason)
        memory = values.get("used_mb", lambda: self._memory(uuid, handle.device))
        if memory is None:
            values.unknown["total_mb"] = values.unknown["used_mb"]
        processes = values.get("own_mb", lambda: self._use(uuid, handle, pids))
        own_mb = processes.own_mb if processes else None
        if processes is not None and own_mb is None:
            values.unknown["own_mb"] = "not_available" if processes.listed else "no_own_process"
        gpu_pct, scope, memory_pct = self._utilisation(uuid, handle, values, processes, pids)
        counters = self._instance_counters if handle.mig else self._card_counters
        return DeviceReading(
            uuid,
            at,
            gpu_pct=gpu_pct,
            gpu_scope="mig" if handle.mig else scope,
            memory_pct=memory_pct,
            used_mb=memory[0] if memory else None,
            total_mb=memory[1] if memory else None,
            own_mb=own_mb,
            shared=processes.shared if processes else False,
            **counters(uuid, handle, values),
            **self._condition(uuid, handle, values),
            unknown=values.unknown,
        )

    def _instance_counters(self, uuid: str, handle: _Handle, values: Values) -> dict[str, Any]:
        # The card's meters run for all of its instances, and its errors may be a neighbour's. Of an instance itself
        # the driver counts those of SRAM; those of DRAM come as an Xid.
        values.unknown.update(energy_mj="not_supported", pcie_kb_s="not_supported")
        where = (handle.device, _UNCORRECTED, _VOLATILE, _SRAM)
        errors = self._value(uuid, values, "ecc_uncorrectable", "nvmlDeviceGetMemoryErrorCounter", *where)
        return {"ecc_uncorrectable": errors}

    def _card_counters(self, uuid: str, handle: _Handle, values: Values) -> dict[str, Any]:
        card = handle.card

        def both_directions() -> int:
            return sum(int(self._call(uuid, "nvmlDeviceGetPcieThroughput", card, way)) for way in (0, 1))

        errors = ("nvmlDeviceGetTotalEccErrors", card, _UNCORRECTED, _VOLATILE)
        return {
            "ecc_uncorrectable": self._value(uuid, values, "ecc_uncorrectable", *errors),
            "energy_mj": self._value(uuid, values, "energy_mj", "nvmlDeviceGetTotalEnergyConsumption", card),
            "pcie_kb_s": values.get("pcie_kb_s", both_directions),
        }

    def _condition(self, uuid: str, handle: _Handle, values: Values) -> dict[str, Any]:
        """Power, heat, what holds the clocks down, and what the driver wants done; all of them the card's."""
        power_mw = self._value(uuid, values, "power_w", "nvmlDeviceGetPowerUsage", handle.card)
        return {
            "power_w": None if power_mw is None else power_mw / 1000,
            "temperature_c": self._value(
                uuid, values, "temperature_c", "nvmlDeviceGetTemperature", handle.card, 0
            ),
            "throttle": values.get("throttle", lambda: self._throttle(uuid, handle)) or (),
            "recovery_action": values.get("recovery_action", lambda: self._recovery(uuid, handle)),
        }

    def _value(self, uuid: str, values: Values, name: str, function: str, *args: Any) -> Any:
        """What a function of the binding returns; None, with the reason kept under `name`, where it fails."""
        return values.get(name, lambda: self._call(uuid, function, *args))

    def _memory(self, uuid: str, device: Any) -> tuple[int, int]:
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        try:
            # Only the second version leaves out what the driver keeps for itself, half a GiB and more.
            info = self._call(uuid, "nvmlDeviceGetMemoryInfo", device, version)
        except self._nvml.NVMLError:
            info = self._call(uuid, "nvmlDeviceGetMemoryInfo", device)
        return int(info.used) // 2**20, int(info.total) // 2**20

    def _use(self, uuid: str, handle: _Handle, pids: Collection[int]) -> Use:
        try:
            listed = self._call(uuid, "nvmlDeviceGetComputeRunningProcesses_v3", handle.device)
        except (self._nvml.NVMLError_FunctionNotFound, AttributeError):
            listed = self._call(uuid, "nvmlDeviceGetComputeRunningProcesses_v2", handle.device)
        sizes = {int(p.pid): None if p.usedGpuMemory is None else p.usedGpuMemory // 2**20 for p in listed}
        return use(sizes, pids)

    def _utilisation(
        self, uuid: str, handle: _Handle, values: Values, processes: Use | None, pids: Collection[int]
    ) -> tuple[float | None, Any, float | None]:
        if handle.mig:
            # Some drivers refuse, some answer for the whole card: neither is the instance's.
            values.unknown.update(gpu_pct="not_supported", memory_pct="not_supported")
            return None, None, None
        rates: dict[str, Any] = {}

        def rate(name: str) -> float:
            if not rates:
                rates["now"] = self._call(uuid, "nvmlDeviceGetUtilizationRates", handle.device)
            return float(getattr(rates["now"], name))

        def busiest(kind: int, name: str) -> float:
            sampled = self._busiest(uuid, handle, kind)
            return rate(name) if sampled is None else sampled

        # A number that is given to another process must be seen at work again.
        handle.visible = {pid: seen for pid, seen in handle.visible.items() if pid in pids}
        own_pct = self._own_utilisation(uuid, handle, pids) if pids else None
        gpu_pct, scope = scoped(values, processes, own_pct, lambda: busiest(_UTILISATION, "gpu"))
        return gpu_pct, scope, values.get("memory_pct", lambda: busiest(_MEMORY_UTILISATION, "memory"))

    def _busiest(self, uuid: str, handle: _Handle, kind: int) -> float | None:
        """Return the largest sample taken since the last look; None where the driver has no new one."""
        last = _passed(handle.seen.get(kind, 0))
        try:
            _, samples = self._call(uuid, "nvmlDeviceGetSamples", handle.device, kind, last)
        except (self._nvml.NVMLError, AttributeError):
            return None
        # Some drivers hand out the whole buffer whatever they are asked for.
        newest = max((int(s.timeStamp) for s in samples), default=0)
        since = last or newest - self._poll_us
        handle.seen[kind] = max(newest, last)
        return max((float(s.sampleValue.uiVal) for s in samples if int(s.timeStamp) > since), default=None)

    def _own_utilisation(self, uuid: str, handle: _Handle, pids: Collection[int]) -> float | None:
        """Return the own processes' busiest moment of late; None where the driver has seen none of them at work.

        The driver lists only those who worked since it was last asked, and inside a container often under the
        host's numbers: silence about a process that it never listed says nothing at all, and neither does a zero
        for one that was never above it. That it saw an earlier job's processes proves nothing for these. It adds a
        sample every sixth of a second to every second, so what it said holds until the next is due.
        """
        last = _passed(handle.processes_seen)
        try:
            samples = self._call(uuid, "nvmlDeviceGetProcessUtilization", handle.device, last)
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) not in _NO_SAMPLE:
                return None
            samples = []
        except AttributeError:
            return None
        newest = max((int(sample.timeStamp) for sample in samples), default=0)
        since = last or newest - self._poll_us
        handle.processes_seen = max(newest, last)
        now = boottime()
        busiest: dict[int, float] = {}
        for sample in samples:
            if sample.timeStamp > since and sample.pid in pids and sample.smUtil > 0:
                busiest[sample.pid] = max(busiest.get(sample.pid, 0.0), float(sample.smUtil))
        handle.visible.update({int(pid): (percent, now) for pid, percent in busiest.items()})
        if not handle.visible:
            return None
        return min(sum(percent for percent, at in handle.visible.values() if now - at <= _SAMPLE_S), 100.0)

    def _throttle(self, uuid: str, handle: _Handle) -> tuple[str, ...]:
        try:
            reasons = self._call(uuid, "nvmlDeviceGetCurrentClocksEventReasons", handle.card)
        except (self._nvml.NVMLError_FunctionNotFound, AttributeError):
            reasons = self._call(uuid, "nvmlDeviceGetCurrentClocksThrottleReasons", handle.card)
        return tuple(name for bit, name in _THROTTLE.items() if reasons & bit)

    def _recovery(self, uuid: str, handle: _Handle) -> int:
        (value,) = self._call(uuid, "nvmlDeviceGetFieldValues", handle.card, [_RECOVERY_FIELD])
        # The call succeeds for a field that the device does not have; only the field's own code says so.
        if value.nvmlReturn != 0:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return int(value.value.uiVal)

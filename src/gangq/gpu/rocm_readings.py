"""Readings and events of AMD devices, through the true binding. Runs in the sampler's process only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from gangq.errors import DriverUnavailable
from gangq.gpu.current_call import Noted
from gangq.gpu.reader import DeviceGone, NotAvailable, Notice, Reader, Values, address, scoped, use, whole
from gangq.gpu.reading import DeviceReading, EventKind
from gangq.gpu.rocm import AmdsmiDriver
from gangq.proc.clock import boottime

_REASONS = {
    2: "not_supported",
    3: "not_supported",
    5: "function_not_found",
    8: "timeout",
    10: "no_permission",
}
# What a card that has left the bus answers; one call that says so proves nothing, all of them do.
_LOST = frozenset({6, 31})
_TIMEOUT = 8
_NO_DATA = 40

NOTICES: dict[str, tuple[EventKind, int]] = {
    "VMFAULT": ("page_fault", 1),
    "GPU_PRE_RESET": ("reset", 3),
    "GPU_POST_RESET": ("reset", 4),
}
"""The notifications that are asked for: the kind of event, and its number in amdsmi."""

# Flags of amdsmi's violation status; its power limit (ppt) is how these cards run, not a fault.
_THROTTLE = {
    "active_prochot_thrm": "hw_thermal",
    "active_socket_thrm": "socket_thermal",
    "active_vr_thrm": "regulator_thermal",
    "active_hbm_thrm": "memory_thermal",
}
_THROTTLE_EVERY = 10
"""Rounds between looks at the violation status, which takes the library 100 ms a card."""


@dataclass
class _Card:
    """One card or partition, its throttle flags, and each own process's engine time when last read."""

    handle: Any
    rounds: int = 0
    throttle: tuple[str, ...] = ()
    throttle_unknown: str | None = None
    engine_ns: dict[int, int] = field(default_factory=dict)
    engine_at: float = 0.0
    # Engine time stays 0 on bare metal: a counter that stands still counts only if it has moved before, and
    # a number that is given to another process must move again.
    moved: set[int] = field(default_factory=set)


class AmdsmiReader(Reader):
    """Reads cards and partitions by the UUID that detection gave them."""

    _code = "err_code"
    _reasons = _REASONS
    _no_event = frozenset({_NO_DATA, _TIMEOUT})

    def __init__(
        self, environ: Mapping[str, str], *, begin: Callable[[str], object] = lambda _: None
    ) -> None:
        """``begin`` is told the name of every driver call before it is made."""
        super().__init__()
        self._begin = begin
        self._driver = AmdsmiDriver(environ)
        self._smi: Any = None
        self._cards: dict[str, _Card] = {}
        self._listeners: list[Any] = []

    def open(self) -> None:
        """Initialise the library and find the cards."""
        self._smi = Noted(self._driver.attach(), self._begin)
        self._enumerate()

    def _event_handle(self, uuid: str) -> Any:
        return self._card(uuid).handle

    def _subscribe(self, handle: Any) -> None:
        wanted = [self._smi.AmdSmiEvtNotificationType[name] for name in NOTICES]
        # The subscription lasts as long as this object.
        self._listeners.append(self._smi.AmdSmiEventReader(handle, wanted))

    def _count(self) -> int:
        return len(self._smi.amdsmi_get_processor_handles())

    def _read(self, uuid: str, at: float, pids: Collection[int]) -> DeviceReading:
        reading, lost = self._look(uuid, at, self._card(uuid), pids)
        if lost is not None:
            raise DeviceGone(Notice(uuid, "lost", lost))
        return reading

    def _card(self, uuid: str) -> _Card:
        """Return a card by its UUID, after another look at what the driver lists where it is not known.

        A single call that fails gives a card no name, or another one. So it is gone (`DeviceGone`) only where no
        listed card can be it: each of the others has a name of its own or says itself that it is lost.
        """
        found = self._cards.get(uuid)
        if found is not None:
            return found
        code = None
        try:
            handles = self._enumerate()
        except DriverUnavailable as error:
            # The driver was opened with cards, and now it lists none.
            raise DeviceGone(Notice(uuid, "lost", code)) from error
        if uuid in self._cards:
            return self._cards[uuid]
        names = {address(card.handle): name for name, card in self._cards.items()}
        for handle in handles:
            name = names.get(address(handle))
            if name is None:
                code = self._look(uuid, boottime(), _Card(handle), ())[1]
            if (name is None and code is None) or (name is not None and _may_be(name, uuid)):
                raise RuntimeError("a card that the driver lists does not say whether it is this one")
        raise DeviceGone(Notice(uuid, "lost", code))

    def _enumerate(self) -> list[Any]:
        """Take in the cards that say who they are, and return the handles of all."""
        self._driver.warnings.clear()
        for candidate in self._driver.candidates(self._smi):
            self._cards.setdefault(candidate.device.uuid, _Card(candidate.handle))
        return list(self._smi.amdsmi_get_processor_handles())

    def _look(
        self, uuid: str, at: float, card: _Card, pids: Collection[int]
    ) -> tuple[DeviceReading, int | None]:
        """Read a card; the second value is the code with which all of it says that it is lost, None otherwise."""
        codes: set[int | None] = set()

        def reason(error: Exception) -> str:
            codes.add(getattr(error, "err_code", None))
            return self._reason(error)

        reading = self._read_card(uuid, at, card, Values(reason), pids)
        answered = any(
            value is not None for value in (reading.memory_pct, reading.used_mb, reading.temperature_c)
        )
        lost = sorted(code for code in codes if code in _LOST)
        return reading, lost[0] if lost and not answered else None

    def _wait(self, timeout_ms: int) -> Any:
        # One wait serves every subscribed card, whichever listener is asked.
        return self._listeners[0].read(timeout_ms)

    def _notices(self, data: Any) -> list[Notice]:
        uuids = {address(card.handle): uuid for uuid, card in self._cards.items()}
        return [
            Notice(uuids.get(address(entry["processor_handle"])), *NOTICES[entry["event"]])
            for entry in data
            if entry["event"] in NOTICES
        ]

    def _read_card(
        self, uuid: str, at: float, card: _Card, values: Values, pids: Collection[int]
    ) -> DeviceReading:
        smi, handle = self._smi, card.handle
        activity = values.get("memory_pct", lambda: smi.amdsmi_get_gpu_activity(handle))
        memory = self._memory(handle, values)
        listed = values.get("own_mb", lambda: smi.amdsmi_get_gpu_process_list(handle))
        processes = own_pct = None
        if listed is not None:
            processes = use({int(row["pid"]): _mib(row["mem"]) for row in listed}, pids)
            own_pct = values.get("gpu_pct", lambda: self._own_utilisation(card, listed, pids, at))
            if processes.own_mb is None:
                values.unknown["own_mb"] = "not_available" if processes.listed else "no_own_process"

        def device_pct() -> float:
            # Where the answer failed the same question again, for the reason to be kept under this name as well.
            known = smi.amdsmi_get_gpu_activity(handle) if activity is None else activity
            return float(whole(known["gfx_activity"]))

        gpu_pct, scope = scoped(values, processes, own_pct, device_pct)
        memory_pct = None
        if activity is not None:
            memory_pct = values.get("memory_pct", lambda: float(whole(activity["umc_activity"])))
        return DeviceReading(
            uuid,
            at,
            gpu_pct=gpu_pct,
            gpu_scope=scope,
            memory_pct=memory_pct,
            own_mb=processes.own_mb if processes else None,
            shared=processes.shared if processes else False,
            **memory,
            **self._condition(card, values),
            unknown=values.unknown,
        )

    def _memory(self, handle: Any, values: Values) -> dict[str, Any]:
        vram = values.get("used_mb", lambda: self._smi.amdsmi_get_gpu_vram_usage(handle))
        if vram is None:
            values.unknown["total_mb"] = values.unknown["used_mb"]
            return {}
        return {
            "used_mb": values.get("used_mb", lambda: whole(vram["vram_used"])),
            "total_mb": values.get("total_mb", lambda: whole(vram["vram_total"])),
        }

    def _condition(self, card: _Card, values: Values) -> dict[str, Any]:
        """Power, heat, errors and what else a card counts of itself."""
        smi, handle = self._smi, card.handle
        values.unknown["recovery_action"] = "not_supported"
        return {
            "power_w": values.get("power_w", lambda: _power(smi.amdsmi_get_power_info(handle))),
            "energy_mj": values.get("energy_mj", lambda: _energy(smi.amdsmi_get_energy_count(handle))),
            "pcie_kb_s": values.get("pcie_kb_s", lambda: _pcie(smi.amdsmi_get_pcie_info(handle))),
            "temperature_c": values.get("temperature_c", lambda: self._temperature(handle)),
            "throttle": self._throttle(card, values),
            "ecc_uncorrectable": values.get(
                "ecc_uncorrectable",
                lambda: whole(smi.amdsmi_get_gpu_total_ecc_count(handle)["uncorrectable_count"]),
            ),
        }

    def _own_utilisation(
        self, card: _Card, listed: list[Any], pids: Collection[int], at: float
    ) -> float | None:
        """Return the own processes' share of the time since the last look; None where it cannot be told."""
        card.moved.intersection_update(pids)
        now = {int(row["pid"]): whole(row["engine_usage"]["gfx"]) for row in listed if row["pid"] in pids}
        grown = {pid: max(ns - card.engine_ns[pid], 0) for pid, ns in now.items() if pid in card.engine_ns}
        elapsed_ns = (at - card.engine_at) * 1e9
        card.engine_ns, card.engine_at = now, at
        card.moved |= {pid for pid, ns in grown.items() if ns}
        if not card.moved.intersection(grown) or elapsed_ns <= 0:
            return None
        return min(100.0 * sum(grown.values()) / elapsed_ns, 100.0)

    def _temperature(self, handle: Any) -> int:
        smi = self._smi
        current = smi.AmdSmiTemperatureMetric.CURRENT
        try:
            return int(smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType.HOTSPOT, current))
        except smi.AmdSmiException:
            return int(smi.amdsmi_get_temp_metric(handle, smi.AmdSmiTemperatureType.EDGE, current))

    def _throttle(self, card: _Card, values: Values) -> tuple[str, ...]:
        if card.rounds % _THROTTLE_EVERY == 0:
            flags = values.get("throttle", lambda: self._smi.amdsmi_get_violation_status(card.handle)) or {}
            card.throttle = tuple(name for flag, name in _THROTTLE.items() if flags.get(flag) is True)
            card.throttle_unknown = values.unknown.get("throttle")
        card.rounds += 1
        if card.throttle_unknown is not None:
            values.unknown["throttle"] = card.throttle_unknown
        return card.throttle


def _may_be(name: str, uuid: str) -> bool:
    """Say whether a card of that name can be the one of that UUID all the same.

    A card that does not tell its number is named by its place, and a partition by its number among those that
    answered.
    """
    by_place = name.startswith("PCI-") != uuid.startswith("PCI-")
    return by_place or name.partition("/")[0] == uuid.partition("/")[0]


def _mib(size: Any) -> int | None:
    """MiB, from bytes; None where the binding writes "N/A"."""
    return int(size) // 2**20 if isinstance(size, (int, float)) else None


def _power(power: Mapping[str, Any]) -> float:
    # Which of the two is filled depends on the generation; the other one is "N/A" or 0.
    for name in ("current_socket_power", "average_socket_power"):
        value = power.get(name)
        if isinstance(value, int) and value > 0:
            return float(value)
    raise NotAvailable(power)


def _energy(counter: Mapping[str, Any]) -> int:
    """Millijoules, from a counter and the microjoules that one step of it is worth."""
    return int(whole(counter["energy_accumulator"]) * counter["counter_resolution"] / 1000)


def _pcie(info: Mapping[str, Any]) -> int:
    """Kilobytes a second, from megabits."""
    return whole(info["pcie_metric"]["pcie_bandwidth"]) * 125

"""What a stream of readings and notices amounts to: device events, each said once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from gangq.gpu import faults
from gangq.gpu.faults import Fault, judge
from gangq.gpu.reading import VALUES, DeviceEvent, DeviceReading, EventKind
from gangq.proc.clock import boottime

_KEPT = 256
_REPEAT_S = 10.0
"""A storm of the same event must not push the others out of what is kept."""
_REMIND_S = 60.0
"""A condition that stands is said again at this interval, for the jobs that started since."""
_STANDING: frozenset[EventKind] = frozenset({"lost", "reset_required", "recovery"})
_HANGS_S = 600.0


class Findings:
    """Turns readings and notices into events and keeps the latest of them. Not thread-safe: its owner locks.

    Lives in the owner of the sampling process, so that it remembers across replacements of that process.
    `clock` gives boottime seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = boottime) -> None:
        self._clock = clock
        self._kept: deque[DeviceEvent] = deque(maxlen=_KEPT)
        self._said: dict[tuple[str | None, EventKind, int | None], float] = {}
        self._ecc: dict[str, int] = {}
        self._count: int | None = None
        self._hangs: dict[str | None, list[tuple[float, str]]] = {}

    def since(self, at: float) -> list[DeviceEvent]:
        """Return the kept events learned of after `at`."""
        return [event for event in self._kept if event.at > at]

    def notice(self, uuid: str | None, kind: EventKind, code: int | None) -> DeviceEvent | None:
        """Take what the driver said; returns the event, None where it was said a moment ago."""
        return self._add(uuid, kind, code, judge(kind, code))

    def reading(self, reading: DeviceReading) -> list[DeviceEvent]:
        """Take a reading; returns what follows from its difference to those before."""
        uuid = reading.uuid
        found: list[DeviceEvent | None] = []
        if reading.ecc_uncorrectable is not None:
            before = self._ecc.get(uuid, reading.ecc_uncorrectable)
            self._ecc[uuid] = reading.ecc_uncorrectable
            if reading.ecc_uncorrectable > before:
                found.append(self._add(uuid, "ecc", reading.ecc_uncorrectable - before, judge("ecc", None)))
        if reading.recovery_action:
            found.append(self.notice(uuid, "recovery", reading.recovery_action))
        if len(reading.unknown) < len(VALUES):
            # It answers: should it be lost again, that is news.
            for kind in ("lost", "reset_required"):
                for key in [key for key in self._said if key[0] == uuid and key[1] == kind]:
                    del self._said[key]
        return [event for event in found if event is not None]

    def count(self, devices: int) -> DeviceEvent | None:
        """Take how many devices the driver lists; a drop is an event with the new number as its code.

        It is not fatal by itself: the missing one may be another worker's, and a watched one is found lost.
        """
        before, self._count = self._count, devices
        if before is None or devices >= before:
            return None
        return self.notice(None, "count", devices)

    def hang(self, uuid: str | None, call: str, *, unkillable: bool) -> DeviceEvent | None:
        """Take a driver call (by its name) that did not return, for a device or (None) for none in particular.

        Fatal when a call of this name already hung for this device within ten minutes, or when the process in it
        cannot be killed.
        """
        recent = self._recent(uuid)
        self._hangs[uuid] = [*recent, (self._clock(), call)]
        again = any(name == call for _, name in recent)
        fault = judge("driver_hang", None)
        if again or unkillable:
            fault = faults.UNKILLABLE if unkillable else faults.HANG_AGAIN
        return self._add(uuid, "driver_hang", len(recent) + 1, fault)

    def hangs(self, uuid: str | None) -> int:
        """Return how many calls for this device hung within the last ten minutes."""
        return len(self._recent(uuid))

    def hung_again(self, uuid: str | None) -> bool:
        """Return whether one call for this device hung more than once within the last ten minutes."""
        calls = [call for _, call in self._recent(uuid)]
        return len(calls) > len(set(calls))

    def last_hung(self) -> str | None:
        """Return the device that hung last within ten minutes."""
        hung = [(ats[-1][0], uuid) for uuid, ats in self._hangs.items() if uuid is not None]
        at, uuid = max(hung, default=(0.0, None))
        return uuid if at > self._clock() - _HANGS_S else None

    def _recent(self, uuid: str | None) -> list[tuple[float, str]]:
        now = self._clock()
        return [(at, call) for at, call in self._hangs.get(uuid, ()) if at > now - _HANGS_S]

    def _add(self, uuid: str | None, kind: EventKind, code: int | None, fault: Fault) -> DeviceEvent | None:
        now = self._clock()
        key = (uuid, kind, code)
        quiet_s = _REMIND_S if kind in _STANDING else _REPEAT_S
        if self._said.get(key, now - quiet_s) > now - quiet_s:
            return None
        self._said = {k: at for k, at in self._said.items() if at > now - _REMIND_S}
        self._said[key] = now
        # Later than every event before it, so that who asks for what came after one misses none.
        at = max(now, self._kept[-1].at + 1e-6) if self._kept else now
        event = DeviceEvent(uuid, at, kind, code, fault.fatal, fault.application, fault.bucket, fault.advice)
        self._kept.append(event)
        return event

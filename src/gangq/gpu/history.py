"""The readings that are kept of each device."""

from __future__ import annotations

from collections import deque

from gangq.gpu.reading import DeviceReading


class History:
    """The latest ``length`` readings of each device, oldest first. Not thread-safe: its owner locks."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._kept: dict[str, deque[DeviceReading]] = {}

    def keep(self, reading: DeviceReading) -> None:
        """Add a reading; those of a device come in the order of time."""
        self._kept.setdefault(reading.uuid, deque(maxlen=self._length)).append(reading)

    def last(self, uuid: str) -> DeviceReading | None:
        """The latest reading of a device."""
        kept = self._kept.get(uuid)
        return kept[-1] if kept else None

    def since(self, uuid: str, at: float) -> list[DeviceReading]:
        """The readings of a device that were taken after `at` (boottime seconds)."""
        return [reading for reading in self._kept.get(uuid, ()) if reading.at > at]

"""What the rest of gangq asks of a device sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from gangq.gpu.reading import DeviceEvent, DeviceReading


class DeviceSampler(Protocol):
    """Knows the latest readings and events of devices; no method but `start` and `stop` ever blocks."""

    def start(self) -> None:
        """Begin to read. Starting twice is the same as once."""
        ...

    def stop(self) -> None:
        """Stop reading and release what the sampler holds; bounded, whatever the driver does."""
        ...

    def watch(self, uuids: Iterable[str], pids: Callable[[], Iterable[int]]) -> None:
        """Read these devices from now on; the processes that `pids` names count as the caller's own.

        `pids` is called again for every round, in the sampler's thread.
        """
        ...

    def readings(self) -> dict[str, DeviceReading]:
        """Return the latest reading of each watched device that has one, by UUID."""
        ...

    def history(self, uuid: str, since: float) -> list[DeviceReading]:
        """Return the kept readings of a device taken after `since` (boottime seconds), oldest first."""
        ...

    def pids(self) -> list[int]:
        """Return the processes that the sampler has started: children of this process, not part of any job."""
        ...

    def doubtful(self) -> frozenset[str]:
        """Return the devices for which the driver is late with an answer: no new work should begin there."""
        ...

    def events(self, since: float) -> list[DeviceEvent]:
        """Return the kept events learned of after `since` (boottime seconds), oldest first.

        A caller that passes the `at` of the last event it got misses none.
        """
        ...

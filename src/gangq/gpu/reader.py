"""What the sampler's process asks of a driver binding, and how a failed call becomes a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gangq.gpu.reading import DeviceReading, EventKind, Scope

T = TypeVar("T")


@dataclass(frozen=True)
class Notice:
    """What the driver said of a device, before it is judged; `uuid` None: of no device in particular."""

    uuid: str | None
    kind: EventKind
    code: int | None


class Reader(Protocol):
    """Reads the devices of one driver. Every method may block for as long as the driver likes."""

    def open(self) -> None:
        """Initialise the driver; raises `DriverUnavailable`."""
        ...

    def subscribe(self, uuid: str) -> str | None:
        """Ask for the device's events; returns why the driver delivers none, None if it does."""
        ...

    def count(self) -> int | None:
        """Return how many cards the driver lists; None where it does not say."""
        ...

    def read(self, uuid: str, pids: Collection[int]) -> tuple[DeviceReading, list[Notice]]:
        """Read one device. A device that is gone gives a reading without values, and a notice."""
        ...

    def wait(self, timeout_s: float) -> list[Notice]:
        """Wait for events for at most this long; returns at the first. Without events it sleeps."""
        ...


class Values:
    """Collects the values of one reading; a call that fails leaves its reason in `unknown` and nothing else."""

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.unknown: dict[str, str] = {}
        self._reason = reason

    def get(self, name: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None, with the reason kept under `name`, where it raises."""
        try:
            return call()
        except DeviceGone:
            raise
        # Not only the binding's own errors: one newer than its driver raises whatever it likes.
        except Exception as error:
            self.unknown[name] = self._reason(error)
            return None


class DeviceGone(Exception):
    """A driver call said that the device is not there any more, or not usable."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice.kind)
        self.notice = notice


@dataclass(frozen=True)
class Use:
    """Who uses a device, as the driver lists it.

    `own_mb` is None where the driver lists none of the own processes, or not their memory.
    """

    listed: bool
    shared: bool
    own_mb: int | None


def use(processes: dict[int, int | None], own: Collection[int], proc: Path = Path("/proc")) -> Use:
    """Tell the own processes from others in a driver's list of pid and MiB.

    In a container the driver may name processes as the host numbers them. A single listed process that is not
    own and that this system does not know by its number is taken for the own one in that disguise: to read the
    device as a whole is right then, and where it is wrong the reading is too high, which trips no job.
    """
    mine = {pid: mb for pid, mb in processes.items() if pid in own}
    others = [pid for pid in processes if pid not in own]
    disguised = not mine and len(others) == 1 and not (proc / str(others[0])).exists()
    own_mb = sum(mb or 0 for mb in mine.values()) if mine and None not in mine.values() else None
    return Use(bool(mine), bool(others) and not disguised, own_mb)


def scoped(
    values: Values,
    processes: Use | None,
    own_pct: float | None,
    device_pct: Callable[[], float],
) -> tuple[float | None, Scope | None]:
    """Choose whose utilisation to report: that of the own processes, else of a device that is not shared.

    `own_pct` is None where the driver has never listed an own process with a utilisation.
    """
    if own_pct is not None:
        return own_pct, "process"
    if processes is not None and processes.shared:
        values.unknown["gpu_pct"] = "no_own_process"
        return None, None
    pct = values.get("gpu_pct", device_pct)
    return pct, None if pct is None else "device"


def whole(value: Any) -> int:
    """Return a number of a binding that writes "N/A" for what it does not know; raises `NotAvailable`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotAvailable(value)
    return int(value)


class NotAvailable(Exception):
    """The driver answered, and the answer is that it does not know."""

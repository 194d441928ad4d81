"""What a reader of a driver does whichever driver it is, and how a failed call becomes a reason.

Its two subclasses, for NVML (:mod:`gangq.gpu.nvml_readings`) and amdsmi (:mod:`gangq.gpu.rocm_readings`), run in the
sampler's process only.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from gangq.gpu.reading import DeviceReading, EventKind, Scope
from gangq.proc.clock import boottime

_MAX_WAIT_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True)
class Notice:
    """What the driver said of a device, before it is judged; `uuid` None: of no device in particular."""

    uuid: str | None
    kind: EventKind
    code: int | None


class DeviceGone(Exception):
    """A driver call said that the device is not there any more, or not usable."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice.kind)
        self.notice = notice


class Reader(ABC):
    """Reads the devices of one driver by UUID. Every method may block for as long as the driver likes."""

    _code: ClassVar[str]
    """The attribute of the binding's errors that holds the driver's code."""
    _reasons: ClassVar[Mapping[int, str]]
    """What a code says of a value that is missing."""
    _no_event: ClassVar[frozenset[int]]
    """Codes with which a wait says that no event came."""

    def __init__(self) -> None:
        self._subscribed: set[int] = set()
        """Addresses of the handles whose events are delivered."""
        self._listens = False
        """Whether there is anything to wait for: the driver was asked for events once."""

    # -- what a driver's reader adds -------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Initialise the driver; raises `DriverUnavailable`."""

    @abstractmethod
    def _count(self) -> int:
        """How many cards the driver lists."""

    @abstractmethod
    def _read(self, uuid: str, at: float, pids: Collection[int]) -> DeviceReading:
        """Read one device; raises `DeviceGone` where there is no such device any more."""

    def _forget(self, uuid: str) -> None:  # noqa: B027 - not every driver changes handles
        """A reading failed: do not use the handle of that device again."""

    @abstractmethod
    def _event_handle(self, uuid: str) -> Any:
        """The handle by which the device's events are asked for."""

    @abstractmethod
    def _subscribe(self, handle: Any) -> None:
        """Have the driver deliver its events."""

    @abstractmethod
    def _wait(self, timeout_ms: int) -> Any:
        """Wait for events of any handle; returns what the binding gives, and raises where none came."""

    @abstractmethod
    def _notices(self, data: Any) -> list[Notice]:
        """What the events that :meth:`_wait` returned say."""

    # -- the same for all ------------------------------------------------------------------------------------

    def subscribe(self, uuid: str) -> str | None:
        """Have the device's events delivered, unless they are; returns why the driver delivers none, None if it
        does.
        """
        try:
            handle = self._event_handle(uuid)
            if address(handle) not in self._subscribed:
                self._subscribe(handle)
                self._subscribed.add(address(handle))
                self._listens = True
        except DeviceGone as gone:
            return gone.notice.kind
        except Exception as error:
            return self._reason(error)
        return None

    def count(self) -> int | None:
        """Return how many cards the driver lists; None where it does not say."""
        try:
            return self._count()
        except Exception:
            return None

    def read(self, uuid: str, pids: Collection[int]) -> tuple[DeviceReading, list[Notice]]:
        """Read one device. A device that is gone gives a reading without values, and a notice."""
        at = boottime()
        try:
            return self._read(uuid, at, pids), []
        except DeviceGone as gone:
            reason, notices = f"failed: {gone.notice.kind}", [gone.notice]
        except Exception as error:
            reason, notices = self._reason(error), []
        self._forget(uuid)
        return DeviceReading.nothing(uuid, at, reason), notices

    def wait(self, timeout_s: float) -> list[Notice]:
        """Wait for events for at most this long; returns at the first. Without events it sleeps."""
        if not self._listens:
            time.sleep(timeout_s)
            return []
        started = time.monotonic()
        try:
            data = self._wait(max(1, int(min(timeout_s, _MAX_WAIT_S) * 1000)))
        except Exception as error:
            if getattr(error, self._code, None) not in self._no_event:
                # A lost card makes the wait fail at once, again and again; the next round names it.
                time.sleep(max(0.0, min(0.2, timeout_s - (time.monotonic() - started))))
            return []
        return self._notices(data)

    def _reason(self, error: Exception) -> str:
        """Why a value is missing after a call failed so."""
        code = getattr(error, self._code, None)
        if code is not None and code in self._reasons:
            return self._reasons[code]
        if isinstance(error, NotAvailable):
            return "not_available"
        if type(error).__name__ == "NVMLLibraryMismatchError":
            return "library_mismatch"
        if isinstance(error, AttributeError):
            return "function_not_found"
        return f"failed: {' '.join(str(error).split())[:200] or type(error).__name__}"


def address(handle: Any) -> int:
    """What tells a driver's handle from another one."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)


class Values:
    """Collects the values of one reading; a call that fails leaves its reason in `unknown` and nothing else."""

    def __init__(self, reason: Callable[[Exception], str]) -> None:
        self.unknown: dict[str, str] = {}
        self._reason = reason

    def get(self, name: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None, with the reason kept under `name`, where it raises. Asked for again under
        the same name, the last call counts.
        """
        try:
            value = call()
        except DeviceGone:
            raise
        # Not only the binding's own errors: one newer than its driver raises whatever it likes.
        except Exception as error:
            self.unknown[name] = self._reason(error)
            return None
        self.unknown.pop(name, None)
        return value


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
        values.unknown.setdefault("gpu_pct", "no_own_process")
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

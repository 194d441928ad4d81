"""Which driver call the sampling process is in, and since when: a note in memory that its owner reads.

A line on the pipe for each of a dozen calls a device and a round would wake the owner's thread for each of them.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from gangq.proc import kernel

_SIZE = 512
_SINCE = struct.Struct("d")


class CurrentCall:
    """The note, as either side sees it. The text is cut off at some 500 bytes.

    A name is never read with the time of an earlier call, which would blame the wrong device: the time is written
    before the text and read after it. A new time with an old or half-written text is harmless: it is no silence yet.
    """

    def __init__(self, fd: int) -> None:
        """Map what :meth:`create` made."""
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._device = b""

    @classmethod
    def create(cls) -> CurrentCall:
        """For the owner: nothing has been called yet."""
        fd = kernel.memory_file("gangq-call")
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def begin(self, name: str, uuid: str | None = None, *, same_device: bool = False) -> None:
        """This call begins now, for this device, or (``same_device``) for that of the call before."""
        if not same_device:
            self._device = (uuid or "").encode()
        text = b"%s\0%s\0" % (self._device, name.encode())
        text = text[: _SIZE - _SINCE.size]
        _SINCE.pack_into(self._map, 0, time.monotonic())
        self._map[_SINCE.size : _SINCE.size + len(text)] = text

    def read(self) -> tuple[float, str | None, str]:
        """When the present call began (monotonic; 0: there was none), its device if it is for one, its name."""
        device, name, _ = (self._map[_SINCE.size :] + b"\0\0").split(b"\0", 2)
        (since,) = _SINCE.unpack_from(self._map)
        return since, device.decode("utf-8", "replace") or None, name.decode("utf-8", "replace")

    def close(self) -> None:
        """For the owner, once the process has ended."""
        self._map.close()
        os.close(self.fd)


class Noted:
    """A driver binding whose every function says its name before it is called; all else is as it is."""

    def __init__(self, binding: Any, begin: Callable[[str], object]) -> None:
        self._binding = binding
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._binding, name)
        if isinstance(value, FunctionType):
            begin, function = self._begin, value

            @wraps(function)
            def noted(*args: Any, **kwargs: Any) -> Any:
                begin(name)
                return function(*args, **kwargs)

            value = noted
        # Found at once the next time.
        setattr(self, name, value)
        return value

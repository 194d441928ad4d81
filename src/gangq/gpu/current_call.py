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
from typing import Any, NamedTuple

from gangq.proc import kernel

_SIZE = 512
_SINCE = struct.Struct("d")


class Call(NamedTuple):
    """What the process does."""

    since: float
    """When that began, on the monotonic clock."""
    device: str | None
    """The device that it is done for; None: no device in particular."""
    step: str
    """See `gangq.gpu.sampling`; empty: none has begun."""
    name: str
    """The driver call; before the first one of a step, the step."""


class CurrentCall:
    """The note, as either side sees it. The text is cut off at some 500 bytes.

    A name is never read with the time of an earlier call, which would blame the wrong device: the time is written
    before the text and read after it. A new time with an old or half-written text is harmless: it is no silence yet.
    """

    def __init__(self, fd: int) -> None:
        """Map what :meth:`create` made."""
        self.fd = fd
        self._map = mmap.mmap(fd, _SIZE)
        self._step = b"\0\0"

    @classmethod
    def create(cls) -> CurrentCall:
        """For the owner: nothing has been called yet."""
        fd = kernel.memory_file("gangq-call")
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    def enter(self, step: str, uuid: str | None = None) -> None:
        """This step begins now, for this device, or for none in particular."""
        self._step = b"%s\0%s\0" % ((uuid or "").encode(), step.encode())
        self.begin(step)

    def begin(self, name: str) -> None:
        """This call of the present step begins now."""
        text = (self._step + name.encode() + b"\0")[: _SIZE - _SINCE.size]
        _SINCE.pack_into(self._map, 0, time.monotonic())
        self._map[_SINCE.size : _SINCE.size + len(text)] = text

    def read(self) -> Call:
        """What it does now."""
        text = self._map[_SINCE.size :].decode("utf-8", "replace")
        device, step, name, _ = (text + "\0\0\0").split("\0", 3)
        (since,) = _SINCE.unpack_from(self._map)
        return Call(since, device or None, step, name)

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

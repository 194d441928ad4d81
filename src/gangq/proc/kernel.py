"""Requests to the kernel that Python has no function for, or not every Python: mostly prctl(2)."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)

_SET_PDEATHSIG = 1
_GET_DUMPABLE = 3
_SET_DUMPABLE = 4
_SET_NAME = 15
_GET_NAME = 16
_SET_CHILD_SUBREAPER = 36
_SIGKILL = 9


def die_with_parent() -> None:
    """Send this process SIGKILL when the thread that forked it ends. A parent that is dead already sends nothing."""
    libc.prctl(_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (a subreaper)."""
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_dumpable(value: int) -> int:
    """0: other processes of this user can no longer open this one's memory, environment and files. Returns what it
    was.
    """
    was = int(libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0))
    libc.prctl(_SET_DUMPABLE, value, 0, 0, 0)
    return was


def memory_file(name: str) -> int:
    """A descriptor of an empty file without a name, in memory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # A Python built for an old C library.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def set_name(name: bytes) -> bytes:
    """Give the calling thread this name, 15 bytes of it; returns the former one. That of the main thread is the
    process's.
    """
    was = ctypes.create_string_buffer(16)
    libc.prctl(_GET_NAME, was, 0, 0, 0)
    libc.prctl(_SET_NAME, name, 0, 0, 0)
    return was.value

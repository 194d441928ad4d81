"""What a job waits in: the system call, the line of its handler, and the file system or peer behind the call.

Read from ``/proc`` and from Python's frames. Whatever cannot be read is left out: nothing here raises.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from gangq import private
from gangq.proc import procfs

_X86 = {
    0: "read", 1: "write", 7: "poll", 17: "pread", 18: "pwrite", 19: "readv", 20: "writev", 23: "select",
    35: "sleep", 42: "connect", 43: "accept", 44: "send", 45: "recv", 46: "sendmsg", 47: "recvmsg", 61: "wait",
    73: "flock", 74: "fsync", 75: "fdatasync", 202: "futex", 230: "sleep", 232: "epoll_wait", 247: "wait",
    270: "select", 271: "poll", 281: "epoll_wait", 288: "accept",
}  # fmt: skip
_ARM = {
    22: "epoll_wait", 32: "flock", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread", 68: "pwrite",
    72: "select", 73: "poll", 82: "fsync", 83: "fdatasync", 95: "wait", 98: "futex", 101: "sleep", 115: "sleep",
    202: "accept", 203: "connect", 206: "send", 207: "recv", 211: "sendmsg", 212: "recvmsg", 242: "accept",
    260: "wait",
}  # fmt: skip
_CALLS: Mapping[int, str] = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {})
_OF_A_FILE = frozenset(
    ("read", "write", "pread", "pwrite", "readv", "writev", "connect", "accept", "send", "recv", "sendmsg",
     "recvmsg", "flock", "fsync", "fdatasync")
)  # fmt: skip
"""Calls whose first argument is a file descriptor."""
_SHARED = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "beegfs", "9p", "fuse", "glusterfs", "ocfs", "gfs")
"""File systems that other hosts have too, by the beginning of their type."""
_MOST_THINGS = 8
_TABLE_BYTES = 1 << 20
_STACK_LINES = 60


class Waits(NamedTuple):
    """``place``: one phrase, such as ``recv() of allreduce at train.py:88``. ``waits_for``: file systems
    (``fs:...``) and peers (``peer:...``) behind the calls. ``stack``: the handler's own frames, innermost last.
    """

    place: str | None = None
    waits_for: tuple[str, ...] = ()
    stack: str = ""

    def as_json(self) -> dict[str, Any]:
        """What of it is known, as evidence."""
        known = {"place": self.place, "waits_for": list(self.waits_for), "handler": self.stack}
        return {key: value for key, value in known.items() if value}


def of_handler() -> Waits:
    """What the handler in the main thread of this process waits in."""
    pid = os.getpid()
    # The id of its main thread too. Thread.native_id is still the parent's in a process that was forked.
    call, fd = _call(pid, pid)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    own = _own(frame)
    place = _phrase(call, _where(own) if own else None)
    return Waits(place, _things(pid, [fd]), _stack(own[0], frame) if own and frame else "")


def of_processes(pids: Iterable[int]) -> Waits:
    """What the first of these processes waits in, and what all their threads wait for."""
    place: str | None = None
    things: dict[str, None] = {}
    for pid in pids:
        fds = []
        for tid in procfs.tids(pid):
            call, fd = _call(pid, tid)
            fds.append(fd)
            if place is None and tid == pid and call is not None:
                place = f"{call}() of {_command(pid)}"
        things.update(dict.fromkeys(_things(pid, fds)))
    return Waits(place, tuple(things)[:_MOST_THINGS])


def _own(frame: FrameType | None) -> tuple[FrameType, FrameType | None] | None:
    """The innermost frame that is neither of the standard library nor of a package, and what it called."""
    called = None
    while frame is not None:
        if not _library(frame.f_code.co_filename):
            return frame, called
        frame, called = frame.f_back, frame
    return None


def _library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or not os.path.isabs(file)


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {_PACKAGE}
    | {path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)


def _where(own: tuple[FrameType, FrameType | None]) -> str:
    frame, called = own
    name = (called or frame).f_code.co_name
    return f"{name} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _phrase(call: str | None, where: str | None) -> str | None:
    if call is None:
        return where
    return f"{call}()" if where is None else f"{call}() of {where}"


def _stack(own: FrameType, innermost: FrameType) -> str:
    """From where this package called the handler to the innermost frame: what is before that tells nothing."""
    first = own
    while first.f_back is not None and not first.f_back.f_code.co_filename.startswith(_PACKAGE):
        first = first.f_back
    frames = [innermost]
    while frames[-1] is not first and frames[-1].f_back is not None:
        frames.append(frames[-1].f_back)
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in reversed(frames)).format()
    return "".join(lines[-_STACK_LINES:])


def _call(pid: int, tid: int) -> tuple[str | None, int | None]:
    """The system call a thread is in, and the file descriptor it is about."""
    said = procfs.text(f"/proc/{pid}/task/{tid}/syscall")
    if not said and tid == pid == os.getpid():
        # A closed process cannot open this file of its own any more; it has kept the one of its main thread open.
        said = (private.own_file(f"/proc/self/task/{tid}/syscall") or b"").decode()
    fields = said.split()
    if len(fields) < 2 or not fields[0].isdigit():
        return None, None
    name = _CALLS.get(int(fields[0]))
    return name, int(fields[1], 16) if name in _OF_A_FILE else None


def _command(pid: int) -> str:
    words = procfs.words(pid)
    return os.path.basename(words[0])[:100] if words else str(pid)


def _things(pid: int, fds: Iterable[int | None]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for fd in fds:
        thing = None if fd is None else _thing(pid, fd)
        if thing is not None:
            found[thing] = None
    return tuple(found)[:_MOST_THINGS]


def _thing(pid: int, fd: int) -> str | None:
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return None
    if target.startswith("socket:["):
        return _peer(pid, target[8:-1])
    return _file_system(pid, target) if target.startswith("/") and not target.startswith("/dev/") else None


def _peer(pid: int, inode: str) -> str | None:
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in procfs.text(f"/proc/{pid}/net/{table}", _TABLE_BYTES).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                raw = bytes.fromhex(fields[2].partition(":")[0])
                # Each group of four bytes stands in the order of this machine.
                order = -1 if sys.byteorder == "little" else 1
                groups = [raw[n : n + 4][::order] for n in range(0, len(raw), 4)]
                address = socket.inet_ntop(family, b"".join(groups)).removeprefix("::ffff:")
                own = address.startswith("127.") or address == "::1"
                return f"peer:{socket.gethostname()}" if own else f"peer:{address}"
    return None


def _file_system(pid: int, path: str) -> str | None:
    best, found = "", None
    for line in procfs.text(f"/proc/{pid}/mountinfo", _TABLE_BYTES).splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(), right.split()
        if len(fields) < 5 or len(source) < 2:
            continue
        point = fields[4].encode().decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            where = source[1] if source[0].startswith(_SHARED) else f"{socket.gethostname()}:{point}"
            best, found = point, f"fs:{where}"
    return found

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
from typing import Any, NamedTuple

from gangq import private
from gangq.proc import procfs
from gangq.watchdogs import dumps

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
    ``stacks``: those of all threads, if another process was asked for them.
    """

    place: str | None = None
    waits_for: tuple[str, ...] = ()
    stack: str = ""
    stacks: str = ""

    def as_json(self) -> dict[str, Any]:
        """What of it is known of the handler, as evidence."""
        known = {"place": self.place, "waits_for": list(self.waits_for), "handler": self.stack}
        return {key: value for key, value in known.items() if value}


def of_handler() -> Waits:
    """What the handler in the main thread of this process waits in."""
    pid = os.getpid()
    # The id of its main thread too. Thread.native_id is still the parent's in a process that was forked.
    call, fd = _call(pid, pid)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    # walk_stack(None) would be this thread's.
    walked = () if frame is None else traceback.walk_stack(frame)
    frames = list(traceback.StackSummary.extract(walked, lookup_lines=False))
    where, stack = _code(frames)
    return Waits(_phrase(call, where), _things(pid, [fd]), stack)


def of_processes(pids: Iterable[int], directory: Path | None = None) -> Waits:
    """What the first of these processes waits in, and what all their threads wait for. ``directory``: of the worker
    whose handler it may be (`gangq.watchdogs.dumps`).
    """
    found = Waits()
    things: dict[str, None] = {}
    for pid in pids:
        fds = []
        for tid in procfs.tids(pid):
            call, fd = _call(pid, tid)
            fds.append(fd)
            if found.place is None and tid == pid:
                # After the call was read: the signal interrupts it.
                stacks = "" if directory is None else dumps.ask(directory, pid)
                where, stack = _code(dumps.main_thread(stacks))
                if where is None and call is not None:
                    where = _command(pid)
                found = Waits(_phrase(call, where), stack=stack, stacks=stacks)
        things.update(dict.fromkeys(_things(pid, fds)))
    return found._replace(waits_for=tuple(things)[:_MOST_THINGS])


def _code(frames: list[traceback.FrameSummary]) -> tuple[str | None, str]:
    """Where a handler with these frames, innermost first, stands in its own code, and its stack as text.

    Its own frame is the innermost one that is neither of the standard library nor of a package. Frames before the one
    that this package called tell nothing.
    """
    own = next((n for n, frame in enumerate(frames) if not _library(frame.filename)), None)
    if own is None:
        return None, ""
    name = frames[max(own - 1, 0)].name
    first = own
    while first + 1 < len(frames) and not frames[first + 1].filename.startswith(_PACKAGE):
        first += 1
    lines = traceback.StackSummary.from_list(frames[first::-1]).format()
    where = f"{name} at {os.path.basename(frames[own].filename)}:{frames[own].lineno}"
    return where, "".join(lines[-_STACK_LINES:])


def _library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or not os.path.isabs(file)


_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {_PACKAGE}
    | {path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(name))}
)


def _phrase(call: str | None, where: str | None) -> str | None:
    if call is None:
        return where
    return f"{call}()" if where is None else f"{call}() of {where}"


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
    found = (_thing(pid, fd) for fd in fds if fd is not None)
    return tuple(dict.fromkeys(thing for thing in found if thing is not None))[:_MOST_THINGS]


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
        # Blanks and the like are written as \040; of all other characters nothing changes here.
        point = fields[4].encode("latin-1", "backslashreplace").decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            where = source[1] if source[0].startswith(_SHARED) else f"{socket.gethostname()}:{point}"
            best, found = point, f"fs:{where}"
    return found

"""The kernel's counters of processes and threads, as :mod:`gangq.watchdogs.activity` compares them."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from gangq import private
from gangq.proc import procfs
from gangq.watchdogs.steps import OWN_NAMES

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_SLEEPS = b"nanosleep"
_LOOKS = 3
_LOOK_AGAIN_S = 0.003
_DRIVER_THREADS = (b"cuda-EvtHandlr",)
"""Threads that a driver starts in a program: CUDA's polls ten times a second, whatever the program does."""


class Wait(Enum):
    """What a thread was waiting in when it was looked at."""

    LOCK = "a lock: of the program, or the GIL"
    SLEEP = "a sleep"
    DATA = "anything else, such as a read"


@dataclass(frozen=True)
class Counters:
    """What one process, or one thread, has done since it began; None: the kernel does not say.

    ``switches`` are voluntary context switches by thread (0 for all of a process); ``waits`` is what each thread was
    waiting in just then, without those that ran.
    """

    io_bytes: int | None = None
    faults: int = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    switches: Mapping[int, int] = field(default_factory=dict)
    waits: Mapping[int, Wait] = field(default_factory=dict)


def library_threads() -> list[int]:
    """Thread ids of the library's own threads in this process, and of the calling one."""
    own = {threading.get_native_id()}
    own |= {t.native_id for t in threading.enumerate() if t.native_id and t.name.startswith(OWN_NAMES)}
    return sorted(own)


def driver_threads(pid: int) -> list[int]:
    """Thread ids of a driver's own threads in a process."""
    return [
        tid
        for tid in procfs.tids(pid)
        if (procfs.read(f"/proc/{pid}/task/{tid}/comm") or b"").strip() in _DRIVER_THREADS
    ]


def own_counters(thread: bool = False) -> Counters:
    """What this process has done, all its threads, those that ended included; or the calling ``thread``."""
    usage = resource.getrusage(resource.RUSAGE_THREAD if thread else resource.RUSAGE_SELF)
    return Counters(
        0 if thread else _own_io(),
        usage.ru_minflt + usage.ru_majflt,
        usage.ru_utime + usage.ru_stime,
        0 if thread else _resident("/proc/self/statm"),
        {0: usage.ru_nvcsw},
    )


def with_main_thread(process: Counters) -> Counters:
    """The counters of this process, its main thread's waits apart: in that one the handler runs."""
    me = os.getpid()
    if threading.get_native_id() == me or (count := _switches(f"/proc/self/task/{me}/status")) is None:
        return process
    others = max(0, process.switches[0] - count)
    return replace(process, switches={0: others, me: count}, waits=_waiting(me, [me]))


def thread_counters(pid: int, tid: int) -> Counters | None:
    """What one thread has done; None when it is gone."""
    task = f"/proc/{pid}/task/{tid}"
    fields, switches = procfs.stat_fields(f"{task}/stat"), _switches(f"{task}/status")
    if not fields or switches is None:
        return None
    return Counters(_io(f"{task}/io"), *_faults_and_cpu(fields), 0, {0: switches})


def process_counters(pid: int) -> tuple[int, Counters] | None:
    """Start time and counters of a process; None when it is gone or a zombie without threads."""
    fields = procfs.stat_fields(f"/proc/{pid}/stat")
    if not fields or (fields[0] in ("Z", "X") and int(fields[17]) <= 1):
        return None
    switches: dict[int, int] = {}
    for tid in sorted(set(procfs.tids(pid)) - set(driver_threads(pid))):
        if (count := _switches(f"/proc/{pid}/task/{tid}/status")) is not None:
            switches[tid] = count
    return int(fields[19]), Counters(
        _io(f"/proc/{pid}/io"),
        *_faults_and_cpu(fields),
        _resident(f"/proc/{pid}/statm"),
        switches,
        _waiting(pid, switches),
    )


def _waiting(pid: int, tids: Iterable[int]) -> dict[int, Wait]:
    """What each of these threads waits in."""
    found: dict[int, Wait] = {}
    left = set(tids)
    for look in range(_LOOKS):
        if look:
            # A thread that asks for the GIL runs for a moment every 5 ms, and on a loaded host it may queue for the
            # processor as long. In that time the kernel shows no wait channel for it, so look again.
            time.sleep(_LOOK_AGAIN_S)
        for tid in list(left):
            where = procfs.read(f"/proc/{pid}/task/{tid}/wchan") or b"0"
            if where.strip() != b"0":
                left.discard(tid)
                found[tid] = Wait.SLEEP if _SLEEPS in where else Wait.LOCK if b"futex" in where else Wait.DATA
        if not left:
            break
    return found


def _faults_and_cpu(fields: list[str]) -> tuple[int, float]:
    return int(fields[7]) + int(fields[9]), (int(fields[11]) + int(fields[12])) / _TICK


def _own_io() -> int | None:
    """Of this process. One that is closed to others (:mod:`gangq.private`) sees the sum of its threads but not each
    of them. Then what it has read of ``/proc``, which its library threads did, is subtracted here.
    """
    found = _io("/proc/self/io")
    if found is None and (kept := _io_of(private.own_file("/proc/self/io"))) is not None:
        found = kept - procfs.bytes_read()
    return found


def _io(path: str) -> int | None:
    return _io_of(procfs.read(path))


def _io_of(raw: bytes | None) -> int | None:
    if not raw:
        return None
    total = 0
    for line in raw.splitlines():
        name, _, value = line.partition(b": ")
        if name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"):
            total += int(value)
    return total


def _resident(path: str) -> int:
    raw = procfs.read(path)
    return int(raw.split()[1]) * _PAGE if raw else 0


def _switches(path: str) -> int | None:
    _, found, rest = (procfs.read(path) or b"").partition(b"\nvoluntary_ctxt_switches:")
    return int(rest.split(None, 1)[0]) if found else None

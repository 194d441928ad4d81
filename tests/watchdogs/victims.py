"""Jobs that hang and jobs that honestly load, as processes; and what a test needs around them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gangq.watchdogs.counters import Wait, process_counters

_PRELUDE = """
import ctypes, mmap, os, socket, sys, threading, time
def ready():
    print("ready", flush=True)
def pace(make, per_s, chunk):
    # So many bytes a second, in chunks, for ever.
    ready()
    due = time.monotonic()
    while True:
        make(chunk)
        due = max(due + chunk / per_s, time.monotonic() - 0.2)
        time.sleep(max(0.0, due - time.monotonic()))
"""

HUNG = {
    "gil_held_park": """
def other():
    # What nearly every program has: one more thread, which from then on asks for the GIL 200 times a second.
    while True: time.sleep(0.3)
threading.Thread(target=other, daemon=True).start()
ready()
time.sleep(0.1)
while True: ctypes.PyDLL(None).sleep(3600)
""",
    "lock_wait": """
lock = threading.Lock(); lock.acquire()
threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
ready()
lock.acquire()
""",
    "cpu_spin": """
ready()
while True: pass
""",
}

LOADING = {
    "staged_read": """
path = sys.argv[1]
file, buffer = open(path, "rb", buffering=0), bytearray(4 << 20)
def make(size):
    if file.readinto(buffer) < size: file.seek(0)
pace(make, 200e6, 4 << 20)
""",
    "o_direct": """
fd, buffer = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 4 << 20)
def make(size):
    if os.readv(fd, [buffer]) < size: os.lseek(fd, 0, 0)
pace(make, 200e6, 4 << 20)
""",
    "mmap": """
fd, size_of = os.open(sys.argv[1], os.O_RDONLY), os.path.getsize(sys.argv[1])
place = [mmap.mmap(fd, size_of, prot=mmap.PROT_READ), 0]
def make(size):
    view, at = place
    for page in range(at, min(at + size, size_of), 4096): view[page]
    place[1] = at + size
    if place[1] >= size_of:
        view.close()
        place[:] = [mmap.mmap(fd, size_of, prot=mmap.PROT_READ), 0]
pace(make, 200e6, 4 << 20)
""",
    "heap_growth": """
held = []
def make(size):
    held.append(bytearray(os.urandom(1)) * size)
    if len(held) > 96: held.clear()
pace(make, 60e6, 2 << 20)
""",
    "download": """
ours, theirs = socket.socketpair()
if os.fork() == 0:
    ours.close()
    data = bytes(1 << 20)
    def make(size): theirs.sendall(data)
    pace(make, 100e6, 1 << 20)
# Where it comes from is another machine as far as the watchdog can see.
theirs.close()
buffer = bytearray(1 << 16)
while ours.recv_into(buffer): pass
""",
}


@contextlib.contextmanager
def victim(code: str, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process running ``code``, once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + code, *argv], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the victim died"
        if code in (HUNG["gil_held_park"], HUNG["lock_wait"]):
            # It hangs once a thread has come to the lock, or to ask for the GIL, and not before.
            until(lambda: Wait.LOCK in waits_of(process.pid))
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def waits_of(pid: int) -> list[Wait]:
    """What the threads of a process wait in."""
    found = process_counters(pid)
    return [] if found is None else list(found[1].waits.values())


def big_file(directory: Path, size: int = 128 << 20) -> Path:
    """A file to load."""
    path = directory / "weights"
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    return path


def until(what: Callable[[], object], *, within_s: float = 10.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, as in a full pids cgroup."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

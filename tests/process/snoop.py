"""What a job finds when it looks everywhere it may: ``python snoop.py <the secret, backwards> <answer>``.

Every process's environment, command line, memory and open files, through ``/proc``, by ptrace and by pidfd. The
answer is a file of JSON: where the secret was, which processes are closed, and which were looked into.

With a third argument, the name of a file, it looks again and again until that file exists, at what takes no time: to
catch processes while they start. The answer is then where the secret was, and for how many seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

_PTRACE_SEIZE, _PTRACE_DETACH = 0x4206, 17
_SYS_PIDFD_OPEN, _SYS_PIDFD_GETFD = 434, 438
_MOST = 64 << 20


def contents(path: str, most: int = 1 << 20) -> bytes:
    """The file; nothing where it may not be read. Pipes and sockets are not waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(fd, most, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def memory(pid: int) -> bytes:
    """All of its writable memory."""
    found = b""
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as mem:
            for line in maps:
                span, mode = line.split()[:2]
                start, end = (int(word, 16) for word in span.split("-"))
                if "rw" in mode and len(found) < _MOST:
                    try:
                        mem.seek(start)
                        found += mem.read(min(end - start, _MOST))
                    except (OSError, ValueError, OverflowError):
                        continue
    except OSError:
        return b""
    return found


def traced(libc: ctypes.CDLL, pid: int) -> bool:
    if libc.ptrace(_PTRACE_SEIZE, pid, None, None) != 0:
        return False
    libc.ptrace(_PTRACE_DETACH, pid, None, None)
    return True


def files(libc: ctypes.CDLL, pid: int) -> dict[str, bytes]:
    """Its open files, opened anew and copied."""
    found = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found[f"fd {name}"] = contents(f"/proc/{pid}/fd/{name}")
    except OSError:
        pass
    handle = libc.syscall(_SYS_PIDFD_OPEN, pid, 0)
    for number in range(64):
        copied = libc.syscall(_SYS_PIDFD_GETFD, handle, number, 0)
        if copied >= 0:
            try:
                found[f"copied fd {number}"] = os.pread(copied, 1 << 20, 0)
            except OSError:
                found[f"copied fd {number}"] = b""
            os.close(copied)
    if handle >= 0:
        os.close(handle)
    return found


def main(backwards: str, answer: str) -> None:
    secret = backwards[::-1].encode()
    libc = ctypes.CDLL(None)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    found, open_, closed = [], [], []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid == os.getpid():
            continue
        try:
            if os.getuid() not in map(
                int,
                next(
                    line
                    for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                    if line.startswith("Uid:")
                ).split()[1:],
            ):
                continue
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        places = {"environ": contents(f"/proc/{pid}/environ"), "cmdline": contents(f"/proc/{pid}/cmdline")}
        for task in os.listdir(f"/proc/{pid}/task"):
            places[f"task {task}"] = contents(f"/proc/{pid}/task/{task}/environ")
        copied = files(libc, pid)
        places |= {"memory": memory(pid), **copied}
        found += [[pid, name, place] for place, data in places.items() if secret in data]
        readable = places["environ"] or places["memory"] or copied or traced(libc, pid)
        (open_ if readable else closed).append([pid, name])
    found += [[os.getpid(), "self", name] for name, value in os.environ.items() if secret.decode() in value]
    Path(answer).write_text(json.dumps({"found": found, "open": open_, "closed": closed}))


def lurk(backwards: str, answer: str, until: str) -> None:
    secret = backwards[::-1].encode()
    kept: dict[tuple[int, int], tuple[str, int]] = {}
    seen: dict[str, list[float]] = {}

    def look(where: str, data: bytes) -> None:
        if secret in data:
            seen.setdefault(where, []).append(time.monotonic())

    rounds = 0
    while not os.path.exists(until):
        rounds += 1
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            if pid == os.getpid():
                continue
            try:
                environ = contents(f"/proc/{pid}/environ")
                if secret in environ + contents(f"/proc/{pid}/cmdline"):
                    look(f"environ of {Path(f'/proc/{pid}/comm').read_text().strip()} {pid}", secret)
                numbers = os.listdir(f"/proc/{pid}/fd")
            except OSError:
                continue
            for number in numbers:
                path = f"/proc/{pid}/fd/{number}"
                try:
                    target = os.readlink(path)
                    where = f"fd {number} of {Path(f'/proc/{pid}/comm').read_text().strip()} {pid}, {target}"
                    if target.startswith("pipe:"):
                        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                        try:
                            look(where, os.read(fd, 1 << 16))
                        finally:
                            os.close(fd)
                    elif target.startswith("/memfd:"):
                        fd = os.open(path, os.O_RDONLY)
                        identity = os.fstat(fd).st_dev, os.fstat(fd).st_ino
                        # What is open stays open, whatever its owner does to itself.
                        if kept.setdefault(identity, (where, fd)) != (where, fd):
                            os.close(fd)
                    elif number == "0":
                        look(where, contents(path))
                except OSError:
                    continue
        for where, fd in kept.values():
            look(where, os.pread(fd, 1 << 16, 0))
    found = {where: round(times[-1] - times[0], 3) for where, times in seen.items()}
    Path(answer).write_text(json.dumps({"found": found, "rounds": rounds}))


if __name__ == "__main__":
    (lurk if len(sys.argv) > 3 else main)(*sys.argv[1:])

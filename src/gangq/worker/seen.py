"""Which process of this host is a certain worker, by what the kernel says and not by what the database says.

Any worker's login can register any name with any identity. The bouncer restarts a unit or container for a
worker only where this finds the worker in it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from gangq import names
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity, ProcessIdentity
from gangq.worker.options import default_name

_VERBS = ("off", "on", "drain")
"""``gangq worker off NAME`` starts no worker."""


def lineage(worker: str, identity: Mapping[str, Any]) -> tuple[int, ...] | str:
    """The pid of that worker on this host and those of its ancestors, nearest first; else why it is not seen.

    It is the process that it registered (pid in its pid namespace, start time, boot), and its command line is a
    ``gangq worker`` of that name.
    """
    recorded = identity if isinstance(identity, Mapping) else {}
    host, process = HostIdentity.of(recorded.get("host")), ProcessIdentity.of(recorded.get("process"))
    boot_id = HostIdentity.here().boot_id
    if host is None or process is None or boot_id is None or process.boot_id != boot_id:
        return "its process was not started on this host since its boot"
    processes = procfs.table()
    for entry in processes.values():
        if entry.alive and entry.start_ticks == process.start_ticks and _is(entry.pid, host, process):
            called = worker_name(entry.pid)
            if called == worker:
                return _upwards(processes, entry.pid)
            return f"process {entry.pid} is " + (
                f"gangq worker --name {called}" if called else "no gangq worker by its command line"
            )
    return "no process of this host is the one it registered"


def _is(pid: int, host: HostIdentity, process: ProcessIdentity) -> bool:
    """Whether that process has the recorded pid in the recorded namespace."""
    try:
        status = procfs.text(f"/proc/{pid}/status")
        inner = next(
            (line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [str(pid)]
        )
        # Of its own namespace it need not be asked: a worker is closed to other processes of its user.
        own = len(inner) == 1
        namespace = HostIdentity.here().pid_namespace if own else os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return False
    return namespace == host.pid_namespace and inner[-1:] == [str(process.pid)]


def _upwards(processes: Mapping[int, procfs.Stat], pid: int) -> tuple[int, ...]:
    found = [pid]
    while (entry := processes.get(found[-1])) is not None and entry.ppid and entry.ppid not in found:
        found.append(entry.ppid)
    return tuple(found)


def worker_name(pid: int) -> str | None:
    """The name of the worker that this process is by its command line; None: it is none."""
    given = _options(_gangq(procfs.words(pid)))
    if given is None:
        return None
    if "--name" in given:
        return given["--name"]
    hidden = _environ(pid)
    host = given.get("--host") or names.lawful(hidden.get("HOSTNAME") or socket.gethostname())
    return default_name(host, hidden)


def _gangq(words: Sequence[str]) -> Sequence[str]:
    """What follows ``gangq``, ``python gangq`` or ``python -m gangq``; nothing where it is another program."""
    rest = list(words[1:])
    if not words or _is_program(words[0]):
        return rest
    if not os.path.basename(words[0]).startswith("python"):
        return ()
    while rest:
        word = rest.pop(0)
        if word == "-m":
            return rest[1:] if rest[:1] == ["gangq"] else ()
        if word in ("-X", "-W"):
            rest[:1] = []
        elif not word.startswith("-"):
            return rest if _is_program(word) else ()
    return ()


def _is_program(word: str) -> bool:
    return os.path.basename(word) == "gangq" or word.endswith("/gangq/__main__.py")


def _options(words: Sequence[str]) -> dict[str, str] | None:
    """The options --name and --host of ``[--dsn DSN] worker ...``; None for any other command."""
    rest = list(words)
    while rest and rest[0] != "worker":
        word = rest.pop(0)
        if not word.startswith("-"):
            return None
        if word == "--dsn":
            rest[:1] = []
    if not rest or (rest[1:2] and rest[1] in _VERBS):
        return None
    found = {}
    for at, word in enumerate(rest):
        key, equals, value = word.partition("=")
        if key in ("--name", "--host"):
            found[key] = value if equals else next(iter(rest[at + 1 :]), "")
    return found


def _environ(pid: int) -> dict[str, str]:
    raw = procfs.read(f"/proc/{pid}/environ", 1 << 20) or b""
    pairs = (os.fsdecode(each).partition("=") for each in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}

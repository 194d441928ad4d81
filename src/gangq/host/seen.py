"""Which process of this host is a certain worker, by what that process says and not by what the database says.

Any worker's login can register any name with any identity. The bouncer restarts a unit or container for a
worker only where this finds the worker in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gangq.host.deaths import Registered, recorded
from gangq.proc import procfs
from gangq.proc.proof import HostIdentity, ProcessIdentity


def lineage(worker: str, identity: Mapping[str, Any]) -> tuple[int, ...] | str:
    """The pid of that worker on this host, then those of its ancestors; else why it is not seen.

    It is the process that it registered (pid in its pid namespace, start time, boot), if that has recorded on this
    host that it is the worker of that name, and has the name that the kernel shows of such a process.
    """
    registered, boot_id = Registered.of(identity), HostIdentity.here().boot_id
    if registered is None or boot_id is None or registered.process.boot_id != boot_id:
        return "its process was not started on this host since its boot"
    processes = procfs.table()
    for entry in processes.values():
        same_start = entry.start_ticks == registered.process.start_ticks
        if entry.alive and same_start and _is(entry.pid, registered.host, registered.process):
            called = _worker_name(entry, registered)
            if called == worker:
                return (entry.pid, *procfs.ancestors(processes, entry.pid))
            what = f"worker {called}" if called else "no gangq worker by its own word"
            return f"process {entry.pid} is {what}"
    return "no process of this host is the one it registered"


def _is(pid: int, host: HostIdentity, process: ProcessIdentity) -> bool:
    """Whether that process has the recorded pid in the recorded namespace."""
    try:
        inner = procfs.status(f"/proc/{pid}").get("NSpid", str(pid)).split()
        # Of its own namespace it need not be asked: a worker is closed to other processes of its user.
        own = len(inner) == 1
        namespace = HostIdentity.here().pid_namespace if own else os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return False
    return namespace == host.pid_namespace and inner[-1:] == [str(process.pid)]


def _worker_name(entry: procfs.Stat, registered: Registered) -> str | None:
    """The name of the worker that this process is; None: it is none.

    A process is renamed by itself alone, and the record is written by its user. So neither another user, nor a
    container that shares a directory with this host, can have both of a process that is no worker.
    """
    try:
        users = procfs.user_ids(entry.pid)
    except OSError:
        return None
    if len(users) != 1:
        return None
    uid = users.pop()
    # First where the process itself sees its directory, which may be in a container or in a /tmp of its unit. Only
    # root can look there.
    own = recorded(registered, uid, f"/proc/{entry.pid}/root") or recorded(registered, uid)
    return own.worker if own is not None and entry.comm == procfs.work_name(own.mark) else None

"""How processes are ended: all of a command, or one that this process has started itself.

What the guardian does not need is imported late.
"""

from __future__ import annotations

import contextlib
import os

from . import cgroup, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Process(Protocol):
        """One that was started here: as much of :class:`subprocess.Popen` as is used of it."""

        pid: int

        def wait(self, timeout: float | None = None) -> int:
            """Wait for its end, and reap it."""


DEATH_S = 2.0
"""How long SIGKILL may take to end a process before nobody waits for it any more."""


def strike_command(
    mark: str, group: str | None, roots: Callable[[dict[int, procfs.Stat]], set[int]]
) -> list[procfs.Stat]:
    """SIGKILL everything of one command, once; those still alive just after that are returned.

    Of it are: what is in its control group ``group``, if it has one; what carries exactly its mark in its
    environment; what ``roots(processes)`` finds in the table of all processes; and all that descends from these. This
    process is spared. Repeat it until it returns nothing twice: a reading of ``/proc`` is not a snapshot.
    """
    inside = set() if group is None else cgroup.kill(group)
    processes = procfs.table()
    ours = (inside & set(processes)) | roots(processes)
    ours = (ours | procfs.descendants(processes, ours)) - {os.getpid()}
    left = procfs.strike([processes[pid] for pid in ours if processes[pid].alive])
    # Not the environment of these: it is read from the memory of its process, which may be stuck in the kernel and
    # have locked that. Whoever reads then waits, too; so these are killed before that of any other is read.
    others = {pid: entry for pid, entry in processes.items() if pid not in ours}
    carriers = procfs.carriers(others, mark)
    carriers = (carriers | procfs.descendants(processes, carriers)) - ours - {os.getpid()}
    return left + procfs.strike([processes[pid] for pid in carriers if processes[pid].alive])


def end_group(process: Process, grace_s: float = 0.0) -> bool:
    """Give a process that was started here ``grace_s`` seconds to end by itself, then SIGKILL the process group that
    it leads. Returns whether it is dead.

    One that SIGKILL does not end within two seconds is stuck in the kernel, or has become another user's. It is left
    behind, with a thread that reaps it if it ends one day.
    """
    import signal
    import subprocess
    import threading

    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            threading.Thread(target=process.wait, name=f"gangq-reap-{process.pid}", daemon=True).start()
            return False
    return True

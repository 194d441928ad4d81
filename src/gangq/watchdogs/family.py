"""Which processes belong to a job: its roots and all below them, without the library's own."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable

from gangq.proc import procfs
from gangq.proc.clock import boottime

_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_RESCAN_S = 30.0
_SETTLED_S = 2.0
OWN_COMMANDS = (b"gangq.gpu.sampling", b"gangq.worker.death_main")
"""Modules that the library runs in processes of their own, below the one that does the work."""


class Family:
    """Which processes are below which, at the cost of one listing of ``/proc`` and the new ones' parents."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, procfs.Stat] = {}
        self._ours: dict[int, tuple[tuple[str, int], bool]] = {}
        """Whose command line has been read, its name and start then, and whether it is the library's own."""
        self._read_all_at = -math.inf

    def members(self, roots: Iterable[int], ignored: Iterable[int], now: float) -> list[int]:
        """The roots and everything below them, without those ignored and what is below those only, and
        without the library's own processes.
        """
        wanted, unwanted = set(roots), set(ignored)
        with self._lock:
            if now - self._read_all_at >= _RESCAN_S:
                # A pid may have been given anew unseen, and its parent with it.
                self._known, self._read_all_at = {}, now
            listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
            # One whose parent has ended is below another now.
            known = {pid: what for pid, what in self._known.items() if {pid, what.ppid} <= listed}
            for pid in listed - known.keys():
                if (what := procfs.stat(pid)) is not None:
                    known[pid] = what
            self._known = known
            self._ours = {pid: said for pid, said in self._ours.items() if pid in listed}
            found = wanted | procfs.descendants(
                known,
                wanted,
                lambda pid: pid not in wanted and (pid in unwanted or self._library(pid)),
            )
        return sorted(pid for pid in found if pid in listed and pid not in unwanted)

    def drivers(self, processes: Iterable[tuple[int, int]]) -> frozenset[tuple[int, int]]:
        """Which of these may drive a device: those whose parent is none of them, and below a program that has
        started one other (a shell, a launcher), that one.
        """
        with self._lock:
            known = self._known
        keys = {key[0]: key for key in processes}
        below: dict[int, list[int]] = {}
        frontier = []
        for pid in keys:
            parent = known[pid].ppid if pid in known else 0
            if parent in keys:
                below.setdefault(parent, []).append(pid)
            else:
                frontier.append(pid)
        found = set()
        while frontier:
            pid = frontier.pop()
            found.add(keys[pid])
            children = below.get(pid, [])
            # One with its parent's name was forked to work for it.
            if len(children) == 1 and pid in known and known[children[0]].comm != known[pid].comm:
                frontier += children
        return frozenset(found)

    def _library(self, pid: int) -> bool:
        """Whether it is one of the library's own, by its command line.

        To read that takes the process's memory map, which one that is stuck in the kernel may hold for ever. So
        it is read of the job's processes only, while they are new (later ones have called exec, if they ever do);
        and of none with a stuck thread.
        """
        what = self._known[pid]
        said = self._ours.get(pid)
        if said is not None and said[0] == (what.comm, what.start_ticks):
            return said[1]
        if _stuck(pid):
            return False
        command = procfs.read(f"/proc/{pid}/cmdline") or b""
        ours = any(module in command for module in OWN_COMMANDS)
        if ours or boottime() - what.start_ticks / _TICK >= _SETTLED_S:
            self._ours[pid] = ((what.comm, what.start_ticks), ours)
        return ours


def _stuck(pid: int) -> bool:
    """Whether a thread of it waits in the kernel and cannot be interrupted."""
    return any(procfs.stat_fields(f"/proc/{pid}/task/{tid}/stat")[:1] == ["D"] for tid in procfs.tids(pid))

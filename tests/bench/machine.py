"""The machine, and who used it during a measurement."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gangq.embedded import Server


def describe(server: Server, versions: list[str]) -> dict[str, Any]:
    """What the numbers depend on, without naming the machine."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M %z"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "postgresql": "{}.{}".format(*server.binaries.version) + f" ({server.binaries.source})",
        "settings": dict(server.settings),
        "python": platform.python_version(),
        "systems": versions,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def fsync_ms(directory: Path, times: int = 15) -> float:
    """How long making 8 KiB durable takes now (median, milliseconds): the floor under every commit, and on a
    shared disk the first thing to drift.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        took = []
        for _ in range(times):
            file.write(bytes(8192))
            began = time.monotonic_ns()
            os.fdatasync(file.fileno())
            took.append((time.monotonic_ns() - began) / 1e6)
    return statistics.median(took)


@dataclass(frozen=True)
class Usage:
    """CPU over a stretch of time: seconds of the workers and of the server, and cores kept busy by others."""

    worker_s: float
    server_s: float
    foreign_cores: float


class CpuMeter:
    """Counts CPU from its making to :meth:`read`. Foreign work is what makes a number worthless."""

    def __init__(self, server: Server, *worker_pids: int) -> None:
        self._server_pid = server.status().pid
        self._worker_pids = worker_pids
        self._before = self._now()

    def _now(self) -> tuple[float, float, float, float, float]:
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        workers = sum(_tree(pid) for pid in self._worker_pids)
        return time.monotonic(), busy, _tree(os.getpid()), _tree(self._server_pid), workers

    def read(self) -> Usage:
        """The usage since then."""
        took, busy, ours, server, worker = (
            after - before for after, before in zip(self._now(), self._before, strict=True)
        )
        # Our own tree holds the worker, and not the server: it was reparented when it was started.
        return Usage(worker, server, max(0.0, (busy - ours - server) / took) if took > 0 else 0.0)


def _tree(pid: int | None) -> float:
    """CPU seconds of a process, all its living descendants, and those of each that were waited for."""
    if pid is None:
        return 0.0
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    total = 0.0
    for process in members:
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total

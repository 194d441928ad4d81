"""Memory of GPUs that have none of their own, and of the container that a worker lives in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from gangq.proc import cgroup


def unified_memory(model: str, uuid: str) -> tuple[int, str]:
    """Return what to register for a GPU that shares the system's memory: MiB and a warning."""
    vram_mb = int(psutil.virtual_memory().total) // 2**20
    return vram_mb, (
        f"{model} ({uuid}) reports no memory of its own, as parts that share the system's memory do: it is "
        f"registered with all {vram_mb} MiB of this host. Declare less with --devices if other work needs it."
    )


@dataclass(frozen=True)
class ContainerMemory:
    """Memory of the control group that a process is in, in bytes.

    `used` leaves out file cache that the kernel would drop first. `limit` is the tightest of the group's and its
    parents' (None: unlimited). `oom_kills` counts processes that the kernel has killed in the group for want of
    memory; `pressure` is the share of the last ten seconds, in percent, in which everything waited for memory.
    Both are None where this kernel does not say. `source` says where the numbers are from: `host` is the whole
    machine, for a process in no group of its own.
    """

    used: int
    limit: int | None
    oom_kills: int | None
    pressure: float | None
    source: Literal["cgroup2", "cgroup1", "host"]


def container_memory(*, proc: Path = Path("/proc"), pid: int | str = "self") -> ContainerMemory:
    """Read the memory of the control group of a process (default: this one). Costs about 0.1 ms.

    Falls back to the whole host where the group's files cannot be read, as in the root group. `proc` is where
    /proc is.
    """
    group = cgroup.find("memory", proc=proc, pid=pid)
    with contextlib.suppress(OSError, ValueError):
        if group is not None:
            return _of_group(group)
    memory = psutil.virtual_memory()
    return ContainerMemory(
        int(memory.total - memory.available), None, None, _pressure(proc / "pressure" / "memory"), "host"
    )


def _of_group(group: cgroup.Group) -> ContainerMemory:
    first = group.version == 1
    usage, cache = ("usage_in_bytes", "total_inactive_file") if first else ("current", "inactive_file")
    # What a group without numbers of its own uses is counted in the nearest parent that has some.
    counted = [Path(folder) for folder in group.folders if Path(folder, f"memory.{usage}").exists()]
    if not counted:
        raise FileNotFoundError(f"memory.{usage}")
    folder = counted[0]
    stat = cgroup.counts(str(folder / "memory.stat"))
    if not stat:
        raise FileNotFoundError("memory.stat")
    used = int((folder / f"memory.{usage}").read_text()) - stat.get(cache, 0)
    return ContainerMemory(
        max(used, 0),
        cgroup.memory_limit(group),
        cgroup.oom_kills(group),
        None if first else _pressure(folder / "memory.pressure"),
        "cgroup1" if first else "cgroup2",
    )


def _pressure(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        row = next(row for row in path.read_text().splitlines() if row.startswith("full "))
        return float(row.split("avg10=")[1].split()[0])
    return None

"""Memory of GPUs that have none of their own, and of the container that a worker lives in."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil


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

    The group is looked up in /proc, never guessed: hosts may mount both versions at once. Falls back to the
    whole host where the group's files cannot be read, as in the root group. `proc` is where /proc is.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        groups = _groups(proc / str(pid) / "cgroup")
        mounts = _mounts(proc / str(pid) / "mountinfo")
        # A controller is in one hierarchy only: where version 1 has memory, version 2 has it not.
        if "memory" in groups:
            return _version_1(*mounts["memory"], groups["memory"])
        return _version_2(*mounts[""], groups[""])
    memory = psutil.virtual_memory()
    return ContainerMemory(
        int(memory.total - memory.available), None, None, _pressure(proc / "pressure" / "memory"), "host"
    )


def _groups(path: Path) -> dict[str, str]:
    """Return the group's path by controller; version 2 is the controller called ""."""
    found: dict[str, str] = {}
    for row in path.read_text().splitlines():
        _, controllers, group = row.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = group
    return found


def _mounts(path: Path) -> dict[str, tuple[Path, str]]:
    """Return where each hierarchy is mounted and which of its groups is mounted there."""
    found: dict[str, tuple[Path, str]] = {}
    for row in path.read_text().splitlines():
        left, _, right = row.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        if kind == "cgroup2":
            found.setdefault("", (Path(mount_point), root))
        elif kind == "cgroup" and "memory" in options.split(","):
            found.setdefault("memory", (Path(mount_point), root))
    return found


def _folder(mount: Path, root: str, group: str) -> Path:
    # In a container /proc may name the group as the host sees it, while only its subtree is mounted.
    inside = group.removeprefix(root) if root != "/" else group
    folder = mount / inside.lstrip("/")
    return folder if ".." not in folder.parts and folder.is_dir() else mount


def _pairs(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (row.split() for row in path.read_text().splitlines())}


def _version_1(mount: Path, root: str, group: str) -> ContainerMemory:
    folder = _folder(mount, root, group)
    stat = _pairs(folder / "memory.stat")
    used = int((folder / "memory.usage_in_bytes").read_text()) - stat.get("total_inactive_file", 0)
    limit = stat.get("hierarchical_memory_limit")
    kills = None
    with contextlib.suppress(OSError):
        kills = _pairs(folder / "memory.oom_control").get("oom_kill")
    # "No limit" is written as the largest number that fits.
    unlimited = limit is None or limit >= 1 << 60
    return ContainerMemory(max(used, 0), None if unlimited else limit, kills, None, "cgroup1")


def _version_2(mount: Path, root: str, group: str) -> ContainerMemory:
    folder = _folder(mount, root, group)
    stat = _pairs(folder / "memory.stat")
    used = int((folder / "memory.current").read_text()) - stat.get("inactive_file", 0)
    limits = []
    for level in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((level / "memory.max").read_text()))
        if level == mount:
            break
    kills = None
    with contextlib.suppress(OSError):
        kills = _pairs(folder / "memory.events").get("oom_kill")
    pressure = _pressure(folder / "memory.pressure")
    return ContainerMemory(max(used, 0), min(limits, default=None), kills, pressure, "cgroup2")


def _pressure(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        row = next(row for row in path.read_text().splitlines() if row.startswith("full "))
        return float(row.split("avg10=")[1].split()[0])
    return None

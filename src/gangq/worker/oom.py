"""Telling a kill by the kernel for want of memory from any other SIGKILL.

Both look the same to a parent. But the kernel counts the former, per memory cgroup, before it sends the signal.

Used by the supervisor, which runs without gangq on its path: nothing here imports gangq.
"""

from __future__ import annotations

_ROOT = "/sys/fs/cgroup"
_SETTLE_S = 1.0


def counter_files(pid: int, root: str = _ROOT) -> list[str]:
    """Where the kernel counts the processes it killed in the memory cgroup of this process, best first.

    Version 2 and version 1, and hosts with both. Inside a container the path that ``/proc`` names may be the
    host's, and what is mounted is the container's own: hence the mount itself after each.
    """
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    v1: list[str] = []
    v2: list[str] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = path.rstrip("/")
        if "memory" in controllers.split(","):
            v1 = [f"{root}/memory{below}/memory.oom_control", f"{root}/memory/memory.oom_control"]
        elif number == "0" and not controllers:
            for mount in (root, f"{root}/unified"):
                v2 += [f"{mount}{below}/memory.events", f"{mount}/memory.events"]
    # Where version 1 has the memory controller, version 2 has no such file.
    return [*v1, *v2]


def kills(files: list[str]) -> int | None:
    """The count, from the first of these files that has one; None: nobody counts here."""
    for name in files:
        try:
            with open(name) as file:
                for line in file:
                    word, _, number = line.partition(" ")
                    if word == "oom_kill":
                        return int(number)
        except (OSError, ValueError):
            continue
    return None


class OomWatch:
    """Whether somebody in the cgroup of a process was killed for want of memory just before it died."""

    def __init__(self, pid: int, root: str = _ROOT) -> None:
        self._files = counter_files(pid, root)
        first = kills(self._files)
        self._known = first
        self._newest = first
        self._newest_at = 0.0

    def look(self, now: float) -> None:
        """Note the count; to be called now and then while all is well.

        What is compared at the end was read a second earlier at least: a worker that is being killed may
        still give a sign of life between the count and its death.
        """
        if now - self._newest_at >= _SETTLE_S:
            self._known, self._newest, self._newest_at = self._newest, kills(self._files), now

    def killed(self) -> bool:
        """Whether the count has risen since."""
        now = kills(self._files)
        return now is not None and self._known is not None and now > self._known

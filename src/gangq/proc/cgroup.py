"""Control groups: what the kernel allows a process, what it counts for it, and how it ends a whole group at once.

Both versions, and hosts with both at once. Where a group is, is looked up in ``/proc``, never guessed. A limit of a
parent holds for all below it, so a group is read together with its parents, up to what is mounted here.

A group of version 2 holds on to whatever is started in it, however that detaches and whatever it clears from its
environment. Where a worker may make groups below its own, each attempt of a command gets one.
"""

from __future__ import annotations

import errno
import os

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest number that fits."""
_PREFIX = "gangq-"


class Group:
    """The group that rules one resource for a process: its ``version``, and its folder and then each parent's."""

    __slots__ = ("folders", "version")

    def __init__(self, version: int, folders: list[str]) -> None:
        self.version = version
        self.folders = folders


def find(controller: str, *, proc: str | os.PathLike[str] = "/proc", pid: int | str = "self") -> Group | None:
    """The group of a process for ``memory`` or ``cpu``; None where it cannot be found.

    A controller is in one hierarchy only: where version 1 has it, version 2 has it not. ``proc`` is where /proc is.
    """
    place = os.path.join(proc, str(pid))
    try:
        groups = _groups(_text(f"{place}/cgroup"))
        mounts = _mounts(_text(f"{place}/mountinfo"), controller)
    except (OSError, ValueError):
        return None
    version = 1 if controller and controller in groups else 2
    group, mount = groups.get(controller if version == 1 else ""), mounts.get(version)
    if group is None or mount is None:
        return None
    return Group(version, _folders(*mount, group))


def memory_limit(group: Group | None) -> int | None:
    """The most memory, in bytes, that the tightest of the group and its parents allows; None: unlimited."""
    if group is None:
        return None
    name = "memory.limit_in_bytes" if group.version == 1 else "memory.max"
    limits = [_number(f"{folder}/{name}") for folder in group.folders]
    if group.version == 1:
        # In a container the limits of parents can be seen nowhere else.
        limits.append(counts(f"{group.folders[0]}/memory.stat").get("hierarchical_memory_limit"))
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED), default=None)


def cpu_limit(group: Group | None) -> float | None:
    """The most processors, a fraction perhaps, that the group and its parents allow; None: unlimited."""
    shares = []
    for folder in group.folders if group is not None else ():
        try:
            if group is not None and group.version == 1:
                words = [_text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            else:
                words = _text(f"{folder}/cpu.max").split()
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):
            continue  # "max", or a root, which has no such file.
        if quota > 0 and period > 0:
            shares.append(quota / period)
    return min(shares, default=None)


def oom_kills(group: Group | None) -> int | None:
    """How many processes the kernel has killed in this group for want of memory; None: there is no count.

    A group without a count of its own is counted in the nearest parent that has one.
    """
    if group is None:
        return None
    name = "memory.oom_control" if group.version == 1 else "memory.events"
    found = (counts(f"{folder}/{name}").get("oom_kill") for folder in group.folders)
    return next((kills for kills in found if kills is not None), None)


def home() -> str | None:
    """The folder of this process's own group, if groups may be made below it; else None.

    So it is in a unit with ``Delegate=yes``, and for root where version 2 is mounted writable. Ending a group at once
    needs Linux 5.14.
    """
    group = find("")
    if group is None:
        return None
    own = group.folders[0]
    tried = f"{own}/{_PREFIX}try-{os.urandom(8).hex()}"
    try:
        # What is mounted may be another group than the one that /proc names; who may not write here cannot move in.
        if str(os.getpid()) not in _text(f"{own}/cgroup.procs").split() or not os.access(
            f"{own}/cgroup.procs", os.W_OK
        ):
            return None
        os.mkdir(tried)
        able = _text(f"{tried}/cgroup.type") == "domain\n" and os.access(f"{tried}/cgroup.kill", os.W_OK)
    except OSError:
        able = False
    remove(tried)
    return own if able else None


def name(mark: str, job: int, token: int) -> str:
    """What the group of one attempt is called."""
    return f"{_PREFIX}{mark}-{job}-{token}"


def enter(folder: str) -> None:
    """Move this process into a group; what it starts from now on is in it too.

    Raises:
        OSError: it may not.
    """
    with open(f"{folder}/cgroup.procs", "w") as file:
        file.write("0")


def members(folder: str) -> set[int]:
    """The pids in a group and in those below it, without zombies; empty where there is no such group."""
    found: set[int] = set()
    for place, _, _ in os.walk(folder):
        try:
            found.update(map(int, _text(f"{place}/cgroup.procs").split()))
        except OSError:
            continue
    return found


def kill(folder: str) -> set[int]:
    """SIGKILL to all processes in a group at one instant, of any user; the pids that are still in it."""
    try:
        with open(f"{folder}/cgroup.kill", "w") as file:
            file.write("1")
    except OSError:
        pass  # It is gone.
    return members(folder)


def remove(folder: str) -> bool:
    """Remove an empty group and those below it; False while a process is in it, or where that cannot be told."""
    if counts(f"{folder}/cgroup.events").get("populated", os.path.exists(folder)):
        return False
    for place, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(place)
        except OSError as problem:
            # EBUSY: a process has entered since. A group below may be another user's: it is empty, which matters.
            return place != folder or problem.errno != errno.EBUSY
    return True


def left_by(mark: str) -> list[str]:
    """The groups of the attempts of one incarnation: below this process's own group, or beside it in its unit."""
    group = find("")
    if group is None:
        return []
    own = group.folders[0]
    around = [own]
    if len(group.folders) > 1:
        above = group.folders[1]
        around += [above, *(f"{above}/{beside}" for beside in _below(above) if f"{above}/{beside}" != own)]
    return [
        f"{place}/{entry}"
        for place in around
        for entry in _below(place)
        if entry.startswith(f"{_PREFIX}{mark}-")
    ]


def holds(pid: int, mark: str) -> bool:
    """Whether a process is in the group of an attempt of this incarnation, or in one below it."""
    try:
        group = _groups(_text(f"/proc/{pid}/cgroup")).get("", "")
    except (OSError, ValueError):
        return False
    return any(part.startswith(f"{_PREFIX}{mark}-") for part in group.split("/"))


def _below(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def counts(path: str) -> dict[str, int]:
    """A file of names and numbers, a pair a line; empty where it cannot be read."""
    try:
        rows = [row.split() for row in _text(path).splitlines()]
        return {name: int(value) for name, value in rows}
    except (OSError, ValueError):
        return {}


def _groups(text: str) -> dict[str, str]:
    """The group's path by controller; version 2 is the controller called ""."""
    found: dict[str, str] = {}
    for row in text.splitlines():
        _, controllers, group = row.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = group
    return found


def _mounts(text: str, controller: str) -> dict[int, tuple[str, str]]:
    """By version, where the hierarchy with this controller is mounted, and which of its groups is mounted there."""
    found: dict[int, tuple[str, str]] = {}
    for row in text.splitlines():
        left, _, right = row.partition(" - ")
        root, mount = left.split()[3:5]
        # At each blank, because the source between them may be empty.
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault(2, (mount, root))
        elif kind == "cgroup" and controller in options.split(","):
            found.setdefault(1, (mount, root))
    return found


def _folders(mount: str, root: str, group: str) -> list[str]:
    # In a container /proc may name the group as the host sees it, while only its subtree is mounted.
    inside = group if root == "/" else group.removeprefix(root)
    parts = [part for part in inside.split("/") if part]
    if ".." in parts or not os.path.isdir(os.path.join(mount, *parts)):
        parts = []
    return [os.path.join(mount, *parts[:depth]) for depth in range(len(parts), -1, -1)]


def _number(path: str) -> int | None:
    try:
        return int(_text(path))
    except (OSError, ValueError):
        return None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()

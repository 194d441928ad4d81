"""The systemd unit or the container that this process runs in: what has to be restarted to restart it."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_CONTAINER = re.compile(r"(?:^|[/\-.:])([0-9a-f]{64})(?:\.scope)?(?:/|$)")
_MANAGER = re.compile(r"^user@\d+\.service$")
_MOUNTED = re.compile(
    r"/containers/([0-9a-f]{64})/|/sandboxes/([0-9a-f]{64})/|/overlay-containers/([0-9a-f]{64})/"
)


@dataclass(frozen=True)
class ServiceUnit:
    """Where a worker runs. ``unit`` is a unit of the system's service manager and ``user_unit`` one of a user's
    (``gangq-worker@0.service``), of which this process is the main one; ``container`` the 64 digits by which
    docker, podman or a kubelet knows it. None: not so, or not visible from inside.
    """

    unit: str | None = None
    user_unit: str | None = None
    container: str | None = None


def service_unit(
    environ: Mapping[str, str] | None = None, *, proc: Path = Path("/proc"), pids: tuple[int, ...] = ()
) -> ServiceUnit:
    """Of this process. ``pids`` [this process and its parent] are those that may be the main one of a unit: a
    supervisor is, its worker is not.
    """
    environ = os.environ if environ is None else environ
    text = _read(proc / "self" / "cgroup")
    paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
    container = _first(_CONTAINER, paths) or _mounted(_read(proc / "self" / "mountinfo"))
    if container is None and (proc.parent / ".dockerenv").exists():
        # Its own cgroup namespace, and a driver that shows no path: the name of the host is the short id,
        # unless another one was set.
        name = socket.gethostname()
        container = name if re.fullmatch(r"[0-9a-f]{12}", name) else None
    if container is not None or not _is_main(environ, pids or (os.getpid(), os.getppid())):
        return ServiceUnit(container=container)
    # Version 2, and on hosts with both the tree that systemd keeps for itself, say the same.
    for path in paths:
        parts = path.split("/")
        services = [part for part in parts if part.endswith(".service") and not _MANAGER.match(part)]
        if services:
            of_user = any(_MANAGER.match(part) for part in parts)
            return ServiceUnit(**{"user_unit" if of_user else "unit": services[-1]})
    return ServiceUnit()


def _is_main(environ: Mapping[str, str], pids: tuple[int, ...]) -> bool:
    """Whether the unit around this process is its own: a terminal, or a program that starts workers, is in a
    unit as well, and to restart that would end more than a worker.
    """
    told = environ.get("SYSTEMD_EXEC_PID")
    if told is not None:
        return told.isdigit() and int(told) in pids
    # systemd before 248 does not say which process it started.
    return "INVOCATION_ID" in environ


def _first(pattern: re.Pattern[str], texts: list[str]) -> str | None:
    found = [match for text in texts if (match := pattern.search(text))]
    return found[0].group(1) if found else None


def _mounted(mountinfo: str) -> str | None:
    """The id in the path of a file that the container engine mounts into every container."""
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        if len(fields) > 4 and fields[4] in ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf"):
            match = _MOUNTED.search(fields[3])
            if match:
                return next(group for group in match.groups() if group)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

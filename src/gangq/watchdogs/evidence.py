"""What is written down before a job is ended: where every thread stood, what it held, what had been seen.

Bounded in time and in size. Reading ``/proc`` of a process that is stuck in the kernel can itself get stuck, so
it happens in a thread of its own, and what is there when the time is up is what there is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.proc import procfs
from gangq.proc.within import within
from gangq.watchdogs import waits

if TYPE_CHECKING:
    from gangq.watchdogs.findings import Trip

LIMIT_S = 1.0
_STACK_CHARS = 32_000
_TAIL_CHARS = 8_000
_MOST_THREADS = 64
_MOST_PROCESSES = 16
_DEVICE_PATHS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def collect(
    pids: Callable[[], Iterable[int]] | None = None,
    *,
    own: bool = False,
    trip: Trip | None = None,
    log_tail: Callable[[], str | bytes] | None = None,
    directory: Path | None = None,
) -> dict[str, Any]:
    """Return evidence as a plain object that is JSON, after at most a second.

    ``trip`` with what it was judged by, as far as that is JSON. With ``own`` the stacks of all
    threads of this process, and this process among ``pids``; of each of these its threads with state, wait
    channel and system call, and the device files it has open. ``place``, ``waits_for`` and ``handler`` are what
    `waits` says of the handler of this process (``own``) or of ``pids``; a handler in a process of its own tells its
    stacks through the worker's ``directory``. Never raises: what could not be had in
    time is named in ``incomplete``.
    """

    def named_pids() -> list[int]:
        return [] if pids is None else list(pids())

    def processes() -> dict[str, Any]:
        wanted = list(dict.fromkeys([*([os.getpid()] if own else []), *named_pids()]))
        return {"processes": [_process(pid) for pid in wanted[:_MOST_PROCESSES]]}

    def waited() -> dict[str, Any]:
        if own:
            return waits.of_handler().as_json()
        seen = waits.of_processes(named_pids(), directory)
        return {**seen.as_json(), **({"stacks": seen.stacks} if seen.stacks else {})}

    steps: dict[str, Callable[[], dict[str, Any]]] = {}
    if trip is not None:
        steps["trip"] = trip.as_json
    if own:
        steps["stacks"] = lambda: {"stacks": stacks()}
    if log_tail is not None:
        steps["log_tail"] = lambda: {"log_tail": _text(log_tail(), _TAIL_CHARS)}
    steps["waits"] = waited
    steps["processes"] = processes

    found: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    missing = set(steps)

    def gather() -> None:
        for name, step in steps.items():
            try:
                found.update(_plain(step()))
            except Exception as problem:
                found[name] = f"could not be had: {problem!r}"
            missing.discard(name)

    # Without a thread (a full pids cgroup) there is no limit to be kept: then all of it is missing.
    within(LIMIT_S, gather, "gangq-evidence")
    # That thread may go on.
    return {**found, **({"incomplete": sorted(missing)} if missing else {})}


def stacks() -> str:
    """Where every Python thread of this process stands, as text."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return _text(file.read(), _STACK_CHARS)


def _process(pid: int) -> dict[str, Any]:
    command = " ".join(procfs.words(pid))
    tids = procfs.tids(pid)
    if not tids:
        return {"pid": pid, "gone": True}
    return {
        "pid": pid,
        "command": command[:500],
        "threads": procfs.threads(pid, _MOST_THREADS),
        "threads_in_all": len(tids),
        "devices_open": _devices_open(pid),
    }


def _devices_open(pid: int) -> dict[str, str]:
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith(_DEVICE_PATHS):
                    found[fd] = target
    return found


def _text(raw: str | bytes, most: int) -> str:
    """Without NULs, which PostgreSQL does not store, and the end of it where it is too long."""
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    return text.replace("\0", "\ufffd")[-most:]


def _plain(value: Any) -> Any:
    """The same as JSON knows it: strange objects as text, NaN and infinity too."""

    def clean(part: Any) -> Any:
        if isinstance(part, dict):
            return {_text(str(key), 200): clean(item) for key, item in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(item) for item in part]
        if isinstance(part, str):
            return _text(part, _STACK_CHARS)
        if isinstance(part, float) and part - part != 0:
            return repr(part)
        return part

    return json.loads(json.dumps(clean(value), default=str))

"""How a command's guardian is started, and what is said when that or the command's own start fails."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.errors import CommandStartError
from gangq.proc import cgroup, killing, procfs
from gangq.proc.clock import boottime

if TYPE_CHECKING:
    from gangq.worker.forkserver import Forked, ForkServer

log = logging.getLogger("gangq.worker.launch")

_GUARDIAN = str(Path(procfs.__file__).with_name("guardian.py"))
_READ = 1 << 16


def launch(
    spec: dict[str, Any], timeout_s: float, forks: ForkServer | None = None
) -> tuple[socket.socket, subprocess.Popen[bytes] | Forked | None, dict[str, Any], bytes]:
    """Start a guardian, hand it the specification, wait for its first event (and what came with it).

    ``forks``: the process of which it and the handler are forks; None: it executes a command.
    """
    sock, theirs = socket.socketpair()
    sock.settimeout(timeout_s)
    process = None
    since = int(boottime() * os.sysconf("SC_CLK_TCK"))
    begun: set[int] = set()
    try:
        with theirs:
            process = _spawn(theirs, spec["mark"]) if forks is None else forks.fork(theirs)
        sock.sendall(json.dumps(spec).encode() + b"\n")
        data = b""
        while b"\n" not in data:
            piece = sock.recv(_READ)
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "its guardian ended before the command started")
            data += piece
        line, _, rest = data.partition(b"\n")
        answer = json.loads(line)
    except OSError as problem:
        answer = {"event": "failed", "stage": "guardian", "errno": problem.errno, "text": str(problem)}
        if isinstance(problem, TimeoutError):
            answer |= {"stage": "timeout", "text": f"not started within {timeout_s:g} s"}
        rest = b""
        if process is not None:
            begun = procfs.descendants(procfs.table(), {process.pid})
            process.kill()
    if process is not None and answer["event"] != "started":
        # Not for ever: its log may be on a file system that hangs.
        killing.end_group(process, killing.DEATH_S)
        _end_command(spec, begun, since)
    sock.setblocking(False)
    return sock, process, answer, rest


def _end_command(spec: dict[str, Any], begun: set[int], since: int) -> None:
    """Kill what the guardian of a failed start has left: its command may have begun all the same, and have forked."""
    sweep, until = Sweep(spec, begun, since), boottime() + killing.DEATH_S
    while (left := sweep.once()) is not None:
        if boottime() > until:
            log.error("command_stuck", extra={"mark": spec["mark"], "stuck": [entry.pid for entry in left]})
            return


class Sweep:
    """Kills what is left of a command whose guardian is dead, in passes.

    Without the subreaper this rests on what can be found: the command's control group where it has one, its process
    group and session, its mark, and whatever descends from those. Two clean passes in a row, because a reading of
    ``/proc`` is not a snapshot.
    """

    def __init__(self, spec: dict[str, Any], leaders: set[int], since: int) -> None:
        """As :func:`_grouped_or_adopted` says of ``leaders`` and ``since``."""
        self._mark: str = spec["mark"]
        self._group: str | None = spec["cgroup"]
        self._leaders = leaders
        self._since = since
        self._clean_passes = 0

    def once(self) -> list[procfs.Stat] | None:
        """What was found; None once two passes in a row have found nothing."""
        left = killing.strike_command(
            self._mark,
            self._group,
            lambda processes: _grouped_or_adopted(processes, self._leaders, self._since),
        )
        empty = self._group is None or cgroup.remove(self._group)
        self._clean_passes = 0 if left or not empty else self._clean_passes + 1
        return None if self._clean_passes >= 2 else left


def _grouped_or_adopted(processes: dict[int, procfs.Stat], leaders: set[int], since: int) -> set[int]:
    """What is in the process group or session of a command, and what the supervisor got from its dead guardian:
    whatever the command has detached, without mark or group.

    Every other guardian keeps its own; what was started before ``since`` (clock ticks since boot) is not of it.
    """
    above = processes.get(os.getppid())
    supervisor = above.pid if above is not None and above.comm == procfs.SUPERVISOR_NAME else None
    return {
        entry.pid
        for entry in processes.values()
        if entry.start_ticks >= since
        and (entry.pgrp in leaders or entry.session in leaders or entry.ppid == supervisor)
    }


def _spawn(theirs: socket.socket, mark: str) -> subprocess.Popen[bytes]:
    # Little environment: nothing of the worker's (a DSN, say) has to lie around in one more process.
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", _GUARDIAN, str(theirs.fileno())],
        env={**env, procfs.MARK_VARIABLE: mark},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )


def start_error(answer: dict[str, Any], spec: dict[str, Any]) -> CommandStartError:
    """What a ``failed`` event means to the person who reads it."""
    stage, code = answer["stage"], answer["errno"] or 0
    argv0, cwd = spec["argv"][0], spec["cwd"]
    path = spec["env"].get("PATH")
    advice = {
        "cwd": "create that directory on this host, or submit with a cwd that every host has",
        "log": f"its log is {spec['log_path']!r}: check that directory's existence, owner and free space",
        "deadline": "the worker's lease was about to end; the job will be offered again",
        "timeout": f"one of its directory, its log {spec['log_path']!r} and PATH={path!r} is on a file system that "
        "does not answer, or this host is overloaded",
        "guardian": "check this host's limits on processes and memory (ulimit -u, pids.max, free)",
        "exec": f"programs are looked up in the job's own PATH={path!r}; a relative path starts at its cwd",
    }[stage]
    if stage == "exec" and code == errno.EACCES:
        advice = "make it executable (chmod +x), or put its interpreter first in the command"
    if stage == "exec" and code == errno.ENOEXEC:
        advice = "it has no #! line: add one, or put its interpreter first in the command"
    # Of a program looked for in many places, the text names only the last place.
    reason = os.strerror(code) if stage == "exec" and code else answer["text"]
    message = f"cannot start {argv0!r} in {cwd!r}: {reason}; {advice}"
    return CommandStartError(message, argv0=argv0, cwd=cwd, stage=stage, code=code)

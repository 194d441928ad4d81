"""How a command's guardian is started, and what is said when that or the command's own start fails."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.errors import CommandStartError
from gangq.proc import procfs

if TYPE_CHECKING:
    from gangq.worker.forkserver import Forked, ForkServer

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
        rest = b""
        if process is not None:
            process.kill()  # And with it, by PDEATHSIG, the command that it may just have forked.
    if process is not None and answer["event"] != "started":
        process.wait()
    sock.setblocking(False)
    return sock, process, answer, rest


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

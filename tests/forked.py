"""Processes forked from one that has imported what a worker imports.

To start Python and to import these modules takes 0.25 s of a processor, and the tests start hundreds of workers. So
each process of pytest has one server that imports them and then forks. `gangq worker` itself is started by the tests
of the command line and of the supervisor.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_REQUEST_BYTES = 128 << 10

_SERVER = f"""
import encodings.idna, gc, json, os, secrets, select, signal, socket, sys
import gangq.decider.passes, gangq.schema, gangq.worker.shutdown
from gangq.worker import main, registration

def request():
    '''What to run, in a new child. The server itself never returns from here.'''
    asked = socket.socket(fileno=int(sys.argv.pop()))
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    children = {{}}
    while True:
        ready, _, _ = select.select([asked, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            while children:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                ended = children.pop(pid)
                os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ended)
        if asked not in ready:
            continue
        data, (output, ended), _, _ = socket.recv_fds(asked, {_REQUEST_BYTES}, 2)
        if not data:
            os._exit(0)
        pid = os.fork()
        if pid:
            children[pid] = ended
            os.close(output)
            asked.send(str(pid).encode())
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in (output, ended, *children.values()):
            os.close(fd)
        for channel in (asked, woken, wakes):
            channel.close()
        made = json.loads(data)
        os.chdir(made["directory"])
        os.environ.clear()
        os.environ.update(made["environ"])
        return made

gc.collect()
gc.freeze()
made = request()
# Drawn when the module is imported: each process has its own.
registration.PROCESS_MARK = main.PROCESS_MARK = secrets.token_hex(4)
exec(compile(made["script"], "<string>", "exec"), {{"__name__": "__main__", "options": made["options"]}})
"""


class Forked:
    """A child of the server, with what the tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None as long as it runs."""
        with self._lock:
            if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
                self.returncode = int(os.read(self._ended, 16))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code."""
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        # Not sooner: several threads may wait for it.
        os.close(self._ended)


class _Server:
    """Forks on request; ends when this process does."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno())],
                env={key: value for key, value in os.environ.items() if not key.startswith(("GANGQ_", "PG"))},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._lock = threading.Lock()
        atexit.register(self.close)

    def fork(self, request: Mapping[str, Any], output: int) -> Forked:
        ended, told = os.pipe()
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], [output, told])
            finally:
                os.close(told)
            answer = self._channel.recv(32)
        assert answer, "the server of forked processes has ended"
        return Forked(int(answer), ended)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(10)


_server = functools.cache(_Server)


def fork(
    script: str, options: Mapping[str, Any], environ: Mapping[str, str], directory: Path, output: int
) -> Forked:
    """Run `script` as `python -c` would, with a variable `options`; `output` is the descriptor that it prints to."""
    request = {"script": script, "options": options, "environ": environ, "directory": str(directory)}
    return _server().fork(request, output)

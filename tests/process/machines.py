"""Workers as an installation has them: `gangq worker` under its supervisor, started again when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

_LOOKS_EVERY_S = 0.1


def start_worker(
    dsn: str,
    directory: Path,
    name: str,
    *arguments: str,
    log: IO[bytes],
    inherited: Mapping[str, str] = os.environ,
    **environ: str,
) -> subprocess.Popen[bytes]:
    """Start ``gangq worker`` in this directory; it logs to ``log``. The process is its supervisor."""
    return subprocess.Popen(
        [sys.executable, "-m", "gangq", "worker", *arguments, "--name", name],
        env={**inherited, "GANGQ_DSN": dsn, **environ},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )


@contextmanager
def supervised_worker(
    dsn: str, directory: Path, name: str, *arguments: str, **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The same for the length of a block. At its end the log is printed."""
    path = directory / f"{name}.log"
    with path.open("ab") as log:
        process = start_worker(dsn, directory, name, *arguments, log=log, **more)
    try:
        yield process
    finally:
        end(process)
        print(f"---- {name} ended with {process.returncode}\n{path.read_text()[-4000:]}")


class Machine:
    """One worker and its supervisor; `codes`: with which codes it has ended so far."""

    def __init__(
        self,
        name: str,
        host: str,
        dsn: str,
        directory: Path,
        *options: str,
        restart_s: float = 0.5,
        **environ: str,
    ) -> None:
        self.name, self.host = name, host
        self.codes: list[int] = []
        self.log = directory / f"{name}.log"
        self._log = self.log.open("ab")
        self._dsn, self._directory, self._environ = dsn, directory, environ
        self._options = ("--host", host, "--address", "127.0.0.1", *options)
        self._restart_s = restart_s
        self._ended_at: float | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return start_worker(
            self._dsn, self._directory, self.name, *self._options, log=self._log, **self._environ
        )

    def worker(self) -> psutil.Process:
        """The worker itself; `process` is its supervisor."""
        (worker,) = psutil.Process(self.process.pid).children()
        return worker

    def look(self) -> None:
        """Start it again once it has been gone for as long as the service manager waits."""
        code = self.process.poll()
        if code is None:
            return
        if self._ended_at is None:
            self.codes.append(code)
            self._ended_at = time.monotonic()
        if time.monotonic() >= self._ended_at + self._restart_s:
            self._ended_at = None
            self.process = self._start()

    def end(self) -> None:
        end(self.process)
        self._log.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell it to end; kill it when it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def kept_running(machines: Sequence[Machine]) -> Iterator[None]:
    """Do what a service manager does for these machines, and end them all at the end."""
    stop = threading.Event()

    def restarter() -> None:
        while not stop.wait(_LOOKS_EVERY_S):
            for machine in machines:
                machine.look()

    thread = threading.Thread(target=restarter, name="restarter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10)
        for machine in machines:
            machine.end()

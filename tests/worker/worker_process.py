"""Real worker processes for the tests, and waiting for conditions instead of for luck."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from forked import fork
from gangq.client import Client

T = TypeVar("T")

FREEZER = Path("/sys/fs/cgroup/freezer")
can_freeze = pytest.mark.skipif(
    not os.access(FREEZER, os.W_OK) or os.geteuid() != 0,
    reason="an unkillable process is made with the version 1 cgroup freezer, which needs root",
)

_LOOKS_EVERY_S = 0.05
"""A look at a job costs PostgreSQL 2 ms of a processor, mostly to plan it: every 20 ms that was a fifth of it all."""

_BOOT = """
import atexit, gc, logging, sys
atexit.register(gc.freeze)  # as `gangq worker` does
logging.basicConfig(
    level=logging.DEBUG, format="%(asctime)s %(threadName)s %(name)s %(levelname)s %(message)s"
)
logging.getLogger("psycopg").setLevel(logging.WARNING)
app = target = None
if options.pop("with_tasks"):
    sys.path.insert(0, options.pop("path"))
    import tasks
    app, target = tasks.app, "tasks:app"
from gangq.worker.shutdown import end_soon
from gangq.worker.main import run_worker
code = run_worker(app, target=target, **options)
end_soon(code)
sys.exit(code)
"""

_TASKS = """
import os, sys, time, json, threading, signal, subprocess
from pathlib import Path
import gangq
from gangq.app import App
from gangq.errors import Stopped
app = App(os.environ["TEST_DSN"])
HERE = Path(__file__).parent
"""


def short_leases(client: Client, **more: Any) -> None:
    """Make everything happen within a test's patience."""
    settings: dict[str, Any] = {
        "lease_s": 6,
        "lease_margin_s": 1,
        "heartbeat_s": 0.5,
        "grace_s": 1,
        "ack_timeout_s": 4,
        "claim_deadline_s": 5,
        "gang_backoff_s": 0.1,
        **more,
    }
    client.configure(**settings)
    client.set_queue(name="default", backoff_s=0.1, backoff_max_s=0.2)


def eventually(look: Callable[[], T], what: str | Callable[[], str], timeout: float = 20.0) -> T:
    """Return what `look` finds once it is true; AssertionError, naming `what`, when it never is. A function is called
    for that only then.
    """
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(_LOOKS_EVERY_S)
    raise AssertionError(f"did not happen within {timeout} s: {what() if callable(what) else what}")


def until_state(client: Client, job_id: int, *states: str, timeout: float = 20.0) -> Any:
    """The job once it is in one of these states."""
    eventually(
        lambda: client.job(id=job_id).state in states,
        lambda: f"job {job_id} is {' or '.join(states)}; it is {client.job(id=job_id)}",
        timeout,
    )
    return client.job(id=job_id)


@contextmanager
def frozen(pid: int) -> Iterator[Callable[[], object]]:
    """With this process beyond SIGKILL, until what is given is called."""
    cage = FREEZER / f"gangq-test-{os.getpid()}"
    cage.mkdir()
    state = cage / "freezer.state"
    try:
        (cage / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        eventually(lambda: state.read_text().strip() == "FROZEN", "it is frozen")
        yield lambda: state.write_text("THAWED")
    finally:
        state.write_text("THAWED")
        eventually(lambda: not (cage / "cgroup.procs").read_text(), "it has ended")
        cage.rmdir()


class WorkerProcess:
    """One worker as a process of its own."""

    def __init__(self, dsn: str, directory: Path, name: str, options: dict[str, Any], tasks: bool) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        given = {"name": name, "dsn": dsn, "with_tasks": tasks, "devices": "none", **options}
        if tasks:
            given["path"] = str(directory)
        with self.log_path.open("ab") as out:
            self.process = fork(_BOOT, given, {**os.environ, "TEST_DSN": dsn}, directory, out.fileno())

    @property
    def log(self) -> str:
        """What it has logged and its handlers have printed."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def exit_code(self, timeout: float = 20.0) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"worker {self.name} does not end:\n{self.log}") from None


class Fleet:
    """Starts workers, and leaves none behind."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self._dsn = dsn
        self.directory = directory
        self.started: list[WorkerProcess] = []
        self._tasks = False

    def define(self, text: str) -> None:
        """The tasks its workers run; `app` and the usual imports are there."""
        (self.directory / "tasks.py").write_text(_TASKS + text)
        self._tasks = True

    def start(self, name: str = "w1", **options: Any) -> WorkerProcess:
        """Start a worker; it is not registered yet when this returns."""
        worker = WorkerProcess(self._dsn, self.directory, name, options, self._tasks)
        self.started.append(worker)
        return worker

    def close(self) -> None:
        """Kill what is left, and show what it said if a test has failed."""
        for worker in self.started:
            if worker.process.poll() is None:
                worker.signal(signal.SIGKILL)
            worker.process.wait(10)
            print(f"---- {worker.name} ended with {worker.process.returncode}\n{worker.log}")


@contextmanager
def fleet_of(dsn: str, directory: Path) -> Iterator[Fleet]:
    """A `Fleet` for the length of a test."""
    fleet = Fleet(dsn, directory)
    try:
        yield fleet
    finally:
        fleet.close()

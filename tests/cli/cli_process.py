"""The command line as its users start it: in this process for speed, or as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner, Result

from gangq.cli import main

T = TypeVar("T")
GANGQ = [sys.executable, "-m", "gangq"]


def gangq(dsn: str | None, *args: object, stdin: str | None = None, **env: str) -> Result:
    """Run a command in this process, with this GANGQ_DSN."""
    given: dict[str, str | None] = {"GANGQ_DSN": dsn, "NO_COLOR": "1", **env}
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin, env=given)


def ok(dsn: str | None, *args: object, **more: Any) -> str:
    """Run a command that has to succeed; return its standard output."""
    result = gangq(dsn, *args, **more)
    assert result.exit_code == 0, (args, result.stdout, result.stderr, result.exception)
    return result.stdout


def answers(dsn: str | None, *args: object, **more: Any) -> list[dict[str, Any]]:
    """Run a command with --json; return the objects it printed."""
    return objects(ok(dsn, *args, "--json", **more))


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in `text`, one a line."""
    found = [json.loads(line) for line in text.splitlines()]
    assert all(isinstance(one, dict) for one in found), text
    return found


def environment(dsn: str | None, **more: str) -> dict[str, str]:
    """The environment of a process that uses this database."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GANGQ_", "PG"))}
    return {**kept, **({"GANGQ_DSN": dsn} if dsn else {}), "PYTHONUNBUFFERED": "1", **more}


def finished(dsn: str | None, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own to its end."""
    return subprocess.run(
        [*GANGQ, *map(str, args)],
        env=environment(dsn, **env),
        capture_output=True,
        text=True,
        timeout=60,
    )


class Running:
    """A command that runs as a process of its own; its output goes to files."""

    def __init__(self, environ: dict[str, str], directory: Path, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self._out, self._err = directory / f"{name}.out", directory / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*GANGQ, *map(str, args)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
            )

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """What it has said so far."""
        return self._err.read_text()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Ctrl-C, or another signal."""
        self.process.send_signal(number)

    def code(self, timeout: float = 20) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self.out}\n{self.err}") from None

    def until(self, look: Callable[[], T], what: str, timeout: float = 20) -> T:
        """Wait for a condition; on failure show what it has said."""
        try:
            return eventually(look, what, timeout)
        except AssertionError as e:
            raise AssertionError(f"{e}\n{self.name}:\n{self.out}\n{self.err}") from None


@contextmanager
def running(dsn: str | None, directory: Path, name: str, *args: object, **env: str) -> Iterator[Running]:
    """A command that runs as long as the block, and is killed if it outlives it."""
    started = Running(environment(dsn, **env), directory, name, args)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        started.process.wait(10)


@contextmanager
def worker(dsn: str, directory: Path, name: str, *args: object) -> Iterator[Running]:
    """A registered worker without devices; told to stop at the end."""
    with running(dsn, directory, name, "worker", "--name", name, "--devices", "none", *args) as started:
        started.until(
            lambda: (
                started.process.poll() is not None
                or any(w["name"] == name and w["state"] == "live" for w in answers(dsn, "workers"))
            ),
            f"worker {name} is registered",
        )
        yield started
        if started.process.poll() is None:
            started.interrupt(signal.SIGTERM)
            started.code()


def eventually(look: Callable[[], T], what: str, timeout: float = 20) -> T:
    """Return what `look` finds once it is true; AssertionError, naming `what`, when it never is."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout} s: {what}")

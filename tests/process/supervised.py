"""Stand-in workers under the true supervisor, and what a test has to know of their end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gangq.proc import procfs, supervisor
from worker.worker_process import eventually

SUPERVISOR = [sys.executable, "-I", "-S", supervisor.__file__]
STAND_IN = str(Path(__file__).with_name("stand_in.py"))
AS_PID_1 = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
SILENCE_S = 2.0
LATE_S = 0.3
"""How long after the limit a frozen worker may still live."""
PATIENCE_S = 30.0

_LIBRARY = (
    "#include <time.h>\nvoid park(void) { struct timespec t = {3600, 0}; for (;;) nanosleep(&t, &t); }\n"
)


class Supervised:
    """A supervisor, the worker under it, and their words."""

    def __init__(self, directory: Path, library: str, argv: list[str], environ: dict[str, str]) -> None:
        self.marks_path = directory / "marks"
        self.log_path = directory / "log"
        self.mark = uuid.uuid4().hex
        with self.log_path.open("wb") as out:
            self.process = subprocess.Popen(
                argv,
                env={
                    **os.environ,
                    "TEST_MARKS": str(self.marks_path),
                    "TEST_LIBRARY": library,
                    "GANGQ_MARK": self.mark,
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def marks(self, word: str = "now") -> list[float]:
        """The instants (monotonic) of these marks, of whole lines."""
        try:
            lines = self.marks_path.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [float(line.split()[1]) for line in lines if line.endswith("\n") and line.split()[0] == word]

    def until_marked(self, word: str = "now", times: int = 1) -> float:
        """Wait for the mark that it sets before it does what it is for; its instant."""

        def look() -> list[float]:
            assert self.process.poll() is None or len(self.marks(word)) >= times, self.log
            return self.marks(word)[times - 1 :]

        return eventually(look, f"mark {word}", PATIENCE_S)[0]

    def worker(self) -> procfs.Stat:
        """The worker itself, as seen from this pid namespace."""
        table = procfs.table()
        found = [
            entry
            for pid in procfs.descendants(table, {self.process.pid}) | {self.process.pid}
            if (entry := table[pid])
            and b"stand_in" in command_line(pid)
            and b"supervisor.py" not in command_line(pid)
        ]
        return found[0]

    def worker_died_at(self, timeout: float = PATIENCE_S) -> float:
        """Wait for the worker's death; its instant."""
        handle = os.pidfd_open(self.worker().pid)
        try:
            assert select.select([handle], [], [], timeout)[0], f"the worker lives\n{self.log}"
            return time.monotonic()
        finally:
            os.close(handle)

    def exit_code(self, timeout: float = PATIENCE_S) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the supervisor does not end:\n{self.log}") from None

    def left(self) -> list[procfs.Stat]:
        """What is alive of everything that was started below it."""
        table = procfs.table()
        return [table[pid] for pid in procfs.carriers(table, self.mark) if table[pid].alive]

    def resident_kb(self) -> int:
        """Resident memory of the supervisor, kB."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
        raise AssertionError("it has ended")

    def close(self) -> None:
        for entry in self.left():
            procfs.send(entry, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        print(f"---- ended with {self.process.returncode}\n{self.log}")


Start = Callable[..., Supervised]


@contextmanager
def starter(directory: Path, library: str) -> Iterator[Start]:
    """Start stand-ins; none survives the test."""
    started: list[Supervised] = []

    def start(
        what: str,
        *arguments: object,
        silence_s: float = SILENCE_S,
        start_s: float = 60.0,
        prefix: tuple[str, ...] = (),
        supervised: bool = True,
        **environ: str,
    ) -> Supervised:
        place = directory / str(len(started))
        place.mkdir()
        worker = [sys.executable, STAND_IN, what, *map(str, arguments)]
        around = [*SUPERVISOR, "--silence", str(silence_s), "--start", str(start_s), "--"]
        argv = [*prefix, *(around if supervised else []), *worker]
        started.append(Supervised(place, library, argv, environ))
        return started[-1]

    try:
        yield start
    finally:
        for one in started:
            one.close()


def build_library(directory: Path) -> str:
    """The library that holds the GIL for ever; skips where nothing can compile it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: a library that holds the GIL cannot be built")
    source, built = directory / "park.c", directory / "park.so"
    source.write_text(_LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return str(built)


def needs_namespaces() -> None:
    """Skip where this user cannot make pid namespaces."""
    if shutil.which("unshare") is None or subprocess.run([*AS_PID_1, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid does not work here: needs root, or user namespaces")


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""

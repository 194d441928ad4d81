"""The table of ``docs/manual/watchdogs.md``, row by row: what is honest lives, what hangs is ended, and when.

Real programs beside a device that reads a trusted 0 % (or none at all), with limits of seconds, all at once. With
GANGQ_SOAK=1 20 times.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import GPU, Record, Sampler
from judged import CONFIRM_S, TIMEOUT_S

from gangq.proc.clock import boottime
from gangq.watchdogs import StallWatchdog, WorkSensors

ROUNDS = 20 if os.environ.get("GANGQ_SOAK", "0") not in ("", "0") else 1
LIVES_S = 4.5 * TIMEOUT_S
"""After so much silence a job that has not been tripped is one that lives: it has ten timeouts."""

HANDLERS = {
    "computes": "lives",
    "sorts": "lives",
    "computes_without_the_gil": "lives",
    "computes_in_a_thread": "lives",
    "computes_in_a_child": "lives",
    "sleeps_in_a_loop": "waits",
    "sleeps_once": "waits",
    "polls_a_lock": "waits",
    "reads_slowly": "waits",
    "waits_for_a_file_lock": "waits",
    "sleeps_in_a_loop and says so": "lives",
    "waits_for_a_file_lock and says so": "lives",
    "deadlocks": "idle",
    "deadlocks_beside_a_ticking_thread": "idle",
    "deadlocks_beside_a_drivers_thread": "idle",
    "receives_nothing": "idle",
    "spins_in_one_call": "idle",
    "polls_in_one_call": "idle",
}
WITHOUT_DEVICES = {
    "computes": "lives",
    "spins_in_one_call": "lives",
    "sleeps_in_a_loop": "waits",
    "waits_for_a_file_lock": "waits",
    "deadlocks": "idle",
    "receives_nothing": "idle",
}
SPINS = f"{sys.executable} -S -c 'while True: pass'"
LOCKS = "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"
DRIVER = """
import ctypes, os, threading
threading.Thread(target=ctypes.CDLL(os.environ["TEST_LIBRARY"]).drive, daemon=True).start()
"""
COMMANDS = {
    "children compute": (["sh", "-c", f"{SPINS} & {SPINS} & wait"], "lives"),
    "sleeps once": (["sleep", "600"], "waits"),
    "polls in a loop": ([sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(0.3)"], "waits"),
    "spins": (["sh", "-c", "while :; do :; done"], "idle"),
    "spins below a shell": (["sh", "-c", f"{SPINS}; true"], "idle"),
    "deadlocks": ([sys.executable, "-S", "-c", LOCKS], "idle"),
    "deadlocks beside a driver's thread": ([sys.executable, "-S", "-c", f"{DRIVER}\n{LOCKS}"], "idle"),
    "reads from nobody": (["cat"], "idle"),
}
NEED_LIBRARY = (
    "polls_in_one_call",
    "deadlocks_beside_a_drivers_thread",
    "deadlocks beside a driver's thread",
)
EXPECTED = {"idle": (1.0, 2.9), "waits": (3.0, 4.4)}
"""After how many timeouts."""

_LIBRARY = """
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>
void poll_for_ever(void) { for (;;) usleep(1000); }
void drive(void) { prctl(PR_SET_NAME, "cuda-EvtHandlr"); for (;;) poll(0, 0, 25); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return ""
    directory = tmp_path_factory.mktemp("library")
    source, built = directory / "poll.c", directory / "poll.so"
    source.write_text(_LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return str(built)


@contextlib.contextmanager
def processes(commands: dict[str, list[str]], **environ: str) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Each in a group of its own, which does not survive."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    silent, never = os.pipe()
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    try:
        for name, command in commands.items():
            started[name] = subprocess.Popen(
                command,
                stdin=silent,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path, **environ},
                start_new_session=True,
            )
        yield started
    finally:
        os.close(silent)
        os.close(never)
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def as_expected(row: str, expected: str, found: str) -> None:
    """Require that a job was taken for what it is, and in time; ``found`` is ``reason timeouts message``."""
    reason, _, rest = found.partition(" ")
    assert reason == expected, f"{row}: {found}"
    if expected != "lives":
        least, most = EXPECTED[expected]
        assert least <= float(rest.split()[0]) <= most, f"{row}: {found}"


@pytest.mark.parametrize("nth", range(ROUNDS))
@pytest.mark.parametrize("device", ["device", "none"])
def test_a_handler_is_taken_for_what_it_is(device: str, nth: int, library: str, tmp_path: Path) -> None:
    rows = {"device": HANDLERS, "none": WITHOUT_DEVICES}[device]
    if not library:
        rows = {row: expected for row, expected in rows.items() if row not in NEED_LIBRARY}
    script = str(Path(__file__).with_name("judged.py"))
    commands = {row: [sys.executable, script, row, device, library] for row in rows}
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with processes(commands, TEST_LOCK=lock.name) as started:
            for process in started.values():
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            # All have begun by now; the last of them has to have its time.
            time.sleep(LIVES_S)
            for row, process in started.items():
                assert process.stdout is not None
                os.set_blocking(process.stdout.fileno(), False)
                as_expected(row, rows[row], (process.stdout.read() or b"lives").decode())


@pytest.mark.parametrize("nth", range(ROUNDS))
def test_a_command_is_taken_for_what_it_is(nth: int, library: str) -> None:
    commands = {row: command for row, (command, _) in COMMANDS.items() if library or row not in NEED_LIBRARY}
    with processes(commands, TEST_LIBRARY=library) as started:
        time.sleep(0.5)
        dogs: dict[str, tuple[StallWatchdog, Record]] = {}
        for row, process in started.items():
            sampler, record = Sampler(boottime), Record()
            sampler.set(gpu_pct=0.0)
            sensors = WorkSensors(lambda pid=process.pid: [pid], uuids=(GPU,), sampler=sampler)  # type: ignore[misc]
            dog = StallWatchdog(
                stall_timeout_s=TIMEOUT_S,
                confirm_s=CONFIRM_S,
                sensors=sensors,
                poll_s=0.2,
                on_trip=record.trip,
            )
            dog.start()
            dog.beat(1)
            dogs[row] = dog, record
        time.sleep(LIVES_S)
        for row, (dog, record) in dogs.items():
            dog.close()
            found = "lives"
            if record.trips:
                trip = record.trips[0]
                found = f"{trip.reason} {trip.evidence['silence_s'] / TIMEOUT_S:.2f} {trip.message}"
            as_expected(row, COMMANDS[row][1], found)

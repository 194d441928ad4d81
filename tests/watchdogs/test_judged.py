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
from gpu.gpu_fakes import HERE, compile_library, gpu, rewrite
from soaking import SOAK

ROUNDS = 20 if SOAK else 1
LIVES_S = 4.5 * TIMEOUT_S
"""After so much silence a job that has not been tripped is one that lives: it has ten timeouts."""

HANDLERS = {
    "reads": "lives",
    "writes": "lives",
    "maps": "lives",
    "grows": "lives",
    "downloads": "lives",
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
HEALTH = {
    "reads": "lives",
    "downloads": "lives",
    "computes_in_a_child": "lives",
    "computes": "lives",
    "sleeps_in_a_loop": "waits",
    "sleeps_in_a_loop and beats once": "waits",
    "waits_for_a_file_lock": "waits",
    "waits_for_a_file_lock and says so": "lives",
    "deadlocks": "idle",
    "deadlocks and beats once": "idle",
    "receives_nothing": "idle",
    "spins_in_one_call": "idle",
}
"""Under the health watchdog, beside a device that was busy and is idle. Without "and" it never beats."""
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
COMMANDS_WITHOUT_DEVICES = {
    "children compute": "lives",
    "spins": "lives",
    "sleeps once": "waits",
    "polls in a loop": "waits",
    "deadlocks": "idle",
    "reads from nobody": "idle",
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
    path = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
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


def judged(started: dict[str, subprocess.Popen[bytes]], rows: dict[str, str]) -> None:
    """Leave each the time in which it would have been tripped, and require that it was taken for what it is."""
    time.sleep(LIVES_S)
    for row, process in started.items():
        as_expected(row, rows[row], said_of(process))


def said_of(process: subprocess.Popen[bytes]) -> str:
    """What a handler's watchdog wrote, ``lives`` if it wrote nothing, ``ended`` if the handler ended by itself."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    said: bytes | None = process.stdout.read()
    if said:
        return said.decode()
    # None: the pipe is open, but a child of a handler that has ended may hold it.
    return "lives" if said is None and process.poll() is None else "ended"


def ready(started: dict[str, subprocess.Popen[bytes]]) -> None:
    for process in started.values():
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[str]:
    """The path of a file that this process has locked."""
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.name


def test_a_handler_that_has_crashed_is_not_one_that_lives() -> None:
    crashes = [sys.executable, "-S", "-c", "print('ready', flush=True); raise SystemExit(1)"]
    leaves = ["sh", "-c", "echo ready; sleep 600 & exit 1"]
    with processes(
        {"crashes": crashes, "leaves a child": leaves, "lives": ["sh", "-c", "echo ready; sleep 600"]}
    ) as rows:
        ready(rows)
        for name in ("crashes", "leaves a child"):
            os.waitid(os.P_PID, rows[name].pid, os.WEXITED | os.WNOWAIT)
        assert {name: said_of(process) for name, process in rows.items()} == {
            "crashes": "ended",
            "leaves a child": "ended",
            "lives": "lives",
        }


@pytest.mark.parametrize("nth", range(ROUNDS))
def test_a_handler_is_taken_for_what_it_is(nth: int, library: str, locked: str) -> None:
    script = str(Path(__file__).with_name("judged.py"))
    rows: dict[str, str] = {}
    commands: dict[str, list[str]] = {}
    for device, expected in {"device": HANDLERS, "none": WITHOUT_DEVICES}.items():
        for handler in expected:
            if library or handler not in NEED_LIBRARY:
                row = f"{handler}, {device}"
                rows[row] = expected[handler]
                commands[row] = [sys.executable, script, handler, device, library]
    with processes(commands, TEST_LOCK=locked) as started:
        ready(started)
        judged(started, rows)


@pytest.mark.parametrize("nth", range(ROUNDS))
def test_a_handler_beside_an_idle_device_is_taken_for_what_it_is_without_beats(
    nth: int, locked: str, tmp_path: Path
) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    compile_library(HERE / "fake_nvml.c", tmp_path / "libnvidia-ml.so.1")
    card, script = tmp_path / "card", str(Path(__file__).with_name("judged.py"))
    rewrite(card, gpu("a", used_mib=2048, util=80, memutil=40, milliwatts=400_000))
    commands = {row: [sys.executable, script, row, "health"] for row in HEALTH}
    with processes(commands, TEST_LOCK=locked, LD_LIBRARY_PATH=str(tmp_path), FAKE_NVML=str(card)) as started:
        ready(started)
        rewrite(card, gpu("a", used_mib=2048, util=0, memutil=0, milliwatts=70_000))
        judged(started, HEALTH)


@pytest.mark.parametrize("nth", range(ROUNDS))
def test_a_command_is_taken_for_what_it_is(nth: int, library: str) -> None:
    rows: dict[str, tuple[bool, str]] = {}
    commands: dict[str, list[str]] = {}
    with_devices = {
        row: expected for row, (_, expected) in COMMANDS.items() if library or row not in NEED_LIBRARY
    }
    for device, expected in {"device": with_devices, "none": COMMANDS_WITHOUT_DEVICES}.items():
        for name in expected:
            row = f"{name}, {device}"
            rows[row] = device == "device", expected[name]
            commands[row] = COMMANDS[name][0]
    with processes(commands, TEST_LIBRARY=library) as started:
        time.sleep(0.5)
        dogs: dict[str, tuple[StallWatchdog, Record]] = {}
        for row, process in started.items():
            sampler, record = Sampler(boottime), Record()
            sampler.set(gpu_pct=0.0)
            sensors = WorkSensors(
                lambda pid=process.pid: [pid],  # type: ignore[misc]
                uuids=(GPU,) if rows[row][0] else (),
                sampler=sampler if rows[row][0] else None,
            )
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
            found = "lives" if started[row].poll() is None else "ended"
            if record.trips:
                trip = record.trips[0]
                found = f"{trip.reason} {trip.evidence['silence_s'] / TIMEOUT_S:.2f} {trip.message}"
            as_expected(row, rows[row][1], found)

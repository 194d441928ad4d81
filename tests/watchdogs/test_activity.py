"""What the host side shows of real processes, and whose it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gangq.proc import procfs
from gangq.proc.clock import boottime
from gangq.watchdogs import activity, counters
from gangq.watchdogs import family as family_module
from gangq.watchdogs.activity import HostActivity, HostSample, movement
from gangq.watchdogs.counters import Counters, Wait, library_threads, process_counters
from gangq.watchdogs.family import Family
from watchdogs.victims import HUNG, until, victim


def moved(activity: HostActivity, seconds: float = 0.6) -> bool | None:
    before = activity.sample()
    time.sleep(seconds)
    return movement(before, activity.sample()).moved


@pytest.fixture
def own() -> HostActivity:
    """This process, warmed up: its first sample pays for what later ones find in caches."""
    activity = HostActivity(own=True)
    activity.sample()
    return activity


def test_a_process_that_waits_does_not_move(own: HostActivity) -> None:
    assert moved(own) is False


@pytest.mark.parametrize("name", ["gangq-heartbeat", "pool-1-worker-0", "mine"])
def test_the_librarys_own_threads_do_not_count_and_the_jobs_do(own: HostActivity, name: str) -> None:
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.002):
            os.stat("/")

    thread = threading.Thread(target=tick, name=name, daemon=True)
    thread.start()
    try:
        assert (thread.native_id in library_threads()) is (name != "mine")
        assert moved(own) is (name == "mine")
    finally:
        stop.set()
        thread.join()


def test_what_the_librarys_threads_write_does_not_count(own: HostActivity) -> None:
    stop = threading.Event()

    def write() -> None:
        with open(os.devnull, "wb", buffering=0) as file:
            while not stop.wait(0.05):
                file.write(bytes(1 << 20))

    thread = threading.Thread(target=write, name="gangq-log", daemon=True)
    thread.start()
    try:
        assert moved(own) is False
    finally:
        stop.set()
        thread.join()


SPIN_BESIDE_THE_LIBRARY = """
import json, os, threading, time
from gangq.watchdogs.activity import HostActivity, movement
def spin():
    while True: pass
def tick():
    while True: time.sleep(0.25)
for number in range(6):
    threading.Thread(target=tick, name=f"gangq-{number}", daemon=True).start()
activity = HostActivity(own=True)
activity.sample()
def watch():
    time.sleep(0.5)  # Until the main thread has begun to spin.
    before = activity.sample()
    for _ in range(3):
        time.sleep(0.5)
        after = activity.sample()
        print(json.dumps(movement(before, after).as_json()), flush=True)
        before = after
    os._exit(0)
threading.Thread(target=watch, name="gangq-stall", daemon=True).start()
spin()
"""


@pytest.mark.parametrize("newcomers", [0, 150])
def test_handing_the_gil_to_the_library_is_no_movement_of_a_handler_that_spins(newcomers: int) -> None:
    # Of each process that is new on the host the library reads who its parent is: three times the GIL.
    command = [sys.executable, "-c", SPIN_BESIDE_THE_LIBRARY]
    with ExitStack() as stack:
        run = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert run.stdout is not None
        lines = []
        while line := run.stdout.readline():
            lines.append(json.loads(line))
            for _ in range(newcomers):
                stack.callback(stack.enter_context(subprocess.Popen(["sleep", "60"])).kill)
    assert [line["moved"] for line in lines] == [False] * 3, lines
    assert all(line["cpu_share"] > 0.02 for line in lines)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with victim("ready(); time.sleep(60)") as process:
        yield process


def test_a_child_of_a_child_counts() -> None:
    code = """
if os.fork() == 0:
    if os.fork() == 0:
        ready()
        while True: pass
    os.waitpid(-1, 0)
os.waitpid(-1, 0)
"""
    with victim(code) as process:
        assert moved(HostActivity(lambda: [process.pid])) is True


def test_a_process_that_came_in_between_counts_with_all_it_has_done() -> None:
    old = HostSample(1.0, {(1, 5): Counters(io_bytes=0)})
    new = HostSample(2.0, {(1, 5): Counters(io_bytes=0), (2, 9): Counters(io_bytes=5_000_000)})
    assert movement(old, new).moved is True


def test_a_pid_used_again_is_another_process() -> None:
    old = HostSample(1.0, {(2, 5): Counters(io_bytes=90_000_000)})
    new = HostSample(2.0, {(2, 9): Counters(io_bytes=100)})
    assert movement(old, new).io_bytes == 100


def test_no_process_of_the_job_to_be_seen_is_unknown(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    activity = HostActivity(lambda: [child.pid])
    assert activity.sample().unknown is not None
    assert moved(activity, 0.1) is None


def test_a_zombie_is_nobody(child: subprocess.Popen[bytes]) -> None:
    assert process_counters(child.pid) is not None
    child.kill()
    until(lambda: process_counters(child.pid) is None)
    assert Path(f"/proc/{child.pid}").exists()


def test_family_is_everything_below_without_the_ignored(child: subprocess.Popen[bytes]) -> None:
    family = Family()
    me = os.getpid()
    now = boottime()
    assert {me, child.pid} <= set(family.members({me}, (), now))
    assert child.pid not in family.members({me}, {child.pid}, now)
    # A guardian: its command counts, it does not.
    assert me not in family.members({me}, {me}, now)
    assert child.pid in family.members({me}, {me}, now)


def test_family_notices_who_came_and_who_went() -> None:
    family = Family()
    me = os.getpid()
    family.members({me}, (), boottime())
    with victim("ready(); time.sleep(60)") as late:
        assert late.pid in family.members({me}, (), boottime())
    assert late.pid not in family.members({me}, (), boottime())


ADOPTS = """
import subprocess, time
from gangq.proc import kernel, procfs
from gangq.watchdogs.family import Family
kernel.adopt_orphans()
shell = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; read x"], stdin=-1, stdout=-1)
orphan = int(shell.stdout.readline())
family = Family()
assert orphan in family.members({shell.pid}, (), 0.0)
shell.stdin.close()
shell.wait()
found = orphan in family.members({procfs.stat(orphan).ppid}, (), 1.0)
procfs.strike([procfs.stat(orphan)])
raise SystemExit(not found)
"""


def test_family_notices_who_was_adopted() -> None:
    assert subprocess.run([sys.executable, "-c", ADOPTS], timeout=30).returncode == 0


def test_the_librarys_own_processes_do_not_count() -> None:
    code = "import sys, time; print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "-m", "gangq.gpu.sampling"], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid not in HostActivity(own=True).pids()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Whose command lines are read from here on."""
    real, found = procfs.read, []

    def read(path: str, *most: int) -> bytes | None:
        if path.endswith("/cmdline"):
            found.append(int(path.split("/")[2]))
        return real(path, *most)

    monkeypatch.setattr(procfs, "read", read)
    return found


def test_command_lines_are_read_of_the_jobs_processes_only_and_once(
    child: subprocess.Popen[bytes], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading one waits for the process's memory map, which one that is stuck in the kernel may hold for ever.
    family = Family()
    with victim("ready(); time.sleep(60)") as other:
        assert family.members({child.pid}, (), 0.0) == [child.pid]
        assert asked == []
        assert {child.pid, other.pid} <= set(family.members({os.getpid()}, (), 1.0))
        assert {child.pid, other.pid} <= set(asked)
        assert os.getpid() not in asked
        monkeypatch.setattr(family_module, "_SETTLED_S", 0.0)
        family.members({os.getpid()}, (), 2.0)  # Not so new any more.
        asked.clear()
        family.members({os.getpid()}, (), 100.0)  # All is read anew, and nobody has become another.
        assert not {child.pid, other.pid} & set(asked)


def test_one_of_the_librarys_that_was_seen_before_its_exec_is_found_at_the_next_look() -> None:
    code = (
        "import os, sys; print('up', flush=True); sys.stdin.readline()\n"
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)',"
        " 'gangq.gpu.' + 'sampling'])"
    )
    family = Family()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            assert process.pid in family.members({os.getpid()}, (), 0.0)
            process.stdin.write(b"\n")
            process.stdin.flush()
            process.stdout.readline()
            assert process.pid not in family.members({os.getpid()}, (), 1.0)
        finally:
            process.kill()


def test_nothing_is_read_of_a_process_that_is_stuck_in_the_kernel(
    child: subprocess.Popen[bytes], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, stuck = procfs.stat_fields, [True]

    def stat(path: str) -> list[str]:
        fields = real(path)
        return ["D", *fields[1:]] if fields and stuck[0] and f"/{child.pid}/" in path else fields

    monkeypatch.setattr(procfs, "stat_fields", stat)
    family = Family()
    assert child.pid in family.members({os.getpid()}, (), 0.0)
    assert child.pid not in asked
    stuck[0] = False
    family.members({os.getpid()}, (), 1.0)
    assert child.pid in asked


@pytest.mark.parametrize(
    ("then", "now", "waits", "moved"),
    [
        ("lock", "lock", 195, False),
        ("lock", "running", 195, False),
        ("running", "lock", 195, False),
        ("lock", "data", 195, True),
        ("data", "data", 195, True),
        ("running", "running", 195, True),
        ("lock", "lock", 2000, True),
        ("lock", "lock", 30, True),
    ],
)
def test_threads_that_ask_for_the_gil_are_no_movement_and_threads_that_wait_for_data_are(
    then: str, now: str, waits: int, moved: bool
) -> None:
    def sample(at: float, count: int, where: str) -> HostSample:
        waits = {7: Wait[where.upper()]} if where in ("lock", "data") else {}
        return HostSample(at, {(1, 1): Counters(0, 0, 0.0, 0, {7: count}, waits)})

    assert movement(sample(0, 0, then), sample(1, waits, now)).moved is moved


@pytest.mark.parametrize(
    ("grown", "moves"),
    [
        ({"io_bytes": 2_000_000}, False),
        ({"io_bytes": 2_000_001}, True),
        ({"memory_bytes": 16_000_000}, False),
        ({"memory_bytes": 16_000_001}, True),
        ({"faults": 200}, False),
        ({"faults": 201}, True),
        ({"switches": {7: 20}, "waits": {7: Wait.DATA}}, False),
        ({"switches": {7: 21}, "waits": {7: Wait.DATA}}, True),
    ],
)
def test_what_moves_in_two_seconds_is_as_the_manual_says(grown: dict[str, Any], moves: bool) -> None:
    before = HostSample(0, {(1, 1): Counters(io_bytes=0, switches={7: 0}, waits=grown.get("waits", {}))})
    after = HostSample(2, {(1, 1): Counters(**{"io_bytes": 0, "switches": {7: 0}, **grown})})
    assert movement(before, after).moved is moves


def test_the_thread_that_asks_for_the_gil_is_found_in_a_futex() -> None:
    with victim(HUNG["gil_held_park"]) as process:
        time.sleep(0.5)
        before = process_counters(process.pid)
        time.sleep(0.5)
        after = process_counters(process.pid)
        assert before is not None
        assert after is not None
        grown = {tid: after[1].switches[tid] - before[1].switches[tid] for tid in after[1].switches}
        busiest = max(grown, key=lambda tid: grown[tid])
        assert grown[busiest] > 25, "nobody asks for the GIL: this kernel or Python does it otherwise"
        assert after[1].waits[busiest] is Wait.LOCK


def test_a_process_whose_io_is_hidden_is_unknown(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_io", lambda path: None)
    assert moved(HostActivity(lambda: [child.pid]), 0.3) is None


def test_a_sample_is_cheap(own: HostActivity) -> None:
    began = time.process_time()
    for _ in range(20):
        own.sample()
    assert (time.process_time() - began) / 20 < 0.02


@pytest.mark.parametrize(
    ("holder", "waits"),
    [(os.getpid(), True), (1 << 22, False), (7, False), (-1, True), (0, True)],
    ids=["another program", "one that has ended", "the job itself", "an open file", "another namespace"],
)
def test_a_wait_for_a_lock_counts_where_a_living_process_of_another_program_holds_it(
    monkeypatch: pytest.MonkeyPatch, holder: int, waits: bool
) -> None:
    locks = (
        f"1: FLOCK  ADVISORY  WRITE {holder} 08:01:77 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 8 08:01:77 0 EOF\n"
        "2: POSIX  ADVISORY  READ 9 08:01:78 0 EOF\n"
    )
    monkeypatch.setattr(activity.procfs, "read", lambda path, most: locks.encode())
    assert activity._locked({7, 8}) == ({8} if waits else set())


def test_a_wait_for_a_lock_is_seen_below_a_thousand_other_locks(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    lock = "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); {}; print('ready', flush=True); time.sleep(60)"
    holds = lock.format("fcntl.flock(file, fcntl.LOCK_EX)")
    waits = lock.format("print('ready', flush=True); fcntl.flock(file, fcntl.LOCK_EX)")
    many = lock.format("[fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n) for n in range(1500)]")
    with ExitStack() as stack:

        def start(code: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            assert process.stdout.readline() == b"ready\n"
            return process

        start(holds)
        waiter = start(waits)
        activity = HostActivity(lambda: [waiter.pid])
        until(lambda: activity.sample().locked == {waiter.pid})
        start(many)
        assert activity.sample().locked == {waiter.pid}


def waits_of(own: bool = False, **threads: tuple[int, Wait]) -> str | None:
    """What a process waits in, whose threads (``main`` and ``other``) make so many waits in a second, in this."""
    tids = {"main": 1, "other": 2}
    waits = {tids[name]: wait for name, (_, wait) in threads.items()}

    def sample(at: float, times: int) -> HostSample:
        switches = {tids[name]: times * count for name, (count, _) in threads.items()}
        counters = Counters(io_bytes=0, switches=switches, waits=waits)
        return HostSample(at, {(1, 1): counters}, own=(1, 1) if own else None)

    return movement(sample(10.0, 0), sample(11.0, 1)).waits


def test_a_main_thread_seems_to_sleep_while_it_holds_the_gil_that_another_thread_asks_for() -> None:
    assert waits_of(main=(0, Wait.SLEEP)) == "process 1 sleeps"
    assert waits_of(main=(0, Wait.SLEEP), other=(200, Wait.LOCK)) is None


def test_a_call_that_polls_is_a_wait_in_another_process_only() -> None:
    """Of this one it is known whether Python gets on: that tells a loop from a call that polls for ever."""
    assert waits_of(main=(5, Wait.DATA)) == "process 1 waits again and again"
    assert waits_of(own=True, main=(5, Wait.DATA)) is None


@pytest.mark.parametrize("hidden", ["before", "after"])
def test_io_that_one_of_two_looks_could_not_read_is_unknown(hidden: str) -> None:
    seen, unseen = {(1, 1): Counters(io_bytes=5)}, {(1, 1): Counters(io_bytes=None)}
    looks = (unseen, seen) if hidden == "before" else (seen, unseen)
    moved = movement(HostSample(10.0, looks[0]), HostSample(11.0, looks[1]))
    assert (moved.moved, moved.why) == (None, "the I/O of process 1 cannot be read")


def test_family_reads_all_parents_anew_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pid may have been given anew between two looks, below another parent."""
    read: list[int] = []
    stat = procfs.stat
    monkeypatch.setattr(procfs, "stat", lambda pid: read.append(pid) or stat(pid))
    family, me = Family(), os.getpid()
    for now, again in ((100.0, True), (129.0, False), (130.0, True)):
        read.clear()
        family.members({me}, (), now)
        assert (me in read) is again

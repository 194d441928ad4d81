"""The supervisor: what it costs, what it passes on, what it tells a service manager, and what it leaves."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.proc import procfs
from gangq.proc.liveness_memory import SIZE, Memory
from gangq.proc.silence import Look, Silence
from gangq.proc.supervision import Supervisor
from process import other_user
from process.supervised import AS_PID_1, PATIENCE_S, STAND_IN, SUPERVISOR, Start, needs_namespaces, starter
from worker.worker_process import eventually

MEGABYTE_KB = 1000


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starter(tmp_path, "") as begin:
        yield begin


class Manager:
    """The service manager's end of the notification socket."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self.heard: list[tuple[float, str]] = []

    def listen(self, seconds: float) -> list[str]:
        """What is said within this time."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._socket], [], [], left)[0]:
                for line in self._socket.recv(4096).decode().split("\n"):
                    self.heard.append((time.monotonic(), line))
        return [line for at, line in self.heard if at >= until - seconds]

    def until(self, line: str) -> None:
        """Wait until it has been said, be it before."""

        def look() -> bool:
            self.listen(0.05)
            return line in [said for _, said in self.heard]

        eventually(look, f"it says {line}", PATIENCE_S)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    one = Manager(tmp_path)
    yield one
    one.close()


def test_it_stays_under_12_megabytes(start: Start, manager: Manager) -> None:
    run = start("lives", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="1000000", TEST_REGISTERS="1")
    run.until_marked()
    manager.until("READY=1")
    manager.listen(0.5)
    assert 4 * MEGABYTE_KB < run.resident_kb() < 12 * MEGABYTE_KB


@pytest.mark.parametrize(
    ("what", "code"), [(("exits", 0), 0), (("exits", 5), 5), (("exits", 76), 76), (("finishes",), 0)]
)
def test_it_exits_as_its_worker_did(start: Start, what: tuple[object, ...], code: int) -> None:
    assert start(*what).exit_code() == code


def test_the_end_of_its_worker_is_seen_although_it_was_started_with_sigchld_ignored(start: Start) -> None:
    code = "import os, signal as s, sys; s.signal(s.SIGCHLD, s.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    run = start("exits", 5, silence_s=PATIENCE_S, prefix=(sys.executable, "-c", code))
    assert run.exit_code(PATIENCE_S / 2) == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_that_killed_its_worker_is_told_by_the_code(start: Start, number: int) -> None:
    run = start("lives")
    run.until_marked()
    os.kill(run.worker().pid, number)
    assert run.exit_code() == 128 + number


def test_a_worker_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SUPERVISOR, "--", "/none/python", "x"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 127
    assert "cannot start '/none/python'" in done.stderr


@pytest.mark.parametrize("place", ["plain", "as PID 1"])
def test_signals_reach_the_worker_once_each(start: Start, place: str) -> None:
    if place == "as PID 1":
        needs_namespaces()
    run = start("counts_signals", prefix=AS_PID_1 if place == "as PID 1" else ())
    run.until_marked()
    worker = run.worker()
    # Of a terminal, to everybody in the foreground: the worker is not, and hears it from its supervisor.
    if place == "plain":
        os.killpg(run.process.pid, signal.SIGINT)
        run.until_marked("signal2")
    os.kill(worker.ppid, signal.SIGHUP)
    run.until_marked("signal1")
    os.kill(worker.ppid, signal.SIGTERM)
    run.until_marked("signal15")
    os.kill(worker.ppid, signal.SIGTERM)
    run.until_marked("signal15", 2)
    assert run.exit_code() == 0
    counts = [len(run.marks(word)) for word in ("signal2", "signal1", "signal15")]
    assert counts == [1 if place == "plain" else 0, 1, 2]


def test_what_a_worker_leaves_behind_is_dead_when_it_exits(start: Start) -> None:
    run = start("leaves_a_process", 3)
    run.until_marked()
    assert run.exit_code() == 3
    assert run.left() == []


def test_it_dies_with_its_supervisor(start: Start) -> None:
    run = start("starts_a_tree")
    run.until_marked()
    worker = run.worker()
    run.process.kill()
    eventually(lambda: procfs.same(worker) is None, "the worker is dead", PATIENCE_S)


def test_processes_that_were_there_before_are_left_alone(tmp_path: Path) -> None:
    command = " ".join([*SUPERVISOR, "--", sys.executable, STAND_IN, "exits", "4"])
    script = f"sleep 300 >&- 2>&- & echo $! > {tmp_path}/pid; exec {command}"
    done = subprocess.run(
        ["sh", "-c", script], env={**os.environ, "TEST_MARKS": str(tmp_path / "marks")}, timeout=30
    )
    assert done.returncode == 4
    sleeper = procfs.stat(int((tmp_path / "pid").read_text()))
    assert sleeper is not None
    assert procfs.send(sleeper, signal.SIGKILL)


def test_a_number_that_another_process_has_by_now_spares_nothing() -> None:
    def ours(ticks_later: int, which: str) -> bool:
        named = (entry.pid, entry.start_ticks + ticks_later)
        spared = named if which == "server" else (0, 0)
        memory = SimpleNamespace(spared_pid=spared[0], spared_ticks=spared[1])
        one: Any = SimpleNamespace(foreign=dict([named]) if which == "foreign" else {}, memory=memory)
        return entry.pid in Supervisor.tree(one, procfs.table())

    with subprocess.Popen(["sleep", "300"]) as process:
        entry = procfs.stat(process.pid)
        assert entry is not None
        found = [ours(later, which) for which in ("server", "foreign") for later in (0, 1)]
        process.kill()
    assert found == [False, True, False, True]


def test_orphans_are_buried_by_pid_1(start: Start) -> None:
    needs_namespaces()
    run = start("orphans_children", prefix=AS_PID_1)
    run.until_marked()
    first = run.worker().ppid

    def zombies() -> list[procfs.Stat]:
        return [entry for entry in procfs.table().values() if entry.ppid == first and entry.state == "Z"]

    eventually(lambda: not zombies(), "no zombie is left", 5)
    assert run.process.poll() is None


def test_a_slow_start_is_not_silence(start: Start) -> None:
    run = start("is_slow_to_start", 2, silence_s=0.8)
    assert run.exit_code() == 5


def test_a_start_that_never_ends_is(start: Start) -> None:
    since = time.monotonic()
    run = start("is_slow_to_start", 60, silence_s=1.0, start_s=2.0)
    assert run.exit_code() == 80
    assert 2 <= time.monotonic() - since < 8


def test_its_own_pause_is_not_the_workers_silence(start: Start) -> None:
    run = start("lives", silence_s=2.0)
    run.until_marked()
    worker = run.worker()
    for pid in (run.process.pid, worker.pid):
        os.kill(pid, signal.SIGSTOP)
    # Longer than the silence it allows.
    time.sleep(2.4)
    # The worker second: a supervisor that counted the pause would kill it at once.
    os.kill(run.process.pid, signal.SIGCONT)
    eventually(lambda: "supervisor_paused" in run.log, "it has noticed", PATIENCE_S)
    os.kill(worker.pid, signal.SIGCONT)
    time.sleep(1.0)
    assert procfs.same(worker) is not None
    assert "frozen" not in run.log


def test_a_pause_of_both_is_survived(start: Start) -> None:
    run = start("lives", silence_s=2.0, TEST_REGISTERS="1")
    run.until_marked()
    worker = run.worker()
    for pid in (worker.pid, run.process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)
    for pid in (worker.pid, run.process.pid):
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: "supervisor_paused" in run.log, "it has noticed", PATIENCE_S)
    time.sleep(2.5)
    assert procfs.same(worker) is not None
    assert "frozen" not in run.log


_BIG = (
    "import mmap, sys, time; m = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    "m.madvise(mmap.MADV_NOHUGEPAGE)\n"
    "for at in range(0, 1 << 30, 4096): m[at] = 1\n"
    "print('big', flush=True); time.sleep(600)"
)


def test_what_is_slow_to_give_its_memory_back_is_not_unkillable() -> None:
    worker = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {_BIG!r}]\n"
        "big = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)\n"
        "big.stdout.readline(); print(big.pid)"
    )
    # As if the five seconds that everybody gets were over.
    program = (
        "import sys; from gangq.proc import supervision as s; s._KILL_S = 0.0; sys.exit(s.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--", sys.executable, "-c", worker],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    left = procfs.stat(int(done.stdout))
    assert left is None or not left.alive, "it was not waited for"


@pytest.mark.parametrize(("hidepid", "gone"), [(0, True), (2, False)])
def test_where_processes_are_hidden_a_tree_is_dead_once_no_child_is_left(hidepid: int, gone: bool) -> None:
    """A guardian is closed to its own user, so under hidepid its supervisor does not see it."""
    other_user.needed()
    needs_namespaces()
    closed = "import ctypes, time; ctypes.CDLL(None).prctl(4, 0); print(flush=True); time.sleep(60)"
    worker = (
        "import subprocess, sys\n"
        f"command = [sys.executable, '-c', {closed!r}]\n"
        "subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()"
    )
    program = (
        "import sys; from gangq.proc import supervision as s; s._KILL_S = 0.3; sweep = s.Supervisor.sweep\n"
        "s.Supervisor.sweep = lambda self: (sweep(self), print(self.gone, flush=True))\n"
        "s.main(sys.argv[1:])"
    )
    mounted = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    argv = [*AS_PID_1, "sh", "-c", mounted, "sh", *other_user.prefix()]
    argv += [sys.executable, "-c", program, "--", sys.executable, "-c", worker]
    assert subprocess.run(argv, capture_output=True, text=True, timeout=60).stdout == f"{gone}\n"


def test_a_worker_whose_supervisor_died_before_it_could_be_told_does_not_begin() -> None:
    program = (
        "import os; from gangq.proc.supervision import Supervisor\n"
        "one = Supervisor(['/bin/true'], silence_s=1, start_s=1, as_json=False)\n"
        "one.become(os.pipe()[1], {parent})"
    )
    codes = [
        subprocess.run([sys.executable, "-c", program.format(parent=parent)], timeout=30).returncode
        for parent in (os.getpid(), 1 << 22)
    ]
    assert codes == [0, 1]


def test_silence_counts_only_time_in_which_it_could_have_been_heard() -> None:
    silence = Silence(10.0, now=100.0)
    assert silence.waited(100.25, 0.25) == 0
    assert silence.waited(160.25, 0.25) == pytest.approx(59.75)
    assert silence.silent_s == pytest.approx(0.5)
    assert not silence.over
    for step in range(1, 39):
        silence.waited(160.25 + step * 0.25, 0.25)
    assert silence.over
    assert silence.wait_s() == 0
    silence.reset()
    assert not silence.over


def test_a_sign_that_was_given_before_a_pause_makes_the_silence_no_longer() -> None:
    silence = Silence(10.0, now=0.0)
    silence.waited(2.0, 2.0)
    silence.waited(62.0, 1.0)
    silence.reset(ago_s=61.0)
    assert silence.silent_s == 3.0
    silence.reset(ago_s=0.5)
    assert silence.silent_s == 0.5


def test_a_late_turn_is_no_pause() -> None:
    silence = Silence(10.0, now=0.0)
    assert silence.waited(0.9, 0.25) == 0
    assert silence.silent_s == 0.9


STACKS = b'Thread 0x00007f01 (most recent call first):\n  File "park.py", line 3 in park\n'


@pytest.mark.parametrize("signs", [False, True], ids=["frozen", "signs meanwhile"])
def test_a_worker_is_looked_at_twice_a_second_apart(monkeypatch: pytest.MonkeyPatch, signs: bool) -> None:
    one = Supervisor(["/bin/true"], silence_s=10, start_s=10, as_json=False)
    looks: list[float] = []

    def look() -> Look:
        looks.append(one.silence.silent_s)
        if signs and len(looks) == 2:
            one.memory.sign()
        return Look(STACKS, {})

    monkeypatch.setattr(one, "look", look)
    for silent_s in (9.0, 9.25, 9.75, 10.0):
        one.silence.silent_s = silent_s
        one.compare_looks()
    assert (looks, one.frozen_s) == ([9.0, 10.0], None if signs else 10.0)


def test_a_worker_that_never_gave_a_sign_of_life_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Supervisor(["/bin/true"], silence_s=10, start_s=10, as_json=False, now=lambda: 0.0)
    one.poll = SimpleNamespace(poll=lambda _: [])  # type: ignore[assignment]
    one.silence.silent_s = 10.0
    monkeypatch.setattr(one, "reap", lambda: None)
    monkeypatch.setattr(one, "look", lambda: pytest.fail("an import that moves would never be ended"))
    one.watch()
    assert one.frozen_s == 10.0


def test_who_wants_the_processor_and_is_given_no_slice_of_it_is_not_frozen() -> None:
    waits, starved = {7: ("S", 4, "900 5 30")}, {8: ("R", 2, "700 5 20")}
    before = Look(STACKS, {**waits, **starved})
    assert Look(STACKS, {**waits, **starved}).since(before) == "it wants the processor and was given none"
    given = {8: ("R", 2, "760 9 21")}
    assert Look(STACKS, {**waits, **given}).since(before) is None
    assert Look(STACKS.replace(b"line 3", b"line 4"), {**waits, **given}).since(before) is not None


def test_who_wakes_to_ask_for_the_gil_is_given_slices_even_beside_a_hog() -> None:
    asks = "import time\nwhile True: time.sleep(0.005)"
    hogs = "while True: pass"
    processes = [
        subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\n{what}"])
        for cpu in [min(os.sched_getaffinity(0))]
        for what in (asks, hogs, hogs)
    ]
    try:
        pid = processes[0].pid

        def look() -> tuple[str, int, str]:
            return procfs.thread_times(pid)[pid]

        eventually(lambda: look()[1] > 0, "it has begun", PATIENCE_S)
        former = look()
        eventually(lambda: look()[2] != former[2], "it is given a slice", 1.0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_worker_that_was_stopped_has_no_stacks_of_an_earlier_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Supervisor(["/bin/true"], silence_s=1, start_s=1, as_json=False)
    os.pwrite(one.memory.fd, STACKS, SIZE)
    monkeypatch.setattr(procfs, "thread_times", lambda _: {7: ("T", 4, "900 5 30")})
    assert one.look().stacks == {}
    assert one.memory.stacks_written == 0


# -- a service manager ---------------------------------------------------------------------------------------


def test_ready_is_said_when_the_worker_has_registered_and_not_before(start: Start, manager: Manager) -> None:
    run = start("lives", NOTIFY_SOCKET=manager.address)
    run.until_marked()
    assert "READY=1" not in manager.listen(1.0)
    other = start("lives", NOTIFY_SOCKET=manager.address, TEST_REGISTERS="1")
    other.until_marked()
    manager.until("READY=1")
    manager.until("STATUS=incarnation 7, serving")


def test_signs_of_life_are_passed_on_and_none_is_invented(start: Start, manager: Manager) -> None:
    run = start("lives", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="1000000", silence_s=4.0)
    run.until_marked()
    manager.until("WATCHDOG=1")
    beats = manager.listen(1.0).count("WATCHDOG=1")
    assert 2 <= beats <= 5
    worker = run.worker()
    os.kill(worker.pid, signal.SIGSTOP)
    manager.listen(0.3)
    assert manager.listen(1.2).count("WATCHDOG=1") == 0
    os.kill(worker.pid, signal.SIGCONT)
    assert manager.listen(1.0).count("WATCHDOG=1") > 0


def test_stopping_is_said_and_the_worker_speaks_for_nobody(start: Start, manager: Manager) -> None:
    run = start("counts_signals", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="1000000")
    run.until_marked()
    run.process.send_signal(signal.SIGTERM)
    manager.until("STOPPING=1")
    run.process.send_signal(signal.SIGTERM)
    assert run.exit_code() == 0
    shown = start("shows_environment", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="1", WATCHDOG_PID="1")
    assert shown.exit_code() == 0
    told = shown.marks_path.with_name("environment").read_text()
    assert "NOTIFY_SOCKET" not in told
    assert "WATCHDOG" not in told
    assert "GANGQ_SUPERVISOR" not in told


def test_a_beat_asked_of_another_process_is_not_given(start: Start, manager: Manager) -> None:
    run = start("lives", NOTIFY_SOCKET=manager.address, WATCHDOG_USEC="500000", WATCHDOG_PID="1")
    run.until_marked()
    assert "WATCHDOG=1" not in manager.listen(1.0)


# -- the memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [0, 99, 4_000_000_000])
def test_no_stacks_are_asked_for_by_a_number_that_is_no_signal(junk: int) -> None:
    memory = SimpleNamespace(dump_signal=junk, dump_thread=0)
    Supervisor.dump(SimpleNamespace(memory=memory, child=os.getpid()), until=0.0)  # type: ignore[arg-type]


def test_the_memory_keeps_what_the_worker_wrote_last() -> None:
    memory = Memory.create(interval_s=0.5, silence_s=2.0)
    same = Memory.of(os.dup(memory.fd))
    assert (same.interval_s, same.silence_s) == (0.5, 2.0)
    assert (same.job_id, same.incarnation, same.record, same.dump_signal) == (0, 0, b"", 0)
    memory.register(12, b'{"worker": "w"}')
    memory.set_job(34, 56)
    memory.dump_signal = 42
    assert (same.job_id, same.token, same.incarnation) == (34, 56, 12)
    assert (same.record, same.dump_signal) == (b'{"worker": "w"}', 42)
    memory.set_guardian(3, 78, 90)
    assert same.guardians == {(78, 90)}
    with pytest.raises(ValueError, match="too long"):
        memory.register(13, b"x" * 20000)
    assert (same.job_id, same.token, same.incarnation) == (0, 0, 0)


def test_a_job_in_the_memory_has_its_own_token_whenever_its_worker_dies() -> None:
    seen: set[tuple[int, int]] = set()

    class Observed(Memory):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            seen.add((self.job_id, self.token))

    memory = Observed()
    for job in ((5, 50), (6, 60), (0, 0)):
        memory.set_job(*job)
    assert {job for job in seen if job[0]} == {(5, 50), (6, 60)}


def test_a_descriptor_of_somebody_else_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(20000))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    with pytest.raises(ValueError, match="not the memory"):
        Memory.of(fd)
    os.close(fd)


def with_a_clock() -> tuple[Supervisor, list[float]]:
    """A supervisor whose time passes only where it sleeps; and the time."""
    at = [0.0]

    def sleep(seconds: float) -> None:
        at[0] += seconds

    one = Supervisor(["/bin/true"], silence_s=1, start_s=1, as_json=False, now=lambda: at[0], sleep=sleep)
    return one, at


@pytest.mark.parametrize(
    ("exiting", "gives_up_s"), [(False, 5.0), (True, procfs.EXIT_S)], ids=["alive", "exiting"]
)
def test_it_gives_up_on_what_does_not_die_after_5_s_and_on_what_is_exiting_after_30(
    monkeypatch: pytest.MonkeyPatch, exiting: bool, gives_up_s: float
) -> None:
    one, at = with_a_clock()
    left = procfs.stat(os.getpid())
    assert left is not None
    monkeypatch.setattr(one, "reap", lambda: None)
    monkeypatch.setattr(one, "tree", lambda _: {left.pid})
    monkeypatch.setattr(procfs, "table", lambda: {left.pid: left})
    monkeypatch.setattr(procfs, "strike", lambda targets: targets)
    monkeypatch.setattr(procfs, "dying", lambda _: exiting)
    one.sweep()
    assert gives_up_s <= at[0] < gives_up_s + 0.2
    assert (one.left, one.stuck) == ([left], [])


def test_what_lives_or_is_stuck_at_the_end_is_reported_with_where_its_threads_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts: list[dict[str, Any]] = []
    monkeypatch.setattr("gangq.proc.death_report.send", lambda *given: facts.append(given[5]))
    one = Supervisor(["/bin/true"], silence_s=1, start_s=1, as_json=False)
    me = procfs.stat(os.getpid())
    assert me is not None
    one.left, one.stuck, one.status = [me], [me], 0
    one.report(87, b"")
    assert facts[0]["tree_dead"] is False
    for (entry,) in (facts[0]["left"], facts[0]["stuck"]):
        assert (entry["pid"], entry["start_ticks"], entry["name"]) == (me.pid, me.start_ticks, me.comm)
        assert me.pid in [thread["tid"] for thread in entry["threads"]]


def test_a_worker_that_was_not_reaped_is_not_gone_although_no_reading_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, at = with_a_clock()
    monkeypatch.setattr(one, "reap", lambda: None)
    monkeypatch.setattr(procfs, "table", dict)
    one.sweep()
    assert at[0] >= 5.0


def test_a_guardian_that_does_not_end_is_left_alone_for_longer_than_the_grace_it_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, at = with_a_clock()
    guardian, other = procfs.stat(os.getpid()), procfs.stat(os.getppid())
    assert guardian is not None
    assert other is not None
    struck: list[int] = []
    one.oom = SimpleNamespace(killed=lambda: False)  # type: ignore[assignment]
    # The other one has the number of a guardian from before.
    guardians = {(guardian.pid, guardian.start_ticks), (other.pid, other.start_ticks - 1)}
    one.memory = SimpleNamespace(guardians=guardians)  # type: ignore[assignment]
    monkeypatch.setattr(one, "reap", lambda: None)
    monkeypatch.setattr(one, "tree", lambda _: {guardian.pid, other.pid})
    monkeypatch.setattr(procfs, "table", lambda: {entry.pid: entry for entry in (guardian, other)})
    monkeypatch.setattr(procfs, "strike", lambda targets: struck.extend(entry.pid for entry in targets))
    one.let_end()
    assert procfs.ORPHAN_GRACE_S < procfs.LET_END_S <= at[0] < procfs.LET_END_S + 0.1
    assert set(struck) == {other.pid}

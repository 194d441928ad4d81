"""Real commands, real signals: what is promised about their deaths and about what is written down."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangq.errors import CommandStartError
from gangq.proc import guardian, killing, procfs
from gangq.proc.bounded_log import BoundedLog, unroll
from gangq.proc.clock import boottime
from gangq.worker import launch
from gangq.worker.child import Child, Exit
from worker.worker_process import can_freeze, eventually, frozen

Start = Callable[..., Child]

MARK = secrets.token_hex(8)
"""Of these tests alone: others run beside them."""
DOUBLE_FORK = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(1000)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""

IGNORES_SIGTERM = "trap '' TERM; echo ready; while :; do sleep 0.05; done"

WORKER = """
import json, os, sys, time
from gangq.worker.child import Child
from gangq.proc.clock import boottime
ask = json.loads(sys.argv[1])
if "deadline_in" in ask:
    ask["deadline_boottime"] = boottime() + ask.pop("deadline_in")
child = Child.start(env=dict(os.environ), **ask)
print(child.pid, child.guardian_pid, flush=True)
time.sleep(1000)
"""


def alive(pid: int) -> bool:
    entry = procfs.stat(pid)
    return entry is not None and entry.alive


def written_pid(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text(), f"{path} is written"))


def python(code: str, *args: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, args)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Child] = []

    def start(*argv: str, env: dict[str, str] | None = None, **options: Any) -> Child:
        number = len(started)
        settings: dict[str, Any] = {
            "cwd": tmp_path,
            "log_path": tmp_path / f"log{number}",
            "mark": f"test-{os.getpid()}-{tmp_path.name}/{number}",
        }
        child = Child.start(argv, dict(os.environ) if env is None else env, **{**settings, **options})
        started.append(child)
        return child

    yield start
    for child in started:
        child.close()


def ready(child: Child) -> None:
    eventually(lambda: b"ready" in child.log_tail(), "the command is ready")


def test_exit_codes_and_signals_are_reported_exactly(start: Start) -> None:
    assert start("sh", "-c", "exit 0").wait(10) == Exit(0, None, True)
    assert start("sh", "-c", "exit 200").wait(10) == Exit(200, None, True)
    assert start("sh", "-c", "kill -SEGV $$").wait(10) == Exit(None, signal.SIGSEGV, True)


def test_a_command_whose_output_somebody_has_removed_goes_on(start: Start, tmp_path: Path) -> None:
    child = start("sh", "-c", "echo begin; until test -e go; do sleep 0.02; done")
    eventually(lambda: child.read_new_output() == b"begin\n", "the command has begun")
    Path(child.log_path).unlink()
    assert child.read_new_output() == b""
    (tmp_path / "go").touch()
    ended = child.wait(20)
    assert ended is not None
    assert (ended.code, ended.tree_dead) == (0, True)


def test_output_of_both_streams_can_be_read_while_it_comes(start: Start, tmp_path: Path) -> None:
    child = start("sh", "-c", "echo out; echo err >&2; until test -e go; do sleep 0.02; done; echo end")
    seen = b""

    def seen_both() -> bool:
        nonlocal seen
        seen += child.read_new_output()
        return seen == b"out\nerr\n"

    eventually(seen_both, "both streams were read")
    assert child.poll() is None
    (tmp_path / "go").touch()
    assert child.wait(10) == Exit(0, None, True)
    assert child.read_new_output() == b"end\n"
    assert child.read_new_output() == b""


def test_a_command_gets_its_own_session_its_mark_an_empty_stdin_and_default_signals(start: Start) -> None:
    code = (
        "import os, signal, sys\n"
        "assert sys.stdin.read() == ''\n"
        "assert os.getsid(0) == os.getpid() == os.getpgrp()\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "assert sorted(os.listdir('/proc/self/fd'))[:3] == ['0', '1', '2']\n"
        "assert len(os.listdir('/proc/self/fd')) == 4, os.listdir('/proc/self/fd')\n"
        "print(os.environ['GANGQ_MARK'], os.environ['ONLY'], len(os.environ))\n"
    )
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        child = start(*python(code), env={"ONLY": "this", "LC_CTYPE": "C.UTF-8"}, mark=f"{MARK}/3")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert child.wait(10) == Exit(0, None, True), child.log_tail()
    assert child.read_new_output() == f"{MARK}/3 this 3\n".encode()


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(start: Start) -> None:
    child = start("sh", "-c", IGNORES_SIGTERM)
    ready(child)
    before = time.monotonic()
    child.stop(0.4)
    ended = child.wait(10)
    assert ended == Exit(None, signal.SIGKILL, True, cause="stop")
    assert 0.3 < time.monotonic() - before < 1.5


def test_a_command_that_obeys_sigterm_keeps_its_own_exit_code_and_need_not_wait_out_the_grace(
    start: Start,
) -> None:
    child = start("sh", "-c", "trap 'exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    ready(child)
    before = time.monotonic()
    child.stop(30)
    assert child.wait(10) == Exit(3, None, True, cause="stop")
    assert time.monotonic() - before < 5


def test_a_stopped_command_hears_sigterm_too(start: Start) -> None:
    child = start("sleep", "1000")
    os.kill(child.pid, signal.SIGSTOP)
    child.stop(30)
    assert child.wait(5) == Exit(None, signal.SIGTERM, True, cause="stop")


def test_a_stop_that_is_repeated_sends_one_sigterm_and_does_not_stretch_the_grace(start: Start) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'term'))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    child = start(*python(code))
    ready(child)
    before = time.monotonic()
    for _ in range(3):
        child.stop(0.6)
        time.sleep(0.2)
    child.stop(60)
    assert child.wait(10) == Exit(None, signal.SIGKILL, True, cause="stop")
    assert time.monotonic() - before < 1.5
    assert child.read_new_output().count(b"term") == 1
    child.stop()
    child.kill()
    assert child.wait(0) == Exit(None, signal.SIGKILL, True, cause="stop")


def test_the_grace_belongs_to_the_group_and_not_only_to_its_leader(start: Start, tmp_path: Path) -> None:
    saver = (
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(0.5); open('saved', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(1)\n"
    )
    (tmp_path / "saver.py").write_text(saver)
    child = start("sh", "-c", f"{sys.executable} saver.py; exit 5")
    ready(child)
    child.stop(10)
    assert child.wait(10) == Exit(None, signal.SIGTERM, True, cause="stop")
    assert (tmp_path / "saved").exists()


def test_a_grandchild_left_behind_goes_before_the_end_is_reported(start: Start, tmp_path: Path) -> None:
    child = start("sh", "-c", "sleep 1000 & echo $! > pid; exit 4")
    assert child.wait(10) == Exit(4, None, True)
    assert not alive(written_pid(tmp_path / "pid"))


def test_a_grandchild_that_detached_itself_goes_too(start: Start, tmp_path: Path) -> None:
    # No group, no session, no file and no mark of the command's: only the subreaper finds it.
    code = f"import os, sys\nos.execve(sys.executable, [sys.executable, '-c', {DOUBLE_FORK!r}, 'pid'], {{}})"
    child = start(*python(code))
    assert child.wait(10) == Exit(0, None, True)
    assert not alive(written_pid(tmp_path / "pid"))


def test_a_process_that_runs_away_from_pid_to_pid_is_not_called_gone_before_it_is(
    start: Start, tmp_path: Path
) -> None:
    # Each hop is a new process in a new session whose parent has just exited: /proc often shows none.
    code = (
        "import os, time\n"
        "until = time.monotonic() + 1.5\n"
        "if os.fork():\n"
        "    while not os.path.exists('hop'): time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "while time.monotonic() < until:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.setsid()\n"
        "    open('hop', 'w').write(str(time.monotonic()))\n"
    )
    assert start(*python(code)).wait(20) == Exit(0, None, True)
    after = (tmp_path / "hop").stat().st_mtime_ns
    time.sleep(0.2)
    assert (tmp_path / "hop").stat().st_mtime_ns == after


def test_a_process_that_only_the_mark_connects_with_the_command_goes_too(start: Start) -> None:
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, "GANGQ_MARK": f"{MARK}/77"}) as stray:
        try:
            assert start("true", mark=f"{MARK}/77").wait(10) == Exit(0, None, True)
            assert stray.wait(5) == -signal.SIGKILL
        finally:
            stray.kill()


def test_the_environment_of_what_is_known_to_be_of_a_command_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that is stuck in the kernel may have locked its memory: whoever reads in it waits, too."""
    asked: list[int] = []

    def mark_of(pid: int) -> None:
        # A stranger's may be locked as well: by then what is known has been killed.
        eventually(lambda: not any(map(alive, below)), "the command is dead", 5)
        asked.append(pid)

    with subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True) as process:
        below = eventually(lambda: procfs.descendants(procfs.table(), {process.pid}), "it has a child")
        monkeypatch.setattr(procfs, "mark_of", mark_of)
        try:
            killing.strike_command(MARK, None, lambda _: {process.pid})
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert os.getpid() in asked
    assert not {process.pid, *below} & set(asked)


def test_the_leader_closing_its_output_is_not_its_end(start: Start) -> None:
    child = start("sh", "-c", "exec >&- 2>&-; sleep 0.4; exit 6")
    assert child.wait(0.2) is None
    assert child.wait(10) == Exit(6, None, True)


def test_a_command_is_gone_although_a_process_that_is_not_its_own_has_its_output(start: Start) -> None:
    hands_over = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1])\n"
        "print('said', flush=True); socket.send_fds(s, [b'x'], [1])"
    )
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0" + MARK)
        server.listen()
        server.settimeout(10)
        child = start(*python(hands_over, MARK))
        with server.accept()[0] as connection:
            _, (output,), _, _ = socket.recv_fds(connection, 1, 1)
    try:
        assert child.wait(10) == Exit(0, None, True)
        assert child.log_tail() == b"said\n"
    finally:
        os.close(output)


def test_orphans_of_a_long_command_are_buried_while_it_runs(start: Start) -> None:
    child = start("sh", "-c", "for i in 1 2 3 4 5; do (sh -c 'true &' ) ; done; echo ready; sleep 1000")
    ready(child)

    def zombies() -> list[procfs.Stat]:
        return [e for e in procfs.table().values() if e.ppid == child.guardian_pid and not e.alive]

    eventually(lambda: not zombies(), "no zombie is left", 3)
    child.kill()
    assert child.wait(10) == Exit(None, signal.SIGKILL, True, cause="kill")


def test_two_hundred_megabytes_of_output_make_a_small_file_and_a_command_that_finishes(start: Start) -> None:
    code = (
        "import sys\n"
        "print('first')\n"
        "block = ('x' * 1023 + '\\n') * 1024\n"
        "for _ in range(200): sys.stdout.write(block)\n"
        "print('last')\n"
        "sys.stdout.flush()\n"
    )
    child = start(*python(code), log_head=10_000, log_tail=20_000)
    peak = 0
    while child.wait(0.02) is None:
        status = Path(f"/proc/{child.guardian_pid}/status").read_text()
        if "VmHWM" in status:
            peak = max(peak, int(status.split("VmHWM:")[1].split()[0]))
    assert child.poll() == Exit(0, None, True)
    assert 0 < peak < 20_000, f"{peak} kB"
    text = Path(child.log_path).read_bytes()
    dropped = 6 + 200 * 2**20 + 5 - 30_000
    assert text.startswith(b"first\nxxx")
    assert text.endswith(b"xxx\nlast\n")
    assert f"\n[gangq: {dropped} bytes dropped here]\n".encode() in text
    assert len(text) < 30_100
    assert not Path(child.log_path + ".tail").exists()
    assert child.log_tail(5) == b"last\n"
    assert b"".join(iter(child.read_new_output, b"")) == text


def test_output_that_fits_in_head_and_tail_is_kept_to_the_byte(start: Start) -> None:
    child = start("sh", "-c", "printf 0123456789abcdef; echo ready", log_head=4, log_tail=100)
    child.wait(10)
    assert Path(child.log_path).read_bytes() == b"0123456789abcdefready\n"


def test_a_tail_for_which_the_disk_had_no_room_is_put_behind_the_head_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = BoundedLog(str(tmp_path / "log"), 2, 4)
    log.write(b"abcdefghijkl")
    write, room = os.write, [30, 0]

    def full_soon(fd: int, data: bytes) -> int:
        if taken := room.pop(0):
            return write(fd, data[:taken])
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_soon)
        log.finish()
    assert log.error is not None
    unroll(log.path)
    assert Path(log.path).read_bytes() == b"ab\n[gangq: 6 bytes dropped here]\nijkl"
    assert not Path(log.path + ".tail").exists()


def test_the_tail_can_be_read_live_and_beyond_the_head(start: Start) -> None:
    child = start("sh", "-c", "seq 1 5000; printf ready; sleep 1000", log_head=100, log_tail=64)
    ready(child)
    assert child.log_tail(15) == b"4999\n5000\nready"


def test_what_cannot_be_executed_is_a_typed_error_that_names_it(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo hello\n")
    with pytest.raises(CommandStartError, match=r"'no-such-program' in .*No such file.*PATH=") as caught:
        start("no-such-program")
    assert (caught.value.argv0, caught.value.cwd, caught.value.stage) == (
        "no-such-program",
        str(tmp_path),
        "exec",
    )
    with pytest.raises(CommandStartError, match=r"chmod \+x"):
        start(str(script))
    script.chmod(0o755)
    with pytest.raises(CommandStartError, match="no #! line"):
        start(str(script))
    with pytest.raises(CommandStartError, match=r"'/no/where'.*create that directory") as caught:
        start("true", cwd="/no/where")
    assert caught.value.stage == "cwd"
    with pytest.raises(CommandStartError, match="its log is '/no/log'"):
        start("true", log_path="/no/log")
    with pytest.raises(CommandStartError, match="null byte"):
        start("true", "a\0b")
    with pytest.raises(ValueError, match="argv is empty"):
        start()


def test_a_command_whose_deadline_is_past_is_never_started(start: Start, tmp_path: Path) -> None:
    with pytest.raises(CommandStartError, match="deadline has passed") as caught:
        start("touch", "ran", deadline_boottime=boottime() - 1)
    assert caught.value.stage == "deadline"
    assert not (tmp_path / "ran").exists()


def path_that_hangs(directory: Path) -> str:
    """A PATH in which to look for a program takes a minute, like one on a mount that does not answer."""
    (directory / "d").mkdir()
    for n in range(39):
        (directory / f"link{n}").symlink_to("d/../" * 800 + (f"link{n - 1}" if n else "d"))
    return os.pathsep.join([str(directory / "link38")] * 3000)


def below(pid: int) -> set[int]:
    """What descends from that process."""
    return procfs.descendants(procfs.table(), {pid})


def test_a_command_whose_program_is_not_found_in_time_is_killed_on_its_deadline(
    start: Start, tmp_path: Path
) -> None:
    before, began = below(os.getpid()), boottime()
    with pytest.raises(CommandStartError, match="deadline has passed") as caught:
        start("true", env={"PATH": path_that_hangs(tmp_path)}, deadline_boottime=began + 1)
    assert caught.value.stage == "deadline"
    assert 1 <= boottime() - began < 5
    eventually(lambda: below(os.getpid()) == before, "nothing of it is left")


def test_a_start_that_takes_too_long_says_where_it_may_hang_and_leaves_nothing(
    start: Start, tmp_path: Path
) -> None:
    before = below(os.getpid())
    with pytest.raises(CommandStartError, match=r"not started within 1 s; .*does not answer") as caught:
        start("true", env={"PATH": path_that_hangs(tmp_path)}, start_timeout_s=1)
    assert caught.value.stage == "timeout"
    os.mkfifo(tmp_path / "nobody-reads")
    with pytest.raises(CommandStartError, match=r"not started within 1 s; .*nobody-reads"):
        start("true", log_path=tmp_path / "nobody-reads", start_timeout_s=1)
    eventually(lambda: below(os.getpid()) == before, "nothing of it is left")


def test_when_the_worker_dies_before_the_program_is_found_nothing_of_it_is_left(tmp_path: Path) -> None:
    ask = {
        "argv": ["true"],
        "env": {"PATH": path_that_hangs(tmp_path)},
        "cwd": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "mark": f"w-{tmp_path.name}/1",
    }
    code = "import json, sys; from gangq.worker.child import Child; Child.start(**json.load(sys.stdin))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(ask).encode())
        process.stdin.close()
        eventually(lambda: len(below(process.pid)) == 2, "guardian and command are there")
        started = below(process.pid)
        process.kill()
    eventually(lambda: not any(map(alive, started)), "guardian and command have ended")


def guardian_whose(method: str, does: str, directory: Path) -> str:
    """The guardian's program, but once there is a file `begun` this method does this instead of ``was(...)``."""
    path = directory / "guardian_that_is_late.py"
    path.write_text(f"""
import os, sys, time
sys.path.append({str(Path(procfs.__file__).parents[1])!r})
from proc import guardian
was = guardian.Guardian.{method}
def late(*args, **more):
    until = time.monotonic() + 20
    while not os.path.exists({str(directory / "begun")!r}) and time.monotonic() < until:
        time.sleep(0.01)
    {does}
guardian.Guardian.{method} = late
guardian.main(int(sys.argv[1]))
""")
    return str(path)


def test_a_guardian_that_refuses_a_command_which_has_just_begun_ends_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_late = "return was(*args) or guardian._refusal('deadline', 'its deadline has passed already')"
    monkeypatch.setattr(launch, "_GUARDIAN", guardian_whose("hear", too_late, tmp_path))
    mark = f"w-{tmp_path.name}/1"
    spec = {
        "argv": python(DOUBLE_FORK, tmp_path / "begun"),
        "env": {**os.environ, "GANGQ_MARK": mark},
        "cwd": str(tmp_path),
        "log_path": str(tmp_path / "log"),
        "mark": mark,
        "worker_pid": os.getpid(),
        "cgroup": None,
    }
    numbers = ("log_head", "log_tail", "grace_s", "orphan_grace_s", "stuck_after_s")
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours:
        with theirs:
            process = launch._spawn(theirs, mark)
        with process:
            ours.sendall(
                json.dumps({**spec, **dict.fromkeys(numbers, 100), "deadline": None}).encode() + b"\n"
            )
            answer = json.loads(ours.recv(1 << 16))
            detached = written_pid(tmp_path / "begun")
            left = alive(detached)
            if left:
                os.kill(detached, signal.SIGKILL)
    assert (answer["event"], answer["stage"], left) == ("failed", "deadline", False)


@pytest.mark.parametrize("way", ["detached", "without its mark"])
def test_a_command_that_has_begun_when_its_start_takes_too_long_leaves_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(launch, "_GUARDIAN", guardian_whose("say", "time.sleep(60)", tmp_path))
    argv = python(DOUBLE_FORK, tmp_path / "begun")
    if way != "detached":
        argv = ["sh", "-c", "env -i sleep 1000 & echo $! > new; mv new begun; wait"]
    with pytest.raises(CommandStartError, match="not started within 4 s"):
        start(*argv, start_timeout_s=4)
    pid = written_pid(tmp_path / "begun")
    left = alive(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_command_whose_log_no_thread_can_be_started_for_runs_to_its_end_and_its_output_is_dropped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = 'raise RuntimeError("can\'t start new thread")'
    does = f"def full(): {full}\n    args[0].writer.start = full\n    return was(*args)"
    monkeypatch.setattr(launch, "_GUARDIAN", guardian_whose("watch", does, tmp_path))
    (tmp_path / "begun").touch()
    child = start(
        "sh", "-c", "head -c 1000000 /dev/zero; exec >&- 2>&-; until test -e go; do sleep 0.02; done; exit 7"
    )
    assert child.wait(0.5) is None
    (tmp_path / "go").touch()
    assert child.wait(10) == Exit(7, None, True)
    assert child.read_new_output() == b""
    (trouble,) = (vars(record) for record in caplog.records if record.msg == "guardian_trouble")
    assert trouble["log_error"] == "can't start new thread: its output is dropped"


def test_the_workers_own_mark_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGQ_MARK", "inc-5")
    with pytest.raises(ValueError, match="'inc-5/1'"):
        start("true", mark="inc-5")


def test_the_deadline_terminates_a_grace_earlier_and_kills_on_time(start: Start) -> None:
    at = boottime() + 1.0
    child = start(
        "sh",
        "-c",
        "trap 'echo term' TERM; echo ready; while :; do sleep 0.02; done",
        deadline_boottime=at,
        grace_s=0.5,
    )
    eventually(lambda: b"term" in child.log_tail(), "SIGTERM has come")
    assert at - 0.55 <= boottime() < at
    assert child.wait(10) == Exit(None, signal.SIGKILL, True, cause="deadline")
    assert at <= boottime() < at + 0.5
    assert b"term" in child.read_new_output()


def test_a_log_that_takes_no_more_does_not_make_the_deadline_late(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a file system that hangs: it is a pipe that nobody reads."""
    log = tmp_path / "log"
    os.mkfifo(log)
    unread = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    try:
        at = boottime() + 1.5
        child = start("yes", log_path=log, deadline_boottime=at, grace_s=0.3, stuck_after_s=1.0)
        eventually(lambda: not alive(child.pid), "the command has ended", 5)
        assert boottime() < at + 0.5
        assert child.wait(5) == Exit(None, signal.SIGTERM, True, cause="deadline")
    finally:
        os.close(unread)
    (trouble,) = [record for record in caplog.records if record.message == "guardian_trouble"]
    assert trouble.log_error == "its file system does not answer"  # type: ignore[attr-defined]


def test_a_command_is_gone_only_once_its_last_output_is_in_its_log(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = guardian_whose("write_log", "time.sleep(0.5); was(*args)", tmp_path)
    monkeypatch.setattr(launch, "_GUARDIAN", slow)
    child = start("sh", "-c", "echo last; touch begun")
    assert child.wait(10) == Exit(0, None, True)
    assert child.log_tail() == b"last\n"


def test_a_command_whose_output_nobody_takes_any_more_does_not_wait_for_that(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = guardian_whose("write_log", "args[0].log.write = int; was(*args)", tmp_path)
    monkeypatch.setattr(launch, "_GUARDIAN", faulty)
    child = start("sh", "-c", "touch begun; exec yes")
    assert child.wait(10) == Exit(None, signal.SIGPIPE, True)
    (trouble,) = [record for record in caplog.records if record.message == "guardian_trouble"]
    assert "ValueError" in trouble.log_error  # type: ignore[attr-defined]


def test_a_renewed_deadline_lets_the_command_live(start: Start) -> None:
    child = start("sh", "-c", "sleep 0.9; exit 8", deadline_boottime=boottime() + 0.5, grace_s=0.1)
    child.set_deadline(boottime() + 60)
    assert child.wait(10) == Exit(8, None, True)


def test_a_shortened_deadline_is_obeyed(start: Start) -> None:
    child = start("sleep", "1000", deadline_boottime=boottime() + 600, grace_s=0)
    child.set_deadline(boottime() + 0.2, grace_s=0)
    ended = child.wait(10)
    assert ended is not None
    assert ended.cause == "deadline"


def test_signals_to_the_guardian_do_not_end_it(start: Start) -> None:
    child = start("sh", "-c", "until test -e go; do sleep 0.02; done; exit 2")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        os.kill(child.guardian_pid, number)
    assert child.wait(0.3) is None
    Path(os.path.dirname(child.log_path), "go").touch()
    assert child.wait(10) == Exit(2, None, True)


def test_the_group_of_a_command_that_was_reaped_may_be_anothers_and_is_not_signalled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *what: sent.append(what))
    one = guardian.Guardian(0, 0, inside=False)
    os.close(one.timer.fd)
    one.child = 77
    one.signal_group(signal.SIGTERM)
    one.reaped = True
    one.signal_group(signal.SIGKILL)
    assert sent == [(77, signal.SIGTERM)]


def test_a_deadline_that_finds_only_the_rest_of_a_group_is_not_why_the_command_ended() -> None:
    one = guardian.Guardian(0, 0, inside=False)
    os.close(one.timer.fd)
    one.cause, one.status = "stop", 0
    one.begin_kill("deadline")
    assert (one.killing, one.cause) == (True, "stop")


def test_a_stopped_guardian_is_woken_by_a_stop(start: Start) -> None:
    child = start("sleep", "1000")
    os.kill(child.guardian_pid, signal.SIGSTOP)
    eventually(lambda: getattr(procfs.stat(child.guardian_pid), "state", "") == "T", "it is stopped")
    child.stop(5)
    assert child.wait(10) == Exit(None, signal.SIGTERM, True, cause="stop")


def test_when_the_guardian_is_killed_the_worker_kills_and_confirms_the_tree_itself(
    start: Start, tmp_path: Path
) -> None:
    # A grandchild in the group, and one in a session of its own that still carries the mark.
    (tmp_path / "detach.py").write_text(DOUBLE_FORK)
    script = f"sleep 1000 & echo $! > near; {sys.executable} detach.py far; seq 1 100; echo ready; wait"
    child = start("sh", "-c", script, log_head=10, log_tail=50)
    ready(child)
    near, far = written_pid(tmp_path / "near"), written_pid(tmp_path / "far")
    os.kill(child.guardian_pid, signal.SIGKILL)
    assert child.wait(10) == Exit(None, None, True, cause="guardian_lost")
    assert not any(map(alive, (child.pid, near, far)))
    assert b"bytes dropped here" in child.read_new_output()
    assert child.log_tail(6) == b"ready\n"


def test_a_worker_that_closes_its_channel_has_orphaned_its_command(start: Start) -> None:
    child = start("sleep", "1000")
    child._sock.shutdown(socket.SHUT_WR)
    assert child.wait(5) == Exit(None, signal.SIGTERM, True, cause="orphan")


@contextlib.contextmanager
def worker(tmp_path: Path, code: str = WORKER, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """A worker process with one command: its Popen, the command's pid, the guardian's pid."""
    ask = {"cwd": str(tmp_path), "log_path": str(tmp_path / "log"), "mark": f"w-{tmp_path.name}/1", **options}
    argv = python(code, json.dumps(ask))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            command, guardian = map(int, process.stdout.readline().split())
            yield process, command, guardian
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_when_the_worker_is_killed_its_command_gets_the_orphan_grace_and_the_whole_tree_goes(
    tmp_path: Path,
) -> None:
    script = f"sleep 1000 & echo $! > near; trap 'touch term' TERM; {IGNORES_SIGTERM.split(';', 1)[1]}"
    with worker(tmp_path, argv=["sh", "-c", script], orphan_grace_s=0.5) as (process, command, guardian):
        near = written_pid(tmp_path / "near")
        eventually(lambda: b"ready" in (tmp_path / "log").read_bytes(), "the command is ready")
        process.kill()
        eventually((tmp_path / "term").exists, "SIGTERM has come")
        heard = time.monotonic()
        eventually(lambda: not any(map(alive, (command, near, guardian))), "the whole tree has ended")
        assert 0.2 < time.monotonic() - heard < 3


def test_a_fork_of_the_worker_that_holds_the_channel_open_does_not_hide_the_workers_death(
    tmp_path: Path,
) -> None:
    forking = WORKER.replace("time.sleep(1000)", "os.fork()\ntime.sleep(1000)")
    options: dict[str, Any] = {"argv": ["sleep", "1000"], "orphan_grace_s": 0.2}
    with worker(tmp_path, forking, **options) as (process, command, _):
        fork = eventually(
            lambda: [e for e in procfs.table().values() if e.pgrp == process.pid != e.pid], "it has forked"
        )
        process.kill()
        eventually(lambda: not alive(command), "the command has ended", 3)
        assert alive(fork[0].pid)


def test_a_command_whose_guardian_died_before_it_could_be_told_does_not_begin() -> None:
    program = (
        "import os; from gangq.proc.guardian import Guardian\n"
        "one = Guardian(-1, -1, False)\n"
        "one.become({{'cwd': '/', 'argv': ['true'], 'env': {{}}}}, os.pipe()[1], os.pipe()[1], {parent})"
    )
    codes = [
        subprocess.run([sys.executable, "-c", program.format(parent=parent)], timeout=30).returncode
        for parent in (os.getpid(), 1 << 22)
    ]
    assert codes == [0, 127]


def test_when_worker_and_guardian_are_killed_together_the_command_dies_of_it(tmp_path: Path) -> None:
    with worker(tmp_path, argv=["sleep", "1000"]) as (process, command, guardian):
        process.send_signal(signal.SIGSTOP)
        os.kill(guardian, signal.SIGKILL)
        process.kill()
        eventually(lambda: not alive(command), "the command has ended", 3)


def test_a_stopped_worker_does_not_make_the_deadline_late(tmp_path: Path) -> None:
    options: dict[str, Any] = {"argv": ["sh", "-c", IGNORES_SIGTERM], "deadline_in": 1.0, "grace_s": 0.3}
    with worker(tmp_path, **options) as (process, command, guardian):
        at = boottime() + 1.0
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: not alive(command), "the command has ended", 5)
        assert at - 0.3 < boottime() < at + 0.5
        eventually(lambda: not alive(guardian), "the guardian has ended", 5)


@can_freeze
def test_what_survives_sigkill_is_reported_as_stuck_and_as_gone_when_it_dies_after_all(start: Start) -> None:
    child = start("sleep", "1000", stuck_after_s=0.5)
    with frozen(child.pid) as thaw:
        child.kill()
        assert child.wait(10) == Exit(None, None, False, (child.pid,), "stuck")
        assert child.poll() == Exit(None, None, False, (child.pid,), "stuck")
        thaw()
        assert eventually(lambda: (e := child.poll()) is not None and e.tree_dead, "the tree has ended")
        assert child.poll() == Exit(None, signal.SIGKILL, True, cause="kill")

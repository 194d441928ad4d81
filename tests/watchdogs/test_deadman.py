"""The dead man's switch, in processes of their own, since it works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangq.errors import Unsupported
from gangq.proc.clock import boottime
from gangq.watchdogs import deadman
from gangq.watchdogs.deadman import Deadman

PRELUDE = """
import ctypes, os, re, signal, sys, threading, time
from gangq.proc.clock import boottime
from gangq.watchdogs.deadman import Deadman
def hold_the_gil():
    holding = ctypes.PyDLL(None)
    while True:
        holding.sleep(30)
def backtrack():
    re.match(r"(a+)+$", "a" * 40 + "b")
def say(*words):
    print(*words, flush=True)
"""


PROMPT_S = 5.0
"""The promise of a trip, seconds. What hangs here hangs for ever, so only the switch ends it. The status says which
timer that was, and that it was not early says that it was set right. A host under load reaps a process late.
"""


def run(code: str, *, prefix: tuple[str, ...] = ()) -> tuple[int, float, str]:
    """Exit status, how late it died (s), and standard error; the code prints its deadline first."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", PRELUDE + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=15)
    finally:
        process.kill()
    return process.returncode, boottime() - float(out.split()[0]), err


@pytest.mark.parametrize("hang", ["hold_the_gil()", "backtrack()", "time.sleep(60)"])
@pytest.mark.parametrize("code", [77, 124])
def test_it_kills_on_time_with_the_chosen_code_whatever_the_interpreter_does(hang: str, code: int) -> None:
    status, late, _ = run(f"at = boottime() + 0.3; say(at); Deadman().arm(at, {code}); {hang}")
    assert status == code
    assert 0 <= late < PROMPT_S


def test_a_thread_could_not_have_done_it() -> None:
    # The check of the check: with the GIL held like this, a Python thread's os._exit comes far too late.
    code = (
        "at = boottime() + 0.2; say(at)\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), os._exit(1)), daemon=True).start()\n"
        "Deadman().arm(at + 0.6)\n"
        "hold_the_gil()\n"
    )
    status, late, _ = run(code)
    assert status == 77
    assert late > 0.55


def test_a_new_deadline_replaces_the_former_one_and_its_code() -> None:
    code = (
        "switch = Deadman(); switch.arm(boottime() + 1, 78); switch.arm(boottime() + 1, 79)\n"
        "at = boottime() + 1.4; say(at); switch.arm(at, 79); hold_the_gil()\n"
    )
    status, late, _ = run(code)
    assert status == 79
    assert 0 <= late < PROMPT_S


def test_disarmed_it_lets_the_process_live_and_can_be_armed_again() -> None:
    code = (
        "switch = Deadman(); switch.arm(boottime() + 1); switch.disarm(); time.sleep(1.4)\n"
        "at = boottime() + 0.1; say(at); switch.arm(at, 80); hold_the_gil()\n"
    )
    status, late, _ = run(code)
    assert status == 80
    assert 0 <= late < PROMPT_S


def test_a_deadline_in_the_past_kills_at_once() -> None:
    status, late, _ = run("say(boottime()); Deadman().arm(5.0, 81); hold_the_gil()")
    assert status == 81
    assert 0 <= late < PROMPT_S


def test_stacks_are_written_a_grace_before_the_end_even_with_the_gil_held() -> None:
    code = (
        "at = boottime() + 0.6; say(at)\n"
        "Deadman(dump_file=sys.stderr).arm(at, 82, dump_before_s=0.3)\n"
        "hold_the_gil()\n"
    )
    status, late, err = run(code)
    assert status == 82
    assert 0 <= late < PROMPT_S
    assert "in hold_the_gil" in err


def test_armed_again_without_a_grace_it_writes_no_stacks() -> None:
    code = (
        "at = boottime() + 0.6; say(at); switch = Deadman(dump_file=sys.stderr)\n"
        "switch.arm(at, 82, dump_before_s=0.3); switch.arm(at, 82); hold_the_gil()\n"
    )
    status, _, err = run(code)
    assert (status, err) == (82, "")


def test_a_timer_that_could_not_be_set_is_set_anew_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: deadman.KernelTimer, at: float) -> None:
        raise OSError("timer_settime")

    switch, at, set_to = Deadman(), boottime() + 600, list[float]()
    switch.arm(at)
    with monkeypatch.context() as patch:
        patch.setattr(deadman.KernelTimer, "set", fails)
        with pytest.raises(OSError, match="timer_settime"):
            switch.arm(at + 1)
        patch.setattr(deadman.KernelTimer, "set", lambda self, at: set_to.append(at))
        switch.arm(at)
    switch.disarm()
    assert set_to == [at + 0.25, at]


def test_a_stopped_process_is_killed_by_the_second_timer_without_being_continued() -> None:
    code = "at = boottime() + 0.5; say(at); Deadman().arm(at); os.kill(os.getpid(), signal.SIGSTOP)"
    status, late, _ = run(code)
    assert status == -signal.SIGKILL
    assert 0.2 <= late < PROMPT_S


def test_a_forked_child_is_not_killed_by_its_parents_switch(tmp_path: Path) -> None:
    code = (
        "at = boottime() + 1; say(at); Deadman().arm(at, 84)\n"
        "if os.fork() == 0:\n"
        "    os.close(1); os.close(2); time.sleep(1.6)\n"
        f"    open({str(tmp_path / 'x')!r}, 'w'); os._exit(0)\n"
        "hold_the_gil()\n"
    )
    assert run(code)[0] == 84
    until = time.monotonic() + 10
    while not (tmp_path / "x").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a pid namespace needs root and unshare"
)
def test_it_works_as_pid_one_which_sigkill_from_inside_cannot_kill() -> None:
    pid_one = ("unshare", "--pid", "--fork", "--mount-proc")
    hang = "assert os.getpid() == 1; os.kill(1, signal.SIGKILL); hold_the_gil()"
    status, late, err = run(f"at = boottime() + 0.5; say(at); Deadman().arm(at, 85); {hang}", prefix=pid_one)
    assert status == 85, err
    assert 0 <= late < PROMPT_S


def test_arming_again_costs_microseconds() -> None:
    switch = Deadman()
    before = time.thread_time()
    for _ in range(1000):
        switch.arm(boottime() + 600)
    spent = time.thread_time() - before
    switch.disarm()
    assert spent < 0.1


def test_a_code_for_which_the_kernel_gave_no_timer_is_asked_for_again() -> None:
    code = (
        "import resource\n"
        "switch, pending = Deadman(), resource.RLIMIT_SIGPENDING\n"
        "switch.arm(boottime() + 600, 75)\n"
        "limits = resource.getrlimit(pending)\n"
        "resource.setrlimit(pending, (0, limits[1]))\n"
        "at = boottime() + 0.3; say(at)\n"
        "try: switch.arm(at, 78)\n"
        "except Unsupported: resource.setrlimit(pending, limits)\n"
        "else: os._exit(1)\n"
        "switch.arm(at, 78); hold_the_gil()\n"
    )
    status, _, err = run(f"from gangq.errors import Unsupported\n{code}")
    assert status == 78, err


def test_elsewhere_than_on_linux_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadman.sys, "platform", "darwin")
    with pytest.raises(Unsupported, match="darwin"):
        Deadman()


def test_another_clock_is_refused() -> None:
    with pytest.raises(ValueError, match="'wall'"):
        Deadman("wall")

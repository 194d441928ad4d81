"""The last line of a process that nobody supervises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from test_deadman import PROMPT_S, run

from gangq.errors import InvalidInput
from gangq.watchdogs import Backstop, ExitCode

START = "from gangq.watchdogs import Backstop\nstop = Backstop(silence_s={silence}{more}).start()\n"


# A lock that C waits for is not interrupted by the signal that writes the stacks; a sleep is, and then Python runs
# for a moment.
LOCK = "lock = ctypes.create_string_buffer(64); c = ctypes.PyDLL(None); [c.pthread_mutex_lock(lock) for _ in 'ab']"


def test_a_frozen_interpreter_is_ended_when_it_has_been_silent_for_too_long() -> None:
    code = START.format(silence=0.6, more=", dump_file=sys.stderr")
    hangs = [LOCK, "hold_the_gil()", "backtrack()"]
    with ThreadPoolExecutor(len(hangs)) as pool:
        runs = pool.map(lambda hang: run(f"{code}time.sleep(1.0); say(boottime()); {hang}"), hangs)
        for hang, (status, late, err) in zip(hangs, runs, strict=True):
            assert status == ExitCode.FROZEN, hang
            # The last sign was at most a sixth of the silence before the freeze.
            assert 0.4 <= late < PROMPT_S, hang
            assert "hread 0x" in err, hang


def test_a_process_that_is_only_busy_or_waiting_lives() -> None:
    code = START.format(silence=0.5, more="")
    spin = "until = time.monotonic() + 1.5\nwhile time.monotonic() < until: pass\n"
    for way in (spin, "time.sleep(1.5)\n", "import threading; threading.Event().wait(1.5)\n"):
        status, _, err = run(f"{code}say(boottime()); {way}")
        assert status == 0, (way, err)


def test_stopped_it_ends_nobody() -> None:
    code = START.format(silence=0.4, more="") + "stop.stop(); say(boottime())\n"
    # A thread may give a sign that it began before that.
    for more in ("", "time.sleep(0.2); stop.sign(); "):
        status, _, err = run(f"{code}{more}ctypes.PyDLL(None).usleep(900000)")
        assert status == 0, err


def test_the_signs_are_passed_on() -> None:
    more = ", interval_s=0.05, beat=lambda: beats.append(1)"
    code = f"beats = []\n{START.format(silence=0.4, more=more)}"
    status, _, err = run(
        f"{code}time.sleep(0.5); assert len(beats) > 4, beats; say(boottime()); hold_the_gil()"
    )
    assert status == 80, err


def test_a_stopped_process_is_ended_too() -> None:
    code = START.format(silence=0.4, more="")
    status, late, _ = run(f"{code}say(boottime()); os.kill(os.getpid(), signal.SIGSTOP)")
    assert status == -9
    assert late < PROMPT_S


def test_a_timer_that_cannot_be_set_any_more_is_no_silence() -> None:
    more = ", interval_s=0.05, beat=lambda: beats.append(1)"
    code = (
        f"beats = []\n{START.format(silence=0.4, more=more)}"
        "def no(*a, **k): raise OSError(11, 'timer_settime')\n"
        "right, stop._deadman.arm = stop._deadman.arm, no\n"
        "time.sleep(0.8); assert len(beats) > 8, beats\n"
        "stop._deadman.arm = right; time.sleep(0.3); say(boottime()); hold_the_gil()"
    )
    status, late, err = run(code)
    assert (status, late < PROMPT_S, err.count("backstop_lost")) == (ExitCode.FROZEN, True, 1), err


def test_it_can_be_told_to_allow_for_more_and_for_less() -> None:
    # At once, and not only with the next sign.
    code = START.format(silence=1, more=", interval_s=0.5")
    assert run(f"{code}stop.allow(5); say(boottime()); ctypes.PyDLL(None).usleep(2000000)")[0] == 0
    status, late, err = run(f"{code}stop.allow(60); stop.allow(1); say(boottime()); hold_the_gil()")
    assert (status, 0.5 < late < PROMPT_S) == (ExitCode.FROZEN, True), err


@pytest.mark.parametrize("more", ["", ", interval_s=10"])
def test_less_silence_than_two_signs_take_is_refused(more: str) -> None:
    code = START.format(silence=60, more=more)
    refused = "try: stop.allow({silence})\nexcept InvalidInput: pass\nelse: raise SystemExit(3)\n"
    code = f"from gangq.errors import InvalidInput\n{code}{refused.format(silence=19.9)}stop.allow(20)\n"
    assert run(f"{code}say(boottime())")[0] == 0


def test_where_no_thread_can_be_started_nothing_is_armed() -> None:
    code = (
        "import threading\n"
        "def no(*_, **__): raise RuntimeError('no thread')\n"
        "threading.Thread.start = no\n"
        "from gangq.watchdogs import Backstop\n"
        "try: Backstop(silence_s=0.3).start()\n"
        "except RuntimeError: say(boottime())\n"
        "time.sleep(0.9)"
    )
    status, _, err = run(code)
    assert status == 0, err


@pytest.mark.parametrize("junk", [{"silence_s": 0}, {"silence_s": "30"}, {"silence_s": 1, "interval_s": 1}])
def test_a_setting_that_makes_no_sense_is_refused_by_name(junk: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=list(junk)[-1]):
        Backstop(**junk)  # type: ignore[arg-type]

"""A worker asks a handler's process where its threads stand: whom it asks, and what it does to those."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gangq.watchdogs import dumps, waits

PROGRAM = """
import ctypes, os, pathlib, sys, threading, time
from gangq.watchdogs import dumps

def handler():
    {body}

dumps.offer(pathlib.Path({directory!r}))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
handler()
"""


def started(directory: Path, body: str) -> subprocess.Popen[str]:
    script = directory / "train.py"
    body = textwrap.indent(body, "    ").strip()
    script.write_text(PROGRAM.format(body=body, directory=str(directory)), encoding="utf-8")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> int | None:
    """Its exit code, None where it lived."""
    time.sleep(0.1)
    code = process.poll()
    process.kill()
    process.communicate()
    return code


def until_it_stands_in(directory: Path, process: subprocess.Popen[str], name: str) -> waits.Waits:
    deadline = time.monotonic() + 20
    while True:
        seen = waits.of_processes([process.pid], directory)
        if name in seen.stack:
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.02)


def test_a_handler_is_told_with_its_line_again_and_again_and_lives_on(tmp_path: Path) -> None:
    process = started(tmp_path, "lock = threading.Lock()\nlock.acquire()\nlock.acquire()")
    for _ in range(3):
        seen = until_it_stands_in(tmp_path, process, "lock.acquire()")
        assert str(seen.place).endswith("handler at train.py:8")
        assert seen.stack.splitlines()[-1].strip() == "lock.acquire()"
        assert seen.stacks.count("Current thread") == 1
        assert "in wait\n" in seen.stacks, "the other thread"
    assert ended(process) is None


def test_it_answers_while_c_holds_the_interpreter(tmp_path: Path) -> None:
    process = started(tmp_path, "while True:\n    ctypes.PyDLL(None).pause()")
    seen = until_it_stands_in(tmp_path, process, "pause()")
    assert "handler at train.py:7" in str(seen.place)
    assert ended(process) is None


@pytest.mark.parametrize("name", ["forked", "replaced"])
def test_what_would_die_of_the_signal_or_answer_for_another_is_not_asked(tmp_path: Path, name: str) -> None:
    """A program that a handler became does not catch the signal; a fork writes into the file of another."""
    body = {
        "forked": "forked = os.fork()\nif forked:\n    print(forked, flush=True)\ntime.sleep(600)",
        "replaced": "print(os.getpid(), flush=True)\nos.execlp('sleep', 'sleep', '600')",
    }[name]
    process = started(tmp_path, body)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    deadline = time.monotonic() + 20
    while name == "replaced" and Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() != "sleep":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = dumps.path_of(tmp_path, process.pid).stat().st_size
    assert dumps.ask(tmp_path, pid) == ""
    assert dumps.path_of(tmp_path, process.pid).stat().st_size == before
    os.kill(pid, 0)
    if pid != process.pid:
        os.kill(pid, signal.SIGKILL)
    assert ended(process) is None


def test_a_stopped_process_is_asked_in_vain_and_not_for_long(tmp_path: Path) -> None:
    process = started(tmp_path, "time.sleep(600)")
    os.kill(process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert dumps.ask(tmp_path, process.pid) == ""
    assert time.monotonic() - began < 5
    assert dumps.ask(tmp_path, 2**22 + 1) == "", "there is no such process"
    assert ended(process) is None

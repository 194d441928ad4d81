"""`App.run_worker()` in somebody's program: when it returns, the process is as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from worker.worker_process import eventually

_PROGRAM = """
import ctypes, json, logging, os, signal, sys, tempfile, threading, time
import gangq
app = gangq.App(sys.argv[1])
logging.basicConfig()

def state():
    return {
        "environ": dict(os.environ),
        "signals": {n: str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)},
        "wakeup": signal.set_wakeup_fd(-1),
        "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
        "name": open("/proc/self/comm").read(),
        "threads": [one.name for one in threading.enumerate()],
        "directories": [one for one in made if os.path.exists(one)],
        "streams": (sys.stdout, sys.stderr, logging.root.handlers[0].stream),
    }

made, make = [], tempfile.mkdtemp

def noted(**options):
    if sys.argv[2] == "no place":
        raise PermissionError(13, "Permission denied")
    made.append(make(**options))
    return made[-1]

def no_thread(_):
    raise gangq.GangqError("can't start new thread")

tempfile.mkdtemp = noted
if sys.argv[2] == "no thread":
    from gangq.gpu import SamplerProcess
    SamplerProcess.start = no_thread

os.environ["CUDA_VISIBLE_DEVICES"] = "7"
before = state()
try:
    code = app.run_worker(once=True, devices="2x1GiB", name="w1")
except gangq.GangqError as problem:
    code = str(problem)
after = state()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(json.dumps({"code": code, "child": child, "changed": [k for k in before if before[k] != after[k]]}), flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.parametrize("how", ["ends", "no place", "no thread"])
def test_everything_is_put_back_and_what_is_forked_later_outlives_the_program(
    dsn: str, tmp_path: Path, how: str
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, dsn, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        cwd=tmp_path,
    )
    assert program.stdout is not None
    said = json.loads(program.stdout.readline())
    try:
        assert said["changed"] == []
        said_of = {
            "no place": "finds no place for its socket and logs",
            "no thread": "can't start new thread",
        }
        if how == "ends":
            assert said["code"] == 0
        else:
            assert said_of[how] in said["code"]
        assert program.stdin is not None
        program.stdin.close()
        program.wait(10)
        # Its parent's death would have reached it by now: the kernel sends the signal before the parent is reaped.
        os.kill(said["child"], 0)
        eventually(lambda: _parent(said["child"]) != program.pid, "it has another parent")
        assert _state(said["child"]) not in "ZX"
    finally:
        os.kill(said["child"], signal.SIGKILL)
        program.kill()
        program.wait(10)
        program.stdout.close()


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    return int(_fields(pid)[1])


def _state(pid: int) -> str:
    return _fields(pid)[0]

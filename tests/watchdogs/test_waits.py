"""What a job waits in is told by its system call, its line and what is behind the call."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from gangq.watchdogs import waits


def child(tmp_path: Path, body: str, first: str = "") -> subprocess.Popen[str]:
    """A Python whose main thread does `first`, then waits as `body` says; asked, it prints what it waits in."""
    script = tmp_path / "train.py"
    script.write_text(
        "import fcntl, json, os, socket, sys, threading, time\n"
        "from gangq.watchdogs import waits\n" + first + "def ask():\n"
        "    sys.stdin.readline()\n"
        "    print(json.dumps(waits.of_handler().as_json()), flush=True)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "print('up', flush=True)\n" + textwrap.dedent(body)
    )
    found = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "up\n"
    return found


def until_it_waits_in(pid: int, call: str) -> None:
    deadline = time.monotonic() + 20
    while waits._call(pid, pid)[0] != call:
        assert time.monotonic() < deadline, waits._call(pid, pid)
        time.sleep(0.02)


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(process.communicate("\n", timeout=20)[0])
    return found


def test_a_handler_in_recv_is_told_with_its_line_its_function_and_its_peer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = child(
            tmp_path,
            f"""
            def allreduce():
                peer.recv(1)
            peer = socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
            allreduce()
            """,
        )
        until_it_waits_in(process.pid, "recv")
        seen = waits.of_processes([process.pid])
        assert seen.place == f"recv() of {os.path.basename(sys.executable)}"
        assert seen.waits_for == (f"peer:{socket.gethostname()}",)
        found = told(process)
    assert found["place"] == "recv() of allreduce at train.py:11"
    assert found["waits_for"] == [f"peer:{socket.gethostname()}"]
    assert "peer.recv(1)" in str(found["handler"])
    assert "threading.py" not in str(found["handler"])


def test_a_handler_in_a_fork_is_told_with_its_call(tmp_path: Path) -> None:
    fork = "forked = os.fork()\nif forked: os._exit(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))\n"
    process = child(tmp_path, "os.read(os.pipe()[0], 1)", first=fork)
    (forked,) = psutil.Process(process.pid).children()
    until_it_waits_in(forked.pid, "read")
    assert str(told(process)["place"]).startswith("read() of ")


@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user needs root")
def test_a_worker_that_has_closed_itself_still_tells_the_call_of_its_handler(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = child(
            tmp_path,
            f"""
            from gangq import private
            peer = socket.create_connection(("127.0.0.1", {server.getsockname()[1]}))
            private.close()
            os.setuid(65534)
            peer.recv(1)
            """,
        )
        until_it_waits_in(process.pid, "recv")
        found = told(process)
    assert str(found["place"]).startswith("recv() of <module> at train.py:")


def test_a_handler_that_waits_for_a_file_is_told_with_its_file_system(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = child(tmp_path, f"fcntl.flock(open({str(lock)!r}), fcntl.LOCK_EX)\n")
        until_it_waits_in(process.pid, "flock")
        found = told(process)
    assert str(found["place"]).startswith("flock() of <module> at train.py:")
    (thing,) = found["waits_for"]  # type: ignore[misc]
    assert str(thing).startswith(f"fs:{socket.gethostname()}:/")


@pytest.mark.parametrize(
    ("line", "path", "thing"),
    [
        ("36 35 0:50 / /data rw - nfs4 nas:/export rw", "/data/set/1", "fs:nas:/export"),
        ("36 35 0:50 / /data rw - ceph mon1:6789:/ rw", "/data", "fs:mon1:6789:/"),
        ("36 35 8:1 / /data rw - ext4 /dev/sda1 rw", "/data/x", f"fs:{socket.gethostname()}:/data"),
        ("36 35 0:50 / /data rw - nfs4 nas:/export rw", "/database", f"fs:{socket.gethostname()}:/"),
        (
            "36 35 0:50 / /donn\u00e9es\\040\u6570 rw - nfs4 nas:/export rw",
            "/donn\u00e9es \u6570/x",
            "fs:nas:/export",
        ),
    ],
)
def test_a_network_file_system_is_the_same_on_every_host_and_a_local_one_is_not(
    monkeypatch: pytest.MonkeyPatch, line: str, path: str, thing: str
) -> None:
    root = "25 1 8:1 / / rw,relatime - ext4 /dev/root rw"
    monkeypatch.setattr(waits.procfs, "text", lambda *_: f"{root}\n{line}\n")
    assert waits._file_system(1, path) == thing


def test_a_process_that_is_gone_waits_in_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert waits.of_processes([gone.pid]).as_json() == {}

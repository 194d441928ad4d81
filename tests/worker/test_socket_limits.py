"""The worker's socket against jobs that flood it, and against what they say of their end."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangq.client import Client
from gangq.errors import GangqError, InvalidInput, WorkerGone
from gangq.worker.child_context import Link
from gangq.worker.jobs import ActiveJob
from gangq.worker.socket_server import SocketServer
from worker.parts import claimed, session_of, source_of

_FLOOD = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = []
for _ in range(1500):
    one = socket.socket(socket.AF_UNIX)
    one.connect(sys.argv[1])
    kept.append(one)
print("all", flush=True)
time.sleep(600)
"""


@pytest.fixture
def served(client: Client, tmp_path: Path) -> Iterator[tuple[SocketServer, ActiveJob]]:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    server = SocketServer(session, tmp_path / "s")
    session.control.wait(server.start())
    yield server, job
    session.control.wait(server.stop())


@pytest.fixture
def few_files() -> Iterator[int]:
    """This process may have 256 files, as a service may by its unit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_connections_by_the_thousand_keep_nobody_from_the_worker(
    served: tuple[SocketServer, ActiveJob], few_files: int
) -> None:
    server, job = served
    flood = subprocess.Popen([sys.executable, "-c", _FLOOD, str(server.path)], stdout=subprocess.PIPE)
    try:
        assert flood.stdout is not None
        assert flood.stdout.readline() == b"all\n"
        link = Link(str(server.path), job.key)
        link.ask("beat", data={"step": 1})
        assert job.take_beat() == {"step": 1}
        link.close()
        assert len(os.listdir("/proc/self/fd")) < few_files
    finally:
        flood.kill()
        flood.communicate()


def test_a_worker_without_a_descriptor_left_answers_as_soon_as_it_has_one(
    served: tuple[SocketServer, ActiveJob], few_files: int
) -> None:
    server, job = served
    with socket.socket(socket.AF_UNIX) as early:
        early.settimeout(10)
        taken = []
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        early.connect(str(server.path))
        early.sendall(json.dumps({"key": job.key, "op": "beat", "data": {"step": 2}}).encode() + b"\n")
        for fd in taken:
            os.close(fd)
        assert json.loads(early.recv(4096))["ok"]


@pytest.mark.parametrize(("op", "sent"), [("beat", 2), ("submit", 1)])
def test_a_request_whose_connection_was_cut_is_sent_once_more_where_that_does_no_harm(
    served: tuple[SocketServer, ActiveJob], op: str, sent: int
) -> None:
    server, job = served
    asked: list[str] = []

    def cut_once(_job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        asked.append(op)
        if len(asked) == 1:
            raise ConnectionResetError("cut")
        return {}

    server._ops[op] = cut_once
    with Link(str(server.path), job.key) as link:
        if sent == 1:
            with pytest.raises(WorkerGone):
                link.ask(op)
        else:
            assert link.ask(op) == {}
    assert len(asked) == sent


@pytest.mark.parametrize(
    "error",
    [
        None,
        "text",
        {"type": [1], "message": {"a": float("nan")}},
        {"type": "E", "message": "m", "n": float("nan")},
    ],
)
def test_an_error_that_cannot_be_stored_is_refused_and_another_takes_its_place(
    served: tuple[SocketServer, ActiveJob], error: Any
) -> None:
    server, job = served
    link = Link(str(server.path), job.key)
    with pytest.raises(GangqError, match="error"):
        link.ask("outcome", kind="error", error=error)
    assert job.work_end is not None
    assert job.work_end["error"]["type"] == "MalformedOutcome"
    link.ask("outcome", kind="error", error={"type": "E\0", "message": "m"})
    assert job.work_end["error"]["type"] == "E\ufffd"
    link.close()


def test_json_twenty_thousand_deep_is_answered_with_a_sentence(
    served: tuple[SocketServer, ActiveJob],
) -> None:
    server, _ = served
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(server.path))
        raw.sendall(b'{"key": ' + b"[" * 20000 + b"]" * 20000 + b"}\n")
        answer = json.loads(raw.recv(4096))
        assert (answer["ok"], answer["error"]) == (False, InvalidInput.__name__)

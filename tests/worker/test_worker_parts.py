"""The worker's small parts: ports, text, environments, what goes over the wire."""

from __future__ import annotations

import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client.rows import Claim
from gangq.commands import COMMAND
from gangq.context import DeviceInfo, GangInfo, Peer
from gangq.worker import gangs, handler_info, main
from gangq.worker.child_context import ChildContext
from gangq.worker.dispatch import Dispatcher
from gangq.worker.environment import scrubbed
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob
from gangq.worker.main import Worker
from gangq.worker.options import default_name
from gangq.worker.results import clean
from gangq.worker.runner_command import Command


def test_a_port_given_to_a_member_stays_bound_until_it_starts() -> None:
    ports = PortHolder(1)
    first = ports.offer()[0]
    assert ports.offer() == [first]
    ports.give(first)
    second = ports.offer()[0]
    assert second != first
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", first))
    ports.release(first)
    with socket.socket() as other:
        other.bind(("", first))
    ports.close()


def test_a_port_that_is_let_go_of_twice_stays_bound_where_it_is_offered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = PortHolder(1)
    (port,) = ports.offer()
    ports.give(port)
    ports.release(port)
    monkeypatch.setattr(gangs, "_RANGE", [port])
    assert ports.offer() == [port]
    ports.release(port)
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", port))
    ports.close()


def test_a_job_that_cannot_be_run_lets_go_of_its_port() -> None:
    ports = PortHolder(1)
    (port,) = ports.offer()
    ports.give(port)
    about = {"job_id": 1, "token": 1, "light": False, "gang_id": 1, "epoch": 1, "rank": 0}
    claim: Any = SimpleNamespace(task=COMMAND, payload={"argv": 7}, master_port=port, **about)
    job = ActiveJob(claim)
    failed: list[ActiveJob] = []
    reporter: Any = SimpleNamespace(failed=lambda job, *_, **__: failed.append(job))
    Dispatcher(None, None, 0, None, reporter, ports).run(job, None, lambda *_: None)  # type: ignore[arg-type]
    assert failed == [job]
    with socket.socket() as program:
        program.bind(("", port))
    ports.close()


def test_text_for_the_database_has_no_nul_and_a_limit() -> None:
    assert clean("a\0b") == "a\ufffdb"
    assert clean("\ud800") == "?"
    cut = clean("x" * 100_000)
    assert len(cut) < 17_000
    assert "84100 characters left out" in cut
    assert clean(cut) == cut, "a traceback passes here in its process and at its worker"


def test_no_secret_is_inherited() -> None:
    kept = scrubbed({"GANGQ_DSN": "x", "PGPASSWORD": "x", "PGHOST": "x", "PATH": "/bin", "GANGQ_TOKEN": "1"})
    assert kept == {"PATH": "/bin"}


def test_facts_survive_the_wire() -> None:
    device = {"uuid": "u", "index": 0, "vram_mb": 1024, "source": "nvml"}
    about = {"job_id": 1, "token": 2, "attempt": 1, "task": "t", "payload": {"a": 1}, "devices": [device]}
    job = ActiveJob(Claim(**dict.fromkeys(Claim._fields) | about))
    job.enter_gang(GangInfo(7, 2, 0, 1, 0, 0, 1, (Peer(0, 1, "h", "w"),), "h", 20000), None)
    wire = json.loads(json.dumps({**handler_info.as_wire(job), "checkpoint": None, "request_bytes": 1}))
    link: Any = SimpleNamespace(ask=lambda op: wire)
    context = ChildContext(link)
    assert (context.job, context._gang) == (handler_info.job_info(job), job.gang)
    assert context.devices == (DeviceInfo("u", 0, 1024, "nvml"),)


def test_a_payload_is_told_without_a_copy_of_it() -> None:
    """The control loop answers, and a deep copy of a megabyte would keep it from the lease for 0.2 s."""

    class Part:
        def __deepcopy__(self, memo: object) -> Part:
            raise AssertionError("copied")

    payload = {"a": [Part()]}
    job = ActiveJob(Claim(**dict.fromkeys(Claim._fields) | {"payload": payload, "devices": []}))
    assert handler_info.as_wire(job)["job"]["payload"] == payload


def test_a_command_of_a_shell_is_one_string() -> None:
    assert Command.of_payload({"argv": ["echo a; echo b"], "shell": True}).argv == [
        "/bin/sh",
        "-c",
        "echo a; echo b",
    ]
    assert Command.of_payload({"argv": ["ls", "-l"]}).argv == ["ls", "-l"]


def test_workers_of_one_host_are_told_apart_by_their_devices() -> None:
    assert default_name("h", {}) == "h"
    assert default_name("h", {"CUDA_VISIBLE_DEVICES": "2,3"}) == "h-gpu2-3"


def test_a_worker_waits_for_what_runs_however_long_a_report_is_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report that a transaction held up has left the table, and not yet the list of such reports, while another job
    runs: for that moment all that is left seems to be held up.
    """
    rounds = iter([(1, 1), (1, 0), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1)])
    seen: list[tuple[int, int]] = []
    clock = [0.0]

    class Left(list[int]):
        def wait_empty(self, _: float) -> bool:
            clock[0] += 1.0
            seen.append(next(rounds))
            left, in_reports = seen[-1]
            self[:], held[:] = [0] * left, [0] * in_reports
            return False

    held: list[int] = []
    session: Any = SimpleNamespace(table=Left(), stuck={}, terms=SimpleNamespace(grace_s=1.5))
    monkeypatch.setattr(main, "boottime", lambda: clock[0])
    nobody: Any = None
    Worker._settle(nobody, session, held)  # type: ignore[arg-type]
    assert len(seen) == 7, "one grace after the last job has ended"

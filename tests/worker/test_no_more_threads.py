"""A thread that cannot be started: what it was for is done without it, or by the next one that can."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangq.client import Client
from gangq.client.rows import Claim
from gangq.worker.claims import ClaimSource, ThreadWakes
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob
from gangq.worker.lease import LeaseKeeper
from gangq.worker.loops import ChildProcessLoop
from gangq.worker.reporter import HeldReports, Reporter
from worker.parts import claimed, session_of, source_of
from worker.worker_process import eventually

start = threading.Thread.start


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of threads, each of which cannot be started once."""
    names: list[str] = []

    def refuses(self: threading.Thread) -> None:
        if self.name in names:
            names.remove(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    return names


def test_a_result_that_no_thread_can_send_is_sent_at_once_and_the_next_by_a_thread(
    client: Client, tmp_path: Path, refused: list[str]
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    session = session_of(client, tmp_path)
    source, reporter = source_of(session), Reporter(session)
    refused.append("gangq-results")
    reporter.done(claimed(session, source), 1, more_follow=True)
    assert client.job(id=ids[0]).state == "done"
    try:
        reporter.done(claimed(session, source), 2, more_follow=True)
        eventually(lambda: client.job(id=ids[1]).state == "done", "the thread has sent it")
    finally:
        reporter.stop()


def test_a_rank_0_that_no_thread_can_be_started_for_lets_go_of_its_port(
    client: Client, tmp_path: Path, refused: list[str]
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    with closing(PortHolder(1)) as ports:
        source = ClaimSource(session, LeaseKeeper(session), ports, ThreadWakes())
        (port,) = ports.offer()
        ports.give(port)
        job = ActiveJob(claimed(session, source).claim._replace(rank=0, master_port=port))
        refused.append(f"gangq-job-{job.id}")
        intake = SimpleNamespace(session=session)
        ChildProcessLoop(intake, source, None, None, 1)._begin(job)  # type: ignore[arg-type]
        assert len(session.table) == 0
        with socket.socket() as program:
            program.bind(("", port))


def test_reports_that_are_held_are_repeated_once_a_thread_can_be_started(refused: list[str]) -> None:
    jobs = [ActiveJob(Claim(**dict.fromkeys(Claim._fields) | {"job_id": n, "token": n})) for n in (1, 2)]
    reported: list[ActiveJob] = []
    held = HeldReports(lambda: None)
    refused.append("gangq-held")
    try:
        for job in jobs:
            held.add(job, lambda job=job: reported.append(job) or True)  # type: ignore[misc]
        eventually(lambda: reported == jobs, "both are reported", 5)
    finally:
        held.stop()

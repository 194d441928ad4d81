"""A drain of a worker's parts: jobs are told to stop whatever the database does, and whatever fails."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.errors import DatabaseUnreachable
from gangq.worker.drain import Drain
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.runner_command import CommandRunner
from gangq.worker.session import Session
from worker.parts import RecordedWork, claimed, session_of, source_of

TOLD_S = 2.0
"""Much longer than the drain takes to tell jobs, much shorter than any call waits for an answer."""


def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def draining(drain: Drain, session: Session, waiting: deque[ActiveJob]) -> Iterator[None]:
    task = session.control.spawn(drain.run(session, Reporter(session), waiting), "drain")
    try:
        yield
    finally:
        task.cancel()


def begun(session: Session) -> RecordedWork:
    work = RecordedWork()
    assert claimed(session, source_of(session)).start(work)
    return work


@pytest.fixture
def session(client: Client, tmp_path: Path) -> Session:
    client.submit(task="t", payloads=[{}, {}])
    return session_of(client, tmp_path, prefetch=2)


def test_jobs_are_told_to_stop_while_the_database_does_not_answer(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(**_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(session.control.client, "retire_worker", hangs)
    work = begun(session)
    waiting = deque([claimed(session, source_of(session))])
    second = waiting[0]
    drain = Drain(0.0)
    with draining(drain, session, waiting):
        drain.request()
        until(lambda: bool(work.heard), TOLD_S)
        # Written behind the telling: a disk that hangs must not hold it up.
        until((session.directory / "drained").exists, TOLD_S)
        assert (second.stop_reason, list(waiting)) == ("drain", [])
        drain.request()
        until(lambda: len(work.heard) > 1, TOLD_S)
    assert set(work.heard) == {("stop", session.terms.grace_s), ("stop", 0.0)}


def test_a_drain_that_the_database_does_not_take_note_of_says_so_and_hands_back_what_has_not_begun(
    session: Session, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refused(**_: Any) -> None:
        raise DatabaseUnreachable("the connection was cut")

    monkeypatch.setattr(session.control.client, "retire_worker", refused)
    job = claimed(session, source_of(session))
    drain = Drain(30.0)
    with draining(drain, session, deque([job])):
        drain.request()
        until(lambda: client.job(id=job.id).state == "pending")
    assert "drain_not_reported" in caplog.messages


def test_a_fault_ends_no_drain(
    session: Session, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def exhausted(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    caplog.set_level(logging.INFO)
    work = begun(session)
    job = claimed(session, source_of(session))
    drain = Drain(0.0)
    in_thread = session.control.in_thread
    monkeypatch.setattr(session.control, "in_thread", exhausted)
    monkeypatch.setattr(session, "note", exhausted)
    with draining(drain, session, deque([job])):
        drain.request()
        until(lambda: caplog.messages.count("drain_fault") > 2)
        assert client.job(id=job.id).state == "running"
        monkeypatch.undo()
        assert session.control.in_thread == in_thread
        until(lambda: bool(work.heard))
        until(lambda: client.job(id=job.id).state == "pending")
        drain.request()
        until(lambda: len(work.heard) > 1)
    assert "task_fault" not in caplog.messages


def test_only_a_second_request_of_an_operator_hastens_and_no_second_job_that_nothing_can_kill(
    session: Session,
) -> None:
    drain = Drain(30.0)
    runner: Any = SimpleNamespace(_session=session, _drain=drain)
    source = source_of(session)
    for job in [claimed(session, source), claimed(session, source)]:
        CommandRunner._unkillable(runner, job, [os.getpid()])
        assert drain.requested.is_set()
        assert not drain.urgent.is_set()
    drain.request()
    assert not drain.urgent.is_set()
    drain.request()
    assert drain.urgent.is_set()


def test_grace_is_over_before_the_note_of_the_drain_is_written(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[Any]] = []
    work = begun(session)
    monkeypatch.setattr(session, "note", lambda _: heard.append(list(work.heard)))
    drain = Drain(30.0)
    with draining(drain, session, deque()):
        drain.request()
        drain.request()
        until(lambda: bool(heard))
    assert heard[0] == [("stop", session.terms.grace_s), ("stop", 0.0)]

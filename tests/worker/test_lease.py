"""The lease: what renews it, what is told as it ends, and what is handed back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.errors import DatabaseUnreachable, NotAllowed, NotFound
from gangq.proc.clock import boottime
from gangq.worker.lease import LeaseKeeper, watch_lease
from gangq.worker.session import clean_stop_reason
from worker.parts import RecordedWork, claimed, session_of, source_of
from worker.worker_process import eventually


def test_the_lease_counts_from_the_sending_of_the_answered_heartbeat(client: Client, tmp_path: Path) -> None:
    client.configure(lease_s=60, lease_margin_s=10)
    session = session_of(client, tmp_path)
    before = boottime()
    session.control.wait(LeaseKeeper(session).beat())
    assert before + 50 <= session.kill_at <= boottime() + 50
    session.renewed(before - 20)  # An old answer that comes late takes nothing back.
    assert session.kill_at >= before + 50


def test_work_is_asked_to_stop_a_grace_before_it_would_be_killed_and_word_is_left(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    client.configure(lease_s=6, lease_margin_s=3, grace_s=2, heartbeat_s=0.4)
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    work = RecordedWork()
    job.start(work)
    session.control.spawn(watch_lease(session), "lease watch")
    eventually(lambda: job.stop_reason == "lease", "it is told", 3)
    assert boottime() >= session.kill_at - 2
    assert clean_stop_reason(tmp_path, session.incarnation, os.getuid()) == "lapsed"


def test_work_is_asked_to_stop_before_the_word_is_written_and_after_a_fault_too(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.submit(task="t")
    client.configure(lease_s=6, lease_margin_s=3, grace_s=2, heartbeat_s=0.4)
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    told: list[str | None] = []

    def note(why: str) -> None:
        told.append(job.stop_reason)
        raise MemoryError

    monkeypatch.setattr(session, "note", note)
    session.control.spawn(watch_lease(session), "lease watch")
    eventually(lambda: len(told) > 1, "it goes on looking", 5)
    assert set(told) == {"lease"}
    assert "lease_watch_fault" in caplog.messages


def test_word_left_is_taken_back_by_a_renewal(client: Client, tmp_path: Path) -> None:
    session = session_of(client, tmp_path)
    session.note("lapsed")
    assert clean_stop_reason(tmp_path, session.incarnation, os.getuid()) == "lapsed"
    assert clean_stop_reason(tmp_path, session.incarnation + 1, os.getuid()) is None
    session.renewed(boottime())
    assert clean_stop_reason(tmp_path, session.incarnation, os.getuid()) is None


def test_a_renewal_reaches_the_work_although_the_word_cannot_be_taken_back(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job, work = claimed(session, source_of(session)), RecordedWork()
    job.start(work)
    session.note("lapsed")
    (tmp_path / "lapsed").unlink()
    (tmp_path / "lapsed").mkdir()  # What is no file cannot be unlinked, as nothing can on a read-only disk.
    heard = len(work.heard)
    session.renewed(boottime())
    assert work.heard[heard:] == ["extend"]
    assert "note_not_removed" in caplog.text


def test_empty_claims_keep_their_distance_unless_work_is_kept_for_this_worker(
    client: Client, tmp_path: Path
) -> None:
    session = session_of(client, tmp_path)
    source = source_of(session)

    def waited() -> float:
        began = time.monotonic()
        source.begin_claim(source.wakes.wait_kept(source.pace_s))
        return time.monotonic() - began

    assert waited() < 0.04
    assert session.main_client.execute(source.taking(1)) == []
    source.wake()
    assert waited() > 0.04, "a hint to all is no reason to ask at once"
    assert session.main_client.execute(source.taking(1)) == []
    source.wake(kept=True)
    assert waited() < 0.04
    assert session.main_client.execute(source.taking(1)) == []
    # That was not true: it is not believed again before a claim has brought something.
    source.wake(kept=True)
    assert waited() > 0.04
    client.submit(task="t")
    (claim,) = session.main_client.execute(source.taking(1))
    client.complete(job_ids=[claim.job_id], tokens=[claim.token])
    assert session.main_client.execute(source.taking(1)) == []
    source.wake(kept=True)
    assert waited() < 0.04


def test_claims_that_nobody_knows_of_are_handed_back(client: Client, tmp_path: Path) -> None:
    job_id = client.submit(task="t")[0]
    session = session_of(client, tmp_path)
    client.claim(incarnation=session.incarnation)
    keeper = LeaseKeeper(session)
    outstanding = SimpleNamespace(unlisted=True)
    keeper.sources += [outstanding, SimpleNamespace(unlisted=False)]  # type: ignore[list-item]
    for _ in range(5):
        session.control.wait(keeper.beat())
    assert client.job(id=job_id).state == "running"  # The claim of one of its loops may still be answered.
    outstanding.unlisted = False
    for _ in range(3):
        session.control.wait(keeper.beat())
    assert client.job(id=job_id).state == "pending"


def test_a_claim_that_cannot_be_handed_back_costs_no_heartbeat_and_is_tried_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    session = session_of(client, tmp_path, prefetch=2)
    client.claim(incarnation=session.incarnation, max_jobs=2)
    keeper = LeaseKeeper(session)
    release = session.control.client.release
    refused: list[int] = []

    async def refuses(**arguments: Any) -> Any:
        if arguments["job_ids"] == ids[:1] and len(refused) < 2:
            refused.append(len(refused))
            raise NotAllowed("no") if len(refused) == 1 else NotFound("no")
        return await release(**arguments)

    monkeypatch.setattr(session.control.client, "release", refuses)
    for _ in range(3):
        session.control.wait(keeper.beat())
    assert client.job_states(ids=ids) == dict(zip(ids, ("running", "pending"), strict=True))
    assert "unknown_claim_not_released" in caplog.messages
    for _ in range(2):
        session.control.wait(keeper.beat())
    assert client.job(id=ids[0]).state == "pending"


def test_a_beat_of_a_job_whose_heartbeat_had_no_answer_goes_with_the_next(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(task="t", payloads=[{}, {}])
    session = session_of(client, tmp_path, prefetch=2)
    source = source_of(session)
    job, silent = claimed(session, source), claimed(session, source)
    job.beat({"step": 7})
    keeper = LeaseKeeper(session)
    heartbeat = session.control.client.heartbeat
    sent: list[Any] = []

    async def cut(**arguments: Any) -> Any:
        sent.append(arguments["beats"])
        if len(sent) == 1:
            raise DatabaseUnreachable("the connection was cut")
        return await heartbeat(**arguments)

    monkeypatch.setattr(session.control.client, "heartbeat", cut)
    with pytest.raises(DatabaseUnreachable):
        session.control.wait(keeper.beat())
    assert silent.take_beat() is None
    session.control.wait(keeper.beat())
    assert sent == [[{"step": 7}, None]] * 2


def test_a_call_after_a_heartbeat_that_has_no_answer_does_not_make_the_heartbeat_fail(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(client, tmp_path)

    async def unreachable() -> None:
        raise DatabaseUnreachable("the connection was cut")

    watching: Any = SimpleNamespace(readings=lambda: None, limits=SimpleNamespace(exchange=unreachable))
    before = boottime()
    session.control.wait(LeaseKeeper(session, watching).beat())
    assert session.renewed_at >= before
    assert "calls_after_heartbeat_failed" in caplog.messages

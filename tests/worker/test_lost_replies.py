"""Claims, reports and registrations whose reply was lost: they are made again, and double nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.errors import Busy, StaleToken
from gangq.proc.proof import HostIdentity
from gangq.worker.claims import ClaimSource, ThreadWakes
from gangq.worker.jobs import ActiveJob, JobTable
from gangq.worker.lease import LeaseKeeper
from gangq.worker.registration import _is_ours
from gangq.worker.repeating import until_answered
from gangq.worker.reporter import Reporter
from gangq.worker.session import Session
from worker.parts import LossyClient, claimed, session_of, source_of
from worker.worker_process import eventually


def test_a_claim_whose_reply_was_lost_is_asked_for_again_and_burns_nothing(
    client: Client, tmp_path: Path
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    lossy = LossyClient(client, "claim", times=2)
    session = session_of(lossy, tmp_path)
    source = source_of(session)
    assert session.main_client.execute(source.taking(1)) == []
    assert source.unsure
    assert session.main_client.execute(source.taking(1)) == []
    rows = session.main_client.execute(source.taking(1))
    assert [row.job_id for row in rows] == ids[:1]
    assert [(client.job(id=i).state, client.job(id=i).attempts) for i in ids] == [
        ("running", 1),
        ("pending", 0),
    ]


def test_who_would_have_to_hand_it_back_at_once_claims_nothing_until_the_lease_is_renewed(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    session = session_of(client, tmp_path)
    source = source_of(session)
    job = claimed(session, source)
    monkeypatch.setattr(session, "lapsing", lambda: True)
    assert session.main_client.execute(source.taking(1)) == []
    assert source.wait_s > 0
    assert source.unsure, "it has not heard that there is nothing"
    assert session.main_client.execute(source.completing_and_claiming([job], 1)) is None
    assert client.job_states(ids=ids) == dict(zip(ids, ("running", "pending"), strict=True))
    monkeypatch.setattr(session, "lapsing", lambda: False)
    client.complete(job_ids=[job.id], tokens=[job.token])
    assert [row.job_id for row in session.main_client.execute(source.taking(1))] == ids[1:]
    assert not source.unsure


@pytest.mark.parametrize(
    ("verb", "act", "state"),
    [
        ("complete", lambda reporter, job: reporter.done(job, {"n": 1}), "done"),
        ("fail", lambda reporter, job: reporter.failed(job, {"type": "E", "message": "m"}), "scheduled"),
        ("release", lambda reporter, job: reporter.stopped(job), "pending"),
    ],
)
def test_a_last_word_whose_reply_was_lost_is_repeated_and_doubles_nothing(
    client: Client, tmp_path: Path, verb: str, act: Callable[[Reporter, ActiveJob], None], state: str
) -> None:
    job_id = client.submit(task="t")[0]
    lossy = LossyClient(client, verb, times=2)
    session = session_of(lossy, tmp_path)
    job = claimed(session, source_of(session))
    act(Reporter(session), job)
    assert lossy.calls == 3
    assert client.job(id=job_id).state == state
    assert len(session.table) == 0
    assert client.violations() == []


@pytest.mark.parametrize(
    ("verb", "types", "act", "state"),
    [
        ("complete", "bigint[], bigint[], jsonb[], boolean", lambda r, job: r.done(job, {"n": 1}), "done"),
        (
            "fail",
            "bigint, bigint, jsonb, boolean, text, real",
            lambda r, job: r.failed(job, {"type": "E", "message": "m"}),
            "scheduled",
        ),
    ],
)
def test_a_last_word_said_while_a_migration_rebuilds_the_code_is_said_again(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    verb: str, types: str, act: Callable[[Reporter, ActiveJob], None], state: str,
) -> None:  # fmt: skip
    job_id = client.submit(task="t")[0]
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    with client.connection() as owner:
        owner.execute(f"alter function gangq.{verb}({types}) rename to gone".encode())
        said = threading.Thread(target=act, args=(Reporter(session), job))
        said.start()
        eventually(lambda: "call_repeated" in caplog.messages, "it was tried and found the function gone")
        owner.execute(f"alter function gangq.gone({types}) rename to {verb}".encode())
        said.join(20)
    assert client.job(id=job_id).state == state
    assert len(session.table) == 0


@pytest.mark.parametrize("leaving", [True, False])
def test_the_end_of_an_incarnation_is_an_error_unless_the_worker_has_ended_it_itself(
    leaving: bool, client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(client, tmp_path)
    if leaving:
        session.closing.set()
    session.end("it has retired")
    assert session.ended.is_set()
    assert ("incarnation_ended" in caplog.messages) is not leaving


def next_along(session: Session, source: ClaimSource[ThreadWakes], reporter: Reporter) -> list[int]:
    """Let the next claim go along with reports, as a worker does; what was claimed so is in the list."""
    got: list[int] = []

    def along(finished: Any) -> Any:
        answer = session.main_client.execute(source.completing_and_claiming(finished, 1))
        if answer is None:
            return None
        for row in answer[1]:
            session.table.add(ActiveJob(row))
            got.append(row.job_id)
        return answer[0]

    reporter.complete_and_claim = along
    return got


def test_a_report_takes_the_next_claim_along(client: Client, tmp_path: Path) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    counted = LossyClient(client, "complete_and_claim", times=0)
    session = session_of(counted, tmp_path)
    source, reporter = source_of(session), Reporter(session)
    got = next_along(session, source, reporter)
    job = claimed(session, source)
    reporter.done(job, {"n": 1}, more_follow=True)
    assert counted.calls == 0, "its successor has been claimed already"
    reporter.flush()
    assert counted.calls == 0, "only a worker that is about to claim does"
    assert client.job(id=ids[0]).state == "done"
    reporter.done(claimed(session, source), None)
    assert (counted.calls, got, client.job(id=ids[1]).state) == (1, [], "done")
    assert not source.outstanding, "that nothing was claimed is an answer"


def test_what_is_done_while_others_wait_to_be_run_does_not_wait_for_them(
    client: Client, tmp_path: Path
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}])
    session = session_of(client, tmp_path, prefetch=2)
    source, reporter = source_of(session), Reporter(session)
    first, _second = (claimed(session, source) for _ in ids)
    try:
        reporter.done(first, None, more_follow=True)
        eventually(lambda: client.job(id=first.id).state == "done", "its thread reports it")
    finally:
        reporter.stop()


def test_a_report_whose_reply_was_lost_with_its_claim_is_made_alone_and_the_claim_found(
    client: Client, tmp_path: Path
) -> None:
    ids = client.submit(task="t", payloads=[{}, {}, {}])
    lossy = LossyClient(client, "complete_and_claim")
    session = session_of(lossy, tmp_path)
    source, reporter = source_of(session), Reporter(session)
    got = next_along(session, source, reporter)
    reporter.done(claimed(session, source), {"n": 1})
    assert (lossy.calls, got) == (1, [])
    assert client.job(id=ids[0]).result == {"n": 1}
    assert [row.job_id for row in session.main_client.execute(source.taking(1))] == [ids[1]]
    assert client.job_states(ids=ids) == dict(zip(ids, ("done", "running", "pending"), strict=True))
    assert client.violations() == []


def test_a_result_that_is_refused_with_the_claim_leaves_a_note_and_keeps_the_claim(
    client: Client, tmp_path: Path
) -> None:
    client.set_queue(name="default", max_payload_bytes=2000)
    ids = client.submit(task="t", payloads=[{}, {}], max_attempts=1)
    session = session_of(client, tmp_path)
    source, reporter = source_of(session), Reporter(session)
    got = next_along(session, source, reporter)
    reporter.done(claimed(session, source), list(range(3000)))
    row = client.job(id=ids[0])
    assert (row.state, list(row.result)) == ("done", ["gangq_note"])
    assert got == []
    assert [row.job_id for row in session.main_client.execute(source.taking(1))] == [ids[1]]


def test_an_ack_whose_reply_was_lost_is_repeated(client: Client, tmp_path: Path) -> None:
    job_id = client.submit(task="t")[0]
    lossy = LossyClient(client, "ack_preempted", times=1)
    session = session_of(lossy, tmp_path)
    keeper = LeaseKeeper(session)
    job = claimed(session, source_of(session, keeper))
    client.cancel(job_ids=[job_id])
    session.control.wait(keeper.beat())
    assert job.stop_reason == "cancel"
    Reporter(session).stopped(job)
    assert (lossy.calls, client.job(id=job_id).state) == (2, "cancelled")


def test_our_own_stop_and_the_databases_at_once_end_in_an_acknowledgement(
    client: Client, tmp_path: Path
) -> None:
    job_id = client.submit(task="t")[0]
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    job.tell_stop("drain", 1.0)
    client.cancel(job_ids=[job_id])
    Reporter(session).stopped(job)
    assert client.job(id=job_id).state == "cancelled"


def test_a_registration_whose_reply_was_lost_is_made_again(client: Client, tmp_path: Path) -> None:
    lossy = LossyClient(client, "register_worker")
    session = session_of(lossy, tmp_path)
    assert lossy.calls == 3, "the second call finds the incarnation of the first, the third is answered"
    assert client.heartbeat(incarnation=session.incarnation) == []
    assert [worker.state for worker in client.workers()] == ["live"]


@pytest.mark.parametrize("other", ["mark", "pid", "boot_id"])
def test_an_incarnation_of_another_process_or_call_is_not_retired_for_its_name(other: str) -> None:
    boot_id = HostIdentity.here().boot_id
    ours: dict[str, Any] = {
        "identity": {"mark": "m"},
        "pid": os.getpid(),
        "boot_id": boot_id,
        "incarnation": 1,
    }
    assert _is_ours(ours, "m")
    assert not _is_ours({**ours, other: 0, **({"identity": {"mark": "n"}} if other == "mark" else {})}, "m")


def test_a_report_that_a_transaction_holds_is_given_up_where_the_worker_is_in_a_hurry() -> None:
    def fail(**_: object) -> None:
        raise Busy("an open transaction holds it")

    about = {
        "job_id": 1,
        "token": 1,
        "light": True,
        "task": "t",
        "gang_id": None,
        "epoch": None,
        "rank": None,
    }
    job = ActiveJob(SimpleNamespace(**about))  # type: ignore[arg-type]
    parts = {"ended": threading.Event(), "table": JobTable(), "wake": lambda: None}
    session: Any = SimpleNamespace(**parts, thread_client=SimpleNamespace(fail=fail))
    session.table.add(job)
    reporter = Reporter(session, impatient=lambda: True)
    reporter.failed(job, {"type": "E", "message": ""})
    reporter.stop()
    assert (len(session.table), job in reporter.held) == (0, False)


def test_nothing_is_repeated_once_an_answer_is_an_answer() -> None:
    calls = []

    def stale() -> None:
        calls.append(1)
        raise StaleToken("no")

    with pytest.raises(StaleToken):
        until_answered(stale, "x", lambda: False)
    assert len(calls) == 1

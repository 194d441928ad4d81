"""The worker's parts one at a time: orders against starts, lost replies, ports, text, environments."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from controls import control_of
from worker_process import eventually

from gangq.cli import main
from gangq.client import Client
from gangq.client.sync import in_steps
from gangq.client.verb import Query, Verb
from gangq.client.verbs import Verbs
from gangq.context import DeviceInfo, GangInfo, JobInfo, Peer
from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput, StaleToken, Stopped
from gangq.gpu import SamplerProcess, detect
from gangq.proc.clock import boottime
from gangq.testing import FakeContext
from gangq.watchdogs.deadman import Deadman
from gangq.worker import handler_info, jobs
from gangq.worker.child_context import ChildContext, Link
from gangq.worker.claims import ClaimSource, ThreadWakes
from gangq.worker.context_impl import InlineContext
from gangq.worker.drain import Drain
from gangq.worker.environment import scrubbed
from gangq.worker.jobs import ActiveJob
from gangq.worker.lanes import Lanes
from gangq.worker.lease import LeaseKeeper, LeaseWatch
from gangq.worker.listener import Listener
from gangq.worker.liveness import Liveness
from gangq.worker.loops import Intake
from gangq.worker.options import WorkerOptions, default_name
from gangq.worker.output import Capture
from gangq.worker.ports import PortHolder
from gangq.worker.registration import register
from gangq.worker.reporter import Reporter, clean
from gangq.worker.retry import until_answered
from gangq.worker.runner_command import Command
from gangq.worker.runner_inline import HardExit, InlineRunner
from gangq.worker.session import Session, clean_stop_reason
from gangq.worker.signals import SignalWatch
from gangq.worker.socket_server import SocketServer


class LossyClient:
    """A client whose next answer to one verb is lost after the database has acted on it."""

    def __init__(self, client: Client, verb: str, times: int = 1) -> None:
        self._client = client
        self._verb = verb
        self.left = times
        self.calls = 0

    def execute(self, query: Any) -> Any:
        if not isinstance(query, Query):
            return in_steps(self.execute, query)
        ours = query.name == f"gangq.{self._verb}"
        self.calls += ours
        answer = self._client.execute(query)
        if ours and self.left:
            self.left -= 1
            raise DatabaseUnreachable("the connection was cut")
        return answer

    def __getattr__(self, name: str) -> Any:
        declared = getattr(Verbs, name, None)
        if not isinstance(declared, Verb):
            return getattr(self._client, name)
        return lambda **arguments: self.execute(declared(**arguments))


def session_of(client: Any, tmp_path: Path, prefetch: int = 1) -> Session:
    options = WorkerOptions(name="w", devices="none", prefetch=prefetch).resolved()
    control = control_of(client)
    if isinstance(client, LossyClient):
        control.for_threads = client  # type: ignore[assignment]
    return register(
        client,
        control,
        options,
        lanes=Lanes(1, 1, "light"),
        tasks=["command", "t"],
        task_options={},
        detection=detect("none"),
        directory=tmp_path,
    )


def source_of(session: Session, keeper: LeaseKeeper | None = None) -> ClaimSource[ThreadWakes]:
    return ClaimSource(session, keeper or LeaseKeeper(session), PortHolder(0), ThreadWakes())


def claimed(session: Session, source: ClaimSource[ThreadWakes]) -> ActiveJob:
    job = ActiveJob(session.main_client.execute(source.taking(1))[0])
    session.table.add(job)
    return job


class RecordedWork:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def stop(self, reason: str, grace_s: float) -> None:
        self.heard.append(("stop", reason))

    def lose(self, reason: str) -> None:
        self.heard.append("lose")

    def extend(self, kill_at: float, grace_s: float) -> None:
        self.heard.append("extend")


def job_of(client: Client, tmp_path: Path) -> ActiveJob:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    return claimed(session, source_of(session))


# Orders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["tell_stop", "lose"])
def test_an_order_before_the_start_keeps_the_work_from_starting(
    client: Client, tmp_path: Path, order: str
) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.tell_stop("preempt", 1.0) if order == "tell_stop" else job.lose("reaped")
    assert not job.start(work)
    assert work.heard == []


def test_a_claim_that_arrives_once_its_incarnation_has_ended_is_never_begun(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    source = source_of(session)
    rows = session.main_client.execute(source.taking(1))
    session.end("reaped")
    intake = Intake(session, Drain(0.0), SamplerProcess(detect("none"), {}))
    (job,) = intake.add(source, rows)
    assert not job.start(RecordedWork())


def test_an_order_after_the_start_reaches_the_work_once(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    assert job.start(work)
    job.tell_stop("drain", 1.0)
    job.tell_stop("preempt", 1.0)
    assert work.heard == [("stop", "drain")]
    assert job.told_by_server
    job.lose("reaped")
    assert work.heard == [("stop", "drain"), "lose"]


def test_a_stop_for_a_lease_that_was_renewed_does_not_keep_a_later_one_from_the_work(
    client: Client, tmp_path: Path
) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    assert job.start(work)
    for reason in ("lease", "lease", "cancel", "lease", "drain"):
        job.tell_stop(reason, 1.0)  # type: ignore[arg-type]
    assert work.heard == [("stop", "lease"), ("stop", "cancel")]
    job.hasten()
    assert work.heard[2:] == [("stop", "cancel")]


def test_a_job_that_has_ended_is_not_lost_any_more(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.end_work()
    job.lose("the heartbeat found it gone, because it was just reported done")
    assert (job.lost, work.heard) == (None, [])


def test_a_job_completed_by_its_handler_is_not_lost(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.completed_by_handler = True
    job.lose("gone")
    assert work.heard == []


def test_a_beat_whose_heartbeat_was_lost_is_sent_again_unless_there_is_a_newer_one(
    client: Client, tmp_path: Path
) -> None:
    job = job_of(client, tmp_path)
    job.beat({"step": 1})
    first = job.take_beat()
    assert first == {"step": 1}
    job.put_beat_back(first)
    assert job.take_beat() == {"step": 1}
    job.beat({"step": 2})
    job.put_beat_back(first)
    assert job.take_beat() == {"step": 2}
    job.beat({"loss": object(), "step": 3, "text": "x" * 20_000})
    told = job.take_beat()
    assert told is not None
    assert told.keys() == {"loss", "step"}
    assert told["loss"].startswith("<object object at ")


def test_a_handler_that_never_looked_has_not_broken_off() -> None:
    context = FakeContext()
    assert not context.stopping
    context.stop()
    assert not context.stop_seen
    assert context.wait_stopping(0)
    assert context.stop_seen


def test_whoever_asks_first_for_an_event_or_the_key_of_a_job_gets_what_all_others_get(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    claim = claimed(session, source_of(session)).claim

    def slowly(make: Callable[..., Any]) -> Callable[..., Any]:
        def making(*arguments: Any) -> Any:
            time.sleep(0.02)  # So that whoever comes second comes while the first is at it.
            return make(*arguments)

        return making

    monkeypatch.setattr(
        jobs, "threading", SimpleNamespace(Event=slowly(threading.Event), Lock=threading.Lock)
    )
    monkeypatch.setattr(jobs, "secrets", SimpleNamespace(token_hex=slowly(secrets.token_hex)))
    for name in ("stopping", "wake", "key"):
        job = ActiveJob(claim)
        line = threading.Barrier(4)
        found: list[Any] = []

        def ask(job: ActiveJob = job, line: Any = line, name: str = name, found: Any = found) -> None:
            line.wait(10)
            found.append(getattr(job, name))

        def tell(job: ActiveJob = job, line: Any = line) -> None:
            line.wait(10)
            job.tell_stop("drain", 0.0)

        threads = [threading.Thread(target=target) for target in (ask, ask, ask, tell)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(found) == 3
        assert set(found) == {getattr(job, name)}
        assert job.stopping.is_set()
        assert job.wake.is_set()


def test_what_one_thread_of_a_handler_saw_of_the_stop_is_seen(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    context = InlineContext(session, job)
    assert not context.stopping
    job.tell_stop("drain", 0.0)
    looker = threading.Thread(target=lambda: context.wait_stopping(10))
    looker.start()
    looker.join(10)
    assert context.stop_seen
    assert context.job is context.job
    assert (context.job.id, context.job.payload) == (job.id, {})


def test_a_result_is_sent_as_it_was_when_the_handler_returned(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    reporter = Reporter(session)
    unwatched = SimpleNamespace(begin=lambda *_: None, end=lambda: None)
    runner = InlineRunner(
        session,
        reporter,
        PortHolder(0),
        Deadman(),
        lambda *_: None,
        unwatched,
        Liveness.of_environment({}),  # type: ignore[arg-type]
        Capture(session),
    )
    result = {"text": 'a "quoted" word', "n": 1}
    runner.run(job, lambda ctx: result, more_follow=True)
    result["n"] = 2  # By a thread the handler left behind.
    reporter.flush()
    runner.rest()
    assert client.job(id=job.id).result == {"text": 'a "quoted" word', "n": 1}


def test_nobody_ends_a_process_that_a_watchdog_is_ending_with_a_code_of_its_own(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    codes: list[int] = []
    hard_exit = HardExit(session, Reporter(session), Deadman(kill_signal_too=False), codes.append)
    session.tripping = True
    # A trip ends the incarnation, and the next heartbeat hears of it.
    hard_exit(77, "the incarnation has ended", job)
    assert codes == []


# Lost replies -----------------------------------------------------------------------------------------------


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
    assert source.unsure, "nothing was claimed: the same request is asked again before anybody sleeps"
    assert session.main_client.execute(source.taking(1)) == []
    assert not source.unsure


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


def test_nothing_is_repeated_once_an_answer_is_an_answer() -> None:
    calls = []

    def stale() -> None:
        calls.append(1)
        raise StaleToken("no")

    with pytest.raises(StaleToken):
        until_answered(stale, "x", lambda: False)
    assert len(calls) == 1


# The lease --------------------------------------------------------------------------------------------------


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
    session.control.spawn(LeaseWatch(session).run(), "lease watch")
    eventually(lambda: job.stop_reason == "lease", "it is told", 3)
    assert boottime() >= session.kill_at - 2
    assert clean_stop_reason(tmp_path, session.incarnation, os.getuid()) == "lapsed"


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
        source.paced(source.wakes.wait_kept(source.pace_s))
        return time.monotonic() - began

    assert waited() < 0.04
    assert session.main_client.execute(source.taking(1)) == []
    source.awake()
    assert waited() > 0.04, "a hint to all is no reason to ask at once"
    assert session.main_client.execute(source.taking(1)) == []
    source.awake(kept=True)
    assert waited() < 0.04
    assert session.main_client.execute(source.taking(1)) == []
    # That was not true: it is not believed again before a claim has brought something.
    source.awake(kept=True)
    assert waited() > 0.04
    client.submit(task="t")
    (claim,) = session.main_client.execute(source.taking(1))
    client.complete(job_ids=[claim.job_id], tokens=[claim.token])
    assert session.main_client.execute(source.taking(1)) == []
    source.awake(kept=True)
    assert waited() < 0.04


def test_claims_that_nobody_knows_of_are_handed_back(client: Client, tmp_path: Path) -> None:
    job_id = client.submit(task="t")[0]
    session = session_of(client, tmp_path)
    client.claim(incarnation=session.incarnation)
    keeper = LeaseKeeper(session)
    outstanding = SimpleNamespace(claiming=True)
    keeper.sources += [outstanding, SimpleNamespace(claiming=False)]  # type: ignore[list-item]
    for _ in range(5):
        session.control.wait(keeper.beat())
    assert client.job(id=job_id).state == "running"  # The claim of one of its loops may still be answered.
    outstanding.claiming = False
    for _ in range(3):
        session.control.wait(keeper.beat())
    assert client.job(id=job_id).state == "pending"


# Ears and signals -------------------------------------------------------------------------------------------


def test_the_listener_comes_back_after_its_connection_was_cut_and_polls_at_once(
    client: Client, db: Any, tmp_path: Path
) -> None:
    session = session_of(client, tmp_path)
    heard: list[str] = []
    handlers = {"wake": lambda: heard.append("wake"), "stop": lambda: heard.append("stop")}
    listener = Listener(session, ["default"], handlers)
    session.control.spawn(listener.run(), "listener")
    eventually(lambda: heard, "it polls after it connected")
    find = "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    pids = [row["pid"] for row in db.execute(find).fetchall()]
    heard.clear()
    db.execute("select pg_terminate_backend(p) from unnest(%s::int[]) p", (pids,))
    eventually(lambda: heard, "it polls after it reconnected")

    def told() -> bool:
        """Everything sent before it has arrived once this comes back."""
        heard.clear()
        db.execute("select pg_notify(%s, 'stop')", (f"gangq_{session.incarnation}",))
        eventually(lambda: "stop" in heard, "it hears its own channel")
        return heard == ["stop"]

    eventually(told, "it is quiet")
    heard.clear()
    db.execute("select pg_notify('gangq_wake', 'a queue of somebody else')")
    db.execute("select pg_notify('gangq_wake', 'default')")
    eventually(lambda: heard, "it hears that somebody submitted")
    assert heard == ["wake"]
    assert not listener.notifications_lost


def test_a_signal_is_counted_once_on_whichever_way_it_comes(client: Client) -> None:
    calls: list[int] = []
    watch = SignalWatch(control_of(client), lambda: calls.append(1))
    watch.install()
    try:
        # One signal in a main thread that was in a library: its two halves arrive far apart.
        os.write(watch._write, bytes([signal.SIGTERM]))
        eventually(lambda: calls, "it is heard at once")
        watch._handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: len(calls) == 2, "the next one is heard")
        signal.set_wakeup_fd(-1)  # As asyncio leaves it behind.
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: len(calls) == 3, "one is heard without the pipe")
        threading.Event().wait(0.1)
        assert calls == [1, 1, 1]
    finally:
        watch.stop()


def test_a_handler_of_signals_that_a_job_left_behind_is_taken_back(client: Client) -> None:
    heard: list[int] = []
    watch = SignalWatch(control_of(client), lambda: heard.append(1))
    watch.install()
    try:
        own = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(-1)
        watch.renew()
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == own
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: heard, "SIGINT is heard again")
        assert signal.set_wakeup_fd(-1) == watch._write
    finally:
        watch.stop()


# The socket -------------------------------------------------------------------------------------------------


def test_the_socket_answers_nobody_without_the_key_of_a_job(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    server = SocketServer(session, tmp_path / "s")
    session.control.wait(server.start())
    try:
        stranger = Link(str(server.path), "wrong")
        with pytest.raises(GangqError, match="no running job"):
            stranger.ask("status")
        stranger.close()
        link = Link(str(server.path), job.key)
        status = {"stopping": False, "reason": None, "job": job.id, "token": job.token, "epoch": None}
        assert link.ask("status") == status
        assert link.ask("gang") == {"gang": None}
        link.ask("beat", data={"step": 1})
        assert job.take_beat() == {"step": 1}
        with pytest.raises(InvalidInput, match="unknown request 'shutdown'"):
            link.ask("shutdown")
        with pytest.raises(InvalidInput, match="malformed"):
            link.ask("save_checkpoint", step="x", data="")
        link.ask("save_checkpoint", step=3, data="YWJj")
        assert link.ask("load_checkpoint") == {"step": 3, "data": "YWJj"}
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(server.path))
            raw.sendall(b"GET / HTTP/1.0\n")
            assert b"InvalidInput" in raw.recv(4096)
        link.close()
    finally:
        session.control.wait(server.stop())


def test_a_checkpoint_that_was_not_stored_is_an_error_inline_over_the_socket_and_as_exit_code(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(task="t")
    away = LossyClient(client, "save_checkpoint", times=10**6)
    session = session_of(away, tmp_path)
    job = claimed(session, source_of(session))
    job.lost = "its lease was taken over"
    with pytest.raises(
        StaleToken, match=r"at step 5 is not known to be stored.*taken over.*Keep the older one"
    ):
        InlineContext(session, job).save_checkpoint(5, b"abc")
    server = SocketServer(session, tmp_path / "s")
    server.announce(job, handler_info.as_wire(handler_info.job_info(job), None, (), None))
    session.control.wait(server.start())
    try:
        monkeypatch.setenv("GANGQ_SOCKET", str(server.path))
        monkeypatch.setenv("GANGQ_KEY", job.key)
        link = Link.from_environ()
        with pytest.raises(StaleToken, match="not known to be stored"):
            ChildContext(link).save_checkpoint(6, b"abc")
        link.close()
        saved = CliRunner().invoke(main, ["checkpoint", "save", "7", "-"], input="abc")
        assert (saved.exit_code, "not known to be stored" in saved.stderr) == (1, True)
        away.left = 0
        assert CliRunner().invoke(main, ["checkpoint", "save", "7", "-"], input="abc").exit_code == 0
    finally:
        session.control.wait(server.stop())


def test_a_child_told_to_stop_before_its_checkpoint_is_loaded_does_not_begin_anew(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    away = LossyClient(client, "load_checkpoint", times=10**6)
    session = session_of(away, tmp_path)
    job = claimed(session, source_of(session))
    job.gang = GangInfo(1, 1, 0, 2, 0, 0, 1, (), "h", 1)
    server = SocketServer(session, tmp_path / "s")
    server.announce(job, handler_info.as_wire(handler_info.job_info(job), job.gang, (), None))
    session.control.wait(server.start())
    try:
        with Link(str(server.path), job.key) as link:
            context = ChildContext(link)
            assert context.checkpoint is None
            job.gang = replace(job.gang, epoch=2)
            job.tell_stop("preempt", 60)
            eventually(lambda: context.gang is not None and context.gang.epoch == 2, "it hears", 5)
            with pytest.raises(Stopped, match="told to stop while it loaded its checkpoint"):
                _ = context.checkpoint
    finally:
        session.control.wait(server.stop())


# Small things -----------------------------------------------------------------------------------------------


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


def test_text_for_the_database_has_no_nul_and_a_limit() -> None:
    assert clean("a\0b") == "a\ufffdb"
    assert clean("\ud800") == "?"
    assert len(clean("x" * 100_000)) < 17_000
    assert "84000 characters left out" in clean("x" * 100_000)


def test_no_secret_is_inherited() -> None:
    kept = scrubbed({"GANGQ_DSN": "x", "PGPASSWORD": "x", "PGHOST": "x", "PATH": "/bin", "GANGQ_TOKEN": "1"})
    assert kept == {"PATH": "/bin"}


def test_facts_survive_the_wire() -> None:
    info = JobInfo(1, 2, 1, 3, "q", "t", 5, {"a": 1}, 2.0)
    gang = GangInfo(7, 2, 0, 1, 0, 0, 1, (Peer(0, 1, "h", "w"),), "h", 20000)
    devices = (DeviceInfo("u", 0, 1024, "nvml"),)
    assert handler_info.from_wire(handler_info.as_wire(info, gang, devices, None)) == (
        info,
        gang,
        devices,
        None,
    )


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

"""Orders to a job (stop, lose) against its start, its end and its report."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.gpu import SamplerProcess, detect
from gangq.testing import FakeContext
from gangq.watchdogs.deadman import Deadman
from gangq.worker import jobs
from gangq.worker.context_impl import InlineContext
from gangq.worker.drain import Drain
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob
from gangq.worker.liveness import Liveness
from gangq.worker.loops import Intake
from gangq.worker.output import Capture
from gangq.worker.reporter import Reporter
from gangq.worker.runner_inline import HardExit, InlineRunner
from gangq.worker.session import Session
from worker.parts import RecordedWork, claimed, job_of, session_of, source_of


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
    assert work.heard == [("stop", 1.0)]
    assert job.told_by_server
    job.lose("reaped")
    assert work.heard == [("stop", 1.0), "lose"]


def test_a_stop_for_a_lease_that_was_renewed_does_not_keep_a_later_one_from_the_work(
    client: Client, tmp_path: Path
) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    assert job.start(work)
    job.tell_stop("lease", 1.0)
    job.hasten()
    assert (job.stop_reason, work.heard) == ("lease", []), (
        "the deadline of the lease is kept without an order"
    )
    for reason in ("lease", "cancel", "lease", "drain"):
        job.tell_stop(reason, 2.0)  # type: ignore[arg-type]
    assert work.heard == [("stop", 2.0)]
    job.hasten()
    assert work.heard[1:] == [("stop", 0.0)]


def test_a_job_that_has_ended_is_not_lost_any_more(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.begin_report()
    job.lose("the heartbeat found it gone, because it was just reported done")
    assert (job.lost, work.heard) == (None, [])


def test_nor_is_it_told_to_stop(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.begin_report()
    job.tell_stop("drain", 1.0)
    assert (job.stop_reason, job.stopping.is_set(), work.heard) == (None, False, [])


def test_what_its_work_says_once_its_report_has_begun_changes_nothing(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.say_end({"kind": "result"})
    job.begin_report()
    job.say_end({"kind": "error"})
    assert job.work_end == {"kind": "result"}


def test_a_job_completed_by_its_handler_is_not_lost(client: Client, tmp_path: Path) -> None:
    job, work = job_of(client, tmp_path), RecordedWork()
    job.start(work)
    job.say_completed()
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


def test_what_has_begun_is_not_told_what_is_for_those_that_have_not(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    begun = claimed(session, source_of(session))
    waiting = ActiveJob(begun.claim)
    work = SimpleNamespace(stop=lambda *_: pytest.fail("it has begun"))
    assert begun.start(work)  # type: ignore[arg-type]
    for job in (begun, waiting):
        job.tell_stop("directory", 0.0, unless_begun=True)
    assert (begun.stop_reason, waiting.stop_reason) == (None, "directory")
    assert not waiting.start(work)  # type: ignore[arg-type]


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


def inline_runner(session: Session, reporter: Reporter, capture: Capture) -> InlineRunner:
    """One without watchdogs."""
    unwatched = SimpleNamespace(begin=lambda *_: None, end=lambda: None)
    liveness = Liveness.of_environment({})
    return InlineRunner(
        session,
        reporter,
        PortHolder(0),
        Deadman(),
        lambda *_: None,  # type: ignore[arg-type]
        unwatched,  # type: ignore[arg-type]
        liveness,
        capture,
    )


def test_a_job_whose_output_cannot_be_put_away_is_done_all_the_same(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    capture = Capture(session)

    def handler(ctx: Any) -> int:
        capture.take("printed")
        (file,) = tmp_path.glob("*.output")
        file.unlink()
        file.mkdir()  # Cannot be read, and not unlinked.
        log = capture._output._log  # type: ignore[union-attr]
        os.close(log._head)  # type: ignore[union-attr]
        log._head = -1  # type: ignore[union-attr]
        return 1

    inline_runner(session, Reporter(session), capture).run(job, handler)
    assert client.job(id=job.id).state == "done"
    assert "output_not_kept" in caplog.text


def test_a_result_is_sent_as_it_was_when_the_handler_returned(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session, source_of(session))
    reporter = Reporter(session)
    runner = inline_runner(session, reporter, Capture(session))
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
    hard_exit = HardExit(session, Reporter(session), Deadman(), codes.append)
    session.tripping = True
    # A trip ends the incarnation, and the next heartbeat hears of it.
    hard_exit(77, "the incarnation has ended", job)
    assert codes == []

"""What the worker tells its watchdogs and learns from them, and what becomes of a command that one of them ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from gangq.client import Client
from gangq.errors import DatabaseUnreachable
from gangq.gpu import Detection, SamplerProcess
from gangq.task_options import WatchOptions
from gangq.watchdogs import ExitCode, Trip
from gangq.worker import endings
from gangq.worker import limits as limits_module
from gangq.worker.child import Exit
from gangq.worker.drain import Drain
from gangq.worker.endings import report
from gangq.worker.environment import Surroundings
from gangq.worker.jobs import ActiveJob, JobTable
from gangq.worker.limits import Limits, LimitsTable
from gangq.worker.reporter import Reporter
from gangq.worker.runner_command import CommandRunner
from gangq.worker.session import Session
from gangq.worker.watching import CommandTrip, JobWatch, ProcessTrip, Watching, terms_of
from worker.controls import control_of


def claim(**more: Any) -> Any:
    return SimpleNamespace(**{"task": "t", "queue": "default", "devices": [], "budget_s": None, **more})


def session_of(client: Client, directory: Path) -> Session:
    row = client.register_worker(name="w", host="h", queues=["default"], lease_s=60)
    return Session(
        client,
        row,
        name="w",
        host="h",
        mark="m",
        directory=directory,
        sent_at=time.monotonic() + 1e6,
        control=control_of(client),
    )


def limits(client: Any, fresh_s: float = 60.0) -> tuple[LimitsTable, Callable[[], None]]:
    """A table of limits, and what a heartbeat has it do."""
    control = control_of(client)
    session = SimpleNamespace(control=control, table=JobTable())
    table = LimitsTable(session, fresh_s)  # type: ignore[arg-type]
    return table, lambda: control.wait(table.exchange())


def claimed(session: Session) -> ActiveJob:
    (row,) = session.main_client.claim(incarnation=session.incarnation)
    job = ActiveJob(row)
    session.table.add(job)
    return job


# Limits -----------------------------------------------------------------------------------------------------


def test_a_tasks_options_come_before_the_operators_and_those_before_the_installations(client: Client) -> None:
    client.configure(stall_timeout_s=130, health_window_s=310)
    client.set_task(task="t", stall_timeout_s=60, load_grace_s=600)
    table, _ = limits(client)
    plain = table.ask_for(claim(), None, "")
    assert (plain.stall_timeout_s, plain.learn, plain.load_grace_s, plain.health_window_s) == (
        60,
        False,
        600,
        310,
    )
    own = table.ask_for(claim(), WatchOptions(stall_timeout=7, long_phase=8), "")
    assert (own.stall_timeout_s, own.learn, own.load_grace_s, own.long_phase_s) == (7, False, 600, 8)
    other = table.ask_for(claim(task="u"), None, "")
    assert (other.stall_timeout_s, other.learn) == (130, True)


def test_a_job_that_holds_devices_gets_the_larger_budget(client: Client) -> None:
    table, _ = limits(client)
    assert table.ask_for(claim(), None, "").budget_s == 2100
    assert table.ask_for(claim(devices=[{"uuid": "GPU-1"}]), None, "H200").budget_s == 8100


def test_a_database_that_does_not_answer_gives_the_defaults_until_it_does(client: Client) -> None:
    table, exchange = limits(client, fresh_s=0)
    hangs = SimpleNamespace(watch_terms=lambda **_: threading.Event().wait(10))
    table._session.control.for_threads = hangs  # type: ignore[assignment]
    began = time.monotonic()
    assert table.ask_for(claim(), None, "") == Limits()
    assert time.monotonic() - began < 4
    client.configure(stall_timeout_s=99)
    exchange()
    assert table.ask_for(claim(), None, "").stall_timeout_s == 99


def test_a_class_set_to_notify_only_holds_for_a_job_that_is_running_already(client: Client) -> None:
    table, exchange = limits(client, fresh_s=0)
    assert table.ask_for(claim(), None, "").notify_only == ()
    client.set_task(task="t", notify_only=["stall"])
    exchange()
    exchange()
    assert table.of(claim(), None, "").notify_only == ("stall",)


def test_the_limits_of_a_job_that_has_run_for_days_are_kept(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that only notifies would end it otherwise."""
    client.set_task(task="t", notify_only=["stall"])
    table, exchange = limits(client)
    monkeypatch.setattr(limits_module, "_KEPT_S", -1.0)
    running = ActiveJob(claim(job_id=1, token=2, light=False))
    table._session.table.add(running)
    table.ask_for(running.claim, None, "")
    table.ask_for(claim(task="over"), None, "")
    exchange()
    assert table.of(running.claim, None, "").notify_only == ("stall",)
    assert [key[0] for key in table._known] == ["t"]


def test_a_look_at_limits_that_are_not_known_holds_nothing_up_in_the_control_loop(client: Client) -> None:
    client.configure(stall_timeout_s=99)
    table, _ = limits(client)

    async def look() -> float:
        began = time.monotonic()
        assert table.of(claim(), None, "") == Limits()
        return time.monotonic() - began

    assert table._session.control.wait(look()) < 1
    assert table.ask_for(claim(), None, "").stall_timeout_s == 99


def test_what_was_learned_is_told_once_and_again_only_when_it_is_news(
    client: Client, db: psycopg.Connection[dict[str, Any]]
) -> None:
    table, exchange = limits(client)
    told: list[float] = []
    for longest_s in (30.0, 30.0, 32.0, 40.0, 35.0):
        table.learned("t", "H200", longest_s, 100)
        exchange()
        (row,) = db.execute("select longest_gap_s, beats from gangq.tasks where task = 't'").fetchall()
        told.append(row["longest_gap_s"])
    assert told == [30.0, 30.0, 30.0, 40.0, 40.0]
    assert client.watch_terms(task="t", device_class="H200").stall_timeout_s == 200


def test_what_was_learned_is_told_again_after_it_was_forgotten(client: Client) -> None:
    table, exchange = limits(client, fresh_s=0)
    for forget in (False, True):
        client.set_task(task="t", forget=forget)
        table.learned("t", "", 30.0, 100)
        exchange()
        assert client.watch_terms(task="t").stall_timeout_s == 150


def test_what_could_not_be_told_is_told_later(client: Client) -> None:
    table, exchange = limits(Client("host=/nowhere dbname=none", timeout_s=0.2))
    table.learned("t", "", 30.0, 100)
    with pytest.raises(DatabaseUnreachable):
        exchange()
    control = control_of(client)
    table._session.control = control
    control.wait(table.exchange())
    assert client.watch_terms(task="t").stall_timeout_s == 150


def test_a_database_that_does_not_answer_is_asked_for_one_task_and_then_no_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next heartbeat waits for these calls, and each may wait half of what the lease has left."""
    table, exchange = limits(client, fresh_s=0)
    for task in ("t", "u", "v"):
        table.ask_for(claim(task=task), None, "")
    calls: list[str] = []

    async def unreachable(task: str, **_: Any) -> None:
        calls.append(task)
        raise DatabaseUnreachable("the connection was cut")

    for verb in ("watch_terms", "learn_gap"):
        calls.clear()
        monkeypatch.setattr(table._session.control.client, verb, unreachable)
        with pytest.raises(DatabaseUnreachable):
            exchange()
        assert len(calls) == 1
        table.learned("t", "", 30.0, 100)
        table.learned("u", "", 30.0, 100)


def test_an_answer_that_another_thread_had_meanwhile_is_kept_by_one_that_had_none(client: Client) -> None:
    client.configure(stall_timeout_s=99)
    table, _ = limits(client)
    answered = table._session.control.for_threads.watch_terms

    def first(**arguments: str) -> None:
        table._session.control.for_threads = SimpleNamespace(watch_terms=answered)  # type: ignore[assignment]
        another = threading.Thread(target=table.ask_for, args=(claim(), None, ""))
        another.start()
        another.join(10)
        raise DatabaseUnreachable("the connection was cut")

    table._session.control.for_threads = SimpleNamespace(watch_terms=first)  # type: ignore[assignment]
    assert table.ask_for(claim(), None, "").stall_timeout_s == 99


# Beats ------------------------------------------------------------------------------------------------------


def test_a_beat_that_came_before_its_watchdogs_arms_them_all_the_same(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    watch = JobWatch(
        Watching(session, Detection((), None), SamplerProcess(Detection((), None))), lambda _: True
    )
    job = claimed(session)
    try:
        watch.begin(job, None)
        assert not watch._stall.watching
        watch.end()
        job.beat({"step": 1})
        watch.begin(job, None)
        assert watch._stall.watching
        assert watch._stall._job is not None
        assert watch._stall._job.last is not None
        assert watch._stall._job.last.step == 1
    finally:
        watch.close()


def test_a_job_is_allowed_what_its_limits_say_and_idle_devices_are_a_replicas_right() -> None:
    limits = Limits(1.0, 2.0, False, 3.0, 4.0, 5.0)
    job = ActiveJob(claim(job_id=1, token=2, light=False))
    terms = terms_of(job, limits)
    assert (terms.stall_timeout_s, terms.learn, terms.load_grace_s) == (2.0, False, 3.0)
    assert (terms.window_s, terms.long_phase_s) == (4.0, 5.0)
    job.replica = SimpleNamespace()  # type: ignore[assignment]
    assert terms_of(job, limits).window_s == 1e9


def test_the_gaps_of_a_job_are_learned_when_it_ends(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    watching = Watching(session, Detection((), None), SamplerProcess(Detection((), None)))
    watch = JobWatch(watching, lambda _: True)
    job = claimed(session)
    try:
        watch.begin(job, None)
        for step in range(8):
            job.beat({"step": step})
            time.sleep(0.05)
        watch.end()
    finally:
        watch.close()
    session.control.wait(watching.limits.exchange())
    (row,) = client.tasks()
    assert (row.task, row.beats) == ("t", 3)
    assert 0.04 < row.longest_gap_s < 1


# Commands ---------------------------------------------------------------------------------------------------


class Runner:
    """A command runner whose commands end as a test says."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.drain = Drain(0.0)
        self.watching = Watching(session, Detection((), None), SamplerProcess(Detection((), None)))
        nothing = SimpleNamespace(attach=None)
        self.runner = CommandRunner(
            session,
            Reporter(session),
            nothing,
            Detection((), None),
            nothing,
            self.watching,
            self.drain,
            Surroundings({}, "/"),
        )

    def tripped(self, job: ActiveJob, **evidence: Any) -> CommandTrip:
        trip = CommandTrip(self.watching, job, SimpleNamespace())  # type: ignore[arg-type]
        trip.trip = Trip(ExitCode.BUDGET, "budget", "it ran for too long", job=job)
        trip.evidence = dict(evidence)
        return trip

    def report(self, job: ActiveJob, ended: Exit, tripped: CommandTrip, tail: str = "") -> None:
        reporter = self.runner._reporter
        report(reporter, job, ended, reporter.done, tail=tail, ran_s=1.0, is_handler=False, tripped=tripped)


def test_a_command_that_ended_by_itself_while_its_trip_was_decided_ended_as_it_says(
    client: Client, tmp_path: Path
) -> None:
    good, bad = client.submit(task="command", payloads=[{}, {}], max_attempts=1)
    session = session_of(client, tmp_path)
    runner = Runner(session)
    job = claimed(session)
    runner.report(job, Exit(0, None, True), runner.tripped(job))
    assert (client.job(id=good).state, client.job(id=good).trips) == ("done", 0)
    job = claimed(session)
    runner.report(job, Exit(3, None, True), runner.tripped(job))
    row = client.job(id=bad)
    assert (row.state, row.trips, row.error["type"]) == ("failed", 0, "ExitStatus")


def test_a_trip_whose_evidence_cannot_be_kept_is_a_trip_all_the_same(client: Client, tmp_path: Path) -> None:
    (id,) = client.submit(task="command", payloads=[{}])
    session = session_of(client, tmp_path)
    runner = Runner(session)
    job = claimed(session)
    runner.report(job, Exit(None, 9, True, cause="kill"), runner.tripped(job, odd="a\0b", worse=object()))
    row = client.job(id=id)
    assert (row.state, row.trips, row.attempts) == ("pending", 1, 0)
    assert "dropped" in client.trips(job_id=id)[0].evidence
    assert len(session.table) == 0


def test_the_first_of_two_watchdogs_gives_the_code(client: Client, tmp_path: Path) -> None:
    client.submit(task="command", payloads=[{}])
    session = session_of(client, tmp_path)
    job = claimed(session)
    kills: list[int] = []
    child = SimpleNamespace(pid=1 << 22, log_tail=lambda _: b"\xff\0", kill=lambda: kills.append(1))
    trip = CommandTrip(
        Watching(session, Detection((), None), SamplerProcess(Detection((), None))), job, child
    )  # type: ignore[arg-type]
    assert trip(Trip(ExitCode.BUDGET, "budget", "first", job=job))
    assert trip(Trip(ExitCode.STALL, "idle", "second", job=job))
    assert trip.trip is not None
    assert (trip.trip.message, kills) == ("first", [1])


def test_a_process_is_about_to_end_until_the_last_of_two_watchdogs_is_called_off(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    job = claimed(session)
    watching = Watching(session, Detection((), None), SamplerProcess(Detection((), None)))
    process_trip = ProcessTrip(watching, Reporter(session))
    begun = threading.Semaphore(0)
    called_off = {"first": threading.Event(), "second": threading.Event()}

    def path(trip: Trip, **_: int) -> bool:
        begun.release()
        return not called_off[trip.message].wait(10)

    process_trip._path = path  # type: ignore[assignment]
    threads = [
        threading.Thread(target=process_trip, args=(Trip(ExitCode.STALL, "idle", which, job=job),))
        for which in called_off
    ]
    for thread in threads:
        thread.start()
        assert begun.acquire(timeout=10)
    for event, thread in zip(called_off.values(), threads, strict=True):
        assert session.tripping
        event.set()
        thread.join(10)
    assert not session.tripping


def test_a_command_beyond_sigkill_takes_its_worker_out_of_service_before_it_leaves(
    client: Client, tmp_path: Path
) -> None:
    (id,) = client.submit(task="command", payloads=[{}])
    session = session_of(client, tmp_path)
    runner = Runner(session)
    job = claimed(session)
    runner.runner._unkillable(job, (1,))
    runner.runner._unkillable(job, (1,))
    assert not runner.drain.urgent.is_set()
    assert runner.drain.requested.is_set()
    assert session.stuck == {job.token: (1,)}
    (row,) = client.workers(name="w")
    assert (row.reboot_needed, client.job(id=id).state) == (True, "running")
    assert "process 1 cannot be killed" in row.quarantined


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are Linux's")
@pytest.mark.parametrize(("before", "after", "expected"), [(1, 2, True), (1, 1, False), (None, 2, False)])
def test_a_command_killed_for_want_of_memory_is_told_from_one_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int, expected: bool
) -> None:
    monkeypatch.setattr(endings.cgroup, "oom_kills", lambda group: after)
    assert endings._out_of_memory(Exit(None, 9, True), before) is expected
    assert endings._out_of_memory(Exit(None, 15, True), before) is False
    assert endings._out_of_memory(Exit(None, 9, True, cause="kill"), before) is False

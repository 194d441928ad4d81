"""The line between a worker and PostgreSQL fails: answers are lost, or nothing comes through at all."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from process.floor import PATIENCE_S, TASKS, Floor
from process.wire import Wire, wire_to
from worker.worker_process import WorkerProcess, eventually, until_state

TOLD_S = 3.0
"""For what needs no answer; the machine may be busy."""


class Cut(NamedTuple):
    """A floor, the wire of its worker ``far``, and the way to start that worker."""

    floor: Floor
    wire: Wire
    dsn: str

    def far(self, **options: object) -> WorkerProcess:
        return self.floor.start("far", dsn=self.dsn, **options)


@pytest.fixture
def cut(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cut]:
    # The wire reads the text of the calls, which prepared statements would not repeat.
    monkeypatch.setenv("GANGQ_PREPARE", "off")
    with tempfile.TemporaryDirectory(prefix="wire-") as short:
        with wire_to(floor.client.target.conninfo, Path(short) / "d") as (wire, dsn):
            yield Cut(floor, wire, dsn)


def until_lost(cut: Cut) -> None:
    eventually(lambda: cut.wire.lost, "an answer was lost", PATIENCE_S)


def test_a_lost_answer_to_a_claim_burns_nothing(cut: Cut) -> None:
    floor = cut.floor
    cut.far(commands=False)
    cut.wire.lose(b"gangq.claim(", b"lives")
    job = floor.inline()
    until_lost(cut)
    floor.until_at_work(job)
    floor.go()
    (row,) = floor.until_done(job)
    assert (row.result, row.attempts, row.crashes, row.stops) == ("first", 1, 0, 0)
    assert len(floor.journal.attempts(job)) == 1


@pytest.mark.parametrize("waiting", [False, True], ids=["nothing waits", "the next is claimed with it"])
def test_a_lost_answer_to_a_completion_ends_the_job_once(cut: Cut, waiting: bool) -> None:
    floor = cut.floor
    worker = cut.far()
    job = floor.inline()
    floor.until_at_work(job)
    following = floor.inline("quick") if waiting else None
    cut.wire.lose(b"gangq.complete_and_claim(")
    floor.go()
    until_lost(cut)
    (row,) = floor.until_done(job)
    # The next job proves that the worker has heard the repeated answer and gone on.
    next_row = until_state(floor.client, following or floor.inline("quick"), "done")
    assert (row.result, row.attempts, row.crashes) == ("first", 1, 0)
    assert (next_row.worker, next_row.attempts, next_row.crashes) == ("far", 1, 0)
    assert len(floor.journal.attempts(job)) == 1
    assert "result_stale" not in worker.log


def test_a_lost_commit_of_the_handlers_own_transaction_leaves_its_effects_once(cut: Cut) -> None:
    floor = cut.floor
    floor.fleet.define(
        TASKS
        + f"""
import psycopg
@app.task
def effects(ctx):
    with psycopg.connect({cut.dsn!r}) as conn:
        conn.execute("insert into public.effects values (%s)", (ctx.token,))
        ctx.complete(conn, "made")
        conn.commit()
"""
    )
    with floor.client.connection() as conn:
        conn.execute("create table public.effects (token bigint)")
    cut.far()
    cut.wire.lose(b"COMMIT")
    job = floor.inline("effects", max_attempts=2)
    until_lost(cut)
    row = until_state(floor.client, job, "done", timeout=PATIENCE_S)
    until_state(floor.client, floor.inline("quick"), "done", timeout=PATIENCE_S)
    row = floor.client.job(id=job)
    assert (row.state, row.result, row.attempts) == ("done", "made", 1)
    with floor.client.connection() as conn:
        assert conn.execute("select token from public.effects").fetchall() == [(row.token,)]


def test_a_lost_answer_to_a_failure_charges_once(cut: Cut) -> None:
    floor = cut.floor
    floor.fleet.define(
        TASKS
        + """
@app.task
def breaks(ctx):
    Journal(JOURNAL).note("broke", ctx.job.id, ctx.token)
    raise RuntimeError("as it was told")
"""
    )
    cut.far()
    cut.wire.lose(b"gangq.fail(")
    row = until_state(floor.client, floor.inline("breaks", max_attempts=2), "failed", timeout=PATIENCE_S)
    assert row.attempts == 2
    assert len(floor.journal.entries("broke")) == 2
    assert len(cut.wire.lost) == 1


def test_lost_answers_on_the_way_out_cost_nobody_anything(cut: Cut) -> None:
    floor = cut.floor
    worker = cut.far(light=2)
    cancelled = floor.command()
    floor.until_at_work(cancelled)
    cut.wire.lose(b"gangq.ack_preempted(")
    floor.client.cancel(job_ids=[cancelled])
    until_lost(cut)
    until_state(floor.client, cancelled, "cancelled")
    kept = floor.command()
    floor.until_at_work(kept)
    cut.wire.lose(b"gangq.release(")
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert len(cut.wire.lost) == 2
    row = floor.client.job(id=kept)
    assert (row.state, row.attempts, row.stops, row.crashes) == ("pending", 0, 1, 0)
    assert floor.worker_row("far").state == "retired"


def test_a_lost_answer_to_a_heartbeat_and_to_a_registration_are_asked_for_again(cut: Cut) -> None:
    floor = cut.floor
    cut.wire.lose(b"gangq.register_worker(")
    worker = floor.start("far", dsn=cut.dsn, ready=False)
    until_lost(cut)
    floor.until_listening(worker)
    assert worker.process.poll() is None, "it asks again and knows its own incarnation"
    job = floor.inline()
    floor.until_at_work(job)
    cut.wire.lose(b"gangq.heartbeat(")
    eventually(lambda: len(cut.wire.lost) == 2, "a heartbeat's answer was lost", PATIENCE_S)
    renewed = floor.worker_row("far").renewed_at
    eventually(lambda: floor.worker_row("far").renewed_at > renewed, "it renews", PATIENCE_S)
    floor.go()
    (row,) = floor.until_done(job)
    assert (row.attempts, row.crashes) == (1, 0)


@pytest.mark.parametrize("kind", [pytest.param("handler", marks=pytest.mark.soak), "command"])
def test_work_behind_a_black_hole_is_dead_before_its_lease_ends_and_runs_elsewhere(
    cut: Cut, kind: str
) -> None:
    floor = cut.floor
    worker = cut.far()
    job = floor.inline(payload={"deaf": True}) if kind == "handler" else floor.command("--below", "--deaf")
    floor.until_at_work(job, 1 if kind == "handler" else 2)
    incarnation = floor.worker_row("far").incarnation
    cut.wire.freeze(new_ones_too=True)
    eventually(lambda: floor.journal.living(job) == [], "it is dead", PATIENCE_S)
    assert floor.worker_row("far").lease_left_s > 0
    floor.start("near", ready=False)
    (row,) = floor.until_done(job)
    assert (row.worker, row.attempts, row.crashes) == ("near", 1, 1)
    cut.wire.thaw()
    if kind == "handler":
        assert worker.exit_code() == 77
        return
    known = (row, floor.client.events(job_id=job))
    eventually(lambda: floor.worker_row("far").incarnation > incarnation, "it is back", PATIENCE_S)
    assert (floor.client.job(id=job), floor.client.events(job_id=job)) == known
    assert worker.process.poll() is None


def test_a_result_that_comes_after_the_lease_changes_nothing(cut: Cut) -> None:
    floor = cut.floor
    floor.fleet.define(
        TASKS
        + """
@app.task
def slow_word(ctx):
    Journal(JOURNAL).note("start", ctx.job.id, ctx.token, ticks=0)
    number = len(Journal(JOURNAL).attempts(ctx.job.id))
    while not (HERE / f"finish-{number}").exists():
        time.sleep(0.01)
    return ctx.token
"""
    )
    worker = cut.far()
    job = floor.inline("slow_word")
    eventually(lambda: floor.journal.attempts(job), "it runs", PATIENCE_S)
    incarnation = floor.worker_row("far").incarnation
    cut.wire.freeze(new_ones_too=True)
    (floor.directory / "finish-1").touch()
    floor.start("near")
    eventually(lambda: len(floor.journal.attempts(job)) == 2, "it runs again", PATIENCE_S)
    late, timely = floor.journal.attempts(job)
    # Now the first one's word arrives, as it was sent: of a token that is not the job's any more.
    cut.wire.thaw()
    eventually(lambda: floor.worker_row("far").incarnation > incarnation, "it is back", PATIENCE_S)
    until_state(floor.client, floor.inline("quick"), "done", timeout=PATIENCE_S)
    row = floor.client.job(id=job)
    assert (row.state, row.token, row.worker, row.result) == ("running", timely, "near", None)
    (floor.directory / "finish-2").touch()
    (row,) = floor.until_done(job)
    assert (row.result, row.token, row.worker, row.crashes) == (timely, timely, "near", 1)
    assert late != timely
    assert worker.process.poll() is None


SMALL = (
    TASKS
    + """
@app.task
def small(ctx):
    Journal(JOURNAL).note("ran", ctx.job.id, ctx.token)
"""
)
PREFETCH = 22
REPORT_AND_CLAIM = (b"gangq.complete_and_claim(", b"\x00\x00\x00\x02\x00\x16")
"""A report of all that has run together with the next claim, of which PREFETCH is asked."""


class Unread(NamedTuple):
    """What the worker ``far`` was amid when the answer to a report with the next claim was kept back."""

    worker: WorkerProcess
    submitted: list[int]
    ran: set[int]
    """What has run; the call has reported the last of it."""
    brought: set[int]
    """What was claimed by the call: nobody knows of it."""

    def runs(self, floor: Floor, jobs: set[int]) -> list[int]:
        return [entry["job"] for entry in floor.journal.entries("ran") if entry["job"] in jobs]


def until_unread(cut: Cut, **options: object) -> Unread:
    """Start ``far`` and give it small jobs; return once it has nothing more to run and hears nothing."""
    floor = cut.floor
    floor.fleet.define(SMALL)
    worker = cut.far(prefetch=PREFETCH, **options)
    cut.wire.hold(*REPORT_AND_CLAIM)
    submitted = floor.client.submit(task="small", payloads=[{}] * 300)
    eventually(lambda: cut.wire.held, "the answer is kept back", PATIENCE_S)
    brought = {job.id for job in floor.client.jobs(state="running")}
    unread = Unread(worker, submitted, {job.id for job in floor.client.jobs(state="done")}, brought)
    assert len(brought) == PREFETCH
    assert len(unread.ran) >= PREFETCH
    assert unread.runs(floor, brought) == []
    return unread


def test_a_worker_killed_before_it_read_the_answer_to_a_report_with_a_claim_loses_and_doubles_nothing(
    cut: Cut,
) -> None:
    floor, lease_s = cut.floor, 4.0
    floor.configure(lease_s=lease_s, lease_margin_s=1, grace_s=0.5)
    unread = until_unread(cut)
    unread.worker.signal(signal.SIGKILL)
    unread.worker.exit_code()
    renewed = floor.worker_row("far").renewed_at
    floor.start("near", ready=False, prefetch=PREFETCH)
    eventually(lambda: not floor.client.jobs(state=["pending", "running"]), "all have ended", PATIENCE_S)
    with floor.client.connection() as conn:
        endings = conn.execute("select job_id, state from gangq.history order by job_id").fetchall()
    assert endings == [(job, "done") for job in unread.submitted]
    rows = {row.id: row for row in floor.client.jobs(ids=unread.submitted)}
    for job in unread.brought:
        assert (rows[job].worker, rows[job].stops) == ("near", 0)
        assert (rows[job].claimed_at - renewed).total_seconds() >= lease_s
    assert sum(row.crashes for row in rows.values()) == 1, "it can have begun one of them"
    for job in rows.keys() - unread.brought:
        assert (rows[job].attempts, rows[job].crashes, rows[job].stops) == (1, 0, 0)
    # What the answer would have brought had never begun, and nothing runs twice.
    assert sorted(unread.runs(floor, set(unread.submitted))) == unread.submitted


def test_what_a_claim_under_way_brings_into_a_patient_drain_is_handed_back_and_never_begins(
    cut: Cut,
) -> None:
    floor = cut.floor
    unread = until_unread(cut, drain_timeout_s=30.0)
    unread.worker.signal(signal.SIGTERM)
    eventually(lambda: "draining" in unread.worker.log, "the drain was asked for")
    cut.wire.thaw()
    assert unread.worker.exit_code() == 0
    assert unread.runs(floor, unread.brought) == []
    for row in floor.client.jobs(ids=list(unread.brought)):
        assert (row.state, row.attempts, row.crashes, row.stops) == ("pending", 0, 0, 1)
    assert set(floor.client.job_states(ids=list(unread.ran)).values()) == {"done"}
    assert floor.client.jobs(state="running") == []
    assert floor.worker_row("far").state == "retired"


def test_jobs_are_told_to_stop_while_no_answer_comes_and_a_second_sigterm_skips_their_grace(cut: Cut) -> None:
    floor = cut.floor
    # An answer may take half a minute, and a grace lasts for longer.
    floor.configure(grace_s=60, lease_s=600, lease_margin_s=60, heartbeat_s=60)
    worker = cut.far(light=2)
    job = floor.command("--below", "--deaf")
    floor.until_at_work(job, 2)
    cut.wire.freeze(new_ones_too=True)
    worker.signal(signal.SIGTERM)
    eventually(lambda: "job_told_to_stop" in worker.log, "the job is told to stop", TOLD_S)
    assert len(floor.journal.living(job)) == 2
    worker.signal(signal.SIGTERM)
    eventually(lambda: not floor.journal.living(job), "its grace is over", TOLD_S)
    cut.wire.thaw()
    assert worker.exit_code() == 0
    row = floor.client.job(id=job)
    assert (row.state, row.attempts, row.crashes) == ("pending", 0, 0)


@pytest.mark.soak
def test_when_every_connection_falls_silent_a_worker_finds_another_way_and_its_work_goes_on(cut: Cut) -> None:
    """The server is there and new connections work; the old ones are never closed and never answer."""
    floor = cut.floor
    floor.configure(lease_s=20)
    handling = floor.start("handling", dsn=cut.dsn)
    job = floor.inline()
    (pid,) = floor.until_at_work(job)
    idle = floor.start("idle", dsn=cut.dsn, light=2)
    cut.wire.freeze(new_ones_too=False)
    renewed = {w.name: w.renewed_at for w in floor.client.workers()}
    # One that hears nothing more of a claim it has sent would be idle for ever, and look alive.
    row = until_state(floor.client, floor.command(), "running", timeout=PATIENCE_S)
    assert row.worker == "idle"
    eventually(
        lambda: all(w.renewed_at > renewed[w.name] for w in floor.client.workers()), "both renew", PATIENCE_S
    )
    for worker in (handling, idle):
        floor.until_listening(worker, 2)
    assert floor.journal.living(job) == [pid]
    floor.go()
    (row,) = floor.until_done(job)
    assert (row.worker, row.attempts, row.crashes, row.stops) == ("handling", 1, 0, 0)
    assert (handling.process.poll(), idle.process.poll()) == (None, None)


def test_a_child_that_saves_a_checkpoint_in_an_outage_waits_for_as_long_as_its_lease(cut: Cut) -> None:
    floor = cut.floor
    floor.configure(lease_s=60)
    floor.fleet.define("""
@app.task(isolate=True)
def saves(ctx):
    line = ctx._link._socket
    line.settimeout(line.gettimeout() and line.gettimeout() / 100)  # The outage is as short, too.
    (HERE / "begun").touch()
    while not (HERE / "go").exists():
        time.sleep(0.02)
    ctx.save_checkpoint(1, b"saved")
""")
    worker = cut.far()
    job = floor.inline("saves", max_attempts=1)
    eventually((floor.directory / "begun").exists, "it has begun", PATIENCE_S)
    cut.wire.cut(refuse=True)
    (floor.directory / "go").touch()
    eventually(lambda: worker.log.count("call_repeated") > 6, "it is tried again and again", PATIENCE_S)
    cut.wire.cut()
    floor.until_done(job)

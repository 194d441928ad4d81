"""All that waits runs here, in this thread where that can be, and the process is as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from gangq import App, Context
from gangq.context import find_current, runs_handler, set_current
from gangq.errors import GangqError, InvalidInput, WaitTimeout
from gangq.testing import drain, draining
from gangq.watchdogs.deadman import Deadman
from gangq.worker import main, runner_inline

pytestmark = pytest.mark.slow


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    with App(dsn) as made:
        made.client.set_queue(name="default", backoff_s=0.01, backoff_max_s=0.01)
        yield made


@pytest.fixture
def time_is_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once it is set, every drain's time is up."""
    event = threading.Event()
    monkeypatch.setattr(draining, "_now", lambda: time.monotonic() + 1000 * event.is_set())
    return event


def test_a_handler_that_snoozes_has_run(app: App) -> None:
    seen: list[int] = []

    @app.task
    def snoozes(ctx: Context) -> None:
        seen.append(ctx.attempt)
        if len(seen) == 1:
            ctx.snooze(0)

    snoozes.submit()
    assert str(drain(app)) == "1 done"
    assert len(seen) == 2


def test_async_handlers_run_here_too(app: App) -> None:
    @app.task
    async def doubles(ctx: Context, n: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        return 2 * n, os.getpid()

    @app.task(gpus=1)
    async def placed(ctx: Context) -> int:
        await asyncio.sleep(0)
        return len(ctx.devices)

    doubles.submit_many([{"n": 1}, {"n": 2}])
    placed.submit()
    assert [job.result for job in drain(app).ended] == [[2, os.getpid()], [4, os.getpid()], 1]


def test_light_jobs_run_here_and_so_do_those_that_they_submit(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    @app.task
    def counts(ctx: Context, n: int) -> int:
        seen.append((n, threading.current_thread() is threading.main_thread()))
        print("counts", n)
        if n == 2:
            counts.submit(n=3)
        return n

    jobs = counts.submit_many([{"n": 1}, {"n": 2}])
    found = drain(app)
    assert seen == [(1, True), (2, True), (3, True)]
    assert [job.result for job in found.ended] == [1, 2, 3]
    assert [job.id for job in found.ended[:2]] == [job.id for job in jobs]
    assert (str(found), found.failed, found.waiting) == ("3 done", [], [])
    assert capsys.readouterr().out == "counts 1\ncounts 2\ncounts 3\n"
    assert jobs[1].logs() == "counts 2\n"
    again = drain(app)
    assert (str(again), again.ended) == ("nothing ran", [])


def test_a_job_that_is_retried_by_hand_ends_again(app: App) -> None:
    @app.task
    def works(ctx: Context) -> None: ...

    job = works.submit()
    drain(app)
    app.client.retry(job_ids=[job.id])
    assert [ended.id for ended in drain(app).ended] == [job.id]


def test_a_job_that_fails_is_tried_again_and_said(app: App) -> None:
    @app.task(max_attempts=2)
    def breaks(ctx: Context) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    job = breaks.submit()
    states = {job.state()}
    while "failed" not in states and len(states) < 4:
        found = drain(app)
        states.add(job.state())
        time.sleep(0.02)
    assert [(failed.id, failed.error and failed.error["message"]) for failed in found.failed] == [
        (job.id, "attempt 2")
    ]
    assert str(found) == "1 failed"


def test_placed_jobs_find_what_they_ask_for_here(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("GANGQ_EXPECT_GPUS", "8")
    seen: list[Any] = []

    @app.task(gpus=1)
    def looks(ctx: Context, name: str) -> None:
        here = threading.current_thread() is threading.main_thread()
        seen.append((name, len(ctx.devices), os.environ.get("CUDA_VISIBLE_DEVICES"), here))

    huge = looks.options(gpus=4, vram_mb=200_000, memory_mb=10_000_000, cpus=512, labels={"site": "oslo"})
    huge.submit(name="huge")
    looks.submit_many([{"name": "a"}, {"name": "b"}])
    looks.options(gpus=0, memory_mb=1).submit(name="memory")
    assert str(drain(app)) == "4 done"
    assert sorted(seen) == [
        ("a", 1, "0", True),
        ("b", 1, "0", True),
        ("huge", 4, "0,1,2,3", True),
        ("memory", 0, "", True),
    ]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert app.client.violations() == []


def test_light_jobs_find_the_labels_that_they_ask_for(app: App) -> None:
    @app.task
    def works(ctx: Context, site: str | None) -> None: ...

    for site in (None, "oslo", "bergen"):
        works.options(labels={} if site is None else {"site": site}).submit(site=site)
    assert str(drain(app)) == "3 done"


@pytest.mark.parametrize("beside", ["inside", "elsewhere"])
def test_one_drain_at_a_time_runs_in_a_process(app: App, beside: str) -> None:
    """The worker of a second one would report that of the first dead: it has its name."""
    said: list[object] = []

    def drains() -> None:
        try:
            said.append(drain(app))
        except InvalidInput as problem:
            said.append(str(problem))

    @app.task
    def works(ctx: Context) -> None:
        if beside == "inside":
            drains()
        else:
            thread = threading.Thread(target=drains)
            thread.start()
            thread.join()

    works.submit()
    assert str(drain(app)) == "1 done"
    assert said == ["a drain runs in this process already, and it also runs what is submitted meanwhile"]
    drains()
    assert str(said[1]) == "nothing ran"


def test_each_single_job_finds_the_cpus_that_it_asks_for(app: App) -> None:
    @app.task
    def works(ctx: Context) -> None: ...

    app.client.set_queue(name="paused", paused=True)
    works.options(cpus=512).submit()
    works.options(queue="paused", cpus=1).submit()
    assert str(drain(app)) == "1 done; 1 of works pending: its queue is paused"


def test_a_debugger_may_hold_the_process_for_long(app: App, dsn: str) -> None:
    leases: list[object] = []

    @app.task
    def works(ctx: Context) -> None:
        with psycopg.connect(dsn) as connection:
            leases.extend(connection.execute("select lease_s from gangq.leases"))

    works.submit()
    assert str(drain(app)) == "1 done"
    assert leases == [(3600.0,)]


def test_a_database_that_cannot_do_what_is_due_ends_it_when_the_time_is_up(
    app: App, time_is_up: threading.Event, dsn: str
) -> None:
    with psycopg.connect(dsn) as holder:
        holder.execute("select from gangq.lock_rows where name = 'tick' for update")
        timers = [threading.Timer(0.3, time_is_up.set), threading.Timer(5, holder.rollback)]
        for timer in timers:
            timer.start()
        with pytest.raises(WaitTimeout, match=r"drain has not ended within 60 s$"):
            drain(app)
        timers[1].cancel()


def test_ctrl_c_is_heard_after_a_handler_that_took_it_for_itself(app: App) -> None:
    @app.task
    def takes(ctx: Context) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @app.task
    def interrupted(ctx: Context) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(5)

    before = signal.getsignal(signal.SIGINT)
    takes.submit()
    interrupted.submit()
    try:
        with pytest.raises(KeyboardInterrupt):
            drain(app)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_cannot_run_is_left_with_its_reason(app: App) -> None:
    @app.task
    def runs(ctx: Context) -> None: ...

    due = datetime.now(UTC) + timedelta(days=1)
    later = runs.options(run_at=due).submit()
    big = runs.options(gpus=1, vram_mb=40_000).submit()
    found = drain(app, devices="2x24GiB")
    assert (later.state(), big.state()) == ("scheduled", "pending")
    assert found.ended == []
    said = str(found)
    assert "1 of runs scheduled: due later, the first in " in said
    assert "each needs 1 GPU of 40000 MiB" in said
    assert "the largest worker offers 2 GPUs of 24576 MiB" in said


def test_a_paused_queue_holds_up_no_other(app: App) -> None:
    @app.task(memory_mb=1)
    def runs(ctx: Context) -> None: ...

    app.client.set_queue(name="a", paused=True)
    app.client.set_queue(name="b")
    free, held = runs.options(queue="b").submit(), runs.options(queue="a").submit()
    found = drain(app)
    assert (held.state(), free.state()) == ("pending", "done")
    assert str(found) == "1 done; 1 of runs pending: its queue is paused"


def test_labels_and_taints_of_the_workers_can_be_said(app: App) -> None:
    @app.task
    def runs(ctx: Context) -> None: ...

    picky = runs.options(gpus=1, selector="gpu=h100", wait_for_hardware=True).submit()
    usual = runs.options(gpus=1).submit()
    assert str(drain(app, taints=["spot"])).startswith("nothing ran")
    drain(app)
    assert (picky.state(), usual.state()) == ("pending", "done")
    drain(app, labels={"gpu": "h100"})
    assert picky.state() == "done"


def test_commands_run_too(app: App, tmp_path: Path) -> None:
    here = ["sh", "-c", "echo $RANK >> ran"]
    app.submit_command(here, cwd=str(tmp_path))
    gang = app.submit_command(here, cwd=str(tmp_path), gang=2)
    drain(app)
    # No child process could find this App, and commands need none.
    assert gang.state() == "done"
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1"]


def test_a_command_that_cannot_start_holds_up_no_handler_that_asks_for_the_same(
    app: App, tmp_path: Path
) -> None:
    @app.task(memory_mb=1)
    def runs(ctx: Context) -> None: ...

    app.client.set_queue(name="a", paused=True)
    free = runs.submit()
    held = app.submit_command(["true"], cwd=str(tmp_path), queue="a", memory_mb=1)
    found = drain(app)
    assert (held.state(), free.state()) == ("pending", "done")
    assert "1 done" in str(found)
    assert "its queue is paused" in str(found)


def test_a_gang_of_an_app_that_no_other_process_finds_is_refused(app: App) -> None:
    @app.task
    def member(ctx: Context) -> None: ...

    alone = member.gang(1).submit()
    member.gang(3).submit()
    with pytest.raises(
        InvalidInput, match=r"has 3 members.*in a variable of a module.*FakeContext\(gang=\(0, 3\)\)"
    ):
        drain(app)
    assert alone.state() == "done"


def test_a_handler_that_hangs_is_interrupted_and_handed_back(app: App, time_is_up: threading.Event) -> None:
    swallowed: list[BaseException] = []

    @app.task
    def hangs(ctx: Context) -> None:
        time_is_up.set()
        try:
            time.sleep(60)
        except BaseException as problem:
            swallowed.append(problem)
            raise

    job = hangs.submit()
    before = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    with pytest.raises(
        WaitTimeout, match=r"within 60 s: job 1 \(task 'hangs'\) ran then, and was interrupted$"
    ):
        drain(app)
    assert time.monotonic() - began < 30
    assert not isinstance(swallowed[0], Exception)
    row = job.row()
    assert (row.state, row.attempts, row.stops) == ("pending", 0, 1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_looks_is_told_to_stop_and_not_interrupted(
    app: App, time_is_up: threading.Event
) -> None:
    @app.task
    def looks(ctx: Context) -> None:
        time_is_up.set()
        ctx.wait_stopping(60)
        ctx.raise_if_stopping()

    job = looks.submit()
    with pytest.raises(WaitTimeout, match=r": job 1 \(task 'looks'\) ran then$"):
        drain(app)
    assert job.state() == "pending"


def test_a_child_process_that_hangs_ends_without_a_grace(
    app: App, time_is_up: threading.Event, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    job = app.submit_command(["sh", "-c", f"trap '' TERM; touch {begun}; while :; do sleep 1; done"])

    def watch() -> None:
        while not begun.exists():
            time.sleep(0.01)
        time_is_up.set()

    threading.Thread(target=watch, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match=r": job 1 \(task 'command'\) ran then$"):
        drain(app)
    # The grace is 15 s.
    assert time.monotonic() - began < 12
    assert job.state() == "pending"


def test_ctrl_c_ends_it(app: App) -> None:
    @app.task
    def hangs(ctx: Context) -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(60)

    hangs.submit()
    with pytest.raises(KeyboardInterrupt):
        drain(app)
    # Nobody holds it: the next worker would be refused its name otherwise.
    assert app.client.workers()[0].state == "retired"


@pytest.mark.parametrize("name", ["main", "elsewhere"])
def test_an_interruption_that_comes_as_the_handler_ends_is_no_other_error(
    app: App, time_is_up: threading.Event, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Between the look whether a handler runs and the exception in its thread, the handler returns."""
    returns, late = threading.Event(), ["once"]
    interrupt_handler = draining._Run._interrupt_handler

    def interrupts_late(run: Any) -> None:
        returns.set()
        until = time.monotonic() + 20
        while runs_handler() and time.monotonic() < until:
            time.sleep(0)
        interrupt_handler(run)

    def looks_late() -> bool:
        if returns.is_set() and threading.current_thread() is threading.main_thread() and late:
            return bool(late.pop())
        return runs_handler()

    def drains() -> None:
        with pytest.raises(WaitTimeout, match=r"task 'returns_late'\) ran then, and was interrupted$"):
            drain(app)
        ended.append(find_current())

    ended: list[Any] = []
    monkeypatch.setattr(draining, "runs_handler", looks_late)
    monkeypatch.setattr(draining._Run, "_interrupt_handler", interrupts_late)

    @app.task
    def returns_late(ctx: Context) -> None:
        time_is_up.set()
        returns.wait(30)

    returns_late.submit()
    if name == "main":
        drains()
    else:
        thread = threading.Thread(target=drains, name=name)
        thread.start()
        thread.join()
    assert ended == [None]
    assert not [one.name for one in threading.enumerate() if one.name.startswith("gangq-drain")]


def test_an_interruption_right_after_a_handler_leaves_neither_its_timer_nor_its_context(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer would end this process when the lease of the worker is over."""
    deadmen: list[Deadman] = []

    def deadman(**options: Any) -> Deadman:
        deadmen.append(Deadman(**options))
        return deadmen[-1]

    def interrupted(context: Context | None) -> None:
        if context is None:
            assert deadmen[0]._set_to != ()
            raise draining._Interrupted
        set_current(context)

    monkeypatch.setattr(main, "Deadman", deadman)
    monkeypatch.setattr(runner_inline, "set_current", interrupted)

    @app.task
    def works(ctx: Context) -> None: ...

    works.submit()
    with pytest.raises(GangqError, match="ended with code"):
        drain(app)
    assert [one._set_to for one in deadmen] == [()]
    assert find_current() is None


def test_in_another_thread_it_works_and_leaves_nothing_open(app: App, time_is_up: threading.Event) -> None:
    @app.task
    def works(ctx: Context) -> str:
        return threading.current_thread().name

    @app.task
    def spins(ctx: Context) -> None:
        time_is_up.set()
        while True:
            time.sleep(0.01)

    def elsewhere() -> list[Any]:
        found: list[Any] = []

        def drains() -> None:
            try:
                found.append(drain(app.aio))
            except WaitTimeout as problem:
                found.append(str(problem))

        thread = threading.Thread(target=drains, name="elsewhere")
        thread.start()
        thread.join()
        return found

    works.submit()
    assert elsewhere()[0].ended[0].result == "elsewhere"
    before = sorted(os.listdir("/proc/self/fd"))
    works.submit()
    elsewhere()
    assert sorted(os.listdir("/proc/self/fd")) == before
    spins.submit()
    assert elsewhere()[0].endswith("(task 'spins') ran then, and was interrupted")

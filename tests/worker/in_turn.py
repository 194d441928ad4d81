"""One handler after another in a process of its own: ``python in_turn.py <what> [<argument> ...]``.

``what`` is the name of a function below "what it does". None needs a database. The first lease is some tenths of a
second long. The process ends with 0 if it lives to its end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

from gangq.app import App
from gangq.client.rows import Claim
from gangq.client.sync import in_steps
from gangq.proc.clock import boottime
from gangq.watchdogs.deadman import Deadman
from gangq.worker import runner_inline
from gangq.worker.claims import ThreadWakes
from gangq.worker.dispatch import Dispatcher
from gangq.worker.drain import Drain
from gangq.worker.gangs import PortHolder
from gangq.worker.jobs import ActiveJob, JobTable
from gangq.worker.liveness import Liveness
from gangq.worker.loops import Intake, MainThreadLoop
from gangq.worker.output import Capture
from gangq.worker.reporter import Reporter
from gangq.worker.runner_command import CommandRunner
from gangq.worker.runner_inline import HardExit, InlineRunner
from gangq.worker.watching import JobWatch


class SlowReporter(Reporter):
    """A report lasts until long after the first lease, except one that is batched because more jobs follow."""

    def __init__(self):
        pass

    def done(self, job, result, *, more_follow):
        if not more_follow:
            outlive()

    def failed(self, job, error, *, again, cause="error"):
        outlive()

    def stopped(self, job, *, unless_told=None):
        outlive()

    def forget(self, job):
        pass

    def flush(self):
        outlive()


class SlowCommands(CommandRunner):
    """What runs in a child lasts until long after the first lease."""

    def __init__(self):
        pass

    def run(self, job, command, done):
        outlive()


class Unwatched(JobWatch):
    def __init__(self):
        pass

    def begin(self, job, options):
        pass

    def end(self):
        pass


def job(number: int = 1, task: str = "t") -> ActiveJob:
    fields = {"job_id": number, "token": number, "task": task, "payload": {}, "devices": []}
    return ActiveJob(Claim(**dict.fromkeys(Claim._fields) | fields))


def hang(ctx: Any) -> None:
    while True:
        ctypes.PyDLL(None).sleep(30)


def outlive(ctx: Any = None) -> None:
    while boottime() < first + 0.4:
        time.sleep(0.02)


def quick(ctx: Any) -> None:
    pass


def fails(ctx: Any) -> None:
    raise ValueError


def told(ctx: Any) -> None:
    ctx._active.tell_stop("drain", 30.0)
    assert ctx.stopping


def give(order: str, to: ActiveJob) -> None:
    if order == "lost":
        to.lose("the claim is gone")
    elif order == "stop":
        to.tell_stop("drain", 0.0)
    elif order == "hasten":
        to.stop_reason = "drain"
        to.hasten()
    else:
        to.extend(first + 60, 1.0)


first = boottime() + 0.4
session = SimpleNamespace(
    name="w",
    kill_at=first,
    terms=SimpleNamespace(grace_s=1.0),
    lapsing=lambda: False,
    directory=Path("/"),
    table=JobTable(),
    ended=Event(),
    wake=lambda: None,
    model=None,
    tripping=False,
    note=lambda why: None,
)
reporter = SlowReporter()
deadman = Deadman()
runner = InlineRunner(
    session=session,
    reporter=reporter,
    ports=PortHolder(0),
    deadman=deadman,
    hard_exit=lambda code, why, job: os._exit(code),
    watch=Unwatched(),
    liveness=Liveness.of_environment({}),
    capture=Capture(session),
)
app = App("host=nowhere")
app.task(quick, name="quick")
app.task(hang, name="isolated", isolate=True)
dispatcher = Dispatcher(
    app=app, target="tasks:app", devices=0, commands=SlowCommands(), reporter=reporter, ports=PortHolder(0)
)


def leave(code: int) -> None:
    """Told apart from what the kernel's timers do."""
    os._exit(100 + code)


def exits_by(leave: Callable[[int], None], flush: Callable[[], object] = int) -> None:
    """Let the runner end this process as a worker does, under a long lease."""
    session.kill_at = first + 30
    runner._hard_exit = HardExit(session, SimpleNamespace(flush=flush), deadman, leave)


# -- what it does ----------------------------------------------------------------------------------------------------


def hangs_after_another() -> None:
    runner.run(job(1), quick, more_follow=True)
    runner.run(job(2), hang)


def hangs_after_a_rest() -> None:
    runner.run(job(1), quick, more_follow=True)
    runner.rest()
    runner.run(job(2), hang)


def begins_as_the_lease_lapses() -> None:
    session.lapsing = lambda: True
    runner.run(job(), lambda ctx: os._exit(1))


def is_renewed_between_two() -> None:
    runner.run(job(1), quick, more_follow=True)
    session.kill_at = first + 30
    runner.run(job(2), outlive)


def is_renewed_as_it_starts() -> None:
    class Renewed(ActiveJob):
        def start(self, work):
            session.kill_at = first + 30
            return super().start(work)

    runner.run(Renewed(job().claim), outlive)


def is_renewed_in_the_second() -> None:
    runner.run(job(1), quick, more_follow=True)
    second = job(2)
    runner.run(second, lambda ctx: (second.extend(first + 30, 1.0), outlive()))


def is_ordered_at_once(order: str) -> None:
    class Ordered(ActiveJob):
        def start(self, work):
            started = super().start(work)
            give(order, self)
            return started

    session.kill_at = first + 30
    runner.run(Ordered(job().claim), lambda ctx: time.sleep(10))


def faults_before_its_handler() -> None:
    def no_context(session, job):
        job.tell_stop("drain", 0.2)
        raise MemoryError

    runner_inline.InlineContext = no_context
    try:
        runner.run(job(), quick)
    except MemoryError:
        runner.rest()
        time.sleep(1)


def is_ordered_during_a_trip(order: str, more_s: str) -> None:
    exits_by(leave)
    session.tripping = True
    threading.Timer(0.5, lambda: setattr(session, "tripping", False)).start()
    one = job()
    runner.run(one, lambda ctx: (give(order, one), time.sleep(float(more_s)))[1], more_follow=True)
    time.sleep(1.5)


def returns_while_it_exits() -> None:
    """100 and the code, unless the second job has begun or was not handed back."""
    flushing, begun, released = Event(), Event(), []

    def flush() -> None:
        flushing.set()
        begun.wait(0.2)

    def release(job_ids: list[int], tokens: list[int], reason: str) -> None:
        released.extend(job_ids)

    exits_by(lambda code: os._exit(1 if begun.is_set() or released != [2] else 100 + code), flush)
    session.control = SimpleNamespace(for_threads=SimpleNamespace(release=release))
    one, second = job(1), job(2)
    session.table.add(one, second)
    runner.run(one, lambda ctx: (give("lost", one), flushing.wait(10))[0], more_follow=True)
    runner.run(second, lambda ctx: (begun.set(), time.sleep(10)))


def trips_while_it_exits(trip_s: str, then: str) -> None:
    """``then``: the trip's code, or that it is called off."""
    runner_inline._EVIDENCE_S = 0.3

    def end_of_trip() -> None:
        if then != "off":
            os._exit(int(then))
        session.tripping = False

    def flush() -> None:
        session.tripping = True
        threading.Timer(float(trip_s), end_of_trip).start()

    exits_by(leave, flush)
    one = job()
    runner.run(one, lambda ctx: (give("lost", one), time.sleep(10)))


def loses_its_claim_without_threads() -> None:
    """The lease goes on being renewed."""
    start = threading.Thread.start

    def refuses(self: threading.Thread) -> None:
        if self.name == "gangq-exit":
            raise RuntimeError("can't start new thread")
        start(self)

    def handler(ctx: Any) -> None:
        session.table.each(lambda job: job.lose("the claim is gone"))
        for _ in range(40):
            session.table.each(lambda job: job.extend(boottime() + 30, 1.0))
            time.sleep(0.1)

    threading.Thread.start = refuses
    exits_by(leave)
    one = job()
    session.table.add(one)
    runner.run(one, handler)


def is_ordered_while_it_exits(order: str) -> None:
    """The exit itself hangs, so that the kernel's timer has to end it."""
    runner_inline._EVIDENCE_S = 0.3
    one = job()
    exits_by(lambda code: (give(order, one), time.sleep(10)))
    runner.run(one, lambda ctx: (give("lost", one), time.sleep(4)))
    os._exit(5)


def reports_long(handler: str) -> None:
    runner.run(job(), {"fails": fails, "told": told, "quick": quick}[handler], more_follow=handler != "quick")
    outlive()


def hands_back_the_second() -> None:
    runner.run(job(1), quick, more_follow=True)
    second = job(2)
    second.tell_stop("drain", 0.0)
    runner.run(second, hang, more_follow=True)


def runs_the_second_elsewhere(task: str) -> None:
    runner.run(job(1), quick, more_follow=True)
    dispatcher.run(job(2, task), runner, reporter.done)


def drains_in_the_first() -> None:
    def taking(most):
        return [job(1, "drained").claim, job(2, "quick").claim]
        yield

    claims = SimpleNamespace(
        taking=taking,
        listed=lambda: None,
        pace_s=0,
        begin_claim=lambda kept: None,
        abandon=lambda: None,
        wakes=ThreadWakes(),
        unsure=False,
    )
    session.main_client = SimpleNamespace(execute=lambda steps: in_steps(None, steps))
    waiting, drain = deque(), Drain(0.0)
    app.task(lambda ctx: (waiting.clear(), drain.request()), name="drained")
    MainThreadLoop(
        intake=Intake(session=session, drain=drain, sampler=SimpleNamespace(doubtful=frozenset)),
        claims=claims,
        reporter=reporter,
        dispatcher=dispatcher,
        inline=runner,
        signals=SimpleNamespace(renew=lambda: None),
        waiting=waiting,
    ).run()


def waits_for_its_gang() -> None:
    runner_inline.wait_for_go = lambda session, job, ports: outlive()
    runner.run(job(1), quick, more_follow=True)
    runner.run(ActiveJob(job(2).claim._replace(gang_id=1)), hang)


def logs_long() -> None:
    logging.getLogger("gangq.worker").setLevel(logging.DEBUG)
    logging.getLogger("gangq.worker").addFilter(lambda record: outlive())
    runner.run(job(1), quick, more_follow=True)
    session.kill_at = first + 30
    dispatcher.run(job(2, "quick"), runner, reporter.done)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""The dead man's switch stays on between the handlers of a batch: it must kill each of them that outlives the
lease, and nothing else. In processes of their own, with a lease of some tenths of a second and no database.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import ctypes, sys, time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from gangq.app import App
from gangq.client.sync import in_steps
from gangq.client.rows import Claim
from gangq.proc.clock import boottime
from gangq.watchdogs.deadman import Deadman
from gangq.worker.claims import ThreadWakes
from gangq.worker.dispatch import Dispatcher
from gangq.worker.drain import Drain
from gangq.worker.jobs import ActiveJob, JobTable
from gangq.worker.loops import Intake, MainThreadLoop
from gangq.worker.runner_inline import InlineRunner

class Slow:
    "Whatever is called on it lasts until long after the first lease."
    def __getattr__(self, _):
        return lambda *_, **more: more.get("more_follow") or outlive()

def job(number=1, task="t"):
    return ActiveJob(Claim(**dict.fromkeys(Claim._fields)
        | {"job_id": number, "token": number, "task": task, "payload": {}, "devices": []}))

def hang(ctx):
    print("hanging", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(30)

def outlive():
    while boottime() < first + 0.4:
        time.sleep(0.02)

def quick(ctx):
    pass

def fails(ctx):
    raise ValueError

def told(ctx):
    ctx._active.tell_stop("drain", 30.0)
    assert ctx.stopping

first = boottime() + 0.4
session = SimpleNamespace(name="w", kill_at=first, lapsing=lambda: False, directory=Path("/"), table=JobTable(),
    ended=Event(), wake=lambda: None, model=None)
switch = Deadman()
unwatched = SimpleNamespace(begin=lambda *_: None, end=lambda: None, job=lambda *_: None)
runner = InlineRunner(session, Slow(), None, switch, lambda *_: None, unwatched, unwatched, unwatched)
app = App("host=nowhere")
app.task(quick, name="quick")
app.task(hang, name="isolated", isolate=True)
dispatcher = Dispatcher(app, "tasks:app", 0, Slow(), Slow())
"""


def run(code: str) -> int:
    """Run it after the prelude and return the exit status; it ends with 0 if it lives to its end."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], stderr=subprocess.PIPE, text=True, timeout=20, check=False
    )
    assert "Error" not in done.stderr, done.stderr
    return done.returncode


def test_a_handler_after_others_of_its_batch_dies_with_the_lease_too() -> None:
    assert run("runner.run(job(1), quick, more_follow=True); runner.run(job(2), hang)") == 77


def test_a_handler_after_a_rest_dies_with_the_same_lease_too() -> None:
    code = "runner.run(job(1), quick, more_follow=True); runner.rest(); runner.run(job(2), hang)"
    assert run(code) == 77


def test_a_renewal_between_two_handlers_counts_for_the_second() -> None:
    code = (
        "runner.run(job(1), quick, more_follow=True); session.kill_at = first + 30\n"
        "runner.run(job(2), lambda ctx: outlive())"
    )
    assert run(code) == 0


def test_a_renewal_during_a_later_handler_counts_for_it() -> None:
    code = (
        "runner.run(job(1), quick, more_follow=True); second = job(2)\n"
        "runner.run(second, lambda ctx: (second.extend(first + 30, 1.0), outlive()))"
    )
    assert run(code) == 0


@pytest.mark.parametrize("handler", ["fails", "told", "quick"])
def test_telling_how_a_job_ended_may_outlast_the_lease(handler: str) -> None:
    follow = handler != "quick"
    assert run(f"runner.run(job(), {handler}, more_follow={follow}); outlive()") == 0


def test_a_job_that_may_not_start_any_more_may_be_handed_back_after_the_lease() -> None:
    code = (
        "runner.run(job(1), quick, more_follow=True); second = job(2); second.tell_stop('drain', 0.0)\n"
        "runner.run(second, hang, more_follow=True)"
    )
    assert run(code) == 0


@pytest.mark.parametrize("task", ["isolated", "unknown"])
def test_a_job_of_the_batch_that_does_not_run_here_may_outlast_the_lease(task: str) -> None:
    code = (
        f"runner.run(job(1), quick, more_follow=True)\ndispatcher.run(job(2, {task!r}), runner, Slow().done)"
    )
    assert run(code) == 0


def test_a_drain_that_takes_the_rest_of_the_batch_leaves_no_switch_on() -> None:
    code = (
        "from collections import deque\n"
        "def taking(most):\n"
        "    return [job(1, 'drained').claim, job(2, 'quick').claim]\n"
        "    yield\n"
        "claims = SimpleNamespace(taking=taking, settled=lambda: None, pace_s=0, paced=lambda kept: None,\n"
        "    wakes=ThreadWakes(), unsure=False)\n"
        "session.main_client = SimpleNamespace(execute=lambda steps: in_steps(None, steps))\n"
        "waiting, drain = deque(), Drain(0.0)\n"
        "app.task(lambda ctx: (waiting.clear(), drain.request()), name='drained')\n"
        "intake = Intake(session, drain, SimpleNamespace(doubtful=frozenset))\n"
        "signals = SimpleNamespace(renew=lambda: None)\n"
        "MainThreadLoop(intake, claims, Slow(), dispatcher, runner, signals, waiting).run()\n"
    )
    assert run(code) == 0


def test_waiting_for_the_rest_of_a_gang_may_outlast_the_lease() -> None:
    code = (
        "from gangq.worker import runner_inline\n"
        "runner_inline.wait_for_go = lambda session, job, ports: outlive()\n"
        "runner.run(job(1), quick, more_follow=True)\n"
        "runner.run(ActiveJob(job(2).claim._replace(gang_id=1)), hang)"
    )
    assert run(code) == 0


def test_a_log_that_nobody_reads_may_outlast_the_lease() -> None:
    code = (
        "import logging\n"
        "logging.getLogger('gangq.worker').setLevel(logging.DEBUG)\n"
        "logging.getLogger('gangq.worker').addFilter(lambda record: outlive())\n"
        "runner.run(job(1), quick, more_follow=True); session.kill_at = first + 30\n"
        "dispatcher.run(job(2, 'quick'), runner, Slow().done)"
    )
    assert run(code) == 0

"""Many clients that submit one job per transaction, with NOTIFY and without.

A transaction that notifies takes a lock of the whole cluster until it is committed. "Without" is the same schema in a
database of its own, its functions rebuilt with a function that does nothing in the place of pg_notify. The two
take turns; outside of its turn a database's worker is stopped, so that it works for nobody's numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable

import measures
import psycopg
from claimer import submit
from machine import CpuMeter
from marks import Marks
from measures import Result, Sizes
from stage import Stage, scalar, wait_until
from systems import System

from gangq.client import Client

_PROCESSES = 2
_WARM_UP_S = 1.0
_BACKLOG_PER_S = 15_000
"""More than a worker takes beside all those clients."""

_UNHEARD = """
create function gangq.unheard(channel text, payload text) returns void language sql volatile as 'select';
do $$
declare
  f record;
begin
  for f in
    select pg_get_functiondef(p.oid) as body from pg_proc p
    where p.pronamespace = 'gangq'::regnamespace and p.prosrc ~ 'pg_notify\\('
  loop
    execute replace(f.body, 'pg_notify(', 'gangq.unheard(');
  end loop;
end $$
"""


@dataclasses.dataclass
class _Arm:
    owner: psycopg.Connection
    worker: subprocess.Popen[bytes]
    marks: Marks
    go: mmap.mmap
    rates: list[float] = dataclasses.field(default_factory=list)

    def submitted(self) -> int:
        last = scalar(self.owner, "select last_value from gangq.job_ids")
        assert isinstance(last, int)
        return last

    def waiting(self) -> int:
        count = scalar(self.owner, "select count(*) from gangq.live_jobs where state = 'pending'")
        assert isinstance(count, int)
        return count

    def turn(self, seconds: float) -> float:
        """Jobs that its clients submit in a second."""
        self.go[0] = 1
        time.sleep(_WARM_UP_S)
        before, began = self.submitted(), time.monotonic()
        time.sleep(seconds)
        after, ended = self.submitted(), time.monotonic()
        self.go[0] = 0
        return (after - before) / (ended - began)


def _mute(owner: psycopg.Connection) -> None:
    for statement in _UNHEARD.split(";\n", 1):
        owner.execute(statement.encode())


def _arm(stage: Stage, system: System, sizes: Sizes, muted: bool, stack: contextlib.ExitStack) -> _Arm:
    marks = stage.marks()
    dsn = stack.enter_context(stage.database(system))
    owner = stack.enter_context(psycopg.connect(dsn, autocommit=True))
    if muted:
        _mute(owner)
    flag = marks.path.with_suffix(".go")
    flag.write_bytes(b"\0")
    with flag.open("r+b") as file:
        go = mmap.mmap(file.fileno(), 1)
    worker = stack.enter_context(stage.worker(system, dsn, marks, 100))
    # A stopped process does not hear SIGTERM.
    stack.callback(worker.send_signal, signal.SIGCONT)
    for _ in range(_PROCESSES):
        stack.enter_context(
            stage.process("burst_client.py", dsn, str(flag), str(sizes.flat.clients // _PROCESSES))
        )
    submit(owner, 1)
    wait_until(lambda: marks.count > 0, "the worker was there", worker)
    worker.send_signal(signal.SIGSTOP)
    return _Arm(owner, worker, marks, go)


def _turns(arms: list[_Arm], sizes: Sizes, prepare: Callable[[_Arm], None]) -> tuple[list[float], float]:
    """Rates of the first arm, and its share of the second's, turn by turn."""
    for arm in arms:
        arm.rates.clear()
    for number in range(sizes.flat.bursts):
        for arm in arms if number % 2 else reversed(arms):
            prepare(arm)
            arm.worker.send_signal(signal.SIGCONT)
            arm.rates.append(arm.turn(sizes.flat.burst_s))
            arm.worker.send_signal(signal.SIGSTOP)
    heard, unheard = arms
    return heard.rates, statistics.median(a / b for a, b in zip(heard.rates, unheard.rates, strict=True))


def _busy(arm: _Arm, sizes: Sizes) -> None:
    """So much to do that its worker cannot come to the end of it."""
    submit(arm.owner, max(0, int(_BACKLOG_PER_S * (sizes.flat.burst_s + _WARM_UP_S)) - arm.waiting()))
    arm.owner.execute("vacuum analyze gangq.live_jobs")


def _drained(arm: _Arm) -> None:
    arm.worker.send_signal(signal.SIGCONT)
    wait_until(lambda: not arm.waiting(), "the backlog was drained", arm.worker, poll_s=0.05)


def notify(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The rates with and without; then how soon an idle worker wakes with, and at the latest without."""
    results = []
    clients = sizes.flat.clients
    with contextlib.ExitStack() as stack:
        arms = [_arm(stage, system, sizes, muted, stack) for muted in (False, True)]
        meter = CpuMeter(stage.server)
        for queue, prepare in (
            ("a busy queue", lambda arm: _busy(arm, sizes)),
            ("a queue drained as it fills", _drained),
        ):
            rates, share = _turns(arms, sizes, prepare)
            target = " (0.80 or more)" if queue == "a busy queue" else ""
            notes = {"foreign_cores": round(meter.read().foreign_cores, 2)}
            results += [
                Result(
                    f"{clients} clients submit into {queue}", "jobs/s", statistics.median(rates), notes=notes
                ),
                Result(f"the same, share of the rate without NOTIFY{target}", "share", share),
            ]
    p50, p99 = measures.pickup(stage, system, sizes)
    results += [
        dataclasses.replace(p50, measure="an idle worker wakes within, p50"),
        dataclasses.replace(p99, measure="an idle worker wakes within, p99 (10 or less)"),
    ]
    late = _unheard(stage, system, sizes.flat.polls)
    results.append(
        Result("a worker that hears nothing starts a job within (1,000 or less)", "ms", max(late), False)
    )
    return results


def _unheard(stage: Stage, system: System, jobs: int) -> list[float]:
    """How many milliseconds an idle worker took to find each job of which nobody told it."""
    marks = stage.marks(jobs)
    late = []
    with (
        stage.database(system) as dsn,
        psycopg.connect(dsn, autocommit=True) as owner,
        Client(dsn, min_size=1, max_size=1) as client,
    ):
        _mute(owner)
        with stage.worker(system, dsn, marks, 1) as worker:
            client.submit(task="noop")
            wait_until(lambda: marks.count > 0, "the worker was there", worker)
            for number in range(jobs):
                time.sleep(random.uniform(1.0, 2.0))
                called = time.monotonic_ns()
                client.submit(task="noop", payloads=[{"n": number}])
                wait_until(lambda: marks.stamp_ns(number), f"job {number} started", worker)  # noqa: B023
                late.append((marks.stamp_ns(number) - called) / 1e6)
    return late

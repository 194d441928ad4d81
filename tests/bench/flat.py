"""Whether a claim costs the same whatever else there is: jobs that wait, are due later, are blocked, have ended.

Each state has a database of its own, with the same 10,000 jobs to claim in it. They take turns of a fraction of a
second in one closed loop of claims and completions, so a machine that drifts drifts for all of them; what a turn
took away is submitted again before the next.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import psycopg
from claimer import Claimer, submit
from machine import CpuMeter
from measures import Result, Sizes, percentile
from stage import Stage, wait_until
from systems import System

from gangq.client import Client

_TURN = {100: 3_000, 1: 150}
"""Jobs of a turn, by batch."""
_WARM_UP = 3

_HISTORY_DAY = """
create table gangq.history_short_{day} (like gangq.history_short including defaults including constraints);
insert into gangq.history_short_{day} (job_id, token, submitted_at, claimed_at, finished_at, incarnation, shape_id,
  priority, attempts, max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention, submitter,
  payload)
select 1000000000 + {first} + n, {first} + n, at - interval '1 s', at - interval '0.5 s', at, 1, 1,
  0, 1, 3, 0, 3, 0, 3, 0, 'done', 'short', 'me', '{{}}'
from generate_series(1, {jobs}) n
cross join lateral (select timestamptz '{day} 00:00Z' + n * interval '86399 s' / {jobs}) as t(at);
alter table gangq.history_short attach partition gangq.history_short_{day}
  for values from ('{day} 00:00Z') to (timestamptz '{day} 00:00Z' + interval '1 day')
"""
_DAYS = 5


@contextlib.contextmanager
def _filled(
    stage: Stage, system: System, few: int, *fill: Callable[[psycopg.Connection], None]
) -> Iterator[str]:
    """A database with so many jobs to claim and whatever else; vacuumed, as autovacuum would have by then."""
    with stage.database(system) as dsn:
        with psycopg.connect(dsn, autocommit=True) as owner:
            for step in fill:
                step(owner)
            submit(owner, few)
            owner.execute("vacuum analyze")
        yield dsn


def _history(jobs: int) -> Callable[[psycopg.Connection], None]:
    """Jobs that have ended, in partitions of the days before today as the tick makes them."""

    def fill(owner: psycopg.Connection) -> None:
        for ago in range(_DAYS, 0, -1):
            row = owner.execute(
                "select to_char(clock_timestamp() at time zone 'UTC' - make_interval(days => %s), 'YYYYMMDD')",
                (ago,),
            ).fetchone()
            assert row is not None
            each = jobs // _DAYS
            for statement in _HISTORY_DAY.format(day=row[0], first=ago * each, jobs=each).split(";\n"):
                owner.execute(statement.encode())

    return fill


def _scheduled(jobs: int) -> Callable[[psycopg.Connection], None]:
    """Jobs that are due tomorrow."""

    def fill(owner: psycopg.Connection) -> None:
        owner.execute(
            "select count(*) from gangq.submit('noop', payloads => array_fill('{}'::jsonb, array[%s]), "
            "due_at => clock_timestamp() + interval '1 day', options => '{\"wake\": \"never\"}')",
            (jobs,),
        )

    return fill


def _blocked(members: int) -> Callable[[psycopg.Connection], None]:
    """Gangs of 100 that nothing here can hold."""

    def fill(owner: psycopg.Connection) -> None:
        owner.execute(
            "select count(*) from (select gangq.submit_gang('noop', 100, gpus => 8, "
            "options => '{\"wait_for_hardware\": true}') from generate_series(1, %s)) g",
            (members // 100,),
        )

    return fill


def _compare(
    stage: Stage,
    system: System,
    sizes: Sizes,
    states: dict[str, tuple[Callable[[psycopg.Connection], None], ...]],
) -> tuple[dict[tuple[str, int], list[float]], dict[str, int], float]:
    """Rates by state and batch, in turns; buffers of a claim by state; cores that others kept busy."""
    rates: dict[tuple[str, int], list[float]] = {}
    with contextlib.ExitStack() as stack:
        claimers: dict[str, tuple[Claimer, psycopg.Connection]] = {}
        for state, fill in states.items():
            dsn = stack.enter_context(_filled(stage, system, sizes.flat.few, *fill))
            claimer = Claimer(dsn)
            stack.callback(claimer.close)
            owner = stack.enter_context(psycopg.connect(dsn, autocommit=True))
            claimers[state] = (claimer, owner)
        meter = CpuMeter(stage.server)
        for turn in range(_WARM_UP + sizes.flat.turns):
            order = list(claimers)
            shift = turn % len(order)
            for state in order[shift:] + order[:shift]:
                claimer, owner = claimers[state]
                for batch, jobs in _TURN.items():
                    rate = claimer.rate(jobs, batch)
                    if turn >= _WARM_UP:
                        rates.setdefault((state, batch), []).append(rate)
                claimer.idle()
                submit(owner, sum(_TURN.values()) + sum(_TURN))
        foreign = meter.read().foreign_cores
        buffers = {state: claimer.buffers() for state, (claimer, _) in claimers.items()}
    return rates, buffers, foreign


def _shares(
    rates: dict[tuple[str, int], list[float]], buffers: dict[str, int], foreign: float, target: str
) -> list[Result]:
    """The rate of the first state, and each other's share of it, turn by turn."""
    results = []
    base, *others = buffers
    for batch in _TURN:
        here = rates[base, batch]
        notes = {"foreign_cores": round(foreign, 2), "buffers": buffers[base]}
        results.append(
            Result(f"claims, batch {batch}: {base}", "jobs/s", statistics.median(here), notes=notes)
        )
        for state in others:
            there = rates[state, batch]
            share = statistics.median(b / a for a, b in zip(here, there, strict=True))
            notes = {"jobs_per_s": round(statistics.median(there)), "buffers": buffers[state]}
            results.append(Result(f"claims, batch {batch}: {state} ({target})", "share", share, notes=notes))
    for state in (base, *others):
        results.append(Result(f"a claim of one: {state}", "buffers", buffers[state], False))
    return results


def depth(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """A long backlog, and a long history."""
    few, waiting, finished = sizes.flat.few, sizes.flat.waiting, sizes.flat.finished
    states: dict[str, tuple[Callable[[psycopg.Connection], None], ...]] = {
        f"{few:,} wait": (),
        f"{waiting:,} wait": (lambda owner: submit(owner, waiting - few),),
        f"{few:,} wait, {finished:,} have ended": (_history(finished),),
    }
    return _shares(*_compare(stage, system, sizes, states), "0.90 or more")


def asleep(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Jobs that are due later, members that are blocked; and how late a due one starts beside them."""
    many = sizes.flat.asleep
    states: dict[str, tuple[Callable[[psycopg.Connection], None], ...]] = {
        f"{sizes.flat.few:,} wait": (),
        f"beside {many:,} scheduled and {many:,} blocked": (_scheduled(many), _blocked(many)),
    }
    results = _shares(*_compare(stage, system, sizes, states), "0.90 or more")
    late = _lateness(stage, system, sizes.flat.due, (_scheduled(many),))
    worst = {"max_ms": round(max(late), 1)}
    results += [
        Result("a due job starts late by, p50", "ms", statistics.median(late), False, worst),
        Result("a due job starts late by, p99 (50 or less)", "ms", percentile(late, 0.99), False, worst),
    ]
    return results


def _lateness(
    stage: Stage, system: System, jobs: int, fill: tuple[Callable[[psycopg.Connection], None], ...]
) -> list[float]:
    """How many milliseconds after its time each job's handler started, on an idle worker."""
    marks = stage.marks(jobs)
    with (
        _filled(stage, system, 1, *fill) as dsn,
        Client(dsn, min_size=1, max_size=1) as client,
        psycopg.connect(dsn, autocommit=True) as owner,
        stage.worker(system, dsn, marks, 1) as worker,
    ):
        wait_until(lambda: marks.count > 0, "the worker was there", worker)
        called = time.monotonic_ns()
        row = owner.execute("select clock_timestamp()").fetchone()
        assert row is not None
        zero, zero_ns = row[0], (called + time.monotonic_ns()) // 2
        due = [3.0 + 0.25 * number + random.uniform(0, 0.2) for number in range(jobs)]
        for number, after_s in enumerate(due):
            client.submit(task="noop", payloads=[{"n": number}], due_at=zero + timedelta(seconds=after_s))
        wait_until(lambda: marks.count > jobs, "every due job started", worker)
    return [(marks.stamp_ns(number) - zero_ns) / 1e6 - after_s * 1e3 for number, after_s in enumerate(due)]

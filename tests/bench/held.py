"""Claims while a transaction elsewhere stays open: nothing that dies meanwhile can be cleaned away.

Jobs come in at a steady pace and are claimed and finished as they come. Three databases take turns of a few
seconds: gangq left alone, gangq with an idle REPEATABLE READ transaction that was begun before the first job, and the
textbook claim (an index in order, `for update skip locked limit`, finished rows deleted) with the same transaction.
A transaction holds back its own database only.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Protocol

import psycopg
from claimer import Claimer
from machine import CpuMeter
from measures import Result, Sizes
from stage import Stage, scalar
from systems import System

from gangq.client import Client

_PACE = 4_000
_BATCH = 100
_TICK_S = 1.0

_TEXTBOOK = """
create schema textbook;
create table textbook.jobs (
  id bigint generated always as identity primary key,
  priority smallint not null default 0,
  state text not null default 'pending',
  payload jsonb not null default '{}'
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
  autovacuum_vacuum_cost_delay = 0);
create index on textbook.jobs (priority desc, id) where state = 'pending';
"""
_TEXTBOOK_CLAIM = """
update textbook.jobs set state = 'running'
where id = any (array(
  select id from textbook.jobs where state = 'pending'
  order by priority desc, id limit %s for update skip locked))
returning id
"""


class _Queue(Protocol):
    def submit(self, jobs: int) -> None: ...

    def turn(self) -> int:
        """Finish what was claimed, claim a batch; how many were claimed."""

    def tick(self) -> None:
        """What else goes on in it every second."""

    def close(self) -> None: ...


class _Gangq:
    def __init__(self, dsn: str) -> None:
        self._claimer = Claimer(dsn)
        self._client = Client(dsn, min_size=1, max_size=1)

    def submit(self, jobs: int) -> None:
        self._client.submit(task="noop", payloads=[{}] * jobs)

    def turn(self) -> int:
        return self._claimer.turn(_BATCH)

    def tick(self) -> None:
        self._client.tick()
        self._claimer.beat()

    def close(self) -> None:
        self._claimer.close()
        self._client.close()


class _Textbook:
    def __init__(self, dsn: str) -> None:
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute(_TEXTBOOK)
        self._held: list[int] = []

    def submit(self, jobs: int) -> None:
        self._connection.execute(
            "insert into textbook.jobs (payload) select '{}' from generate_series(1, %s)", (jobs,)
        )

    def turn(self) -> int:
        if self._held:
            self._connection.execute("delete from textbook.jobs where id = any (%s)", (self._held,))
        self._held = [job_id for (job_id,) in self._connection.execute(_TEXTBOOK_CLAIM, (_BATCH,))]
        return len(self._held)

    def tick(self) -> None: ...

    def close(self) -> None:
        self._connection.close()


@dataclass
class _Arm:
    queue: _Queue
    submitted: int = 0
    claimed: int = 0
    ran_s: float = 0.0
    rates: list[float] = field(default_factory=list)

    @property
    def backlog(self) -> int:
        return self.submitted - self.claimed

    def window(self, seconds: float) -> None:
        """Jobs come at their pace for so long; notes how many were claimed per second spent on claiming."""
        began, spent, claimed, ticked = time.monotonic(), 0.0, 0, 0.0
        while (passed := time.monotonic() - began) < seconds:
            if passed - ticked > _TICK_S:
                self.queue.tick()
                ticked = passed
            while self.submitted < _PACE * (self.ran_s + passed):
                self.queue.submit(_BATCH)
                self.submitted += _BATCH
            if not self.backlog:
                time.sleep(0.002)
                continue
            called = time.monotonic()
            took = self.queue.turn()
            spent += time.monotonic() - called
            claimed += took
            self.claimed += took
        self.ran_s += time.monotonic() - began
        self.rates.append(claimed / spent)


def _hold(dsn: str, stack: contextlib.ExitStack) -> None:
    other = stack.enter_context(psycopg.connect(dsn))
    other.execute("set transaction isolation level repeatable read")
    scalar(other, "select count(*) from pg_class")


def horizon(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The rate of claims with and without the transaction, window by window, and what was left waiting."""
    with contextlib.ExitStack() as stack:
        arms: dict[str, _Arm] = {}
        for name, kind, holds in (
            ("left alone", _Gangq, False),
            ("held", _Gangq, True),
            ("the textbook claim, held", _Textbook, True),
        ):
            dsn = stack.enter_context(stage.database(system))
            arms[name] = _Arm(kind(dsn))
            stack.callback(arms[name].queue.close)
            if holds:
                _hold(dsn, stack)
        meter = CpuMeter(stage.server)
        windows = max(2, round(sizes.flat.held_s / sizes.flat.window_s))
        for number in range(windows):
            order = list(arms.values())
            shift = number % len(order)
            for arm in order[shift:] + order[:shift]:
                arm.window(sizes.flat.window_s)
        foreign = round(meter.read().foreign_cores, 2)
    results = []
    for name, arm in arms.items():
        notes = {f"window_{n}": round(rate) for n, rate in enumerate(arm.rates)}
        median = statistics.median(arm.rates)
        results.append(
            Result(
                f"claims at {_PACE:,}/s, {name}", "jobs/s", median, notes={**notes, "foreign_cores": foreign}
            )
        )
    alone, held, textbook = arms.values()
    # The horizon lies further back in every window: what counts is how it ends.
    last = windows // 2
    share = statistics.median(b / a for a, b in zip(alone.rates[-last:], held.rates[-last:], strict=True))
    results += [
        Result(f"claims, held after {sizes.flat.held_s:g} s (0.80 or more)", "share", share),
        Result(
            "the textbook claim, last window to its first", "share", textbook.rates[-1] / textbook.rates[0]
        ),
    ]
    for name, arm in arms.items():
        results.append(
            Result(f"left waiting after {sizes.flat.held_s:g} s, {name}", "jobs", arm.backlog, False)
        )
    return results

"""How fast a pass is where it is hard: thousands of hosts, thousands of gangs, a full fleet, one gang.

Fleets and backlogs are made by `pass_times.sql`. A pass is the board, the decision and what is carried out of it, in
autocommit with fsync on, on a connection that has done so before, as a worker's has. What gangs must be placed on is
copied anew for every pass.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import boards
import psutil
import psycopg
from measures import Result, Sizes, latency, percentile
from stage import BenchError, Stage
from systems import System

from gangq.client import Client
from gangq.client.sync import in_steps, run
from gangq.decider.passes import run_pass
from gangq.placement import decide

_SQL = Path(__file__).with_name("pass_times.sql")
_SLOTS = 8
_MEMBERS = 3
_KINDS = 20
_WARM_UP = 5
_PATIENCE_S = 10.0


@contextlib.contextmanager
def _filled(stage: Stage, system: System, *fill: str) -> Iterator[str]:
    """The name of a database that holds all that, with nobody connected; to be copied or connected to."""
    with stage.database(system) as dsn:
        with psycopg.connect(dsn, autocommit=True) as owner:
            owner.execute(_SQL.read_bytes())
            for statement in fill:
                owner.execute(f"select {statement}".encode())
            owner.execute("vacuum analyze")
            name = owner.info.dbname
        yield name


@contextlib.contextmanager
def _copied(stage: Stage, template: str) -> Iterator[psycopg.Connection]:
    name = f"{template}_copy"
    dsn = stage.server.create_database(name, template=template)
    try:
        with psycopg.connect(dsn, autocommit=True) as owner:
            yield owner
    finally:
        stage.server.drop_database(name)


def _pass(owner: psycopg.Connection) -> tuple[int, float]:
    """How many gangs one pass placed, and its milliseconds."""
    began = time.monotonic_ns()
    passed = in_steps(lambda query: run(owner, query), run_pass())
    return passed.placed, (time.monotonic_ns() - began) / 1e6


def _place_all(owner: psycopg.Connection, gangs: int) -> tuple[int, float]:
    """How many passes placed all of them, and their milliseconds together."""
    number, left, took = 0, gangs, 0.0
    while left:
        placed, ms = _pass(owner)
        if not placed:
            raise BenchError(f"{left} of {gangs} gangs were not placed")
        number, left, took = number + 1, left - placed, took + ms
    return number, took


def _pass_over(
    stage: Stage, system: System, sizes: Sizes, gangs: int, gpus: int
) -> tuple[float, dict[str, float]]:
    """Milliseconds a gang when all of them are placed on an idle fleet, and the rest."""
    fill = (
        f"bench.fleet({sizes.hosts}, {_SLOTS}, {_SLOTS * gpus})",
        f"bench.waiting({gangs}, {_MEMBERS}, {gpus}, 1)",
    )
    taken = []
    with _filled(stage, system, *fill) as template:
        for _ in range(sizes.passes):
            with _copied(stage, template) as owner:
                with owner.transaction(force_rollback=True):
                    _pass(owner)
                taken.append(_place_all(owner, gangs))
    took = statistics.median(ms for _, ms in taken)
    return took / gangs, {"ms": round(took, 1), "passes": taken[0][0]}


def passes(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Milliseconds a gang of one pass over a large idle fleet, without devices and with."""
    results = []
    for gangs in sizes.pass_gangs:
        title = f"placing {gangs:,} gangs of {_MEMBERS}, {sizes.hosts:,} hosts"
        results.append(Result(title, "ms/gang", *_lower(_pass_over(stage, system, sizes, gangs, 0))))
    gangs = sizes.pass_gangs[0]
    title = f"the same, {gangs:,} gangs whose members need a GPU"
    return [*results, Result(title, "ms/gang", *_lower(_pass_over(stage, system, sizes, gangs, 1)))]


def _lower(measured: tuple[float, dict[str, float]]) -> tuple[float, bool, dict[str, float]]:
    """The rest of a result of which less is better."""
    return measured[0], False, measured[1]


def alone(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """A pass that finds one gang, on the same fleet."""
    took = []
    with (
        _filled(stage, system, f"bench.fleet({sizes.hosts}, {_SLOTS}, 0)") as name,
        psycopg.connect(stage.server.dsn(name), autocommit=True) as owner,
    ):
        for number in range(_WARM_UP + sizes.alone):
            row = owner.execute(
                "select gang_id from gangq.submit_gang(task => 'train', size => %s)", (_MEMBERS,)
            ).fetchone()
            assert row is not None
            placed, ms = _pass(owner)
            if placed != 1:
                raise BenchError("the gang was not placed")
            owner.execute("select gangq.cancel(gang_ids => %s::bigint[])", ([row[0]],))
            if number >= _WARM_UP:
                took.append(ms)
    notes = {"p99_ms": round(percentile(took, 0.99), 2)}
    return [
        Result(
            f"a pass, {sizes.hosts:,} hosts, one gang of {_MEMBERS}",
            "ms",
            statistics.median(took),
            False,
            notes,
        )
    ]


def _backlogs(sizes: Sizes) -> dict[str, tuple[str, ...]]:
    """What of a pass that can place nothing is hard, and how such a database is made."""
    few, many = min(300, sizes.hosts), sizes.hosts

    def taken(hosts: int, gangs: int, kinds: int, *more: str, priority: int = 0) -> tuple[str, ...]:
        waiting = f"bench.waiting({gangs}, {_MEMBERS}, 0, {kinds}, {priority})"
        return f"bench.fleet({hosts}, {_SLOTS}, 0)", "bench.occupied()", waiting, *more

    some, kinds = min(20_000, sizes.backlog), min(3_000, sizes.backlog // 10)
    return {
        f"{few} hosts, all taken, {some:,} gangs of 300 kinds (60 or less)": taken(few, some, 300),
        f"the same of {kinds:,} kinds (300 or less)": taken(few, some, kinds),
        "the same of 300 kinds that displace (300 or less)": taken(few, some, 300, priority=7),
        "the same of 1,000 kinds, no worker heard (300 or less)": taken(few, some, 1000, "bench.silent()"),
        f"{few} hosts, all taken, {sizes.backlog:,} gangs": taken(few, sizes.backlog, _KINDS),
        f"{many:,} hosts, all taken, {sizes.backlog:,} gangs": taken(many, sizes.backlog, _KINDS),
    }


def backlog(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """A pass that can place nothing, its board and what is carried out of it included: CPU time of both sides."""
    results = []
    for title, fill in _backlogs(sizes).items():
        with (
            _filled(stage, system, *fill) as name,
            psycopg.connect(stage.server.dsn(name), autocommit=True) as owner,
        ):
            backend = psutil.Process(owner.info.backend_pid)
            took, client, server = [], 0.0, 0.0
            for number in range(_WARM_UP + sizes.alone):
                if number == _WARM_UP:
                    client, server = time.process_time(), sum(backend.cpu_times()[:2])
                # What is told to stop here still runs for the next one.
                with owner.transaction(force_rollback=True):
                    placed, ms = _pass(owner)
                if placed:
                    raise BenchError(f"{placed} gangs were placed on a full fleet")
                took.append(ms)
            client, server = time.process_time() - client, sum(backend.cpu_times()[:2]) - server
        notes = {
            "client_ms": round(1000 * client / sizes.alone, 1),
            "server_ms": round(1000 * server / sizes.alone, 1),
            "wall_ms": round(statistics.median(took[_WARM_UP:]), 1),
            "wall_p99_ms": round(percentile(took[_WARM_UP:], 0.99), 1),
        }
        cpu = 1000 * (client + server) / sizes.alone
        results.append(Result(f"CPU of a pass, {title}", "ms", cpu, False, notes))
    return results


def deciding(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The decision alone, without a database: CPU time."""
    few, many = min(300, sizes.hosts), sizes.hosts
    cases = {
        f"{few:,} hosts, all taken, 300 kinds": boards.full(few, 300),
        f"{few:,} hosts, all taken, 3,000 kinds": boards.full(few, 3000),
        f"{few:,} hosts, displacing": boards.full(few, 300, priorities=7),
        f"{few:,} hosts, none heard, 1,000 kinds": boards.silent(few, 1000),
        f"{many:,} idle hosts, 1,000 gangs": boards.idle(many, 1000),
        f"{many:,} hosts, all taken": boards.full(many, 20),
    }
    results = []
    for title, board in cases.items():
        took = []
        for _ in range(sizes.passes + 1):
            began = time.process_time_ns()
            decide(board)
            took.append((time.process_time_ns() - began) / 1e6)
        results.append(Result(f"deciding, {title}", "ms", statistics.median(took[1:]), False))
    return results


class _Worker:
    """Hears that members wait for it, claims them, and says when."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self.incarnation = client.register_worker(
            name=f"w{number}", host=f"host{number // 2}", queues=["default"]
        ).incarnation
        self.claimed_ns = 0
        self.claim: tuple[int, int] | None = None
        self.has_claimed = threading.Event()
        self._ear = client.connect_listener()
        self._ear.execute(f'listen "gangq_{self.incarnation}"'.encode())
        self._closing = False
        self._thread = threading.Thread(target=self._live, name=f"bench-worker-{number}", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        beat = time.monotonic()
        while not self._closing:
            heard = [n for n in self._ear.notifies(timeout=0.5, stop_after=1) if n.payload == "claim"]
            if heard and (claims := self._client.claim(incarnation=self.incarnation)):
                self.claimed_ns = time.monotonic_ns()
                self.claim = (claims[0].job_id, claims[0].token)
                self.has_claimed.set()
            if time.monotonic() - beat > 4:
                beat = time.monotonic()
                self._client.heartbeat(incarnation=self.incarnation)

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._ear.close()


def claimed(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """From the call of submit_gang until the last of four workers that listen has claimed its member."""
    waits, from_call = [], []
    with (
        stage.database(system) as dsn,
        Client(dsn, min_size=5, max_size=8) as client,
        stage.process("ticker.py", dsn),
    ):
        workers = [_Worker(client, number) for number in range(4)]
        try:
            for number in range(_WARM_UP + sizes.gangs):
                time.sleep(0.5 if number < _WARM_UP else 0.02)
                for worker in workers:
                    worker.has_claimed.clear()
                called = time.monotonic_ns()
                client.submit_gang(task="noop", size=len(workers))
                returned = time.monotonic_ns()
                if not all(worker.has_claimed.wait(_PATIENCE_S) for worker in workers):
                    raise BenchError(f"a gang was not claimed within {_PATIENCE_S:g} s")
                last = max(worker.claimed_ns for worker in workers)
                claims = [worker.claim for worker in workers if worker.claim]
                client.complete(job_ids=[c[0] for c in claims], tokens=[c[1] for c in claims])
                if number >= _WARM_UP:
                    waits.append(max(0, last - returned) / 1e6)
                    from_call.append((last - called) / 1e6)
        finally:
            for worker in workers:
                worker.close()
    return latency(f"submitting a gang of {len(workers)} until all are claimed", waits, from_call)

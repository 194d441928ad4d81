"""What the hot paths cost in statements inside the server and in round trips to it: today's count is the limit.

Both are counted, not timed, so they hold on any machine. Round trips are the server's whole answers on a wire between
the two; statements are those that pg_stat_statements sees inside the functions, where the server has it.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from databases import OwnServer
from gangq.client import Client
from gangq.embedded import Binaries, Server, find_binaries
from process.wire import Wire, wire_to
from worker.worker_process import eventually, fleet_of

pytestmark = pytest.mark.slow

# One turn of each: round trips, and statements inside the server, just above what was last counted. A batch costs as
# many as one job does, because a job of it is a row and not a statement. What has to grow says so here.
LIMITS: dict[str, tuple[int, int]] = {
    # One keeps the answer for a repeated call. In one statement with the jobs it takes as long, and a call without a
    # request_id 7 % longer.
    "submit one job": (1, 5),
    "submit 1000 jobs in one call": (1, 5),
    "claim one job, complete it": (2, 13),
    # After 256 jobs the next claim begins further on: what was finished is not read again.
    "claim 100 jobs, complete them": (2, 15),
    "complete one job and claim the next": (1, 12),
    "complete 100 jobs and claim the next": (1, 14),
    "heartbeat of an idle worker": (1, 6),
    "heartbeat of a worker whose 100 jobs beat": (1, 8),
}
# Round trips for a job of a whole worker, by its prefetch, without what an idle one does in that time.
OF_A_WORKER = {1: 1.2, 100: 0.022}
# Of an idle worker, alone, in a minute: heartbeats, looks for work that no notification told of, ticks, and whether
# a line that was idle still leads anywhere.
# A tick asks in one statement which of its steps have something to do, and begins only these.
OF_AN_IDLE_MINUTE = (330, 3100)

TURNS = 20


class Counted(NamedTuple):
    """A client whose round trips are counted, and a connection beside it."""

    client: Client
    wire: Wire
    through: str
    """The DSN that leads through the wire."""
    beside: psycopg.Connection[Any]
    told: bool
    """Whether this server counts statements."""

    def statements(self) -> int:
        """Statements inside the server so far; always 0 where it cannot say."""
        if not self.told:
            return 0
        row = self.beside.execute(
            "select coalesce(sum(s.calls), 0)::integer from pg_stat_statements s "
            "join pg_database d on d.oid = s.dbid where d.datname = current_database() and not s.toplevel"
        ).fetchone()
        assert row is not None
        return int(row[0])


def _library(binaries: Binaries) -> Path | None:
    return next(binaries.bindir.parent.rglob("pg_stat_statements.so"), None)


@pytest.fixture(scope="module")
def counting(own_server: OwnServer) -> Iterator[Server]:
    """A server that counts statements, if there is any that can."""
    found = find_binaries()
    able = [binaries for binaries in found if _library(binaries)]
    settings = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "all"}
    with own_server((able or found)[0], settings=settings if able else {}) as running:
        yield running


@pytest.fixture
def counted(counting: Server, template: str) -> Iterator[Counted]:
    """A database with the schema."""
    name = f"counted_{uuid.uuid4().hex[:8]}"
    dsn = counting.create_database(name, template=template)
    with (
        tempfile.TemporaryDirectory(prefix="wire-") as short,
        psycopg.connect(dsn, autocommit=True) as beside,
    ):
        with wire_to(dsn, Path(short) / "d") as (wire, through):
            told = "shared_preload_libraries" in counting.settings
            if told:
                beside.execute("create extension pg_stat_statements")
            with Client(through, max_size=1) as client:
                yield Counted(client, wire, through, beside, told)
    counting.drop_database(name)


def _submit(size: int) -> Callable[[Client], Callable[[], None]]:
    def ready(client: Client) -> Callable[[], None]:
        def turn() -> None:
            client.submit(task="work", payloads=[{}] * size)

        return turn

    return ready


def _worker(client: Client, jobs: int) -> int:
    client.submit(task="work", payloads=[{}] * (TURNS * 2 * jobs))
    return client.register_worker(name="w", host="h", queues=["default"], prefetch=jobs).incarnation


def _claim(size: int) -> Callable[[Client], Callable[[], None]]:
    def ready(client: Client) -> Callable[[], None]:
        me = _worker(client, size)

        def turn() -> None:
            jobs = client.claim(incarnation=me, request_id=uuid.uuid4(), max_jobs=size)
            assert len(jobs) == size
            client.complete(job_ids=[j.job_id for j in jobs], tokens=[j.token for j in jobs])

        return turn

    return ready


def _along(size: int) -> Callable[[Client], Callable[[], None]]:
    def ready(client: Client) -> Callable[[], None]:
        me = _worker(client, size)
        held = list(client.claim(incarnation=me, request_id=uuid.uuid4(), max_jobs=size))

        def turn() -> None:
            assert len(held) == size
            held[:] = client.complete_and_claim(
                incarnation=me,
                job_ids=[j.job_id for j in held],
                tokens=[j.token for j in held],
                results=[None] * size,
                strict=False,
                request_id=uuid.uuid4(),
                max_jobs=size,
            ).claims

        return turn

    return ready


def _heartbeat(held: int) -> Callable[[Client], Callable[[], None]]:
    def ready(client: Client) -> Callable[[], None]:
        me = _worker(client, max(1, held))
        jobs = client.claim(incarnation=me, request_id=uuid.uuid4(), max_jobs=held) if held else []
        assert len(jobs) == held

        def turn() -> None:
            client.heartbeat(
                incarnation=me,
                job_ids=[j.job_id for j in jobs],
                tokens=[j.token for j in jobs],
                beats=[{"step": 1}] * held if held else None,
            )

        return turn

    return ready


HOT: dict[str, Callable[[Client], Callable[[], None]]] = {
    "submit one job": _submit(1),
    "submit 1000 jobs in one call": _submit(1000),
    "claim one job, complete it": _claim(1),
    "claim 100 jobs, complete them": _claim(100),
    "complete one job and claim the next": _along(1),
    "complete 100 jobs and claim the next": _along(100),
    "heartbeat of an idle worker": _heartbeat(0),
    "heartbeat of a worker whose 100 jobs beat": _heartbeat(100),
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_turn_of_a_hot_path_costs_no_more_than_it_did(counted: Counted, what: str) -> None:
    turn = HOT[what](counted.client)
    for _ in range(10):  # Statements are prepared, catalogs are cached.
        turn()
    asked, inside = counted.wire.round_trips, counted.statements()
    for _ in range(TURNS):
        turn()
    asked, inside = counted.wire.round_trips - asked, counted.statements() - inside
    round_trips, statements = LIMITS[what]
    assert TURNS <= asked <= round_trips * TURNS, f"{asked / TURNS:g} round trips"
    assert counted.told * TURNS <= inside <= statements * TURNS, f"{inside / TURNS:g} statements"


NOTHING = """
@app.task
def nothing(ctx):
    return None
"""


@pytest.mark.parametrize("prefetch", OF_A_WORKER)
def test_a_worker_asks_the_server_no_more_often_for_a_job_than_it_did(
    counted: Counted, tmp_path: Path, prefetch: int
) -> None:
    jobs = 200 if prefetch == 1 else 5000
    with Client(counted.beside.info.dsn) as direct, fleet_of(counted.through, tmp_path) as fleet:
        fleet.define(NOTHING)
        direct.submit(task="nothing")
        fleet.start("w1", prefetch=prefetch)
        eventually(lambda: direct.jobs(state="done", limit=1), "it is at work")
        began, before = time.monotonic(), counted.wire.round_trips
        direct.submit(task="nothing", payloads=[{}] * jobs)
        eventually(lambda: not direct.jobs(state=["pending", "running"], limit=1), "all are done", 60)
        beside = OF_AN_IDLE_MINUTE[0] * (time.monotonic() - began) / 60
        each = (counted.wire.round_trips - before - beside) / jobs
    assert 0 < each <= OF_A_WORKER[prefetch]


def test_an_idle_worker_asks_the_server_no_more_often_than_it_did(counted: Counted, tmp_path: Path) -> None:
    with fleet_of(counted.through, tmp_path) as fleet:
        fleet.define(NOTHING)
        worker = fleet.start("w1")
        eventually(
            lambda: counted.beside.execute("select from gangq.sleepers").fetchall(), "it has nothing to do"
        )
        began, asked, inside = time.monotonic(), counted.wire.round_trips, counted.statements()
        time.sleep(20)  # Of ten ticks one more or less would be a tenth of what is counted.
        asked, inside = counted.wire.round_trips - asked, counted.statements() - inside
        minutes = (time.monotonic() - began) / 60
        assert worker.process.poll() is None
    round_trips, statements = OF_AN_IDLE_MINUTE
    assert 0 < asked / minutes <= round_trips
    assert 0 < inside / minutes <= statements

"""The answer to a submission is lost: it is sent again, and nothing is submitted twice."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from gangq import App, DatabaseUnreachable
from gangq.client import AsyncClient, Client
from process.floor import PATIENCE_S, TASKS, Floor
from process.wire import Wire, wire_to
from worker.worker_process import eventually

Db = psycopg.Connection[dict[str, Any]]


class Line(NamedTuple):
    """A database and a wire to it."""

    wire: Wire
    dsn: str
    db: Db

    @property
    def jobs(self) -> list[int]:
        """All that were ever submitted."""
        return [row["id"] for row in self.db.execute("select id from gangq.jobs order by id").fetchall()]


@pytest.fixture
def line(dsn: str, db: Db) -> Iterator[Line]:
    with (
        tempfile.TemporaryDirectory(prefix="wire-") as short,
        wire_to(dsn, Path(short) / "d") as (wire, through),
    ):
        yield Line(wire, through, db)


def client_of(line: Line, **options: Any) -> Client:
    # The wire reads the text of the calls, which prepared statements would not repeat.
    return Client(line.dsn, prepare=False, **options)


@pytest.mark.parametrize("size", [1, 4], ids=["one connection", "a pool"])
def test_jobs_whose_answer_was_lost_are_submitted_once_and_their_ids_returned(line: Line, size: int) -> None:
    with client_of(line, max_size=size) as client:
        line.wire.lose(b"gangq.submit(")
        ids = client.submit(task="t", payloads=[{"n": 1}, {"n": 2}])
        assert len(line.wire.lost) == 1
        assert line.jobs == ids
        assert len(client.submit(task="t")) == 1
        assert len(line.jobs) == 3


def test_a_gang_whose_answer_was_lost_is_submitted_once(line: Line) -> None:
    with client_of(line) as client:
        line.wire.lose(b"gangq.submit_gang(")
        made = client.submit_gang(task="t", size=3)
    assert len(line.wire.lost) == 1
    assert line.jobs == made.job_ids
    assert line.db.execute("select id from gangq.gangs").fetchall() == [{"id": made.gang_id}]


def test_the_client_of_asyncio_repeats_a_submission_too(line: Line) -> None:
    async def both() -> tuple[list[int], list[int]]:
        async with AsyncClient(line.dsn, prepare=False) as client:
            line.wire.lose(b"gangq.submit(")
            ids = await client.submit(task="t")
            line.wire.lose(b"gangq.submit_gang(")
            return ids, (await client.submit_gang(task="t", size=2)).job_ids

    ids, members = asyncio.run(both())
    assert len(line.wire.lost) == 2
    assert line.jobs == ids + members


def test_what_an_app_submits_is_repeated_too(line: Line) -> None:
    with App(client=client_of(line)) as app:
        task = app.declare_task("t")
        line.wire.lose(b"gangq.submit(")
        handles = task.submit_many([{"n": n} for n in range(3)])
        line.wire.lose(b"gangq.submit_gang(")
        gang = task.gang(2).submit()
    assert len(line.wire.lost) == 2
    assert line.jobs == [handle.id for handle in handles] + gang.job_ids


def waiting(db: Db) -> list[str]:
    """For what the sessions that wait for a lock do."""
    rows = db.execute(
        "select wait_event from pg_stat_activity where wait_event_type = 'Lock' "
        "and datname = current_database() order by 1"
    )
    return [row["wait_event"] for row in rows.fetchall()]


@contextmanager
def held_up(line: Line, call: Callable[[], list[int]]) -> Iterator[Future[list[int]]]:
    """A call whose transaction has drawn its ids and goes no further; within, that is so."""
    with ThreadPoolExecutor(1) as pool, psycopg.connect(line.db.info.dsn) as other:
        other.execute("lock table gangq.live_jobs in share mode")
        calling = pool.submit(call)
        eventually(lambda: waiting(line.db) == ["relation"], "it waits for the table")
        yield calling
        other.rollback()


def test_a_call_cut_off_while_it_is_under_way_is_waited_for(line: Line) -> None:
    with client_of(line) as client:
        with held_up(line, lambda: client.submit(task="t")) as calling:
            line.wire.cut()
            eventually(
                lambda: waiting(line.db) == ["relation", "transactionid"], "its repetition waits for it"
            )
        assert calling.result(PATIENCE_S) == line.jobs
    assert len(line.jobs) == 1


def test_where_the_repetition_brings_no_answer_either_the_effect_is_unknown(line: Line) -> None:
    mine = uuid.uuid4()
    with client_of(line, max_size=1) as client:
        with held_up(line, lambda: client.submit(task="t", request_id=mine)) as calling:
            line.wire.cut(refuse=True)
            with pytest.raises(
                DatabaseUnreachable, match=r"during gangq\.submit; whether it took effect is unknown"
            ):
                calling.result(PATIENCE_S)
        line.wire.cut()
        eventually(lambda: line.jobs, "it took effect")
        assert client.submit(task="t", request_id=mine) == line.jobs
    assert len(line.jobs) == 1


def test_a_repetition_that_is_refused_says_nothing_of_the_first_call(line: Line) -> None:
    with client_of(line) as client:
        with held_up(line, lambda: client.submit(task="t")) as calling:
            line.wire.cut()
            # The first gives up its wait for the table, then the repetition does.
            with pytest.raises(DatabaseUnreachable, match="unknown") as caught:
                calling.result(PATIENCE_S)
            assert isinstance(caught.value.__cause__, psycopg.errors.LockNotAvailable)
    assert line.jobs == []


def test_a_call_in_the_callers_transaction_is_never_repeated(line: Line) -> None:
    with client_of(line) as client, psycopg.connect(line.dsn) as mine:
        line.wire.lose(b"gangq.submit(")
        with pytest.raises(DatabaseUnreachable):
            client.submit(task="t", connection=mine)
    assert len(line.wire.lost) == 1
    assert line.jobs == []
    assert line.db.execute("select from gangq.requests").fetchall() == []


FAN = """
leaf = App().declare_task("leaf", wait_for_hardware=True)

@app.task
def fan(ctx):
    return [leaf.submit().id, leaf.gang(2).submit().job_ids]
"""


def test_children_whose_answer_was_lost_on_the_way_to_their_worker_are_submitted_once(
    floor: Floor, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    monkeypatch.setenv("GANGQ_PREPARE", "off")
    floor.fleet.define(TASKS + FAN)
    floor.start("far", dsn=line.dsn)
    line.wire.lose(b"gangq.submit(")
    job = floor.inline("fan")
    (row,) = floor.until_done(job)
    line.wire.lose(b"gangq.submit_gang(")
    (again,) = floor.until_done(floor.inline("fan"))
    assert len(line.wire.lost) == 2
    leaves = line.db.execute("select id, parent from gangq.jobs where task = 'leaf' order by id").fetchall()
    assert [row["parent"] for row in leaves] == [job] * 3 + [again.id] * 3
    assert [row["id"] for row in leaves] == [row.result[0], *row.result[1], again.result[0], *again.result[1]]


def test_a_command_that_submits_is_repeated_by_its_worker(
    floor: Floor, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    monkeypatch.setenv("GANGQ_PREPARE", "off")
    floor.start("far", dsn=line.dsn)
    line.wire.lose(b"gangq.submit(")
    argv = [sys.executable, "-m", "gangq", "submit", "leaf", "--count", "2", "--wait-for-hardware"]
    job = floor.client.submit(task="command", payloads=[{"argv": argv}], wait_for_hardware=True)[0]
    floor.until_done(job)
    assert len(line.wire.lost) == 1
    leaves = line.db.execute("select parent from gangq.jobs where task = 'leaf'").fetchall()
    assert leaves == [{"parent": job}] * 2


def test_an_asyncio_program_that_closes_nothing_ends_although_the_server_fell_silent(line: Line) -> None:
    async def program() -> None:
        client = AsyncClient(line.dsn, timeout_s=2)
        assert await client.job_states(ids=[]) == {}
        line.wire.freeze(new_ones_too=True)
        with pytest.raises(DatabaseUnreachable, match="no answer came in 2 s"):
            await client.job_states(ids=[])
        await asyncio.sleep(0.1)  # A pool that replaced the connection by itself would be at it now.

    runs = threading.Thread(target=lambda: asyncio.run(program()), daemon=True)
    runs.start()
    runs.join(30)
    assert not runs.is_alive()

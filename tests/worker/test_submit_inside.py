"""Submitting from inside a job: through its worker, into the worker's database."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from gangq.client import Client
from worker.worker_process import Fleet, eventually, fleet_of, short_leases, until_state

TASKS = """
import asyncio
here = App()
leaf = here.declare_task("leaf")

@app.task(name="leaf")
def leaf_(ctx, n): return n * n

@app.task
def fan(ctx, many):
    return [handle.id for handle in leaf.submit_many([{"n": n} for n in range(many)])]

@app.task
def waits(ctx):
    asyncio.run(leaf.aio.options(priority=5).submit(n=3))
    gang = leaf.gang(1).submit(n=1)
    return [gang.id, gang.job_ids]

@app.task
def once(ctx, key):
    prepare = leaf.options(unique=key, delay="1h")
    found = [prepare.submit(n=1), prepare.submit(n=2), prepare.options(replace=True, priority=3).submit(n=3)]
    gangs = [leaf.options(unique=key + " gang").gang(1).submit(n=1) for _ in range(2)]
    return [[one.id, one.existed, getattr(one, "replaced", None)] for one in found + gangs]

@app.task
def refused(ctx):
    said = []
    for call in (
        lambda: leaf.options(queue="nowhere").submit(n=1),
        lambda: here.job(1).result(),
        lambda: ctx.submit_child("submit", {"task": "leaf", "nonsense": 1}),
        lambda: ctx.submit_child("submit", {"task": "leaf", "job_id": 1}),
        lambda: ctx.submit_child("submit_gang", {"task": "leaf", "size": 1, "options": "{"}),
        lambda: ctx.submit_child("submit_gang", {"task": "leaf", "size": 1, "options": "[]"}),
        lambda: ctx.submit_child("cancel", {}),
    ):
        try:
            call()
        except gangq.GangqError as problem:
            said.append([type(problem).__name__, str(problem)])
    return said
"""


@pytest.fixture(params=["inline", "isolated"])
def fleet(
    request: pytest.FixtureRequest, dsn: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    """One worker that runs handlers in its own process, or in a child each."""
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    monkeypatch.setenv("GANGQ_DATA_DIR", str(tmp_path / "private"))
    short_leases(client)
    with psycopg.connect(dsn) as conn:
        conn.execute("do $$ begin create role sue; exception when duplicate_object then null; end $$")
        conn.execute("grant gangq_submitter to sue")
    with fleet_of(dsn, tmp_path) as made:
        made.define(TASKS)
        made.start(light=1 if request.param == "inline" else 2)
        yield made


def submit_as_sue(dsn: str, task: str, payload: str = "{}") -> int:
    with psycopg.connect(dsn) as conn:
        conn.execute("set role sue")
        row = conn.execute(
            "select gangq.submit(task => %s, payloads => array[%s::jsonb])", (task, payload)
        ).fetchone()
        assert row is not None
        return int(row[0])


def test_a_handler_submits_to_the_database_of_its_worker(
    fleet: Fleet, client: Client, dsn: str, tmp_path: Path
) -> None:
    parent = submit_as_sue(dsn, "fan", '{"many": 3}')
    ids = until_state(client, parent, "done", "failed").result
    children = [until_state(client, id, "done") for id in ids]
    assert [(job.task, job.result, job.parent, job.submitter) for job in children] == [
        ("leaf", n * n, parent, "sue") for n in range(3)
    ]
    assert not (tmp_path / "private").exists()


def test_it_submits_with_await_and_gangs_too(fleet: Fleet, client: Client, dsn: str) -> None:
    parent = submit_as_sue(dsn, "waits")
    job = until_state(client, parent, "done", "failed")
    gang_id, job_ids = job.result
    assert client.gang(id=gang_id).submitter == "sue"
    assert [client.job(id=id).parent for id in job_ids] == [parent]
    (alone,) = [row for row in client.jobs(task="leaf") if row.gang_id is None]
    assert (alone.parent, alone.priority) == (parent, 5)


def test_a_key_is_told_in_a_job_as_outside(fleet: Fleet, client: Client, dsn: str) -> None:
    parent = submit_as_sue(dsn, "once", '{"key": "ds-7"}')
    first, again, replaced, *gangs = until_state(client, parent, "done", "failed").result
    assert [first[1:], again, replaced] == [[False, False], [first[0], True, False], [first[0], True, True]]
    child = client.job(id=first[0])
    assert (child.payload, child.priority, child.parent, child.submitter) == ({"n": 3}, 3, parent, "sue")
    assert gangs == [[gangs[0][0], False, None], [gangs[0][0], True, None]]


def test_what_is_refused_there_is_raised_in_the_job(fleet: Fleet, client: Client, dsn: str) -> None:
    said = until_state(client, submit_as_sue(dsn, "refused"), "done", "failed").result
    assert [kind for kind, _ in said] == ["NotFound"] + ["InvalidInput"] * 6
    for words, (_, text) in zip(
        (
            "queue 'nowhere' does not exist",
            "a job has none of its own",
            "submit has no argument 'nonsense'",
            "submit has no argument 'job_id'",
            "the options of submit_gang are no JSON",
            "the options of submit_gang are one JSON object",
            "not with 'cancel'",
        ),
        said,
        strict=True,
    ):
        assert words in text


@pytest.mark.slow
def test_a_command_submits_over_its_socket(
    dsn: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    monkeypatch.setenv("GANGQ_DATA_DIR", str(tmp_path / "private"))
    short_leases(client)
    gangq = f"{sys.executable} -m gangq"
    # No worker here knows these tasks.
    wait = "--wait-for-hardware"
    script = (
        f"{gangq} submit leaf n=4 --due 10m {wait} && {gangq} run --detach -- true && "
        f"{gangq} submit ddp --gang 1 {wait}; {gangq} ls; echo ls $?; "
        f"{gangq} submit later --unique k --due 10m {wait} && {gangq} submit later n=1 --unique k --replace {wait}; "
        f"{gangq} run -- true; echo run $?"
    )
    payload = {"argv": ["/bin/sh", "-c", script], "shell": False, "env": {}, "cwd": None}
    with fleet_of(dsn, tmp_path) as fleet:
        fleet.start()
        (parent,) = client.submit(task="command", payloads=[payload])
        until_state(client, parent, "done", "failed")
        text = eventually(
            lambda: (
                (out := "".join(row.chunk for row in client.logs(job_id=parent))) and "run 2" in out and out
            ),
            "its output is kept",
        )
    said = [line for line in str(text).splitlines() if line.startswith("gangq: ")]
    lines = [line for line in str(text).splitlines() if not line.startswith("gangq: ")]
    leaf, command, gang = client.job(id=int(lines[0])), client.job(id=int(lines[1])), lines[2]
    assert (leaf.task, leaf.state, leaf.payload, leaf.parent) == ("leaf", "scheduled", {"n": 4}, parent)
    assert (command.task, command.parent) == ("command", parent)
    assert {job.parent for job in client.jobs(gang_id=int(gang.removeprefix("g")))} == {parent}
    at = lines.index("ls 2")
    once, again = lines[at + 1 : at + 3]
    assert once == again
    assert f"gangq: already there: job {once}, now with this payload" in said
    assert client.job(id=int(once)).payload == {"n": 1}
    assert not os.path.exists(tmp_path / "private")

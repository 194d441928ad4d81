"""Somebody's open transaction over one running job holds up what the worker says of that job, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from process.floor import Floor
from worker.worker_process import eventually, until_state

TASKS = """
@app.task
def waits(ctx, n):
    while not (HERE / f"go-{n}").exists():
        time.sleep(0.02)
    if n == "bad":
        raise ValueError("as it was told")
    return n
"""
WAITS = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"


@contextmanager
def held(floor: Floor, job_id: int) -> Iterator[psycopg.Connection[tuple[int]]]:
    """An open transaction that means to cancel the job, and is rolled back."""
    with psycopg.connect(floor.client.target.conninfo) as conn:
        conn.execute("select gangq.cancel(job_ids => %s)", ([job_id],))
        yield conn
        conn.rollback()


@pytest.fixture
def patient(floor: Floor) -> Floor:
    floor.configure(lease_s=30, grace_s=2)
    return floor


def go(floor: Floor, n: str) -> None:
    (floor.directory / f"go-{n}").touch()


def command(floor: Floor, n: str, then: str = "") -> int:
    path = str(floor.directory / f"go-{n}")
    payload = {"argv": [sys.executable, "-S", "-c", WAITS + then, path]}
    return floor.client.submit(task="command", payloads=[payload], max_attempts=1, wait_for_hardware=True)[0]


@pytest.mark.parametrize("then", ["", "sys.exit(3)"], ids=["done", "failed"])
def test_other_slots_report_and_claim_while_one_job_is_held(patient: Floor, then: str) -> None:
    floor = patient
    floor.start("w1", commands=True, light=2)
    one = command(floor, "one", then)
    other = command(floor, "other")
    for job in (one, other):
        until_state(floor.client, job, "running")
    follows = [command(floor, "other") for _ in range(3)]
    with held(floor, one):
        go(floor, "one")
        eventually(lambda: "report_held" in floor.fleet.started[0].log, "its report finds the job held")
        go(floor, "other")
        for job in (other, *follows):
            until_state(floor.client, job, "done")
        assert floor.client.job(id=one).state == "running"
    ended = until_state(floor.client, one, "failed" if then else "done")
    assert (ended.attempts, ended.crashes, ended.trips, ended.stops) == (1, 0, 0, 0)
    assert floor.client.violations() == []


@pytest.mark.parametrize("n", ["first", "bad"])
def test_of_a_prefetched_batch_the_others_are_reported_while_one_is_held(patient: Floor, n: str) -> None:
    floor = patient
    floor.fleet.define(TASKS)
    jobs = floor.client.submit(
        task="waits",
        payloads=[{"n": n}, {"n": "second"}, {"n": "third"}],
        max_attempts=1,
        wait_for_hardware=True,
    )
    floor.start("w1", prefetch=3)
    for job in jobs:
        until_state(floor.client, job, "running")
    with held(floor, jobs[0]):
        for name in (n, "second", "third"):
            go(floor, name)
        for job in jobs[1:]:
            until_state(floor.client, job, "done")
        assert floor.client.job(id=jobs[0]).state == "running"
    ended = until_state(floor.client, jobs[0], "failed" if n == "bad" else "done")
    assert ended.attempts == 1


def test_a_drain_waits_one_grace_for_a_held_report_and_says_what_it_leaves(patient: Floor) -> None:
    floor = patient
    worker = floor.start("w1", commands=True)
    job = command(floor, "one")
    until_state(floor.client, job, "running")
    with held(floor, job):
        go(floor, "one")
        eventually(lambda: "report_held" in worker.log, "its report finds the job held")
        worker.signal(15)
        assert worker.exit_code(30) == 0
        assert "ends_not_reported" in worker.log

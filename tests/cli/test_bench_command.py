"""gangq bench: numbers of a server, and nothing left on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

pytestmark = pytest.mark.slow

NUMBERS = {
    "a round trip, median": "ms",
    "a commit, median": "ms",
    "enqueue one by one": "jobs/s",
    "enqueue 100 in one call": "jobs/s",
    "drain, 100 at a time, one worker": "jobs/s",
    "pick-up by an idle worker, p50": "ms",
    "pick-up by an idle worker, p99": "ms",
    "drain, one at a time, one worker": "jobs/s",
}


def bench(dsn: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gangq", "bench", "--jobs", "100", "--json"],
        env={**os.environ, "GANGQ_DSN": dsn},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        return [
            n for (n,) in conn.execute("select datname from pg_database where datname like 'gangq_bench%'")
        ]


def test_it_measures_in_a_minute_and_leaves_nothing(dsn: str) -> None:
    with bench(dsn) as run:
        out, err = run.communicate(timeout=90)
    assert run.returncode == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["measure"]: row["unit"] for row in rows} == NUMBERS
    assert all(row["value"] > 0 for row in rows)
    assert left(dsn) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_stops_it_finds_no_database_of_it(dsn: str, number: int) -> None:
    with bench(dsn) as run:
        assert run.stderr is not None
        said = ""
        while "enqueueing" not in said:
            said = run.stderr.readline()
            assert said, "it ended before it began"
        assert len(left(dsn)) == 1
        run.send_signal(number)
        run.communicate(timeout=60)
    assert run.returncode not in (0, None)
    assert left(dsn) == []


def test_a_login_that_may_not_create_databases_is_told_what_would_help(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create role bench_guest login")
        try:
            with bench(make_conninfo(dsn, user="bench_guest")) as run:
                out, err = run.communicate(timeout=60)
        finally:
            conn.execute("drop role bench_guest")
    assert (run.returncode, out) == (1, "")
    assert "bench_guest may not create databases" in err
    assert "alter role bench_guest createdb" in err

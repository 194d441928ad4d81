"""gangq notify run as a process: receivers that come back, a runner that is killed, a database that goes."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cli.cli_process import Running, eventually, finished, gangq, objects, ok, running
from databases import Clock
from gangq.client import Client
from notify.receiver import Receiver, receiver

Db = psycopg.Connection[dict[str, Any]]


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture
def oncall(dsn: str) -> str:
    """A target that is told of everything."""
    ok(dsn, "notify", "add", "oncall")
    return "oncall"


def listening(db: Db, runners: int) -> Callable[[], bool]:
    """Whether so many runners listen: what is told from now on wakes them."""
    query = (
        "select count(*) as n from pg_stat_activity "
        "where query = 'listen gangq_notify' and datname = current_database()"
    )

    def look() -> bool:
        row = db.execute(query).fetchone()
        assert row is not None
        return bool(row["n"] == runners)

    return look


@contextmanager
def runner(dsn: str, directory: Path, there: Receiver, name: str = "runner", *more: str) -> Iterator[Running]:
    """One that runs for the target oncall, and tells what it did in JSON."""
    words = ("notify", "run", "oncall", "--url", there.url, "--json", *more)
    with running(dsn, directory, name, *words) as started:
        yield started


def fail_one(client: Client) -> int:
    """A job that fails for good."""
    (job,) = client.submit(task="t", max_attempts=1)
    incarnation = client.register_worker(name=f"w{job}", host="h", queues=["default"]).incarnation
    (claim,) = client.claim(incarnation=incarnation)
    error = {"type": "E", "message": "$(reboot) '; drop table jobs; -- \x1b[2J"}
    client.fail(job_id=job, token=claim.token, error=error)
    client.retire_worker(incarnation=incarnation)
    return job


def test_a_failure_is_told_as_soon_as_it_has_happened_and_signed(
    dsn: str, db: Db, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("a key of twenty bytes\n")
    with runner(dsn, tmp_path, there, "runner", "--secret-file", str(key)) as run:
        run.until(listening(db, 1), "it listens")
        job = fail_one(client)
        # Sooner than it looks by itself.
        run.until(lambda: there.bodies, "the failure is told", 5)
        assert (there.said[0]["kind"], there.said[0]["job_id"], there.said[0]["target"]) == (
            "job_failed",
            job,
            "oncall",
        )
        assert there.said[0]["data"]["error"]["message"].startswith("$(reboot) '; drop table jobs;")
        at, _, v1 = there.headers[0]["Gangq-Signature"].partition(",v1=")
        signed = at.removeprefix("t=").encode() + b"." + there.bodies[0]
        assert v1 == hmac.new(b"a key of twenty bytes", signed, hashlib.sha256).hexdigest()
        run.until(lambda: client.notifications()[0].delivered == 1, "it is acknowledged")
        run.interrupt(signal.SIGTERM)
        assert run.code() == 0
        assert objects(run.out) == [
            {
                "id": there.said[0]["id"],
                "kind": "job_failed",
                "delivery": 1,
                "outcome": "delivered",
                "error": None,
            }
        ]


def test_a_receiver_that_was_away_is_told_everything_once_it_is_back(
    dsn: str, db: Db, client: Client, oncall: str, tmp_path: Path
) -> None:
    with receiver() as gone:
        port = gone.port
    with runner(dsn, tmp_path, gone) as run:
        run.until(listening(db, 1), "it listens")
        jobs = [fail_one(client) for _ in range(3)]
        run.until(lambda: client.notifications()[0].failures > 0, "it has tried")
        (state,) = client.notifications()
        assert (state.error, state.waiting, state.dead) == ("Connection refused", 3, 0)
        with receiver(port) as back:
            run.until(lambda: len(back.bodies) == 3, "all are told", 30)
            assert {said["job_id"] for said in back.said} == set(jobs)
            run.until(lambda: client.notifications()[0].waiting == 0, "all are acknowledged")
            (state,) = client.notifications()
            assert (state.failures, state.delivered) == (0, 3)


def test_what_a_killed_runner_was_delivering_is_delivered_by_another_with_the_same_id(
    dsn: str, db: Db, client: Client, oncall: str, clock: Clock, tmp_path: Path
) -> None:
    with (
        receiver() as a,
        receiver() as b,
        runner(dsn, tmp_path, a, "a") as of_a,
        runner(dsn, tmp_path, b, "b") as of_b,
    ):
        a.hangs.set()
        b.hangs.set()
        of_b.until(listening(db, 2), "both listen")
        fail_one(client)
        of_b.until(lambda: a.bodies or b.bodies, "one of them delivers")
        (first, dying), (second, left) = ((a, of_a), (b, of_b)) if a.bodies else ((b, of_b), (a, of_a))
        second.hangs.clear()
        os.kill(dying.process.pid, signal.SIGKILL)
        db.execute("select pg_notify('gangq_notify', '')")
        look = db.execute("select attempts from gangq.outbox").fetchall()
        assert (second.bodies, look) == ([], [{"attempts": 1}]), "its lease is not over"
        clock.advance(41)
        db.execute("select pg_notify('gangq_notify', '')")
        left.until(lambda: second.bodies, "the other takes it over")
        one, two = first.said[0], second.said[0]
        assert (one["id"], one["delivery"], two["delivery"]) == (two["id"], 1, 2)
        assert (
            first.headers[0]["Gangq-Notification"]
            == second.headers[0]["Gangq-Notification"]
            == str(one["id"])
        )
        left.until(lambda: client.notifications()[0].delivered == 1, "it is acknowledged")


def test_a_runner_that_is_told_to_stop_ends_its_delivery_first(
    dsn: str, db: Db, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    there.hangs.set()
    with runner(dsn, tmp_path, there) as run:
        run.until(listening(db, 1), "it listens")
        for _ in range(2):
            fail_one(client)
        run.until(lambda: there.bodies, "it delivers")
        run.interrupt(signal.SIGTERM)
        there.hangs.clear()
        there.go_on()
        assert run.code() == 0
        (state,) = client.notifications()
        assert (state.delivered, state.waiting, len(there.bodies)) == (1, 1, 1)


def test_a_database_that_goes_amid_a_delivery_makes_no_second_one(
    dsn: str, db: Db, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    there.hangs.set()
    with runner(dsn, tmp_path, there) as run:
        run.until(listening(db, 1), "it listens")
        fail_one(client)
        run.until(lambda: there.bodies, "it delivers")
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        there.hangs.clear()
        there.go_on()
        run.until(lambda: _delivered(db) == 1, "it is acknowledged all the same")
        fail_one(client)
        run.until(lambda: _delivered(db) == 2, "and it goes on")
        assert [said["delivery"] for said in there.said] == [1, 1]


def _delivered(db: Db) -> int:
    row = db.execute("select delivered from gangq.notifications").fetchone()
    assert row is not None
    return int(row["delivered"])


def test_a_program_is_told_on_standard_input(dsn: str, client: Client, oncall: str, tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told\n")
    page.chmod(0o755)
    job = fail_one(client)
    done = finished(dsn, "notify", "run", "oncall", "--exec", page, "--once", "--json")
    assert (done.returncode, objects(done.stdout)[0]["outcome"]) == (0, "delivered"), done.stderr
    assert objects((tmp_path / "told").read_text())[0]["job_id"] == job


def test_once_says_by_its_exit_code_what_became_of_it(
    dsn: str, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    def once(*words: str, on: str | None = dsn) -> int:
        return int(gangq(on, "notify", "run", *words, "--once").exit_code)

    assert once("oncall", "--url", there.url) == 0
    there.status = 500
    fail_one(client)
    assert once("oncall", "--url", there.url) == 1
    assert once("nobody", "--url", there.url) == 2
    assert once("oncall") == 2
    assert once("oncall", "--url", there.url, "--exec", "true") == 2
    assert once("oncall", "--url", "gopher://x") == 2
    assert once("oncall", "--exec", "/no/such/program") == 2
    short = tmp_path / "short"
    short.write_text("tiny")
    assert once("oncall", "--url", there.url, "--secret-file", str(short)) == 2
    assert once("oncall", "--url", there.url, "--secret-file", str(tmp_path / "none")) == 2
    assert once("oncall", "--url", there.url, on="postgresql://127.0.0.1:9/none") == 3


def test_an_address_in_a_file_is_on_no_command_line(
    dsn: str, db: Db, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text(f"{there.url}\n")
    words = ("notify", "run", "oncall", "--url-file", tmp_path / "url")
    with running(dsn, tmp_path, "runner", *words) as run:
        run.until(listening(db, 1), "it listens")
        there.status = 500
        fail_one(client)
        run.until(lambda: client.notifications()[0].failures == 1, "it has failed")
        assert b"hunter2" not in Path(f"/proc/{run.process.pid}/cmdline").read_bytes()
        assert "hunter2" not in run.out + run.err
        assert "hunter2" not in str(client.notifications()) + str(client.undelivered())
        assert "HTTP 500 (Internal Server Error)" in run.out


def test_a_runner_may_be_started_before_its_database_and_does_not_stay_where_its_target_is_gone(
    dsn: str, db: Db, client: Client, oncall: str, there: Receiver, tmp_path: Path
) -> None:
    words = ("notify", "run", "oncall", "--url", there.url)
    with running("postgresql://127.0.0.1:9/none", tmp_path, "early", *words) as early:
        eventually(lambda: "trying again" in early.err, "it tries again")
        early.interrupt(signal.SIGTERM)
        assert early.code() == 0
    with running(dsn, tmp_path, "runner", *words) as run:
        run.until(listening(db, 1), "it listens")
        client.remove_notification(target="oncall")
        db.execute("select pg_notify('gangq_notify', '')")
        assert run.code() == 2
        assert "notification target 'oncall' does not exist" in run.err

"""Hosts and workers taken out of service from the command line."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from cli.cli_process import answers, gangq, objects, ok, running
from gangq.client import Client


def register(client: Client, name: str, host: str = "h1", **more: Any) -> int:
    return client.register_worker(name=name, host=host, queues=["default"], **more).incarnation


def workers_check(dsn: str) -> dict[str, Any]:
    (found,) = [c for c in objects(gangq(dsn, "doctor", "--json").stdout) if c["check"] == "workers"]
    return found


def test_a_host_is_cordoned_shown_as_such_and_opened_again(dsn: str, client: Client) -> None:
    one = register(client, "w1")
    register(client, "w2", host="h2")
    (found,) = answers(dsn, "cordon", "h1", "--reason", "new fans")
    assert (found["kind"], found["name"], found["state"]) == ("host", "h1", "cordoned")
    client.submit(task="t")
    assert client.claim(incarnation=one) == []
    shown = ok(dsn, "workers").splitlines()
    assert "cordoned" in shown[1]
    assert shown[1].endswith("given nothing new: new fans")
    assert "cordoned" not in shown[2]
    check = workers_check(dsn)
    assert (check["status"], "1 of 2 workers are cordoned: w1 on h1 (new fans)") == ("warn", check["detail"])
    assert ok(dsn, "uncordon", "h1") == "host h1 may take work\n"
    assert workers_check(dsn)["status"] == "ok"
    assert len(client.claim(incarnation=one)) == 1


def test_a_worker_is_turned_off_and_on_by_name(dsn: str, client: Client) -> None:
    one = register(client, "w1")
    assert ok(dsn, "worker", "off", "w1") == "worker w1 is given nothing new: operator\n"
    client.submit(task="t")
    assert client.claim(incarnation=one) == []
    ok(dsn, "cordon", "h1")
    assert "not before its host may: gangq uncordon h1" in ok(dsn, "worker", "on", "w1")
    ok(dsn, "worker", "off", "w1")
    assert "but not w1: gangq worker on NAME" in ok(dsn, "uncordon", "h1")
    assert ok(dsn, "worker", "on", "w1") == "worker w1 may take work\n"
    assert len(client.claim(incarnation=one)) == 1


def test_a_worker_is_still_started_by_what_is_no_verb(dsn: str) -> None:
    for words in (("--help",), ("--once", "--help")):
        assert "--prefetch" in ok(dsn, "worker", *words)
    for verb in ("off", "on", "drain"):
        page = ok(dsn, "worker", verb, "--help")
        assert f"Usage: main worker {verb}" in page
        assert "--prefetch" not in page
    missing = gangq(dsn, "worker", "on:app", "--no-supervisor")
    assert (missing.exit_code, "'on'" in missing.stderr) == (2, True), missing.stderr


def test_a_mistyped_host_is_refused_with_those_like_it(dsn: str, client: Client) -> None:
    register(client, "w1", host="gpu-host-7")
    refused = gangq(dsn, "drain-host", "gpu-hots-7")
    assert refused.exit_code == 2
    assert "there is gpu-host-7" in refused.stderr


def test_a_deadline_is_a_length_of_time_by_the_databases_clock(dsn: str, client: Client, clock: Any) -> None:
    register(client, "w1")
    clock.advance(-86400)
    (found,) = answers(dsn, "drain-host", "h1", "--deadline", "1h30m")
    assert found["deadline"] == (clock.now() + timedelta(seconds=5400)).isoformat()
    # Asked again, for the waiting alone: the deadline stays.
    (found,) = answers(dsn, "drain-host", "h1")
    assert found["deadline"] is not None
    assert gangq(dsn, "drain-host", "h1", "--deadline", "0").exit_code == 2


def test_a_drain_is_waited_for_until_nothing_is_left(dsn: str, client: Client, tmp_path: Path) -> None:
    one = register(client, "w1", slots=2, light=2)
    jobs = client.submit(task="t", payloads=[{}, {}])
    claims = client.claim(incarnation=one, max_jobs=2)
    with running(dsn, tmp_path, "drain", "worker", "drain", "w1", "--wait", "--json") as drain:
        drain.until(lambda: drain.out, "it says what runs there")
        for claim in claims:
            seen = len(drain.out.splitlines())
            client.complete(job_ids=[claim.job_id], tokens=[claim.token])
            drain.until(lambda seen=seen: len(drain.out.splitlines()) > seen, "it says that one has ended")
        assert drain.code() == 0
    assert [(one["state"], one["jobs"]) for one in objects(drain.out)] == [
        ("draining", jobs),
        ("draining", jobs[1:]),
        ("drained", []),
    ]


def test_waiting_ends_with_ctrl_c_and_the_drain_goes_on(dsn: str, client: Client, tmp_path: Path) -> None:
    one = register(client, "w1")
    client.submit(task="t")
    client.claim(incarnation=one)
    with running(dsn, tmp_path, "drain", "drain-host", "h1", "--deadline", "1h", "--wait") as drain:
        drain.until(lambda: "0 gangs, 1 job left" in drain.out, "it says what runs there")
        drain.interrupt(signal.SIGINT)
        assert drain.code() == 130
        assert "goes on being drained" in drain.err
    assert client.cordoned()[0].state == "draining"


def test_waiting_ends_when_somebody_else_ends_the_drain(dsn: str, client: Client, tmp_path: Path) -> None:
    one = register(client, "w1")
    client.submit(task="t")
    client.claim(incarnation=one)
    with running(dsn, tmp_path, "drain", "drain-host", "h1", "--wait") as drain:
        drain.until(lambda: drain.out, "it waits")
        ok(dsn, "undrain", "h1")
        assert drain.code() == 1
        assert "lifted by somebody else" in drain.err

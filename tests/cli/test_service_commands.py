"""gangq service: what people type, and what they are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import answers, eventually, gangq, ok, running
from databases import connect
from gangq.cli.session import Session
from gangq.cli.work import submission
from gangq.client import Client


def refused(dsn: str, *args: object) -> str:
    result = gangq(dsn, "service", *args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    return str(result.stderr)


def serving(client: Client, name: str) -> list[Any]:
    """The claims of a service's gangs, once they run on a worker that is made here."""
    client.tick(force=True)
    row = client.register_worker(name="w", host="h", queues=["default"], slots=8, cpus=8, address="10.0.0.1")
    client.tick(force=True)
    return client.claim(incarnation=row.incarnation, max_jobs=8)


def test_a_service_from_one_line_and_what_is_left_out_stays(dsn: str, client: Client) -> None:
    told = ok(
        dsn, "service", "set", "chat", "--task", "serve", "--replicas", "3", "--gang", "2", "--cpus", "1",
        "--priority", "5", "--payload", "model=a", "--surge", "0", "--ready-within", "5m", "--linger", "2",
        "--strategy", "spread", "--no-preempt",
    )  # fmt: skip
    assert told.startswith("service chat: made; revision 1, 0 of 4 replicas ready, starting")
    (row,) = client.services()
    assert (row.task, row.replicas, row.gang, row.payload) == ("serve", 4, 2, {"model": "a"})
    assert (row.surge, row.ready_within_s, row.linger_s) == (0, 300, 2)
    assert row.work == {"cpus": 1, "priority": 5, "strategy": "spread", "preemptible": False}
    ok(dsn, "service", "set", "chat", "--priority", "7")
    (row,) = client.services()
    assert (row.revision, row.replicas, row.work["priority"], row.work["cpus"]) == (2, 4, 7, 1)


def test_an_option_of_submit_that_a_command_does_not_have_is_as_if_it_were_not_given() -> None:
    assert submission(Session(), {}) == {}
    assert submission(Session(), {"gpus": 2, "labels": [("zone", "a")]}) == {
        "gpus": 2,
        "labels": {"zone": "a"},
    }


def test_scaled_by_its_load_and_shown_with_what_it_wants_why_and_since_when(dsn: str, client: Client) -> None:
    ok(
        dsn, "service", "set", "chat", "--task", "serve", "--min", "1", "--max", "4", "--load", "0.5",
        "--up-after", "1h", "--down-after", "5m", "--cpus", "1",
    )  # fmt: skip
    (row,) = client.scaling()
    assert (row.min_replicas, row.max_replicas, row.target_load) == (1, 4, 0.5)
    assert (row.up_after_s, row.down_after_s) == (3600, 300)
    shown = ok(dsn, "service", "show", "chat")
    assert "from 1 to 4 replicas, load 0.5" in shown
    assert "the 1 it has: no replica has said within 60 s how busy it is" in shown
    (claim,) = serving(client, "chat")
    client.barrier(job_id=claim.job_id, token=claim.token)
    client.report_ready(job_id=claim.job_id, token=claim.token, port=80)
    client.report_load(job_id=claim.job_id, token=claim.token, load=1.25)
    client.tick(force=True)
    shown = ok(dsn, "service", "show", "chat")
    assert re.search(r"wants +3 since .*, and has them in .*: load 1.25, target 0.5", shown)
    ok(dsn, "queue", "create", "asks")
    ok(dsn, "service", "set", "chat", "--depth", "5", "--depth-of", "asks")
    assert "5 jobs of queue asks for each" in ok(dsn, "service", "show", "chat")
    ok(dsn, "service", "set", "chat", "--max", "0")
    assert client.scaling() == []


def test_a_program_with_a_health_url(dsn: str, client: Client) -> None:
    ok(dsn, "service", "set", "web", "--health", "/healthz", "--", "python", "server.py", "--x")
    (row,) = client.services()
    assert (row.task, row.health, row.payload["argv"]) == (
        "command",
        "/healthz",
        ["python", "server.py", "--x"],
    )
    ok(dsn, "service", "set", "web", "--health", "none")
    assert client.services()[0].health is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["set", "chat"], "has no task"),
        (["set", "chat", "--task", "serve", "--replicas", "0"], "--stopped"),
        (["set", "chat", "--task", "serve", "--", "true"], "not both"),
        (["set", "chat", "--task", "serve", "--min", "1"], "has a maximum"),
        (["set", "chat", "--task", "serve", "--max", "4", "--load", "1", "--depth", "2"], "one target"),
        (["set", "chat", "--task", "serve", "--health", "healthz"], "health"),
        (["show", "none"], "gangq service list"),
        (["stop", "none"], "does not exist"),
    ],
)
def test_what_is_wrong_is_said(dsn: str, words: list[str], why: str) -> None:
    assert why in refused(dsn, *words)


def test_stopped_shown_rolled_back_and_deleted(dsn: str, client: Client) -> None:
    ok(dsn, "service", "set", "chat", "--task", "serve", "--replicas", "0", "--stopped")
    assert client.services()[0].state == "stopped"
    ok(dsn, "service", "set", "chat", "--version", "2")
    assert ok(dsn, "service", "rollback", "chat", "--to", "1").startswith("service chat: revision 1")
    client.tick(force=True)
    shown = ok(dsn, "service", "show", "chat")
    assert "0 of 1, in gangs of 1" in shown
    assert "blocked" in shown
    assert "chat" in ok(dsn, "service", "list")
    assert ok(dsn, "service", "stop", "chat") == "service chat: stopping\n"
    assert ok(dsn, "service", "delete", "chat") == "service chat: deleting\n"
    client.tick(force=True)
    assert client.services() == []


def test_endpoints_are_listed_and_followed(dsn: str, client: Client, tmp_path: Path) -> None:
    ok(dsn, "service", "set", "chat", "--task", "serve", "--replicas", "2", "--gang", "2", "--cpus", "1")
    claims = serving(client, "chat")
    assert answers(dsn, "service", "endpoints", "chat") == []
    with running(dsn, tmp_path, "follow", "service", "endpoints", "chat", "--follow", "--json") as follower:

        def lines() -> list[Any]:
            return [json.loads(line) for line in follower.out.splitlines()]

        eventually(lambda: len(lines()) == 1, "it has printed that there are none")
        for claim, port in zip(claims, (8000, 8001), strict=True):
            client.report_ready(job_id=claim.job_id, token=claim.token, port=port)
        eventually(lambda: len(lines()) == 2, "it has printed both")
        client.report_ready(job_id=claims[0].job_id, token=claims[0].token, ready=False)
        eventually(lambda: len(lines()) == 3, "it has printed that there are none")
        assert [[e["port"] for e in line["endpoints"]] for line in lines()] == [[], [8000, 8001], []]
    client.report_ready(job_id=claims[0].job_id, token=claims[0].token, port=8000)
    assert [(e["address"], e["port"]) for e in answers(dsn, "service", "endpoints", "chat")] == [
        ("10.0.0.1", 8000),
        ("10.0.0.1", 8001),
    ]


def test_endpoints_are_followed_although_the_connection_that_listens_is_cut(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    ok(dsn, "service", "set", "chat", "--task", "serve", "--cpus", "1")
    (claim,) = serving(client, "chat")
    with running(dsn, tmp_path, "follow", "service", "endpoints", "chat", "--follow", "--json") as follower:
        follower.until(lambda: len(follower.out.splitlines()) == 1, "it has printed that there are none")
        with connect(dsn) as conn:
            cut = conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where datname = current_database() and query = 'listen gangq_endpoints'"
            )
            assert cut.rowcount == 1
        follower.until(lambda: "trying again" in follower.err, "it has noticed")
        client.report_ready(job_id=claim.job_id, token=claim.token, port=8000)
        follower.until(lambda: len(follower.out.splitlines()) == 2, "it has printed it")
        follower.interrupt()
        assert follower.code() == 0


@pytest.mark.parametrize(
    "words", [("set", "chat", "--task", "serve"), ("stop", "chat"), ("rollback", "chat")]
)
def test_what_is_forgotten_right_after_it_was_changed_was_changed(
    dsn: str, client: Client, words: tuple[str, ...]
) -> None:
    if words[0] != "set":
        for task in ("a", "b"):
            ok(dsn, "service", "set", "chat", "--task", task)
    with connect(dsn) as conn:
        conn.execute("update gangq.service_revisions set good_at = gangq.now()")
        conn.execute(
            """
            create function public.forget() returns trigger language plpgsql as $$
            begin
              delete from gangq.services_table x where x.name = new.name;
              return null;
            end $$;
            create constraint trigger forget after insert or update on gangq.services_table
            deferrable initially deferred for each row execute function public.forget();
            """
        )
        try:
            assert ok(dsn, "service", *words).endswith("; it was deleted since\n")
        finally:
            conn.execute("drop function public.forget cascade")
    assert client.services() == []

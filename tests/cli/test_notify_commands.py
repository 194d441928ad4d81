"""Notification targets from the command line, and what the doctor and the manual say of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg

from cli.cli_process import answers, gangq, objects, ok
from gangq.client import Client
from gangq.notify import signature

Db = psycopg.Connection[dict[str, Any]]
MANUAL = (Path(__file__).parents[2] / "docs/manual/notifications.md").read_text()


def outbox(dsn: str) -> dict[str, Any]:
    (found,) = [c for c in objects(gangq(dsn, "doctor", "--json").stdout) if c["check"] == "outbox"]
    return found


def test_a_target_is_added_listed_changed_and_removed(dsn: str, client: Client) -> None:
    client.set_queue(name="lab")
    assert ok(dsn, "notify", "list") == ""
    said = ok(
        dsn, "notify", "add", "oncall", "--on", "trip", "--on", "job_failed", "--queue", "lab", "--user", "me"
    )
    assert said == "oncall is told of job_failed,trip; to deliver it: gangq notify run oncall\n"
    (row,) = answers(dsn, "notify", "list")
    assert (row["kinds"], row["queue"], row["submitter"], row["max_attempts"]) == (
        ["job_failed", "trip"],
        "lab",
        "me",
        20,
    )
    ok(dsn, "notify", "add", "oncall", "--max-attempts", "3")
    assert answers(dsn, "notify", "list")[0]["queue"] is None
    titles, line = ok(dsn, "notify", "list").splitlines()
    assert (titles.split()[:3], line.split()[:3]) == (["TARGET", "WAITING", "DEAD"], ["oncall", "0", "0"])
    ok(dsn, "notify", "rm", "oncall")
    assert gangq(dsn, "notify", "rm", "oncall").exit_code == 2


def test_what_cannot_be_told_is_refused_with_what_can(dsn: str) -> None:
    refused = gangq(dsn, "notify", "add", "oncall", "--on", "job_done")
    assert refused.exit_code == 2
    assert "gang_failed, job_failed" in refused.stderr


def test_a_test_waits_for_its_delivery_if_asked_to(dsn: str) -> None:
    ok(dsn, "notify", "add", "oncall")
    assert "waits for gangq notify run" in ok(dsn, "notify", "test", "oncall")
    late = gangq(dsn, "notify", "test", "oncall", "--wait", "0.2")
    assert (late.exit_code, "was not delivered in time" in late.stdout) == (1, True)
    said = ok(dsn, "notify", "run", "oncall", "--exec", "true", "--once")
    assert [line.split()[:2] for line in said.splitlines()] == [["delivered", "test"]] * 2


def test_the_doctor_names_what_was_given_up_what_waits_and_what_was_dropped(
    dsn: str, db: Db, client: Client
) -> None:
    assert outbox(dsn)["detail"] == "0 targets, and no notification waits for long"
    ok(dsn, "notify", "add", "oncall", "--max-attempts", "1")
    client.test_notification(target="oncall")
    assert outbox(dsn)["status"] == "ok"
    db.execute("update gangq.outbox set at = at - interval '11 minutes'")
    late = outbox(dsn)
    assert (late["status"], "no runner?" in late["detail"], "gangq notify run oncall" in late["advice"]) == (
        "warn",
        True,
        True,
    )
    assert gangq(dsn, "notify", "run", "oncall", "--exec", "false", "--once").exit_code == 1
    dead = outbox(dsn)
    assert "oncall (1 notification: the program ended with 1)" in dead["detail"]
    assert "gangq notify retry oncall" in dead["advice"]
    told = ok(dsn, "notify", "retry", "oncall")
    assert "1 notification that had been given up" in told
    assert "what backs off is tried at once" in told
    ok(dsn, "notify", "run", "oncall", "--exec", "true", "--once")
    assert outbox(dsn)["status"] == "ok"
    client.test_notification(target="oncall")
    db.execute("select gangq.trim_outbox(200, 0)")
    assert "oncall (1 so far)" in outbox(dsn)["detail"]


def test_manual_and_help_name_every_kind_and_the_manuals_receiver_knows_a_signature(db: Db) -> None:
    known = {row["kind"] for row in db.execute("select kind from gangq.notification_kinds").fetchall()}
    assert set(re.findall(r"^\| `(\w+)` \|", MANUAL, re.M)) == known
    (listed,) = re.findall(r"KIND is (.*?) \(", " ".join(ok(None, "notify", "add", "--help").split()))
    assert set(re.split(", | or ", listed)) == known
    (text,) = re.findall(r"```python\n(.*?)```", MANUAL, re.S)
    manual: dict[str, Any] = {}
    exec(text, manual)
    key, body = b"0123456789abcdef", b'{"id": 1}'
    header = signature(key, body, 1700000000)
    assert manual["is_from_gangq"](key, header, body, now=1700000100)
    for wrong in (
        (b"another key", header, body),
        (key, header, body + b" "),
        (key, header.replace("v1=", "v1=0"), body),
    ):
        assert not manual["is_from_gangq"](*wrong, now=1700000100)
    assert not manual["is_from_gangq"](key, header, body, now=1700001000), "somebody sends an old one again"
    assert not manual["is_from_gangq"](key, "", body)

"""--json of every command: each line of standard output is one JSON object with the keys promised."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.cli_process import GANGQ, answers, finished, gangq, objects, ok, worker
from gangq.cli import COMMANDS, main
from gangq.client import Client
from gangq.embedded import Server

pytestmark = pytest.mark.slow

_STATE = {"job_id", "gang_id", "state"}
_JOB = {
    "id",
    "queue",
    "task",
    "state",
    "priority",
    "gang_id",
    "rank",
    "attempts",
    "payload",
    "result",
    "error",
}
_GANG = {"id", "name", "queue", "task", "state", "size", "epoch", "reason", "note", "hosts"}
_LIMIT = {"name", "most", "rate", "used", "pinned", "login", "made_at", "opens_at"}
_QUEUE = {"name", "paused", "policy", "max_attempts", "budget_s"}
_EVENT = {
    "id",
    "at",
    "kind",
    "gang_id",
    "epoch",
    "job_id",
    "token",
    "incarnation",
    "worker",
    "reason",
    "data",
}
_TASK = {"task", "budget_s", "stall_timeout_s", "notify_only", "device_class", "longest_gap_s", "beats"}
_SCHEDULE = {
    "name",
    "task",
    "cron",
    "every",
    "next_due",
    "last_due",
    "last_job",
    "paused",
    "paused_until",
    "passed_over",
    "why",
    "problem",
}
_TRIP = {
    "at",
    "code",
    "class",
    "reason",
    "outcome",
    "task",
    "job_id",
    "worker",
    "host",
    "devices",
    "evidence",
}
_PLAN = {"gang_id", "queue", "task", "priority", "size", "before", "after", "hosts", "gate", "changed", "why"}
_CORDON = {
    "kind",
    "name",
    "state",
    "drain",
    "since",
    "deadline",
    "reason",
    "operator",
    "workers",
    "gangs",
    "jobs",
}
_SERVICE = {"name", "task", "state", "replicas", "gang", "ready_replicas", "revision", "why", "work"}
_NOTIFIED = {
    "target",
    "kinds",
    "queue",
    "waiting",
    "dead",
    "dead_error",
    "dropped",
    "delivered",
    "failures",
    "error",
}
_USAGE = {"submitter", "queue", "task", "attempts", "gpu_hours", "wasted_hours", "displaced_hours"}
_OPENED = {"kind", "name", "state"}
_SERVER = {"running", "pid", "version", "data_dir", "dsn", "bindir"}

# In each group the later ones use what the earlier ones made. Job 1 has ended; gang g1 waits.
CASES: dict[str, list[tuple[str, set[str]]]] = {
    "work": [
        ("submit a n=1 --queue later", {"job_ids", "existed", "replaced"}),
        ("submit a --queue later --gang 2", {"gang", "gang_id", "job_ids", "note", "existed"}),
        ("run -- echo hello", {"event"}),
        ("run --gang 2 -- echo hello", {"event"}),
        ("ls", _JOB),
        ("ls gangs", _GANG),
        ("show 1", {"job", "attempts", "events", "evidence"}),
        ("show g1", {"gang", "members", "timeline", "drains"}),
        ("logs 1", {"job_id", "token", "seq", "at", "chunk", "rank"}),
        ("logs 1 -f", {"job_id", "token", "seq", "at", "chunk", "rank"}),
        ("events", _EVENT),
        ("events g1", _EVENT),
        ("wait 1", {"job_id", "gang_id", "batch_id", "state", "exit_code", "error"}),
        ("explain 1", {"gate", "ok", "detail", "numbers"}),
        ("explain g1", {"gate", "ok", "detail", "numbers"}),
        ("priority -3 g1", _STATE),
        ("cancel g1", _STATE),
        ("retry g1", _STATE),
    ],
    "decisions": [
        ("plan", _PLAN),
        ("plan --add-worker 2x8xH100", _PLAN),
        ("replay", {"at", "digest", "decisions", "same", "difference"}),
    ],
    "schedules": [
        ("schedule add s --every 30s a n=1 --queue later", _SCHEDULE),
        ("schedule list", _SCHEDULE),
        ("schedule pause s --until 2h", _SCHEDULE),
        ("schedule resume s", _SCHEDULE),
        ("schedule run-now s", {"job_id", "gang_id"}),
        ("schedule rm s", {"name", "state"}),
    ],
    "services": [
        ("service set s --task a --replicas 2 --gang 2 --queue later", _SERVICE),
        ("service list", _SERVICE),
        ("service show s", {"service", "gangs", "scaling"}),
        ("service stop s", _SERVICE),
        ("service rollback s --to 1", _SERVICE),
        ("service delete s", {"name", "state"}),
    ],
    "queues": [
        ("queue create q2", _QUEUE),
        ("queue set q2 --budget 5m", _QUEUE),
        ("queue set q2 --rate 60/1m", {*_QUEUE, "rate"}),
        ("queue set q2 --rate none", _QUEUE),
        ("queue pause q2 --until 2h", _QUEUE),
        ("queue drain q2", _QUEUE),
        ("queue resume q2", _QUEUE),
        ("queue ls", _QUEUE),
        ("queue", _QUEUE),
    ],
    "limits": [
        ("limit set licence 2", _LIMIT),
        ("limit set api --rate 10/1m", _LIMIT),
        ("limit list", _LIMIT),
    ],
    "tasks": [
        ("task set train --budget 5m", _TASK),
        (
            "task pause later --until 2h --reason data",
            {*_TASK, "paused", "paused_until", "pause_reason", "paused_by"},
        ),
        ("task resume later", _TASK),
        ("task list", _TASK),
    ],
    "workers": [
        ("worker --once --name other --devices none", {"at", "level", "logger", "message"}),
        (
            "workers",
            {
                "name",
                "host",
                "state",
                "incarnation",
                "slots",
                "used_slots",
                "lease_left_s",
                "quarantined",
                "model",
            },
        ),
        ("devices", {"uuid", "host", "index", "vram_mb", "state", "job_id", "reason", "health", "reading"}),
        ("usage --by user,queue,task --since 90d", _USAGE),
        ("metrics --once", {"name", "labels", "value"}),
        ("trips", _TRIP),
        ("trips --evidence", _TRIP),
        ("drains", {"gang_id", "epoch", "cause", "trigger_job", "moved", "acked", "forced", "outcome"}),
    ],
    "what is closed to work": [
        ("quarantine --worker w1", {"device_uuid", "worker", "quarantined", "reason"}),
        ("unquarantine --worker w1", {"device_uuid", "worker", "quarantined", "reason"}),
        ("cordon h1", _CORDON),
        ("uncordon h1", _OPENED),
        ("drain-host h1 --deadline 30m --wait", _CORDON),
        ("undrain h1", _OPENED),
        ("worker off gone", _CORDON),
        ("worker on gone", _OPENED),
        ("worker drain gone", _CORDON),
        ("taint w1 repair", {"worker", "taints"}),
        ("taint w1", {"worker", "taints"}),
    ],
    "notifications": [
        ("notify add oncall --on job_failed --queue later", _NOTIFIED),
        ("notify list", _NOTIFIED),
        ("notify test oncall", {"target", "id", "delivered"}),
        ("notify run oncall --exec true --once", {"id", "kind", "delivery", "outcome", "error"}),
        ("notify retry oncall", {"target", "retried"}),
        ("notify rm oncall", {"target"}),
    ],
    "maintenance": [
        ("tick", {"ran", "again", "next_in_s", "detail", "next_turn", "decide", "unplanned"}),
        ("migrate", {"applied", "code_rebuilt", "already_current"}),
        ("migrate --check", {"migrations", "code"}),
        ("migrate --dump-sql", {"sql"}),
        ("doctor", {"check", "status", "detail", "advice", "numbers"}),
    ],
    "a server": [
        ("db start", _SERVER),
        ("db status", _SERVER),
        ("db dsn", {"dsn", "private"}),
        ("db stop", {*_SERVER, "was_running"}),
    ],
    "inside a job": [
        ("beat --step 1 --loss 0.5", {"step", "loss"}),
        ("snooze 0", {"for_s"}),
        ("checkpoint save 1 state", {"step", "bytes", "file"}),
        ("checkpoint load state", {"step", "bytes", "file"}),
    ],
}
# psql has formats of its own; the others are run by tests of their own.
_WITHOUT = {
    "board",
    "decide",
    "db psql",
    "demo",
    "gang",
    "bench",
    "bounce",
    "service endpoints",
    "ready",
    "load",
    "completion install",
    "completion show",
    "systemd install",
    "systemd show",
    "systemd report-death",
    "top",
    "web",
}


@pytest.fixture(scope="module")
def installation(
    server: Server, template: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A database with a worker, a done command, a gang that waits, and a drain."""
    directory = tmp_path_factory.mktemp("json")
    dsn = server.create_database("cli_json", template=template)
    with Client(dsn) as client:
        client.configure(grace_s=1)
        client.set_queue(name="later")
    options = ["--slots", "2", "--devices", "1x1GiB", "--address", "127.0.0.1"]
    with worker(dsn, directory, "w1", *options):
        assert finished(dsn, "run", "--", "echo", "hello").returncode == 0
        ok(dsn, "submit", "a", "--queue", "later", "--gang", "2")
        assert finished(dsn, "run", "--gang", "2", "--max-attempts", "1", "--", "false").returncode == 1
        assert finished(dsn, "run", "--gpus", "1", "--", "true").returncode == 0
        with Client(dsn) as client:
            _trip(client)
        yield dsn, directory
    server.drop_database("cli_json")


def _trip(client: Client) -> None:
    """A job that tripped and was cancelled, on a worker that has left."""
    client.set_queue(name="hangs")
    job = client.submit(task="train", queue="hangs")[0]
    incarnation = client.register_worker(name="gone", host="h1", queues=["hangs"]).incarnation
    (claim,) = client.claim(incarnation=incarnation)
    words = {"error": {"type": "idle"}, "evidence": {"silence_s": 130}}
    client.trip(incarnation=incarnation, job_id=job, token=claim.token, code=76, **words)
    client.cancel(job_ids=[job])
    client.retire_worker(incarnation=incarnation)


@pytest.mark.parametrize("group", CASES)
def test_every_line_is_an_object_with_the_keys_promised(installation: tuple[str, Path], group: str) -> None:
    for line, keys in CASES[group]:
        code, out, err = said(*installation, line)
        assert code == 0, (line, out, err)
        found = objects(out)
        assert found, (line, err)
        for one in found:
            assert keys <= set(one), line


def said(dsn: str, directory: Path, line: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command with --json."""
    (directory / "state").write_text("x")
    words = line.split()
    if "--" in words:
        words.insert(1, "--json")
    else:
        words.append("--json")
    if words[0] in ("beat", "checkpoint", "snooze"):
        before = f"{' '.join(GANGQ)} checkpoint save 1 state; " if "load" in words else ""
        if words[0] == "snooze":  # It runs again, and has waited then.
            before = "[ -e waited ] && exit; touch waited; "
        script = f"{before}exec {' '.join([*GANGQ, *words])}"
        words = ["run", "--cwd", str(directory), "--", "sh", "-c", script]
    # A worker changes the process it runs in; everything else may run in this one.
    if words[0] == "worker":
        done = finished(dsn, *words)
        return done.returncode, done.stdout, done.stderr
    private = {"GANGQ_DATA_DIR": str(directory / "pg")} if words[0] == "db" else {}
    given = None if words[0] == "db" and words[1] in ("start", "status", "stop") else dsn
    result = gangq(given, *words, **private)
    return result.exit_code, result.stdout, result.stderr


_WITH_SUBCOMMANDS = {"db", "limit", "queue", "schedule", "service", "task", "checkpoint", "notify", "systemd"}


def command_of(line: str) -> str:
    """The name of the command of a line of `CASES`."""
    return " ".join(line.split()[: 2 if line.split()[0] in _WITH_SUBCOMMANDS else 1])


def every_command(command: click.Command = main, name: str = "") -> list[str]:
    """The names of all commands that do something."""
    if not isinstance(command, click.Group):
        return [name.strip()]
    context = click.Context(command)
    children = {child: command.get_command(context, child) for child in command.list_commands(context)}
    below = [leaf for child, one in children.items() if one for leaf in every_command(one, f"{name} {child}")]
    return below + ([name.strip()] if name and command.invoke_without_command else [])


def test_no_command_is_left_out() -> None:
    covered = {command_of(line) for cases in CASES.values() for line, _ in cases}
    assert covered | _WITHOUT == set(every_command())
    assert set(COMMANDS) >= {name.split()[0] for name in covered}


def test_ids_in_json_are_those_of_psql_and_gangs_have_their_written_form_too(dsn: str) -> None:
    (made,) = answers(dsn, "submit", "a", "--gang", "2")
    assert made["gang"] == f"g{made['gang_id']}"
    assert {job["gang_id"] for job in answers(dsn, "ls", "--gang", made["gang"])} == {made["gang_id"]}

"""What the commands answer, how they refuse, and with which exit code."""

from __future__ import annotations

import errno
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cli.cli_process import GANGQ, answers, environment, eventually, finished, gangq, objects, ok
from gangq import schema
from gangq.cli import COMMANDS, main
from gangq.cli.follow import Tagger
from gangq.client import Client
from gangq.client.rows import LogRow
from gangq.embedded import Server
from gangq.errors import DatabaseUnreachable


@pytest.fixture(scope="module")
def untouched(server: Server, template: str) -> Iterator[str]:
    """One database for tests that change nothing."""
    yield server.create_database("cli_untouched", template=template)
    server.drop_database("cli_untouched")


def commands_of(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*before, name)
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands_of(command, *before, name)


def test_every_command_has_a_help_page_for_a_terminal_of_80_columns() -> None:
    for words in [(), *commands_of(main)]:
        page = ok(None, *words, "--help", COLUMNS="80")
        assert "Usage:" in page
        assert [line for line in page.splitlines() if len(line) > 80] == [], words
    assert list(COMMANDS) == main.list_commands(click.Context(main))


def test_the_version_is_printed_without_starting_anything(tmp_path: Path) -> None:
    done = finished(None, "--version", GANGQ_DATA_DIR=str(tmp_path / "pg"))
    assert done.returncode == 0
    assert done.stdout.startswith("gangq, version ")
    assert not (tmp_path / "pg").exists()


def test_the_command_line_loads_no_workers_before_it_needs_them() -> None:
    code = "import sys, gangq.cli; print([m for m in sys.modules if m.split('.')[0] in ('rich', 'pynvml')"
    code += " or m.startswith(('gangq.worker', 'gangq.gpu', 'gangq.watchdogs'))])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_submitting_prints_ids_that_other_commands_take(dsn: str, client: Client) -> None:
    job = int(ok(dsn, "submit", "add", "n=1", "name=abc", 'quoted="1"', "list=[1, 2]", "--priority", "7"))
    assert client.job(id=job).payload == {"n": 1, "name": "abc", "quoted": "1", "list": [1, 2]}
    assert client.job(id=job).priority == 7
    gang = ok(dsn, "submit", "train", '{"epochs": 3}', "--gang", "2", "--name", "night").strip()
    assert gang == "g1"
    assert client.gang(id=1).name == "night"
    assert [m.payload for m in client.jobs(gang_id=1)] == [{"epochs": 3}] * 2
    assert "task       add" in ok(dsn, "show", job)
    assert "night" in ok(dsn, "show", gang)
    assert len(answers(dsn, "show", "g1")[0]["members"]) == 2


def test_a_command_run_again_with_its_request_id_prints_the_same_ids(dsn: str, client: Client) -> None:
    jobs = ("submit", "add", "n=1", "--count", "3", "--request-id", "01910000-0000-7000-8000-000000000001")
    gang = ("submit", "train", "--gang", "2", "--request-id", "01910000-0000-7000-8000-000000000002")
    assert [ok(dsn, *jobs), ok(dsn, *gang)] == [ok(dsn, *jobs), ok(dsn, *gang)]
    assert len(client.jobs()) == 5
    assert gangq(dsn, "submit", "add", "--request-id", "mine").exit_code == 2


def test_standard_input_gives_one_job_a_line_or_one_member_a_line(dsn: str, client: Client) -> None:
    lines = '{"n": 1}\n\n{"n": 2}\n'
    ids = [int(line) for line in ok(dsn, "submit", "add", "-", stdin=lines).split()]
    assert [client.job(id=id).payload for id in ids] == [{"n": 1}, {"n": 2}]
    ok(dsn, "submit", "add", "-", "--gang", "2", stdin=lines)
    assert sorted((m.rank, m.payload["n"]) for m in client.jobs(gang_id=1)) == [(0, 1), (1, 2)]


def test_due_in_an_hour_is_counted_by_the_databases_clock(dsn: str, client: Client, clock: Any) -> None:
    clock.advance(86400 * 365)
    job = int(ok(dsn, "submit", "add", "--due", "1h30m"))
    assert client.job(id=job).due_at is not None
    assert (client.job(id=job).due_at - clock.now()).total_seconds() == 5400


def test_options_of_work_reach_the_job(dsn: str, client: Client) -> None:
    first = int(ok(dsn, "submit", "a"))
    options = [
        "--gpus",
        "2",
        "--vram-mb",
        "1000",
        "--memory-mb",
        "5",
        "--cpus",
        "1.5",
        "--label",
        "zone=b",
        "--label",
        "n=1",
        "--budget",
        "2m",
    ]
    job = client.job(id=int(ok(dsn, "submit", "b", *options, "--max-attempts", "9", "--after", first)))
    assert (job.gpus, job.vram_mb, job.memory_mb, job.cpus) == (2, 1000, 5, 1.5)
    assert (job.labels, job.budget_s, job.max_attempts, job.state) == (
        {"zone": "b", "n": "1"},
        120,
        9,
        "waiting",
    )


def test_one_is_not_called_many(dsn: str, client: Client) -> None:
    job = ok(dsn, "submit", "b", "--gpus", "1", "--cpus", "1").strip()
    waits = ok(dsn, "submit", "c", "--gang", "2", "--after", job).strip()
    assert re.search(r"^needs +1 GPU, 1 CPU$", ok(dsn, "show", job), re.MULTILINE)
    assert f"waits for job {job} to be done" in ok(dsn, "explain", waits)


def test_a_job_may_wait_for_a_gang(dsn: str, client: Client) -> None:
    ok(dsn, "submit", "other")
    assert ok(dsn, "submit", "train", "--gang", "2").strip() == "g1"
    waits = ok(dsn, "submit", "report", "--after", "g1", "--after", "1").strip()
    assert "waits for jobs 1, 2, 3" in ok(dsn, "explain", waits)
    refused = gangq(dsn, "submit", "report", "--after", "g7")
    assert (refused.exit_code, "gang g7, which does not exist" in refused.stderr) == (2, True)
    assert gangq(dsn, "submit", "report", "--after", "x").exit_code == 2


def test_show_says_what_a_viewer_may_not_see(dsn: str, db: psycopg.Connection[Any], client: Client) -> None:
    job = ok(dsn, "submit", "add", "n=1").strip()
    worker = client.register_worker(name="w1", host="h1", queues=["default"])
    (claim,) = client.claim(incarnation=worker.incarnation)
    client.complete(job_ids=[claim.job_id], tokens=[claim.token], results=[None])
    db.execute("create role only_shows login in role gangq_viewer")
    try:
        shown = ok(make_conninfo(dsn, user="only_shows"), "show", job)
    finally:
        db.execute("drop role only_shows")
    assert re.search(r"^payload +\(not shown to you: ", shown, re.MULTILINE)
    assert re.search(r"^result +\(not shown to you: ", shown, re.MULTILINE)
    assert "not shown to you" not in ok(dsn, "show", job)


def test_show_says_who_cancelled_and_which_attempt_an_error_belongs_to(dsn: str, client: Client) -> None:
    job = int(ok(dsn, "submit", "add", "--max-attempts", "3"))
    worker = client.register_worker(name="w1", host="h1", queues=["default"])
    client.set_queue(name="default", backoff_s=0.01, backoff_max_s=0.01)
    (claim,) = client.claim(incarnation=worker.incarnation)
    client.fail(job_id=job, token=claim.token, error={"type": "ConnectionError", "message": "no route"})

    def claimed() -> Any:
        client.tick(force=True)
        return client.claim(incarnation=worker.incarnation)

    (claim,) = eventually(claimed, "it is tried again")
    shown = ok(dsn, "show", job)
    assert "last failed attempt (1 of 3):\nerror  ConnectionError: no route" in shown
    client.complete(job_ids=[job], tokens=[claim.token], results=[1])
    shown = ok(dsn, "show", job)
    assert re.search(r"^state +done$", shown, re.MULTILINE)
    assert "last failed attempt (1 of 3):\nerror  ConnectionError: no route" in shown
    lost = int(ok(dsn, "submit", "add"))
    client.tick(force=True)
    (claim,) = client.claim(incarnation=worker.incarnation)
    client.report_dead(worker="w1", incarnation=worker.incarnation, evidence={"by": "test"})
    shown = ok(dsn, "show", lost)
    assert re.search(r"^attempts +0 of \d$", shown, re.MULTILINE)
    assert "last failed attempt (crash):\nerror  WorkerLost" in shown
    other = int(ok(dsn, "submit", "add"))
    ok(dsn, "cancel", other, "--reason", "enough")
    assert re.search(r"^cancelled +.* by postgres: enough$", ok(dsn, "show", other), re.MULTILINE)


def test_cancel_retry_and_priority_take_jobs_and_gangs_together(dsn: str, client: Client) -> None:
    job = int(ok(dsn, "submit", "a"))
    ok(dsn, "submit", "a", "--gang", "2")
    ok(dsn, "priority", "-5", job, "g1")
    assert client.job(id=job).priority == client.gang(id=1).priority == -5
    ok(dsn, "cancel", job, "g1", "--reason", "no more")
    assert client.job(id=job).state == client.gang(id=1).state == "cancelled"
    for shown in (job, "g1", job + 1):
        assert re.search(r"^cancelled +.* by postgres: no more$", ok(dsn, "show", shown), re.MULTILINE)
    ok(dsn, "retry", job, "g1")
    assert (client.job(id=job).state, client.gang(id=1).state) == ("pending", "blocked")


def test_queues_are_made_changed_paused_and_never_by_a_slip(dsn: str, client: Client) -> None:
    ok(dsn, "queue", "create", "gpu", "--policy", "fifo", "--budget", "1h")
    ok(dsn, "queue", "pause", "gpu")
    (queue,) = client.queues(name="gpu")
    assert (queue.policy, queue.budget_s, queue.paused) == ("fifo", 3600, True)
    ok(dsn, "queue", "set", "gpu", "--max-attempts", "5")
    ok(dsn, "queue", "resume", "gpu")
    (queue,) = client.queues(name="gpu")
    assert (queue.max_attempts, queue.paused, queue.policy) == (5, False, "fifo")
    for verb in (["set", "gpuu", "--budget", "1"], ["pause", "gpuu"], ["create", "gpu"]):
        assert gangq(dsn, "queue", *verb).exit_code == 2
    assert [q.name for q in client.queues()] == ["default", "gpu"]


def test_a_queue_says_who_may_act_on_others_work_and_how_high_priorities_go(dsn: str, client: Client) -> None:
    assert "OTHERS" not in ok(dsn, "queue")
    ok(
        dsn,
        "queue",
        "create",
        "lab",
        "--others",
        "shared",
        "--ceilings",
        "gangq_submitter=10,gangq_admin=100",
    )
    (queue,) = client.queues(name="lab")
    assert (queue.others, queue.ceilings) == ("shared", {"gangq_submitter": 10, "gangq_admin": 100})
    assert re.search(r"^lab .* shared +gangq_admin 100, gangq_submitter 10 ", ok(dsn, "queue"), re.MULTILINE)
    ok(dsn, "queue", "set", "lab", "--others", "owner", "--reset", "ceilings")
    (queue,) = client.queues(name="lab")
    assert (queue.others, queue.ceilings) == ("owner", {})
    for wrong in ("gangq_submitter", "gangq_submitter=high", "=5", "a=1,a=2"):
        assert gangq(dsn, "queue", "set", "lab", "--ceilings", wrong).exit_code == 2
    assert "is no role" in gangq(dsn, "queue", "set", "lab", "--ceilings", "nobody_of_that_name=1").stderr


def test_the_tree_of_queues_shows_what_each_holds_and_may_hold(dsn: str, client: Client) -> None:
    ok(dsn, "queue", "create", "lab.vision.train", "--guaranteed", "gpus=1", "--maximum", "gpus=2,cpus=1.5")
    ok(
        dsn,
        "queue",
        "set",
        "lab",
        "--policy",
        "fair",
        "--max-running-jobs",
        "9",
        "--submitter-maximum",
        "jobs=4",
    )
    ok(dsn, "queue", "pause", "lab.vision")
    devices = [{"uuid": "G0", "index": 0, "vram_mb": 1, "model": "test", "source": "nvml"}]
    worker = client.register_worker(name="w", host="h", queues=["lab"], devices=devices)
    ok(dsn, "submit", "a", "--queue", "lab", "--gpus", "1")
    ok(dsn, "submit", "a", "--queue", "lab.vision.train")
    client.tick(force=True)
    assert len(client.claim(incarnation=worker.incarnation)) == 1
    ok(dsn, "queue", "drain", "lab")
    lines = [line.split() for line in ok(dsn, "queue").splitlines()]
    assert lines[0][:3] == ["QUEUE", "STATE", "POLICY"]
    assert lines[1:] == [
        ["default", "priority", "0", "0", "0", "0", "0", "0"],
        ["lab", "draining", "fair", "1", "0", "1/-/9", "0", "jobs", "4", "1", "0"],
        ["vision", "paused", "priority", "0", "0", "0", "0", "1", "0"],
        ["train", "paused", "by", "lab.vision", "priority", "0/1/2", "0/-/1.5", "0", "0", "1", "0"],
    ]
    assert [line[: len(line) - len(line.lstrip())] for line in ok(dsn, "queue").splitlines()[1:]] == [
        "", "", "  ", "    "
    ]  # fmt: skip


def test_settings_of_a_queue_are_put_back_and_wrong_amounts_refused(dsn: str, client: Client) -> None:
    ok(dsn, "queue", "create", "gpu", "--maximum", "gpus=2", "--max-running-gangs", "1", "--timeout", "5m")
    ok(
        dsn,
        "queue",
        "set",
        "gpu",
        "--no-preempts",
        "--timeout-style",
        "hard",
        "--min-run",
        "1m",
        "--weight",
        "2",
    )
    (queue,) = client.queues(name="gpu")
    assert (queue.maximum, queue.max_running_gangs, queue.placement_timeout_s) == ({"gpus": 2}, 1, 300)
    assert (queue.preempts, queue.timeout_style, queue.min_run_s, queue.weight) == (False, "hard", 60, 2)
    ok(dsn, "queue", "set", "gpu", "--reset", "maximum", "--reset", "timeout_style")
    (queue,) = client.queues(name="gpu")
    assert (queue.maximum, queue.timeout_style, queue.max_running_gangs) == ({}, None, 1)
    for given in ("gpus", "gpus=", "gpus=many", "=2", "gpus=1,gpus=2", "gpus=true"):
        assert "no list of amounts" in gangq(dsn, "queue", "set", "gpu", "--maximum", given).output
    assert "'tpus'" in gangq(dsn, "queue", "set", "gpu", "--maximum", "tpus=1").output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show", "12"], "job 12 does not exist"),
        (["show", "g12"], "gang g12 does not exist"),
        (["explain", "99"], "job 99 does not exist"),
        (["explain", "j99"], "job 99 does not exist"),  # as boards and explanations name it
        (["logs", "g9"], "gang g9 does not exist"),
        (["logs", "g9", "--rank", "0"], "gang g9 does not exist"),
        (["logs", "9", "--rank", "0"], "--rank is for gangs, and job 9 is none"),
        (["events", "9"], "job 9 does not exist"),
        (["cancel", "5"], "job 5 does not exist"),
        (["cancel"], "name at least one job"),
        (["show"], "name one job (12), gang (g12) or batch (b12)"),
        (["explain"], "name one job (12), gang (g12) or batch (b12)"),
        (["plan", "--cancel", "g99"], "no live gang g99; a member is cancelled with its gang"),
        (["plan", "--cancel", "99"], "no live single job 99; a member is cancelled with its gang"),
        (["show", "x7"], "'x7' is no id: a job is written 12, a gang g12"),
        (["submit", "a", "--queue", "nope"], "'nope'"),
        (["submit", "a", "--priority", "2000"], "priority is 2000"),
        (["submit", "a", "--gang", "0"], "size is 0"),
        (["submit", "a", "[1]"], "must be a JSON object"),
        (["submit", "a", "{"], "is not JSON"),
        (["submit", "a", "--due", "soon"], "'soon' is no time"),
        (["submit", "a", "--budget", "1x"], "'1x' is no length of time"),
        (["submit", "a", "--label", "zone"], "'zone' is not key=value"),
        (["quarantine", "--device", "GPU-1"], "'GPU-1'"),
        (["quarantine"], "one of them"),
        (["worker", "no_such_module:app"], "no_such_module"),
        (["worker", "json:dumps"], "not a gangq.App"),
        (["worker", "--devices", "2 cards", "--once"], "2 cards"),
        (["run"], "Missing argument"),
        (["nonsense"], "No such command"),
    ],
)
def test_bad_input_names_the_value_and_exits_with_2(untouched: str, args: list[str], said: str) -> None:
    result = gangq(untouched, *args)
    assert result.exit_code == 2, (result.stdout, result.stderr)
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_pause_of_a_task_that_nothing_knows_says_so(dsn: str, client: Client) -> None:
    unknown = gangq(dsn, "task", "pause", "trian")
    assert (unknown.exit_code, unknown.stdout) == (0, "task trian: paused\n")
    assert "no worker and no job knows task 'trian'" in unknown.stderr
    client.submit(task="train")
    assert gangq(dsn, "task", "pause", "train").stderr == ""


def test_a_task_that_nothing_knows_is_not_called_open(dsn: str, client: Client) -> None:
    unknown = gangq(dsn, "task", "resume", "nothing")
    assert (unknown.exit_code, "task 'nothing' does not exist" in unknown.stderr) == (2, True)
    client.submit(task="train")
    assert ok(dsn, "task", "resume", "train") == "task train: open\n"


def test_what_the_state_forbids_exits_with_1(dsn: str) -> None:
    job = ok(dsn, "submit", "a").strip()
    result = gangq(dsn, "retry", job)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"job {job} is live" in result.stderr


def test_no_database_exits_with_3_and_no_password_is_ever_printed() -> None:
    dsn = "postgresql://me:s3cret@127.0.0.1:1/jobs"
    for args in (["ls"], ["migrate"], ["doctor"], ["worker", "--once"], ["tick"], ["db", "dsn"]):
        result = gangq(dsn, *args)
        assert result.exit_code == {"doctor": 1, "db": 0}.get(args[0], 3), args
        assert "s3cret" not in result.stdout + result.stderr
        assert "127.0.0.1" in result.stdout + result.stderr
    assert "user=me" in ok(dsn, "db", "dsn")


def test_a_database_somebody_named_is_not_migrated_behind_their_back(empty_dsn: str) -> None:
    result = gangq(empty_dsn, "ls")
    assert result.exit_code == 3
    assert "gangq migrate" in result.stderr
    assert "Traceback" not in result.stderr
    assert "applied migration" in ok(empty_dsn, "migrate")
    assert "up to date" in ok(empty_dsn, "migrate")
    assert ok(empty_dsn, "ls") == ""


def test_migrate_check_says_what_would_be_done_and_does_nothing(empty_dsn: str) -> None:
    fresh = gangq(empty_dsn, "migrate", "--check")
    assert fresh.exit_code == 1
    assert fresh.stdout.splitlines()[0] == f"apply migration {schema.migrations()[0].name}"
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        assert conn.execute("select to_regnamespace('gangq')").fetchone() == (None,)
        ok(empty_dsn, "migrate")
        conn.execute("create role only_looks login; grant gangq_viewer to only_looks")
        try:
            looks = make_conninfo(empty_dsn, user="only_looks")
            assert ok(looks, "migrate", "--check") == "up to date\n"
            conn.execute("update gangq.migrations set checksum = 'another' where name = 'code'")
            result = gangq(looks, "migrate", "--check")
        finally:
            conn.execute("drop role only_looks")
    assert (result.exit_code, result.stdout) == (1, "rebuild functions, views, triggers and grants\n")
    assert gangq(None, "migrate", "--check", "--dump-sql").exit_code == 2
    assert gangq(None, "migrate", "--check", "--restored").exit_code == 2


def test_a_dumped_schema_is_what_migrate_would_install(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(ok(None, "migrate", "--dump-sql").encode())
    assert answers(empty_dsn, "migrate") == [{"applied": [], "code_rebuilt": False, "already_current": True}]


def test_tracebacks_are_for_those_who_ask(dsn: str) -> None:
    assert "Traceback" not in finished(dsn, "show", 12).stderr
    assert "Traceback" in finished(dsn, "show", 12, GANGQ_DEBUG="1").stderr


def test_dsn_and_json_are_taken_before_and_after_the_command(dsn: str) -> None:
    ok(dsn, "submit", "a")
    before = ok("host=/nowhere", "--dsn", dsn, "--json", "ls")
    assert objects(before) == objects(ok("host=/nowhere", "ls", "--json", "--dsn", dsn))
    assert objects(before)[0]["task"] == "a"


def test_a_reader_that_leaves_early_is_no_error(dsn: str, client: Client) -> None:
    client.submit(task="a", payloads=[{}] * 3000)
    with subprocess.Popen(
        [*GANGQ, "ls", "--json", "--limit", "3000"],
        env=environment(dsn),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["ls"], ["ls", "--json"], ["ls", "--help"], ["--help"], ["--version"]], ids=str
)
def test_an_answer_that_cannot_be_written_is_said_in_a_line(
    dsn: str, client: Client, words: list[str], unbuffered: str
) -> None:
    client.submit(task="a")
    environ = environment(dsn, PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*GANGQ, *words], env=environ, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    said = "gangq: not all of the answer could be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_an_answer_that_cannot_be_written_has_a_traceback_where_they_are_asked_for() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*GANGQ, "--version"],
            env=environment(None, GANGQ_DEBUG="1"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.stderr.startswith("Traceback (most recent call last):")


NONE_WANTED = (
    "gangq: not all of the answer could be written: standard output is closed; send it to /dev/null if none is "
    "wanted\n"
)


def test_a_file_that_cannot_be_written_is_not_taken_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write into a file that is open knows no name, as one into standard output."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gangq.cli.session.Session.client", full)
    done = gangq("", "ls")
    assert (done.exit_code, done.stderr) == (1, "gangq: [Errno 28] No space left on device\n")


def test_events_that_are_not_followed_are_asked_for_once(
    dsn: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = client.submit(task="t")
    problems = [DatabaseUnreachable("the database is away")]

    def ended(*_: object) -> bool:
        if problems:
            raise problems.pop()
        return True

    monkeypatch.setattr("gangq.cli.follow._has_ended", ended)
    done = gangq(dsn, "events", job)
    assert (done.exit_code, done.stderr) == (3, "gangq: the database is away\n")


def test_an_error_that_cannot_be_written_leaves_an_exit_code() -> None:
    with open("/dev/full", "wb") as full:
        environ = environment(None, PYTHONUNBUFFERED="")
        assert subprocess.run([*GANGQ, "nosuch"], env=environ, stderr=full, timeout=60).returncode == 1


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        (["ls", ">&-"], 0, "gangq: no such jobs\n"),
        (["board", ">&-"], 1, NONE_WANTED),
        (["--version", ">&-"], 1, NONE_WANTED),
        (["worker", ">&-"], 1, "gangq: standard output is closed; send it to /dev/null\n"),
        (
            ["submit", "a", "-", "<&-"],
            2,
            "Error: standard input has no payload: write one JSON object per line\n",
        ),
        (["nosuch", "2>&-"], 2, ""),
    ],
    ids=["no output", "output", "output of help", "output of a worker", "input", "error"],
)
def test_a_closed_stream_ends_no_command_in_a_traceback(
    untouched: str, closed: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", " ".join([*GANGQ, *closed])],
        env=environment(untouched),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.splitlines(True)[-1:]) == (code, [said] if said else [])


def test_a_letter_that_standard_output_has_no_code_for_is_escaped(dsn: str, client: Client) -> None:
    client.submit(task="snow ☃")
    shown = finished(dsn, "ls", "-o", "task", PYTHONIOENCODING="latin-1:strict", PYTHONUTF8="0")
    assert (shown.returncode, "snow \\u2603" in shown.stdout) == (0, True), shown.stderr


def test_a_terminal_gets_colours_and_a_pipe_none(dsn: str) -> None:
    ok(dsn, "submit", "[red]not markup[/red]")
    plain = ok(dsn, "ls").splitlines()
    assert plain[0].startswith("ID  STATE    TASK")
    assert plain[1].index("pending") == plain[0].index("STATE")
    assert "\x1b" not in "".join(plain)
    coloured = _on_a_terminal(dsn, "ls")
    assert "[red]not markup[/red]" in coloured
    assert "\x1b[1mSTATE" in coloured
    assert "\x1b" not in _on_a_terminal(dsn, "ls", NO_COLOR="1")
    assert "\x1b[31m" not in _on_a_terminal(dsn, "explain", "1", NO_COLOR="1")
    assert "\x1b[31m" in _on_a_terminal(dsn, "explain", "1")


def _on_a_terminal(dsn: str, *args: str, **env: str) -> str:
    ours, theirs = pty.openpty()
    more = {"TERM": "xterm", "COLUMNS": "200", **env}
    with subprocess.Popen([*GANGQ, *args], env=environment(dsn, **more), stdout=theirs) as process:
        os.close(theirs)
        read = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed.
                break
            if not piece:
                break
            read += piece
        os.close(ours)
        assert process.wait() == 0
    return read.decode()


def test_what_others_named_cannot_drive_the_terminal(dsn: str, client: Client) -> None:
    client.submit(task="a\x1b[2Jb\nc")
    text = ok(dsn, "ls")
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2


def test_explain_says_what_holds_a_job(dsn: str) -> None:
    job = ok(dsn, "submit", "a").strip()
    assert ok(dsn, "explain", job).startswith(f"job {job}: no worker is registered")
    assert re.search(r"^no  workers +no worker is registered", ok(dsn, "explain", job, "-v"), re.MULTILINE)
    gates = {gate["gate"]: gate["ok"] for gate in answers(dsn, "explain", job)}
    assert gates["line"] is True
    assert gates["workers"] is False


def test_tagged_lines_are_whole_however_the_pieces_come() -> None:
    def piece(job: int, chunk: str) -> LogRow:
        return LogRow(job, 1, 0, None, chunk)  # type: ignore[arg-type]

    tagger = Tagger({10: 0, 11: 1})
    said = [tagger.add(piece(10, "a")), tagger.add(piece(11, "x\ny")), tagger.add(piece(10, "b\n\nc"))]
    assert said == ["", "[1] x\n", "[0] ab\n[0] \n"]
    assert tagger.rest() == "[0] c\n[1] y\n"
    assert Tagger({10: None}).add(piece(10, "as it is")) == "as it is"


def test_gangq_version_answers_in_a_quarter_of_a_second() -> None:
    # CPU time, the best of five: what a busy machine adds is not ours.
    def cost() -> float:
        before = os.times()
        subprocess.run([*GANGQ, "--version"], stdout=subprocess.DEVNULL, check=True)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    started = time.monotonic()
    assert min(cost() for _ in range(5)) < 0.25
    assert time.monotonic() - started < 20


def test_a_state_that_does_not_exist_is_answered_with_those_that_do(dsn: str) -> None:
    result = gangq(dsn, "ls", "--state", "foo")
    assert result.exit_code == 2
    assert "'foo'" in result.stderr
    assert "'running'" in result.stderr


def test_what_no_worker_could_ever_run_is_refused_at_once(dsn: str, client: Client) -> None:
    taken = gangq(dsn, "submit", "nosuch")
    assert taken.exit_code == 0
    assert "gangq: no worker of queue default is known yet" in taken.stderr
    client.register_worker(name="w", host="h", queues=["default"], tasks=["known"])
    for words in (["nosuch"], ["known", "--gpus", "99"]):
        refused = gangq(dsn, "submit", *words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "--wait-for-hardware" in refused.stderr
        assert gangq(dsn, "submit", *words, "--wait-for-hardware").exit_code == 0

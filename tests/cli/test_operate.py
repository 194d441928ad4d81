"""Workers, ticks, quarantine, the doctor and the private server from the command line."""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cli.cli_process import answers, eventually, finished, gangq, objects, ok, running, worker
from gangq.client import Client
from gangq.embedded import Server

Db = psycopg.Connection[dict[str, Any]]

_APP = """
import gangq
app = gangq.App()

@app.task
def add(ctx, a, b):
    return a + b
"""


def register(client: Client, name: str = "w1", host: str = "h1", **more: Any) -> int:
    devices = [{"uuid": f"GPU-{name}", "index": 0, "vram_mb": 1024, "source": "declared"}]
    return client.register_worker(
        name=name, host=host, queues=["default"], devices=devices, **more
    ).incarnation


def status_of(dsn: str) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for check in objects(gangq(dsn, "doctor", "--json").stdout)}


def test_a_worker_runs_the_tasks_of_a_module_where_it_is_started(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "my_jobs.py").write_text(_APP)
    job = int(ok(dsn, "submit", "add", "a=1", "b=2"))
    with running(
        dsn, tmp_path, "w", "worker", "my_jobs", "--once", "--devices", "2x24GiB", "--label", "a=b"
    ) as w:
        assert w.code() == 0, w.err
        assert "registered" in w.err
        assert w.out == ""
    assert answers(dsn, "show", job)[0]["job"]["result"] == 3
    (found,) = answers(dsn, "workers")
    assert (found["state"], found["labels"]) == ("retired", {"a": "b"})
    assert (found["slots"], found["light"]) == (2, 1)
    assert [d["vram_mb"] for d in answers(dsn, "devices")] == [24576, 24576]


def test_a_worker_that_is_told_to_stop_retires_and_exits_with_0(dsn: str, tmp_path: Path) -> None:
    with worker(dsn, tmp_path, "w1", "--slots", "3", "--light", "2", "--queue", "default", "--json") as w:
        (found,) = answers(dsn, "workers")
        assert (found["slots"], found["light"], found["queues"]) == (3, 2, ["default"])
        w.interrupt(signal.SIGTERM)
        assert w.code() == 0
        assert {"at", "level", "logger", "message"} <= set(objects(w.out)[0])
    assert answers(dsn, "workers")[0]["state"] == "retired"


def test_two_workers_of_one_name_are_refused(dsn: str, client: Client) -> None:
    register(client, "twin")
    done = finished(dsn, "worker", "--name", "twin", "--once", "--devices", "none")
    assert done.returncode == 1
    assert "'twin' is registered from host h1" in done.stderr.splitlines()[-1]


def test_a_module_that_does_not_import_shows_its_own_traceback(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    with running(dsn, tmp_path, "w", "worker", "broken:app") as w:
        assert w.code() == 1
        assert "ZeroDivisionError" in w.err


def test_devices_and_workers_are_quarantined_and_set_free(dsn: str, client: Client) -> None:
    register(client)
    ok(dsn, "quarantine", "--device", "GPU-w1", "--reason", "it smells")
    ok(dsn, "quarantine", "--worker", "w1", "--reason", "so does its host")
    (device,) = answers(dsn, "devices", "--state", "quarantined")
    assert device["reason"] == "it smells"
    assert answers(dsn, "workers")[0]["quarantined"] == "so does its host"
    assert "so does its host" in ok(dsn, "workers")
    checks = status_of(dsn)
    assert checks["devices"]["status"] == checks["workers"]["status"] == "warn"
    assert "gangq unquarantine --device GPU-w1" in checks["devices"]["advice"]
    ok(dsn, "unquarantine", "--device", "GPU-w1")
    ok(dsn, "unquarantine", "--worker", "w1")
    assert answers(dsn, "devices")[0]["state"] == "free"
    assert answers(dsn, "workers")[0]["quarantined"] is None


def test_a_device_is_named_by_its_place_or_by_as_much_of_its_uuid_as_no_other_has(
    dsn: str, client: Client
) -> None:
    for name, host in (("w1", "h1"), ("w2", "h2")):
        register(client, name, host)
    for said in ("h2:0", "GPU-w2", "GPU-w2"[:6]):
        (answer,) = answers(dsn, "quarantine", "--device", said)
        assert answer["device_uuid"] == "GPU-w2"
        ok(dsn, "unquarantine", "--device", said)
    several = gangq(dsn, "quarantine", "--device", "GPU-")
    assert (several.exit_code, "'GPU-' may be GPU-w1 or GPU-w2: write more of it" in several.stderr) == (
        2,
        True,
    )
    for said in ("h3:0", "GPU-w3"):
        none = gangq(dsn, "unquarantine", "--device", said)
        assert (none.exit_code, said in none.stderr) == (2, True)


def test_one_tick_promotes_what_is_due(dsn: str, client: Client, clock: Any) -> None:
    job = int(ok(dsn, "submit", "a", "--due", "10s"))
    clock.advance(20)
    assert "promote" in ok(dsn, "tick", "--force")
    assert client.job(id=job).state == "pending"
    assert "not needed" in ok(dsn, "tick")


def test_the_loop_ticks_when_something_is_due_survives_a_lost_connection_and_stops(
    dsn: str, db: Db, client: Client, tmp_path: Path
) -> None:
    client.configure(tick_s=30)
    with running(dsn, tmp_path, "tick", "tick", "--loop", "--json") as tick:
        tick.until(lambda: tick.out, "the first tick runs")
        listening = "select pid from pg_stat_activity where query = 'listen gangq_tick'"
        listening += " and datname = current_database()"
        (ear,) = db.execute(listening).fetchall()
        before = len(tick.out.splitlines())
        db.execute("select pg_notify('gangq_tick', '')")
        # Half a minute before its own time: it was the notification.
        tick.until(lambda: len(tick.out.splitlines()) > before, "a notification makes it tick")
        db.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid = %s", (ear["pid"],))
        tick.until(lambda: db.execute(listening).fetchall() not in ([], [ear]), "it listens again")
        before = len(tick.out.splitlines())
        db.execute("select pg_notify('gangq_tick', '')")
        tick.until(lambda: len(tick.out.splitlines()) > before, "it still hears")
        tick.interrupt(signal.SIGTERM)
        assert tick.code(5) == 0
        assert all(found["ran"] for found in objects(tick.out))


def test_the_doctor_finds_a_sound_installation_sound(dsn: str, client: Client) -> None:
    register(client)
    ok(dsn, "tick", "--force")
    result = gangq(dsn, "doctor")
    assert result.exit_code == 0, result.stdout
    assert {line.split()[0] for line in result.stdout.splitlines()} == {"ok"}, result.stdout
    wanted = "database server clock notify listen horizon schema code roles tick workers slots cgroups tasks"
    wanted += (
        " schedules claims reboot devices watchdogs sensors trips outbox invariants retention partitions"
    )
    assert list(status_of(dsn)) == wanted.split()


def test_the_doctor_says_where_commands_have_no_control_groups(dsn: str, client: Client) -> None:
    for name, said in (("a", {"cgroups": True}), ("b", {"cgroups": False}), ("c", {"cgroups": "no"})):
        client.register_worker(name=name, host=f"h-{name}", queues=["default"], identity=said)
    assert [(w.name, w.cgroups) for w in client.workers()] == [("a", True), ("b", False), ("c", None)]
    found = status_of(dsn)["cgroups"]
    assert found["status"] == "warn"
    assert "1 of 3 workers" in found["detail"]
    assert found["detail"].endswith("b on h-b")
    assert "Delegate=yes" in found["advice"]


def test_the_doctor_says_whose_devices_lie_idle_because_slots_are_taken(dsn: str, client: Client) -> None:
    devices = [{"uuid": f"GPU-{n}", "index": n, "vram_mb": 1024, "source": "declared"} for n in range(4)]
    for queue in ("a", "b"):
        client.set_queue(name=queue)
    short = client.register_worker(name="short", host="ha", queues=["a"], slots=1, devices=devices[:3])
    whole = client.register_worker(name="whole", host="hb", queues=["b"], devices=devices[3:])
    client.submit(task="t", queue="a", gpus=1)
    client.submit(task="t", queue="b", gpus=1)
    assert status_of(dsn)["slots"]["status"] == "ok"
    client.tick(force=True)
    for full in (short, whole):
        assert client.claim(incarnation=full.incarnation)
    found = status_of(dsn)["slots"]
    assert found["status"] == "warn"
    assert (
        found["detail"]
        == "all slots are taken beside idle devices: short on ha (slots 1 of 1, idle devices 2)"
    )
    assert "--slots" in found["advice"]


def test_the_doctor_names_workers_that_declare_a_task_differently(dsn: str, client: Client) -> None:
    for name, tries in (("one", 3), ("two", 3), ("three", 5)):
        options = {"train": {"max_attempts": tries}, "same": {"max_attempts": 2}}
        client.register_worker(
            name=name, host=name, queues=["default"], tasks=list(options), task_options=options
        )
    found = status_of(dsn)["tasks"]
    assert found["status"] == "warn"
    declared = 'train: one; two {"max_attempts": 3}, three {"max_attempts": 5}'
    assert found["detail"] == f"workers declare 1 task with different options: {declared}"
    assert "run the same code on all workers" in found["advice"]


def test_the_doctor_stops_at_a_missing_schema(empty_dsn: str) -> None:
    result = gangq(empty_dsn, "doctor")
    assert result.exit_code == 1
    assert "gangq migrate" in result.stdout
    assert status_of(empty_dsn)["schema"]["status"] == "fail"


def test_the_doctor_names_who_has_left_a_tick_open(dsn: str, client: Client, clock: Any) -> None:
    ok(dsn, "tick", "--force")
    with psycopg.connect(dsn, application_name="a notebook") as frozen:
        frozen.execute("select * from gangq.tick(true)")
        clock.advance(60)
        found = status_of(dsn)["tick"]
        assert found["status"] == "fail"
        assert f"pid {frozen.info.backend_pid} ({frozen.info.user}, a notebook" in found["detail"]
        assert f"pg_terminate_backend({frozen.info.backend_pid})" in found["advice"]
        frozen.rollback()


def test_the_doctor_finds_workers_without_a_tick_and_silent_ones(
    dsn: str, client: Client, clock: Any
) -> None:
    register(client)
    ok(dsn, "tick", "--force")
    clock.advance(60)
    checks = status_of(dsn)
    assert checks["tick"]["status"] == "fail"
    assert "gangq tick --loop" in checks["tick"]["advice"]
    assert checks["workers"]["status"] == "warn"
    assert "w1 on h1" in checks["workers"]["detail"]
    assert gangq(dsn, "doctor").exit_code == 1


def test_the_doctor_finds_a_worker_that_is_heard_and_takes_nothing_although_work_fits(
    dsn: str, client: Client, clock: Any
) -> None:
    incarnation = register(client)
    job_id = client.submit(task="t")[0]
    assert status_of(dsn)["claims"]["status"] == "ok"
    clock.advance(70)
    client.heartbeat(incarnation=incarnation)
    found = status_of(dsn)["claims"]
    assert found["status"] == "warn"
    assert f"w1 on h1 (job {job_id} has waited for 70 s and fits)" in found["detail"]
    assert "--lease-s" in found["advice"]
    client.set_queue(name="default", paused=True)
    assert status_of(dsn)["claims"]["status"] == "ok"
    client.set_queue(name="default", paused=False)
    client.claim(incarnation=incarnation, request_id=uuid.uuid4())
    assert status_of(dsn)["claims"]["status"] == "ok"


def test_the_doctor_finds_a_worker_that_does_not_claim_what_is_reserved_on_it(
    dsn: str, client: Client, clock: Any
) -> None:
    incarnation = register(client)
    client.submit_gang(task="t", size=1)
    ok(dsn, "tick", "--force")
    for _ in range(8):
        clock.advance(9)
        client.heartbeat(incarnation=incarnation)
        ok(dsn, "tick", "--force")
    assert "it did not claim in time what was reserved on it" in status_of(dsn)["claims"]["detail"]


def test_the_doctor_finds_a_broken_invariant_and_other_code(dsn: str, db: Db) -> None:
    db.execute("update gangq.migrations set checksum = 'other' where name = 'code'")
    db.execute(
        "create or replace view gangq.violations as "
        "select 'a rule'::text as rule, 'gang 1'::text as subject, 'broken'::text as detail"
    )
    checks = status_of(dsn)
    assert checks["code"]["status"] == "warn"
    assert checks["invariants"]["status"] == "fail"
    assert "a rule: gang 1 (broken)" in checks["invariants"]["detail"]


def test_the_doctor_gives_up_on_the_invariants_where_there_is_too_much_to_look_at(
    dsn: str, client: Client, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gangq.cli import doctor

    db.execute(
        "create or replace view gangq.violations as "
        "select 'a rule'::text as rule, 'gang 1'::text as subject, 'broken'::text as detail from pg_sleep(60)"
    )
    monkeypatch.setattr(doctor, "_RULES_S", 0.1)
    checks = status_of(dsn)
    assert (checks["invariants"]["status"], checks["retention"]["status"]) == ("warn", "ok")
    assert "select * from gangq.violations" in checks["invariants"]["advice"]


def test_the_doctor_finds_rows_outside_their_partitions(dsn: str, db: Db) -> None:
    db.execute("insert into gangq.events (at, kind) values ('2001-01-01', 'test')")
    db.execute("analyze gangq.events_rest")
    found = eventually(
        lambda: [c for c in status_of(dsn).values() if c["check"] == "partitions" and c["status"] != "ok"],
        "the server has counted the row",
    )[0]
    assert found["status"] == "warn"
    assert "gangq.events_rest" in found["detail"]


def test_the_doctor_shows_what_is_kept_by_class_and_until_when(dsn: str, db: Db) -> None:
    found = status_of(dsn)["retention"]
    assert found["status"] == "ok"
    assert re.fullmatch(
        r"short \(7 days\): 12 partitions, \d+MiB, from \S+ on, next drop .+; "
        r"long \(30 days\): 15 partitions, \d+MiB, from \S+ on, next drop .+; forever: \d+MiB",
        found["detail"],
    )
    assert [(row["class"], row["part_of"]) for row in found["numbers"]] == [
        ("short", "gang_history_short"),
        ("short", "history_short"),
        ("short", "logs"),
        ("short", "passes"),
        ("long", "attempt_history"),
        ("long", "events"),
        ("long", "evidence"),
        ("long", "gang_history_long"),
        ("long", "history_long"),
        ("forever", "gang_history_forever"),
        ("forever", "history_forever"),
    ]
    assert all(row["bytes"] > 0 and row["missing"] == [] for row in found["numbers"])
    db.execute("select gangq.submit('t', payloads => array_fill('{}'::jsonb, array[2000]))")
    db.execute(
        "insert into gangq.history_forever (job_id, submitted_at, finished_at, shape_id, priority, attempts, "
        "max_attempts, crashes, max_crashes, trips, max_trips, stops, state, retention, submitter, login, payload) "
        "select j.id, j.submitted_at, j.submitted_at, j.shape_id, 0, 0, 1, 0, 1, 0, 1, 0, 'done', 'forever', 'me', "
        "'me', to_jsonb(repeat('x', 500)) from gangq.live_jobs j"
    )
    assert "forever: 2MiB" in status_of(dsn)["retention"]["detail"]


def test_the_doctor_finds_partitions_past_their_time_and_days_without_one(
    dsn: str, db: Db, clock: Any
) -> None:
    clock.advance(8.5 * 86400)
    found = status_of(dsn)["retention"]
    assert (found["status"], "no partition: gangq.gang_history_short of" in found["detail"]) == ("warn", True)
    assert "past its time: gangq.gang_history_short of" in found["detail"]
    assert "history_long" not in found["detail"].partition("past its time")[2]
    ok(dsn, "tick", "--force")
    assert status_of(dsn)["retention"]["status"] == "ok"
    db.execute("drop table gangq.logs_rest")
    found = status_of(dsn)["retention"]
    assert (found["status"], "the default of gangq.logs" in found["detail"]) == ("warn", True)
    db.execute("select gangq.keep_partitions(true)")
    assert status_of(dsn)["retention"]["status"] == "ok"


def test_the_doctor_finds_who_holds_back_vacuum(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gangq.cli import doctor

    monkeypatch.setattr(doctor, "_SNAPSHOT_S", 0.0)
    with psycopg.connect(dsn, application_name="forgotten") as conn:
        conn.execute("begin isolation level repeatable read")
        conn.execute("select 1")
        found = status_of(dsn)["horizon"]
    assert found["status"] == "warn"
    assert "forgotten" in found["detail"]


def test_the_doctor_finds_a_login_without_a_role(dsn: str, db: Db, server: Server) -> None:
    db.execute("create role nobody_yet login")
    try:
        checks = status_of(dsn.replace("postgres@", "nobody_yet@"))
        assert checks["schema"]["status"] == "fail"
        assert "grant" in checks["schema"]["detail"]
        result = gangq(dsn.replace("postgres@", "nobody_yet@"), "ls")
        assert result.exit_code == 1
        assert "grant" in result.stderr
    finally:
        db.execute("drop role nobody_yet")


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An environment in which the private server is one of its own, not started yet."""
    directory = tmp_path_factory.mktemp("private")
    if os.geteuid() == 0:
        for parent in (directory, *directory.parents[:-2]):
            parent.chmod(0o711)
    found = {"GANGQ_DATA_DIR": str(directory / "pg")}
    yield found
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGQ_DATA_DIR", found["GANGQ_DATA_DIR"])
        Server().stop("immediate")


def test_a_command_without_a_database_says_how_to_name_one(private: dict[str, str]) -> None:
    for words in (
        ["submit", "a"],
        ["ls"],
        ["doctor"],
        ["migrate"],
        ["db", "psql"],
        ["worker", "--no-supervisor"],
    ):
        result = gangq(None, *words, **private)
        assert result.exit_code == 2, (words, result.stdout, result.stderr)
        assert "no database is named: set GANGQ_DSN, or pass --dsn" in result.stderr
    assert answers_down(private)["running"] is False


def test_the_private_server_is_started_and_migrated_when_it_is_asked_for(private: dict[str, str]) -> None:
    result = gangq(None, "submit", "a", "--embedded", **private)
    assert (result.exit_code, result.stdout) == (0, "1\n")
    assert "gangq db stop" in result.stderr.splitlines()[0]
    assert "applied migration" in result.stderr
    again = gangq("embedded", "ls", **private)
    assert (again.exit_code, again.stderr) == (0, "")
    address = answers("embedded", "db", "dsn", **private)[0]
    assert address["private"] is True
    assert len(answers(address["dsn"], "ls")) == 1


def test_db_starts_stops_and_asks_the_private_server(private: dict[str, str]) -> None:
    assert answers(None, "db", "start", **private)[0]["running"] is True
    status = answers(None, "db", "status", **private)[0]
    assert status["data_dir"] == private["GANGQ_DATA_DIR"]
    done = finished("embedded", "db", "psql", "--", "-Atc", "select 40 + 2", **private)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    done = finished("embedded", "db", "psql", "template1", "-Atc", "select current_database()", **private)
    assert done.stdout == "template1\n", done.stderr
    done = finished(status["dsn"], "db", "psql", "-Atc", "select count(*) from gangq.queues", **private)
    assert done.stdout == "1\n", done.stderr
    assert answers(None, "db", "stop", **private)[0]["was_running"] is True
    assert answers_down(private)["running"] is False


def answers_down(private: dict[str, str]) -> dict[str, Any]:
    result = gangq(None, "db", "status", "--json", **private)
    assert result.exit_code == 3
    return objects(result.stdout)[0]

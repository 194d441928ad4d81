"""What a job learns of its worker's database, as a user that is not root; and what that user can still prove.

Needs root, which becomes that user. CI runs as root (``.ci/run``); elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from gangq.client import Client
from gangq.proc import procfs
from process import snoop
from process.supervised import command_line
from process.unprivileged import ALSO, GANGQ, SECRET, UnprivilegedWorkers
from worker.worker_process import eventually, until_state


def snooping(secret: str, answer: Path) -> list[str]:
    return [sys.executable, "-I", "-S", snoop.__file__, secret[::-1], str(answer)]


def names(found: list[list[Any]]) -> set[str]:
    return {str(name).partition(":")[0] for _, name in found}


def test_a_job_finds_the_password_nowhere_in_worker_supervisor_or_guardian(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    unprivileged.worker("w1", "--light", "2")
    decoy = unprivileged.run("sleep", "600", DECOY="S3CRET-of-a-decoy", GANGQ_DSN="", PGPASSWORD="")
    answers = [unprivileged.directory / f"answer{n}" for n in range(4)]

    def seen_by(secret: str, answer: Path) -> dict[str, Any]:
        job = client.submit(task="command", payloads=[{"argv": snooping(secret, answer)}])[0]
        return unprivileged.found_by(job, answer)

    seen = seen_by("S3CRET-of-a-decoy", answers[0])
    assert [pid for pid, _, place in seen["found"] if place == "environ"] == [decoy.pid], "it can look"
    for secret, answer in ((SECRET, answers[1]), (ALSO, answers[2])):
        seen = seen_by(secret, answer)
        assert seen["found"] == []
        assert {"gangq", "gangq-super"} <= names(seen["closed"])
        assert not {"gangq", "gangq-super"} & names(seen["open"])
    isolated = client.submit(task="isolated", payloads=[{"argv": snooping(SECRET, answers[3])}])[0]
    seen = unprivileged.found_by(isolated, answers[3])
    assert seen["found"] == []
    assert client.job(id=isolated).result == []


def test_an_inline_handler_is_the_applications_own_code_and_finds_the_address(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    unprivileged.worker("w1")
    job = client.submit(task="inline")[0]
    assert until_state(client, job, "done").result == 1


@pytest.mark.parametrize("command", ["systemd report-death --name w1 --wait", "tick --loop", "bounce --loop"])
def test_what_runs_beside_workers_as_their_user_keeps_the_address_to_itself(
    unprivileged: UnprivilegedWorkers, command: str
) -> None:
    """The first as long as the database is away; the others for ever, where everything runs as one user."""
    away = make_conninfo(unprivileged.dsn, host=str(unprivileged.directory / "nowhere"))
    process = unprivileged.run(
        GANGQ, *command.split(), GANGQ_DSN=away if "--wait" in command else unprivileged.dsn
    )

    def closed() -> bool:
        """All of this is root's then."""
        begun = b"python" in command_line(process.pid).partition(b"\0")[0]
        return begun and os.stat(f"/proc/{process.pid}/environ").st_uid == 0

    eventually(closed, f"it is closed\n{unprivileged.log}", 15)


def test_the_address_given_on_the_command_line_does_not_stay_there(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    unprivileged.worker("w1", "--dsn", unprivileged.dsn, GANGQ_DSN="")
    answer = unprivileged.directory / "answer"
    job = client.submit(task="command", payloads=[{"argv": snooping(SECRET, answer)}])[0]
    assert unprivileged.found_by(job, answer)["found"] == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["descriptor", "credential", "environment"])
def test_a_job_that_watches_other_workers_start_and_die_finds_the_password_in_nothing_but_an_environment(
    unprivileged: UnprivilegedWorkers, client: Client, way: str
) -> None:
    given = unprivileged.directory / "given"
    given.mkdir()
    (given / "dsn").write_text(unprivileged.dsn)
    # Root's, as what StandardInput=file: names in a unit; a credential is the unit's own user's.
    (given / "dsn").chmod(0o644 if way == "credential" else 0o600)
    environ: dict[str, Any] = {"GANGQ_DSN": "", "PGPASSWORD": ""}
    if way == "descriptor":
        environ |= {"stdin": given / "dsn", "GANGQ_DSN_FD": "0"}
    elif way == "credential":
        environ |= {"CREDENTIALS_DIRECTORY": str(given)}
    else:
        environ = {}
    unprivileged.worker("a", stdin=given / "dsn", GANGQ_DSN="", PGPASSWORD="", GANGQ_DSN_FD="0")
    answer, enough = unprivileged.directory / "answer", unprivileged.directory / "enough"
    job = client.submit(task="command", payloads=[{"argv": [*snooping(SECRET, answer), str(enough)]}])[0]
    until_state(client, job, "running")
    eventually(
        lambda: any(b"snoop.py" in command_line(e.pid) for e in unprivileged.processes("python")), "it looks"
    )
    decoy = unprivileged.run("sleep", "2", PGPASSWORD=SECRET, GANGQ_DSN="")
    for name in ("b", "c"):
        before = {entry.pid for entry in unprivileged.processes("gangq:")}
        unprivileged.worker(name, "--queue", "other", **environ)
        (born,) = [e for e in unprivileged.processes("gangq:") if e.pid not in before]
    reports = unprivileged.log.count("worker_ended")
    procfs.strike([born])
    eventually(lambda: unprivileged.log.count("worker_ended") > reports, "its supervisor has reported it", 20)
    assert "report_skipped" not in unprivileged.log
    decoy.wait(10)
    enough.touch()
    found = unprivileged.found_by(job, answer)["found"]
    print(f"---- found: {json.dumps(found, indent=1)}")
    assert found.pop(f"environ of sleep {decoy.pid}") > 1, "it can look"
    if way == "environment":
        # From the start of its interpreter until its first line.
        found = {where: s for where, s in found.items() if not where.startswith("environ of ")}
    assert found == {}


@pytest.mark.slow
def test_a_successor_proves_its_predecessor_dead_beside_workers_whose_memory_it_cannot_read(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    victim = unprivileged.worker("w1")
    killed = [entry.pid for entry in unprivileged.processes("gangq")]
    unprivileged.worker("w2", "--queue", "other")
    job = client.submit(task="command", payloads=[{"argv": ["sleep", "600"]}])[0]
    until_state(client, job, "running")
    eventually(lambda: unprivileged.processes("sleep"), "the command runs")
    guardians = [e for e in unprivileged.processes("gangq:") if b"guardian.py" in command_line(e.pid)]
    assert len(guardians) == 1
    (at_work,) = unprivileged.processes("sleep")
    # The supervisor, the worker and the guardian at once: nobody is left to end the command or to report.
    procfs.strike([e for pid in killed if (e := procfs.stat(pid))] + guardians)
    victim.wait(10)
    unprivileged.worker("w1")
    assert "predecessor_reported_dead" in unprivileged.log
    assert procfs.same(at_work) is None
    assert client.job(id=job).state != "failed"


def mark_of(db: psycopg.Connection[dict[str, Any]], worker: str) -> str:
    """Of its latest incarnation."""
    row = db.execute(
        "select identity ->> 'mark' as mark from gangq.incarnations where name = %s order by id desc limit 1",
        [worker],
    ).fetchone()
    assert row is not None
    return str(row["mark"])


@pytest.mark.slow
def test_what_a_handler_forked_is_found_although_its_memory_cannot_be_read(
    unprivileged: UnprivilegedWorkers, client: Client, db: psycopg.Connection[dict[str, Any]]
) -> None:
    victim = unprivileged.worker("w1")
    unprivileged.worker("w2", "--queue", "other")
    ready = unprivileged.directory / "ready"
    job = client.submit(task="forks", payloads=[{"ready": str(ready)}])[0]
    eventually(ready.exists, "the handler has forked")
    forked = unprivileged.processes(procfs.work_name(mark_of(db, "w1")))
    assert len(forked) == 2
    # Not through its supervisor: that would end the whole tree.
    procfs.strike([entry for entry in unprivileged.processes("gangq-super") if entry.pid == victim.pid])
    victim.wait(10)
    unprivileged.worker("w1")
    assert all(procfs.same(entry) is None for entry in forked)
    assert until_state(client, job, "running", "scheduled", "pending").crashes == 1


@pytest.mark.slow
def test_a_frozen_worker_is_found_killed_and_its_stacks_are_kept(
    unprivileged: UnprivilegedWorkers, client: Client
) -> None:
    worker = unprivileged.worker("w1", "--silence-s", "2")
    job = client.submit(task="freezes", payloads=[{"ready": str(unprivileged.directory / "ready")}])[0]
    assert worker.wait(40) == 80
    (trip,) = client.trips(job_id=job)
    assert "in freezes" in json.dumps(trip.evidence)

"""Batches on the command line: gangq submit --name, run --array, b12 as an id, ls batches, retry --failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import answers, finished, gangq, ok, worker
from gangq.client import Client
from gangq.embedded import Server


@pytest.fixture(scope="module")
def served(server: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with a command worker of four slots and four light ones."""
    dsn = server.create_database("cli_batches", template=template)
    with worker(dsn, tmp_path_factory.mktemp("worker"), "w1", "--slots", "4", "--light", "4", "--host", "h1"):
        yield dsn
    server.drop_database("cli_batches")


def fail_all(client: Client) -> None:
    incarnation = client.register_worker(name="w", host="h", queues=["default"], slots=9, light=9).incarnation
    for claim in client.claim(incarnation=incarnation, max_jobs=9):
        client.fail(
            job_id=claim.job_id, token=claim.token, error={"type": "E", "message": "oops"}, retryable=False
        )


def test_jobs_submitted_with_a_name_are_a_batch(dsn: str, client: Client) -> None:
    batch = ok(
        dsn, "submit", "train", "--name", "sweep", "--tag", "lr", "--count", "3", "--at-most", "2"
    ).strip()
    row = client.batch(id=int(batch.removeprefix("b")))
    assert batch == f"b{row.id}"
    assert (row.name, row.tags, row.size, row.at_most) == ("sweep", ["lr"], 3, 2)
    (told,) = answers(dsn, "submit", "train", "--name", "other", "--count", "2")
    assert (told["batch"], len(told["job_ids"])) == (f"b{told['job_ids'][0]}", 2)
    after = int(ok(dsn, "submit", "report", "--after", batch))
    assert client.job(id=after).state == "waiting"
    assert [r["id"] for r in answers(dsn, "ls", "batches", "--tag", "lr")] == [row.id]
    assert {r["batch_id"] for r in answers(dsn, "ls", "--name", "sweep")} == {row.id}
    assert len(answers(dsn, "ls", "--batch", batch)) == 3
    assert len(answers(dsn, "ls", "batches", "--user", row.submitter)) == 2
    assert answers(dsn, "ls", "--user", "gangq_viewer") == []
    assert "0/3" in ok(dsn, "ls", "batches")
    assert f"{batch}, index 1" in ok(dsn, "show", row.id + 1)


def test_a_batch_is_shown_retried_and_cancelled_by_its_id(dsn: str, client: Client) -> None:
    batch = ok(dsn, "submit", "train", "--name", "sweep", "--count", "3").strip()
    fail_all(client)
    shown = ok(dsn, "show", batch)
    assert "sweep" in shown
    assert shown.count("E: oops") == 3
    (told,) = answers(dsn, "show", batch)
    assert (told["batch"]["failed"], [job["array_index"] for job in told["failed"]]) == (3, [2, 1, 0])
    assert [row["state"] for row in answers(dsn, "retry", batch)] == ["pending"] * 3
    assert answers(dsn, "retry", batch) == []
    assert len(answers(dsn, "priority", "7", batch)) == 3
    assert [row["state"] for row in answers(dsn, "cancel", batch, "--reason", "enough")] == ["cancelled"] * 3
    assert answers(dsn, "cancel", batch) == []
    assert client.batch(id=int(batch[1:])).state == "cancelled"
    missing = gangq(dsn, "cancel", "b999999")
    assert (missing.exit_code != 0, "batch b999999 does not exist" in missing.stderr) == (True, True)


def test_what_has_failed_is_retried_by_what_is_asked_for(dsn: str, client: Client) -> None:
    ok(dsn, "submit", "train", "--name", "sweep", "--tag", "lr", "--count", "2")
    alone = int(ok(dsn, "submit", "render"))
    fail_all(client)

    def would(*filters: str) -> int:
        found = answers(dsn, "retry", "--failed", "--dry-run", *filters)
        assert {row["state"] for row in found} <= {"failed"}
        return len(found)

    assert (would(), would("--task", "render"), would("--tag", "lr"), would("--name", "sweep")) == (
        3,
        1,
        2,
        2,
    )
    assert (would("--since", "2h"), would("--name", "sweep", "--task", "render")) == (3, 0)
    assert client.job(id=alone).state == "failed"
    (changed,) = answers(dsn, "retry", "--failed", "--task", "render", "--since", "2h")
    assert (changed["job_id"], client.job(id=alone).state) == (alone, "pending")
    assert would() == 2


def test_an_array_is_run_as_slurm_does(served: str, tmp_path: Path) -> None:
    done = finished(served, "run", "--array", "0-2%2", "--", "sh", "-c", "echo index $GANGQ_ARRAY_INDEX")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] index 0", "[1] index 1", "[2] index 2"]
    assert "of jobs" in done.stderr
    (row,) = answers(served, "ls", "batches", "--name", "sh")
    assert (row["size"], row["at_most"], row["state"]) == (3, 2, "done")
    script = "test $GANGQ_ARRAY_INDEX != 1 || exit 7"
    failed = finished(served, "run", "--array", "0-2", "--name", "checks", "--shell", "--", script)
    assert failed.returncode == 7, failed.stderr
    assert "failed: index 1" in failed.stderr
    assert sorted(ok(served, "logs", f"b{row['id']}").splitlines()) == [
        "[0] index 0",
        "[1] index 1",
        "[2] index 2",
    ]
    left = finished(served, "run", "-d", "--array", "0-1", "--", "true")
    assert left.stdout.startswith("b")


@pytest.mark.parametrize(
    ("array", "indexes", "at_most"),
    [
        ("5-8%2", [5, 6, 7, 8], 2),
        ("7,1,3", [7, 1, 3], None),
        ("0-20:10", [0, 10, 20], None),
        ("4,10-12", [4, 10, 11, 12], None),
        ("9", [9], None),
    ],
)
def test_an_array_has_the_indexes_that_sbatch_would_give_it(
    dsn: str, client: Client, array: str, indexes: list[int], at_most: int | None
) -> None:
    batch = int(ok(dsn, "run", "-d", "--array", array, "--", "true").strip()[1:])
    assert [job.array_index for job in sorted(client.jobs(batch_id=batch))] == indexes
    assert client.batch(id=batch).at_most == at_most


@pytest.mark.parametrize("command", [("submit", "t", "--count"), ("run", "-d", "--array")])
def test_so_many_jobs_that_it_takes_long_are_announced(
    dsn: str, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr("gangq.cli.work._MANY_JOBS", 3)
    for jobs, said in ((2, "gangq: no worker"), (3, "gangq: submitting 3 jobs\n")):
        how_many = [f"0-{jobs - 1}", "--", "true"] if command[0] == "run" else [jobs]
        result = gangq(dsn, *command, *how_many)
        assert result.exit_code == 0, result.stderr
        assert result.stderr.startswith(said)


def test_a_command_finds_the_index_that_was_asked_for(served: str) -> None:
    done = finished(served, "run", "--array", "5,11", "--", "sh", "-c", "echo index $GANGQ_ARRAY_INDEX")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[11] index 11", "[5] index 5"]


def test_events_of_a_batch_are_those_of_its_jobs(dsn: str, client: Client) -> None:
    batch = ok(dsn, "submit", "train", "--name", "sweep", "--count", "2").strip()
    other = ok(dsn, "submit", "train").strip()
    assert answers(dsn, "events", batch) == []
    for id in (batch, other):
        ok(dsn, "cancel", id)
    first = int(batch[1:])
    assert [(e["kind"], e["job_id"]) for e in answers(dsn, "events", batch)] == [
        ("cancel", first),
        ("cancel", first + 1),
    ]
    assert [event.job_id for event in client.events(batch_id=first, limit=1)] == [first]
    missing = gangq(dsn, "events", "b999999")
    assert (missing.exit_code != 0, "batch b999999 does not exist" in missing.stderr) == (True, True)


def test_explain_of_a_batch_is_that_of_its_first_job_that_waits(dsn: str, client: Client) -> None:
    batch = ok(dsn, "submit", "train", "--name", "sweep", "--count", "3").strip()
    jobs = [job.id for job in client.jobs(name="sweep")][::-1]
    client.cancel(job_ids=[jobs[0]])
    assert answers(dsn, "explain", batch) == answers(dsn, "explain", jobs[1])
    client.cancel(job_ids=jobs[1:])
    assert answers(dsn, "explain", batch) == answers(dsn, "explain", jobs[2])
    worker = client.register_worker(name="w1", host="h1", queues=["default"]).incarnation
    batch = ok(dsn, "submit", "train", "--name", "one", "--count", "1").strip()
    (claim,) = client.claim(incarnation=worker)
    assert ok(dsn, "explain", batch).startswith(f"job {claim.job_id}: runs for ")
    assert gangq(dsn, "explain", "b99999").exit_code == 2


def test_a_command_of_no_array_has_no_index(served: str) -> None:
    done = finished(served, "run", "--", "sh", "-c", "echo [$GANGQ_ARRAY_INDEX]")
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["submit", "t", "--at-most", "2"], "at_most is given without name"),
        (["submit", "t", "--gang", "2", "--tag", "x"], "a gang is no batch"),
        (["run", "--array", "0-9%0", "--", "true"], "is no array"),
        (["run", "--array", "0-9%", "--", "true"], "is no array"),
        (["run", "--array", "1,,2", "--", "true"], "is no array"),
        (["run", "--array", "-1-2", "--", "true"], "is no array"),
        (["run", "--array", "0-9:0", "--", "true"], "is no array"),
        (["run", "--array", "0-1000000", "--", "true"], "numbers have six digits at most"),
        (["run", "--array", "9-1", "--", "true"], "9-1 ends before it begins"),
        (["run", "--array", "1-5,3", "--", "true"], "an index twice"),
        (["run", "--array", "0-999999," * 9000 + "0", "--", "true"], "an index twice"),
        (["run", "--array", "0-9", "--gang", "2", "--", "true"], "exclude each other"),
        (["run", "--array", "0-9", "--shell", "--", " "], "the command is empty"),
        (["run", "--array", "0-9%2", "--at-most", "2", "--", "true"], "say the same"),
        (["retry"], "name at least one"),
        (["retry", "--dry-run", "5"], "add --failed"),
        (["retry", "--failed", "5"], "--failed stands in place of ids"),
        (["ls", "gangs", "--tag", "x"], "select jobs"),
        (["ls", "batches", "--state", "done"], "select jobs"),
        (["events", "x5"], "a job is written 12, a gang g12, a batch b12"),
        (["ls", "--batch", "g5"], "a batch is written b12"),
    ],
)
def test_what_makes_no_sense_is_refused(dsn: str, words: list[Any], said: str) -> None:
    refused = gangq(dsn, *words)
    assert refused.exit_code == 2
    assert said in refused.stderr

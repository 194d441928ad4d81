"""gangq wait: jobs, gangs and batches, and how it exits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cli.cli_process import answers, finished, gangq, ok, worker
from gangq.client import Client
from gangq.embedded import Server


@pytest.fixture(scope="module")
def served(server: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with a command worker of two slots."""
    dsn = server.create_database("cli_wait", template=template)
    with worker(dsn, tmp_path_factory.mktemp("worker"), "w1", "--slots", "2", "--address", "127.0.0.1"):
        yield dsn
    server.drop_database("cli_wait")


def begin(dsn: str, *words: str) -> str:
    return finished(dsn, "run", "--detach", *words).stdout.strip()


def test_it_waits_for_all_of_them_and_prints_each(served: str) -> None:
    job = begin(served, "--", "sleep", "0.3")
    gang = begin(served, "--gang", "2", "--", "true")
    batch = begin(served, "--array", "0-2", "--", "true")
    waited = gangq(served, "wait", job, gang, batch, job)
    assert waited.exit_code == 0, waited.stderr
    assert sorted(waited.stdout.splitlines()) == sorted(f"{id} done" for id in (job, gang, batch))
    assert ok(served, "wait", gang).strip() == f"{gang} done"


def test_it_exits_as_the_first_named_that_is_not_done(served: str) -> None:
    good = begin(served, "--", "true")
    bad = begin(served, "--array", "0-1", "--shell", "--", "test $GANGQ_ARRAY_INDEX = 0 || exit 7")
    missing = begin(served, "--", "there-is-no-such-program")
    assert gangq(served, "wait", good, bad, missing).exit_code == 7
    waited = gangq(served, "wait", "--json", good, missing, bad)
    assert waited.exit_code == 127
    failed = gangq(served, "wait", bad)
    assert failed.exit_code == 7
    assert f"{bad} failed: " in failed.stdout


def test_a_cancelled_one_exits_as_an_interrupted_run(dsn: str, client: Client) -> None:
    (job,) = client.submit(task="a")
    client.cancel(job_ids=[job])
    waited = gangq(dsn, "wait", job)
    assert (waited.exit_code, waited.stdout) == (130, f"{job} cancelled\n")


def test_when_the_time_is_up_it_says_what_is_left_and_leaves_it_alone(dsn: str, client: Client) -> None:
    (job,) = client.submit(task="a")
    waited = gangq(dsn, "wait", job, "--timeout", "0.1s")
    assert waited.exit_code == 124
    assert f"job {job} has not ended within 0.1 s; job {job} is pending" in waited.stderr
    assert client.job(id=job).state == "pending"


def test_what_does_not_exist_or_has_no_database_is_refused(dsn: str) -> None:
    for words, said in (
        (["wait", "g99999"], "gang g99999 does not exist"),
        (["wait"], "name at least one"),
        (["wait", "x"], "is no id"),
    ):
        refused = gangq(dsn, *words)
        assert refused.exit_code == 2
        assert said in refused.stderr
    assert "a job cannot wait for another" in gangq(None, "wait", "1", GANGQ_SOCKET="/none").stderr
    assert answers(dsn, "ls") == []

"""gangq submit --unique: once, and what is said of what was there."""

from __future__ import annotations

from typing import Any

import pytest

from cli.cli_process import answers, gangq, ok
from gangq.client import Client


def test_the_second_submission_says_what_is_there_and_succeeds(dsn: str, client: Client) -> None:
    first = ok(dsn, "submit", "train", "n=1", "--unique", "ds-7")
    again = gangq(dsn, "submit", "train", "n=2", "--unique", "ds-7")
    assert (again.exit_code, again.stdout) == (0, first)
    assert f"already there: job {first.strip()} (pending)" in again.stderr
    worker = client.register_worker(name="w", host="h", queues=["default"]).incarnation
    client.claim(incarnation=worker)
    assert "(running)" in gangq(dsn, "submit", "train", "--unique", "ds-7", "--replace").stderr
    (told,) = answers(dsn, "submit", "train", "--unique", "ds-7")
    assert told == {"job_ids": [int(first)], "existed": True, "replaced": False}
    assert ok(dsn, "submit", "train", "--unique", "ds-8") != first


def test_what_waits_gets_the_new_payload(dsn: str, client: Client) -> None:
    job = int(ok(dsn, "submit", "train", "n=1", "--unique", "k", "--unique-for", "1h"))
    again = gangq(dsn, "submit", "train", "n=2", "--unique", "k", "--replace", "--due", "1h")
    assert f"already there: job {job} (scheduled), now with this payload" in again.stderr
    assert client.job(id=job).payload == {"n": 2}
    client.cancel(job_ids=[job])
    assert f"job {job} (cancelled)" in gangq(dsn, "submit", "train", "--unique", "k").stderr


def test_a_gang_is_submitted_once(dsn: str) -> None:
    first = ok(dsn, "submit", "train", "--gang", "2", "--unique", "k")
    again = gangq(dsn, "submit", "train", "--gang", "2", "--unique", "k")
    assert (again.exit_code, again.stdout) == (0, first)
    assert f"already there: gang {first.strip()} (blocked)" in again.stderr
    (told,) = answers(dsn, "submit", "train", "--gang", "2", "--unique", "k")
    assert (told["gang"], told["existed"], len(told["job_ids"])) == (first.strip(), True, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--unique-for", "1h"], "give --unique KEY"),
        (["--replace"], "give --unique KEY"),
        (["--unique", "k", "--count", "2"], "--unique stands for one job, and this submits 2"),
        (["--unique", "k", "--gang", "2", "--replace"], "--replace is for single jobs"),
        (["--unique", ""], "unique_key"),
    ],
)
def test_what_makes_no_sense_is_refused(dsn: str, words: list[Any], said: str) -> None:
    refused = gangq(dsn, "submit", "train", *words)
    assert refused.exit_code == 2
    assert said in refused.stderr

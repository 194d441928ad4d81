"""GPU hours, and the attempts of a job, on the command line."""

from __future__ import annotations

from typing import Any

import psycopg

from cli.cli_process import answers, gangq, ok
from gangq.client import Client

Db = psycopg.Connection[dict[str, Any]]


def ran(client: Client, db: Db, hours: float, *, task: str, fails: bool = False) -> int:
    """A job that has held a device for so long."""
    devices = [{"uuid": f"GPU-{task}", "index": 0, "vram_mb": 1024, "source": "declared"}]
    row = client.register_worker(name=task, host="alpha", queues=["default"], devices=devices)
    (job,) = client.submit(task=task, gpus=1, max_attempts=1)
    client.call("open_place", incarnation=row.incarnation, job_id=job)
    (claim,) = client.claim(incarnation=row.incarnation)
    db.execute(
        "update gangq.live_jobs set claimed_at = claimed_at - make_interval(secs => %s) where id = %s",
        (3600 * hours, job),
    )
    if fails:
        client.fail(job_id=job, token=claim.token)
    else:
        client.complete(job_ids=[job], tokens=[claim.token])
    client.retire_worker(incarnation=row.incarnation)
    return job


def test_hours_are_listed_by_what_was_asked_for(dsn: str, client: Client, db: Db) -> None:
    assert gangq(dsn, "usage").stdout == ""
    ran(client, db, 3, task="train")
    ran(client, db, 1, task="render", fails=True)
    lines = [line.split() for line in ok(dsn, "usage", "--by", "task,queue").splitlines()]
    assert lines == [
        ["TASK", "QUEUE", "ATTEMPTS", "GPU", "HOURS", "WASTED", "DISPLACED"],
        ["train", "default", "1", "3.00", "0", "0"],
        ["render", "default", "1", "1.00", "1.00", "(100%)", "0"],
    ]
    (whole,) = answers(dsn, "usage")
    assert (whole["task"], whole["queue"], round(whole["gpu_hours"])) == (None, None, 4)
    (recent,) = answers(dsn, "usage", "--since", "30m")
    assert round(recent["gpu_hours"], 1) == 1.0
    refused = gangq(dsn, "usage", "--by", "host")
    assert (refused.exit_code, "user, queue, task" in refused.stderr) == (2, True)


def test_a_job_is_shown_with_its_attempts(dsn: str, client: Client, db: Db) -> None:
    job = ran(client, db, 2, task="train", fails=True)
    shown = ok(dsn, "show", job)
    (line,) = [line for line in shown.splitlines() if "GPU-train" in line]
    assert line.split()[-4:] == ["fail", "alpha", "train", "GPU-train"]
    assert "2h00m" in line
    (answer,) = answers(dsn, "show", job)
    assert [a["cause"] for a in answer["attempts"]] == ["fail"]

"""What a worker logs about an attempt says which: job, gang, epoch, rank, worker."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import Running, eventually, running
from gangq.client import Client

FIELDS = {"job", "gang", "epoch", "rank", "worker"}
OF_ATTEMPTS = (
    "gangq.worker.gangs",
    "gangq.worker.child",
    "gangq.worker.command",
    "gangq.worker.dispatch",
    "gangq.worker.inline",
    "gangq.worker.jobs",
    "gangq.worker.reporter",
    "gangq.worker.watching",
    "gangq.watchdogs.",
    "gangq.task.",
    "tasks",
)
"""Loggers of which each line is about one attempt, where a worker runs nothing but members of gangs."""

TASKS = """
import logging, time
import gangq
from gangq import App
app = App()

@app.task
def member(ctx):
    ctx.log.info("said by a handler")
    logging.getLogger("tasks").warning("said by a module")

@app.task
def stalls(ctx):
    time.sleep(3600)
"""


def lines_of(worker: Running, form: str) -> list[dict[str, Any]]:
    """The lines of its log; of text the fields behind the message."""
    if form == "--json":
        return [one for line in worker.out.splitlines() if "logger" in (one := json.loads(line))]
    heads = [(re.match(r"\d{4}-\S+ \S+ [A-Z]+ (\S+) (\S+)", line), line) for line in worker.err.splitlines()]
    return [{"logger": head[1], "message": head[2], **fields_of(line)} for head, line in heads if head]


def fields_of(line: str) -> dict[str, Any]:
    """What a line of text says behind its message: key=JSON."""
    found: dict[str, Any] = {}
    at = 0
    while key := re.compile(r" ([a-z_]+)=").search(line, at):
        found[key[1]], at = json.JSONDecoder().raw_decode(line, key.end())
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


@pytest.mark.parametrize("slots", ["1", "2"])
@pytest.mark.parametrize("form", ["--json", "--no-json"])
def test_every_line_about_an_attempt_says_which_and_of_which_worker(
    dsn: str, client: Client, place: Path, form: str, slots: str
) -> None:
    # With a device and one slot the handlers run in the main thread, with two in processes of their own.
    client.configure(grace_s=1)
    devices = "1x1GiB" if slots == "1" else "none"
    args = ["tasks:app", "--slots", slots, "--devices", devices, "--log-level", "debug"]
    args += [form] if form == "--json" else []
    with (
        running(dsn, place, "w1", "worker", *args, "--name", "w1") as one,
        running(dsn, place, "w2", "worker", *args, "--name", "w2") as two,
    ):
        workers = {"w1": one, "w2": two}
        eventually(lambda: len(client.workers()) == 2, "both are registered")
        gangs = [
            client.submit_gang(task="member", size=2),
            client.submit_gang(task="command", size=2, payload={"argv": ["true"]}),
            client.submit_gang(task="command", size=2, payload={"argv": ["false"]}, max_attempts=1),
        ]
        jobs = [job for gang in gangs for job in gang.job_ids]
        eventually(
            lambda: set(client.job_states(ids=jobs).values()) <= {"done", "failed", "cancelled"},
            "all have ended",
            60,
        )
        if slots == "2":
            gangs.append(client.submit_gang(task="stalls", size=2, budget_s=1))
            eventually(
                lambda: any("command_tripped" in worker.out + worker.err for worker in workers.values()),
                "a watchdog trips",
            )
        for worker in workers.values():
            worker.process.terminate()
        for worker in workers.values():
            worker.code()
    messages = set()
    for name, worker in workers.items():
        for line in lines_of(worker, form):
            assert line["worker"] == name, line
            if not line["logger"].startswith(OF_ATTEMPTS):
                continue
            assert line.keys() >= FIELDS, line
            (gang,) = [gang for gang in gangs if line["job"] in gang.job_ids]
            assert (line["gang"], line["rank"]) == (gang.gang_id, gang.job_ids.index(line["job"])), line
            messages.add(line["message"].split()[0])
    more = {"said"} if slots == "1" else {"trip", "command_tripped"}
    assert messages >= {"command_started", "command_gone", "job_begins", "job_failed"} | more

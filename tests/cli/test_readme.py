"""What the README says of codes, numbers, commands and SQL is so."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from gangq.cli import main
from gangq.client import Client
from gangq.watchdogs.codes import NOTIFY_CLASSES, ExitCode

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
HANGS = README.partition("## When a job hangs\n")[2].partition("\n## ")[0]


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    lines = [line for line in HANGS.splitlines() if re.match(r"\| [0-9]+ \|", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [
        [f"{code:d}", code.word, code.meaning, "yes" if code.restart else "never"] for code in ExitCode
    ]


def test_the_defaults_it_names_are_those_of_a_fresh_installation(
    db: psycopg.Connection[dict[str, Any]],
) -> None:
    found = db.execute("select * from gangq.settings").fetchone()
    assert found is not None
    named = {
        "budget_gpu_s": "8100 s with GPUs",
        "budget_s": "2100 s without",
        "stall_timeout_s": "120 s, or what was learned",
        "health_window_s": "300 s, after",
        "load_grace_s": "1200 s to load",
        "gang_stall_s": "makes a step | 1200 s",
    }
    for setting, said in named.items():
        assert said in HANGS
        assert f"{found[setting]:g} s" in said
    assert (found["notify_only"], found["brake_share"], found["device_trips"]) == ([], pytest.approx(0.2), 3)
    assert found["bounces_per_hour"] == 4
    assert found["warm_s"] == 10


def test_every_command_it_names_exists() -> None:
    context = click.Context(main)
    named = {tuple(found) for found in re.findall(r"gangq ([a-z-]+)(?: ([a-z-]+))?", README)}
    code = {words for words in named if words[0] in main.list_commands(context)}
    quoted = {words[0] for words in re.findall(r"`gangq ([a-z-]+)( [a-z]+)?", README)}
    assert quoted <= set(main.list_commands(context))
    for command, child in code:
        group = main.get_command(context, command)
        if isinstance(group, click.Group) and child:
            assert child in group.list_commands(context), f"gangq {command} {child}"
    assert {"trips", "show", "devices", "workers", "doctor", "task", "bounce", "systemd"} <= quoted


def test_the_classes_it_lets_one_silence_exist(client: Client) -> None:
    for listed in re.findall(r"notify_only => '\{([a-z,]*)\}'", HANGS):
        assert set(listed.split(",")) <= set(NOTIFY_CLASSES)
        client.configure(notify_only=listed.split(","))


def test_its_query_for_hosts_without_gangq_names_whom_to_restart(
    db: psycopg.Connection[dict[str, Any]], client: Client, clock: Any
) -> None:
    client.set_queue(name="other")
    here = socket.gethostname()
    for name, host, queue in ((f"{here}-7", here, "default"), ("elsewhere-1", "elsewhere", "other")):
        client.submit(task="a", queue=queue)
        incarnation = client.register_worker(name=name, host=host, queues=[queue]).incarnation
        assert client.claim(incarnation=incarnation)
    for number in range(9):
        client.submit(task="a")
        row = client.register_worker(name=f"idle{number}", host=f"elsewhere-{number}", queues=["default"])
        (claim,) = client.claim(incarnation=row.incarnation)
        client.complete(job_ids=[claim.job_id], tokens=[claim.token])
    clock.advance(31)
    assert client.call("flag_dead_workers") == 2
    (query,) = re.findall(r'psql -At "\$GANGQ_DSN" -c "([^"]+)"', HANGS)
    found = db.execute(query.replace("$(hostname)", socket.gethostname()).encode()).fetchall()
    assert found == [{"substring": "7", "bounce": "go"}]

"""--watch, --wide and -o: which commands have them, and what a look that is repeated leaves on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from cli.cli_process import eventually, gangq, ok, running
from cli.terminal import Terminal
from gangq.cli import main
from gangq.client import Client

Db = psycopg.Connection[dict[str, Any]]

_CHANGES = """
    bench cancel cordon demo drain-host migrate priority quarantine retry run submit taint tick uncordon undrain
    unquarantine
    completion|install db|psql db|start db|stop limit|set notify|add notify|retry notify|rm notify|run notify|test
    queue|create queue|drain queue|pause queue|resume queue|set
    schedule|add schedule|pause schedule|resume schedule|rm schedule|run-now
    service|delete service|rollback service|set service|stop
    systemd|install systemd|report-death task|pause task|resume task|set
    beat checkpoint|load checkpoint|save gang load ready snooze"""
"""Commands that change something, or are called by a job."""
_RUN_ON = {"bounce", "metrics", "top", "web", "worker"}
_ONCE = {
    "board": "a line of JSON for a file",
    "completion show": "a script",
    "db dsn": "does not change",
    "decide": "reads a file",
    "logs": "-f prints what is new",
    "systemd show": "a unit file",
    "wait": "waits itself",
}
"""The only commands that tell something and cannot be watched, and why."""
_PAGES = {"db status", "doctor", "explain", "service show", "show"}
"""Looks that are no single table: they have no -o."""


def _commands(command: click.Command, name: str = "") -> dict[str, set[str]]:
    """Every command by its words, with its options."""
    found = {}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            found |= _commands(inner, f"{name} {child}".strip())
        if not name or not command.invoke_without_command:
            return found
    return {**found, name: {option for param in command.params for option in param.opts}}


def test_every_look_has_watch() -> None:
    commands = _commands(main)
    others = {words.replace("|", " ") for words in _CHANGES.split()} | _RUN_ON | {*_ONCE}
    assert {name for name, options in commands.items() if "--watch" not in options} == others


def test_every_look_that_is_a_table_has_wide_and_columns() -> None:
    looks = {name: options for name, options in _commands(main).items() if "--watch" in options}
    assert {name for name, options in looks.items() if not {"--wide", "-o"} <= options} == _PAGES


def test_what_is_watched_stays_on_the_screen_while_the_database_answers(
    dsn: str, client: Client, db: Db
) -> None:
    client.submit(task="train")
    terminal = Terminal(dsn, "ls", "--watch", "0.5s")
    try:
        terminal.until(lambda said: said.count("\x1b[2J") >= 2)
        with psycopg.connect(dsn) as other:
            other.execute("lock table gangq.live_jobs in access exclusive mode")
            eventually(
                lambda: db.execute("select 1 from pg_locks where not granted").fetchone(),
                "it waits for an answer",
            )
            assert "train" in terminal.said.rpartition("\x1b[2J")[2]
            before = terminal.said.count("\x1b[2J")
        terminal.until(lambda said: said.count("\x1b[2J") > before)
    finally:
        terminal.interrupt()
        assert terminal.end() == 130


def test_a_note_below_a_table_stays_with_it(dsn: str, client: Client) -> None:
    client.submit(task="train")
    terminal = Terminal(dsn, "ls", "--watch", "0.5s", columns=24)
    try:
        terminal.until(lambda said: said.count("\x1b[2J") >= 2)
        screens = terminal.said.split("\x1b[2J")
        assert "train" in screens[1]
        assert "not shown" in screens[1]
    finally:
        terminal.interrupt()
        assert terminal.end() == 130


def test_a_look_that_ends_with_1_is_watched_all_the_same(tmp_path: Path) -> None:
    nowhere = "postgresql://127.0.0.1:1/nowhere"
    with running(nowhere, tmp_path, "watch", "doctor", "--watch", "0.5s") as watch:
        watch.until(lambda: watch.out.count("fail  database") >= 2, "it has looked twice")
        watch.interrupt()
        assert watch.code() == 130


@pytest.mark.parametrize("words", ["show 1", "events", "service endpoints s"])
def test_what_is_followed_is_not_watched_too(dsn: str, words: str) -> None:
    refused = gangq(dsn, *words.split(), "--follow", "--watch", "1s")
    assert (refused.exit_code, "--follow" in refused.stderr) == (2, True), refused.stderr


def test_the_watch_of_a_group_does_not_keep_its_command_from_running(dsn: str, tmp_path: Path) -> None:
    for words in ("ls", "pause default"):
        with running(dsn, tmp_path, "watch", "queue", "--watch", "0.5s", *words.split()) as watch:
            assert watch.code(10) == 2
            assert f"--watch goes after {words.split()[0]}" in watch.err


def test_columns_of_events_are_chosen_too_but_not_of_lines(dsn: str, client: Client) -> None:
    client.quarantine(worker=_registered(client), reason="smells")
    assert ok(dsn, "events", "-o", "event,reason").splitlines()[-1] == "quarantine  smells"
    for lines in (["events", "-f", "-o", "event"], ["trips", "--evidence", "-o", "code"]):
        refused = gangq(dsn, *lines)
        assert (refused.exit_code, "leave -o out, or add --json" in refused.stderr) == (2, True), lines


def _registered(client: Client) -> str:
    client.register_worker(name="w1", host="h1", queues=["default"])
    return "w1"

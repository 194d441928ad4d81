"""What each look prints on a terminal of 80 and of 120 columns, with colour and without, and in a pipe.

The files in captures/ are what was seen. GANGQ_WRITE_CAPTURES=1 writes them anew: look at their diff with your eyes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row

from cli.staged_fleet import NOW, stage
from databases import Clock
from gangq.cli import main, output
from gangq.cli.tables import width
from gangq.embedded import Server
from gangq.top.app import Top
from gangq.top.tabs import TABS
from sql.drive import Q

pytestmark = pytest.mark.slow

CAPTURES = Path(__file__).parent / "captures"
LOOKS = {
    "ls": "ls",
    "ls-gangs": "ls gangs",
    "ls-batches": "ls batches",
    "ls-failed": "ls --state failed",
    "show-running-gang": "show g1",
    "show-waiting-gang": "show g2",
    "show-failed-job": "show 2",
    "show-member": "show 11",
    "show-batch": "show b4",
    "explain-gang": "explain g2",
    "explain-job": "explain 34",
    "explain-running": "explain g1 -v",
    "workers": "workers",
    "devices": "devices",
    "queue-ls": "queue ls",
    "limit-list": "limit list",
    "task-list": "task list",
    "schedule-list": "schedule list",
    "service-list": "service list",
    "service-show": "service show chat",
    "service-endpoints": "service endpoints chat",
    "replay": "replay --since 3m",
    "events": "events",
    "events-of-gang": "events g1",
    "drains": "drains",
    "trips": "trips",
    "trips-evidence": "trips --evidence --code 76",
    "show-tripped-job": "show 35",
    "show-job-of-four-devices": "show 33",
    "usage": "usage",
    "usage-by-queue": "usage --by queue,task",
    "notify-list": "notify list",
    "queue": "queue",
    "plan": "plan",
    "doctor": "doctor",
    "unknown-id": "show g999",
    "no-id": "show 12x",
    "unknown-command": "lss",
    "unknown-option": "service set chat --tag x",
    "help": "--help",
    "help-ls": "ls --help",
    "help-submit": "submit --help",
    "help-run": "run --help",
}
_OF_THIS_SERVER = re.compile(
    r"^(?:\x1b\[\d+m)?(?:ok|warn|fail) *(?:\x1b\[0m)? *"
    r"(?:database|server|notify|horizon|schema|retention|partitions) .*\n(?: .*\n)*",
    re.MULTILINE,
)
"""What `gangq doctor` says of the server and of its true date."""
_DRAWN = re.compile(r'(^token +|"not_before": ")[^"\n]+', re.MULTILINE)
"""What is drawn at random: the token of a claim, and how long a gang backs off."""
_DIGEST = re.compile(r"\b[0-9a-f]{32}\b")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def staged(server: Server, template: str) -> Iterator[str]:
    dsn = server.create_database("captures", template=template)
    with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as db:
        stage(Q(db, Clock.install(db)))
    yield dsn
    server.drop_database("captures")


def _in_child(arguments: list[str], environment: dict[str, str]) -> None:
    """What the forked process does: the command, on its own standard streams, at a time that stands still."""
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True)
    for name in [name for name in os.environ if name.startswith(("GANGQ_", "PG", "NO_COLOR", "COLUMNS"))]:
        del os.environ[name]
    os.environ.update(environment)
    time.tzset()
    output.clock = lambda: NOW
    try:
        main(arguments, prog_name="gangq")
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    sys.stdout.write("" if not code else f"(exit code {code})\n")
    sys.stdout.flush()


def seen(dsn: str, command: str, columns: int = 0, **more: str) -> str:
    """What a command prints on a terminal so wide; 0: into a pipe."""
    environment = {"GANGQ_DSN": dsn, "TZ": "UTC", "TERM": "xterm-256color", **more}
    if columns:
        pid, own = pty.fork()
    else:
        own, its = os.pipe()
        pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            if columns:
                fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
            else:
                os.dup2(its, 1)
                os.dup2(its, 2)
            _in_child(command.split(), environment)
        os._exit(0)
    if not columns:
        os.close(its)
    pieces = []
    with contextlib.suppress(OSError):  # Linux: the other end of the terminal is closed.
        while piece := os.read(own, 65536):
            pieces.append(piece)
    os.close(own)
    os.waitpid(pid, 0)
    text = _DRAWN.sub(r"\1N", b"".join(pieces).decode().replace("\r\n", "\n"))
    return _DIGEST.sub("0" * 32, _OF_THIS_SERVER.sub("", text))


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_prints_what_was_seen(staged: str, name: str) -> None:
    command = LOOKS[name]
    coloured = {columns: seen(staged, command, columns) for columns in (80, 120)}
    plain = {columns: seen(staged, command, columns, NO_COLOR="1") for columns in (80, 120)}
    piped = seen(staged, command)
    assert "\x1b" not in piped + plain[80] + plain[120]
    for columns, text in coloured.items():
        assert _ESCAPE.sub("", text) == plain[columns], "colours change nothing else"
        wide = [line for line in plain[columns].splitlines() if width(line) > columns]
        assert wide == [], f"wider than {columns} columns"
    parts = {
        "80 columns": plain[80],
        "120 columns": plain[120],
        "a pipe": piped,
        "80 columns in colour": coloured[80].replace("\x1b", "^["),
    }
    text = f"$ gangq {command}\n" + "".join(f"\n--- {how}\n{what}" for how, what in parts.items())
    _compare(name, text)


@pytest.mark.parametrize("name", LOOKS)
def test_what_a_narrow_terminal_leaves_out_is_shown_as_it_advises(staged: str, name: str) -> None:
    command = LOOKS[name]
    if "not shown:" not in (narrow := seen(staged, command, 24)):
        pytest.skip("all of it fits")
    assert "--wide" in narrow
    wide = seen(staged, f"{command} --wide", 24)
    assert ("not shown:" in wide, "No such option" in wide) == (False, False), wide


def _compare(name: str, text: str) -> None:
    file = CAPTURES / f"{name}.txt"
    if os.environ.get("GANGQ_WRITE_CAPTURES") == "1":
        file.write_text(text)
    assert text == file.read_text(), "GANGQ_WRITE_CAPTURES=1 writes it anew"


def _drawn(dsn: str, columns: int) -> dict[str, str]:
    """What `gangq top` draws of each tab on a terminal so wide."""

    async def draw() -> dict[str, str]:
        found = {}
        top = Top(dsn, every_s=3600)
        async with top.run_test(size=(columns, 24)) as pilot:
            for number, tab in enumerate(TABS, 1):
                await pilot.press(str(number))
                await pilot.pause()
                await top.workers.wait_for_complete()
                await pilot.pause()
                lines = [strip.text.rstrip() for strip in top.screen._compositor.render_strips()]
                found[tab.title] = "\n".join(lines)
        return found

    return asyncio.run(draw())


def test_top_draws_what_was_seen(staged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr(output, "clock", lambda: NOW)
    time.tzset()
    drawn = {columns: _drawn(staged, columns) for columns in (80, 120)}
    text = "$ gangq top\n" + "".join(
        f"\n--- {columns} columns, {title}\n{what}\n"
        for columns, tabs in drawn.items()
        for title, what in tabs.items()
    )
    _compare("top", text)


def test_there_is_no_capture_of_a_look_that_is_gone() -> None:
    assert {file.stem for file in CAPTURES.iterdir()} == {*LOOKS, "top"}

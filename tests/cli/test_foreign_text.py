"""Names, errors, evidence and output come from others: none of it may drive the terminal of who looks at it."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import GANGQ, environment, gangq
from gangq import cli
from gangq.cli import output
from gangq.client import Client

EVIL = "a\x1b]0;PWN\x07b\x1b[2Jc\x9b31md\x7fe\u202ef[/nope][link=http://e]x[/link]\u2066"
"""A title for the terminal, a cleared screen, C1 and DEL, text from right to left, and markup, balanced or not."""
OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]|\x1b(?!\\[[0-9;]*m)"
)
"""What a terminal acts on, but for line ends and colours."""


@pytest.fixture
def looked_at(dsn: str, client: Client) -> list[tuple[str, ...]]:
    """A database with hostile text wherever a role may put it; every command that looks at it."""
    client.submit(task=EVIL, payloads=[{EVIL: EVIL}], labels={EVIL: EVIL})
    client.submit_gang(task=EVIL, size=2, name=EVIL)
    client.submit(task="fails", priority=5)
    worker = client.register_worker(
        name="w1",
        host="h1",
        queues=["default"],
        tasks=["fails"],
        slots=2,
        labels={EVIL: EVIL},
    )
    (claim,) = client.claim(incarnation=worker.incarnation)
    held = {"job_id": claim.job_id, "token": claim.token}
    client.heartbeat(
        incarnation=worker.incarnation,
        job_ids=[claim.job_id],
        tokens=[claim.token],
        beats=[{"step": 1, EVIL: EVIL}],
    )
    client.append_log(job_ids=[claim.job_id], tokens=[claim.token], seqs=[0], chunks=[EVIL + "\n"])
    evidence = {"message": EVIL, "handler": EVIL, "beats": [{EVIL: 1, "x": EVIL}], EVIL: EVIL, "stacks": EVIL}
    client.suspect(incarnation=worker.incarnation, **held, class_="stall", evidence=evidence)
    client.trip(
        incarnation=worker.incarnation,
        **held,
        code=76,
        error={"type": EVIL, "message": EVIL, "traceback": EVIL, "host": EVIL},
        evidence=evidence,
    )
    client.cancel(job_ids=[1], reason=EVIL)
    return [
        ("ls",),
        ("ls", "gangs"),
        ("show", "1"),
        ("show", "4", "--evidence"),
        ("show", "g1"),
        ("explain", "4"),
        ("explain", "g1"),
        ("events",),
        ("trips", "--evidence"),
        ("workers",),
        ("logs", "4"),
        ("doctor",),
        ("plan",),
        ("task", "list"),
        ("cancel", "999", "--reason", EVIL),
        ("quarantine", "--worker", EVIL),
        ("submit", "x", "--queue", EVIL),
        ("submit", "x", "--spec", EVIL),
        ("explain", EVIL),
    ]


_ONE_AFTER_THE_OTHER = """
import json, sys
from gangq.cli import main
for number, args in enumerate(json.loads(sys.argv[1])):
    print(f"---- {number}", flush=True)
    try:
        main(args, prog_name="gangq")
    except SystemExit as end:
        assert end.code in (0, 1, 2), (args, end.code)
"""


def on_a_terminal(dsn: str, commands: list[tuple[str, ...]]) -> list[str]:
    """What each of these commands shows on a terminal. One process for all: it takes longer to start than to look."""
    ours, theirs = pty.openpty()
    env = environment(dsn, TERM="xterm", COLUMNS="100")
    argv = [sys.executable, "-c", _ONE_AFTER_THE_OTHER, json.dumps(commands)]
    with subprocess.Popen(argv, env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        read = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed.
                break
            read += piece
        os.close(ours)
    assert process.returncode == 0, read
    _, *shown = re.split("^---- [0-9]+\n", read.decode().replace("\r\n", "\n"), flags=re.MULTILINE)
    return shown


def test_no_look_and_no_error_brings_anything_to_the_terminal_that_it_obeys(
    dsn: str, looked_at: list[tuple[str, ...]]
) -> None:
    for args, shown in zip(looked_at, on_a_terminal(dsn, looked_at), strict=True):
        assert shown, args
        assert "Traceback" not in shown, (args, shown)
        found = OBEYED.search(shown)
        assert found is None, (args, shown[max(0, found.start() - 60) : found.end() + 20])


def test_json_escapes_what_a_terminal_obeys_and_reads_back_the_same(
    dsn: str, looked_at: list[tuple[str, ...]]
) -> None:
    for args in looked_at:
        result = gangq(dsn, *args, "--json")
        assert result.stdout.replace("\n", "").isprintable(), args
        for line in result.stdout.splitlines():
            json.loads(line)
    assert json.loads(output.to_json({"a": EVIL, "big": "\U000e0001"})) == {"a": EVIL, "big": "\U000e0001"}


def test_the_output_of_a_job_keeps_its_colours_on_a_terminal_and_nothing_else_of_its_escapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\x1b[31mred\x1b[0m 10%\r20%\x1b[K\n\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[5Aup \x9b1m\ttab\n"
    output.job_output(text)
    assert capsys.readouterr().out == text, "a pipe gets the bytes"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output.job_output(text)
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m 10%\r20%\x1b[K\nup \ufffd1m\ttab\n"


def test_everything_printed_goes_through_one_function() -> None:
    """`demo` draws text of its own alone; `child` writes a checkpoint's bytes into a pipe that asked for them."""
    allowed = {"output.py": {"echo"}, "child.py": {"echo"}}
    found: list[Any] = []
    for file in Path(str(cli.__file__)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                raw = called in ("print", "click.echo", "click.secho") or re.fullmatch(
                    r"(sys|click)\.std(out|err).*\.write", called
                )
                if raw and called.rpartition(".")[2] not in allowed.get(file.name, set()):
                    found.append((file.name, node.lineno, called))
    assert found == []


@pytest.mark.parametrize(
    ("args", "stdin", "said"),
    [
        (("submit", "x", "--due", "99999999999999d"), None, "longer than a hundred years"),
        (("submit", "x", "--budget", "9" * 40), None, "longer than a hundred years"),
        (("submit", "x", "n=" + "[" * 50_000), None, "nested too deeply"),
        (("submit", "x", '{"a":' * 50_000), None, "nested too deeply"),
        (("submit", "--spec", "-"), '{"a":' * 50_000, "nested too deeply"),
        (("submit", "--spec", "/dev/zero"), None, "larger than 64 MiB"),
        (("plan", "--submit", "/dev/zero"), None, "larger than 64 MiB"),
        (("submit", "x", "-"), "\0" * 100, "not a JSON object"),
        (("submit", "x", "--count", "100000000000"), None, "1<=x<=1000000"),
        (("submit", "x", '{"a": 1, "a": 2}'), None, "the key 'a' is given twice"),
        (("submit", "x", "a=1", "a=2"), None, "the key 'a' is given twice"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_absurd_input_is_answered_with_a_sentence_and_exit_code_2(
    dsn: str, args: tuple[str, ...], stdin: str | None, said: str
) -> None:
    result = gangq(dsn, *args, stdin=stdin)
    assert (result.exit_code, said in result.stderr) == (2, True), (result.stderr, result.exception)
    assert len(result.stderr) < 2000


def test_bytes_that_are_no_text_are_answered_with_a_sentence_and_exit_code_2(dsn: str) -> None:
    done = subprocess.run([*GANGQ, "submit", b"\xff"], env=environment(dsn), capture_output=True, timeout=60)
    assert (done.returncode, b"is not UTF-8" in done.stderr) == (2, True), done.stderr
    with subprocess.Popen(
        [*GANGQ, "submit", "x", "-"],
        env=environment(dsn),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        _, err = process.communicate(b'{"a": "\xff"}\n', timeout=60)
    assert (process.returncode, b"Traceback" in err) == (2, False), err
    assert b"is not UTF-8" in err or b"cannot store" in err, (
        "by the locale the bytes are refused here or there"
    )

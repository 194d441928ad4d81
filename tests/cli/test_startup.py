"""What a command costs before it asks anything: to import psycopg costs more than all of it.

Counted in calls of functions: how long they take changes with what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cli.cli_process import environment, gangq
from cli.test_json import CASES, command_of, every_command
from gangq.cli import COMMANDS

pytestmark = pytest.mark.slow

MOST = 0.7
"""Of the calls that the import of psycopg makes. The dearest command makes 0.58 of them."""
MORE = [
    "bench",
    "board",
    "bounce --once",
    "db psql",
    "metrics",
    "service endpoints s",
    "systemd report-death --name w",
    "top",
    "web",
    "worker off w",
    "worker on w",
    "worker drain w",
]
"""Beside `CASES`."""
_ASK_NOTHING = {
    "completion install",
    "completion show",
    "db start",
    "db status",
    "db stop",
    "decide",
    "demo",
    "systemd install",
    "systemd show",
    "worker",
    *("beat", "checkpoint load", "checkpoint save", "gang", "load", "ready", "snooze"),
}
"""Those that call no database themselves: `worker` starts a supervisor first, which loads no library, and the last
ask their worker.
"""
_LINES = {command_of(line): line for cases in CASES.values() for line, _ in reversed(cases)}
ASK = [line for name, line in _LINES.items() if name not in _ASK_NOTHING] + MORE
_MEASURE = """
import json, os, sys

calls = 0

def count(*_):
    global calls
    calls += 1

def reached(words):
    global calls
    calls = 0
    from gangq.__main__ import main
    from gangq.cli.session import Session
    def client(self, **_):
        import gangq.schema
        import gangq.client.sync
        print(json.dumps([words, calls / of_psycopg]), flush=True)
        os._exit(0)
    Session.client = Session.dsn = client
    main(words.split(), standalone_mode=False)
    os._exit(1)

sys.setprofile(count)
import psycopg
of_psycopg = calls
for words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        reached(words)
    assert os.waitpid(child, 0)[1] == 0, words
"""
_LOADED = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(f"gangq.cli.{module}")
    assert "psycopg" not in sys.modules, module
"""


def test_every_command_asks_after_fewer_calls_than_psycopg_takes_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(ASK)],
        env=environment("postgresql://nowhere.invalid/x"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    share = dict(map(json.loads, done.stdout.splitlines()))
    assert set(share) == set(ASK)
    assert {words: one for words, one in share.items() if one > MOST} == {}


@pytest.mark.parametrize(
    ("extra", "module"), [("top", "textual"), ("web", "uvicorn"), ("web", "starlette"), ("web", "jinja2")]
)
def test_a_command_without_its_extra_names_it_before_it_needs_a_database(
    extra: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused = gangq(None, extra)
    assert refused.exit_code == 1
    assert refused.stderr == f"gangq: there is no {module}: pip install 'gangq[{extra}]'\n"


def test_no_command_is_left_out() -> None:
    assert {command_of(line) for line in ASK} | _ASK_NOTHING == {*every_command()}


def test_the_options_of_every_command_are_known_without_psycopg() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, *sorted(set(COMMANDS.values()))],
        env=environment(None),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "offered"), [("gangq ls --", "plain,--queue"), ("gangq ca", "plain,cancel")]
)
def test_completion_loads_no_psycopg_until_a_value_is_asked_for(line: str, offered: str) -> None:
    code = (
        "import sys\n"
        "from gangq.cli import main\n"
        "try: main(prog_name='gangq')\n"
        "finally: sys.stderr.write(str('psycopg' in sys.modules))"
    )
    words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_GANGQ_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(None, **words), capture_output=True, text=True
    )
    assert offered in done.stdout.split()
    assert done.stderr == "False"

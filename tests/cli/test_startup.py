"""What a command costs before it asks anything: to import psycopg takes longer than all of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cli_process import environment

from gangq.cli import COMMANDS

MOST_S = 0.15
ASK = [
    "submit train",
    "run true",
    "ls",
    "show 1",
    "logs 1",
    "events",
    "explain 1",
    "cancel 1",
    "retry 1",
    "priority 1 5",
    "plan",
    "board",
    "drains",
    "schedule list",
    "service list",
    "queue ls",
    "limit list",
    "task list",
    "worker off w",
    "workers",
    "devices",
    "trips",
    "quarantine --worker w",
    "cordon h",
    "taint w",
    "usage",
    "notify list",
    "tick",
    "bounce --once",
    "doctor",
]
_MEASURE = """
import json, os, sys, time
import psycopg

def reached(words):
    began = time.process_time()
    from gangq.__main__ import main
    from gangq.cli.session import Session
    def client(self, **_):
        import gangq.schema
        import gangq.client.sync
        print(json.dumps([words, time.process_time() - began]), flush=True)
        os._exit(0)
    Session.client = client
    main(words.split(), standalone_mode=False)
    os._exit(1)

for words in json.loads(sys.argv[1]):
    for _ in range(3):
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


def test_every_command_asks_within_150_ms_of_the_processor_beside_psycopg() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(ASK)],
        env=environment("postgresql://nowhere.invalid/x"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    took: dict[str, float] = {}
    for words, one in map(json.loads, done.stdout.splitlines()):
        took[words] = min(one, took.get(words, one))
    assert set(took) == set(ASK)
    assert {words: s for words, s in took.items() if s > MOST_S} == {}


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

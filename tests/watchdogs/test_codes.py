"""The exit codes, and what the package offers."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import gangq.watchdogs
from databases import Connection
from gangq.proc import supervision
from gangq.watchdogs import ExitCode
from gangq.watchdogs.codes import NOTIFY_CLASSES

TOP = Path(__file__).parents[2]


def test_the_codes_are_those_of_the_design() -> None:
    assert {int(code): code.word for code in ExitCode} == {
        75: "budget",
        76: "stall",
        77: "lost",
        78: "health",
        79: "unstopped",
        80: "frozen",
        85: "fault",
        86: "memory",
        87: "unkillable",
        88: "unfit",
    }
    assert all(code.meaning for code in ExitCode)
    assert [int(code) for code in ExitCode if not code.restart] == [87, 88]
    assert {code.word for code in ExitCode if code.reporter == "worker"} == {
        "budget",
        "stall",
        "health",
        "fault",
    }
    assert {code.word for code in ExitCode if code.reporter == "supervisor"} == {"frozen", "memory"}


def test_the_database_knows_the_same_codes(db: Connection) -> None:
    rows = {row["code"]: row for row in db.execute("select * from gangq.trip_classes")}
    gang = rows.pop(None)
    assert {
        code: (row["class"], row["reporter"], row["notify"], row["held"]) for code, row in rows.items()
    } == {int(code): (code.word, code.reporter, code.notify, code.may_be_held) for code in ExitCode}
    assert (gang["class"], gang["reporter"], gang["held"]) == ("gang", "database", False)


def test_a_setting_takes_the_classes_that_may_notify_and_no_others(db: Connection) -> None:
    rows = db.execute("select class, notify from gangq.trip_classes").fetchall()
    assert {row["class"] for row in rows if row["notify"]} == set(NOTIFY_CLASSES)
    for row in rows:
        cast = f"select '{{{row['class']}}}'::gangq.watches"
        with contextlib.nullcontext() if row["notify"] else pytest.raises(psycopg.errors.CheckViolation):
            db.execute(cast)


def test_the_unit_restarts_a_worker_after_every_code_that_says_so() -> None:
    unit = (TOP / "systemd/gangq-worker@.service").read_text()
    (never,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, re.MULTILINE)
    assert set(never.split()) == {str(int(code)) for code in ExitCode if not code.restart}


def test_the_supervisor_which_imports_nothing_has_the_same_numbers() -> None:
    named = (supervision.FROZEN, supervision.MEMORY, supervision.UNKILLABLE)
    assert named == (ExitCode.FROZEN, ExitCode.MEMORY, ExitCode.UNKILLABLE)


def test_a_status_that_is_no_code_is_none() -> None:
    assert (ExitCode.of(76), ExitCode.of(1), ExitCode.of(-9)) == (ExitCode.STALL, None, None)


def test_a_code_is_a_plain_number_to_whoever_wants_one() -> None:
    assert f"{ExitCode.STALL:d}" == "76"
    assert ExitCode(76) is ExitCode.STALL


def test_every_class_that_may_be_notify_only_is_that_of_a_code_or_a_gang() -> None:
    assert {*NOTIFY_CLASSES} - {code.word for code in ExitCode} == {"gang"}


@pytest.mark.parametrize("name", gangq.watchdogs.__all__)
def test_everything_public_is_there_and_documented(name: str) -> None:
    found = getattr(gangq.watchdogs, name)
    assert name in dir(gangq.watchdogs)
    assert getattr(found, "__doc__", "") or name.isupper() or name.startswith("On")


def test_the_codes_cost_nobody_a_database_driver() -> None:
    code = (
        "import sys; import gangq.watchdogs.codes; print('psycopg' in sys.modules, 'ctypes' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_name_that_is_not_there_is_said_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Watchcat'"):
        _ = gangq.watchdogs.Watchcat


def test_the_head_of_the_room_says_what_each_of_its_files_is_for() -> None:
    assert gangq.watchdogs.__doc__ is not None
    assert gangq.watchdogs.__file__ is not None
    files = {file.stem for file in Path(gangq.watchdogs.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == set(re.findall(r"``(\w+)``", gangq.watchdogs.__doc__))

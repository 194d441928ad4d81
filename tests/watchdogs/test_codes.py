"""The exit codes, and what the package offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gangq.watchdogs
from gangq.watchdogs import NOTIFY_CLASSES, ExitCode


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

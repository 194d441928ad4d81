"""Bars of steps below what gangq run prints: on a terminal, in their place, and nowhere else."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import finished, worker
from terminal import Terminal, screen

from gangq.client import Client
from gangq.embedded import Server

BEAT = f"{shlex.quote(sys.executable)} -m gangq beat"


@pytest.fixture(scope="module")
def served(server: Server, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database with a command worker of four slots that passes progress on twice a second."""
    dsn = server.create_database("cli_progress", template=template)
    with Client(dsn) as client:
        client.configure(heartbeat_s=0.5)
    with worker(
        dsn,
        tmp_path_factory.mktemp("worker"),
        "w1",
        *("--slots", "4", "--light", "4", "--host", "h1", "--address", "127.0.0.1"),
    ):
        yield dsn
    server.drop_database("cli_progress")


def stepping(until: Path, steps: int = 3) -> list[str]:
    """A command that tells its steps, and then waits for a file."""
    each = f"for i in $(seq {steps}); do {BEAT} --step $i --total 4 >/dev/null; sleep 0.6; done"
    return ["sh", "-c", f"echo begins; {each}; while [ ! -e {until} ]; do sleep 0.1; done; echo ends"]


def test_a_gang_has_a_line_for_each_member_which_go_when_it_ends(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    run = Terminal(served, "run", "--gang", "2", "--", *stepping(done))
    run.until(lambda said: len(re.findall(r"^\[[01]\]  +75% ", "\n".join(screen(said)), re.M)) == 2)
    shown = screen(run.said)
    (first,) = (one for one in shown if one.startswith("[0]  "))
    assert re.search(r"75% █{15}░{5}  step 3/4  [0-9.]+ steps/s  [0-9.]+s left$", first), shown
    assert max(map(len, shown)) < 80
    done.touch()
    assert run.end() == 0
    left = screen(run.said)
    assert [one for one in left if "%" in one] == []
    assert {"[0] begins", "[1] begins", "[0] ends", "[1] ends"} <= set(left)
    assert "\x1b[3" not in run.said, "they have no colour that NO_COLOR would turn off"


def test_ctrl_c_cancels_with_bars_as_without(served: str, tmp_path: Path) -> None:
    run = Terminal(served, "run", "--", *stepping(tmp_path / "never"), NO_COLOR="1")
    run.until(lambda said: "75%" in said)
    run.interrupt()
    assert run.end() == 130
    left = screen(run.said)
    assert [one for one in left if "%" in one] == []
    assert any("cancelling job" in one for one in left)


def test_a_line_that_the_job_has_not_ended_is_not_drawn_into(served: str, tmp_path: Path) -> None:
    command = f"printf 'loading... '; {BEAT} --step 1 --total 4 >/dev/null; sleep 2.5; echo ready; sleep 1.5"
    run = Terminal(served, "run", "--", "sh", "-c", command)
    run.until(lambda said: "25%" in said)
    assert "loading... ready" in screen(run.said)
    assert run.end() == 0


def test_a_pipe_gets_lines_and_no_bar(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.touch()
    run = finished(served, "run", "--", *stepping(done))
    assert (run.returncode, run.stdout) == (0, "begins\nends\n")
    assert "\x1b" not in run.stderr
    assert "%" not in run.stderr

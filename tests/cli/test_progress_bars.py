"""Bars of steps below what gangq run prints: on a terminal, in their place, and nowhere else."""

from __future__ import annotations

import io
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from cli.cli_process import finished, worker
from cli.terminal import Terminal, screen
from gangq.cli import progress
from gangq.cli.which import Which
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


def begun(dsn: str, *args: object) -> str:
    return finished(dsn, "run", "--detach", *args).stdout.strip()


@pytest.mark.slow
def test_wait_has_a_line_for_each_and_ends_with_what_became_of_them(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = begun(served, "--", *stepping(done))
    batch = begun(served, "--array", "0-1", "--", *stepping(done))
    wait = Terminal(served, "wait", job, batch)

    def all_there(said: str) -> bool:
        shown = "\n".join(screen(said))
        return (
            len(re.findall(rf"^{job}  +75% ", shown, re.M)) == 1
            and re.search(rf"^{batch}  +0% ░{{20}}  0 of 2 done, 2 running$", shown, re.M) is not None
            and len(re.findall(rf"^{batch}  \[[01]\]  +75% ", shown, re.M)) == 2
        )

    wait.until(all_there)
    done.touch()
    assert wait.end() == 0
    assert sorted(one for one in screen(wait.said) if one) == sorted([f"{job} done", f"{batch} done"])


def test_submit_waits_with_bars_and_exits_as_the_command_did(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    words = stepping(done)
    words[-1] += "; exit 3"
    submit = Terminal(
        served, "submit", "command", json.dumps({"argv": words}), "--max-attempts", "1", "--wait"
    )
    submit.until(lambda said: "75%" in said)
    done.touch()
    assert submit.end() == 3
    id, end = (one for one in screen(submit.said) if one)
    assert end.startswith(f"{id} failed: "), end


@pytest.mark.slow
def test_show_follows_with_bars_below_the_page(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    gang = begun(served, "--gang", "2", "--", *stepping(done))
    show = Terminal(served, "show", "-f", gang, lines=60)
    show.until(lambda said: len(re.findall(r"^\[[01]\]  +75% ", "\n".join(screen(said)), re.M)) == 2)
    done.touch()
    assert show.end() == 0
    left = [one for one in screen(show.said) if one]
    assert left[0] == f"gang       {gang}"
    assert left[-1] == f"gangq: gang {gang} done"
    assert [one for one in left if "%" in one] == []
    again = finished(served, "show", "-f", gang)
    assert (again.returncode, again.stderr) == (0, ""), "it has ended: the page is all"


def test_what_runs_already_is_not_said_to_wait(served: str) -> None:
    job = begun(served, "--", "sleep", "4")
    said = finished(served, "show", "-f", job).stderr
    assert (said.endswith(f"gangq: job {job} done\n"), "about to start" in said) == (True, False), said


def test_ctrl_c_ends_the_following_and_nothing_else(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    job = begun(served, "--", *stepping(done))
    for words in (("show", "-f", job), ("wait", job)):
        look = Terminal(served, *words, lines=60)
        look.until(lambda said: "75%" in said)
        look.interrupt()
        assert look.end() == 130
        assert [one for one in screen(look.said) if "%" in one] == []
    done.touch()
    assert finished(served, "wait", job).stdout == f"{job} done\n"


class Shown(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before this line, of those that `gangq.cli.progress` runs, or where it returns."""
    left = step

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        if frame.f_code.co_filename != progress.__file__:
            return None
        if event in ("line", "return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_ctrl_c_at_any_line_of_drawing_leaves_no_bar(
    served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    batch = Which(int(begun(served, "--array", "0-1", "--", *stepping(done))[1:]), "batch")
    with Client(served) as client:
        for step in itertools.count(1):
            monkeypatch.setattr(sys, "stderr", shown := Shown())
            try:
                with progress.Bars(client, [batch]) as bars, interrupted_at(step):
                    bars.draw()
                break
            except KeyboardInterrupt:
                assert [one for one in screen(shown.getvalue()) if one] == [], f"interrupted at step {step}"
    assert "0 of 2 done" in shown.getvalue()
    assert step > 20
    done.touch()


def test_a_pipe_gets_lines_and_no_bar(served: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    done.touch()
    run = finished(served, "run", "--", *stepping(done))
    assert (run.returncode, run.stdout) == (0, "begins\nends\n")
    assert "\x1b" not in run.stderr
    assert "%" not in run.stderr

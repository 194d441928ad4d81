"""Completion: what a real bash, zsh and fish offer at TAB, what is installed where, and what is loaded for it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.cli_process import environment, finished, gangq, ok
from gangq.cli import COMMANDS, main
from gangq.client import Client

STARTED = {
    "bash": (
        ["--noprofile", "-i"],
        "PS1=; bind 'set bell-style none'; bind 'set show-all-if-ambiguous on'; stty -onlcr",
    ),
    "zsh": (["-d", "-i"], "PS1=; unset zle_bracketed_paste; unsetopt prompt_sp prompt_cr beep; stty -onlcr"),
}
"""The options with which a shell loads its own file of the home and no other, and what makes it quiet."""


def install(shell: str, home: Path, dsn: str) -> tuple[str, dict[str, str]]:
    """The program of a shell, and its environment in a home where gangq completes; skips where there is none."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} (apt-get install {shell})")
    homes = {"HOME": str(home), "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": "", "ZDOTDIR": ""}
    ok(None, "completion", "install", shell, **homes)
    ours = home / "bin/gangq"
    ours.parent.mkdir()
    ours.write_text(f"#!{sys.executable}\nfrom gangq.__main__ import main\nmain()\n")
    ours.chmod(0o755)
    env = environment(dsn, HOME=str(home), TERM="dumb", PS1="$ ", INPUTRC="/dev/null", HISTFILE="")
    return program, {**env, "PATH": f"{ours.parent}:{env['PATH']}"}


class Shell:
    """An interactive bash or zsh at a terminal, which loads only what `gangq completion install` has written."""

    def __init__(self, shell: str, home: Path, dsn: str) -> None:
        program, env = install(shell, home, dsn)
        options, quiet = STARTED[shell]
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [program, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=env,
            cwd=home,
            start_new_session=True,
        )
        os.close(theirs)
        self._said = ""
        self.type(f"{quiet}; echo rea''dy\n")
        self.until("ready\n")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def until(self, pattern: str, timeout: float = 20) -> str:
        """What it says up to and with this."""
        deadline = time.monotonic() + timeout
        while (found := re.search(pattern, self._said)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self._said!r}"
            if select.select([self._fd], [], [], left)[0]:
                self._said += os.read(self._fd, 65536).decode()
        said, self._said = self._said[: found.end()], self._said[found.end() :]
        return said

    def completed(self, line: str) -> str:
        """The line that TAB makes of this one."""
        self.type(f"{line}\t")
        # To its beginning, and made the argument of a command that prints it.
        self.type("\x01printf 'is<%s>\\n' '\x05'\n")
        return self.until(r"\nis<([^\n]*)>\n").rpartition("is<")[2].removesuffix(">\n").rstrip()

    def offered(self, line: str) -> set[str]:
        """What TAB lists."""
        self.type(f"{line}\t")
        # C-a C-k: a terminal that is between two commands takes C-u itself, with the line that was typed ahead.
        self.type("\x01\x0becho en''d\n")
        return set(self.until(r"\nend\n").split())

    def close(self) -> None:
        self.type("\x01\x0bexit\n")
        self._process.wait(timeout=20)
        os.close(self._fd)


class Fish:
    """A fish, which has a command for what TAB would offer."""

    def __init__(self, home: Path, dsn: str) -> None:
        self._program, self._env = install("fish", home, dsn)

    def offered(self, line: str) -> set[str]:
        """The words that TAB lists, without what is said about them."""
        done = subprocess.run(
            [self._program, "-c", 'complete -C "$LINE"'],
            env={**self._env, "LINE": line},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return {offer.partition("\t")[0] for offer in done.stdout.splitlines()}

    def completed(self, line: str) -> str:
        """The line that TAB makes of this one: there is one offer for its last word."""
        (word,) = self.offered(line)
        return f"{line.rpartition(' ')[0]} {word}"

    def close(self) -> None:
        """No process goes on."""


@pytest.fixture(params=["bash", "zsh", "fish"])
def shell(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Shell | Fish]:
    started = Fish(tmp_path, dsn) if request.param == "fish" else Shell(request.param, tmp_path, dsn)
    yield started
    started.close()


@pytest.mark.slow
def test_a_shell_completes_commands_options_ids_queues_tasks_and_hosts(
    shell: Shell | Fish, client: Client
) -> None:
    client.set_queue(name="training")
    client.register_worker(name="w", host="node-17", queues=["default"], slots=2)
    client.set_task(task="resnet50", budget_s=60)
    (job,) = client.submit(task="resnet50")
    gang = client.submit_gang(task="resnet50", size=2)
    assert shell.completed("gangq expl") == "gangq explain"
    assert shell.completed("gangq ls --qu") == "gangq ls --queue"
    assert shell.completed("gangq ls --queue tr") == "gangq ls --queue training"
    assert shell.completed("gangq queue pause tr") == "gangq queue pause training"
    assert shell.completed("gangq submit res") == "gangq submit resnet50"
    assert shell.completed("gangq cordon no") == "gangq cordon node-17"
    assert shell.completed("gangq explain g") == f"gangq explain g{gang.gang_id}"
    assert {str(job), *map(str, gang.job_ids)} <= shell.offered("gangq cancel ")
    assert {"cancel", "checkpoint", "completion", "cordon"} <= shell.offered("gangq c")


def told(dsn: str | None, line: str, shell: str = "bash", **env: str) -> list[str]:
    """The lines that the script of a shell gets."""
    words = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
        "_GANGQ_COMPLETE": f"{shell}_complete",
    }
    program = [sys.executable, "-c", "from gangq.__main__ import main; main(prog_name='gangq')"]
    done = subprocess.run(
        program, env=environment(dsn, **words, **env), capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, ""), dsn
    return done.stdout.strip().splitlines()


def test_a_name_that_a_shell_would_not_take_as_it_stands_is_not_offered(dsn: str, client: Client) -> None:
    for task in ("$(reboot)", "a b", "a;b", "`id`", "x\nplain,y", "--all", "'", "good-1.lab"):
        client.set_task(task=task, budget_s=60)
    assert told(dsn, "gangq task pause ") == ["plain,good-1.lab"]
    client.submit(task="x\nplain\ny")
    (job,) = client.submit(task="train")
    assert told(dsn, "gangq show ", "zsh") == ["plain", str(job), "train pending", "plain", "1", "_"]


def test_where_no_database_answers_nothing_is_offered_and_nothing_is_said(tmp_path: Path) -> None:
    for dsn in ("postgresql://x@127.0.0.1:1/x", None, "embedded"):
        assert told(dsn, "gangq ls --queue t", GANGQ_DATA_DIR=str(tmp_path / "pg")) == []
    assert not (tmp_path / "pg").exists(), "no server is started for it"


@pytest.mark.parametrize(
    ("shell", "files", "rc"),
    [
        ("bash", ".local/share/gangq/completion.bash", ".bashrc"),
        ("zsh", ".local/share/gangq/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/gangq.fish", None),
    ],
)
def test_install_writes_what_show_prints_and_one_line_that_loads_it(
    tmp_path: Path, shell: str, files: str, rc: str | None
) -> None:
    home = {"HOME": str(tmp_path), "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": "", "ZDOTDIR": ""}
    if rc is not None:
        (tmp_path / rc).write_text("alias x=y")
    for _ in range(2):
        ok(None, "completion", "install", SHELL=f"/bin/{shell}", **home)
    assert (tmp_path / files).read_text() == ok(None, "completion", "show", shell)
    assert "_GANGQ_COMPLETE" in (tmp_path / files).read_text()
    if rc is not None:
        first, *lines = (tmp_path / rc).read_text().splitlines()
        assert (first, len(lines)) == ("alias x=y", 1)
        assert str(tmp_path / files) in lines[0]


def test_a_shell_that_is_not_known_has_to_be_named() -> None:
    for args in (["show"], ["show", "tcsh"]):
        assert gangq(None, "completion", *args, SHELL="/bin/tcsh").exit_code == 2


def test_the_help_is_told_without_psycopg() -> None:
    code = (
        "import sys; sys.argv = ['gangq', '--help']\n"
        "from gangq.cli import main\n"
        "try: main(prog_name='gangq')\n"
        "finally: sys.stderr.write(str('psycopg' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(None), capture_output=True, text=True)
    assert "explain" in done.stdout
    assert done.stderr == "False"


def test_the_help_has_the_sentences_that_the_commands_have() -> None:
    said = " ".join(ok(None, "--help", COLUMNS="100").split())
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        sentence = re.split("[;:,]", command.get_short_help_str(30).removesuffix("..."))[0]
        assert re.search(rf"\b{name} {re.escape(sentence)}", said), name


def test_the_script_is_printed_for_a_process_of_its_own() -> None:
    assert "complete -o nosort -F" in finished(None, "completion", "show", "bash").stdout

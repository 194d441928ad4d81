"""The fenced blocks of the README and the manual, and what a page needs to run them.

Commands between backquotes are the blocks of a page of their own, `INLINE`: one block for each page that has some.

`test_manual_runs.py` runs every block. What is not run there is in `NOT_HERE`, with the part that is missing, or in
`ELSEWHERE`, with the test that runs it.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import click

from gangq.cli import main

TOP = Path(__file__).parents[2]
MANUAL = TOP / "docs/manual"
PAGES = {path.stem: path for path in [TOP / "README.md", *sorted(MANUAL.glob("*.md"))]}
HOWTO = sorted(name for name in PAGES if name.startswith("howto-"))
INLINE = "inline"

NOT_HERE = {
    "sh": {
        "docker": "docker: it would start containers of images that are not here",
        "sudo": "root: nothing is installed",
        "systemctl": "systemd: no unit is installed",
        "journalctl": "systemd: no unit is installed",
        "pip": "network: nothing is fetched, and the tests' own environment has it",
        "python3 -m venv": "network: an environment into which nothing is fetched",
        ". .venv/bin/activate": "network: an environment into which nothing is fetched",
        "gangq bounce": "host: it would restart what other tests run on this host",
        "gangq top": "terminal: tests/cli/test_top.py has one",
        "gangq db psql": "terminal: it is psql",
        "gangq bench": "time: it measures for half a minute; tests/cli/test_bench_command.py has a short run",
        "gangq notify retry": "runner: tests/cli/test_notify_commands.py has one",
        "gangq notify test": "runner: tests/cli/test_notify_commands.py has one",
        "gangq service endpoints chat --follow": "end: it has none; tests/cli/test_service_commands.py stops one",
        "gangq load": "replica: the code of the page of services is one",
        "gangq checkpoint save|load": "choice: tests/cli/test_run.py has both",
        "make": "make: these are the targets that run these tests, measure, or need a GPU",
        "GANGQ_": "make: these are the targets that run these tests, measure, or need a GPU",
        ".venv/bin/python -m pytest": "make: this is a run of the tests",
    },
    "crontab": {"": "cron: gangq bounce would restart what other tests run on this host"},
    "dockerfile": {"": "docker: it would fetch an image"},
    "ini": {
        "[Service]": "systemd: no unit is installed",
        "[databases]": "pgbouncer: tests/servers has one, with its own settings",
        "GANGQ_WORKER_ARGS": "systemd: no unit reads this file",
    },
    "yaml": {
        "services:": "docker: it would start containers of images that are not here",
        "scrape_configs:": "prometheus: it is not installed",
    },
    "python": {
        "# train.py": "torch: it is large, and wants a GPU; make test-torch runs examples/torch_ddp",
        "from opentelemetry import trace": "opentelemetry-exporter-otlp: it needs a collector",
    },
}
"""For a kind of block how a command, or the block, begins, and which part is not there."""

ELSEWHERE = {
    ("testing", "*"): "tests/testing/test_plugin.py",
    ("tutorial", "python"): "tests/examples/test_team.py",
    ("tutorial", "toml"): "tests/examples/test_team.py",
    ("operating", "sql"): "tests/schema/test_schema.py",
}
"""Page and kind of the blocks that a test of another room runs."""

DATA = ("text", "json", "toml")
"""Kinds that are read, and not run: drawings, output, and files of data."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, or the inline commands of one."""

    page: str
    number: int | str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}-{self.kind}"

    @property
    def file(self) -> str | None:
        """The file that it is, or is a part of, by its first line."""
        found = re.match(r"# (\w+\.\w+)\n", self.text)
        return found[1] if found else None

    @property
    def elsewhere(self) -> str | None:
        """The test of another room that runs it."""
        if self.text.startswith("# python notebook.py\n"):
            return None
        found = (
            test for (page, kind), test in ELSEWHERE.items() if page == self.page and fnmatch(self.kind, kind)
        )
        return next(found, None)

    def commands(self) -> list[str]:
        """Of shell its commands, each of one line or more; of anything else its text."""
        if self.kind != "sh":
            return [self.text]
        found: list[str] = []
        begun = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            begun += line
            if begun.startswith("#") or not begun.strip():
                begun = ""
            elif (
                line.startswith("gangq ") or subprocess.run(["bash", "-nc", begun], stderr=-3).returncode == 0
            ):
                found.append(begun)
                begun = ""
            else:
                begun += "\n"
        assert not begun, f"{self}: {begun}"
        return found

    def not_here(self, command: str) -> str | None:
        """Which part is not there to run one of its commands."""
        for start, part in NOT_HERE.get(self.kind, {}).items():
            word = re.match(rf"{re.escape(start)}(?=\W|$)", command) if start[-1:].isalnum() else None
            if word or (not start[-1:].isalnum() and command.startswith(start)):
                return part
        return None


def blocks(page: str) -> list[Block]:
    if page == INLINE:
        return list(INLINE_BLOCKS)
    text = PAGES[page].read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(found) * 2 == text.count("```"), f"{page}: a fence is not at the beginning of its line"
    return [Block(page, number, kind, code) for number, (kind, code) in enumerate(found)]


def inline_blocks() -> list[Block]:
    """The commands between backquotes, each once, by page."""
    found: dict[str, str] = {}
    for page, path in PAGES.items():
        for part in path.read_text(encoding="utf-8").split("```")[::2]:
            for line in re.findall(r"(?:^\|.*|^(?:[^|\n].*\n)+)", part, re.MULTILINE):
                for command in re.findall("`(gangq\\s[a-z][^`]*)`", line):
                    command = " ".join(command.replace(r"\|", "|").split())
                    if is_whole(command, in_table=line.startswith("|")):
                        found.setdefault(command, page)
    return [
        Block(
            INLINE, page, "sh", "".join(f"{command}\n" for command, owner in found.items() if owner == page)
        )
        for page in dict.fromkeys(found.values())
    ]


def is_whole(command: str, in_table: bool) -> bool:
    """Whether it can be run as it stands, and does not only name a command: all but a name in running text, or of a
    command that wants arguments."""
    named: click.Command = main
    words = command.split()[1:]
    while isinstance(named, click.Group) and words:
        known = named.get_command(click.Context(main), words[0])
        if known is None:
            break
        named = known
        words.pop(0)
    return bool(words) or (in_table and not any(param.required for param in named.params))


INLINE_BLOCKS = inline_blocks()
BLOCKS = [block for page in [*PAGES, INLINE] for block in blocks(page)]


def tasks_of(*pages: str) -> str:
    """The pages' parts of tasks.py, as one."""
    parts = [
        block.text
        for page in pages
        for block in blocks(page)
        if block.kind == "python" and block.file == "tasks.py"
    ]
    rest = "".join(part.replace("app = gangq.App()\n", "") for part in parts[1:])
    return "".join(parts[:1]) + rest

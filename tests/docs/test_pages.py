"""What the README and the manual say of commands, codes, numbers, gates, links and SQL is so."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

from gangq.cli import main
from gangq.cli.group import EXIT_BAD_INPUT, EXIT_NO_DATABASE, EXIT_REFUSED, exit_code
from gangq.client import Client
from gangq.errors import DatabaseUnreachable, HookFailed, InvalidInput, SchemaMismatch
from gangq.watchdogs.codes import NOTIFY_CLASSES, ExitCode

TOP = Path(__file__).parents[2]
MANUAL = TOP / "docs/manual"
PAGES = sorted([TOP / "README.md", *MANUAL.glob("*.md")])
HANGS = (MANUAL / "hangs.md").read_text(encoding="utf-8")


def by_name(path: Path) -> str:
    return path.name


def commands(page: Path) -> list[list[str]]:
    """Each `gangq ...` in the page's blocks and between backquotes, as words after the first."""
    parts = page.read_text(encoding="utf-8").replace("\\\n", " ").split("```")
    inline = re.findall(r"`gangq ([a-z][^`]*)`", "".join(parts[::2]))
    in_blocks = re.findall(r"^gangq ([a-z].*)", "".join(parts[1::2]), re.MULTILINE)
    bare = (line.replace(r"\|", "|").partition("  #")[0].partition(" -- ")[0] for line in inline + in_blocks)
    return [line.split() for line in bare]


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_command_it_names_and_every_option_exists(page: Path) -> None:
    context = click.Context(main)
    for words in commands(page):
        command: click.Command = main
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            names = words.pop(0).split("|")
            assert set(names) <= set(command.list_commands(context)), f"gangq {command.name} {names}"
            command = command.get_command(context, names[0]) or command
        known = {name for owner in (main, command) for given in owner.params for name in given.opts}
        known |= {name for given in command.params for name in given.secondary_opts} | {"--help", "-h"}
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0].rstrip(",.;:") in known, f"gangq {command.name} {word}"


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_every_link_and_every_file_it_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:sql|src|tests|docs|examples|systemd)/[\w./]*)`", text):
        assert (TOP / path).exists() or "NNNN" in path, path
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_page_is_in_the_navigation_and_in_both_lists() -> None:
    navigation = (TOP / "docs/mkdocs.yml").read_text(encoding="utf-8")
    lists = [(MANUAL / name).read_text(encoding="utf-8") for name in ("index.md", "llms.txt")]
    for page in MANUAL.glob("*.md"):
        assert f"- {page.name}\n" in navigation, page.name
        assert page.name == "index.md" or all(f"({page.name})" in listed for listed in lists), page.name


def test_the_glossary_is_short_and_each_word_of_it_is_used() -> None:
    page = MANUAL / "glossary.md"
    words = re.findall(r"^\| ([a-z ]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)[1:]
    assert words == sorted(words)
    assert len(words) <= 40
    others = "".join(other.read_text(encoding="utf-8").lower() for other in PAGES if other != page)
    assert [word for word in words if not re.search(rf"\b{word}", others)] == []


ROOMS = [
    (row[0], re.findall(r"(?:^|[;,] | and )`(\w+)`", row[1]))
    for row in re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (.*) \|$",
        (MANUAL / "contributing.md").read_text(encoding="utf-8").partition("## How to write")[2],
        re.MULTILINE,
    )
]


def test_every_room_of_the_tests_has_a_row() -> None:
    rooms = {path.parent.name for path in (TOP / "tests").glob("*/*.py")}
    assert sorted(room for room, _ in ROOMS) == sorted(rooms)


@pytest.mark.parametrize(("room", "names"), ROOMS)
def test_what_a_room_of_the_tests_has_for_a_new_test_is_there(room: str, names: list[str]) -> None:
    files = [TOP / "tests/conftest.py", *(TOP / "tests" / room).glob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert names
    assert [name for name in names if not re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE)] == []


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((TOP / "README.md").read_text(encoding="utf-8")) < 8000


# -- hangs.md ------------------------------------------------------------------------------------------------


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    lines = [line for line in HANGS.splitlines() if re.match(r"\| [0-9]+ \|", line)]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows == [
        [f"{code:d}", code.word, code.meaning, "yes" if code.restart else "never"] for code in ExitCode
    ]


def test_the_exit_codes_of_no_class_are_those_of_the_commands() -> None:
    for code, word in (
        (EXIT_REFUSED, "an error, or a hook failed"),
        (EXIT_BAD_INPUT, "bad input"),
        (EXIT_NO_DATABASE, "no database, or another schema"),
    ):
        assert f" {code}: {word};" in HANGS
    for problem, code in (
        (HookFailed(""), EXIT_REFUSED),
        (InvalidInput(""), EXIT_BAD_INPUT),
        (DatabaseUnreachable(""), EXIT_NO_DATABASE),
        (SchemaMismatch(""), EXIT_NO_DATABASE),
    ):
        assert exit_code(problem) == code


def test_the_defaults_it_names_are_those_of_a_fresh_installation(
    db: psycopg.Connection[dict[str, Any]],
) -> None:
    found = db.execute("select * from gangq.settings").fetchone()
    assert found is not None
    named = {
        "budget_gpu_s": "8100 s with GPUs",
        "budget_s": "2100 s without",
        "stall_timeout_s": "120 s, or what was learned",
        "health_window_s": "300 s; before the first use or beat",
        "load_grace_s": "1200 s more",
        "gang_stall_s": "makes a step | 1200 s",
    }
    for setting, said in named.items():
        assert said in HANGS
        assert f"{found[setting]:g} s" in said
    assert (found["notify_only"], found["brake_share"], found["device_trips"]) == ([], pytest.approx(0.2), 3)
    assert found["bounces_per_hour"] == 4
    assert found["warm_s"] == 10


def test_the_classes_it_lets_one_silence_exist(client: Client) -> None:
    (listed,) = re.findall(r'\{"notify_only": \[([a-z", ]*)\]\}', HANGS)
    classes = re.findall("[a-z]+", listed)
    assert set(classes) <= set(NOTIFY_CLASSES)
    client.configure(notify_only=classes)


def test_its_query_for_hosts_without_gangq_names_whom_to_restart(
    db: psycopg.Connection[dict[str, Any]], client: Client, clock: Any
) -> None:
    client.set_queue(name="other")
    here = socket.gethostname()
    for name, host, queue in ((f"{here}-7", here, "default"), ("elsewhere-1", "elsewhere", "other")):
        client.submit(task="a", queue=queue)
        incarnation = client.register_worker(name=name, host=host, queues=[queue]).incarnation
        assert client.claim(incarnation=incarnation)
    for number in range(9):
        client.submit(task="a")
        row = client.register_worker(name=f"idle{number}", host=f"elsewhere-{number}", queues=["default"])
        (claim,) = client.claim(incarnation=row.incarnation)
        client.complete(job_ids=[claim.job_id], tokens=[claim.token])
    clock.advance(31)
    assert client.call("flag_dead_workers") == 2
    (query,) = re.findall(r'psql -At "\$GANGQ_DSN" -c "([^"]+)"', HANGS)
    found = db.execute(query.replace("$(hostname)", socket.gethostname()).encode()).fetchall()
    assert found == [{"substring": "7", "bounce": "go"}]

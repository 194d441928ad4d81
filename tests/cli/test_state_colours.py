"""One colour for each state, from one table, in the command line, in `gangq top` and on the page."""

from __future__ import annotations

import re
from pathlib import Path

import click
import psycopg
import pytest
from rich.color import Color

import gangq.web
from gangq.cli.look import STATES
from gangq.colours import COLOURS, colour_of

_VIEWS = """
  select c.relname::text, pg_get_viewdef(c.oid) from pg_class c
  where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'v'"""
_CHECKS = """
  select c.conname::text, pg_get_constraintdef(c.oid) from pg_constraint c
  where c.connamespace = 'gangq'::regnamespace and c.contype = 'c'"""


def answers_of(view: str) -> set[str]:
    """What the CASEs of a view that are called state or health answer in so many words."""
    found: set[str] = set()
    for end in re.finditer(r"\bEND AS (?:state|health)\b", view):
        depth, begin = 1, end.start()
        for word in reversed(list(re.finditer(r"\b(?:CASE|END)\b", view[: end.start()]))):
            depth += 1 if word[0] == "END" else -1
            begin = word.start()
            if not depth:
                break
        found |= set(re.findall(r"\b(?:THEN|ELSE) '(\w+)'::text", view[begin : end.start()]))
    return found


def test_every_state_that_the_database_knows_has_a_colour(dsn: str) -> None:
    known: dict[str, set[str]] = {}
    with psycopg.connect(dsn) as conn:
        known["transitions"] = {
            state
            for states in conn.execute("select old_state, new_state from gangq.transitions")
            for state in states
            if state
        }
        known |= {name: answers_of(text) for name, text in conn.execute(_VIEWS)}
        known |= {
            name: set(re.findall(r"'(\w+)'::text", text))
            for name, text in conn.execute(_CHECKS)
            if text.startswith("CHECK ((state = ANY")
        }
    assert {"preempted", "scheduled"} <= known["transitions"]
    assert {"crash_loop", "halted"} <= known["services"]
    assert {"degraded", "withdrawn"} <= known["devices"]
    assert {"retired", "live"} <= known["incarnations_state_check"]
    without = {name: missing for name, states in known.items() if (missing := states - COLOURS.keys())}
    assert without == {}
    assert known["transitions"] | known["live_gangs_state_check"] == set(STATES)


def test_a_state_that_goes_on_after_its_first_word_has_its_colour_too() -> None:
    assert colour_of("paused until 12:00:00") == colour_of("paused") == "yellow"
    assert colour_of("not in deploy.toml any more") is None


@pytest.mark.parametrize("colour", sorted(set(COLOURS.values())))
def test_every_colour_is_known_to_the_terminal_to_top_and_to_the_page(
    colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert click.style("x", fg=colour) != click.style("x")
    assert Color.parse(colour).name == colour
    style = (Path(gangq.web.__file__).parent / "static" / "style.css").read_text()
    assert re.search(rf"\.{colour} {{ --dot: var\(--\w+\); }}", style)

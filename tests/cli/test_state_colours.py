"""One colour for each state, from one table, in the command line, in `gangq top` and on the page."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path

import psycopg
import pytest
from rich.style import Style

import gangq.web
from gangq.cli import output
from gangq.cli.look import STATES
from gangq.colours import COLOURS, colour_of
from gangq.web.pages import _coloured

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


_STYLE = (Path(gangq.web.__file__).parent / "static" / "style.css").read_text()
_CODES = {
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
    "bright_black": 90,
    "bright_blue": 94,
}
"""Of a terminal."""
_HUES = {
    "red": (0, 15),
    "yellow": (30, 50),
    "green": (130, 160),
    "cyan": (170, 190),
    "bright_blue": (200, 219),
    "blue": (220, 245),
    "magenta": (255, 330),
}
"""Where on the circle of colours each lies on the page, in degrees; bright_black is grey."""


def on_the_page(rule: str) -> list[str]:
    """The colour that a rule of the page's style names, in light and in dark."""
    (name,) = re.findall(rf"(?<!\S){re.escape(rule)} {{[^}}]*var\(--(\w+)\)[^}}]*}}", _STYLE)
    found = re.findall(rf"--{name}: (#[0-9a-f]{{6}});", _STYLE)
    assert len(found) == 2, f"{name}: one for light and one for dark"
    return found


@pytest.mark.parametrize("state", COLOURS)
def test_a_state_has_one_colour_in_the_terminal_in_top_and_on_the_page(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "colourful", lambda: True)
    (in_the_terminal,) = re.findall(rf"\x1b\[(\d+)m{state}", output.state(state))
    in_top = Style.parse(str(colour_of(state))).color
    assert in_top is not None
    assert in_top.get_ansi_codes() == (in_the_terminal,)
    (shown,) = re.findall(r'class="state (\w+)"', _coloured(state))
    assert _CODES[shown] == int(in_the_terminal)
    for colour in on_the_page(f".{shown}"):
        red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
        turn, _, saturation = colorsys.rgb_to_hls(red, green, blue)
        if shown == "bright_black":
            assert saturation < 0.2
        else:
            low, high = _HUES[shown]
            assert low <= turn * 360 <= high, colour


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (".gpu.held", "held"),
        (".gpu.reserved", "reserved"),
        (".gpu.kept", "kept"),
        (".gpu.quarantined", "quarantined"),
        (".gpu.silent", "silent"),
        (".runs", "running"),
        (".done", "done"),
        (".silent", "silent"),
    ],
)
def test_what_the_page_draws_has_the_colour_of_its_state(rule: str, state: str) -> None:
    assert on_the_page(rule) == on_the_page(f".{colour_of(state)}")

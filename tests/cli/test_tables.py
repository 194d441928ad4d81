"""Tables on terminals of any width: no line is broken, what is left out is named, a pipe gets everything."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import pytest

from gangq.cli.tables import Column, table

ROWS: Sequence[Sequence[str]] = [
    ("17", "running", "train", "w" * 20, "waits for a gang of 4 that starts at 12:30, before it", ""),
    ("1234", "pending", "a task with a long name", "w2", "no worker offers 8 GPUs", ""),
]
TITLES = ("id", "state", "task", "worker", "why", "nothing")
RANKS = (0, 0, 0, 2, 0, 1)

Shown = Callable[[int, Sequence[Sequence[str]]], list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines of a table on a terminal of that width; 0: in a pipe. Last what standard error says, if anything."""

    def show(width: int, rows: Sequence[Sequence[str]]) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: width > 0)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        columns = [
            Column(title, lambda row, i=i: row[i], right=not i, rank=RANKS[i])  # type: ignore[misc]
            for i, title in enumerate(TITLES)
        ]
        table(rows, columns)
        out, err = capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    return show


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_broken(shown: Shown, width: int) -> None:
    lines = shown(width, ROWS)
    assert len([line for line in lines if not line.startswith("not shown")]) == 3
    assert max(len(line) for line in lines[:3]) <= width
    assert lines[1].split()[:2] == ["17", "running"]


def test_texts_are_cut_before_columns_go_and_those_that_go_are_named(shown: Shown) -> None:
    wide, at_80 = shown(200, ROWS), shown(80, ROWS)
    assert wide[0].split() == ["ID", "STATE", "TASK", "WORKER", "WHY"], (
        "a column that says nothing is not shown"
    )
    assert ROWS[0][4] in wide[1]
    assert "WORKER" not in at_80[0]
    assert "…" in at_80[1]
    assert at_80[3] == "not shown: worker (a wider terminal or a pipe shows all)"


def test_a_pipe_gets_every_column_and_every_word(shown: Shown) -> None:
    lines = shown(0, ROWS)
    assert lines[0].split() == ["ID", "STATE", "TASK", "WORKER", "WHY", "NOTHING"]
    assert all(cell in lines[1] for cell in ROWS[0])
    assert lines[1] == lines[1].rstrip()


def test_wide_characters_take_two_columns_and_no_rows_are_a_header(shown: Shown) -> None:
    rows = [("1", "done", "画像の学習", "w", "x", ""), ("2", "done", "train", "w", "x", "")]
    first, second = shown(200, rows)[1:3]
    assert first.index("w") + len("画像の学習") == second.index("w")
    assert shown(200, []) == ["ID  STATE  TASK  WORKER  WHY  NOTHING"]

"""Tables: as wide as they are in a pipe, as wide as the terminal on one.

On a terminal no cell is broken into lines. What does not fit is given up in this order: columns that say nothing, the
ends of long texts, columns of higher rank, and the ends of texts again. Standard error names the columns left out.
"""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gangq.cli import output

_GAP = 2
_LONG = 32
"""A text keeps so many characters while there are columns to leave out."""
_LEAST = 10
"""And at least so many."""


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, and the cell's text of a row. `state`: coloured by its value. `rank`: in a
    terminal that is too narrow the columns of the highest rank are left out first, those of rank 0 never.
    """

    title: str
    cell: Callable[[Any], object]
    right: bool = False
    state: bool = False
    rank: int = 0


def table(rows: Sequence[Any], columns: Sequence[Column]) -> None:
    """Print a table: all of it to a pipe, what fits to a terminal."""
    cells = [[output.plain(column.cell(row)) for column in columns] for row in rows]
    titles = [output.plain(column.title).upper() for column in columns]
    widths = [max(map(_width, texts)) for texts in zip(titles, *cells, strict=True)]
    shown = list(range(len(columns)))
    if on_terminal := sys.stdout.isatty():
        shown = [i for i in shown if not cells or any(row[i] not in ("", "?") for row in cells)]
        _fit(widths, shown, columns, shutil.get_terminal_size().columns)
    for number, line in enumerate([titles, *cells]):
        parts: list[str] = []
        for i in shown:
            text, column = _cut(line[i], widths[i]), columns[i]
            pad = " " * (widths[i] - _width(text))
            if not number:
                text = output.bold(text)
            elif column.state:
                text = output.coloured(text, output.STATE_COLOURS.get(text))
            last = i == shown[-1] and not column.right
            parts += [pad, text] if column.right else [text, "" if last else pad]
            parts.append("" if i == shown[-1] else " " * _GAP)
        output.write(*(parts if on_terminal else ["".join(parts).rstrip()]))
    gone = [
        i for i in range(len(columns)) if i not in shown and any(row[i] not in ("", "?") for row in cells)
    ]
    if gone:
        titles = [columns[i].title for i in gone]
        output.write(f"not shown: {', '.join(titles)} (a wider terminal or a pipe shows all)", err=True)


def _fit(widths: list[int], shown: list[int], columns: Sequence[Column], most: int) -> None:
    """Make the columns narrower, and leave some out, until they fit into `most` characters."""

    def over() -> int:
        return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1) - most

    def shorten(least: int) -> None:
        while over() > 0:
            texts = [i for i in shown if not columns[i].right and not columns[i].state and widths[i] > least]
            if not texts:
                return
            longest = max(texts, key=widths.__getitem__)
            widths[longest] = max(least, widths[longest] - over())

    shorten(_LONG)
    while over() > 0 and any(columns[i].rank for i in shown):
        shown.remove(max(shown, key=lambda i: columns[i].rank))
    shorten(_LEAST)


def _cut(text: str, width: int) -> str:
    if _width(text) <= width:
        return text
    while text and _width(text) >= width:
        text = text[:-1]
    return f"{text}…"


def _width(text: str) -> int:
    """How many columns of a terminal it takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )

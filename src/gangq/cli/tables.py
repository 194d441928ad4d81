"""Tables: as wide as they are in a pipe, as wide as the terminal on one.

On a terminal only a list in the last column is broken into lines. What does not fit is given up in this order:
columns that say nothing, the ends of long texts, columns of higher rank, and the ends of texts again. Standard error
names the columns left out.
"""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter, itemgetter
from typing import Any

import click

from gangq.cli import output

_GAP = 2
_LONG = 32
"""A text keeps so many characters while there are columns to leave out."""
_LEAST = 10
"""And at least so many."""


Cell = Callable[[Any], object]
"""Makes what a cell shows of a row."""

_FIELDS = {
    "ago": "at",
    "ended": "finished_at",
    "gang": "gang_id",
    "job": "job_id",
    "prio": "priority",
    "submitted": "submitted_at",
}
"""Columns that are of one field in every table, where that has another name."""
_CELLS: Mapping[str, Cell] = {
    "at": lambda row: output.instant(row.at),
    "tries": lambda row: f"{row.attempts}/{row.max_attempts}",
}
"""Columns that look alike in every table, and are no field alone."""
_BY_SUFFIX: Mapping[str, Callable[[Any], object]] = {
    "_s": output.seconds,
    "_mb": lambda value: "" if value is None else output.megabytes(value),
    "_rate": lambda value: "" if value is None else f"{value:.3g}",
    "_pct": lambda value: output.known(value, "%"),
    "_c": lambda value: output.known(value, "C"),
    "_w": lambda value: output.known(value, "W"),
    "gang_id": output.gang,
}
"""How a field looks whose name says its unit."""
COLOURED = ("state", "health", "outcome")


class Listed(str):
    """A cell's words between commas. No word of it is cut; in the last column they are broken into lines."""

    __slots__ = ()

    def words(self) -> list[str]:
        """Each with the comma behind it."""
        return re.findall("[^,]+,?", self)

    def in_lines(self, most: int) -> list[str]:
        """The words in lines of at most so many characters, or of one word."""
        lines = [""]
        for word in self.words():
            if lines[-1] and width(lines[-1] + word) > most:
                lines.append("")
            lines[-1] += word
        return lines


@dataclass(frozen=True)
class Column:
    """One column of a table. `right`: its texts are at the right, as numbers always are. `rank`: where a terminal is
    too narrow the columns of the highest rank are left out first, those of rank 0 never. `value`: the number, time or
    text itself, where the cell is not that.
    """

    title: str
    cell: Cell
    right: bool = False
    rank: int = 0
    value: Cell | None = None


def columns(names: str, cells: Mapping[str, Cell] | None = None) -> list[Column]:
    """Return the columns of these names, each as `cells` has it, else as in every table, else the field of its name.
    `name=field` is another field, `name=field.key` a key of it. `>name` is at the right, `name:2` has rank 2, an
    underscore is a blank of the title.
    """
    found = []
    for right, name, given, rank in re.findall(r"(>?)([^\s:>=]+)=?([^\s:]*):?(\d*)", names):
        field = given or _FIELDS.get(name, name)
        own = (cells or {}).get(name) or _CELLS.get(name)
        value = _value(field) if given or not own else None
        cell = own or _shown(field)
        found.append(Column(name.replace("_", " "), cell, bool(right), int(rank or 0), value))
    return found


def pairs(row: Any, names: str, cells: Mapping[str, Cell] | None = None) -> None:
    """Print the `columns` of one row below each other, times as `output.moment`; `name?`: not where it is 0."""
    shown: list[tuple[str, object]] = []
    for name, column in zip(names.split(), columns(names.replace("?", ""), cells), strict=True):
        value = column.value(row) if column.value else None
        value = value if isinstance(value, datetime) else column.cell(row)
        shown.append((column.title, (value or None) if "?" in name else value))
    output.pairs(shown)


def _value(field: str) -> Cell:
    """Return what reads a field. What the name of the field says is looked up here, and not again for each row."""
    name, _, key = field.partition(".")

    def value(row: Any) -> Any:
        found = row[name] if isinstance(row, dict) else getattr(row, name)
        if key:
            found = (found or {}).get(key)
        return output.words(found) if isinstance(found, (list, tuple)) else found

    return value


def _shown(field: str) -> Cell:
    """Return what makes a cell of a field: times as how long ago."""
    read = _value(field)
    show = next((show for suffix, show in _BY_SUFFIX.items() if field.endswith(suffix)), None)

    def cell(row: Any) -> object:
        value = read(row)
        if isinstance(value, datetime):
            return output.ago(value)
        return show(value) if show else value

    return cell


def choose(columns: Sequence[Column], names: Sequence[str], row: Any) -> list[Column]:
    """Return the columns of these names: those of the table, or attributes of its rows, such as `row`.

    Raises:
        click.UsageError: there is no such column.
    """
    known = {column.title.casefold().replace(" ", "_"): column for column in columns}
    own: Mapping[str, Cell] = (
        {key: itemgetter(key) for key in row}
        if isinstance(row, dict)
        else {key.rstrip("_"): attrgetter(key) for key in row._fields}
    )
    fields = {field: Column(field, cell) for field, cell in own.items()}
    wanted = [name.strip().casefold().replace(" ", "_") for name in names]
    for name in wanted:
        if name not in known and name not in fields:
            raise click.UsageError(f"no column {name!r}: {', '.join(dict.fromkeys([*known, *fields]))}")
    return [replace(known.get(name) or fields[name], rank=0) for name in wanted]


def pick(row: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return these fields of a row. Raises `click.UsageError` where one is none of it."""
    fields = _fields(row)
    for name in names:
        if name not in fields:
            raise click.UsageError(f"no key {name!r}: {', '.join(fields)}")
    return {name: fields[name] for name in names}


def _fields(row: Any) -> Mapping[str, Any]:
    return row if isinstance(row, dict) else {key.rstrip("_"): value for key, value in row._asdict().items()}


def table(rows: Sequence[Any], columns: Sequence[Column], *, wide: bool | None = None) -> None:
    """Print a table: all of it to a pipe or with `wide`, what fits to a terminal.

    `wide` is None where the command has no such option.
    """
    values = [[column.cell(row) for column in columns] for row in rows]
    cells = [[_text(value) for value in row] for row in values]
    columns = [
        replace(column, right=column.right or all(map(_is_number, told)))
        for column, *told in zip(columns, *values, strict=True)
    ]
    titles = [output.plain(column.title).upper() for column in columns]
    widths = [max(map(width, texts)) for texts in zip(titles, *cells, strict=True)]
    shown = list(range(len(columns)))
    on_terminal = sys.stdout.isatty()
    if on_terminal and not wide:
        shown = fit(widths, cells, columns, shutil.get_terminal_size().columns)
    lines = [titles]
    for texts in cells:
        last = shown[-1]
        text = texts[last]
        first, *more = text.in_lines(widths[last]) if isinstance(text, Listed) else [text]
        lines.append([*texts[:last], first])
        lines += [[*[""] * last, words] for words in more]
    for number, line in enumerate(lines):
        parts: list[str] = []
        for i in shown:
            text, column = cut(line[i], widths[i]), columns[i]
            pad = " " * (widths[i] - width(text))
            if not number:
                text = output.bold(text)
            elif column.title in COLOURED:
                text = output.state(text)
            last = i == shown[-1] and not column.right
            parts += [pad, text] if column.right else [text, "" if last else pad]
            parts.append("" if i == shown[-1] else " " * _GAP)
        while parts and not parts[-1].strip():
            parts.pop()
        output.write(*(parts if on_terminal else ["".join(parts).rstrip()]))
    gone = [
        i for i in range(len(columns)) if i not in shown and any(map(_is_known, (row[i] for row in cells)))
    ]
    if gone:
        titles = [columns[i].title for i in gone]
        said = f"not shown: {', '.join(titles)}" + ("" if wide is None else " (--wide or a pipe shows all)")
        output.write(output.wrapped(said, len("not shown: "), err=True), err=True)


def fit(widths: list[int], cells: Sequence[Sequence[str]], columns: Sequence[Column], most: int) -> list[int]:
    """Make the columns narrower, and leave some out, until they fit into `most` characters; return those shown."""
    shown = [i for i in range(len(columns)) if not cells or any(map(_is_known, (row[i] for row in cells)))]
    whole = list(widths)
    floors = [max((_longest_word(row[i]) for row in cells), default=0) for i in range(len(columns))]

    def over() -> int:
        return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1) - most

    def shorten(least: int) -> None:
        while over() > 0:
            texts = [
                i
                for i in shown
                if not columns[i].right
                and columns[i].title not in COLOURED
                and widths[i] > max(least, floors[i])
            ]
            if not texts:
                return
            longest = max(texts, key=widths.__getitem__)
            widths[longest] = max(least, floors[longest], widths[longest] - over())

    shorten(_LONG)
    while over() > 0 and any(columns[i].rank for i in shown):
        shown.remove(max(shown, key=lambda i: columns[i].rank))
    shorten(_LEAST)
    # What a column left behind is for the texts that were cut for it, the last one first.
    for i in reversed(shown):
        widths[i] = min(whole[i], widths[i] + max(0, -over()))
    return shown


def _text(value: object) -> str:
    return Listed(output.plain(value)) if isinstance(value, Listed) else output.plain(value)


def _longest_word(text: str) -> int:
    """Of a list; 0 for a text, which may be cut anywhere."""
    return max(map(width, text.words()), default=0) if isinstance(text, Listed) else 0


def _is_known(text: str) -> bool:
    """Whether a cell says anything: `?`, and readings that are all unknown, as `?,?` and `?/?`, do not."""
    return not set(text) <= set("?,/")


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def cut(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis."""
    if width(text) <= most:
        return text
    kept = used = 0
    while kept < len(text) and (used := used + width(text[kept])) < most:
        kept += 1
    return f"{text[:kept]}…"


def width(text: str) -> int:
    """How many columns of a terminal it takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )

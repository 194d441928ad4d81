"""How answers look: colours on a terminal, plain text in a pipe, JSON for programs.

Names, reasons, errors and evidence come from others. Everything the command line prints goes through `write`, which
takes from it what a terminal would obey; the output of jobs goes through `job_output`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import click

from gangq.colours import colour_of
from gangq.durations import in_short


class Coloured(str):
    """Text of ours that carries the escapes of its colour: `write` lets it through."""

    __slots__ = ()


_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # OSC, DCS and their like, with what they carry
    r"|\x1b[ -/]*[0-~]"
)
_HARMLESS = re.compile(r"\x1b\[[0-9;]*[mK]")
"""Colours, and the erasing of a line that progress bars use."""


def write(*parts: str, err: bool = False, nl: bool = True) -> None:
    """Print text, to standard error with `err`. Of what is not `Coloured` only lines, tabs and printable characters
    remain; anything else becomes U+FFFD.
    """
    text = "".join(part if isinstance(part, Coloured) else harmless(part) for part in parts)
    click.echo(text, err=err, nl=nl)


def say(text: str) -> None:
    """Say something on standard error, with our name in front; a terminal breaks no word of it."""
    lines = [wrapped(line, err=True) for line in f"gangq: {text}".splitlines()]
    write("\n".join(lines), err=True)


def harmless(text: str) -> str:
    """The text without what a terminal would obey, its lines and tabs kept."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def job_output(text: str) -> None:
    """Print what a job has printed, without a newline of ours: to a file or pipe as it is; to a terminal with its
    colours and carriage returns, but without the escapes that move the cursor, set titles or the clipboard.
    """
    if sys.stdout.isatty():
        kept = _ESCAPES.sub(lambda found: found[0] if _HARMLESS.fullmatch(found[0]) else "", text)
        parts = _HARMLESS.split(kept)
        escapes = _HARMLESS.findall(kept)
        text = "".join(
            "\r".join(map(harmless, part.split("\r"))) + escape
            for part, escape in zip(parts, [*escapes, ""], strict=True)
        )
    # click would strip colours where it sees no terminal.
    click.echo(text, nl=False, color=True)


def to_json(value: object) -> str:
    """One line of JSON. Rows and dataclasses become objects, times ISO 8601, intervals seconds.

    What no terminal should see is escaped as JSON does it: a reader gets the same string.
    """
    line = json.dumps(_objects(value), default=_plain, ensure_ascii=False)
    # json.dumps leaves DEL alone.
    escaped = (c if c.isprintable() else json.dumps(c)[1:-1].replace("\x7f", "\\u007f") for c in line)
    return line if line.isprintable() else "".join(escaped)


def _objects(value: Any) -> Any:
    """The value with objects in place of rows, which to json are lists. A key that is a keyword of Python has an
    underscore behind it in a row.
    """
    if isinstance(value, dict):
        return {key: _objects(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return {key.rstrip("_"): _objects(item) for key, item in value._asdict().items()}
    return [_objects(item) for item in value] if isinstance(value, (list, tuple)) else value


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    return str(value)


def gang(id: int | None) -> str:
    """How a gang is written."""
    return "" if id is None else f"g{id}"


def clock() -> datetime:
    """The time now."""
    return datetime.now(UTC)


def ago(at: datetime | None) -> str:
    """How long ago a time is, or how far ahead: 3m05s ago, in 2h10m."""
    if at is None:
        return ""
    passed = (clock() - at).total_seconds()
    return f"{seconds(passed)} ago" if passed >= 0 else f"in {seconds(-passed)}"


def when(at: datetime | None) -> str:
    """A time in this machine's zone, to the second; the date only where it is not today's."""
    if at is None:
        return ""
    local = at.astimezone()
    today = local.date() == clock().astimezone(local.tzinfo).date()
    return local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S")


def moment(at: datetime | None) -> str:
    """A time as people ask for it, and as a log has it: 3m05s ago (14:02:11)."""
    return "" if at is None else f"{ago(at)} ({when(at)})"


def instant(at: datetime) -> str:
    """A time to the millisecond: a drain is over in less than a second."""
    return f"{when(at)}.{at.microsecond // 1000:03d}"


def seconds(value: float | None) -> str:
    """A length of time, short: 0.4s, 12s, 3m05s, 2h10m, 3d04h."""
    if value is None:
        return ""
    if abs(value) < 10:
        return f"{value:.1f}s"
    return ("-" if value < 0 else "") + in_short(round(abs(value))).replace(" ", "")


def megabytes(value: int | None) -> str:
    """An amount of memory given in MiB."""
    if not value:
        return "0"
    return f"{value}MiB" if value < 1024 else f"{value / 1024:.4g}GiB"


def words(values: Sequence[object] | None) -> str:
    """A list in a cell."""
    return ",".join(str(value) for value in values or ())


def known(value: object, unit: str = "") -> str:
    """A measured value with its unit; ? for what nobody knows, which is not 0."""
    if value is None:
        return "?"
    return f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"


def colourful() -> bool:
    """Whether standard output may carry colours."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, colour: str | None) -> str:
    """`text` in a colour, where standard output may carry one."""
    return Coloured(click.style(text, fg=colour)) if colour and colourful() else text


def state(text: str) -> str:
    """A state in its colour, where standard output may carry one."""
    return coloured(text, colour_of(text))


def bold(text: str) -> str:
    """`text` in bold, where standard output may be coloured."""
    return Coloured(click.style(text, bold=True)) if colourful() else text


def pairs(items: Sequence[tuple[str, object]]) -> None:
    """Print names and values below each other, times as `moment` has them; empty values are left out."""
    shown = [
        (name, moment(value) if isinstance(value, datetime) else plain(value))
        for name, value in items
        if value not in (None, "", [], {})
    ]
    width = max((len(name) for name, _ in shown), default=0)
    for name, text in shown:
        write(f"{name.ljust(width)}  ", state(text) if name == "state" else text)


def wrapped(text: str, indent: int = 0, begins_at: int = 0, *, err: bool = False) -> str:
    """A text of one paragraph in lines of the terminal, each but the first so far to the right; one line for a pipe.
    So many characters stand in front of the first line already. `err`: it goes to standard error.
    """
    on_terminal = (sys.stderr if err else sys.stdout).isatty()
    room = shutil.get_terminal_size().columns if on_terminal else 10**6
    lines = textwrap.wrap(
        plain(text),
        max(indent + 20, room),
        initial_indent=" " * begins_at,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)[begins_at:]


def block(title: str, text: str, *, most: int | None = None) -> None:
    """Print text of others below a title, line by line, indented; of more than `most` lines the last ones."""
    lines = text.rstrip("\n").expandtabs().splitlines()
    left = len(lines) - most if most is not None else 0
    write(f"{title}:" if left <= 0 else f"{title} (the last {most} lines of {len(lines)}):")
    for line in lines[max(0, left) :]:
        write(f"  {plain(line)}")


def plain(value: object) -> str:
    """A cell's text: of one line, and nothing in it that a terminal would obey."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return when(value)
    if isinstance(value, (dict, list)):
        value = to_json(value)
    text = str(value)
    if text.isprintable():
        return text
    # Names and reasons come from others: no line of theirs may break a table or drive the terminal.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

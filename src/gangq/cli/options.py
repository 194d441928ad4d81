"""Options that several commands have, those that are settings of the database, and those of looks."""

from __future__ import annotations

import functools
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from gangq.cli import output, stored
from gangq.cli.parsing import Amounts, KeyValue, ParamType, Seconds
from gangq.cli.session import chained, common_options, sets

LEAST_S = 0.5
"""No look is repeated sooner: each asks the database."""
_CLEAR = output.Coloured("\x1b[H\x1b[2J")


def watch_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --watch DURATION: it answers again and again, on a terminal on a cleared screen. An exit code is
    that of one look: it ends no watch.
    """

    @functools.wraps(command)
    def watching(*args: Any, watch_s: float | None, **given: Any) -> None:
        if watch_s is None:
            command(*args, **given)
            return
        if watch_s < LEAST_S:
            raise click.UsageError(f"--watch: {LEAST_S:g}s or more; each look asks the database")
        if subcommand := click.get_current_context().invoked_subcommand:
            raise click.UsageError(f"--watch goes after {subcommand}, where that shows something to watch")
        if given.get("follow"):
            raise click.UsageError("--follow goes on by itself: leave --watch out")
        look = functools.partial(command, *args, **given)
        while True:
            with suppress(click.exceptions.Exit):
                if sys.stdout.isatty():
                    _on_a_cleared_screen(look)
                else:
                    look()
            sys.stdout.flush()
            time.sleep(watch_s)

    return click.option(
        "--watch", "watch_s", type=Seconds(), metavar="DURATION", help="Look again so often, until Ctrl-C."
    )(watching)


class _Screen(io.StringIO):
    """Holds what a command prints to a terminal."""

    def isatty(self) -> bool:
        return True


def _on_a_cleared_screen(look: Callable[[], Any]) -> None:
    """Clear the screen once the look has answered: until then the answer before stays."""
    held = _Screen()
    try:
        with redirect_stdout(held), redirect_stderr(held if sys.stderr.isatty() else sys.stderr):
            look()
    finally:
        if held.getvalue():
            output.write(_CLEAR, output.Coloured(held.getvalue()), nl=False)


look_options = chained(watch_option, common_options)
"""Those of a look."""
wide_option = click.option(
    "--wide",
    is_flag=True,
    **sets("wide", always=True),
    help="All columns, in full, however narrow the terminal is.",
)
"""Of a command that prints tables."""
columns_option = click.option(
    "-o",
    "--columns",
    metavar="LIST",
    **sets("columns", lambda given: [name for name in given.split(",") if name.strip()]),
    help="Only these columns, in this order: those of the table, or of --json.",
)
"""Of a command that answers with one table."""
table_options = chained(columns_option, wide_option, look_options)
"""Of a look that answers with one table."""

F = TypeVar("F", bound=Callable[..., Any])


class _Option(click.Option):
    """One that the help of a `Sectioned` command lists below a title."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Sectioned(click.Command):
    """A command with so many options that its help has sections; those that every command has are the last one."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options below the titles of their sections."""
        found: dict[str, list[tuple[str, str]]] = {"Options": []}
        last: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and _OF_EVERY_COMMAND.intersection(param.opts):
                last.append(record)
            elif record is not None:
                found.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in [*found.items(), ("Database and answer", last)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_OF_EVERY_COMMAND = {"--dsn", "--embedded", "--json", "--help"}

limit = click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most this many."
)
reason = click.option("--reason", help="Whoever lifts it will want to know [operator].")
device = click.option(
    "--device",
    shell_complete=stored.devices,
    metavar="ID",
    help="A device: HOST:INDEX as gangq devices shows it, or the beginning of its UUID.",
)
worker = click.option(
    "--worker",
    shell_complete=stored.workers,
    metavar="NAME",
    help="A worker by name, also after its restarts.",
)


def duration(flag: str, default: float | str, help: str) -> Callable[[F], F]:
    """Give a command a length of time that has a default. The argument is in seconds, and ends in _s."""
    name = f"{flag[2:].replace('-', '_')}_s"
    return click.option(flag, name, type=Seconds(), default=default, show_default=True, help=help)


TIMEOUT_STYLE = click.Choice(["requeue", "hard", "soft"])
THEN = (
    "requeue (back off, if no worker could hold it or its planned start is overdue; a gang that waits for capacity "
    "just waits on), hard (fail) or soft (run as single jobs)"
)
"""What `TIMEOUT_STYLE` means."""


def settings(
    of: type, texts: Mapping[str, str | tuple[ParamType, str]], section: str = "Options"
) -> Callable[[F], F]:
    """Give a command an option for each of these fields of a type: the help, or the type where that is not the
    field's, and the help. `name=--flag METAVAR` where the flag is not the name, without the `_s` of seconds, or the
    metavar is not the type's.

    A list may be given again and again. What is true or false is --x or --no-x; where it may be None, or the flag is
    given, the one flag. Names of queues and hosts are completed. The default of a dataclass is shown where it is a
    number. What is not given is None or empty.
    """
    hints = _hints(of)
    options = []
    for said, text in texts.items():
        declared, _, metavar = said.partition(" ")
        name, _, given = declared.partition("=")
        flag = given or f"--{name.removesuffix('_s').replace('_', '-')}"
        hint = hints[name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind, help = text if isinstance(text, tuple) else (_kind(name, parts), text)
        more: dict[str, Any] = {"type": kind, "shell_complete": _COMPLETED.get(name), "section": section}
        if kind is bool and (given or NoneType in parts):
            more |= {
                "flag_value": not flag.startswith("--no-"),
                "default": None if NoneType in parts else False,
            }
        elif kind is bool:
            flag, more = f"{flag}/--no-{flag[2:]}", {"default": None, "section": section}
        elif isinstance(kind, KeyValue) or any(get_origin(part) is Sequence for part in parts):
            more["multiple"] = True
        default = getattr(of, name, None)
        if isinstance(default, int) and default and kind is not bool:
            more |= {"default": default, "show_default": True}
        options.append(click.option(flag, name, cls=_Option, metavar=metavar or None, help=help, **more))
    return chained(*options)


_hints = functools.cache(get_type_hints)
"""Kept: it takes a millisecond for the options of a job, whose sections ask for it one by one."""
_COMPLETED = {"queue": stored.queues, "queues": stored.queues, "avoid_hosts": stored.hosts}


def _kind(name: str, parts: Sequence[Any]) -> Any:
    """The type of the option of a field."""
    if name.endswith("_s"):
        return Seconds()
    if get_origin(parts[0]) is Mapping:
        return KeyValue() if Any in get_args(parts[0]) else Amounts()
    return next((part for part in parts if part in (bool, int, float)), str)

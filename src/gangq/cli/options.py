"""Options that several commands have, and those that are settings of the database: each is said once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from gangq.cli import stored
from gangq.cli.parsing import KeyValue, ParamType, Resources, Seconds

F = TypeVar("F", bound=Callable[..., Any])


def chained(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Give a command these options, in this order."""

    def attach(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return attach


def section(title: str, *options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Give a command these options, which the help of a `Sectioned` command lists below this title."""

    def attach(command: F) -> F:
        before = len(getattr(command, "__click_params__", ()))
        command = chained(*options)(command)
        for param in command.__click_params__[before:]:  # type: ignore[attr-defined]
            vars(param)["section"] = title
        return command

    return attach


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
                found.setdefault(vars(param).get("section", "Options"), []).append(record)
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

TIMEOUT_STYLE = click.Choice(["requeue", "hard", "soft"])
THEN = (
    "requeue (back off, if no worker could hold it or its planned start is overdue; a gang that waits for capacity "
    "just waits on), hard (fail) or soft (run as single jobs)"
)
"""What `TIMEOUT_STYLE` means."""


def settings(of: type, texts: Mapping[str, str | tuple[ParamType, str]]) -> Callable[[F], F]:
    """Give a command an option for each of these fields of a type: the help, or the type where that is not the
    field's, and the help. `name=--flag METAVAR` where the flag is not the name, without the `_s` of seconds, or the
    metavar is not the type's.

    A list may be given again and again. What is true or false is --x or --no-x; where it may be None, the one flag.
    Names of queues and hosts are completed.
    """
    hints = get_type_hints(of)
    options = []
    for said, text in texts.items():
        declared, _, metavar = said.partition(" ")
        name, _, given = declared.partition("=")
        flag = given or f"--{name.removesuffix('_s').replace('_', '-')}"
        hint = hints[name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        kind, help = text if isinstance(text, tuple) else (_kind(name, parts), text)
        more: dict[str, Any] = {"type": kind, "shell_complete": _COMPLETED.get(name)}
        if kind is bool and type(None) in parts:
            more |= {"flag_value": not flag.startswith("--no-"), "default": None}
        elif kind is bool:
            flag, more = f"{flag}/--no-{flag[2:]}", {"default": None}
        elif isinstance(kind, KeyValue) or any(get_origin(part) is Sequence for part in parts):
            more["multiple"] = True
        options.append(click.option(flag, name, metavar=metavar or None, help=help, **more))
    return chained(*options)


_COMPLETED = {"queue": stored.queues, "avoid_hosts": stored.hosts}


def _kind(name: str, parts: Sequence[Any]) -> Any:
    """The type of the option of a field."""
    if name.endswith("_s"):
        return Seconds()
    if get_origin(parts[0]) is Mapping:
        return KeyValue() if Any in get_args(parts[0]) else Resources()
    return next((part for part in parts if part in (bool, int, float)), str)


def resettable(of: type) -> list[str]:
    """The settings of a TypedDict that may be none."""
    return [name for name, hint in get_type_hints(of).items() if type(None) in get_args(hint)]

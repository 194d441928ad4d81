"""Options of looks, the commands that show what is there now: --watch, --wide and -o."""

from __future__ import annotations

import functools
import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

import click

from gangq.cli import output
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, common_options, sets

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


def look_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a look the common options and --watch."""
    return watch_option(common_options(command))


def wide_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that prints tables --wide."""
    return click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=_set_wide,
        help="All columns, in full, however narrow the terminal is.",
    )(command)


def columns_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that answers with one table -o."""
    return click.option(
        "-o",
        "--columns",
        metavar="LIST",
        **sets("columns", lambda given: [name for name in given.split(",") if name.strip()]),
        help="Only these columns, in this order: those of the table, or of --json.",
    )(command)


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a look that answers with one table the common options, --watch, --wide and -o."""
    return columns_option(wide_option(look_options(command)))


def _set_wide(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Session).wide = value

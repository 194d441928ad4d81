"""Options of commands that show what is there now: --watch, --wide and -o."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from gangq.cli import output
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, common_options

LEAST_S = 0.5
"""No look is repeated sooner: each asks the database."""
_CLEAR = output.Coloured("\x1b[H\x1b[2J")


def watch_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --watch SECONDS: it answers again and again, on a terminal on a cleared screen."""

    @functools.wraps(command)
    def watching(*args: Any, watch_s: float | None, **given: Any) -> None:
        if watch_s is not None and watch_s < LEAST_S:
            raise click.UsageError(f"--watch: {LEAST_S:g}s or more; each look asks the database")
        while True:
            if watch_s is not None and sys.stdout.isatty():
                output.write(_CLEAR, nl=False)
            command(*args, **given)
            if watch_s is None:
                return
            sys.stdout.flush()
            time.sleep(watch_s)

    return click.option(
        "--watch", "watch_s", type=Seconds(), metavar="DURATION", help="Look again so often, until Ctrl-C."
    )(watching)


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that answers with a table the common options, --watch, --wide and -o."""
    chosen = click.option(
        "-o",
        "--columns",
        metavar="LIST",
        expose_value=False,
        callback=_set_columns,
        help="Only these columns, in this order: those of the table, or of --json.",
    )
    wide = click.option(
        "--wide",
        is_flag=True,
        expose_value=False,
        callback=_set_wide,
        help="All columns, in full, however narrow the terminal is.",
    )
    return chosen(wide(watch_option(common_options(command))))


def _set_columns(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.ensure_object(Session).columns = [name for name in value.split(",") if name.strip()]


def _set_wide(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(Session).wide = True

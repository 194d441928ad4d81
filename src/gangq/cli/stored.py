"""What the database names, for completion: ids, queues, tasks, hosts and the like."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from gangq.cli.session import Session

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_ANSWER_S = 2.0
"""Whoever has pressed TAB waits for it."""
_WORD = re.compile(r"[\w@%+=:,./][\w@%+=:,./-]*", re.ASCII)
"""What a shell takes for one word as it stands. What is offered it puts into the command line, unquoted: a task
called `$(rm -rf ~)` must not get there.
"""
_PLAIN = re.compile(r"[\w@%+=:,./ -]+", re.ASCII)


def _asks(text: str) -> Complete:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del param
        return _found(ctx, text, incomplete)

    return complete


def _newest(view: str, letter: str) -> Complete:
    return _asks(
        f"select '{letter}' || id as name, concat_ws(' ', task, state) as about "  # noqa: S608 - names of this module
        f"from gangq.{view} order by id desc limit 200"
    )


IDS = {"": _newest("jobs", ""), "g": _newest("gangs", "g"), "b": _newest("batches", "b")}
"""The newest ids, by the letter that they begin with."""


def _names(view: str, column: str = "name") -> Complete:
    return _asks(
        f"select distinct {column} as name, '' as about from gangq.{view} where {column} is not null order by 1"  # noqa: S608 - names of this module
    )


queues = _names("queues")
tasks = _names("tasks", "task")
hosts = _names("workers", "host")
workers = _names("workers")
limits = _names("limits")
schedules = _names("schedules")
services = _names("services")
targets = _names("notifications", "target")


def _found(ctx: click.Context, text: str, incomplete: str) -> list[CompletionItem]:
    """Those that begin so. None where the database does not answer at once: an error would garble the prompt."""
    # Not at the top: the names of commands and options need no database.
    from gangq import embedded
    from gangq.client import Client
    from gangq.client.verb import Query
    from gangq.errors import GangqError

    session = ctx.find_object(Session) or Session()
    query: Query[list[dict[str, Any]]] = Query("completion", text, {}, list)
    try:
        if session.private and not embedded.Server().status().running:
            return []
        with Client(session.dsn(), max_size=1, connect_s=_ANSWER_S, timeout_s=_ANSWER_S) as client:
            rows = client.execute(query)
    except (GangqError, OSError):
        return []
    return [
        CompletionItem(row["name"], help=row["about"] if _PLAIN.fullmatch(row["about"]) else None)
        for row in rows
        if row["name"].startswith(incomplete) and _WORD.fullmatch(row["name"])
    ]

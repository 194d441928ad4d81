"""What the database names: ids, queues, tasks, hosts and the like; and their completion."""

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


def _names(view: str, column: str = "name") -> str:
    return f"select distinct {column} as name, '' as about from gangq.{view} where {column} is not null order by 1"  # noqa: S608 - names of this module


NAMES = {
    "queue": _names("queues"),
    "task": _names("tasks", "task"),
    "host": _names("workers", "host"),
    "worker": _names("workers"),
    "device": _names("devices", "uuid"),
    "limit key": _names("limits"),
    "schedule": _names("schedules"),
    "service": _names("services"),
    "notification target": _names("notifications", "target"),
    "batch name": _names("batches"),
    "tag": "select distinct tag as name, '' as about from gangq.batches b, unnest(b.tags) as tag order by 1",
    "role": "select rolname::text as name, '' as about from pg_roles where rolname !~ '^pg_' order by 1",
}
"""All names of a kind of thing."""

queues = _asks(NAMES["queue"])
tasks = _asks(NAMES["task"])
hosts = _asks(NAMES["host"])
workers = _asks(NAMES["worker"])
devices = _asks(NAMES["device"])
limits = _asks(NAMES["limit key"])
schedules = _asks(NAMES["schedule"])
services = _asks(NAMES["service"])
targets = _asks(NAMES["notification target"])
batch_names = _asks(NAMES["batch name"])
tags = _asks(NAMES["tag"])
roles = _asks(NAMES["role"])


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

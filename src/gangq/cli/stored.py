"""What the database names: ids, queues, tasks, hosts and the like; their completion, and which are alike."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from gangq.cli.session import Session
from gangq.client.verb import Query
from gangq.errors import GangqError, NotFound

if TYPE_CHECKING:
    from gangq.client import Client


T = TypeVar("T")
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


_UNKNOWN = re.compile(
    rf"(?P<kind>{'|'.join(NAMES)}) '(?P<name>[^']*)' (?:does not exist|has no live worker)\b"
)
"""How functions of the database and `must_exist` say it."""
_MOST = 5
_KINDS = {"key": "limit key", "name": "batch name", "submitter": "role"}
"""Of filters that are not called as what they name."""


def unknown(client: Client, **filters: object) -> list[str]:
    """A sentence for each of these filters that is a name which nothing has: `queue="nigth"`."""
    named = [(_KINDS.get(key, key), name) for key, name in filters.items() if name is not None]
    return [
        f"{kind} {name!r} does not exist"
        for kind, name in named
        if kind in NAMES and not _is_known(client, kind, str(name))
    ]


def must_exist(client: Client, **filters: object) -> None:
    """Raise `NotFound` for the first of these filters that nothing has as a name. Asked where nothing was found."""
    for sentence in unknown(client, **filters):
        raise NotFound(sentence)


def existing(found: Sequence[T], kind: str, name: str, advice: str) -> T:
    """The one row of a thing of this name. Raises `NotFound`, with `advice` behind it, where there is none."""
    if not found:
        raise NotFound(f"{kind} {name!r} does not exist; {advice}")
    return found[0]


def alike(client: Client, problem: NotFound) -> str:
    """A sentence that names what there is in place of what the problem says there is not; empty where it cannot."""
    said = str(problem)
    if (found := _UNKNOWN.match(said)) is None:
        return ""
    names: list[str] = []
    with contextlib.suppress(GangqError):
        names = client.execute(all_of(found["kind"]))
    if close := difflib.get_close_matches(found["name"], names, 3):
        return f"Did you mean {' or '.join(close)}?"
    if not names or names[0] in said:
        return ""
    more = ", ..." if len(names) > _MOST else ""
    return f"There {'is' if len(names) == 1 else 'are'}: {', '.join(names[:_MOST])}{more}."


def _is_known(client: Client, kind: str, name: str) -> bool:
    # Any name is a task's: there is one as soon as a job is submitted for it.
    if kind == "task" and (client.tasks(task=name) or client.jobs(task=name, limit=1)):
        return True
    return name in client.execute(all_of(kind))


def all_of(kind: str) -> Query[list[str]]:
    """The names of all things of a kind."""
    return Query(kind, NAMES[kind], {}, lambda found: [row["name"] for row in found])

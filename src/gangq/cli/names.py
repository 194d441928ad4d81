"""Names of things in the database: whether there is such a one, and which are alike."""

from __future__ import annotations

import contextlib
import difflib
import re
from typing import TYPE_CHECKING, Any

from gangq.cli import stored
from gangq.client.verb import Query
from gangq.errors import GangqError, NotFound

if TYPE_CHECKING:
    from gangq.client import Client

_UNKNOWN = re.compile(
    rf"(?P<kind>{'|'.join(stored.NAMES)}) '(?P<name>[^']*)' (?:does not exist|has no live worker)\b"
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
        if kind in stored.NAMES and not _is_known(client, kind, str(name))
    ]


def must_exist(client: Client, **filters: object) -> None:
    """Raise `NotFound` for the first of these filters that nothing has as a name. Asked where nothing was found."""
    for sentence in unknown(client, **filters):
        raise NotFound(sentence)


def alike(client: Client, problem: NotFound) -> str:
    """A sentence that names what there is in place of what the problem says there is not; empty where it cannot."""
    said = str(problem)
    if (found := _UNKNOWN.match(said)) is None:
        return ""
    names: list[str] = []
    with contextlib.suppress(GangqError):
        names = client.execute(_names(found["kind"]))
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
    return name in client.execute(_names(kind))


def _names(kind: str) -> Query[list[str]]:
    def read(rows: list[dict[str, Any]]) -> list[str]:
        return [row["name"] for row in rows]

    return Query(kind, stored.NAMES[kind], {}, read)

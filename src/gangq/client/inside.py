"""What a client does inside a job, where an App was given no database: it submits through the job's worker.

A job's process learns no DSN. Its worker submits in the job's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gangq.client.rows import GangSubmitted, UniqueGangSubmitted, UniqueSubmitted
from gangq.client.verb import Query
from gangq.errors import InvalidInput

if TYPE_CHECKING:
    from gangq.context import Context

R = TypeVar("R")

ROWS: dict[str, type[GangSubmitted | UniqueSubmitted | UniqueGangSubmitted]] = {
    "submit_gang": GangSubmitted,
    "submit_unique": UniqueSubmitted,
    "submit_unique_gang": UniqueGangSubmitted,
}


def through_worker(context: Context, query: Query[R]) -> R:
    """Have the worker submit what `query` would. Raises `InvalidInput` for every other verb."""
    verb = query.name.removeprefix("gangq.")
    if verb != "submit" and verb not in ROWS:
        raise InvalidInput(
            f"{query.name} needs a database, and a job has none of its own: inside a job App() only submits, "
            'through its worker. For all else give it an address: gangq.App("postgresql://...")'
        )
    answer = context.submit_child(verb, query.params)
    if verb == "submit":
        return query.read([(id,) for id in answer["job_ids"]])
    return query.read([ROWS[verb](**answer)])

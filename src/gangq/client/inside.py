"""What a client does inside a job, where an App was given no database: it submits through the job's worker.

A job's process learns no DSN. Its worker submits in the job's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from gangq.client.rows import GangSubmitted
from gangq.client.verb import Query
from gangq.errors import InvalidInput

if TYPE_CHECKING:
    from gangq.context import Context

R = TypeVar("R")


def through_worker(context: Context, query: Query[R]) -> R:
    """Have the worker submit what `query` would. Raises `InvalidInput` for every other verb."""
    if query.name not in ("gangq.submit", "gangq.submit_gang"):
        raise InvalidInput(
            f"{query.name} needs a database, and a job has none of its own: inside a job App() only submits, "
            'through its worker. For all else give it an address: gangq.App("postgresql://...")'
        )
    answer = context.submit_child(query.name.removeprefix("gangq."), query.params)
    if query.name == "gangq.submit":
        return query.read([(id,) for id in answer["job_ids"]])
    return query.read([GangSubmitted(answer["gang_id"], answer["job_ids"], answer["note"])])

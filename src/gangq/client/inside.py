"""SubmitterVerbs from inside a job: the client of an App that was given no database there.

A job's process learns no DSN. It submits through its worker, which does so in the job's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gangq.client.aio import AsyncClient
from gangq.client.rows import GangSubmitted
from gangq.client.sync import Client
from gangq.client.verb import Query, Steps
from gangq.context import Context
from gangq.errors import InvalidInput

R = TypeVar("R")


def _through_worker(context: Context, query: Query[R]) -> R:
    answer = context.submit_child(query.name.removeprefix("gangq."), query.params)
    if query.name == "gangq.submit":
        return query.read([(id,) for id in answer["job_ids"]])
    return query.read([GangSubmitted(answer["gang_id"], answer["job_ids"], answer["note"])])


def _refuse_others(query: Query[R]) -> None:
    if query.name not in ("gangq.submit", "gangq.submit_gang"):
        raise InvalidInput(
            f"{query.name} needs a database, and a job has none of its own: inside a job App() only submits, "
            'through its worker. For all else give it an address: gangq.App("postgresql://...")'
        )


class JobClient(Client):
    """`Client` inside a job: `submit` and `submit_gang` go through the worker, which submits in the job's name.

    Verbs with `connection` run on that connection, as everywhere. Every other verb raises `InvalidInput`.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    def execute(self, query: Query[R] | Steps[R]) -> R:
        """Carry out one query of `gangq.client.verbs`."""
        if not isinstance(query, Query) or query.connection is not None:
            return super().execute(query)
        _refuse_others(query)
        return _through_worker(self.context, query)


class AsyncJobClient(AsyncClient):
    """`JobClient` for asyncio."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context

    async def execute(self, query: Query[R] | Steps[R]) -> R:
        """Carry out one query of `gangq.client.verbs`."""
        if not isinstance(query, Query) or query.connection is not None:
            return await super().execute(query)
        _refuse_others(query)
        ask: Callable[[Context, Query[R]], R] = _through_worker
        return await asyncio.to_thread(ask, self.context, query)

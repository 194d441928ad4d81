"""What a program declares in code and stores in the database: schedules and services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from gangq.client.verb import Query, Steps, in_tuples
from gangq.errors import GangqError, NotAllowed


class Declared(Protocol):
    """A schedule or a service."""

    @property
    def name(self) -> str:
        """Under which it is stored."""
        ...


D = TypeVar("D", bound=Declared)


def store(
    what: str,
    declared: Iterable[D],
    one: Callable[[D], Query[Any]],
    all_of: Callable[[Sequence[str]], Query[list[str]]],
) -> Steps[tuple[dict[str, GangqError], list[str]]]:
    """Store what a program declares. Return those that were refused, with why, and the names of those that it no
    longer declares.

    `what` is "schedule" or "service", `one` stores one of them, `all_of` says which there are, by name.

    Raises `NotAllowed` where there are some and this login is no submitter, and what is no answer to one of them.
    """
    listed = [*declared]
    may = yield Query(
        "gangq.may_act_as",
        "select gangq.may_act_as('gangq_submitter') or gangq.is_admin()",
        {},
        lambda found: found[0][0],
        factory=in_tuples,
    )
    if not may and not listed:
        return {}, []
    if not may:
        raise NotAllowed(f"only a submitter stores {what}s: grant gangq_submitter to this login")
    refused: dict[str, GangqError] = {}
    for item in listed:
        try:
            yield from one(item)
        except GangqError as problem:
            if problem.retryable:
                raise
            refused[item.name] = problem
    undeclared = yield from all_of([item.name for item in listed])
    return refused, undeclared

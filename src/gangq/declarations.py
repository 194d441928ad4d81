"""What a program declares in code and stores in the database: schedules and services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from gangq.client.verb import Query, Steps, in_tuples
from gangq.client.verbs import Verbs
from gangq.errors import GangqError, InvalidInput, NotAllowed, NotFound
from gangq.task_options import ONCE, TaskOptions

if TYPE_CHECKING:
    from gangq.app import App
    from gangq.tasks import Task

Row = TypeVar("Row")


@dataclass(frozen=True, eq=False)
class Declared:
    """A schedule or a service that an App declares. Its `name` is unique in the database."""

    app: App
    name: str
    arguments: Mapping[str, Any]
    """Those of `Client.set_schedule`, or of `Client.set_service`."""
    kind: ClassVar[str]

    def _stored(self, found: list[Row]) -> Row:
        if not found:
            raise NotFound(
                f"{self.kind} {self.name!r} is not stored: workers store it when they start, and "
                f"App.store_{self.kind}s"
            )
        return found[0]


def require_repeatable(kind: str, task: Task[..., Any], options: TaskOptions) -> None:
    """Raise `InvalidInput` for an option that only one submission can have."""
    wrong = next((name for name in ONCE if options.get(name)), None)
    if wrong is not None:
        raise InvalidInput(
            f"a {kind} of task {task.name!r} has the option {wrong}, which is for one submission"
        )


def store(
    kind: str, declared: Iterable[Declared], source: str
) -> Steps[tuple[dict[str, GangqError], list[str]]]:
    """Store the schedules, or the services, that the program `source` declares. Return those that were refused, with
    why, and the names of those that it no longer declares.

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
        raise NotAllowed(f"only a submitter stores {kind}s: grant gangq_submitter to this login")
    refused: dict[str, GangqError] = {}
    for item in listed:
        try:
            if kind == "schedule":
                yield from Verbs.set_schedule(**item.arguments)
            else:
                yield from Verbs.set_service(**item.arguments, source=source)
        except GangqError as problem:
            if problem.retryable:
                raise
            refused[item.name] = problem
    declare = Verbs.declare_schedules if kind == "schedule" else Verbs.declare_services
    undeclared = yield from declare(source=source, names=[item.name for item in listed])
    return refused, undeclared

"""A job or a gang: how it is written, and what is asked of the one as of the other."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gangq.cli import stored
from gangq.cli.parsing import ParamType

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gangq.client import Client
    from gangq.client.rows import EventRow, JobRow, Reason, StateChange

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Which:
    """A job (`12`) or a gang (`g12`)."""

    id: int
    gang: bool

    def __str__(self) -> str:
        return f"g{self.id}" if self.gang else str(self.id)

    @property
    def phrase(self) -> str:
        """How it is written in a sentence."""
        return f"{'gang' if self.gang else 'job'} {self}"

    @property
    def named(self) -> dict[str, Any]:
        """Its id by the name that it has as an argument."""
        return {"gang_id" if self.gang else "job_id": self.id}

    def state(self, client: Client) -> str:
        """Its state; empty if there is none of that id."""
        states = client.gang_states(ids=[self.id]) if self.gang else client.job_states(ids=[self.id])
        return states.get(self.id, "")

    def jobs(self, client: Client) -> list[JobRow]:
        """The job, or the members by rank. Raises `NotFound`."""
        if not self.gang:
            return [client.job(id=self.id)]
        client.gang(id=self.id)
        return sorted(client.jobs(gang_id=self.id, limit=None), key=lambda member: member.rank or 0)

    def events(self, client: Client, after_id: int | None = None) -> list[EventRow]:
        """All of its events, or those after one."""
        return client.events(**self.named, after_id=after_id, limit=None)

    def explain(self, client: Client) -> list[Reason]:
        """Why it does or does not run. Raises `NotFound`."""
        return client.explain_gang(gang_id=self.id) if self.gang else client.explain_job(job_id=self.id)

    def cancel(self, client: Client, reason: str) -> list[StateChange]:
        """Cancel it. Raises `NotFound`, `Busy`."""
        ids: dict[str, Any] = {"gang_ids" if self.gang else "job_ids": [self.id]}
        return client.cancel(**ids, reason=reason)


class WhichType(ParamType):
    """`12` is a job, `g12` a gang; with `gangs_only` `12` is one too."""

    name = "id"

    def __init__(self, gangs_only: bool = False) -> None:
        self._gangs_only = gangs_only

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Which:
        """Read an id."""
        if isinstance(value, Which):
            return value
        match = re.fullmatch(r"(g?)(\d{1,18})", str(value).strip(), re.ASCII)
        if match is None:
            self.fail(f"{value!r} is no id: a job is written 12, a gang g12", param, ctx)
        return Which(int(match[2]), bool(match[1]) or self._gangs_only)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The newest ids."""
        complete = stored.gang_ids if self._gangs_only else stored.ids
        return complete(ctx, param, incomplete)


_gang = functools.partial(
    click.option, "--gang", type=click.IntRange(min=1), metavar="N", help="The same as gN."
)


def takes_one(*, optional: bool = False, gangs_only: bool = False) -> Callable[[F], F]:
    """Give a command `target`, the one job or gang that ID or --gang N names; `optional`: it may be None."""

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_target(*args: Any, which: Which | None, gang: int | None, **more: Any) -> Any:
            named = [which] if which else []
            named += [] if gang is None else [Which(gang, True)]
            if len(named) > 1 or not (named or optional):
                raise click.UsageError("name one job (12) or one gang (g12)")
            return command(*args, target=named[0] if named else None, **more)

        metavar = ("[gN]" if optional else "gN") if gangs_only else "ID"
        argument = click.argument("which", type=WhichType(gangs_only), required=False, metavar=metavar)
        return argument(_gang()(with_target))  # type: ignore[return-value]

    return decorate


def takes_several(command: F) -> F:
    """Give a command `ids`: the `job_ids` and `gang_ids` that ID... and --gang N name."""

    @functools.wraps(command)
    def with_ids(*args: Any, which: tuple[Which, ...], gang: tuple[int, ...], **more: Any) -> Any:
        named = [*which, *(Which(id, True) for id in gang)]
        if not named:
            raise click.UsageError("name at least one job (12) or gang (g12)")
        ids = {"job_ids": [w.id for w in named if not w.gang], "gang_ids": [w.id for w in named if w.gang]}
        return command(*args, ids=ids, **more)

    argument = click.argument("which", type=WhichType(), nargs=-1, metavar="ID...")
    return argument(_gang(multiple=True)(with_ids))  # type: ignore[return-value]

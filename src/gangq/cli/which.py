"""A job, a gang or a batch: how it is written, and what is asked of the one as of the other."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gangq.cli import stored
from gangq.cli.parsing import Parsed
from gangq.status import ENDED, LETTERS, WAITS, phrase

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from gangq.cli.session import Session
    from gangq.client import Client
    from gangq.client.rows import EventRow, JobRow, Reason

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Which:
    """A job (`12`), a gang (`g12`) or a batch (`b12`)."""

    id: int
    kind: str
    """job, gang or batch"""

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.id}"

    @property
    def gang(self) -> bool:
        """Whether it is a gang."""
        return self.kind == "gang"

    @property
    def batch(self) -> bool:
        """Whether it is a batch."""
        return self.kind == "batch"

    @property
    def phrase(self) -> str:
        """How it is written in a sentence."""
        return phrase(self.kind, self.id)

    @property
    def named(self) -> dict[str, Any]:
        """Its id by the name that it has as an argument."""
        return {f"{self.kind}_id": self.id}

    def state(self, client: Client) -> str:
        """Its state; empty if there is none of that id."""
        asked = {"job": client.job_states, "gang": client.gang_states, "batch": client.batch_states}
        return asked[self.kind](ids=[self.id]).get(self.id, "")

    def jobs(self, client: Client) -> list[JobRow]:
        """The job, the members by rank, or the jobs of the batch in order. Raises `NotFound`."""
        if self.batch:
            client.batch(id=self.id)
            return sorted(client.jobs(batch_id=self.id, limit=None), key=lambda job: job.id)
        if not self.gang:
            return [client.job(id=self.id)]
        client.gang(id=self.id)
        return sorted(client.jobs(gang_id=self.id, limit=None), key=lambda member: member.rank or 0)

    def events(self, client: Client, after_id: int | None = None) -> list[EventRow]:
        """All of its events, or those after one."""
        return client.events(**self.named, after_id=after_id, limit=None)

    def first_waiting(self, client: Client) -> Which:
        """Itself; of a batch its first job that waits, else its first that has not ended, else its last. Raises
        `NotFound`.
        """
        if not self.batch:
            return self
        client.batch(id=self.id)
        states = sorted(client.job_states(batch_id=self.id).items())
        live = [(id, state) for id, state in states if state not in ENDED]
        return Which(next((id for id, state in live if state in WAITS), (live or states[-1:])[0][0]), "job")

    def explain(self, client: Client) -> list[Reason]:
        """Why it does or does not run. Raises `NotFound`."""
        return client.explain_gang(gang_id=self.id) if self.gang else client.explain_job(job_id=self.id)


def live_jobs(client: Client, batch_id: int) -> list[int]:
    """The ids of a batch's jobs that have not ended, in order. Raises `NotFound`."""
    client.batch(id=batch_id)
    return sorted(id for id, state in client.job_states(batch_id=batch_id).items() if state not in ENDED)


class WhichType(Parsed):
    """`12` is a job, `g12` a gang, `b12` a batch if these are allowed; with `only` `12` is one of that kind.

    Boards and explanations name a job `j12`, which is read as well.
    """

    name = "id"

    def __init__(self, only: str = "job", batches: bool = False) -> None:
        self._only = only
        self._letters = ("g" if only != "batch" else "") + ("b" if batches or only == "batch" else "")

    def _parse(self, value: str) -> Which:
        job = "j?" if self._only == "job" else ""
        match = re.fullmatch(rf"(?:{job}|([{self._letters}]))(\d{{1,18}})", value.strip(), re.ASCII)
        if match is None:
            written = {"g": "a job is written 12, a gang g12", "b": "a batch is written b12"}
            known = written.get(self._letters, "a job is written 12, a gang g12, a batch b12")
            raise ValueError(f"{value!r} is no id: {known}")
        return Which(int(match[2]), {None: self._only, "g": "gang", "b": "batch"}[match[1]])

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The newest of one kind: of which, the first letter says once it is typed."""
        typed = incomplete[:1]
        letter = typed if typed and typed in self._letters else LETTERS[self._only]
        return stored.IDS[letter](ctx, param, incomplete)


def takes_one(*, optional: bool = False) -> Callable[[F], F]:
    """Give a command `target`, the one job, gang or batch that ID names. `optional`: it may be None."""

    def found(_: click.Context, __: click.Parameter, which: Which | None) -> Which | None:
        if which is None and not optional:
            raise click.UsageError("name one job (12), gang (g12) or batch (b12)")
        return which

    kind = WhichType(batches=True)
    return click.argument(
        "target", type=kind, required=False, callback=found, metavar="[ID]" if optional else "ID"
    )


def takes_several(*, optional: bool = False) -> Callable[[F], F]:
    """Give a command `named`: the jobs, gangs and batches that ID... names. `optional`: there may be none."""

    def found(_: click.Context, __: click.Parameter, named: tuple[Which, ...]) -> tuple[Which, ...]:
        if not (named or optional):
            raise click.UsageError("name at least one job (12), gang (g12) or batch (b12)")
        return named

    metavar = "[ID]..." if optional else "ID..."
    return click.argument("named", type=WhichType(batches=True), nargs=-1, callback=found, metavar=metavar)


def ids_of(client: Client, named: Sequence[Which]) -> dict[str, list[int]]:
    """The `job_ids` and `gang_ids` of what is named: of a batch its jobs that have not ended. Raises `NotFound`."""
    jobs = [
        [which.id] if which.kind == "job" else live_jobs(client, which.id)
        for which in named
        if not which.gang
    ]
    return {"job_ids": [id for ids in jobs for id in ids], "gang_ids": [w.id for w in named if w.gang]}


_LEAST_OF_AN_ID = len("GPU-") + 8


def shortest(ids: Iterable[str]) -> dict[str, str]:
    """Each id by so much of its beginning as no other has, and not less than 12 characters."""
    ordered = sorted(set(ids))
    found = {}
    for before, id, after in zip(["", *ordered], ordered, [*ordered[1:], ""], strict=False):
        shared = max(
            sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(id, other, strict=False)))
            for other in (before, after)
        )
        found[id] = id[: max(shared + 1, _LEAST_OF_AN_ID)]
    return found


def device_ids(session: Session, shown: Iterable[str]) -> Callable[[str], str]:
    """How the uuids of these devices are written: on a terminal no longer than `device_named` needs to tell them from
    any other, in full to a pipe and with --wide.
    """
    if not (sys.stdout.isatty() and shown) or session.json or session.wide:
        return str
    short = shortest([*session.client().execute(stored.all_of("device")), *shown])
    return lambda id: short.get(id, id)


def device_named(session: Session, text: str) -> str:
    """The uuid of the device that is written HOST:INDEX, or by its uuid or so much of it that no other begins so. Of
    those that have had an index it is the one that a worker offers now.

    Raises click.UsageError: several are meant. Where there is none, the text itself: the database says that.
    """
    devices = session.client().devices()
    at = [device for device in devices if text in (device.uuid, f"{device.host}:{device.index}")]
    found = [device.uuid for device in at if device.worker] or [device.uuid for device in at]
    found = found or [device.uuid for device in devices if device.uuid.startswith(text)]
    if len(found) > 1:
        raise click.UsageError(f"{text!r} may be {' or '.join(found[:3])}: write more of its UUID")
    return found[0] if found else text

"""Actions on the page: a form asks for confirmation, then the verb is called with the rights of the login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from gangq.client import AsyncClient
from gangq.durations import parse_seconds
from gangq.errors import InvalidInput, NotFound
from gangq.web.queries import ONE, reading
from gangq.web.viewer import Viewer

On = Literal["gang", "job", "batch", "schedule", "service", "queue", "task", "host"]


_LONGEST_PAUSE_S = 1e9


class Said(NamedTuple):
    """What the form contains. `until`: when a pause ends; None: when it is resumed by hand."""

    reason: str | None = None
    until: datetime | None = None


@dataclass(frozen=True)
class Action:
    """`word`: what is done, to what it is `on`. `verb`: the right that it needs. `effect`: said before it is done.
    `asks`: the fields of `Said` that its form has.
    """

    word: str
    on: On
    verb: str
    effect: str
    call: Callable[[AsyncClient, Any, Said], Awaitable[object]]
    asks: tuple[Literal["reason", "until"], ...] = ()
    title: str = ""

    @property
    def label(self) -> str:
        """How a question for it begins."""
        return self.title or self.word.capitalize()

    @property
    def name(self) -> str:
        """Its name in a path."""
        return f"{self.word}-{self.on}"


async def _cancel_batch(client: AsyncClient, id: int, said: Said) -> None:
    async with reading(client) as read:
        jobs = await read("select id from gangq.jobs where batch_id = %(id)s and finished_at is null", id=id)
    await client.cancel(job_ids=[job["id"] for job in jobs], reason=said.reason)


_EACH = (
    Action(
        "cancel", "gang", "cancel", "Members that run are told to stop, and lose what they have not saved.",
        lambda client, id, said: client.cancel(gang_ids=[id], reason=said.reason), asks=("reason",),
    ),
    Action(
        "retry", "gang", "retry", "It runs once more under its id, from its last complete checkpoint.",
        lambda client, id, _: client.retry(gang_ids=[id]),
    ),
    Action(
        "cancel", "job", "cancel", "If it runs it is told to stop, and loses what it has not saved.",
        lambda client, id, said: client.cancel(job_ids=[id], reason=said.reason), asks=("reason",),
    ),
    Action(
        "retry", "job", "retry", "It runs once more under its id.",
        lambda client, id, _: client.retry(job_ids=[id]),
    ),
    Action(
        "cancel", "batch", "cancel",
        "Its jobs that have not ended are cancelled. Those that run are told to stop, and lose what they have not "
        "saved.",
        _cancel_batch, asks=("reason",),
    ),
    Action(
        "retry", "batch", "retry", "Its jobs that have failed run once more under their ids.",
        lambda client, id, _: client.retry_failed(batch_id=id), title="Retry the failed jobs of",
    ),
    Action(
        "pause", "schedule", "schedule",
        "Nothing more of it is submitted until it is resumed, and what comes due meanwhile is not caught up. "
        "What it has submitted goes on.",
        lambda client, name, said: client.pause_schedule(name=name, until=said.until), asks=("until",),
    ),
    Action(
        "resume", "schedule", "schedule", "Its due times count again, from now on.",
        lambda client, name, _: client.resume_schedule(name=name),
    ),
    Action(
        "run", "schedule", "schedule",
        "Its work is submitted once, now, for whoever stored it. Its due times stay as they are.",
        lambda client, name, _: client.run_schedule_now(name=name),
    ),
    Action(
        "stop", "service", "service",
        "No replica of it is wanted any more. Its gangs leave the endpoints, and are told to stop.",
        lambda client, name, _: client.stop_service(name=name),
    ),
    Action(
        "start", "service", "service",
        "Its replicas are wanted again. From now on they are submitted with your rights.",
        lambda client, name, _: client.set_service(name=name, stopped=False),
    ),
    Action(
        "pause", "queue", "pause queues",
        "Nothing new of it and its children starts until it is resumed. What runs goes on.",
        lambda client, name, said: client.set_queue(name=name, paused=True, paused_until=said.until),
        asks=("until",),
    ),
    Action(
        "resume", "queue", "pause queues", "What waits in it may start.",
        lambda client, name, _: client.set_queue(name=name, paused=False),
    ),
    Action(
        "pause", "task", "pause tasks",
        "Nothing new of it starts in any queue until it is resumed. What runs goes on.",
        lambda client, name, said: client.pause_task(task=name, until=said.until, reason=said.reason),
        asks=("until", "reason"),
    ),
    Action(
        "resume", "task", "pause tasks", "What waits of it may start.",
        lambda client, name, _: client.resume_task(task=name),
    ),
    Action(
        "cordon", "host", "cordon", "It is given nothing new until it is uncordoned. What runs there goes on.",
        lambda client, name, said: client.cordon(host=name, reason=said.reason), asks=("reason",),
    ),
    Action(
        "uncordon", "host", "cordon", "It is given work again; a drain of it ends.",
        lambda client, name, _: client.uncordon(host=name),
    ),
)  # fmt: skip

ACTIONS = {action.name: action for action in _EACH}


@dataclass(frozen=True)
class Target:
    """What an action is about, and the page to go to when it is done."""

    key: int | str
    title: str
    path: str
    allowed: bool


class _Kind(NamedTuple):
    """What an action can be on: how it is looked up, its page, and what a question calls it."""

    query: str
    path: str
    said: str


_KINDS: dict[On, _Kind] = {
    "gang": _Kind(ONE["gang"], "/gangs/{id}", "gang g{id} ({task}, {size} members, {state})"),
    "job": _Kind(ONE["job"], "/jobs/{id}", "job {id} ({task}, {state})"),
    "batch": _Kind(ONE["batch"], "/batches/{id}", "batch b{id} ({name}, {size} jobs, {state})"),
    "schedule": _Kind(
        "select * from gangq.schedules where name = %(id)s", "/schedules", "schedule {name} ({task})"
    ),
    "service": _Kind(
        "select * from gangq.services where name = %(id)s", "/services", "service {name} ({task})"
    ),
    "queue": _Kind("select name from gangq.queues where name = %(id)s", "/", "queue {name}"),
    "task": _Kind(
        "(select task from gangq.tasks where task = %(id)s limit 1) union "
        "(select task from gangq.jobs where task = %(id)s limit 1)",
        "/",
        "task {task}",
    ),
    "host": _Kind("select host from gangq.fleet where host = %(id)s limit 1", "/", "host {host}"),
}


def number(text: str) -> int:
    """The number of a gang, job or batch that a path or a form names. Raises `NotFound`."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise NotFound(f"there is no {text[:100]!r}")
    return int(text)


async def find_target(viewer: Viewer, action: Action, what: str) -> Target:
    """Look up what is named; the verbs of queues and tasks would make what does not exist. Raises `NotFound`."""
    kind = _KINDS[action.on]
    key = number(what) if action.on in ONE else what
    async with reading(viewer.client) as read:
        rows = await read(kind.query, id=key)
        if not rows:
            raise NotFound(f"there is no {action.on} {what[:100]!r}")
        row = rows[0]
        allowed = await viewer.owns(read, row) if action.on in ONE else row.get("readable", True)
    return Target(key, kind.said.format_map(row), kind.path.format_map(row), allowed)


async def read_said(viewer: Viewer, form: Mapping[str, str]) -> Said:
    """Read what the form said; a pause ends so long from now by the database's clock. Raises `InvalidInput`."""
    after = form.get("after", "").strip()
    if not after:
        return Said(form.get("reason") or None)
    length = parse_seconds(after)
    if length is None or not 1 <= length <= _LONGEST_PAUSE_S:
        raise InvalidInput(f"{after[:100]!r} is no length of a pause: write 90s, 15m, 2h or 3d")
    async with reading(viewer.client) as read:
        (end,) = await read("select gangq.now() + make_interval(secs => %(s)s) as at", s=length)
    return Said(form.get("reason") or None, end["at"])

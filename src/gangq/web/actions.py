"""What people do on the page: a form that asks first, and the verb, called with the rights of their login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gangq.client import AsyncClient
from gangq.errors import NotFound
from gangq.web.queries import Row, reading
from gangq.web.viewer import Viewer

On = Literal["gang", "job", "batch", "schedule", "service", "queue", "host"]


@dataclass(frozen=True)
class Action:
    """`verb`: the right that it needs. `effect`: what it does, said before it is done."""

    name: str
    verb: str
    on: On
    label: str
    effect: str
    call: Callable[[AsyncClient, Any, str | None], Awaitable[object]]
    takes_reason: bool = False


async def _cancel_batch(client: AsyncClient, id: int, reason: str | None) -> None:
    async with reading(client) as read:
        jobs = await read.live_jobs_of_batch(id)
    await client.cancel(job_ids=jobs, reason=reason)


_EACH = (
    Action(
        "cancel-gang", "cancel", "gang", "Cancel",
        "Members that run are told to stop, and lose what they have not saved.",
        lambda client, id, reason: client.cancel(gang_ids=[id], reason=reason), takes_reason=True,
    ),
    Action(
        "retry-gang", "retry", "gang", "Retry",
        "It runs once more under its id, from its last complete checkpoint.",
        lambda client, id, _: client.retry(gang_ids=[id]),
    ),
    Action(
        "cancel-job", "cancel", "job", "Cancel",
        "If it runs it is told to stop, and loses what it has not saved.",
        lambda client, id, reason: client.cancel(job_ids=[id], reason=reason), takes_reason=True,
    ),
    Action(
        "retry-job", "retry", "job", "Retry", "It runs once more under its id.",
        lambda client, id, _: client.retry(job_ids=[id]),
    ),
    Action(
        "cancel-batch", "cancel", "batch", "Cancel",
        "Its jobs that have not ended are cancelled. Those that run are told to stop, and lose what they have not "
        "saved.",
        _cancel_batch, takes_reason=True,
    ),
    Action(
        "retry-batch", "retry", "batch", "Retry the failed jobs of",
        "Its jobs that have failed run once more under their ids.",
        lambda client, id, _: client.retry_failed(batch_id=id),
    ),
    Action(
        "pause-schedule", "schedule", "schedule", "Pause",
        "Nothing more of it is submitted until it is resumed, and what comes due meanwhile is not caught up. "
        "What it has submitted goes on.",
        lambda client, name, _: client.pause_schedule(name=name),
    ),
    Action(
        "resume-schedule", "schedule", "schedule", "Resume", "Its due times count again, from now on.",
        lambda client, name, _: client.resume_schedule(name=name),
    ),
    Action(
        "run-schedule", "schedule", "schedule", "Run",
        "Its work is submitted once, now, for whoever stored it. Its due times stay as they are.",
        lambda client, name, _: client.run_schedule_now(name=name),
    ),
    Action(
        "stop-service", "service", "service", "Stop",
        "No replica of it is wanted any more. Its gangs leave the endpoints, and are told to stop.",
        lambda client, name, _: client.stop_service(name=name),
    ),
    Action(
        "start-service", "service", "service", "Start",
        "Its replicas are wanted again. From now on they are submitted with your rights.",
        lambda client, name, _: client.set_service(name=name, stopped=False),
    ),
    Action(
        "pause-queue", "pause", "queue", "Pause",
        "Nothing new of it and its children starts until it is resumed. What runs goes on.",
        lambda client, name, _: client.set_queue(name=name, paused=True, paused_until=None),
    ),
    Action(
        "resume-queue", "pause", "queue", "Resume", "What waits in it may start.",
        lambda client, name, _: client.set_queue(name=name, paused=False),
    ),
    Action(
        "cordon-host", "cordon", "host", "Cordon",
        "It is given nothing new until it is uncordoned. What runs there goes on.",
        lambda client, name, reason: client.cordon(host=name, reason=reason), takes_reason=True,
    ),
    Action(
        "uncordon-host", "cordon", "host", "Uncordon", "It is given work again; a drain of it ends.",
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
    allowed: bool = True


class _Numbered(NamedTuple):
    """What has a number: the view that it is in, how the number begins, and what a question says of it."""

    view: str
    prefix: str
    said: Callable[[Row], str]


_NUMBERED = {
    "gang": _Numbered("gangs", "g", lambda row: f"{row['task']}, {row['size']} members"),
    "job": _Numbered("jobs", "", lambda row: str(row["task"])),
    "batch": _Numbered("batches", "b", lambda row: f"{row['name']}, {row['size']} jobs"),
}


async def find_target(viewer: Viewer, action: Action, what: str) -> Target:
    """Look up what is named; set_queue would make a queue that does not exist. Raises `NotFound`."""
    async with viewer.reading() as read:
        if found := _NUMBERED.get(action.on):
            number = int(what) if what.isascii() and what.isdigit() and len(what) < 19 else 0
            row = await read.one(found.view, number)
            if row is not None:
                title = f"{action.on} {found.prefix}{number} ({found.said(row)}, {row['state']})"
                return Target(number, title, f"/{found.view}/{number}", await viewer.owns(read, row))
        elif action.on in ("schedule", "service"):
            view = f"{action.on}s"
            if row := await read.named(view, what):
                return Target(what, f"{action.on} {what} ({row['task']})", f"/{view}", row["readable"])
        elif action.on == "queue":
            if await read.rows("select from gangq.queues where name = %(name)s", name=what):
                return Target(what, f"queue {what}", "/")
        elif await read.rows("select from gangq.fleet where host = %(host)s limit 1", host=what):
            return Target(what, f"host {what}", "/")
    raise NotFound(f"there is no {action.on} {what[:100]!r}")

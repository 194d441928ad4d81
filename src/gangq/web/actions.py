"""What people do on the page: a form that asks first, and the verb, called with the rights of their login."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from gangq.client import AsyncClient
from gangq.errors import NotFound
from gangq.web.viewer import Viewer

On = Literal["gang", "job", "queue", "host"]


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


async def find_target(viewer: Viewer, action: Action, what: str) -> Target:
    """Look up what is named; set_queue would make a queue that does not exist. Raises `NotFound`."""
    async with viewer.reading() as read:
        if action.on in ("gang", "job"):
            number = int(what) if what.isascii() and what.isdigit() and len(what) < 19 else 0
            row = await read.one(f"{action.on}s", number)
            if row is not None:
                members = f"{row['size']} members, " if action.on == "gang" else ""
                name = (
                    f"{action.on} {'g' if members else ''}{number} ({row['task']}, {members}{row['state']})"
                )
                return Target(number, name, f"/{action.on}s/{number}", await viewer.owns(read, row))
        elif action.on == "queue":
            if await read.rows("select from gangq.queues where name = %(name)s", name=what):
                return Target(what, f"queue {what}", "/")
        elif await read.rows("select from gangq.fleet where host = %(host)s limit 1", host=what):
            return Target(what, f"host {what}", "/")
    raise NotFound(f"there is no {action.on} {what[:100]!r}")

"""What was submitted: to look at, and to assert."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gangq.app import App, AsyncApp
from gangq.client.encoding import as_object, counted, dumps
from gangq.client.rows import JobRow
from gangq.testing.calls import Declared
from gangq.testing.context import FakeContext

_SHOWN = 20
"""How many jobs a message lists."""


@dataclass(frozen=True)
class _Seen:
    """One job that was submitted."""

    task: str | None
    payload: Any
    about: str

    def holds(self, wanted: Mapping[str, Any]) -> bool:
        given = self.payload
        return isinstance(given, Mapping) and all(
            name in given and given[name] == value for name, value in wanted.items()
        )

    def __str__(self) -> str:
        return f"{self.about}: {json.dumps(self.payload)}"


def submitted(app: App | AsyncApp, task: Declared[Any] | str | None = None) -> list[JobRow]:
    """Return the jobs in the App's database, live and ended, in order of submission; with `task` those of it.

    A gang counts as its members. What a transaction has submitted that is not committed is not there.
    """
    name = task if isinstance(task, str | None) else task.name
    found = _sync(app).client.jobs(task=name, limit=None)
    return sorted(found, key=lambda job: job.id)


def assert_submitted(
    task: Declared[Any],
    payload: Mapping[str, Any] | None = None,
    /,
    *,
    count: int | None = None,
    context: FakeContext | None = None,
    **more: Any,
) -> None:
    """Assert that a job of `task` was submitted whose payload has these values, and maybe others.

    - `payload` and `more` are the values; `payload` is for names that this function has itself.
    - `count`: so many jobs exactly, 0 for none [at least one]. A gang counts as its members.
    - `context`: look at what the handler submitted in `run`, and not in the database of the task's App.

    Raises `AssertionError`, which lists what was submitted instead.
    """
    wanted: dict[str, Any] = json.loads(dumps(as_object({**(payload or {}), **more}, "payload"), "payload"))
    seen = _in_database(task.app) if context is None else _in_context(context)
    own = [one for one in seen if one.task == task.name]
    hits = [one for one in own if one.holds(wanted)]
    if len(hits) == count or (count is None and hits):
        return
    which = f"of task {task.name!r}" + (f" with {json.dumps(wanted)}" if wanted else "")
    asked = "at least 1 job" if count is None else counted(count, "job")
    lines = [f"{asked} {which} should have been submitted, and {_number(hits)}"]
    others = [one for one in own if one not in hits]
    for title, listed in (("those", hits), (f"of task {task.name!r}", others)):
        if listed:
            lines.append(f"{title}:")
            lines += [f"  {one}" for one in listed[:_SHOWN]]
            if len(listed) > _SHOWN:
                lines.append(f"  ... and {len(listed) - _SHOWN} more")
    tasks = Counter(one.task for one in seen if one.task != task.name)
    if tasks:
        lines.append(
            "of other tasks: " + ", ".join(f"{n} {name}" for name, n in sorted(tasks.items(), key=str))
        )
    if not seen:
        lines.append("nothing was submitted" + ("" if context else ", or it is not committed"))
    raise AssertionError("\n".join(lines))


def _number(hits: list[_Seen]) -> str:
    return {0: "none was", 1: "1 was"}.get(len(hits), f"{len(hits)} were")


def _in_database(app: App) -> list[_Seen]:
    return [
        _Seen(job.task, job.payload, f"{_about(job.id, job.gang_id)}, {job.state}") for job in submitted(app)
    ]


def _in_context(context: FakeContext) -> list[_Seen]:
    return [_Seen(one.task, one.payload, _about(one.job_id, one.gang_id)) for one in context.submitted]


def _about(job_id: int, gang_id: int | None) -> str:
    return f"job {job_id}" + (f" of gang g{gang_id}" if gang_id is not None else "")


def _sync(app: App | AsyncApp) -> App:
    return app if isinstance(app, App) else app._app

"""What an App submits again and again: `App.schedule` declares it, workers store it when they start."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from gangq.client.encoding import as_object
from gangq.client.rows import ScheduleRow
from gangq.client.verbs import Verbs
from gangq.declarations import Declared, require_repeatable
from gangq.durations import Duration, seconds
from gangq.errors import InvalidInput
from gangq.handles import Gang, Job
from gangq.task_options import arguments

if TYPE_CHECKING:
    from gangq.app import App
    from gangq.tasks import Task

_SHORTEST_S, _LONGEST_S = 1.0, 1e7
_CATCH_UP = ("skip", "last", "all")


class Schedule(Declared):
    """A schedule that an App declares. Its `name` is unique in the database."""

    kind = "schedule"

    def __repr__(self) -> str:
        when = self.arguments["cron"] or f"every {self.arguments['every']:g} s"
        return f"<Schedule {self.name}: {self.arguments['task']}, {when}>"

    def row(self) -> ScheduleRow:
        """Return it as `gangq.schedules` shows it: when it is due next, what it submitted last, why it did not.

        Raises `NotFound` before a worker, or `App.store_schedules`, has stored it.
        """
        return self._stored(self.app.client.schedules(name=self.name))

    def run_now(self) -> Job[Any] | Gang[Any]:
        """Submit its work now, as it is stored; its due times stay as they are. Raises `NotFound`, `WrongState`
        (with `skip_if_running`: the last one has not ended), `NotAllowed`.
        """
        made = self.app.client.run_schedule_now(name=self.name)
        return self.app.job(made.job_id) if made.gang_id is None else self.app.gang(made.gang_id)

    def pause(self, until: datetime | None = None) -> None:
        """Submit nothing `until` then [until `resume`]. Raises `InvalidInput`, `NotFound`, `NotAllowed`."""
        self.app.client.pause_schedule(name=self.name, until=until)

    def resume(self) -> None:
        """End its pause. Raises `NotFound`, `NotAllowed`."""
        self.app.client.resume_schedule(name=self.name)


class ScheduleDeclaration(TypedDict, total=False):
    """How a task is submitted again and again; see `App.schedule`.

    - `name` [the task's]: unique in the database. `payload` [{}]: the arguments.
    - `tz` [UTC]: the time zone of the cron expression. `every`: in its place, an interval of at least 1 second, which
      does not drift: "30s", 1800, a timedelta.
    - `catch_up` [last], `skip_if_running` [False], `due_as`: see `gangq.client.options.ScheduleOptions`.
    - `size`: submit a gang of so many members. `gang`: its other options, or those of one of roles, as in
      `Task.gang`, or `payloads`: {"strategy": "pack"}.
    """

    name: str | None
    payload: Mapping[str, Any] | None
    tz: str | None
    every: Duration | None
    catch_up: str | None
    skip_if_running: bool
    due_as: str | None
    size: int | None
    gang: Mapping[str, Any] | None


def make(
    app: App, task: Task[..., Any], cron: str | None, **declared: Unpack[ScheduleDeclaration]
) -> Schedule:
    """Return a schedule of this task. Raises `InvalidInput`, `NotSerializable`."""
    known = ScheduleDeclaration.__annotations__
    unknown = sorted(declared.keys() - known.keys())
    if unknown:
        raise TypeError(
            f"a schedule has no option {unknown[0]!r}; the options are {', '.join(sorted(known))}"
        )
    called, every, catch_up = (
        declared.get("name") or task.name,
        declared.get("every"),
        declared.get("catch_up"),
    )
    if (cron is None) == (every is None):
        raise InvalidInput(
            f"schedule {called!r} has either a cron expression or every: @app.schedule('0 3 * * *') or "
            "@app.schedule(every='30s')"
        )
    if catch_up is not None and catch_up not in _CATCH_UP:
        raise InvalidInput(f"schedule {called!r} has catch_up {catch_up!r}: one of {', '.join(_CATCH_UP)}")
    arguments = {
        "name": called,
        "task": task.name,
        "cron": cron,
        "every": None if every is None else seconds(every, "every", least=_SHORTEST_S, most=_LONGEST_S),
        "tz": declared.get("tz"),
        **_submission(task, declared),
        "catch_up": catch_up,
        "skip_if_running": declared.get("skip_if_running", False),
        "due_as": declared.get("due_as"),
    }
    # What cannot be read is said where it is written, not when a worker starts.
    Verbs.set_schedule(**arguments)
    return Schedule(app, called, arguments)


def _submission(task: Task[..., Any], declared: ScheduleDeclaration) -> dict[str, Any]:
    """The payload, and the other arguments of `submit`, or of `submit_gang`."""
    due_as, size, gang = declared.get("due_as"), declared.get("size"), declared.get("gang") or {}
    given = as_object(declared.get("payload") or {}, "payload")
    # The handler is called with the due time, too.
    called_with = {**given, due_as: ""} if due_as else given
    if size is not None or gang:
        others = {key: value for key, value in gang.items() if key != "payloads"}
        each = gang.get("payloads")
        of_gang, options = task._gang(size, others, called_with if each is None else None, each)
        work = {**of_gang, **arguments(options)}
    else:
        task._check(called_with)
        options, work = task.defaults, arguments(task.defaults)
    require_repeatable("schedule", task, options)
    if size is not None or gang:
        Verbs.submit_gang(**work)
    left = ("task", "payload")
    return {
        "payload": given,
        "work": {key: value for key, value in work.items() if value is not None and key not in left},
    }

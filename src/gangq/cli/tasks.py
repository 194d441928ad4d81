"""gangq task: what the watchdogs allow the jobs of a task."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import click

from gangq.cli import options, stored
from gangq.cli.group import Subgroup
from gangq.cli.options import table_options
from gangq.cli.output import say, seconds, when
from gangq.cli.parsing import Due
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import columns
from gangq.client.rows import TaskRow
from gangq.client.settings import TaskSettings
from gangq.watchdogs.codes import NOTIFY_CLASSES

_NONE = "none"
_NOTHING_SET = TaskRow("", *[None] * (len(TaskRow._fields) - 1))

_COLUMNS = columns(
    "task paused:2 declared:1 >budget >stall_timeout >load_grace:3 >health_window:4 >long_phase:5 notify_only:4 "
    "devices >longest_gap=longest_gap_s:2 beats:6",
    {
        "paused": lambda t: _paused(t),
        "declared": lambda t: _declared(t.declared),
        "budget": lambda t: seconds(t.budget_s) or "-",
        "stall_timeout": lambda t: _stall(t),
        "load_grace": lambda t: seconds(t.load_grace_s) or "-",
        "health_window": lambda t: seconds(t.health_window_s) or "-",
        "long_phase": lambda t: seconds(t.long_phase_s) or "-",
        "notify_only": lambda t: _classes(t.notify_only),
        "devices": lambda t: "none" if t.device_class == "" else t.device_class,
    },
)


def _stall(task: TaskRow) -> str:
    if task.stall_timeout_s is None:
        return "learned" if task.beats else "-"
    return seconds(task.stall_timeout_s)


def _classes(classes: list[str] | None) -> str:
    if classes is None:
        return "-"
    return ",".join(classes) or _NONE


def _paused(task: TaskRow) -> str:
    if not task.paused:
        return ""
    until = f"until {when(task.paused_until)} " if task.paused_until else ""
    return f"{until}by {task.paused_by}" + (f": {task.pause_reason}" if task.pause_reason else "")


def _declared(options: dict[str, Any] | None) -> str:
    said = (options or {}).items()
    return ", ".join(f"{key} {v if isinstance(v, str) else json.dumps(v)}" for key, v in said) or "-"


_named = chained(click.argument("name", shell_complete=stored.tasks), common_options)


@click.group(cls=Subgroup)
def task() -> None:
    """See what workers declare their tasks with, pause them, and change what the watchdogs allow their jobs."""


@task.command(name="set")
@options.settings(
    TaskSettings,
    {
        "budget_s": "Wall-clock time an attempt may take [the queue's].",
        "stall_timeout_s": "Time without a beat [learned].",
        "load_grace_s": "Time to load before idle devices count [20m].",
        "health_window_s": "Time for which the devices may be wholly idle [5m].",
        "long_phase_s": 'How long the phase "long" may go on without a beat [1h].',
    },
)
@click.option(
    "--notify",
    "notify",
    type=click.Choice([*NOTIFY_CLASSES, _NONE]),
    multiple=True,
    help="A class that only reports for this task and stops nothing; may be repeated. none: all of them act.",
)
@click.option("--forget", is_flag=True, help="First drop what was set and learned.")
@_named
def set_(session: Session, /, name: str, notify: tuple[str, ...], forget: bool, **settings: Any) -> None:
    """Change what is given. What is not keeps the task's number, else the installation's.

    Workers learn of it within a minute or two; a budget holds for jobs submitted from now on. "command" is the
    task of commands.
    """
    if _NONE in notify and len(notify) > 1:
        raise click.UsageError("--notify none means that every class acts: name no other with it")
    given = {name: value for name, value in settings.items() if value is not None}
    if notify:
        given["notify_only"] = [each for each in notify if each != _NONE]
    if not forget and not given:
        raise click.UsageError("nothing to change: name at least one option, see gangq task set --help")
    client = session.client()
    client.set_task(task=name, forget=forget, **given)
    found = client.tasks(task=name)
    _answer(session, name, "changed" if found else "has the numbers of the installation")


@task.command()
@click.option("--until", type=Due(), metavar="WHEN", help="2h from now, or a time [gangq task resume].")
@click.option("--reason", help="Why: explain says it.")
@_named
def pause(session: Session, name: str, until: datetime | timedelta | None, reason: str | None) -> None:
    """Start nothing new of a task, whatever its queue; what runs goes on.

    A gang waits if the task of one of its members is paused.
    """
    end = None if until is None else session.moment(until)
    if stored.unknown(session.client(), task=name):
        say(f"no worker and no job knows task {name!r}: see gangq task list")
    session.client().pause_task(task=name, until=end, reason=reason)
    _answer(session, name, "paused" + (f" until {when(end)}" if end else ""))


@task.command()
@_named
def resume(session: Session, name: str) -> None:
    """End the pause of a task."""
    # What no worker, job, pause or number of its own names is a slip of the keyboard, and not a task that is open.
    stored.must_exist(session.client(), task=name)
    session.client().resume_task(task=name)
    _answer(session, name, "open")


def _answer(session: Session, name: str, outcome: str) -> None:
    found = session.client().tasks(task=name)
    session.answer(found[0] if found else _NOTHING_SET._replace(task=name), f"task {name}: {outcome}")


@task.command(name="list")
@table_options
def list_(session: Session) -> None:
    """List the tasks with options or numbers of their own, and what was learned of their beats.

    Declared are the options that the newest worker declares it with: submit applies them where nothing is said.

    One line for each class of devices; - is the installation's number. A stall timeout that is learned is five
    times the longest gap, and never less than the installation's.
    """
    session.rows(
        session.client().tasks(),
        _COLUMNS,
        "no task has options or numbers of its own, and nothing has been learned",
    )

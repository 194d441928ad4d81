"""gangq schedule: what is submitted again and again."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import click

from gangq.cli import output, queries, stored
from gangq.cli.group import Subgroup
from gangq.cli.options import Sectioned, settings, table_options
from gangq.cli.output import say, when
from gangq.cli.parsing import Due, Seconds, payload_of
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import columns
from gangq.cli.work import min_option, notes_aloud, recurring_options, submission, tag_option
from gangq.client.options import ScheduleOptions
from gangq.client.rows import ScheduleRow
from gangq.commands import COMMAND, command_payload
from gangq.due import Cron

_COLUMNS = columns(
    "name when task:1 next_due state last_due:1 >last:2 not_run=passed_over:3 why:3 queue:4 submitter:5",
    {
        "when": lambda s: _rhythm(s),
        "state": lambda s: _state(s),
        "last": lambda s: output.gang(s.last_gang) or s.last_job or "",
    },
)


def _rhythm(schedule: ScheduleRow) -> str:
    if schedule.every is not None:
        return f"every {output.seconds(schedule.every.total_seconds())}"
    return f"{schedule.cron} {schedule.tz}"


def _state(schedule: ScheduleRow) -> str:
    if schedule.paused:
        return f"paused until {when(schedule.paused_until)}" if schedule.paused_until else "paused"
    if schedule.problem is not None:
        return schedule.problem
    return f"not in {schedule.source} any more" if schedule.undeclared_at else ""


_named = chained(click.argument("name", shell_complete=stored.schedules), common_options)


@click.group(cls=Subgroup)
def schedule() -> None:
    """Submit a task again and again: when a cron expression says, or at an interval.

    Workers and gangq tick do the submitting. Each due time is submitted once, on behalf of the login that stored the
    schedule.
    """


@schedule.command(cls=Sectioned)
@click.argument("schedule_name", metavar="NAME", shell_complete=stored.schedules)
@click.argument("words", nargs=-1, metavar="[CRON] TASK [PAYLOAD]")
@click.option("--every", type=Seconds(), metavar="DURATION", help="An interval, in place of CRON.")
@click.option("--tz", metavar="ZONE", help="The time zone of CRON, as Europe/Oslo [UTC].")
@settings(
    ScheduleOptions,
    {
        "catch_up": (
            click.Choice(["skip", "last", "all"]),
            "What is run of due times that were missed: none, the last, or the last 100 [last].",
        ),
        "skip_if_running": "Submit nothing while the last one has not ended.",
        "due_as KEY": "A key of the payload that is given the due time.",
    },
)
@click.option("--command", is_flag=True, help="A command: its program and arguments in place of TASK.")
@min_option
@tag_option
@recurring_options
@common_options
def add(
    session: Session, /, schedule_name: str, words: tuple[str, ...], command: bool, **options: Any
) -> None:
    """Make a schedule, or change the one of this name as a whole.

    gangq schedule add nightly '0 3 * * *' report days=1 --tz Europe/Oslo

    CRON is one word: minute, hour, day of month, month, day of week. PAYLOAD is as for gangq submit, and so are the
    options of the job, or with --gang or --role of the gang. With --command put -- before the program if it has
    options.
    """
    own = {name: options.pop(name) for name in ("every", "tz", "catch_up", "skip_if_running", "due_as")}
    cron, words = (None, words) if own["every"] is not None else (words[0] if words else None, words[1:])
    if cron is not None and " " not in cron.strip():
        raise click.UsageError(
            f"{cron!r} is no cron expression: quote it, as in gangq schedule add {schedule_name} '0 3 * * *' TASK; "
            f"or give an interval, as in gangq schedule add {schedule_name} --every 5m TASK"
        )
    if not words:
        raise click.UsageError("name the task: gangq schedule add NAME '0 3 * * *' TASK, or --every 5m TASK")
    given = submission(session, options)
    outcome = session.client().set_schedule(
        name=schedule_name,
        task=COMMAND if command else words[0],
        payload=command_payload(words) if command else payload_of(words[1:]),
        cron=cron,
        work=given,
        **own,
    )
    found = _existing(session, schedule_name)
    now = session.client().execute(queries.database_time())
    next_due = found.next_due or (Cron(cron, own["tz"] or "UTC").after(now) if cron else None)
    paused = ", and paused" if found.paused else ""
    session.answer(found, f"schedule {schedule_name}: {outcome}{paused}; due at {when(next_due)}")


@schedule.command(name="list")
@click.argument("name", required=False, shell_complete=stored.schedules)
@table_options
def list_(session: Session, name: str | None) -> None:
    """List the schedules, or show one: when it is due, what it submitted last, and why it did not.

    With --json the columns of gangq.schedules.
    """
    found = [_existing(session, name)] if name is not None else session.client().schedules()
    session.rows(found, _COLUMNS, "no schedules; make one with: gangq schedule add")


@schedule.command()
@click.option("--until", type=Due(), metavar="WHEN", help="2h from now, or a time [gangq schedule resume].")
@_named
def pause(session: Session, name: str, until: datetime | timedelta | None) -> None:
    """Submit nothing of a schedule for a while. What comes due meanwhile is not caught up."""
    session.client().pause_schedule(name=name, until=None if until is None else session.moment(until))
    found = _existing(session, name)
    session.answer(found, f"schedule {name}: {_state(found)}")


@schedule.command()
@_named
def resume(session: Session, name: str) -> None:
    """End the pause of a schedule."""
    session.client().resume_schedule(name=name)
    session.answer(_existing(session, name), f"schedule {name}: goes on")


@schedule.command()
@_named
def run_now(session: Session, name: str) -> None:
    """Submit the work of a schedule now, and print the id. Its due times stay as they are."""
    with notes_aloud():
        made = session.client().run_schedule_now(name=name)
    session.answer(made, output.gang(made.gang_id) or str(made.job_id))


@schedule.command()
@_named
def rm(session: Session, name: str) -> None:
    """Forget a schedule. What it has submitted goes on.

    One that a program declares comes back when a worker of it starts: take it out of the program, too.
    """
    found = session.client().schedules(name=name)
    session.client().forget_schedule(name=name)
    if found and found[0].source is not None and found[0].undeclared_at is None:
        say(f"{found[0].source} declares it: it comes back when a worker of that starts")
    session.answer({"name": name, "state": "forgotten"}, f"schedule {name}: forgotten")


def _existing(session: Session, name: str) -> ScheduleRow:
    advice = "gangq schedule list names those that do"
    return stored.existing(session.client().schedules(name=name), "schedule", name, advice)

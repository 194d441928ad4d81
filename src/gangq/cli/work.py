"""gangq submit, cancel, retry, priority."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click

from gangq.cli import parsing, queries
from gangq.cli.output import Column, gang
from gangq.cli.parsing import Due, KeyValue, Seconds, Which
from gangq.cli.session import Session, common_options, pass_session, say
from gangq.client.rows import StateChange

F = TypeVar("F", bound=Callable[..., Any])

_CHANGES = [
    Column("job", lambda c: "" if c.job_id is None else c.job_id, right=True),
    Column("gang", lambda c: gang(c.gang_id)),
    Column("state", lambda c: c.state, state=True),
]


def work_options(command: F) -> F:
    """What a job needs and how it is treated: the options of submit and run."""
    options = [
        click.option("--queue", default="default", show_default=True, help="Where it waits."),
        click.option(
            "--priority", type=int, default=0, show_default=True, help="-1000 to 1000; higher runs first."
        ),
        click.option("--gpus", type=int, default=0, help="Whole devices [0]; for a gang, of each member."),
        click.option("--vram-mb", type=int, default=0, help="Memory needed on each device, MiB."),
        click.option("--memory-mb", type=int, default=0, help="Host memory needed, MiB."),
        click.option("--cpus", type=float, default=0, help="CPUs needed; may be fractional."),
        click.option(
            "--label",
            "labels",
            type=KeyValue(),
            multiple=True,
            metavar="K=V",
            help="A label the worker must carry.",
        ),
        click.option(
            "--model", help="What it needs loaded: a worker that has it is preferred, any other may do."
        ),
        click.option("--budget", "budget_s", type=Seconds(), help="Wall-clock time an attempt may take."),
        click.option("--max-attempts", type=int, help="Attempts it may spend [the queue's]."),
        click.option("--due", type=Due(), help="Not before: 15m from now, or 2026-11-20T14:30."),
        click.option("--after", type=int, multiple=True, metavar="ID", help="A job that must be done first."),
        click.option(
            "--gang", "size", type=int, metavar="N", help="N members that start together or not at all."
        ),
        click.option("--name", help="A name for the gang."),
        click.option(
            "--checkpoint-mode",
            type=click.Choice(["each", "rank0"]),
            help="Whether every member of the gang saves its part, or rank 0 all of it.",
        ),
        click.option(
            "--claim-deadline",
            "claim_deadline_s",
            type=Seconds(),
            help="How long the gang may stay reserved.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def submission(session: Session, options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `Client.submit` or `submit_gang` out of `work_options`."""
    size, due = options.pop("size"), options.pop("due")
    for_gangs = {key: options.pop(key) for key in ("name", "checkpoint_mode", "claim_deadline_s")}
    given = {**options, "labels": dict(options["labels"]), "after": list(options["after"]) or None}
    given["due_at"] = _due_at(session, due)
    if size is not None:
        return {**given, "size": size, **{k: v for k, v in for_gangs.items() if v is not None}}
    wrong = next((key for key, value in for_gangs.items() if value is not None), None)
    if wrong is not None:
        flag = wrong.removesuffix("_s").replace("_", "-")
        raise click.UsageError(f"--{flag} is for gangs: add --gang N, or leave it out")
    return given


def _due_at(session: Session, due: datetime | timedelta | None) -> datetime | None:
    # "In 15 minutes" is counted by the clock that will judge it.
    return session.client().execute(queries.database_time()) + due if isinstance(due, timedelta) else due


@click.command()
@click.argument("task")
@click.argument("payload", nargs=-1)
@click.option(
    "--count", type=click.IntRange(min=1), default=1, show_default=True, help="This many jobs, all alike."
)
@work_options
@common_options
@pass_session
def submit(session: Session, /, task: str, payload: tuple[str, ...], count: int, **options: Any) -> None:
    """Submit a job, or with --gang N a gang.

    Prints the id. PAYLOAD is one JSON object, or key=value pairs whose values are JSON where they parse as
    such (n=1 is a number, name=a a string), or - for one JSON object per line of standard input: one job
    each, or one member each.
    """
    payloads = _payloads(payload, count)
    given = submission(session, options)
    client = session.client()
    if "size" not in given:
        ids = client.submit(task=task, payloads=payloads, **given)
        session.answer({"job_ids": ids}, "\n".join(map(str, ids)))
        return
    if count > 1:
        raise click.UsageError("--count and --gang exclude each other: a gang is one gang")
    each = {"payload": payloads[0]} if payload != ("-",) else {"payloads": payloads}
    made = client.submit_gang(task=task, **each, **given)
    if made.note:
        say(f"gang {gang(made.gang_id)} cannot be placed now: {made.note}")
    session.answer(
        {"gang": gang(made.gang_id), "gang_id": made.gang_id, "job_ids": made.job_ids, "note": made.note},
        gang(made.gang_id),
    )


def _payloads(words: Sequence[str], count: int) -> list[dict[str, Any]]:
    if tuple(words) != ("-",):
        return [parsing.payload_of(words)] * count
    if count > 1:
        raise click.UsageError("--count and - exclude each other: one job is submitted per line")
    lines = [line for line in sys.stdin if line.strip()]
    if not lines:
        raise click.UsageError("standard input has no payload: write one JSON object per line")
    return [
        parsing.payload_of([line]) if line.lstrip().startswith("{") else _no_object(line) for line in lines
    ]


def _no_object(line: str) -> dict[str, Any]:
    raise click.UsageError(f"not a JSON object: {line.strip()[:100]!r}; write one per line")


@click.command()
@parsing.takes_several
@click.option("--reason", help="Why; kept in the events.")
@common_options
@pass_session
def cancel(session: Session, which: tuple[Which, ...], gang: tuple[int, ...], reason: str | None) -> None:
    """Cancel jobs and gangs. What runs is told to stop, and is cancelled once it has."""
    job_ids, gang_ids = parsing.split(parsing.list_of(which, gang))
    _changed(session, session.client().cancel(job_ids=job_ids, gang_ids=gang_ids, reason=reason))


@click.command()
@parsing.takes_several
@common_options
@pass_session
def retry(session: Session, which: tuple[Which, ...], gang: tuple[int, ...]) -> None:
    """Run what has ended once more, under its id.

    A failed gang resumes from its last checkpoint.
    """
    job_ids, gang_ids = parsing.split(parsing.list_of(which, gang))
    _changed(session, session.client().retry(job_ids=job_ids, gang_ids=gang_ids))


# A priority may be negative, and -5 would be an option.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("priority", type=int)
@parsing.takes_several
@common_options
@pass_session
def priority(session: Session, priority: int, which: tuple[Which, ...], gang: tuple[int, ...]) -> None:
    """Change the priority of what waits.

    gangq priority 10 12 g3: -1000 to 1000, higher first. Nothing that runs is stopped.
    """
    job_ids, gang_ids = parsing.split(parsing.list_of(which, gang))
    _changed(session, session.client().set_priority(priority=priority, job_ids=job_ids, gang_ids=gang_ids))


def _changed(session: Session, changes: Sequence[StateChange]) -> None:
    session.rows(changes, _CHANGES, "nothing changed")

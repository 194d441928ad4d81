"""gangq trips: what watchdogs have ended, and what they would have."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click

from gangq.cli import evidence as seen
from gangq.cli import options, output, queries, stored
from gangq.cli.options import table_options
from gangq.cli.output import say, words
from gangq.cli.session import Session
from gangq.cli.tables import Column, columns
from gangq.cli.which import device_ids, device_named
from gangq.client.rows import TripRow
from gangq.watchdogs.codes import NOTIFY_CLASSES, ExitCode

CLASSES = tuple(dict.fromkeys([*(code.word for code in ExitCode), *NOTIFY_CLASSES]))
"""The words a trip may have: those of the codes, and gang."""

_COLUMNS = ">ago at:5 code outcome job >gang:3 rank:4 task:2 trips:5 worker:1 host:4 reason devices:6"


def code_and_word(code: int | None, word: str | None) -> str:
    """An exit code as people read it."""
    return " ".join(str(part) for part in (code, word) if part is not None)


@click.command()
@click.option(
    "--code", type=int, help="Only this exit code: 75 to 88, as the manual's page of hangs lists them."
)
@click.option(
    "--class",
    "class_",
    type=click.Choice(CLASSES),
    metavar="CLASS",
    help=f"Only this class: {', '.join(CLASSES)}.",
)
@click.option("--task", shell_complete=stored.tasks, help="Only jobs of this task.")
@click.option(
    "--device",
    shell_complete=stored.devices,
    metavar="ID",
    help="Only jobs that held it: HOST:INDEX, or the beginning of its UUID.",
)
@click.option("--host", shell_complete=stored.hosts, help="Only on this host.")
@options.duration("--since", "7d", "How far back.")
@options.limit
@click.option("--evidence", is_flag=True, help="With what was seen, as gangq show JOB prints it.")
@table_options
def trips(session: Session, device: str | None, since_s: float, evidence: bool, **filters: Any) -> None:
    """List the trips of watchdogs, newest first.

    Outcome says what became of the job; notify and held: nothing was stopped. With --json the columns of
    gangq.trips; evidence is null without --evidence, and for a role that may not read payloads.
    """
    if evidence and session.columns and not session.json:
        raise click.UsageError("--evidence prints each trip in full: leave -o out, or add --json")
    client = session.client()
    since = client.execute(queries.database_time()) - timedelta(seconds=since_s)
    held = device and device_named(session, device)
    found = client.execute(queries.trips(device=held, since=since, evidence=evidence, **filters))
    if not found:
        if filters["code"] not in (None, *ExitCode):
            codes = ", ".join(str(int(code)) for code in ExitCode)
            raise click.UsageError(f"no trip has the code {filters['code']}: {codes}")
        stored.must_exist(client, device=held, **filters)
    if session.json:
        session.rows(found, [], "")
        return
    if not evidence or not found:
        session.rows(found, _columns(session, found), f"no such trips within {output.seconds(since_s)}")
        return
    for trip in found:
        output.write(output.wrapped(headline(trip), 2))
        if trip.evidence is not None:
            seen.show(trip.evidence)
        output.write()
    if all(trip.evidence is None for trip in found):
        say(seen.NOT_SHOWN)


def _columns(session: Session, found: Sequence[TripRow]) -> list[Column]:
    short = device_ids(session, {uuid for trip in found for uuid in trip.devices or ()})
    return columns(
        _COLUMNS,
        {
            "code": lambda t: code_and_word(t.code, t.class_),
            "reason": lambda t: f"{t.reason or ''}{', poison' if t.poison else ''}",
            "devices": lambda t: words([*map(short, t.devices or ())]),
        },
    )


def headline(trip: TripRow) -> str:
    """One trip in a line."""
    where = f" on {trip.worker} ({trip.host})" if trip.worker else ""
    return output.plain(
        f"job {trip.job_id} at {output.instant(trip.at)}{where}: {code_and_word(trip.code, trip.class_)}, "
        f"{trip.reason} -> {trip.outcome}"
    )

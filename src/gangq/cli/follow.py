"""gangq logs and gangq events, once or followed; and the reader of output that gangq run uses too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from gangq.cli import output, queries
from gangq.cli.loops import once_there
from gangq.cli.options import table_options
from gangq.cli.output import gang, say
from gangq.cli.queries import Position
from gangq.cli.session import Session, common_options
from gangq.cli.tables import Column, columns
from gangq.cli.which import Which, device_ids, takes_one
from gangq.client.rows import EventRow, LogRow
from gangq.errors import WHO_READS, NotAllowed, NotFound
from gangq.status import ENDED

if TYPE_CHECKING:
    from gangq.client import Client

_POLL_S = 0.3
# Rows committed late carry an earlier time: what is younger than this is read again, and known ids dropped.
_OVERLAP = timedelta(seconds=10)
_LATEST_EVENTS = 1000


class LogReader:
    """Reads the output of jobs as it is stored, each piece once, over all attempts."""

    def __init__(self, client: Client, job_ids: Sequence[int]) -> None:
        self._client = client
        self._positions: dict[int, Position] = dict.fromkeys(job_ids, (-1, -1))

    def read(self, latest_only: bool = False) -> list[LogRow]:
        """What is new. `latest_only`: of each job's latest attempt with output; earlier ones are skipped."""
        found = self._client.execute(queries.logs_after(self._positions))
        for row in found:
            self._positions[row.job_id] = max(self._positions[row.job_id], (row.token, row.seq))
        if latest_only:
            return [row for row in found if row.token == self._positions[row.job_id][0]]
        return found


class Tagger:
    """Makes whole lines with the rank in front out of pieces of output; without ranks, changes nothing."""

    def __init__(self, ranks: Mapping[int, int | None]) -> None:
        self._ranks = ranks
        self._rests: dict[int, str] = {}

    def add(self, row: LogRow) -> str:
        """What can be printed now that this piece is here."""
        rank = self._ranks[row.job_id]
        if rank is None:
            return row.chunk
        *lines, rest = (self._rests.pop(row.job_id, "") + row.chunk).split("\n")
        if rest:
            self._rests[row.job_id] = rest
        return "".join(f"[{rank}] {line}\n" for line in lines)

    def rest(self) -> str:
        """The lines that never ended."""
        left = sorted((self._ranks[job] or 0, text) for job, text in self._rests.items())
        self._rests.clear()
        return "".join(f"[{rank}] {text}\n" for rank, text in left)


def ranks_of(client: Client, target: Which) -> dict[int, int | None]:
    """The jobs of a gang with their ranks, of a batch with their indices. One that is asked for alone has none."""
    number = {"job": "", "gang": "rank", "batch": "array_index"}[target.kind]
    return {job.id: getattr(job, number) if number else None for job in target.jobs(client)}


def _member(client: Client, target: Which, rank: int) -> dict[int, int | None]:
    """The one member of a gang that has this rank, as `ranks_of`."""
    if not target.gang:
        raise click.UsageError(f"--rank is for gangs, and {target.phrase} is none")
    ranks = ranks_of(client, target)
    found: dict[int, int | None] = {job: its for job, its in ranks.items() if its == rank}
    if not found:
        raise NotFound(f"{target.phrase} has no rank {rank}: it has {len(ranks)} members, from 0 on")
    return found


def may_read(client: Client, job_ids: Sequence[int]) -> None:
    """Raise `NotAllowed` unless the output of these jobs is shown to this login."""
    hidden = [job for job in client.jobs(ids=job_ids, limit=None) if not job.readable]
    if hidden:
        raise NotAllowed(f"this login may not read the output of job {hidden[0].id}. {WHO_READS}")


def _has_ended(client: Client, target: Which) -> bool:
    return (target.state(client) or "done") in ENDED


@click.command()
@takes_one()
@click.option("-f", "--follow", is_flag=True, help="Go on until it has ended.")
@click.option("--all", "all_attempts", is_flag=True, help="Of all attempts, not only the latest.")
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Of a gang only this member's, untagged."
)
@common_options
def logs(session: Session, target: Which, follow: bool, all_attempts: bool, rank: int | None) -> None:
    """Print the output of a job, gang or batch.

    A gang's lines are tagged with the rank, those of a batch with the index.
    With --json one object per piece: {"job_id", "token", "seq", "at", "chunk", "rank"}.
    """
    client = session.client()
    ranks = ranks_of(client, target) if rank is None else _member(client, target, rank)
    may_read(client, list(ranks))
    reader, tagger = LogReader(client, list(ranks)), Tagger(ranks if rank is None else dict.fromkeys(ranks))
    latest_only = not all_attempts
    nothing_yet = True

    def look() -> tuple[bool, list[LogRow]]:
        # In this order: what an ended job has printed is stored before its end is.
        return _has_ended(client, target), reader.read(latest_only)

    while True:
        last, found = once_there(look) if follow else (True, reader.read(latest_only))
        for row in found:
            nothing_yet = False
            if session.json:
                output.write(output.to_json({**row._asdict(), "rank": ranks[row.job_id]}))
            else:
                output.job_output(tagger.add(row))
        latest_only = False
        if last:
            break
        time.sleep(_POLL_S)
    if not session.json:
        output.job_output(tagger.rest())
    if nothing_yet:
        whose = target.phrase if rank is None else f"rank {rank} of {target.phrase}"
        say(
            f"{whose} has no output; what a subprocess or a C library of a handler inside the worker wrote "
            "is in the worker's own output"
        )


@click.command()
@takes_one(optional=True)
@click.option(
    "-f", "--follow", is_flag=True, help="Go on: of what is named until it has ended, else until Ctrl-C."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Without an id: begin with at most this many of the newest.",
)
@table_options
def events(session: Session, target: Which | None, follow: bool, limit: int) -> None:
    """Print what happened: to one, or everywhere.

    Only what is out of the ordinary; of a batch, what its jobs have. With --json one object per
    event: the columns of gangq.events.
    """
    if follow and session.columns and not session.json:
        raise click.UsageError("--follow prints a line for each event: leave -o out, or add --json")
    client = session.client()
    batches = _all_events(client, limit) if target is None else _events_of(client, target, follow)
    for number, (rows, last) in enumerate(batches):
        if session.json or (number == 0 and not follow):
            session.rows(rows, _columns(session, rows), "no events")
        else:
            for row in rows:
                output.write(event_line(row))
        if last or not follow:
            return
        time.sleep(_POLL_S)


def _columns(session: Session, rows: Sequence[EventRow]) -> list[Column]:
    short = device_ids(session, {id for row in rows for id in _devices_of(row)})

    def data(row: EventRow) -> object:
        said = {key: value for key, value in (row.data or {}).items() if value not in (None, [], {})}
        if isinstance(said.get("device"), str):
            said["device"] = short(said["device"])
        if isinstance(said.get("devices"), list):
            said["devices"] = [short(one) if isinstance(one, str) else one for one in said["devices"]]
        return said or ""

    return columns(
        ">ago at:4 event=kind >gang epoch:3 job worker reason data:4",
        {"data": data},
    )


def _devices_of(row: EventRow) -> list[str]:
    """The uuids that it names: of one device, or of several; of a start there is only their number."""
    data = row.data or {}
    one, several = data.get("device"), data.get("devices")
    named = [one, *(several if isinstance(several, list) else ())]
    return [id for id in named if isinstance(id, str)]


def event_line(row: EventRow) -> str:
    """An event in a line."""
    whose = [gang(row.gang_id)] if row.gang_id is not None else []
    whose += [f"epoch {row.epoch}"] if row.epoch else []
    whose += [f"job {row.job_id}"] if row.job_id is not None else []
    whose += [f"worker {row.worker}"] if row.worker else []
    reason = f": {row.reason}" if row.reason else ""
    return f"{output.instant(row.at)}  {row.kind}  {' '.join(whose)}{reason}"


def _events_of(client: Client, target: Which, follow: bool) -> Iterator[tuple[list[EventRow], bool]]:
    """Batches of new events, and whether that was the last one."""
    after: int | None = None

    def look() -> tuple[bool, list[EventRow]]:
        return _has_ended(client, target), target.events(client, after)

    target.jobs(client)  # it exists
    while True:
        ended, rows = once_there(look) if follow else look()
        after = max((row.id for row in rows), default=after)
        yield rows, ended


def _all_events(client: Client, limit: int) -> Iterator[tuple[list[EventRow], bool]]:
    rows = client.execute(queries.newest_events(limit))
    # Nothing yet: from now on, by the clock that stamps them.
    since = rows[-1].at if rows else client.execute(queries.database_time())
    # Left out by `limit`, and not to be shown because they are read again.
    known = {row.id: row for row in client.execute(queries.newest_events(_LATEST_EVENTS, since - _OVERLAP))}

    def look() -> list[EventRow]:
        return client.execute(queries.newest_events(_LATEST_EVENTS, since - _OVERLAP))

    while True:
        yield rows, False
        found = once_there(look)
        rows = [row for row in found if row.id not in known]
        since = max([since, *(row.at for row in rows)])
        known = {row.id: row for row in found}

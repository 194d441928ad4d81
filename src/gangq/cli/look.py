"""gangq ls, show, explain, drains."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from gangq.cli import evidence as seen
from gangq.cli import options, output, queries, stored, tables
from gangq.cli.options import look_options, table_options, wide_option
from gangq.cli.output import ago, gang, megabytes, moment, say, seconds, when, words
from gangq.cli.session import Session
from gangq.cli.tables import Cell, Column, Listed, columns
from gangq.cli.wait import culprit
from gangq.cli.which import Which, WhichType, device_ids, takes_one
from gangq.client.encoding import counted
from gangq.client.rows import (
    AttemptRow,
    BatchRow,
    DrainRow,
    EventRow,
    EvidenceRow,
    GangRow,
    JobRow,
    Reason,
    WaitingRow,
)
from gangq.status import ENDED, error_in_words, holding, progress_in_words, said_of

if TYPE_CHECKING:
    from gangq.client import Client

_JOBS = "id state task queue:3 prio:4 >gang:2 rank:2 worker:1 >tries:4 submitted:5 ended:5 what"
_MEMBERS = columns(
    "rank job=id state host worker:1 >tries:4 crashes:4 what", {"what": lambda job: _what(job)}
)
_GANGS = ">id state size:1 epoch:3 task name:2 queue:3 prio:4 hosts:2 submitted:5 ended:5 what"
_BATCHES = columns(
    ">id name state >done failed:1 running:2 waiting:2 >at_most:3 task queue:3 tags:3 by=submitter:4 submitted:4 "
    "ended:5",
    {"id": lambda row: f"b{row.id}", "done": lambda row: f"{row.done}/{row.size}"},
)
_DRAINS = columns(
    ">gang epoch:3 cause trigger_job:3 told=moved:4 acked:4 forced:4 outcome started=started_at:3 took:2",
    {"outcome": lambda drain: drain.outcome or "draining", "took": lambda drain: _took(drain)},
)
_ATTEMPTS = "started=started_at took ended host worker:2 epoch:1 devices"
_FAILED = columns(
    "index=array_index job=id host worker:1 >tries:4 ended what", {"what": lambda job: _what(job)}
)
_FAILED_SHOWN = 20
TIMELINE = columns("at:2 epoch:3 what job rank:2 worker:1 reason")


STATES = (
    "scheduled",
    "waiting",
    "blocked",
    "pending",
    "reserved",
    "running",
    "preempting",
    "preempted",
    "draining",
    "done",
    "failed",
    "cancelled",
)
"""Of jobs and gangs; only gangs are draining."""
_ONLY_JOBS_HAVE = {
    "batches": ("--state, --worker and --gang", {"state", "worker", "gang_id"}),
    "gangs": (
        "--task, --worker, --batch, --name, --tag and --user",
        {"task", "worker", "batch_id", "name", "tag", "submitter"},
    ),
}
"""What `ls` refuses for anything else: the flags, and their arguments."""


@click.command()
@click.argument("what", type=click.Choice(["jobs", "gangs", "batches"]), default="jobs")
@click.option(
    "--state",
    multiple=True,
    type=click.Choice(STATES),
    metavar="STATE",
    help=f"Only this state; may be repeated: {', '.join(STATES)}.",
)
@click.option("--queue", shell_complete=stored.queues, help="Only this queue.")
@click.option("--task", shell_complete=stored.tasks, help="Only jobs of this task.")
@click.option("--worker", shell_complete=stored.workers, help="Only jobs of this worker.")
@click.option("--gang", "gang_id", type=WhichType("gang"), metavar="gN", help="Only members of this gang.")
@click.option("--batch", "batch_id", type=WhichType("batch"), metavar="bN", help="Only jobs of this batch.")
@click.option("--name", shell_complete=stored.batch_names, help="Only batches of this name, and their jobs.")
@click.option("--tag", shell_complete=stored.tags, help="Only batches with this tag, and their jobs.")
@click.option(
    "--user",
    "submitter",
    shell_complete=stored.roles,
    help="Only jobs and batches that this role has submitted.",
)
@options.limit
@table_options
def ls(session: Session, what: str, limit: int, **filters: Any) -> None:
    """List jobs, gangs, or batches, newest first.

    Live and ended ones. With --json: the columns of the views gangq.jobs, gangq.gangs and gangq.batches.
    """
    of = {name: value for name, value in filters.items() if value}
    flags, only = _ONLY_JOBS_HAVE.get(what, ("", set()))
    if of.keys() & only:
        raise click.UsageError(f"{flags} select jobs: gangq ls jobs ...")
    client = session.client()
    of |= {name: of[name].id for name in ("gang_id", "batch_id") if name in of}
    asked: dict[str, Any] = {**of, "limit": limit}
    if what != "jobs":
        id = asked.pop("batch_id" if what == "batches" else "gang_id", None)
        asked["ids"] = None if id is None else [id]
    found = getattr(client, what)(**asked)
    _must_exist(client, found, of)
    why = {} if session.json or what == "batches" else _why_they_wait(client, found)
    shown = _BATCHES
    if what == "jobs":
        shown = columns(_JOBS, {"task": _task, "what": lambda job: _what(job) or why.get(_line(job), "")})
    elif what == "gangs":
        cells: dict[str, Cell] = {
            "id": lambda row: gang(row.id),
            "what": lambda row: row.reason or row.drain_cause or row.note or why.get(("gang", row.id), ""),
        }
        shown = columns(_GANGS, cells)
    session.rows(found, shown, f"no such {what}")


def _must_exist(client: Client, found: Sequence[object], of: Mapping[str, Any]) -> None:
    """Raise `NotFound` where nothing was found because there is nothing of a name."""
    if found:
        return
    if "gang_id" in of:
        client.gang(id=of["gang_id"])
    if "batch_id" in of:
        client.batch(id=of["batch_id"])
    stored.must_exist(client, **of)


@click.command()
@takes_one()
@click.option(
    "--evidence", "whole", is_flag=True, help="All that the watchdogs saw, not only what comes first."
)
@click.option(
    "-f", "--follow", is_flag=True, help="Then say what changes until it has ended, on a terminal with bars."
)
@wide_option
@look_options
def show(session: Session, target: Which, whole: bool, follow: bool) -> None:
    """Show a job (12), a gang (g12) or a batch (b12).

    Of a job that tripped a watchdog, also a sentence that says where it waited, and the stack of its handler, newest
    trip first. With --evidence the rest: readings, beats, where all threads waited, all stacks, the end of its
    output. With --json one object: {"job", "attempts", "events", "evidence"} (evidence is null
    for a login that may not see it), {"gang", "members", "timeline", "drains"}, or {"batch", "failed"}.
    """
    # Asked first: what changes while the page is made is said after it.
    state, events = (target.state(session.client()), target.events(session.client())) if follow else ("", [])
    if target.batch:
        _show_batch(session, target)
    elif target.gang:
        _show_gang(session, target)
    else:
        _show_job(session, target, whole)
    if follow and state not in ENDED:
        _follow(session, target, state, max((event.id for event in events), default=None))


def _follow(session: Session, target: Which, state: str, after_event: int | None) -> None:
    from gangq.cli.run import Watcher

    ranks = {job.id: job.rank for job in target.jobs(session.client())}
    Watcher(session, target, ranks, state=state, after_event=after_event).watch()


def _show_job(session: Session, target: Which, whole: bool) -> None:
    client = session.client()
    (job,) = target.jobs(client)
    attempts = client.attempts(job_id=job.id, limit=None)
    events = target.events(client)
    tripped = any(event.kind in seen.KINDS for event in events)
    evidence = (client.evidence(job_id=job.id) if job.readable else None) if tripped else []
    if session.json:
        session.answer({"job": job, "attempts": attempts, "events": events, "evidence": evidence})
        return
    _job_pairs(job, _cancelled_by(client, job))
    if job.error and job.state not in ("failed", "cancelled"):
        output.write(f"\nlast failed attempt ({_which_failed(job, attempts)}):")
    _error(job.error)
    if attempts:
        output.write()
        session.table(attempts, _attempt_columns(session, attempts))
    if tripped:
        _show_trips(session, job.id, events, evidence, whole)


def _which_failed(job: JobRow, attempts: Sequence[AttemptRow]) -> str:
    """Which attempt, before the one that the state is about, the error is of; what used no attempt has no number."""
    how = next((one.cause for one in reversed(attempts) if one.cause in ("crash", "trip", "fail")), "fail")
    spent = job.attempts - 1 if job.state in ("done", "running", "preempting") else job.attempts
    return f"{spent} of {job.max_attempts}" if how == "fail" else how


def _attempt_columns(session: Session, attempts: Sequence[AttemptRow]) -> list[Column]:
    short = device_ids(session, {uuid for attempt in attempts for uuid in attempt.devices or ()})
    return columns(
        _ATTEMPTS,
        {
            "took": _took,
            "ended": lambda attempt: attempt.cause or "runs",
            "devices": lambda attempt: Listed(words([*map(short, attempt.devices or ())])),
        },
    )


def _show_batch(session: Session, target: Which) -> None:
    client = session.client()
    row = client.batch(id=target.id)
    failed = client.jobs(batch_id=row.id, state="failed", limit=_FAILED_SHOWN)
    if session.json:
        session.answer({"batch": row, "failed": failed})
        return
    _batch_pairs(row)
    if failed:
        output.write()
        session.table(failed, _FAILED)
    if row.failed > len(failed):
        output.write(f"all that failed: gangq ls --batch {target} --state failed --limit {row.failed}")


def _batch_pairs(row: BatchRow) -> None:
    tables.pairs(
        row,
        "batch name tags state task queue size done failed? cancelled? running? waiting? at_most jobs submitted "
        "ended=finished_at",
        {
            "batch": lambda _: f"b{row.id}",
            "jobs": lambda _: f"{row.id} and on: gangq ls --batch b{row.id}",
            "submitted": _submitted,
        },
    )


def _show_gang(session: Session, target: Which) -> None:
    client = session.client()
    row, members = client.gang(id=target.id), target.jobs(client)
    timeline, drains = client.timeline(gang_id=row.id), client.drains(gang_id=row.id)[::-1]
    if session.json:
        session.answer({"gang": row, "members": members, "timeline": timeline, "drains": drains})
        return
    _gang_pairs(row, _cancelled_by(client, row))
    for rows, shown in ((members, _MEMBERS), (timeline, [*columns(">ago"), *TIMELINE]), (drains, _DRAINS)):
        if rows or shown is _MEMBERS:
            output.write()
            session.table(rows, shown)
    failed = culprit(members)
    if failed is not None:
        output.write(f"\nrank {failed.rank}:")
        _error(failed.error)
    tripped = dict.fromkeys(str(trip.job_id) for trip in client.execute(queries.trips(gang_id=row.id)))
    if tripped:
        output.write(f"\nwhat the watchdogs saw: gangq show {' or '.join(tripped)}")


def _show_trips(
    session: Session,
    job_id: int,
    events: Sequence[EventRow],
    evidence: Sequence[EvidenceRow] | None,
    whole: bool,
) -> None:
    """What the watchdogs did, and what they saw: stacks and output may show what a viewer must not see."""
    output.write()
    told = seen.history(events, evidence, session.wide)
    if evidence is None:
        say(seen.NOT_SHOWN)
        return
    found = seen.by_event(evidence)
    for event in told:
        what = found.get((event.at, event.kind))
        if what:
            output.write()
            output.write(output.plain(f"{event.kind} at {output.instant(event.at)}:"))
            seen.brief(event, what)
            if whole:
                seen.show(what)
            else:
                seen.stack(what)
    if told and not whole:
        output.write(f"\nall that was seen: gangq show {job_id} --evidence")


@click.command()
@takes_one()
@click.option(
    "--now", "now", is_flag=True, help="Decide again, without effects: not what the last pass found."
)
@click.option("-v", "--verbose", "whole", is_flag=True, help="Also what does not hold it.")
@look_options
def explain(session: Session, target: Which, now: bool, whole: bool) -> None:
    """Say why a job or gang is not running; of a batch its first job that waits.

    First what holds it, in a sentence, as the last pass found it, and how long ago that was; or what it does. Then
    what else holds it (no), its place in line, when it is to start and what that rests on, and what would help.
    With -v also what is passed (ok). Of a job that is claimed by whoever has room: what a claim needs. With --json
    one object per row: {"gate", "ok", "detail", "numbers"}.
    """
    client = session.client()
    target = target.first_waiting(client)
    reasons = client.explain_now(**target.named) if now else target.explain(client)
    if session.json:
        session.rows(reasons, [], "")
        return
    first = next(iter(holding(reasons)), reasons[0])
    output.write(output.wrapped(f"{target.phrase}: {_detail(first)}"))
    if not whole:
        reasons = [one for one in reasons if one is not first and (not one.ok or one.gate in _SAID)]
    width = max((len(reason.gate) for reason in reasons), default=0)
    for reason in reasons:
        output.write(*_gate(reason, width))


_SAID = ("line", "start", "unblock")
"""Of what does not hold it, `explain` says these."""


def _gate(reason: Reason, width: int) -> tuple[str, ...]:
    if reason.gate in ("start", "unblock"):
        mark = output.coloured("->", "cyan")
    else:
        mark = output.coloured("ok", "green") if reason.ok else output.coloured("no", "red")
    # Long ones go on below themselves, so that the gates stay a column.
    indent = width + 6
    return mark, f"  {reason.gate.ljust(width)}  ", output.wrapped(_detail(reason), indent, indent)


def _detail(reason: Reason) -> str:
    """The detail; a planned start as a length of time from now."""
    numbers = reason.numbers or {}
    if reason.gate != "start" or "in_s" not in numbers:
        return reason.detail
    at = when(datetime.fromisoformat(numbers["starts_at"]))
    rests_on = f", {numbers['follows']}" if numbers.get("follows") else ""
    return f"planned in {seconds(numbers['in_s'])} ({at}){rests_on}"


@click.command()
@click.argument("target", type=WhichType("gang"), required=False, metavar="[gN]")
@options.limit
@table_options
def drains(session: Session, target: Which | None, limit: int) -> None:
    """List drains, newest first: their causes and outcomes."""
    if target is not None:
        session.client().gang(id=target.id)
    found = session.client().drains(gang_id=target.id if target else None, limit=limit)
    session.rows(found, _DRAINS, "no drains")


def _took(row: DrainRow | AttemptRow) -> str:
    return seconds((row.ended_at - row.started_at).total_seconds()) if row.ended_at else ""


def _what(job: JobRow) -> str:
    """The one thing worth knowing about a job in a line."""
    if job.state == "preempting" and not job.error:
        return f"told to stop ({job.stop_reason})"
    if job.state == "scheduled" and not job.error:
        return f"due {ago(job.due_at)}"
    return said_of(job)


def _task(job: JobRow) -> str:
    """Its task, or what a command is."""
    argv = job.payload.get("argv") if job.task == "command" and isinstance(job.payload, dict) else None
    if not argv:
        return job.task
    return argv if isinstance(argv, str) else shlex.join(map(str, argv))


def _line(job: JobRow | WaitingRow) -> tuple[object, ...]:
    """What jobs have in common that wait for the same reason; a gang is alone."""
    if isinstance(job, WaitingRow):
        return ("gang", job.id) if job.kind == "gang" else (job.queue, job.task, job.priority, job.state)
    return ("gang", job.gang_id) if job.gang_id else (job.queue, job.task, job.priority, job.state)


def _why_they_wait(client: Client, rows: Sequence[JobRow | GangRow]) -> Mapping[tuple[object, ...], str]:
    """Why those wait that do. Nothing of jobs that wait for several reasons: `explain` knows each."""
    if not any(row.state in ("pending", "blocked", "waiting") for row in rows):
        return {}
    found: dict[tuple[object, ...], set[str]] = {}
    for row in client.waiting():
        found.setdefault(_line(row), set()).add(row.why or "")
    return {line: whys.pop() for line, whys in found.items() if len(whys) == 1}


def _needs(job: JobRow) -> str:
    parts = (
        [counted(job.gpus, "GPU") + (f" of {megabytes(job.vram_mb)}" if job.vram_mb else "")]
        if job.gpus
        else []
    )
    parts += [f"{megabytes(job.memory_mb)} memory"] if job.memory_mb else []
    parts += [counted(job.cpus, "CPU")] if job.cpus else []
    parts += [f"{key}={value}" for key, value in job.labels.items()]
    return ", ".join(parts)


_NOT_SHOWN = "(not shown to you: it is neither yours nor in a shared queue)"


def _trips(job: JobRow) -> str | None:
    """How many, and what the next one does."""
    if not job.trips:
        return None
    return f"{job.trips} ({job.max_trips} are sent back, number {job.max_trips + 1} ends the job)"


def _cancelled_by(client: Client, row: JobRow | GangRow) -> str | None:
    """Who cancelled it last, and why; None if it is not cancelled. A member is cancelled with its gang."""
    cause = row.drain_cause if isinstance(row, GangRow) else row.stop_reason
    if row.state != "cancelled" and (row.state not in ("preempting", "draining") or cause != "cancel"):
        return None
    gang_id = row.id if isinstance(row, GangRow) else row.gang_id
    job_id = row.id if gang_id is None else None
    found = client.events(job_id=job_id, gang_id=gang_id, kind="cancel", limit=None)
    if not found:
        return None
    last = found[-1]
    return f"{moment(last.at)} by {last.actor or 'gangq'}" + (f": {last.reason}" if last.reason else "")


def _job_pairs(job: JobRow, cancelled: str | None) -> None:
    result = output.to_json(job.result) if job.result is not None else None
    tables.pairs(
        job,
        "job=id state task queue priority gang batch needs model worker attempts crashes? trips stops? snoozes "
        "budget=budget_s submitted parent due=due_at claimed=claimed_at told_to_stop ended=finished_at cancelled "
        "token progress payload result error",
        {
            "gang": lambda _: f"{gang(job.gang_id)}, rank {job.rank}" if job.gang_id is not None else None,
            "batch": lambda _: f"b{job.batch_id}, index {job.array_index}" if job.batch_id else None,
            "needs": _needs,
            "worker": lambda _: f"{job.worker} on {job.host}" if job.worker else None,
            "attempts": lambda _: f"{job.attempts} of {job.max_attempts}",
            "trips": _trips,
            "snoozes": lambda _: f"{job.snoozes} of {job.max_snoozes}" if job.snoozes else None,
            "submitted": _submitted,
            "parent": lambda _: None if job.parent is None else f"job {job.parent}",
            "told_to_stop": lambda _: f"{moment(job.told_at)}: {job.stop_reason}" if job.told_at else None,
            "cancelled": lambda _: cancelled,
            "progress": lambda _: progress_in_words(job.progress),
            "payload": lambda _: job.payload if job.readable else _NOT_SHOWN,
            "result": lambda _: result if job.readable or job.state != "done" else _NOT_SHOWN,
            "error": lambda _: _NOT_SHOWN if job.state == "failed" and not job.readable else None,
        },
    )


def _submitted(row: JobRow | GangRow | BatchRow) -> str:
    return f"{moment(row.submitted_at)} by {row.submitter}"


def _gang_pairs(row: GangRow, cancelled: str | None) -> None:
    tables.pairs(
        row,
        "gang=id name service state size epoch task queue priority hosts launches_lost placement_misses? "
        "never_started? preemptions? submitted not_before reserved=reserved_at started=go_at ended=finished_at "
        "drains cancelled reason note",
        {
            "gang": lambda _: gang(row.id),
            "launches_lost": lambda _: f"{row.attempts} of {row.max_attempts}" if row.attempts else None,
            "submitted": _submitted,
            "drains": lambda _: row.drain_cause if row.state == "draining" else None,
            "cancelled": lambda _: cancelled,
            "reason": lambda _: row.reason if cancelled is None else None,
        },
    )


def _error(error: Mapping[str, Any] | None) -> None:
    if not error:
        return
    output.write(f"error  {error_in_words(error)}" + (f" (on {error['host']})" if error.get("host") else ""))
    for key, title in (("traceback", "traceback"), ("log_tail", "end of its output")):
        if error.get(key):
            output.block(title, str(error[key]))

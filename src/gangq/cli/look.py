"""gangq ls, show, explain, drains."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click

from gangq.cli import evidence as seen
from gangq.cli import output, parsing, queries
from gangq.cli.output import gang, megabytes, seconds, when, words
from gangq.cli.parsing import Which, WhichType
from gangq.cli.session import Session, common_options, pass_session, say
from gangq.cli.tables import Column, table
from gangq.client import Client
from gangq.client.encoding import counted
from gangq.client.rows import DrainRow, EventRow, EvidenceRow, GangRow, JobRow, Reason, TimelineRow

_JOBS = [
    Column("id", lambda j: j.id, right=True),
    Column("state", lambda j: j.state, state=True),
    Column("task", lambda j: j.task),
    Column("queue", lambda j: j.queue, rank=3),
    Column("prio", lambda j: j.priority, right=True, rank=4),
    Column("gang", lambda j: gang(j.gang_id), rank=2),
    Column("rank", lambda j: j.rank, right=True, rank=2),
    Column("worker", lambda j: j.worker, rank=1),
    Column("tries", lambda j: f"{j.attempts}/{j.max_attempts}", right=True, rank=4),
    Column("submitted", lambda j: when(j.submitted_at), rank=5),
    Column("ended", lambda j: when(j.finished_at), rank=5),
    Column("what", lambda j: _what(j)),
]
_MEMBERS = [
    Column("rank", lambda j: j.rank, right=True),
    Column("job", lambda j: j.id, right=True),
    Column("state", lambda j: j.state, state=True),
    Column("host", lambda j: j.host),
    Column("worker", lambda j: j.worker, rank=1),
    Column("tries", lambda j: f"{j.attempts}/{j.max_attempts}", right=True, rank=4),
    Column("crashes", lambda j: j.crashes, right=True, rank=4),
    Column("what", lambda j: _what(j)),
]
_GANGS = [
    Column("id", lambda g: gang(g.id), right=True),
    Column("state", lambda g: g.state, state=True),
    Column("size", lambda g: g.size, right=True, rank=1),
    Column("epoch", lambda g: g.epoch, right=True, rank=3),
    Column("task", lambda g: g.task),
    Column("name", lambda g: g.name, rank=2),
    Column("queue", lambda g: g.queue, rank=3),
    Column("prio", lambda g: g.priority, right=True, rank=4),
    Column("hosts", lambda g: words(g.hosts), rank=2),
    Column("submitted", lambda g: when(g.submitted_at), rank=5),
    Column("ended", lambda g: when(g.finished_at), rank=5),
    Column("what", lambda g: g.reason or g.drain_cause or g.note),
]
_DRAINS = [
    Column("gang", lambda d: gang(d.gang_id), right=True),
    Column("epoch", lambda d: d.epoch, right=True, rank=3),
    Column("cause", lambda d: d.cause),
    Column("trigger job", lambda d: d.trigger_job, right=True, rank=3),
    Column("told", lambda d: d.moved, right=True, rank=4),
    Column("acked", lambda d: d.acked, right=True, rank=4),
    Column("forced", lambda d: d.forced, right=True, rank=4),
    Column("outcome", lambda d: d.outcome or "draining", state=True),
    Column("started", lambda d: when(d.started_at), rank=3),
    Column(
        "took", lambda d: seconds((d.ended_at - d.started_at).total_seconds()) if d.ended_at else "", rank=2
    ),
]
_ATTEMPTS = [
    Column("started", lambda a: when(a.started_at)),
    Column("took", lambda a: seconds((a.ended_at - a.started_at).total_seconds()) if a.ended_at else ""),
    Column("ended", lambda a: a.cause or "runs"),
    Column("host", lambda a: a.host),
    Column("worker", lambda a: a.worker, rank=1),
    Column("epoch", lambda a: a.epoch, right=True, rank=2),
    Column("devices", lambda a: words(a.devices), rank=3),
]
_TIMELINE = [
    Column("at", lambda t: output.instant(t.at)),
    Column("epoch", lambda t: t.epoch, right=True, rank=3),
    Column("what", lambda t: t.what),
    Column("job", lambda t: t.job_id, right=True),
    Column("rank", lambda t: t.rank, right=True, rank=2),
    Column("worker", lambda t: t.worker, rank=1),
    Column("reason", lambda t: t.reason),
]


_STATES = (
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


@click.command()
@click.argument("what", type=click.Choice(["jobs", "gangs"]), default="jobs")
@click.option(
    "--state",
    multiple=True,
    type=click.Choice(_STATES),
    metavar="STATE",
    help=f"Only this state; may be repeated: {', '.join(_STATES)}.",
)
@click.option("--queue", help="Only this queue.")
@click.option("--task", help="Only jobs of this task.")
@click.option("--worker", help="Only jobs of this worker.")
@click.option(
    "--gang", "gang_id", type=WhichType(gangs_only=True), metavar="gN", help="Only members of this gang."
)
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most this many.")
@common_options
@pass_session
def ls(
    session: Session,
    what: str,
    state: tuple[str, ...],
    queue: str | None,
    task: str | None,
    worker: str | None,
    gang_id: Which | None,
    limit: int,
) -> None:
    """List jobs, or gangs, newest first.

    Live and ended ones. With --json: the columns of the views gangq.jobs and gangq.gangs.
    """
    client = session.client()
    if what == "jobs":
        jobs = client.jobs(
            state=state or None,
            queue=queue,
            task=task,
            worker=worker,
            gang_id=gang_id.id if gang_id else None,
            limit=limit,
        )
        session.rows(jobs, _JOBS, "no such jobs")
        return
    if task or worker:
        raise click.UsageError("--task and --worker select jobs: gangq ls jobs ...")
    ids = [gang_id.id] if gang_id else None
    session.rows(
        client.gangs(ids=ids, state=state or None, queue=queue, limit=limit), _GANGS, "no such gangs"
    )


@click.command()
@parsing.takes_one
@click.option(
    "--evidence", "whole", is_flag=True, help="All that the watchdogs saw, not only what comes first."
)
@common_options
@pass_session
def show(session: Session, which: Which | None, gang: int | None, whole: bool) -> None:
    """Show a job (12) or a gang (g12).

    Of a job that tripped a watchdog, also a sentence that says where it waited, and the stack of its handler, newest
    trip first. With --evidence the rest: readings, beats, where all threads waited, all stacks, the end of its
    output. With --json one object: {"job", "attempts", "events", "evidence"} (evidence is null
    for a login that may not see it), or {"gang", "members", "timeline", "drains"}.
    """
    target = parsing.one_of(which, gang)
    client = session.client()
    if not target.gang:
        job = client.job(id=target.id)
        attempts = client.attempts(job_id=job.id, limit=None)
        events = client.events(job_id=job.id, limit=None)
        evidence = _evidence(client, job, events)
        if session.json:
            session.answer({"job": job, "attempts": attempts, "events": events, "evidence": evidence})
            return
        output.pairs(_job_pairs(job, _cancelled_by(client, job)))
        if job.error and job.state not in ("failed", "cancelled"):
            # It is of an attempt before the one that the state is about.
            spent = job.attempts - 1 if job.state in ("done", "running", "preempting") else job.attempts
            output.write(f"\nlast failed attempt ({max(1, spent)} of {job.max_attempts}):")
        _error(job.error)
        if attempts:
            output.write()
            table(attempts, _ATTEMPTS)
        _show_trips(job.id, events, evidence, whole)
        return
    row = client.gang(id=target.id)
    members = sorted(client.jobs(gang_id=row.id, limit=None), key=lambda member: member.rank or 0)
    timeline, drains = client.timeline(gang_id=row.id), client.drains(gang_id=row.id)
    if session.json:
        session.answer({"gang": row, "members": members, "timeline": timeline, "drains": drains})
        return
    output.pairs(_gang_pairs(row, _cancelled_by(client, row)))
    output.write()
    table(members, _MEMBERS)
    _show_history(timeline, drains)
    failed = culprit(members)
    if failed is not None:
        output.write(f"\nrank {failed.rank}:")
        _error(failed.error)
    tripped = list(
        dict.fromkeys(trip.job_id for trip in session.client().execute(queries.trips(gang_id=row.id)))
    )
    if tripped:
        output.write(f"\nwhat the watchdogs saw: gangq show {' or '.join(map(str, tripped))}")


def _evidence(client: Client, job: JobRow, events: Sequence[EventRow]) -> list[EvidenceRow] | None:
    if not any(event.kind in seen.KINDS for event in events):
        return []
    return client.evidence(job_id=job.id) if job.readable else None


def _show_trips(
    job_id: int, events: Sequence[EventRow], evidence: Sequence[EvidenceRow] | None, whole: bool
) -> None:
    """What the watchdogs did, and what they saw: stacks and output may show what a viewer must not see."""
    if not any(event.kind in seen.KINDS for event in events):
        return
    output.write()
    told = seen.history(events, evidence)
    if evidence is None:
        say("what the watchdogs saw is shown to those who may read the job's payload")
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
    if told and not whole:
        output.write(f"\nall that was seen: gangq show {job_id} --evidence")


def _show_history(timeline: list[TimelineRow], drains: list[DrainRow]) -> None:
    if timeline:
        output.write()
        table(timeline, _TIMELINE)
    if drains:
        output.write()
        table(drains, _DRAINS)


@click.command()
@parsing.takes_one
@click.option(
    "--now", "now", is_flag=True, help="Decide again, without effects: not what the last pass found."
)
@common_options
@pass_session
def explain(session: Session, which: Which | None, gang: int | None, now: bool) -> None:
    """Say why a job or gang is not running.

    What the last pass found, with numbers, and how long ago that was: ok is passed, no is what holds it. Then its
    place in line, when it is to start and what that rests on, and what would help. Of a job that is claimed by
    whoever has room: what a claim needs. With --json one object per row: {"gate", "ok", "detail", "numbers"}.
    """
    target = parsing.one_of(which, gang)
    client = session.client()
    if now:
        reasons = client.explain_now(**{"gang_id" if target.gang else "job_id": target.id})
    elif target.gang:
        reasons = client.explain_gang(gang_id=target.id)
    else:
        reasons = client.explain_job(job_id=target.id)
    if session.json:
        session.rows(reasons, [], "")
        return
    width = max(len(reason.gate) for reason in reasons)
    for reason in reasons:
        output.write(*_gate(reason, width))


def _gate(reason: Reason, width: int) -> tuple[str, ...]:
    if reason.gate in ("start", "unblock"):
        mark = output.coloured("->", "cyan")
    else:
        mark = output.coloured("ok", "green") if reason.ok else output.coloured("no", "red")
    # Long ones go on below themselves, so that the gates stay a column.
    indent = " " * (width + 6)
    room = max(40, shutil.get_terminal_size().columns - len(indent)) if sys.stdout.isatty() else 10**6
    lines = textwrap.wrap(output.plain(_detail(reason)), room) or [""]
    return mark, f"  {reason.gate.ljust(width)}  " + f"\n{indent}".join(lines)


def _detail(reason: Reason) -> str:
    """The detail; a planned start as a length of time from now."""
    numbers = reason.numbers or {}
    if reason.gate != "start" or "in_s" not in numbers:
        return reason.detail
    at = when(datetime.fromisoformat(numbers["starts_at"]))
    rests_on = f", {numbers['follows']}" if numbers.get("follows") else ""
    return f"planned in {seconds(numbers['in_s'])} ({at}){rests_on}"


@click.command()
@click.argument("gang_id", type=WhichType(gangs_only=True), required=False, metavar="[gN]")
@click.option("--gang", type=click.IntRange(min=1), metavar="N", help="The same as gN.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most this many.")
@common_options
@pass_session
def drains(session: Session, gang_id: Which | None, gang: int | None, limit: int) -> None:
    """List drains: their causes and outcomes."""
    wanted = gang_id.id if gang_id else gang
    if wanted is not None:
        session.client().gang(id=wanted)
    session.rows(session.client().drains(gang_id=wanted, limit=limit), _DRAINS, "no drains")


def culprit(members: Sequence[JobRow]) -> JobRow | None:
    """The job, or the member, whose own failure the end was: of several the lowest rank."""
    failed = sorted((m for m in members if m.error and m.state == "failed"), key=lambda m: m.rank or 0)
    # The others fell with the gang, and their error says only that.
    own = [m for m in failed if (m.error or {}).get("type") != "GangFailed"]
    spent = [m for m in own if m.attempts >= m.max_attempts]
    return next(iter([*spent, *own, *failed]), None)


def _what(job: JobRow) -> str:
    """The one thing worth knowing about a job in a line."""
    if job.error and job.state != "done":
        return _said(job.error)
    if job.state == "preempting":
        return f"told to stop ({job.stop_reason})"
    if job.state == "scheduled":
        return f"due {when(job.due_at)}"
    return progress(job.progress) if job.state == "running" else ""


def progress(beat: Any) -> str:
    """A beat in words: its phase, step and total, then the rest."""
    if not isinstance(beat, Mapping):
        return ""
    rest = dict(beat)
    phase, step, total = rest.pop("phase", None), rest.pop("step", None), rest.pop("total", None)
    parts = [str(phase)] if phase is not None else []
    if step is not None:
        parts.append(f"{step}/{total}" if total is not None else f"step {step}")
    parts += [
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in rest.items()
    ]
    return " ".join(parts)


def _said(error: Mapping[str, Any]) -> str:
    return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))


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


_COUNTS = ("none is", "one is", "two are", "three are", "four are", "five are")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


def _trips(job: JobRow) -> str | None:
    """How many, and what the next one does."""
    if not job.trips:
        return None
    most = job.max_trips
    if most >= len(_COUNTS):
        return f"{job.trips} ({most} are sent back, the next one ends the job)"
    return f"{job.trips} ({_COUNTS[most]} sent back, the {_ORDINALS[most]} ends the job)"


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
    return f"{when(last.at)} by {last.actor or 'gangq'}" + (f": {last.reason}" if last.reason else "")


def _job_pairs(job: JobRow, cancelled: str | None) -> list[tuple[str, object]]:
    result = output.to_json(job.result) if job.result is not None else None
    return [
        ("job", job.id),
        ("state", job.state),
        ("task", job.task),
        ("queue", job.queue),
        ("priority", job.priority),
        ("gang", f"{gang(job.gang_id)}, rank {job.rank}" if job.gang_id is not None else None),
        ("needs", _needs(job)),
        ("model", job.model),
        ("worker", f"{job.worker} on {job.host}" if job.worker else None),
        ("attempts", f"{job.attempts} of {job.max_attempts}"),
        ("crashes", job.crashes or None),
        ("trips", _trips(job)),
        ("stops", job.stops or None),
        ("budget", seconds(job.budget_s)),
        ("submitted", f"{when(job.submitted_at)} by {job.submitter}"),
        ("parent", None if job.parent is None else f"job {job.parent}"),
        ("due", job.due_at),
        ("claimed", job.claimed_at),
        ("told to stop", f"{when(job.told_at)} ({job.stop_reason})" if job.told_at else None),
        ("ended", job.finished_at),
        ("cancelled", cancelled),
        ("token", job.token),
        ("progress", progress(job.progress)),
        ("payload", job.payload if job.readable else _NOT_SHOWN),
        ("result", result if job.readable or job.state != "done" else _NOT_SHOWN),
        ("error", _NOT_SHOWN if job.state == "failed" and not job.readable else None),
    ]


def _gang_pairs(row: GangRow, cancelled: str | None) -> list[tuple[str, object]]:
    return [
        ("gang", gang(row.id)),
        ("name", row.name),
        ("state", row.state),
        ("size", row.size),
        ("epoch", row.epoch),
        ("task", row.task),
        ("queue", row.queue),
        ("priority", row.priority),
        ("hosts", words(row.hosts)),
        ("launches lost", f"{row.attempts} of {row.max_attempts}" if row.attempts else None),
        ("placement misses", row.placement_misses or None),
        ("never started", row.never_started or None),
        ("preemptions", row.preemptions or None),
        ("submitted", f"{when(row.submitted_at)} by {row.submitter}"),
        ("not before", row.not_before),
        ("reserved", row.reserved_at),
        ("started", row.go_at),
        ("ended", row.finished_at),
        ("drains", row.drain_cause if row.state == "draining" else None),
        ("cancelled", cancelled),
        ("reason", row.reason if cancelled is None else None),
        ("note", row.note),
    ]


def _error(error: Mapping[str, Any] | None) -> None:
    if not error:
        return
    output.write(f"error  {_said(error)}" + (f" (on {error['host']})" if error.get("host") else ""))
    for key, title in (("traceback", "traceback"), ("log_tail", "end of its output")):
        if error.get(key):
            output.block(title, str(error[key]))

"""gangq queue, the tree of queues; gangq limit, keys of which only so many jobs are placed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args, get_type_hints

import click

from gangq.cli import options, stored
from gangq.cli.group import Subgroup
from gangq.cli.options import table_options
from gangq.cli.output import seconds, when
from gangq.cli.parsing import Amounts, Due
from gangq.cli.session import Session, chained, common_options
from gangq.cli.tables import Cell, Column, columns
from gangq.client.rows import QueueRow
from gangq.client.settings import QueueSettings
from gangq.errors import InvalidInput
from gangq.placement.order import POLICIES

_COLUMNS = columns(
    "name paused policy:2 attempts=max_attempts:3 crashes=max_crashes:5 trips=max_trips:5 backoff:4 budget:3 "
    "payload_bytes=max_payload_bytes:6 keep_done=retention_done:6 keep_failed=retention_failed:6",
    {
        "paused": lambda q: _paused(q),
        "backoff": lambda q: f"{seconds(q.backoff_s)}..{seconds(q.backoff_max_s)}",
        "budget": lambda q: seconds(q.budget_s) or "-",
    },
)


_RETENTION = click.Choice(["short", "long", "forever"])
_RESET = [name for name, hint in get_type_hints(QueueSettings).items() if type(None) in get_args(hint)]
_settings = options.settings(
    QueueSettings,
    {
        "policy": (click.Choice([*POLICIES]), "Order of what waits in it [priority]."),
        "max_attempts": "Attempts a job may spend [3].",
        "max_crashes": "Workers a job may lose [3].",
        "max_trips": "So many trips of a job are sent back; the next one ends it [3].",
        "backoff_s": "First delay before a retry; doubles [5s].",
        "backoff_max_s": "Longest such delay [10m].",
        "budget_s": "Wall-clock budget of an attempt whose task has none [35m, with GPUs 2h15m].",
        "max_payload_bytes": "Largest payload or result [1 MiB].",
        "retention_done": (_RETENTION, "How long done jobs are kept: 7 days [short], 30 days, or for ever."),
        "retention_failed": (_RETENTION, "How long failed and cancelled jobs are kept [long]."),
        "guaranteed": "What it may claim back from others [nothing].",
        "maximum": "What it may hold at once: gpus, memory_mb, cpus, jobs.",
        "weight": "Its share beside its siblings below a fair parent [1].",
        "max_running_gangs": "Gangs placed at once.",
        "max_running_jobs": "Jobs placed at once, members included.",
        "rate": (click.STRING, "So many starts in a period, members included: 60/1m; none: no limit."),
        "submitter_maximum": "What one submitter may hold: gpus, jobs, gangs.",
        "placement_timeout_s=--timeout": "How long its gangs wait for placement [15m].",
        "timeout_style": (options.TIMEOUT_STYLE, f"What happens then: {options.THEN}."),
        "preempts": "Whether it may displace others.",
        "preemptible": "Whether its work may be displaced.",
        "min_run_s": "How long its work runs undisturbed [5m].",
        "others": (
            click.Choice(["owner", "shared"]),
            "Who may act on and read the work of others in it: admins only, or every submitter [owner].",
        ),
        "ceilings": (Amounts(whole=True), "The highest priority by role, of it and its children."),
    },
)


def _name(q: QueueRow) -> str:
    # Below its parent only the last part is news; a queue whose parent was never made stands at the top.
    return "  " * q.depth + (q.name.rpartition(".")[2] if q.depth else q.name)


def _paused(q: QueueRow) -> str:
    until = f" until {when(q.paused_until)}" if q.paused_until else ""
    return f"paused{until}" if q.paused else ""


def _state(q: QueueRow) -> str:
    if q.paused_by is not None:
        return _paused(q) if q.paused else f"paused by {q.paused_by}"
    return "draining" if q.draining else ""


def _amounts(used: float, guaranteed: float | None, maximum: float | None) -> str:
    if guaranteed is None and maximum is None:
        return f"{used:.12g}"
    return "/".join("-" if n is None else f"{n:.12g}" for n in (used, guaranteed, maximum))


def _tree(queues: Sequence[QueueRow]) -> list[Column]:
    """The columns of the tree: what no queue has, uses or limits is not one."""

    def if_any(name: str, has: Callable[[QueueRow], object]) -> str:
        return name if any(map(has, queues)) else ""

    def amount(name: str) -> Cell:
        return lambda q: _amounts(getattr(q, f"used_{name}"), q.guaranteed.get(name), q.maximum.get(name))

    def used_or_limited(name: str) -> str:
        return if_any(
            f">{name}", lambda q: getattr(q, f"used_{name}") or name in q.guaranteed or name in q.maximum
        )

    def jobs(q: QueueRow) -> str:
        limits = [n for n in (q.maximum.get("jobs"), q.max_running_jobs) if n is not None]
        return _amounts(q.running_jobs, q.guaranteed.get("jobs"), min(limits, default=None))

    memory, cpus = used_or_limited("memory_mb"), used_or_limited("cpus")
    others, ceilings = (
        if_any("others", lambda q: q.others != "owner"),
        if_any("ceilings", lambda q: q.ceilings),
    )
    return columns(
        f"queue state policy:2 >gpus {memory} {cpus} >jobs >gangs each_submitter:4 {others} {ceilings} waiting_jobs "
        "waiting_gangs",
        {
            "queue": _name,
            "state": _state,
            **{name: amount(name) for name in ("gpus", "memory_mb", "cpus")},
            "jobs": jobs,
            "gangs": lambda q: _amounts(q.running_gangs, None, q.max_running_gangs),
            "each_submitter": lambda q: ", ".join(f"{k} {n}" for k, n in q.submitter_maximum.items()),
            "ceilings": lambda q: ", ".join(f"{role} {most}" for role, most in sorted(q.ceilings.items())),
        },
    )


_named = chained(click.argument("name", shell_complete=stored.queues), common_options)


@click.group(cls=Subgroup, invoke_without_command=True)
@table_options
@click.pass_context
def queue(ctx: click.Context, session: Session) -> None:
    """Show the queues as a tree, with what each and its children hold, are guaranteed and may hold.

    The commands make, list, change, pause, resume and drain queues.
    """
    if ctx.invoked_subcommand is None:
        queues = session.client().queues()
        session.rows(queues, _tree(queues), "no queues")


@queue.command()
@_settings
@_named
def create(session: Session, /, name: str, **settings: Any) -> None:
    """Make a queue, and its parents: those of a.b.c are a.b and a. What is not given has its default."""
    if session.client().queues(name=name):
        raise InvalidInput(f"queue {name!r} exists already; change it with: gangq queue set {name} ...")
    given = {setting: value for setting, value in settings.items() if value is not None}
    _set(session, name, given, "made")


@queue.command(name="set")
@_settings
@click.option(
    "--reset",
    type=click.Choice(_RESET),
    metavar="SETTING",
    multiple=True,
    help=f"Put a setting back to none; may be repeated: {', '.join(_RESET)}.",
)
@_named
def set_(session: Session, /, name: str, reset: tuple[str, ...], **settings: Any) -> None:
    """Change what is given of a queue. Jobs already submitted keep what they inherited."""
    _existing(session, name)
    both = next((setting for setting in reset if settings[setting] is not None), None)
    if both:
        raise click.UsageError(f"{both} is both set and reset: give it a value or take it away, not both")
    changes = {setting: value for setting, value in settings.items() if value is not None}
    changes |= dict.fromkeys(reset)
    changes |= {"rate": None} if changes.get("rate") == "none" else {}
    if not changes:
        raise click.UsageError("nothing to change: name at least one option, see gangq queue set --help")
    _set(session, name, changes, "changed")


@queue.command()
@click.option("--until", type=Due(), metavar="WHEN", help="2h from now, or a time [gangq queue resume].")
@_named
def pause(session: Session, name: str, until: datetime | timedelta | None) -> None:
    """Start nothing new from a queue and its children; what runs goes on."""
    _existing(session, name)
    end = None if until is None else session.moment(until)
    _set(
        session,
        name,
        {"paused": True, "paused_until": end},
        "paused" + (f" until {when(end)}" if end else ""),
    )


@queue.command()
@_named
def resume(session: Session, name: str) -> None:
    """Open a paused or draining queue."""
    _existing(session, name)
    _set(session, name, {"paused": False, "draining": False}, "open")


@queue.command()
@_named
def drain(session: Session, name: str) -> None:
    """Take no new submissions for a queue and its children; what they have is worked off."""
    _existing(session, name)
    _set(session, name, {"draining": True}, "draining")


@queue.command()
@table_options
def ls(session: Session) -> None:
    """List the queues by their whole names, with what their jobs inherit."""
    session.rows(session.client().queues(), _COLUMNS, "no queues")


def _existing(session: Session, name: str) -> QueueRow:
    advice = f"make it with: gangq queue create {name}"
    return stored.existing(session.client().queues(name=name), "queue", name, advice)


def _set(session: Session, name: str, settings: dict[str, Any], what: str) -> None:
    session.client().set_queue(name=name, **settings)
    session.answer(_existing(session, name), f"queue {name}: {what}")


_LIMITS = columns(
    "name >used >most rate opens:1 set_by:1",
    {
        "opens": lambda k: when(k.opens_at),
        "set_by": lambda k: "an administrator" if k.pinned else k.login,
    },
)


@click.group(cls=Subgroup)
def limit() -> None:
    """See and set how many jobs of a limit key run at once.

    Or how many of them start in a period; whatever their queue. A key is made by the first job that names it:
    gangq submit --limit-key licence --limit 2.
    """


@limit.command(name="list")
@click.argument("name", required=False, shell_complete=stored.limits)
@table_options
def list_limits(session: Session, name: str | None) -> None:
    """List the limit keys: how many jobs of each run, and how many may."""
    found = session.client().limits(name=name)
    if not found:
        stored.must_exist(session.client(), key=name)
    session.rows(found, _LIMITS, "no limit keys")


@limit.command(name="set")
@click.argument("name", shell_complete=stored.limits)
@click.argument("most", type=int, required=False)
@click.option("--rate", metavar="N/PERIOD", help="So many start in a period: 10/1m; none: no limit.")
@common_options
def set_limit(session: Session, name: str, most: int | None, rate: str | None) -> None:
    """Change how many jobs of a key may be placed at once, its rate, or both; or make one. What runs goes on; with 0
    nothing more starts.
    """
    session.client().set_limit(key=name, most=most, rate=rate)
    (found,) = session.client().limits(name=name)
    limits = [f"{found.most} at once"] * (found.most is not None) + [f"rate {found.rate}"] * bool(found.rate)
    session.answer(found, f"limit key {name}: {', '.join(limits) or 'no limit'}, {found.used} placed now")

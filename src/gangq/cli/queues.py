"""gangq queue: make, list and change queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gangq.cli.output import Column, seconds
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, common_options, pass_session
from gangq.client.rows import QueueRow
from gangq.errors import InvalidInput, NotFound

F = TypeVar("F", bound=Callable[..., Any])

_COLUMNS = [
    Column("name", lambda q: q.name),
    Column("paused", lambda q: "paused" if q.paused else ""),
    Column("policy", lambda q: q.policy),
    Column("attempts", lambda q: q.max_attempts, right=True),
    Column("crashes", lambda q: q.max_crashes, right=True),
    Column("trips", lambda q: q.max_trips, right=True),
    Column("backoff", lambda q: f"{seconds(q.backoff_s)}..{seconds(q.backoff_max_s)}"),
    Column("budget", lambda q: seconds(q.budget_s) or "-"),
    Column("payload bytes", lambda q: q.max_payload_bytes, right=True),
    Column("keep done", lambda q: q.retention_done),
    Column("keep failed", lambda q: q.retention_failed),
]


def _settings(command: F) -> F:
    retention = click.Choice(["short", "long", "forever"])
    options = [
        click.option(
            "--policy", type=click.Choice(["largest_first", "fifo"]), help="Order of gangs of one priority."
        ),
        click.option("--max-attempts", type=int, help="Attempts a job may spend."),
        click.option("--max-crashes", type=int, help="Workers a job may lose."),
        click.option("--max-trips", type=int, help="Watchdog trips a job may cause."),
        click.option("--backoff", "backoff_s", type=Seconds(), help="First delay before a retry; doubles."),
        click.option("--backoff-max", "backoff_max_s", type=Seconds(), help="Longest such delay."),
        click.option("--budget", "budget_s", type=Seconds(), help="Wall-clock budget of an attempt."),
        click.option("--max-payload-bytes", type=int, help="Largest payload or result."),
        click.option("--retention-done", type=retention, help="How long done jobs are kept."),
        click.option(
            "--retention-failed", type=retention, help="How long failed and cancelled jobs are kept."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def queue() -> None:
    """Make, list, change, pause and resume queues."""


@queue.command()
@click.argument("name")
@_settings
@common_options
@pass_session
def create(session: Session, /, name: str, **settings: Any) -> None:
    """Make a queue. What is not given has the installation's default."""
    if session.client().queues(name=name):
        raise InvalidInput(f"queue {name!r} exists already; change it with: gangq queue set {name} ...")
    _set(session, name, settings, "made")


@queue.command(name="set")
@click.argument("name")
@_settings
@common_options
@pass_session
def set_(session: Session, /, name: str, **settings: Any) -> None:
    """Change what is given of a queue. Jobs already submitted keep what they inherited."""
    _existing(session, name)
    if all(value is None for value in settings.values()):
        raise click.UsageError("nothing to change: name at least one option, see gangq queue set --help")
    _set(session, name, settings, "changed")


@queue.command()
@click.argument("name")
@common_options
@pass_session
def pause(session: Session, name: str) -> None:
    """Start nothing new from a queue; what runs goes on."""
    _existing(session, name)
    _set(session, name, {"paused": True}, "paused")


@queue.command()
@click.argument("name")
@common_options
@pass_session
def resume(session: Session, name: str) -> None:
    """Open a paused queue."""
    _existing(session, name)
    _set(session, name, {"paused": False}, "open")


@queue.command()
@common_options
@pass_session
def ls(session: Session) -> None:
    """List the queues and what their jobs inherit."""
    session.rows(session.client().queues(), _COLUMNS, "no queues")


def _existing(session: Session, name: str) -> QueueRow:
    found = session.client().queues(name=name)
    if not found:
        known = ", ".join(q.name for q in session.client().queues()) or "none"
        raise NotFound(
            f"queue {name!r} does not exist (there is: {known}); make it with: gangq queue create {name}"
        )
    return found[0]


def _set(session: Session, name: str, settings: dict[str, Any], what: str) -> None:
    session.client().set_queue(name=name, **settings)
    session.answer(_existing(session, name), f"queue {name}: {what}")

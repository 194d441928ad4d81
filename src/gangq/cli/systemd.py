"""gangq systemd: put the units in place, show them, and what they call when a worker has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gangq import names, private
from gangq.cli.group import Subgroup
from gangq.cli.options import duration
from gangq.cli.output import say
from gangq.cli.session import Session, common_options, json_option
from gangq.errors import DatabaseUnreachable
from gangq.host import units
from gangq.proc import procfs
from gangq.worker.repeating import backoff

if TYPE_CHECKING:
    from gangq.client import Client

_RETRY_FIRST_S = 0.5
_RETRY_LAST_S = 10.0


@click.group(cls=Subgroup)
def systemd() -> None:
    """Run workers, the tick and the bouncer as systemd units."""


@systemd.command()
@click.option("--user", is_flag=True, help="For your own service manager, without root.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Put all of it there, and tell no service manager.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
def install(session: Session, user: bool, directory: Path | None, dry_run: bool) -> None:
    """Put the units in place: gangq-worker@, gangq-tick, gangq-notify@, gangq-bounce and its timer.

    They start the gangq that installs them. Repeating it brings them up to date; changes of your own belong in
    drop-ins (systemctl edit), and worker.env and dsn, once they are there, are yours. Nothing is enabled or started.
    With --json one object per file: {"file", "action"}; action is written, updated, unchanged or kept.
    """
    version = units.manager_version()
    places = units.Places.of(user=user, directory=directory)
    argv = units.program()
    steps = version is not None and version >= units.STEPS_SINCE
    for file in units.files(places, user=user, steps=steps, argv=argv):
        placed = units.place(file, dry_run=dry_run)
        session.answer(placed, f"{'would be ' if dry_run else ''}{placed.action}  {placed.file}")
    if dry_run or directory is not None:
        return
    reach = None if user else units.out_of_reach(argv)
    if reach is not None:
        say(reach)
    told = units.reload(user=user)
    systemctl = f"systemctl{' --user' if user else ''}"
    if not told.ok:
        say(f"{told.why}; when the service manager runs: {systemctl} daemon-reload")
    say(
        f"next: fill in {places.address} and {places.environment}, then "
        f"{systemctl} enable --now gangq-worker@0 gangq-bounce.timer"
        + (" (loginctl enable-linger keeps them running when you log out)" if user else "")
    )


@systemd.command()
@click.argument("name", required=False)
@click.option("--user", is_flag=True, help="As it is for your own service manager.")
@json_option
def show(session: Session, name: str | None, user: bool) -> None:
    """Print the units, or the one called NAME, as install would write them.

    With --json one object per file: {"name", "text"}.
    """
    argv = units.program()
    names = (name,) if name else units.SHIPPED
    for each in names:
        text = units.as_installed(each, user=user, argv=argv)
        heading = "" if name else f"# ---- {each}\n"
        session.answer({"name": each, "text": text}, heading + text)


@systemd.command("report-death")
@click.option("--name", required=True, help="The worker's name.")
@click.option("--wait", is_flag=True, help="Until the database answers; else it is tried once.")
@duration("--within", procfs.LET_END_S, "How long the rest of its processes may take to end.")
@common_options
def report_death(session: Session, name: str, wait: bool, within_s: float) -> None:
    """Report a worker of this host dead, if nothing of it lives.

    What it ran need not wait for the end of its lease then. The units call it before each start and after each
    end. It kills nothing: of a worker that lives, it says so and reports nothing. With --json one object per
    incarnation: {"worker", "incarnation", "dead", "jobs", "detail"}.
    """
    # It has the worker's user, as jobs beside it have, and may wait for long.
    private.close()
    # Not at the top: install and show need no database.
    from gangq.host.deaths import prove_and_report

    names.check("--name", name, "name the worker as it registered")
    client = _patiently(session) if wait else session.client()
    for found in prove_and_report(client, name, within_s=within_s, evidence=_unit_evidence()):
        session.answer(found, f"gangq: {found.detail}")


def _patiently(session: Session) -> Client:
    """The client, once the database is there. Another schema is no reason to wait: the worker will say so."""
    client = session.client(checked=False)
    for wait_s in backoff(_RETRY_FIRST_S, _RETRY_LAST_S):
        try:
            session.check_schema(client)
            break
        except DatabaseUnreachable as problem:
            say(f"{problem}; trying again in {wait_s:.1f} s")
        time.sleep(wait_s)
    return client


def _unit_evidence() -> dict[str, str]:
    """What the service manager says of the end, when it is the one that calls."""
    said = {
        "result": "SERVICE_RESULT",
        "exit": "EXIT_CODE",
        "status": "EXIT_STATUS",
        "invocation": "INVOCATION_ID",
    }
    found = {key: os.environ[name] for key, name in said.items() if os.environ.get(name)}
    return {"by": "its service manager" if "invocation" in found else "gangq systemd report-death", **found}

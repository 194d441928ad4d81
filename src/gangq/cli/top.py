"""gangq top."""

from __future__ import annotations

import sys

import click

from gangq.cli.options import LEAST_S, duration
from gangq.cli.session import Session, common_options, require_extra


@click.command()
@duration("--every", "2s", "How often to look.")
@common_options
def top(session: Session, every_s: float) -> None:
    """Watch the fleet: work, what waits, queues, workers, devices, trips, services.

    Needs the extra: pip install 'gangq[top]'. Keys stand at the bottom of the screen; 1 to 7 choose the tab.
    """
    if every_s < LEAST_S:
        raise click.UsageError(f"--every: {LEAST_S:g}s or more; each look asks the database")
    if session.json:
        raise click.UsageError("--json: what top shows, `gangq ls`, `workers` and `devices` answer in JSON")
    require_extra("top", "textual")
    # Says at once where the schema does not fit: what draws the screen takes longer to load than all else.
    session.client()
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("top needs a terminal: gangq ls, workers and devices answer to a pipe")
    from gangq.top.app import Top

    Top(session.dsn(), every_s=every_s).run()

"""gangq usage: GPU hours, and what of them was wasted or displaced."""

from __future__ import annotations

from datetime import timedelta

import click

from gangq.cli.listing import table_options
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session
from gangq.cli.tables import Cell, columns

_GROUPS = {"user": "submitter", "queue": "queue", "task": "task", "service": "service"}
_HOURS = "attempts:1 >GPU_hours >wasted >displaced"


@click.command()
@click.option(
    "--by",
    default="user",
    show_default=True,
    metavar="LIST",
    help="Some of user, queue, task and service: user,queue.",
)
@click.option(
    "--since", "since_s", type=Seconds(), default="30d", show_default=True, help="How far to look back."
)
@table_options
def usage(session: Session, by: str, since_s: float) -> None:
    """Show GPU hours: used, wasted, displaced; most first.

    From a claim to the proven end of its work, also of what runs now. Wasted are attempts that failed, tripped or
    lost their worker, with the members that stopped with them; displaced those that made way for others, were moved
    off a host, or were handed back by a worker that stopped. Attempts are kept for 30 days (retention_long). With
    --json the columns of the function gangq.usage.
    """
    groups = [group.strip() for group in by.split(",")]
    unknown = [group for group in groups if group not in _GROUPS]
    if unknown:
        raise click.UsageError(f"--by takes {', '.join(_GROUPS)}, not {unknown[0]!r}")
    rows = session.client().usage(
        since=timedelta(seconds=since_s), by=[_GROUPS[group] for group in dict.fromkeys(groups)]
    )
    cells: dict[str, Cell] = {
        "GPU_hours": lambda row: f"{row.gpu_hours:.2f}",
        "wasted": lambda row: _share(row.wasted_hours, row.gpu_hours),
        "displaced": lambda row: _share(row.displaced_hours, row.gpu_hours),
    }
    names = [f"{group}={_GROUPS[group]}" for group in dict.fromkeys(groups)]
    session.rows(rows, columns(" ".join([*names, _HOURS]), cells), "no attempt held a GPU in that time")


def _share(hours: float, of: float) -> str:
    return f"{hours:.2f} ({hours / of:.0%})" if hours and of else "0"

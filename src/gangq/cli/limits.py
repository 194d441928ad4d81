"""gangq limit: keys of which only so many jobs are placed at once, or started in a period."""

from __future__ import annotations

import click

from gangq.cli import names, stored
from gangq.cli.group import Subgroup
from gangq.cli.listing import table_options
from gangq.cli.output import when
from gangq.cli.session import Session, common_options
from gangq.cli.tables import columns

_COLUMNS = columns(
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
def list_(session: Session, name: str | None) -> None:
    """List the limit keys: how many jobs of each run, and how many may."""
    found = session.client().limits(name=name)
    if not found:
        names.must_exist(session.client(), key=name)
    session.rows(found, _COLUMNS, "no limit keys")


@limit.command(name="set")
@click.argument("name", shell_complete=stored.limits)
@click.argument("most", type=int, required=False)
@click.option("--rate", metavar="N/PERIOD", help="So many start in a period: 10/1m; none: no limit.")
@common_options
def set_(session: Session, name: str, most: int | None, rate: str | None) -> None:
    """Change how many jobs of a key may be placed at once, its rate, or both; or make one. What runs goes on; with 0
    nothing more starts.
    """
    session.client().set_limit(key=name, most=most, rate=rate)
    (found,) = session.client().limits(name=name)
    limits = [f"{found.most} at once"] * (found.most is not None) + [f"rate {found.rate}"] * bool(found.rate)
    session.answer(found, f"limit key {name}: {', '.join(limits) or 'no limit'}, {found.used} placed now")

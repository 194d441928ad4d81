"""gangq top."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gangq.cli.listing import LEAST_S
from gangq.cli.parsing import Seconds
from gangq.cli.session import Session, common_options


@click.command()
@click.option(
    "--every", "every_s", type=Seconds(), default="2s", show_default=True, help="How often to look."
)
@common_options
def top(session: Session, every_s: float) -> None:
    """Watch the fleet: work, what waits, queues, workers, devices, trips, services.

    Needs the extra: pip install 'gangq[top]'. Keys stand at the bottom of the screen; 1 to 7 choose the tab.
    """
    try:
        from gangq.top.app import Top, answer_of
    except ModuleNotFoundError as missing:
        raise click.ClickException(f"{missing}: pip install 'gangq[top]'") from None
    if every_s < LEAST_S:
        raise click.UsageError(f"--every: {LEAST_S:g}s or more; each look asks the database")
    if session.json:
        raise click.UsageError("--json: what top shows, `gangq ls`, `workers` and `devices` answer in JSON")
    dsn = session.dsn()

    def command(words: Sequence[str]) -> None:
        from gangq.cli import main

        main.main(list(words), prog_name="gangq", standalone_mode=False, obj=Session(flag_dsn=dsn))

    Top(session.client(), answer_of(command), every_s=every_s).run()

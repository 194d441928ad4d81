"""gangq bounce: restart the workers of this host that are flagged dead."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import click

from gangq import names, private
from gangq.cli import output, stored
from gangq.cli.loops import Interrupts, until_interrupted
from gangq.cli.options import duration
from gangq.cli.output import say
from gangq.cli.session import Session, common_options
from gangq.errors import GangqError
from gangq.host import seen
from gangq.host.backends import Backend
from gangq.host.bouncer import Action, Bouncer
from gangq.host.choice import WorkerMap, choose

_VERIFY_EVERY_S = 1.0
_OUTAGE_S = 60.0
"""How much longer than its verification --once lasts when the database is away."""


@click.command()
@click.option("--once", is_flag=True, help="Look once, act, see it through, and end: for cron.")
@click.option("--loop", is_flag=True, help="Go on until SIGTERM or Ctrl-C.")
@click.option(
    "--host", shell_complete=stored.hosts, help="Whose workers, as they registered [this host's name]."
)
@click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="NAME=HOW",
    help="How workers called NAME (* and ? fit any) are restarted: unit:UNIT, user-unit:UNIT, docker:CONTAINER or "
    "command:PROGRAM ARG..., where {worker} is the name of a worker seen here; may be repeated [the unit that they "
    "registered].",
)
@click.option(
    "--trust",
    multiple=True,
    metavar="PATTERN",
    help="Units that may be restarted because a worker says it is one; may be repeated [gangq-*].",
)
@click.option("--report-only", is_flag=True, help="Say what would be done, and do nothing.")
@duration("--kill-after", "15s", "What a worker gets to stop by itself before SIGKILL.")
@duration("--verify", "2m", "How long its successor may take to its first heartbeat.")
@duration("--every", "5s", "How often --loop looks.")
@common_options
def bounce(
    session: Session,
    once: bool,
    loop: bool,
    host: str | None,
    maps: tuple[str, ...],
    trust: tuple[str, ...],
    every_s: float,
    **how: Any,
) -> None:
    """Restart the workers of this host that are flagged dead.

    A worker is flagged when it has been silent for half a minute while it holds jobs. What is gone already is
    reported dead, so that its jobs run elsewhere at once; what is not is restarted: as its systemd unit, or as
    --map says. Not more often than the installation allows, and not when more than a fifth of the fleet is
    flagged: then the fault is elsewhere.

    One line per action, nothing when there is nothing to do; with --json one object per action: {"worker",
    "incarnation", "action", "ok", "text"}. With --once the exit code is 0 when all went well, 1 when somebody
    has to look, 3 when the database cannot be reached. With --loop the database may go and come.
    """
    if once == loop:
        raise click.UsageError("say --once (for cron) or --loop, one of them")
    if min(how["kill_after_s"], how["verify_s"]) < 0 or every_s <= 0:
        raise click.UsageError("--kill-after and --verify are 0 or more, --every is more than 0 seconds")
    private.close()
    mapped = tuple(WorkerMap.parse(each) for each in maps)

    def chosen(worker: str, identity: Mapping[str, Any]) -> Backend:
        return choose(worker, identity, see=seen.lineage, maps=mapped, trusted=trust or ("gangq-*",))

    def tell(action: Action) -> None:
        output.write(output.to_json(action) if session.json else f"gangq: {action.text}")

    # A loop may be started before its database.
    client = session.client(checked=once)
    bouncer = Bouncer(
        client,
        host=names.check("--host", host, "name the host as its workers do") if host else names.host_name(),
        choose=chosen,
        say=tell,
        **how,
    )
    with Interrupts() as interrupts:
        if loop:

            def look(_: bool) -> float:
                # What has been restarted comes first: its outcome must not wait for the next restart.
                bouncer.verify()
                bouncer.round()
                wait_s = min(every_s, _VERIFY_EVERY_S) if bouncer.waiting else every_s
                return wait_s * random.uniform(0.9, 1.1)

            # No error ends it, also one that will not go by itself, such as a schema that is being migrated: a host
            # without its bouncer would go unnoticed, the line about the error does not.
            until_interrupted(client, interrupts, look, check=session.check_schema, final=lambda _: False)
            return
        _once(bouncer, interrupts, how["verify_s"] + _OUTAGE_S)
    if not bouncer.ok:
        click.get_current_context().exit(1)


def _once(bouncer: Bouncer, interrupts: Interrupts, patience_s: float) -> None:
    """One look; then until it is known what became of each restart, if the database is there to say so."""
    not_seen: GangqError | None = None
    try:
        bouncer.round()
    except GangqError as problem:
        not_seen = problem
    until = time.monotonic() + patience_s
    while bouncer.waiting and not interrupts.count:
        try:
            bouncer.verify()
        except GangqError as problem:
            if time.monotonic() > until:
                raise
            say(f"{problem}; trying again")
        if bouncer.waiting:
            interrupts.wait(_VERIFY_EVERY_S)
    if not_seen is not None:
        raise not_seen

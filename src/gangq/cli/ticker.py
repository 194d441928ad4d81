"""gangq tick: the maintenance that workers do anyway, from cron or as a process of its own."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING

import click

from gangq import private
from gangq.cli.loops import Interrupts, until_interrupted
from gangq.cli.session import Session, common_options
from gangq.client.rows import TickReport
from gangq.errors import Busy

if TYPE_CHECKING:
    from gangq.client import Client

_MOST_ROUNDS = 50
_GIVE_UP_S = 10.0


@click.command()
@click.option("--loop", is_flag=True, help="Go on until SIGTERM or Ctrl-C, woken by the database.")
@click.option("--force", is_flag=True, help="Even if one has just run.")
@common_options
def tick(session: Session, loop: bool, force: bool) -> None:
    """Run all maintenance once, or in a loop.

    Stale reservations, ended leases, drains, due jobs and schedules; then what starts where. Workers do this by
    themselves; for cron, or with --loop as a dedicated process. One runs at a time. With --json one object per tick:
    {"ran", "again", "next_in_s", "detail", "next_turn", "decide", "unplanned"}.
    """
    private.close()
    client = session.client()
    if loop:
        with Interrupts() as interrupts, contextlib.suppress(KeyboardInterrupt):
            look = _Loop(session, client, force).tick
            until_interrupted(client, interrupts, look, channel="gangq_tick")
        return
    report = _in_turn(client, force)
    for _ in range(_MOST_ROUNDS):
        if not (report.ran and report.again):
            break
        # What another session holds locked is left for the next run; a full batch is followed up at once.
        time.sleep(report.next_in_s or 0)
        report = _in_turn(client, True)
    session.answer(report, _described(report))


def _in_turn(client: Client, force: bool) -> TickReport:
    """A tick that begins from now on, by this call or by another session."""
    report = client.tick(force=force)
    give_up = time.monotonic() + _GIVE_UP_S
    while report.next_turn is not None:
        if time.monotonic() > give_up:
            raise Busy(
                f"another tick has been running for {_GIVE_UP_S:g} s: gangq doctor says which session holds it"
            )
        time.sleep(report.next_in_s or 0)
        report = client.tick(force=force, turn=report.next_turn)
    return report


def _described(report: TickReport) -> str:
    if not report.ran:
        return "not needed: another tick has just run, or runs"
    done = {key: value for key, value in (report.detail or {}).items() if value}
    return "ran: " + (
        ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in done.items()) or "nothing to do"
    )


class _Loop:
    """Ticks when asked by NOTIFY, and when the last tick said to."""

    def __init__(self, session: Session, client: Client, force: bool) -> None:
        self._session = session
        self._client = client
        self._asked = force
        self._turn: int | None = None
        self._forced = False

    def tick(self, notified: bool) -> float:
        """One tick; in how many seconds the next one is due."""
        asked = self._asked or notified
        force = asked or self._forced
        report = self._client.tick(force=force, turn=None if asked else self._turn)
        self._turn, self._forced = report.next_turn, force and report.next_turn is not None
        if report.ran and (self._session.json or any((report.detail or {}).values())):
            self._session.answer(report, _described(report))
        self._asked = report.ran and report.again
        if self._asked:
            return report.next_in_s or 0
        wait = max(0.01, report.next_in_s or 1.0)
        # The session that ran the tick knows what is due, and comes in time for it; the others must not ask in step.
        return wait if report.ran else wait * random.uniform(0.9, 1.1)

"""gangq tick: the maintenance that workers do anyway, from cron or as a process of its own."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import click

from gangq import private
from gangq.cli import output
from gangq.cli.interrupts import Interrupts
from gangq.cli.listening import Listener
from gangq.cli.session import Session, common_options, say
from gangq.client.rows import TickReport
from gangq.errors import Busy, GangqError
from gangq.worker.repeating import backoff

if TYPE_CHECKING:
    from gangq.client import Client

_RETRY_FIRST_S = 0.2
_RETRY_LAST_S = 10.0
_MOST_ROUNDS = 50
_GIVE_UP_S = 10.0
_PACE_S = 0.05


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
        with Interrupts() as interrupts:
            _Loop(session, client, interrupts).run(force)
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
    """Ticks when asked by NOTIFY, and when the last tick said to; a lost connection is made again."""

    def __init__(self, session: Session, client: Client, interrupts: Interrupts) -> None:
        self._session = session
        self._client = client
        self._interrupts = interrupts
        self._listener = Listener(client, "gangq_tick")
        self._retries = backoff(_RETRY_FIRST_S, _RETRY_LAST_S)
        self._turn: int | None = None
        self._forced = False
        self._paced_at = 0.0

    def run(self, asked: bool) -> None:
        """Until a signal comes."""
        try:
            while not self._interrupts.count:
                asked = self._round(asked)
        except KeyboardInterrupt:
            return
        finally:
            self._listener.close()

    def _round(self, asked: bool) -> bool:
        """One tick and the wait for the next; whether a notification ended it."""
        try:
            self._listener.listen()
            # Any login may notify: a flood of notifications is no reason to do nothing but tick.
            self._interrupts.wait(max(0.0, self._paced_at - time.monotonic()))
            self._paced_at = time.monotonic() + _PACE_S
            turn = None if asked else self._turn
            force = asked or self._forced
            report = self._client.tick(force=force, turn=turn)
            self._turn, self._forced = report.next_turn, force and report.next_turn is not None
            self._say(report)
            self._retries = backoff(_RETRY_FIRST_S, _RETRY_LAST_S)
            if report.ran and report.again:
                self._listener.wait(self._interrupts, report.next_in_s or 0)
                return True
            wait = max(0.01, report.next_in_s or 1.0)
            # Who ran knows what is due, and comes in time for it; the others must not ask in step.
            wait = wait if report.ran else wait * random.uniform(0.9, 1.1)
            return self._listener.wait(self._interrupts, wait)
        except GangqError as problem:
            if not problem.retryable:
                raise
            wait = next(self._retries)
            say(f"{problem}; trying again in {wait:.1f} s")
            self._listener.close()
            self._interrupts.wait(wait)
            return False

    def _say(self, report: TickReport) -> None:
        busy = report.ran and any((report.detail or {}).values())
        if self._session.json:
            if report.ran:
                output.write(output.to_json(report))
        elif busy:
            output.write(_described(report))

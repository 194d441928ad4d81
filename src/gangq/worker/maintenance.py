"""Offering to run the tick and the decision.

There is no one scheduler: every worker offers, and the database lets one at a time do the work, one bounded call
after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time

from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.repeating import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.maintenance")


PACE_S = 0.05
"""A worker ticks no more often than this, however many notifications arrive: any login may send them."""
_BUSY_MOST_S = 0.5


class Maintenance:
    """Runs the tick when notified, and on a jittered interval behind that. A task of the control loop."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked = asyncio.Event()
        self._turn: int | None = None
        self._forced = False
        self._busy = backoff(PACE_S, _BUSY_MOST_S)

    def ask(self) -> None:
        """Something happened that a tick should look at. For the control loop."""
        self._asked.set()

    async def run(self) -> None:
        """Tick until cancelled."""
        pauses = backoff()
        wait = random.uniform(0.0, 0.1)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), wait)
            signs.alive()
            began_at = time.monotonic()
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                wait = await self._tick(asked)
                pauses = backoff()
            except TRANSIENT as problem:
                wait = next(pauses)
                log.info("tick_failed", extra={"error": str(problem)})
            except GangqError as problem:
                wait = 10 * self._session.terms.tick_s
                log.error("tick_refused", extra={"error": str(problem)})
            except Exception:
                wait = next(pauses)
                log.exception("tick_fault")
            await asyncio.sleep(began_at + PACE_S - time.monotonic())

    async def _tick(self, asked: bool) -> float:
        """One call; returns how long to wait for the next."""
        # The run that was waited for may have begun before what is asked now: then another one has to. Kept before
        # the call: if that fails, the next one asks for the same.
        self._turn = None if asked else self._turn
        self._forced = asked or self._forced
        row = await self._session.control.client.tick(force=self._forced, turn=self._turn)
        # A step that has done a full batch (again, at once) goes on; what is busy is no reason for a whole tick.
        more = row.ran and row.again and not row.next_in_s
        self._turn, self._forced = row.next_turn, more or (self._forced and row.next_turn is not None)
        if self._turn is not None:
            return next(self._busy)
        self._busy = backoff(PACE_S, _BUSY_MOST_S)
        if row.ran and row.detail:
            log.debug("tick", extra={"detail": row.detail})
        if row.ran and row.again:
            return row.next_in_s or 0.0
        tick_s = self._session.terms.tick_s
        wait = tick_s if row.next_in_s is None else min(tick_s, max(row.next_in_s, 0.01))
        # The worker that ran the tick knows what is due and comes in time for it. The others must not ask in step.
        return wait if row.ran else wait * random.uniform(0.8, 1.2)

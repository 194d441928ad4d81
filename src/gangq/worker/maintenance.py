"""Offering to run the tick.

Nobody is *the* scheduler: every worker has this thread, and the database lets one at a time do the work. It
runs beside handlers, on the connection that claims and heartbeats use too, for one bounded call at a time.
"""

from __future__ import annotations

import logging
import random
import threading
import time

from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.retry import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.maintenance")


PACE_S = 0.05
"""A worker ticks no more often than this, however many notifications arrive: any login may send them."""
_BUSY_MOST_S = 0.5


class Maintenance:
    """Runs the tick when notified, and on a jittered interval behind that."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked = threading.Event()
        self._stop = threading.Event()
        self._turn: int | None = None
        self._forced = False
        self._busy = backoff(PACE_S, _BUSY_MOST_S)
        self._thread = threading.Thread(target=self._run, name="gangq-tick", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self) -> None:
        """Something happened that a tick should look at."""
        self._asked.set()

    def stop(self) -> None:
        """No more ticks. The thread ends when the call it is in does."""
        self._stop.set()
        self._asked.set()

    def _run(self) -> None:
        waits = backoff()
        wait = random.uniform(0.0, 0.1)
        paced_at = 0.0
        while not self._stop.is_set():
            self._asked.wait(wait)
            signs.alive()
            if self._stop.wait(max(0.0, paced_at - time.monotonic())):
                return
            paced_at = time.monotonic() + PACE_S
            asked = self._asked.is_set()
            self._asked.clear()
            try:
                wait = self._tick(asked)
                waits = backoff()
            except TRANSIENT as problem:
                wait = next(waits)
                log.info("tick_failed", extra={"error": str(problem)})
            except GangqError as problem:
                wait = 10 * self._session.terms.tick_s
                log.error("tick_refused", extra={"error": str(problem)})
            except Exception:
                wait = next(waits)
                log.exception("tick_fault")

    def _tick(self, asked: bool) -> float:
        """One call; returns how long to wait for the next."""
        # The run that was waited for may have begun before what is asked now: then another one has to.
        turn = None if asked else self._turn
        force = asked or self._forced
        row = self._session.client.tick(force=force, turn=turn)
        self._turn, self._forced = row.next_turn, force and row.next_turn is not None
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

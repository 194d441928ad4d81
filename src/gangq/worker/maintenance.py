"""Offering to run the tick.

Nobody is *the* scheduler: every worker has this thread, and the database lets one at a time do the work. It
runs beside handlers, on the connection that claims and heartbeats use too, for one bounded call at a time.
"""

from __future__ import annotations

import logging
import random
import threading

from gangq.errors import GangqError
from gangq.worker.retry import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.maintenance")


class Maintenance:
    """Runs the tick when notified, and on a jittered interval behind that."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._asked = threading.Event()
        self._stop = threading.Event()
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
        while not self._stop.is_set():
            asked = self._asked.wait(wait)
            self._asked.clear()
            if self._stop.is_set():
                return
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
        row = self._session.client.tick(force=asked)
        if row.ran and row.detail:
            log.debug("tick", extra={"detail": row.detail})
        if row.ran and row.again:
            return row.next_in_s or 0.0
        tick_s = self._session.terms.tick_s
        wait = tick_s if row.next_in_s is None else min(tick_s, max(row.next_in_s, 0.01))
        # Who ran knows what is due, and comes in time for it; the others must not ask in step.
        return wait if row.ran else wait * random.uniform(0.8, 1.2)

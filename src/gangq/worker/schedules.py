"""Storing the schedules and services that the App declares, when the worker has started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from gangq.app import App
from gangq.declarations import Declared, store
from gangq.errors import GangqError, NotAllowed
from gangq.worker.repeating import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.schedules")

_LONGEST_SOURCE = 200
_ENDS = {"schedule": "gangq schedule rm NAME", "service": "gangq service delete NAME"}


class ScheduleStore:
    """Stores them once in the life of a process. A task of the control loop.

    Not at each registration: a worker that comes back from an outage would put what older code declares in place of
    what newer code does.
    """

    def __init__(self, app: App | None, source: str) -> None:
        """``source``: what is stored with them, of where they are declared."""
        self._app = app
        self._source = source[-_LONGEST_SOURCE:]

    async def run(self, session: Session) -> None:
        """Store them, and return; try again where the database is not there."""
        app = self._app
        if app is None:
            return
        await self._store(session, "schedule", app.schedules)
        await self._store(session, "service", app.services)
        self._app = None

    async def _store(self, session: Session, what: str, declared: Mapping[str, Declared]) -> None:
        pauses = backoff(0.1, 5.0)
        while True:
            try:
                refused, undeclared = await session.control.client.execute(
                    store(what, declared.values(), self._source)
                )
                break
            except TRANSIENT as problem:
                log.info(f"{what}s_wait", extra={"error": str(problem)})
                await asyncio.sleep(next(pauses))
            except NotAllowed as problem:
                log.warning(
                    f"{what}s_not_stored",
                    extra={
                        f"{what}s": sorted(declared),
                        "error": str(problem),
                        "advice": f"or store them from another login: App.store_{what}s",
                    },
                )
                return
            except GangqError as problem:
                log.error(f"{what}s_not_stored", extra={"error": str(problem)})
                return
        if declared:
            log.info(f"{what}s_stored", extra={f"{what}s": sorted(set(declared) - refused.keys())})
        for name, refusal in refused.items():
            log.warning(f"{what}_refused", extra={what: name, "error": str(refusal)})
        if undeclared:
            advice = f"they go on: {_ENDS[what]} ends one"
            log.warning(
                f"{what}s_undeclared",
                extra={f"{what}s": undeclared, "source": self._source, "advice": advice},
            )

"""Storing the schedules that the App declares, when the worker has started."""

from __future__ import annotations

import asyncio
import logging

from gangq.app import App
from gangq.errors import GangqError, NotAllowed
from gangq.schedules import store
from gangq.worker.child_main import app_target
from gangq.worker.retry import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.schedules")

_LONGEST_SOURCE = 200


class ScheduleStore:
    """Stores them once in the life of a process. A task of the control loop.

    Not at each registration: a worker that comes back from an outage would put older code's schedules in place of
    newer ones.
    """

    def __init__(self, app: App | None, target: str | None, worker: str) -> None:
        """``target`` (``module:app``) is where the App is found; without one it is searched for."""
        self._app = app
        self._source = (target or _found(app) or worker)[-_LONGEST_SOURCE:]

    async def run(self, session: Session) -> None:
        """Store them, and return; try again where the database is not there."""
        app = self._app
        if app is None:
            return
        waits = backoff(0.1, 5.0)
        while True:
            try:
                refused, undeclared = await session.control.client.execute(
                    store(app.schedules.values(), self._source)
                )
            except TRANSIENT as problem:
                log.info("schedules_wait", extra={"error": str(problem)})
                await asyncio.sleep(next(waits))
                continue
            except NotAllowed as problem:
                log.warning(
                    "schedules_not_stored",
                    extra={
                        "schedules": sorted(app.schedules),
                        "error": str(problem),
                        "advice": "or store them from another login: App.store_schedules",
                    },
                )
                break
            except GangqError as problem:
                log.error("schedules_not_stored", extra={"error": str(problem)})
                break
            if app.schedules:
                log.info(
                    "schedules_stored", extra={"schedules": sorted(app.schedules.keys() - refused.keys())}
                )
            for name, refusal in refused.items():
                log.warning("schedule_refused", extra={"schedule": name, "error": str(refusal)})
            if undeclared:
                log.warning(
                    "schedules_undeclared",
                    extra={
                        "schedules": undeclared,
                        "source": self._source,
                        "advice": "they go on: gangq schedule rm NAME ends one",
                    },
                )
            break
        self._app = None


def _found(app: App | None) -> str | None:
    try:
        return app_target(app)
    except GangqError:
        return None

"""Telling running members of a new epoch: another was replaced, or the gang goes on with fewer.

The heartbeat's answer names the epoch of every job. A newer one than the work was told of is looked up with
`barrier`, and handed on once it is whole; until then, every heartbeat asks again, and the database's notification
brings the next one forward.
"""

from __future__ import annotations

import asyncio
import logging

from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.barrier import gang_info, who_is_who
from gangq.worker.jobs import ActiveJob
from gangq.worker.ports import PortHolder
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.epochs")


class EpochWatch:
    """Keeps what running members know of their gang up to date. A task of the control loop."""

    def __init__(self, session: Session, ports: PortHolder) -> None:
        self._session = session
        self._ports = ports
        self._some = asyncio.Event()
        self._behind: dict[int, ActiveJob] = {}

    def note_epoch(self, job: ActiveJob, epoch: int | None) -> None:
        """A heartbeat said that this job's gang is in this epoch. For the control loop."""
        gang = job.gang
        if gang is None or epoch is None or epoch <= gang.epoch:
            return
        self._behind[job.token] = job
        self._some.set()

    async def run(self) -> None:
        """Look up each new epoch that a heartbeat named, until cancelled."""
        while True:
            await self._some.wait()
            signs.alive()
            self._some.clear()
            behind, self._behind = self._behind, {}
            for job in behind.values():
                if job.must_end or job.reporting:
                    continue
                try:
                    await self.look(job)
                except GangqError as problem:
                    # Lost, told to stop, or no answer: the next heartbeat knows which.
                    log.warning("epoch_unknown", extra={**job.extra, "error": str(problem)})
                except Exception:
                    log.exception("epoch_fault", extra=job.extra)

    async def look(self, job: ActiveJob) -> None:
        """Ask who is who, and tell the work if the new epoch is whole.

        Raises:
            GangqError: the claim is over, or there was no answer.
        """
        members = await self._session.control.client.execute(who_is_who(job, self._ports))
        known = job.gang
        if known is None or not members or not members[0].go or members[0].epoch <= known.epoch:
            return
        job.change_gang(gang_info(job, members))

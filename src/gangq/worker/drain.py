"""Stopping a worker: its jobs end or are handed back, and nothing that still runs is reported as ended."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from pathlib import Path

from gangq.errors import GangqError
from gangq.proc.clock import boottime
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.retry import TRANSIENT, backoff
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.drain")

_SLICE_S = 0.2
_ANNOUNCE_S = 2.0


class Drain:
    """Whether this worker is to stop. The first request drains it, the second skips every grace."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.requested = threading.Event()
        self.urgent = threading.Event()
        self.without_directory = False
        """It stops because its directory is gone: it ends with code 77."""

    def request(self) -> None:
        """Drain; a second call skips every grace. From any thread."""
        if self.requested.is_set():
            self.urgent.set()
        self.requested.set()

    def directory_gone(self, directory: Path) -> None:
        """Drain because the directory of sockets and logs was removed, so that no job can start here.

        Jobs that have not begun are handed back; the next process makes a new directory. A repeat changes nothing.
        """
        if self.without_directory:
            return
        self.without_directory = True
        log.critical(
            "directory_gone",
            extra={
                "directory": str(directory),
                "advice": "keep cleaners of temporary files away from it, or set XDG_RUNTIME_DIR",
            },
        )
        self.request()

    def impatient(self, session: Session) -> bool:
        """Whether to end even if some reports have no answer: asked twice, or asked once and the lease has ended."""
        return self.urgent.is_set() or (self.requested.is_set() and session.lapsed())

    async def run(self, session: Session, reporter: Reporter, waiting: deque[ActiveJob]) -> None:
        """Wait for the request, then bring every job of this session to its end, until cancelled.

        ``waiting`` are jobs claimed and not begun.
        """
        while not self.requested.is_set():
            await asyncio.sleep(_SLICE_S)
        log.info("draining", extra={"worker": session.name, "jobs": len(session.table)})
        session.wake()
        await self._announce(session)
        while waiting:
            try:
                job = waiting.pop()
            except IndexError:  # The main thread takes from the other end.
                break
            job.tell_stop("drain", 0.0)
            job.end_work()
            await session.control.in_thread(reporter.stopped, job)
        left = self._timeout_s
        while left > 0 and not self.urgent.is_set() and len(session.table):
            await asyncio.sleep(min(left, _SLICE_S))
            left -= _SLICE_S
        session.note("drained")
        while True:
            # Repeated, because a claim that was in flight when the drain began may have brought more jobs.
            session.table.each(lambda job: job.tell_stop("drain", session.terms.grace_s))
            if self.urgent.is_set():
                session.table.each(ActiveJob.hasten)
            await asyncio.sleep(_SLICE_S)

    async def _announce(self, session: Session) -> None:
        """Tell the database that this worker takes no more jobs; try for 2 s, the database may be away."""
        until = boottime() + _ANNOUNCE_S
        waits = backoff()
        while not session.ended.is_set() and not self.urgent.is_set():
            try:
                await session.control.client.retire_worker(incarnation=session.incarnation, final=False)
                return
            except TRANSIENT as problem:
                if boottime() > until:
                    log.warning("drain_not_reported", extra={"error": str(problem)})
                    return
                await asyncio.sleep(next(waits))
            except GangqError as problem:
                log.warning("drain_not_reported", extra={"error": str(problem)})
                return

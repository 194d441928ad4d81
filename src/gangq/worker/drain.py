"""Stopping a worker: its jobs end or are handed back, and nothing that still runs is reported as ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from pathlib import Path

from gangq.proc.clock import boottime
from gangq.worker.jobs import ActiveJob, StopReason
from gangq.worker.repeating import TRANSIENT, backoff
from gangq.worker.reporter import Reporter
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.drain")

_SLICE_S = 0.2
_ANNOUNCE_S = 2.0


class Drain:
    """Whether this worker is to stop. An operator's first request drains it, the second skips every grace."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: how long jobs that run may go on before they are told to stop."""
        self._timeout_s = timeout_s
        self._begun_at: float | None = None
        """Since when jobs are to end, in seconds of CLOCK_BOOTTIME. None: jobs that run may go on."""
        self._asked = False
        """Whether an operator has asked."""
        self.requested = threading.Event()
        """Set once this worker takes no more jobs."""
        self.urgent = threading.Event()
        self.without_directory = False
        """Its directory is gone: it ends with code 77."""

    def request(self) -> None:
        """An operator, or a signal, asks this worker to drain; a second call skips every grace. From any thread."""
        if self._asked:
            self.urgent.set()
        self._asked = True
        self.begin()

    def begin(self) -> None:
        """Drain because this worker cannot go on. A repeat changes nothing: it is no operator who is in a hurry.
        From any thread.
        """
        if self._begun_at is None:
            self._begun_at = boottime()
        self.requested.set()

    @property
    def reason(self) -> StopReason:
        """Why jobs are told to stop, begun or not."""
        return "directory" if self._begun_at is None else "drain"

    def directory_gone(self, directory: Path) -> None:
        """Drain because the directory of sockets and logs was removed, so that no job can start here.

        Jobs that have not begun are handed back, and replicas of services are told to stop. Others that run go on,
        however long, because they no longer need it. Then this process ends, and the next one makes a new directory.
        A repeat changes nothing.
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
        self.requested.set()

    def impatient(self, session: Session) -> bool:
        """Whether to end even if some reports have no answer: an operator is in a hurry, or the lease has ended."""
        return self.urgent.is_set() or (self.requested.is_set() and session.lapsed())

    async def run(self, session: Session, reporter: Reporter, waiting: deque[ActiveJob]) -> None:
        """Wait for the request, then bring every job of this session to its end, until cancelled.

        ``waiting`` are jobs claimed and not begun. Two tasks share this, because the database may hang for as long as
        an answer may take: one makes all calls, the other makes none and tells jobs to stop.
        """
        while not self.requested.is_set():
            await asyncio.sleep(_SLICE_S)
        log.info("draining", extra={"worker": session.name, "jobs": len(session.table)})
        session.wake()
        unbegun: deque[ActiveJob] = deque()
        with contextlib.suppress(IndexError):  # The main thread takes from the other end.
            while waiting:
                unbegun.append(waiting.pop())
        session.table.each(self._withdraw, unbegun)
        announced = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._call_database(session, reporter, unbegun, announced))
            tasks.create_task(self._stop_jobs(session, announced))

    def _withdraw(self, job: ActiveJob) -> None:
        job.tell_stop(self.reason, 0.0)
        job.begin_report()

    async def _stop_jobs(self, session: Session, announced: asyncio.Event) -> None:
        # A job handed back before the database knows of the drain could be placed on this worker again.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(announced.wait(), _SLICE_S)
        while True:
            # Repeated, because a claim that was in flight when the drain began may have brought more jobs.
            try:
                self._tell(session)
            except Exception:
                log.exception("drain_fault")
            await asyncio.sleep(_SLICE_S)

    def _tell(self, session: Session) -> None:
        """Tell each job to stop that has to by now."""
        if self.without_directory:
            session.table.each(lambda job: self._without_directory(job, session.terms.grace_s))
        if self._begun_at is None or not (
            self.urgent.is_set() or boottime() >= self._begun_at + self._timeout_s
        ):
            return
        session.table.each(lambda job: job.tell_stop(self.reason, session.terms.grace_s))
        if self.urgent.is_set():
            session.table.each(ActiveJob.hasten)
        session.note("drained")  # Last: a disk may hang.

    def _without_directory(self, job: ActiveJob, grace_s: float) -> None:
        if job.replica is not None:
            job.tell_stop(self.reason, grace_s)  # It would never end by itself.
        else:
            job.tell_stop(self.reason, 0.0, unless_begun=True)

    async def _call_database(
        self, session: Session, reporter: Reporter, unbegun: deque[ActiveJob], announced: asyncio.Event
    ) -> None:
        """Announce the drain, then hand back what has not begun."""
        await self._announce(session)
        announced.set()
        while unbegun:
            try:
                await session.control.in_thread(reporter.stopped, unbegun[0])
                unbegun.popleft()
            except Exception:
                log.exception("drain_fault")
                await asyncio.sleep(_SLICE_S)

    async def _announce(self, session: Session) -> None:
        """Tell the database that this worker takes no more jobs. While it is away, try again for 2 s."""
        until = boottime() + _ANNOUNCE_S
        pauses = backoff()
        while not session.ended.is_set() and not self.urgent.is_set():
            try:
                await session.control.client.retire_worker(incarnation=session.incarnation, final=False)
                return
            except Exception as problem:
                if not isinstance(problem, TRANSIENT) or boottime() > until:
                    log.warning("drain_not_reported", extra={"error": str(problem)})
                    return
                await asyncio.sleep(next(pauses))

"""Stopping as asked: finish or hand back, and free nothing that still runs."""

from __future__ import annotations

import logging
import threading
from collections import deque

from gangq.errors import GangqError
from gangq.proc.clock import boottime
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.retry import until_answered
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.drain")

_SLICE_S = 0.2
_ANNOUNCE_S = 2.0


class Drain:
    """A worker's wish to stop. The first request drains, the second skips every grace."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.requested = threading.Event()
        self.urgent = threading.Event()

    def request(self) -> None:
        """Ask for it, once politely, twice without patience."""
        if self.requested.is_set():
            self.urgent.set()
        self.requested.set()

    def impatient(self, session: Session) -> bool:
        """Whether to end even with things unsaid: asked twice, or asked once and nothing can be ours any
        more.
        """
        return self.urgent.is_set() or (self.requested.is_set() and session.lapsed())

    def run(self, session: Session, reporter: Reporter, waiting: deque[ActiveJob]) -> None:
        """Wait for the request, then bring every job of this session to its end; for a thread of its own.

        ``waiting`` are jobs claimed and not begun.
        """
        while not self.requested.wait(_SLICE_S):
            if session.closing.is_set():
                return
        log.info("draining", extra={"worker": session.name, "jobs": len(session.table)})
        session.wake()
        announce_until = boottime() + _ANNOUNCE_S
        try:
            until_answered(
                lambda: session.client.retire_worker(incarnation=session.incarnation, final=False),
                "retire_worker",
                lambda: session.ended.is_set() or self.urgent.is_set() or boottime() > announce_until,
                self.urgent,
            )
        except GangqError as problem:
            log.warning("drain_unannounced", extra={"error": str(problem)})
        while waiting:
            try:
                job = waiting.pop()
            except IndexError:
                break
            job.tell_stop("drain", 0.0)
            job.end_work()
            reporter.stopped(job)
        left = self._timeout_s
        while left > 0 and not self.urgent.is_set() and not session.closing.is_set():
            if session.table.wait_empty(min(left, _SLICE_S)):
                break
            left -= _SLICE_S
        session.note("drained")
        while not session.closing.is_set():
            # Again and again: a claim that was on its way when the drain began is told like the others.
            session.table.each(lambda job: job.tell_stop("drain", session.terms.grace_s))
            if self.urgent.is_set():
                session.table.each(ActiveJob.hasten)
            self.urgent.wait(_SLICE_S)
            session.closing.wait(0.02)

"""Keeping the lease, and acting on what the database answers.

Two tasks of the control loop. :class:`LeaseKeeper` sends heartbeats; such a call may hang as long as a cut
connection takes to be noticed. :func:`watch_lease` therefore makes no calls at all: it asks the work to stop when
the lease could end before it is renewed. What kills work that does not stop is neither of them but a timer of the
kernel (see :mod:`gangq.watchdogs.deadman` and the guardian), because both need the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import TYPE_CHECKING, Any

from gangq import logqueue
from gangq.errors import Busy, DatabaseUnreachable, GangqError, IncarnationEnded, NotFound
from gangq.proc.clock import boottime
from gangq.watchdogs import signs
from gangq.worker.jobs import ActiveJob
from gangq.worker.repeating import TRANSIENT, backoff
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.worker.claims import ClaimSource
    from gangq.worker.gangs import EpochWatch
    from gangq.worker.watching import Watching

log = logging.getLogger("gangq.worker.lease")

_WATCH_S = 0.25
_STRANGE_BEATS = 3
_PACE_S = 0.05


class LeaseKeeper:
    """Sends heartbeats: every ``heartbeat_s``, and at once when told that orders wait."""

    def __init__(
        self, session: Session, watching: Watching | None = None, epochs: EpochWatch | None = None
    ) -> None:
        """``watching``: its device readings are sent with heartbeats, and its limits are refreshed. ``epochs`` gets
        the epoch of every job.
        """
        self._session = session
        self._watching = watching
        self._epochs = epochs
        self._now = asyncio.Event()
        self._strange: dict[tuple[int, int], int] = {}
        self.sources: list[ClaimSource[Any]] = []
        """Those that claim for this session."""

    def beat_now(self) -> None:
        """Do not wait for the interval. From any thread."""
        self._session.control.soon(self._now.set)

    async def run(self) -> None:
        """Send heartbeats until the incarnation has ended or this is cancelled."""
        pauses = backoff()
        while not self._session.ended.is_set():
            signs.alive()
            self._now.clear()
            try:
                await self.beat()
            except TRANSIENT as problem:
                wait = next(pauses)
                log.warning(
                    "heartbeat_failed",
                    extra={"error": str(problem), "kill_in_s": round(self._session.kill_at - boottime(), 1)},
                )
            except (IncarnationEnded, NotFound) as problem:
                self._session.end(str(problem))
                return
            except Exception:
                # Not renewing is safe (the work stops itself); a keeper that ended unnoticed is not.
                wait = next(pauses)
                log.exception("heartbeat_fault")
            else:
                pauses = backoff()
                wait = self._session.terms.heartbeat_s * random.uniform(0.8, 1.0)
            # Any login may notify: orders that wait are fetched at once, but not all the time.
            await asyncio.sleep(_PACE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), wait - _PACE_S)

    async def beat(self) -> None:
        """Send one heartbeat and act on the answer. What else is to be told or asked follows.

        Raises:
            IncarnationEnded: nothing that runs here is ours any more.
            GangqError: no answer, and nothing has changed.
        """
        await self._renew()
        try:
            await self._hand_back_strange()
            if self._watching is not None:
                await self._watching.limits.exchange()
        except DatabaseUnreachable as problem:
            # The lease is renewed. Its next heartbeat must not wait for a second call that gets no answer.
            log.warning("calls_after_heartbeat_failed", extra={"error": str(problem)})

    async def _renew(self) -> None:
        jobs = [job for job in self._session.table.snapshot() if not job.reporting]
        beats = [job.take_beat() for job in jobs]
        sent_at = boottime()
        try:
            orders = await self._session.control.client.heartbeat(
                incarnation=self._session.incarnation,
                job_ids=[job.id for job in jobs],
                tokens=[job.token for job in jobs],
                beats=beats,
                readings=None if self._watching is None else self._watching.readings(),
                durable=False,
            )
        except GangqError:
            for job, beat in zip(jobs, beats, strict=True):
                job.put_beat_back(beat)
            raise
        self._session.renewed(sent_at)
        listed = {(job.id, job.token): job for job in jobs}
        strange: dict[tuple[int, int], int] = {}
        for order in orders:
            known = listed.get((order.job_id, order.token))
            if known is not None:
                with logqueue.lines_about(known):
                    self._obey(known, order.action, order.reason)
                if self._epochs is not None and order.action == "continue":
                    self._epochs.note_epoch(known, order.epoch)
            elif self._session.table.get(order.job_id, order.token) is None:
                strange[order.job_id, order.token] = self._strange.get((order.job_id, order.token), 0) + 1
        self._strange = {} if any(source.unlisted for source in self.sources) else strange

    def _obey(self, job: ActiveJob, action: str, reason: str | None) -> None:
        if action == "lost":
            job.lose(reason or "not this worker's claim any more")
        elif action == "preempt":
            job.tell_stop("preempt", self._session.terms.grace_s)
        elif action == "cancel":
            job.tell_stop("cancel", self._session.terms.grace_s)

    async def _hand_back_strange(self) -> None:
        """Release claims of this worker that are not in its table. If no claim is in flight, no thread works on them,
        and as long as the lease is renewed they would never be free. What cannot be released is tried again after the
        next heartbeat.
        """
        pairs = [pair for pair, beats in self._strange.items() if beats >= _STRANGE_BEATS]
        if not pairs:
            return
        log.error("unknown_claims", extra={"jobs": [job_id for job_id, _ in pairs]})
        for job_id, token in pairs:
            try:
                await self._session.control.client.release(
                    job_ids=[job_id], tokens=[token], reason="its worker knows nothing of this claim"
                )
            except Busy:
                continue  # An open transaction holds it.
            except DatabaseUnreachable:
                raise
            except GangqError as problem:
                log.warning("unknown_claim_not_released", extra={"job": job_id, "error": str(problem)})
                continue
            del self._strange[job_id, token]


async def watch_lease(session: Session) -> None:
    """Ask everything to stop one grace before it would be killed for want of a renewal. Runs until cancelled."""
    while True:
        signs.alive()
        left = session.kill_at - session.terms.grace_s - boottime()
        if left <= 0:
            try:
                tell_lapsing(session)
            except Exception:
                log.exception("lease_watch_fault")
        # In slices: the wait itself stands still while the host sleeps, the lease does not.
        await asyncio.sleep(min(max(left, _WATCH_S), 1.0))


def tell_lapsing(session: Session) -> None:
    """The lease may end before it is renewed."""
    grace_s = max(0.0, session.kill_at - boottime())
    session.table.each(lambda job: job.tell_stop("lease", grace_s))
    session.note("lapsed")  # Last: a disk may hang.

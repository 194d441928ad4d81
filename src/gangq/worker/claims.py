"""Claiming jobs: each claim once although answers get lost, and rarely while there are none.

What a :class:`ClaimSource` remembers from one call to the next:

- ``_request``: the id of a claim whose answer is outstanding; ``_most``: how many jobs it asks for. Until the answer
  comes the same request is repeated.
- ``_late``: the last call sent no claim, because the lease has to be renewed first.
- ``_asleep``: this worker is on the list of sleepers. A claim that finds nothing puts it there, a notification that
  work is kept for it takes it off. A job that was submitted just before has notified no sleeper, so the first wait on
  the list is short (:data:`PACE_S`).
- ``_empty_at``: when a claim last found nothing. Empty claims are kept :data:`PACE_S` apart, however many
  notifications arrive: any login may send them. Only one which says that work is kept for this worker is answered at
  once.
- ``_trusts_kept``: False since such a claim (``_at_once``) found nothing; then no other is answered at once until a
  claim finds something.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gangq.client.rows import Claim
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.errors import GangqError, IncarnationEnded, NotFound, WrongState
from gangq.worker.gangs import PortHolder
from gangq.worker.lease import LeaseKeeper
from gangq.worker.repeating import TRANSIENT, backoff
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Outcome
    from gangq.worker.control import Control
    from gangq.worker.jobs import ActiveJob
    from gangq.worker.options import Lane

log = logging.getLogger("gangq.worker.claims")

_POLL_S = 1.0
_PLACED_POLL_S = 5.0
"""For placed work alone. Its worker is notified by name in the transaction that opens a place or reserves seats, so
this is for a notification that was lost: a reconnected listener has every loop ask at once.
"""
PACE_S = 0.05
"""Empty claims come no closer together."""


class ThreadWakes:
    """Wakes a claim loop that is a thread: there may be something to claim, or there is work kept for this worker."""

    def __init__(self) -> None:
        self._some = threading.Event()
        self._kept = threading.Event()

    def set(self, kept: bool = False) -> None:
        """There may be something. From any thread, as :meth:`clear`."""
        if kept:
            self._kept.set()
        self._some.set()

    def clear(self) -> None:
        """Forget both."""
        self._kept.clear()
        self._some.clear()

    def wait(self, timeout_s: float) -> None:
        """Until there may be something."""
        self._some.wait(timeout_s)

    def wait_kept(self, timeout_s: float) -> bool:
        """Until there is work kept for this worker; False when the time is up first."""
        return timeout_s > 0 and self._kept.wait(timeout_s)


class TaskWakes:
    """Wakes a claim loop that is a task of the control loop: as :class:`ThreadWakes`, but its waits are awaited."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._some = asyncio.Event()
        self._kept = asyncio.Event()

    def set(self, kept: bool = False) -> None:
        """There may be something. From any thread."""
        if kept:
            self._control.soon(self._kept.set)
        self._control.soon(self._some.set)

    def clear(self) -> None:
        """Forget both."""
        self._kept.clear()
        self._some.clear()

    async def wait(self, timeout_s: float) -> None:
        """Until there may be something."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._some.wait(), timeout_s)

    async def wait_kept(self, timeout_s: float) -> bool:
        """Until there is work kept for this worker; False when the time is up first."""
        if timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._kept.wait(), timeout_s)
        return False


W = TypeVar("W", ThreadWakes, TaskWakes)


class ClaimSource(Generic[W]):
    """Claims the jobs of a lane, or of both, for one loop of a session; used by one thread at a time.

    A claim whose answer was lost on the wire may have happened. So its request id is repeated until an answer
    comes, and the database gives the same claims again.
    """

    def __init__(
        self,
        session: Session,
        keeper: LeaseKeeper,
        ports: PortHolder,
        wakes: W,
        gets_notifications: Callable[[], bool] = lambda: True,
        *,
        lane: Lane | None = None,
        light_slot_free: Callable[[], bool] = lambda: True,
    ) -> None:
        """``gets_notifications()``: whether a wake-up reaches this worker. ``light_slot_free()``: whether it has
        a free slot for a light job; only asked where the lane is not ``light``. If one of them is false, this worker
        must not be on the list of sleepers: it would take the wake-ups of other workers.
        """
        self._gets_notifications = gets_notifications
        self._light_slot_free = light_slot_free
        self.lane = lane
        self._session = session
        self._keeper = keeper
        self.unlisted = False
        """Whether jobs may have been claimed that are not in the job table yet. Meanwhile :class:`LeaseKeeper` hands
        back no claim that it does not find there.
        """
        keeper.sources.append(self)
        self.wakes: W = wakes
        session.on_wake(wakes.set)
        self._ports = ports
        self._request: uuid.UUID | None = None
        self._most = 1
        self._asleep = False
        self._late = False
        self._pauses = backoff()
        self._empty_at = -PACE_S
        self._at_once = False
        self._trusts_kept = True
        self.wait_s = 0.0
        """How long to wait for a wake-up before the next call, as the last one suggests."""

    def taking(self, most: int) -> Steps[list[Claim]]:
        """Claim up to ``most`` jobs; an empty list means: wait for :attr:`wakes`, ``wait_s`` at most, and ask again.

        The first empty answer puts this worker on the list of sleepers; a job submitted just before would
        have notified nobody, so the wait after that one is short. Wait :attr:`pace_s` before.
        """
        self._late = self._session.lapsing()
        if self._late:
            # After an outage a claim may succeed before the heartbeat that renews the lease. Such a job would have to
            # be handed back at once, and claimed again, until it has been stopped too often.
            self._keeper.beat_now()
            self.wait_s = next(self._pauses)
            return []
        try:
            rows = yield from self._ask(most)
        except TRANSIENT as problem:
            self.wait_s = next(self._pauses)
            log.warning("claim_failed", extra={"error": str(problem), "request": str(self._request)})
            return []
        except (IncarnationEnded, NotFound) as problem:
            # The incarnation has ended, or the lease is late after an outage. The next heartbeat finds out which.
            self.wait_s = next(self._pauses)
            self._keeper.beat_now()
            log.warning("claim_late", extra={"error": str(problem)})
            return []
        except GangqError as problem:
            # The same request would get the same answer. GQ004 from claim: a port that was offered is taken under
            # this host's name.
            self._request = None
            taken = isinstance(problem, WrongState)
            if taken:
                self._ports.renew()
            self.wait_s = 0.1 if taken else 5.0
            log.error("claim_refused", extra={"error": str(problem)})
            return []
        self._pauses = backoff()
        poll_s = _PLACED_POLL_S if self.lane == "placed" and self._gets_notifications() else _POLL_S
        self.wait_s = poll_s * random.uniform(0.5, 1.0)
        asleep = not rows and self._may_sleep()
        if asleep and not self._asleep:
            self.wait_s = PACE_S
        self._asleep = asleep
        if rows:
            self._trusts_kept = True
        else:
            self._empty_at = time.monotonic()
            self._trusts_kept = self._trusts_kept and not self._at_once
        return rows

    @property
    def pace_s(self) -> float:
        """How long to wait before the next claim after an empty one, unless work is kept for this worker; seconds."""
        return self._empty_at + PACE_S - time.monotonic()

    def begin_claim(self, kept: bool) -> None:
        """The loop has waited :attr:`pace_s`, or less because work is ``kept`` for this worker, and claims now.

        Wake-ups until here are for this claim, later ones for the next.
        """
        self._at_once = kept
        self.wakes.clear()

    def completing_and_claiming(
        self, finished: Sequence[ActiveJob], most: int
    ) -> Steps[tuple[Sequence[Outcome], Sequence[Claim]] | None]:
        """Report what is finished and claim up to ``most`` jobs in one call; one try.

        None: no answer, or a refusal. The caller then reports alone, and :meth:`taking` finds what may have been
        claimed. If nothing is claimed this worker is on the list of sleepers: call :meth:`taking` before the next
        wait, because a job that was submitted just before has notified no sleeper.
        """
        if self._request is not None or self._session.lapsing():
            return None
        request = self._request = uuid.uuid4()
        self._most = most
        self.unlisted = True
        try:
            answer = yield Verbs.complete_and_claim(
                incarnation=self._session.incarnation,
                job_ids=[one.id for one in finished],
                tokens=[one.token for one in finished],
                results=[one.result for one in finished],
                strict=False,
                request_id=request,
                max_jobs=most,
                quiet=True,
                **self._offer(self._may_sleep()),
            )
        except GangqError as problem:
            log.info("complete_and_claim_failed", extra={"error": str(problem), "request": str(request)})
            return None
        self._asleep = not answer.claims and self._may_sleep()
        self._close_request(answer.claims)
        return answer.outcomes, answer.claims

    def _offer(self, sleep: bool) -> dict[str, Any]:
        """What this worker has for the jobs it asks for. Only placed ones need a port or a model."""
        offer: dict[str, Any] = {"lane": self.lane, "sleep": sleep}
        if self.lane != "light":
            offer |= {"ports": self._ports.offer(), "model": self._session.model}
        return offer

    def _may_sleep(self) -> bool:
        if self.lane == "placed" or not self._gets_notifications():
            return False
        return self.lane == "light" or self._light_slot_free()

    @property
    def outstanding(self) -> bool:
        """Whether a claim was sent whose answer has not come: it may have taken jobs."""
        return self._request is not None

    @property
    def unsure(self) -> bool:
        """Whether an empty list of :meth:`taking` does not mean that there is no work: the answer is outstanding, or
        no claim was sent because the lease has to be renewed first.
        """
        return self.outstanding or self._late

    def wake(self, kept: bool = False) -> None:
        """There may be work. `kept`: for this worker, which is off the list of sleepers now."""
        if kept:
            self._asleep = False
        self.wakes.set(kept and self._trusts_kept)

    def _ask(self, most: int) -> Steps[list[Claim]]:
        if self._request is None:
            self._request, self._most = uuid.uuid4(), most
        self.unlisted = True
        rows: list[Claim] = yield Verbs.claim(
            incarnation=self._session.incarnation,
            request_id=self._request,
            max_jobs=self._most,
            **self._offer(self._may_sleep()),
        )
        self._close_request(rows)
        return rows

    def _close_request(self, rows: Sequence[Claim]) -> None:
        self._request = None
        for row in rows:
            if row.rank == 0 and row.master_port is not None:
                self._ports.give(row.master_port)

    def not_begun(self, job: ActiveJob) -> None:
        """It is handed back: nothing here will bind the port that it was given."""
        self._ports.release(*job.ports)

    def listed(self) -> None:
        """What was claimed is in the job table now."""
        if not self.outstanding:
            self.unlisted = False

    def abandon(self) -> None:
        """The loop claims no more. The worker may live on for hours, so :class:`LeaseKeeper` hands back what a claim
        has taken whose answer is outstanding.
        """
        self._request = None
        self.unlisted = False

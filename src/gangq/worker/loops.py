"""The two loops that claim jobs and have them run. They differ in where they wait, and in where their jobs run.

==================  ===========================  ====================================================
loop                runs in                      its jobs run
==================  ===========================  ====================================================
`MainThreadLoop`    the main thread              there, one after another: the lane that has one slot
`ChildProcessLoop`  the control loop, as a task  in child processes, as many at once as it has slots
==================  ===========================  ====================================================

The main thread may be inside a handler for hours, so it cannot claim for the other lane. The thread that reports a
job of a child process (``gangq-job-*``) claims in the same call for the slot that becomes free.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.claims import ClaimSource, TaskWakes, ThreadWakes
from gangq.worker.dispatch import Dispatcher
from gangq.worker.drain import Drain
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import Reporter
from gangq.worker.runner_inline import InlineRunner
from gangq.worker.session import Session
from gangq.worker.signals import Signals

if TYPE_CHECKING:
    from gangq.client.rows import Claim, Outcome
    from gangq.gpu import SamplerProcess

log = logging.getLogger("gangq.worker.loops")

_AGAIN_S = 1.0
"""How long to wait before checking again whether the driver answers or a slot is free (what wakes a claim ends that
sooner), and after a fault of the loop.
"""
_CLAIM_LOCK_S = 0.01
"""How long to wait before checking again whether a report still claims for the same lane."""
_DECIDED_S = 3.0
"""How long to wait for a pass that another worker runs."""


class Intake:
    """Whether a worker takes more jobs, and what becomes of those it has claimed: for all its loops."""

    def __init__(self, session: Session, drain: Drain, sampler: SamplerProcess) -> None:
        self.session = session
        self._drain = drain
        self._sampler = sampler

    @property
    def serving(self) -> bool:
        """Whether the loops go on."""
        if self.session.ended.is_set() or self._drain.requested.is_set():
            return False
        if self.session.directory.is_dir():
            return True
        self._drain.directory_gone(self.session.directory)
        return False

    @property
    def doubtful(self) -> bool:
        """Whether the driver is late with an answer for a device: no new job begins. A device that hangs is known
        after two hangs of one call (a minute), a whole driver after about 90 s. Running jobs are left
        alone until then.
        """
        return bool(self._sampler.doubtful())

    @property
    def may_begin(self) -> bool:
        """Whether to begin more jobs."""
        return self.serving and not self.doubtful

    def taking(self, claims: ClaimSource[Any], most: int) -> Steps[list[ActiveJob]]:
        """Claim up to ``most`` jobs. A claim whose answer is outstanding is repeated even if no more is to begin,
        because what it took is this worker's.
        """
        if not self.may_begin and not claims.outstanding:
            claims.wait_s = _AGAIN_S
            return []
        return self.add(claims, (yield from claims.taking(most)))

    def add(self, claims: ClaimSource[Any], rows: Sequence[Claim]) -> list[ActiveJob]:
        """Put what was claimed into the job table. What must not begin any more has been told so on return."""
        session = self.session
        jobs = [ActiveJob(claim) for claim in rows]
        session.table.add(*jobs)
        claims.listed()
        if self._drain.requested.is_set():
            # The claim was in flight when the drain was requested; these jobs have not begun.
            session.table.each(lambda job: job.tell_stop(self._drain.reason, 0.0), jobs)
        if session.ended.is_set():
            # Session.end() has lost the jobs that were in the table then; these may not have been.
            session.table.each(lambda job: job.lose("its worker's incarnation has ended"), jobs)
        return jobs


class MainThreadLoop:
    """Claims for the main thread and runs there, one job after another: the lane that has one slot."""

    def __init__(
        self,
        intake: Intake,
        claims: ClaimSource[ThreadWakes],
        reporter: Reporter,
        dispatcher: Dispatcher,
        inline: InlineRunner,
        signals: Signals,
        waiting: deque[ActiveJob],
        *,
        prefetch: int = 1,
        left: NothingLeft | None = None,
    ) -> None:
        """``waiting``: where jobs wait that are claimed and not begun, ``prefetch`` at most. With ``left`` the worker
        ends once nothing is left to claim.
        """
        self._intake = intake
        self._claims = claims
        self._reporter = reporter
        self._dispatcher = dispatcher
        self._inline = inline
        self._signals = signals
        self._waiting = waiting
        self._prefetch = prefetch
        self._left = left
        reporter.complete_and_claim = self._complete_and_claim

    def run(self) -> None:
        """Claim and run until the worker stops."""
        intake, claims, waiting = self._intake, self._claims, self._waiting
        execute = intake.session.main_client.execute
        while intake.serving:
            signs.alive()
            claims.begin_claim(claims.wakes.wait_kept(claims.pace_s))
            jobs = execute(intake.taking(claims, self._prefetch))
            if not jobs:
                if not claims.unsure and not intake.doubtful and self._left and execute(self._left.look()):
                    break
                claims.wakes.wait(claims.wait_s)
                continue
            waiting.extend(jobs)
            self._run_waiting()
            self._inline.rest()
            self._reporter.flush()
        claims.abandon()

    def _run_waiting(self) -> None:
        waiting = self._waiting
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:  # A drain takes from the other end.
                return
            try:
                self._dispatcher.run(job, self._inline, self._reporter.done, more_follow=bool(waiting))
            finally:
                self._signals.renew()

    def _complete_and_claim(self, finished: Sequence[ActiveJob]) -> Sequence[Outcome] | None:
        if not self._intake.may_begin:
            return None
        answer = self._intake.session.main_client.execute(
            self._claims.completing_and_claiming(finished, self._prefetch)
        )
        if answer is None:
            return None
        self._waiting.extend(self._intake.add(self._claims, answer[1]))
        return answer[0]


class ChildProcessLoop:
    """Claims for the lanes whose jobs run in child processes, and has a thread for each job that runs. A task of the
    control loop.
    """

    def __init__(
        self,
        intake: Intake,
        claims: ClaimSource[TaskWakes],
        reporter: Reporter,
        dispatcher: Dispatcher,
        slots: int,
        *,
        left: NothingLeft | None = None,
        found_nothing: Callable[[], object] | None = None,
    ) -> None:
        """``slots``: how many jobs at once. ``left``: the worker ends once nothing is left to claim;
        ``found_nothing()`` is called whenever a claim found nothing and nothing runs here.
        """
        self._intake = intake
        self._claims = claims
        self._reporter = reporter
        self._dispatcher = dispatcher
        self._slots = slots
        self._left = left
        self._found_nothing = found_nothing
        self._claim_lock = threading.Lock()
        """Held while a claim for this lane is in flight, by this loop or by the thread of a job that ends. Nobody
        blocks on it: the control loop must not, and such a thread reports without claiming.
        """
        self._stopping = False
        self.idle_since = -math.inf
        """When the last claim began, if it found nothing and nothing runs here, by ``time.monotonic()``."""

    def stop(self) -> None:
        """Have :meth:`run` return. What it has claimed is in the job table then."""
        self._stopping = True
        self._claims.wakes.set()

    async def run(self) -> None:
        """Claim and start jobs until the worker stops."""
        while self._intake.serving and not self._stopping:
            try:
                if await self._turn():
                    break
            except Exception:
                # The main thread may be inside a handler for hours, so a fault here must not end this lane.
                log.exception("claims_fault")
                await asyncio.sleep(_AGAIN_S)
        while not self._claim_lock.acquire(blocking=False):
            await asyncio.sleep(_CLAIM_LOCK_S)
        # The lock is kept: nothing claims for this lane any more.
        self._claims.abandon()

    async def _turn(self) -> bool:
        """Claim once, start what was claimed, wait for the next wake-up. True: nothing is left to claim."""
        claims, intake = self._claims, self._intake
        signs.alive()
        claims.begin_claim(await claims.wakes.wait_kept(claims.pace_s))
        if self._stopping:
            return False  # At once: the wake-up of stop() may be among those that begin_claim() has taken.
        if not self._claim_lock.acquire(blocking=False):
            await asyncio.sleep(_CLAIM_LOCK_S)
            return False
        free = self._free  # Only now: a job that ends claims for the slot that it leaves.
        if free <= 0:
            self._claim_lock.release()
            await claims.wakes.wait(_AGAIN_S)
            return False
        execute = intake.session.control.client.execute
        began, self.idle_since = time.monotonic(), -math.inf
        try:
            jobs = await execute(intake.taking(claims, free))
        finally:
            self._claim_lock.release()
        for job in jobs:
            self._begin(job)
        if not jobs:
            if free == self._slots and not claims.unsure and not intake.doubtful:
                self.idle_since = began
                if self._left is not None and await execute(self._left.look()):
                    return True
                if self._found_nothing is not None:
                    self._found_nothing()
            await claims.wakes.wait(claims.wait_s)
        return False

    @property
    def _free(self) -> int:
        return self._slots - self._intake.session.table.count(self._claims.lane)

    def _begin(self, job: ActiveJob) -> None:
        name = f"gangq-job-{job.id}"
        try:
            threading.Thread(target=self._run_job, args=(job,), name=name, daemon=True).start()
        except RuntimeError as problem:
            # This may be the control loop, where no report can be waited for. What is not in the table is handed back
            # by `LeaseKeeper`.
            log.error("job_not_begun", extra={**job.extra, "error": str(problem)})
            job.begin_report()
            self._claims.not_begun(job)
            self._intake.session.table.remove(job)

    def _run_job(self, job: ActiveJob) -> None:
        try:
            self._dispatcher.run(job, None, self._done)
        finally:
            self._claims.wakes.set()

    def _done(self, job: ActiveJob, result: Any) -> None:
        self._reporter.done_in_child(job, result, self._complete_and_claim)

    def _complete_and_claim(self, finished: Sequence[ActiveJob]) -> Sequence[Outcome] | None:
        # If a claim for this lane is in flight, report alone: that claim may take a while.
        if not self._intake.may_begin or self._stopping or not self._claim_lock.acquire(blocking=False):
            return None
        try:
            free = self._free + len(finished)
            query = self._claims.completing_and_claiming(finished, free)
            answer = self._intake.session.control.for_threads.execute(query) if free > 0 else None
            jobs = () if answer is None else self._intake.add(self._claims, answer[1])
        finally:
            self._claim_lock.release()
        for job in jobs:
            self._begin(job)
        return None if answer is None else answer[0]


class NothingLeft:
    """Whether a worker that runs until nothing is left to claim (``once``) is done: for the loop that ends it."""

    def __init__(self, intake: Intake, placed: bool) -> None:
        """``placed``: it takes placed work, which can be claimed only once a pass has placed it."""
        self._intake = intake
        self._placed = placed
        self._added = -1
        """How many jobs had been claimed at the first call."""
        self._first_at = 0.0
        """When that had had a pass run, by ``time.monotonic()``."""
        self.children: ChildProcessLoop | None = None
        """The loop of the other lane."""

    def look(self) -> Steps[bool]:
        """To be called after a claim that found nothing. True once the worker may end.

        It takes two calls. The first one finds the job table empty, has a pass run, and makes both lanes claim again.
        The second one finds that no job was claimed since, and that a claim of the other lane which began since found
        nothing either.
        """
        intake = self._intake
        # Read these two before the table: a job that is claimed after this line is seen by the next call.
        idle = self.children is None or self.children.idle_since > self._first_at
        added = intake.session.table.added
        if len(intake.session.table):
            return False
        if self._added == added:
            return idle
        if self._placed and not (yield from self._decided()):
            return False
        self._added, self._first_at = added, time.monotonic()
        intake.session.wake()
        return False

    def _decided(self) -> Steps[bool]:
        """Whether a tick has found nothing that waits to be placed, or has decided on it."""
        session, turn = self._intake.session, None
        until = time.monotonic() + _DECIDED_S
        while time.monotonic() < until and self._intake.serving:
            try:
                report = yield Verbs.tick(force=True, turn=turn)
            except GangqError as problem:
                log.info("tick_failed", extra={"error": str(problem)})
                return False
            wait_s = session.terms.tick_s if report.next_in_s is None else report.next_in_s
            # Where another worker has the turn to decide, the tick is due again when that is over.
            if report.ran and not report.again and (report.decide or wait_s >= session.terms.tick_s):
                return True
            turn = report.next_turn
            yield min(wait_s, _DECIDED_S)
        return False

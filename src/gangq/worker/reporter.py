"""Reports how each job ended: done, failed, stopped, handed back.

Every such call carries the job's token and may be repeated, so each is repeated until it is answered: a reply
lost on the wire must neither lose a result nor double one. The repeating also stops when the incarnation has ended:
by then the answer could only be "stale". A job that an open transaction holds is reported later, by
:class:`HeldReports`; no other report waits for that.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gangq import logqueue
from gangq.client.encoding import dumps
from gangq.errors import (
    Busy,
    GangqError,
    IncarnationEnded,
    InvalidInput,
    NotFound,
    StaleToken,
    WrongState,
)
from gangq.retry import AGAIN, NEVER, Again
from gangq.watchdogs import signs
from gangq.watchdogs.findings import Trip, error_of
from gangq.worker.jobs import ActiveJob, StopReason
from gangq.worker.repeating import ANSWERS, backoff, until_answered
from gangq.worker.results import describe, note_for
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Outcome

log = logging.getLogger("gangq.worker.reporter")

_OVER = (StaleToken, WrongState, NotFound, IncarnationEnded)
"""What is answered where the claim is over."""
_FLUSH_S = 0.01
"""Between two looks of the thread. A result that waits at two looks in a row is sent, so none waits over 20 ms."""
_HELD_FIRST_S = 0.25
_HELD_MOST_S = 8.0
"""A try may wait 2 s for a lock on the connection that renews the lease, so tries become rarer."""


CompleteAndClaim = Callable[[Sequence[ActiveJob]], "Sequence[Outcome] | None"]
"""Reports these jobs done and claims more, in one call. One try; None: no answer, so they may not be reported."""


class HeldReports:
    """Final reports of jobs that an open transaction holds: repeated in a thread of their own, which starts with the
    first one, until they are answered. Thread-safe.
    """

    def __init__(self, freed: Callable[[], object]) -> None:
        """``freed()`` is called when a job was reported."""
        self._freed = freed
        self._reports: dict[ActiveJob, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __contains__(self, job: ActiveJob) -> bool:
        return job in self._reports

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, job: ActiveJob, report: Callable[[], bool]) -> None:
        """``report()`` reports the job; False: an open transaction still holds it."""
        log.warning("report_held", extra={**job.extra, "advice": "a transaction that is open holds this job"})
        with self._lock:
            self._reports[job] = report
            if self._thread is None:
                self._start()
        self._some.set()

    def stop(self) -> None:
        """Make no more tries."""
        self._stop.set()
        self._some.set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="gangq-held", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:  # No more threads. The next job that is held tries again.
            log.error("held_reports_wait", extra={"error": str(problem)})
        else:
            self._thread = thread

    def _run(self) -> None:
        pauses = backoff(_HELD_FIRST_S, _HELD_MOST_S)
        while not self._stop.is_set():
            self._some.wait()
            signs.alive()
            if self._stop.wait(next(pauses)):
                return
            with self._lock:
                due = list(self._reports.items())
            for job, report in due:
                with logqueue.lines_about(job):
                    try:
                        answered = report()
                    except Exception:
                        log.exception("report_fault")
                        answered = True
                if answered:
                    self._freed()
                    with self._lock:
                        del self._reports[job]
                        if not self._reports:
                            self._some.clear()
                            pauses = backoff(_HELD_FIRST_S, _HELD_MOST_S)


class Reporter:
    """Reports how jobs ended. Thread-safe; a job leaves the table when its report was answered.

    Results of short jobs are batched and go out with the next claim. If a slow job follows, the thread
    ``gangq-results`` sends the batch within 20 ms. At most one call is in flight.
    """

    def __init__(self, session: Session, impatient: Callable[[], bool] = lambda: False) -> None:
        """``impatient()``: whether the worker is to end even without an answer of the database."""
        self._session = session
        self._impatient = impatient
        self._finished: deque[ActiveJob] = deque()
        self.held = HeldReports(session.wake)
        """The jobs that have ended and could not be reported yet."""
        self._sending = threading.Lock()
        self._sent = 0
        """How many batches have been sent."""
        self._called = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.complete_and_claim: CompleteAndClaim | None = None
        """Reports results together with the next claim, which saves a round trip and a commit."""

    def stop(self) -> None:
        """Stop the threads."""
        self._stop.set()
        self._called.set()
        self.held.stop()

    # -- done ------------------------------------------------------------------------------------------------

    def done(self, job: ActiveJob, result: Any, *, more_follow: bool = False) -> None:
        """The job is done. With ``more_follow`` its result is batched and sent within 20 ms; otherwise it is sent at
        once, together with the next claim where :attr:`complete_and_claim` is set.
        """
        job.result = result
        self._finished.append(job)
        if not more_follow:
            self._flush(self.complete_and_claim)
        elif not self._called.is_set():
            if self._thread is None and not self._start():
                self.flush()
                return
            self._called.set()

    def done_in_child(self, job: ActiveJob, result: Any, complete_and_claim: CompleteAndClaim | None) -> None:
        """A job that ran in a child process is done. For the thread that ran it; waits for the answer."""
        job.result = result
        self._report_done([job], complete_and_claim)

    def flush(self) -> None:
        """Report everything that is done, now, in one call; returns once it was answered."""
        self._flush(None)

    def _flush(self, complete_and_claim: CompleteAndClaim | None) -> None:
        with self._sending:
            self._sent += 1
            batch = [self._finished.popleft() for _ in range(len(self._finished))]
            if batch:
                self._report_done(batch, complete_and_claim)

    def _report_done(self, batch: Sequence[ActiveJob], complete_and_claim: CompleteAndClaim | None) -> None:
        try:
            # If that had no answer, or was refused, call complete alone: it may be repeated.
            outcomes = None if complete_and_claim is None else complete_and_claim(batch)
            if outcomes is None:
                self._complete(batch)
            else:
                self._take_outcomes(outcomes, batch)
        except GangqError as problem:
            self._complete_each(batch, problem)
        finally:
            self._session.table.remove(*(job for job in batch if job not in self.held))

    def _complete(self, batch: Sequence[ActiveJob]) -> None:
        outcomes = until_answered(lambda: self._try_complete(batch), "complete", self._gives_up)
        self._take_outcomes(outcomes or (), batch)

    def _try_complete(self, batch: Sequence[ActiveJob]) -> Sequence[Outcome]:
        return self._session.thread_client.complete(
            job_ids=[job.id for job in batch],
            tokens=[job.token for job in batch],
            results=[job.result for job in batch],
            strict=False,
        )

    def _take_outcomes(self, outcomes: Sequence[Outcome], batch: Sequence[ActiveJob]) -> None:
        for outcome in outcomes:
            if outcome.outcome not in ("stale", "busy"):
                continue
            job = next(one for one in batch if one.id == outcome.job_id)
            if outcome.outcome == "stale":
                log.error("result_stale", extra=job.extra)
            else:
                self.held.add(job, partial(self._report, job, "complete", partial(self._complete_held, job)))

    def _complete_held(self, job: ActiveJob) -> None:
        outcomes = self._try_complete([job])
        if [one.outcome for one in outcomes] == ["busy"]:
            raise Busy(f"somebody's open transaction holds job {job.id}")
        self._take_outcomes(outcomes, [job])

    def _complete_each(self, batch: Sequence[ActiveJob], problem: GangqError) -> None:
        """One of the batch is refused (too large): a note takes the place of its result, and all are done."""
        if len(batch) > 1:
            for one in batch:
                try:
                    self._complete([one])
                except GangqError as own:
                    self._complete_each([one], own)
            return
        job = batch[0]
        if isinstance(problem, _OVER):
            log.error("result_stale", extra={**job.extra, "error": str(problem)})
            return
        if isinstance(problem, InvalidInput):
            log.warning("result_not_stored", extra={**job.extra, "error": str(problem)})
            job.result = note_for(problem, f"the result of task {job.claim.task!r}")
            try:
                self._complete([job])
            except GangqError as own:
                problem = own
            else:
                return
        self.failed(
            job,
            describe(type(problem).__name__, f"its result could not be reported: {problem}"),
            again=NEVER,
        )

    # -- not done --------------------------------------------------------------------------------------------

    def failed(
        self, job: ActiveJob, error: dict[str, Any], *, again: Again = AGAIN, cause: str = "error"
    ) -> None:
        """The job failed with this error, made by :func:`describe`."""

        def said(state: Any) -> None:
            if state in (None, "repeated", "done"):
                return
            about = {"state": state, "error_type": error["type"], "error": error["message"][:500]}
            log.warning("job_failed", extra={**job.extra, **about})

        self._report_or_hold(
            job,
            "fail",
            lambda: self._session.thread_client.fail(
                job_id=job.id,
                token=job.token,
                error=error,
                retryable=again.retryable,
                cause=cause,
                retry_in_s=again.delay_s,
            ),
            said,
        )

    def snoozed(self, job: ActiveJob, for_s: float) -> None:
        """The job has handed itself back, to be run again in so many seconds."""
        self._report_or_hold(
            job,
            "snooze",
            lambda: self._session.thread_client.snooze(job_id=job.id, token=job.token, for_s=for_s),
            lambda state: log.info("job_snoozed", extra={**job.extra, "for_s": for_s, "state": state}),
        )

    def tripped(self, job: ActiveJob, trip: Trip, evidence: Mapping[str, Any]) -> None:
        """A watchdog has ended the job, and nothing of it runs any more."""
        try:
            dumps(evidence, "the evidence")
        except InvalidInput as problem:
            # The job has to be reported even if its evidence cannot be stored.
            evidence = {"dropped": str(problem)}
        self._report_or_hold(
            job,
            "trip",
            lambda: self._session.thread_client.trip(
                incarnation=self._session.incarnation,
                job_id=job.id,
                token=job.token,
                code=int(trip.code),
                error=error_of(trip, evidence),
                evidence=evidence,
                devices=list(trip.devices),
            ),
            lambda state: log.warning(
                "job_tripped", extra={**job.extra, "code": int(trip.code), "state": state}
            ),
        )

    def completed_by_handler(self, job: ActiveJob, error: dict[str, Any] | None) -> None:
        """``ctx.complete(connection)`` was called: whether it *happened* depends on the caller's commit.

        If it was committed, this report repeats the token's final report and changes nothing.
        """
        if error is None:
            error = describe(
                "NotCommitted",
                "ctx.complete(connection) was called, but its transaction was not committed when the handler "
                "returned: commit before returning, or do not call it",
            )
        self.failed(job, error)

    def stopped(self, job: ActiveJob, *, unless_told: StopReason | None = None) -> None:
        """Nothing of it runs any more, because it was told to stop or was never started. ``unless_told``: why, if it
        was not told to stop.
        """
        if job.lost is not None:
            self.forget(job)
        elif job.told_by_server:
            self._ack(job)
        else:
            # Should the database have told it to stop as well by now, it takes this for the ack.
            self._release(job, job.stop_reason or unless_told)

    def _ack(self, job: ActiveJob) -> None:
        self._report_or_hold(
            job,
            "ack_preempted",
            lambda: self._session.thread_client.ack_preempted(job_id=job.id, token=job.token),
            lambda state: log.info(
                "job_stopped", extra={**job.extra, "reason": job.stop_reason, "state": state}
            ),
        )

    def _release(self, job: ActiveJob, stop_reason: StopReason | None) -> None:
        reason = {
            "drain": f"worker {self._session.name} was stopped by its operator",
            "directory": f"the directory of worker {self._session.name} was removed",
            "lease": f"worker {self._session.name} could not renew its lease",
        }.get(stop_reason or "", "its worker did not start it")

        def said(outcomes: Sequence[Outcome] | None) -> None:
            outcome = outcomes[0].outcome if outcomes else None
            log.info("job_released", extra={**job.extra, "reason": reason, "outcome": outcome})

        self._report_or_hold(
            job,
            "release",
            lambda: self._session.thread_client.release(job_ids=[job.id], tokens=[job.token], reason=reason),
            said,
        )

    def forget(self, job: ActiveJob) -> None:
        """Its claim was lost: it is not reported."""
        self._session.table.remove(job)

    # -- inside ----------------------------------------------------------------------------------------------

    def _report_or_hold(
        self, job: ActiveJob, what: str, call: Callable[[], Any], said: Callable[[Any], None]
    ) -> None:
        """Make this call, the job's final report; ``said(answer)`` may be called after this has returned."""
        if not self._report(job, what, call, said):
            self.held.add(job, partial(self._report, job, what, call, said))

    def _report(
        self, job: ActiveJob, what: str, call: Callable[[], Any], said: Callable[[Any], None] | None = None
    ) -> bool:
        """The same; False while an open transaction holds the job. Otherwise the job leaves the table."""
        held = False
        try:
            answer = until_answered(call, what, self._gives_up, answers=(*ANSWERS, Busy))
            if said is not None:
                said(answer)
        except Busy:
            held = not self._gives_up()
        except _OVER as problem:
            log.error("report_stale", extra={**job.extra, "call": what, "error": str(problem)})
        except GangqError as problem:
            log.error("report_refused", extra={**job.extra, "call": what, "error": str(problem)})
        finally:
            if not held:
                self._session.table.remove(job)
        return not held

    def _gives_up(self) -> bool:
        return self._session.ended.is_set() or self._impatient()

    def _start(self) -> bool:
        """False: no thread can be started. The next result tries again."""
        thread = threading.Thread(target=self._run, name="gangq-results", daemon=True)
        try:
            thread.start()
        except RuntimeError as problem:
            log.warning("results_not_batched", extra={"error": str(problem)})
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self._called.wait()
            signs.alive()
            sent = self._sent
            if self._stop.wait(_FLUSH_S):
                return
            if sent != self._sent:
                continue  # The thread that runs the jobs has sent a batch meanwhile, and will send the next.
            self._called.clear()
            try:
                self._flush(None)
            except Exception:
                log.exception("results_fault")

"""The last word about each job: done, failed, stopped, handed back.

Every such call carries the job's token and may be repeated, so each is repeated until it is answered: a reply
lost on the wire must neither lose a result nor double one. An incarnation that has ended ends the repeating
too: by then the answer could only be "stale".
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangq.client.encoding import dumps
from gangq.errors import GangqError, IncarnationEnded, InvalidInput, NotFound, StaleToken, WrongState
from gangq.watchdogs.verdicts import Trip, error_of
from gangq.worker.jobs import ActiveJob
from gangq.worker.retry import until_answered
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Outcome

log = logging.getLogger("gangq.worker.reporter")

_FLUSH_S = 0.02
_NEVER = sys.maxsize
_TEXT_CHARS = 16_000


def describe(problem_type: str, message: str, **more: Any) -> dict[str, Any]:
    """An error as ``gangq.fail`` keeps it, with the host it happened on, cut to a sane length and without
    NULs (which PostgreSQL refuses to store).
    """
    error = {"type": problem_type, "message": message, "host": socket.gethostname(), **more}
    return {key: clean(value) if isinstance(value, str) else value for key, value in error.items()}


def clean(text: str, most: int = _TEXT_CHARS) -> str:
    """``text`` as PostgreSQL stores it, its middle left out where it is longer than ``most`` characters."""
    text = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if len(text) <= most:
        return text
    head, tail = text[: most // 4], text[-(most - most // 4) :]
    return f"{head}\n[... {len(text) - most} characters left out ...]\n{tail}"


Along = Callable[[Sequence[ActiveJob]], "Sequence[Outcome] | None"]
"""Reports these jobs done together with a claim. One try; None: it has not been said, or nobody knows."""


class Reporter:
    """Says how jobs ended. Thread-safe; a job leaves the table when the last word about it was taken.

    Of jobs that are done in quick succession (a prefetch of small ones) the word goes out with that of others, and
    one call is under way at a time: while the jobs of one claim run, a thread here reports those of the one before
    and claims the next (:attr:`ahead`). A job that ends pays for that with an append and a comparison: no lock, no
    wake-up.
    """

    def __init__(self, session: Session, impatient: Callable[[], bool] = lambda: False) -> None:
        """``impatient()`` says whether the worker wants to end, database or not."""
        self._session = session
        self._impatient = impatient
        self._finished: deque[ActiveJob] = deque()
        self._turn = threading.Condition(threading.Lock())
        self._sending = False
        self._call_at = _NEVER
        """How many have to be finished for the thread to be called; never while it is about to look by itself."""
        self._called = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gangq-results", daemon=True)
        self.along: Along | None = None
        """How to report what is done together with the next claim, which saves a round trip and a commit."""
        self.ahead: Along | None = None
        """The same while other jobs still run; for the thread."""
        self.ahead_after = _NEVER
        """How many have to be done for that within 20 ms. What takes longer is no small job, and takes nothing."""
        self.may_go_ahead: Callable[[], bool] = lambda: True
        """Whether it may now; else all is left to who runs out of jobs, and goes with that claim."""
        self.more: Callable[[], object] = bool
        """Whether jobs have been claimed that wait to be run."""

    def start(self) -> None:
        """Start the thread that flushes results of a batch while its next job runs."""
        self._thread.start()

    def stop(self) -> None:
        """Flush no more by itself."""
        self._stop.set()
        self._called.set()

    # -- done ------------------------------------------------------------------------------------------------

    def done(self, job: ActiveJob, result: Any, *, more_follow: bool = False) -> None:
        """It is done. With ``more_follow`` the word goes out with those of its successors, within 20 ms; else at
        once, and the next claim may go along with it.
        """
        job.result = result
        self._finished.append(job)
        if not more_follow and self._flush(self.along, self.more):
            return
        if len(self._finished) >= self._call_at:
            self._call_at = _NEVER
            self._called.set()
        elif self._called.is_set():
            # It is awake and wants the interpreter, which small jobs never let go of: that would be 5 ms.
            time.sleep(0)

    def flush(self) -> None:
        """Report everything that is done, now, in one call; returns once it was answered."""
        self._flush(None)

    def settle(self) -> bool:
        """The same, unless the call under way brings :attr:`more` to run. False then: the thread reports the rest."""
        return self._flush(None, self.more)

    def arrived(self) -> None:
        """A claim that went :attr:`ahead` has brought jobs: who waits need not wait for the rest of the call."""
        with self._turn:
            self._turn.notify_all()

    def _flush(self, along: Along | None, unless: Callable[[], object] = bool) -> bool:
        """Send what is finished once the call under way is over; False where there is something else to do first."""
        with self._turn:
            while not unless() and self._sending:
                self._turn.wait()
            if unless():
                return False
            self._sending = True
        try:
            self._send(along)
        finally:
            with self._turn:
                self._sending = False
                self._turn.notify_all()
        if along is not None and along is self.along and self.ahead is not None:
            self._called.set()  # What was claimed now may be gone ahead of.
        return True

    def _send(self, along: Along | None) -> None:
        batch = [self._finished.popleft() for _ in range(len(self._finished))]
        if not batch:
            return
        try:
            # Where the answer was lost, or was a refusal, the same is said alone: it may be repeated.
            outcomes = None if along is None else along(batch)
            if outcomes is None:
                self._complete(batch)
            else:
                self._log_stale(outcomes)
        except GangqError as problem:
            self._complete_each(batch, problem)
        finally:
            self._session.table.remove(*batch)

    def _complete(self, batch: Sequence[ActiveJob]) -> None:
        outcomes = until_answered(
            lambda: self._session.client.complete(
                job_ids=[job.id for job in batch],
                tokens=[job.token for job in batch],
                results=[job.result for job in batch],
                strict=False,
            ),
            "complete",
            self._hopeless,
        )
        self._log_stale(outcomes or ())

    @staticmethod
    def _log_stale(outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.outcome == "stale":
                log.error("result_stale", extra={"job": outcome.job_id})

    def _complete_each(self, batch: Sequence[ActiveJob], problem: GangqError) -> None:
        """One of the batch is refused (too large, not storable): that one fails, the others are done."""
        if len(batch) > 1:
            for one in batch:
                try:
                    self._complete([one])
                except GangqError as own:
                    self._complete_each([one], own)
            return
        job = batch[0]
        if isinstance(problem, (StaleToken, WrongState, IncarnationEnded, NotFound)):
            log.error("result_stale", extra={**job.extra, "error": str(problem)})
            return
        self._fail(
            job, describe(type(problem).__name__, f"its result was refused: {problem}"), False, "error"
        )

    # -- not done --------------------------------------------------------------------------------------------

    def failed(
        self, job: ActiveJob, error: dict[str, Any], *, retryable: bool = True, cause: str = "error"
    ) -> None:
        """It failed; see :func:`describe`."""
        try:
            self._fail(job, error, retryable, cause)
        finally:
            self._session.table.remove(job)

    def _fail(self, job: ActiveJob, error: dict[str, Any], retryable: bool, cause: str) -> None:
        state = self._said(
            job,
            "fail",
            lambda: self._session.client.fail(
                job_id=job.id, token=job.token, error=error, retryable=retryable, cause=cause
            ),
        )
        if state in (None, "repeated", "done"):
            return
        log.warning(
            "job_failed",
            extra={**job.extra, "state": state, "error_type": error["type"], "error": error["message"][:500]},
        )

    def tripped(self, job: ActiveJob, trip: Trip, evidence: Mapping[str, Any]) -> None:
        """A watchdog has ended it, and nothing of it runs any more."""
        try:
            dumps(evidence, "the evidence")
        except InvalidInput as problem:
            # Whatever it was that could not be kept: the job must get its last word.
            evidence = {"dropped": str(problem)}
        try:
            outcome = self._said(job, "trip", lambda: self._trip(job, trip, evidence))
            log.warning("job_tripped", extra={**job.extra, "code": int(trip.code), "state": outcome})
        finally:
            self._session.table.remove(job)

    def _trip(self, job: ActiveJob, trip: Trip, evidence: Mapping[str, Any]) -> str:
        outcome: str = self._session.client.trip(
            incarnation=self._session.incarnation,
            job_id=job.id,
            token=job.token,
            code=int(trip.code),
            error=error_of(trip),
            evidence=evidence,
            devices=list(trip.devices),
        )
        return outcome

    def completed_by_handler(self, job: ActiveJob, error: dict[str, Any] | None) -> None:
        """``ctx.complete(connection)`` was called: whether it *happened* depends on the caller's commit.

        Where it was committed, what is said here is a repeat of the token's final word and changes nothing.
        """
        if error is None:
            error = describe(
                "NotCommitted",
                "ctx.complete(connection) was called, but its transaction was not committed when the handler "
                "returned: commit before returning, or do not call it",
            )
        self.failed(job, error)

    def stopped(self, job: ActiveJob) -> None:
        """Nothing of it runs any more, because it was told to stop or was never started."""
        try:
            if job.lost is not None:
                return
            if job.told_by_server:
                self._ack(job)
            else:
                # Should the database have told it to stop as well by now, it takes this for the ack.
                self._release(job)
        finally:
            self._session.table.remove(job)

    def _ack(self, job: ActiveJob) -> None:
        state = self._said(
            job,
            "ack_preempted",
            lambda: self._session.client.ack_preempted(job_id=job.id, token=job.token),
        )
        log.info("job_stopped", extra={**job.extra, "reason": job.stop_reason, "state": state})

    def _release(self, job: ActiveJob) -> None:
        reason = {
            "drain": f"worker {self._session.name} was stopped by its operator",
            "lease": f"worker {self._session.name} could not renew its lease",
        }.get(job.stop_reason or "", "its worker did not start it")
        outcomes = self._said(
            job,
            "release",
            lambda: self._session.client.release(job_ids=[job.id], tokens=[job.token], reason=reason),
        )
        outcome = outcomes[0].outcome if outcomes else None
        log.info("job_released", extra={**job.extra, "reason": reason, "outcome": outcome})

    def forget(self, job: ActiveJob) -> None:
        """Its claim was lost: nothing is said about it."""
        self._session.table.remove(job)

    # -- inside ----------------------------------------------------------------------------------------------

    def _said(self, job: ActiveJob, what: str, call: Any) -> Any:
        try:
            return until_answered(call, what, self._hopeless)
        except (StaleToken, WrongState, NotFound, IncarnationEnded) as problem:
            log.error("report_stale", extra={**job.extra, "call": what, "error": str(problem)})
        except GangqError as problem:
            log.error("report_refused", extra={**job.extra, "call": what, "error": str(problem)})
        return None

    def _hopeless(self) -> bool:
        return self._session.ended.is_set() or self._impatient()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._await(1):
                continue
            enough = self._await(self.ahead_after if self.may_go_ahead() else _NEVER, _FLUSH_S)
            if self._stop.is_set():
                return
            if enough is None:
                continue
            try:
                self._flush(self.ahead if enough else None)
            except Exception:
                log.exception("results_fault")

    def _await(self, count: int, timeout_s: float | None = None) -> bool | None:
        """Whether so many are finished, now or within the time; None where it was called before either."""
        self._called.clear()
        # First this, then a look: who finishes one does it the other way round, so one of the two sees the other.
        self._call_at = count
        called = False
        if len(self._finished) < count and not self._stop.is_set():
            called = self._called.wait(timeout_s)
        self._call_at = _NEVER
        self._called.clear()
        return True if len(self._finished) >= count else None if called else False

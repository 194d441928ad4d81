"""The last word about each job: done, failed, stopped, handed back.

Every such call carries the job's token and may be repeated, so each is repeated until it is answered: a reply
lost on the wire must neither lose a result nor double one. An incarnation that has ended ends the repeating
too: by then the answer could only be "stale". Of a job that somebody's open transaction holds it is said later
(:class:`gangq.worker.held.HeldReports`), and nothing else waits for that.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

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
from gangq.watchdogs import signs
from gangq.watchdogs.verdicts import Trip, error_of
from gangq.worker.held import HeldReports
from gangq.worker.jobs import ActiveJob
from gangq.worker.results import note_for
from gangq.worker.retry import ANSWERS, until_answered
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Outcome

log = logging.getLogger("gangq.worker.reporter")

_FLUSH_S = 0.01
"""Between two looks of the thread. What it finds at one and finds unmoved at the next has waited 20 ms at most."""
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

    Jobs of one claim that are done in quick succession are reported together, with the next claim. A thread, started
    by the first that has to wait for another, reports those that wait for a slow one, within 20 ms.
    """

    def __init__(self, session: Session, impatient: Callable[[], bool] = lambda: False) -> None:
        """``impatient()`` says whether the worker wants to end, database or not."""
        self._session = session
        self._impatient = impatient
        self._finished: deque[ActiveJob] = deque()
        self.held = HeldReports(session.wake)
        """The jobs that have ended and of which it could not be said yet."""
        self._sending = threading.Lock()
        self._sent = 0
        """How many batches have been sent."""
        self._called = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.along: Along | None = None
        """How to report what is done together with the next claim, which saves a round trip and a commit."""

    def stop(self) -> None:
        """Flush no more by itself."""
        self._stop.set()
        self._called.set()
        self.held.stop()

    # -- done ------------------------------------------------------------------------------------------------

    def done(self, job: ActiveJob, result: Any, *, more_follow: bool = False) -> None:
        """It is done. With ``more_follow`` the word goes out with those of its successors, within 20 ms; else at
        once, and the next claim may go along with it.
        """
        job.result = result
        self._finished.append(job)
        if not more_follow:
            self._flush(self.along)
        elif not self._called.is_set():
            self._called.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gangq-results", daemon=True)
                self._thread.start()

    def done_in_child(self, job: ActiveJob, result: Any, along: Along | None) -> None:
        """A job that ran beside the main thread is done. For the thread that ran it; waits for the answer."""
        job.result = result
        self._say_done([job], along)

    def flush(self) -> None:
        """Report everything that is done, now, in one call; returns once it was answered."""
        self._flush(None)

    def _flush(self, along: Along | None) -> None:
        with self._sending:
            self._sent += 1
            batch = self._take_finished()
            if batch:
                self._say_done(batch, along)

    def _take_finished(self) -> list[ActiveJob]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _say_done(self, batch: Sequence[ActiveJob], along: Along | None) -> None:
        try:
            # Where the answer was lost, or was a refusal, the same is said alone: it may be repeated.
            outcomes = None if along is None else along(batch)
            if outcomes is None:
                self._complete(batch)
            else:
                self._hear(outcomes, batch)
        except GangqError as problem:
            self._complete_each(batch, problem)
        finally:
            self._forget(batch)

    def _forget(self, batch: Sequence[ActiveJob]) -> None:
        self._session.table.remove(*(job for job in batch if job not in self.held))

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
        self._hear(outcomes or (), batch)

    def _hear(self, outcomes: Sequence[Outcome], batch: Sequence[ActiveJob]) -> None:
        for outcome in outcomes:
            if outcome.outcome == "stale":
                log.error("result_stale", extra={"job": outcome.job_id})
            elif outcome.outcome == "busy":
                job = next(one for one in batch if one.id == outcome.job_id)
                self.held.add(job, partial(self._say, job, "complete", partial(self._complete_held, job)))

    def _complete_held(self, job: ActiveJob) -> None:
        outcomes = self._session.client.complete(
            job_ids=[job.id], tokens=[job.token], results=[job.result], strict=False
        )
        if [one.outcome for one in outcomes] == ["busy"]:
            raise Busy(f"somebody's open transaction holds job {job.id}")
        self._hear(outcomes, [job])

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
        if isinstance(problem, (StaleToken, WrongState, IncarnationEnded, NotFound)):
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
            retryable=False,
        )

    # -- not done --------------------------------------------------------------------------------------------

    def failed(
        self, job: ActiveJob, error: dict[str, Any], *, retryable: bool = True, cause: str = "error"
    ) -> None:
        """It failed; see :func:`describe`."""

        def said(state: Any) -> None:
            if state in (None, "repeated", "done"):
                return
            about = {"state": state, "error_type": error["type"], "error": error["message"][:500]}
            log.warning("job_failed", extra={**job.extra, **about})

        self._say_or_hold(
            job,
            "fail",
            lambda: self._session.client.fail(
                job_id=job.id, token=job.token, error=error, retryable=retryable, cause=cause
            ),
            said,
        )

    def tripped(self, job: ActiveJob, trip: Trip, evidence: Mapping[str, Any]) -> None:
        """A watchdog has ended it, and nothing of it runs any more."""
        try:
            dumps(evidence, "the evidence")
        except InvalidInput as problem:
            # Whatever it was that could not be kept: the job must get its last word.
            evidence = {"dropped": str(problem)}
        self._say_or_hold(
            job,
            "trip",
            lambda: self._session.client.trip(
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
        if job.lost is not None:
            self.forget(job)
        elif job.told_by_server:
            self._ack(job)
        else:
            # Should the database have told it to stop as well by now, it takes this for the ack.
            self._release(job)

    def _ack(self, job: ActiveJob) -> None:
        self._say_or_hold(
            job,
            "ack_preempted",
            lambda: self._session.client.ack_preempted(job_id=job.id, token=job.token),
            lambda state: log.info(
                "job_stopped", extra={**job.extra, "reason": job.stop_reason, "state": state}
            ),
        )

    def _release(self, job: ActiveJob) -> None:
        reason = {
            "drain": f"worker {self._session.name} was stopped by its operator",
            "lease": f"worker {self._session.name} could not renew its lease",
        }.get(job.stop_reason or "", "its worker did not start it")

        def said(outcomes: Sequence[Outcome] | None) -> None:
            outcome = outcomes[0].outcome if outcomes else None
            log.info("job_released", extra={**job.extra, "reason": reason, "outcome": outcome})

        self._say_or_hold(
            job,
            "release",
            lambda: self._session.client.release(job_ids=[job.id], tokens=[job.token], reason=reason),
            said,
        )

    def forget(self, job: ActiveJob) -> None:
        """Its claim was lost: nothing is said about it."""
        self._session.table.remove(job)

    # -- inside ----------------------------------------------------------------------------------------------

    def _say_or_hold(
        self, job: ActiveJob, what: str, call: Callable[[], Any], said: Callable[[Any], None]
    ) -> None:
        """Make this call, the last word about the job; ``said`` hears the answer, perhaps after this has returned."""
        if not self._say(job, what, call, said):
            self.held.add(job, partial(self._say, job, what, call, said))

    def _say(
        self, job: ActiveJob, what: str, call: Callable[[], Any], said: Callable[[Any], None] | None = None
    ) -> bool:
        """The same; False where somebody's transaction holds the job. With its last word it leaves the table."""
        held = False
        try:
            answer = until_answered(call, what, self._hopeless, answers=(*ANSWERS, Busy))
            if said is not None:
                said(answer)
        except Busy:
            held = not self._hopeless()
        except (StaleToken, WrongState, NotFound, IncarnationEnded) as problem:
            log.error("report_stale", extra={**job.extra, "call": what, "error": str(problem)})
        except GangqError as problem:
            log.error("report_refused", extra={**job.extra, "call": what, "error": str(problem)})
        finally:
            if not held:
                self._session.table.remove(job)
        return not held

    def _hopeless(self) -> bool:
        return self._session.ended.is_set() or self._impatient()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._called.wait()
            signs.alive()
            sent = self._sent
            if self._stop.wait(_FLUSH_S):
                return
            if sent != self._sent:
                continue  # Whoever runs jobs is quick, and sends the next batch itself.
            self._called.clear()
            try:
                self._flush(None)
            except Exception:
                log.exception("results_fault")

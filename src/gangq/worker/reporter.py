"""The last word about each job: done, failed, stopped, handed back.

Every such call carries the job's token and may be repeated, so each is repeated until it is answered: a reply
lost on the wire must neither lose a result nor double one. An incarnation that has ended ends the repeating
too: by then the answer could only be "stale". Of a job that somebody's open transaction holds it is said later
(:class:`gangq.worker.held.HeldReports`), and nothing else waits for that.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gangq.client.encoding import dumps, note_for
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
from gangq.worker.retry import ANSWERS, until_answered
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Outcome

log = logging.getLogger("gangq.worker.reporter")

_FLUSH_S = 0.01
"""Between two looks of the thread. What it finds at one and finds unmoved at the next has waited 20 ms at most."""
_LOOK_EVERY = 16
"""After how many jobs to look again whether an answer has come: a look costs as much as a tenth of a small job."""
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


class UnderWay(Protocol):
    """A report that went along with a claim, and whose answer is not read yet."""

    @property
    def arrived(self) -> bool:
        """Whether to receive it takes no time."""

    def receive(self) -> bool:
        """Wait for the answer; whether it brought jobs and the next report may go before this is read."""

    def read(self) -> Sequence[Outcome] | None:
        """What :data:`Along` returns; what was claimed is there to be run now."""


Ahead = Callable[[Sequence[ActiveJob]], UnderWay | None]
"""Sends what :data:`Along` says and does not wait; None: it was not sent, or nobody knows."""


class Reporter:
    """Says how jobs ended. Thread-safe; a job leaves the table when the last word about it was taken.

    Of jobs that are done in quick succession (a prefetch of small ones) the word goes out with that of others, and
    one call is under way at a time: who ran the jobs of one claim sends their report and the next claim
    (:attr:`ahead`), runs those of the claim before, and reads the answer when there is one. So the server works
    while handlers run, and no two threads take turns for the interpreter. What that leaves unsaid or unread because
    a handler takes longer, a thread here sees to, within 20 ms. A job that ends pays an append and a comparison.
    """

    def __init__(self, session: Session, impatient: Callable[[], bool] = lambda: False) -> None:
        """``impatient()`` says whether the worker wants to end, database or not."""
        self._session = session
        self._impatient = impatient
        self._finished: deque[ActiveJob] = deque()
        self.held = HeldReports(session.wake)
        """The jobs that have ended and of which it could not be said yet."""
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._waiters = 0
        """Who waits for the turn: mostly nobody, and then there is nothing to notify."""
        self._sending = False
        """Somebody sends, waits or reads. A call that is :attr:`_away` has nobody who does."""
        self._away: tuple[UnderWay, list[ActiveJob]] | None = None
        self._look_at = _NEVER
        """How many have to be finished for who runs jobs to :meth:`attend` to the calls."""
        self._moves = 0
        """Grows with everything that is sent or read."""
        self._called = threading.Event()
        self._asleep = True
        """The thread has to be called; else it is about to look by itself."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gangq-results", daemon=True)
        self.along: Along | None = None
        """How to report what is done together with the next claim, which saves a round trip and a commit."""
        self.ahead: Ahead | None = None
        """The same while other jobs still run."""
        self.flowing = False
        """Jobs are small: the last claim had one gone ahead before it."""
        self.ahead_after = _NEVER
        """How many have to be done before a call goes ahead. Where the thread here looks sooner, these are no small
        jobs, and none goes.
        """
        self.more: Callable[[], object] = bool
        """Whether jobs have been claimed that wait to be run."""

    def start(self) -> None:
        """Start the thread that flushes results of a batch while its next job runs."""
        self._thread.start()

    def stop(self) -> None:
        """Flush no more by itself."""
        self._stop.set()
        self._called.set()
        self.held.stop()

    # -- done ------------------------------------------------------------------------------------------------

    def done(self, job: ActiveJob, result: Any, *, more_follow: bool = False) -> bool:
        """It is done. With ``more_follow`` the word goes out with those of its successors, within 20 ms; else at
        once, and the next claim may go along with it. False: :meth:`attend` has something to do.
        """
        job.result = result
        self._finished.append(job)
        if more_follow:
            if self._asleep:
                if self._away is None:
                    self._look_at = self.ahead_after
                self._call()
            return len(self._finished) < self._look_at or not self._worth_attending()
        self._flush(self.along, self.more)
        return True

    def done_in_child(self, job: ActiveJob, result: Any, along: Along | None) -> None:
        """A job that ran beside the main thread is done. For the thread that ran it; waits for the answer."""
        job.result = result
        self._say_done([job], along)

    def _worth_attending(self) -> bool:
        away = self._away
        if away is not None and not away[0].arrived:
            self._look_at = len(self._finished) + _LOOK_EVERY
            return False
        return self.ahead is not None

    def attend(self) -> None:
        """See to the call under way, if it was answered, and to the next. For who runs the jobs; may take a while.

        Whatever goes wrong here is no fault of the job that has just ended: the thread sees to what is left.
        """
        with self._lock:
            if self._sending:
                self._look_at = len(self._finished) + _LOOK_EVERY
                return
            self._sending = True
        try:
            if self._away is not None:
                self._arrive(go_on=True)
            else:
                self._go_ahead()
        except Exception:
            log.exception("results_fault")
        finally:
            self._sent()

    def flush(self) -> None:
        """Report everything that is done, now, in one call; returns once it was answered."""
        self._flush(None)

    def settle(self) -> bool:
        """The same, unless the call under way brings :attr:`more` to run. False then: the rest is reported later."""
        return self._flush(None, self.more)

    def _flush(self, along: Along | None, unless: Callable[[], object] = bool) -> bool:
        """Send what is finished once the call under way is over; False where there is something else to do first."""
        with self._lock:
            while not unless() and self._sending:
                self._waiters += 1
                try:
                    self._turn.wait()
                finally:
                    self._waiters -= 1
            if unless():
                # What is finished must not wait for the next job's end.
                self._see_to_the_rest()
                return False
            self._sending = True
        try:
            if self._away is not None:
                self._arrive(go_on=along is not None)
                if unless():
                    return False
            self._send(along)
            if along is not None and self.ahead is not None:
                # What was claimed now may be gone ahead of. The server has nothing to do until then.
                self._look_at = _LOOK_EVERY if self.flowing else self.ahead_after
                self.flowing = False
        finally:
            self._sent()
        return True

    def _sent(self) -> None:
        self._moves += 1
        with self._lock:
            self._sending = False
            if self._waiters:
                self._turn.notify_all()
        self._see_to_the_rest()

    def _see_to_the_rest(self) -> None:
        if self._asleep and (self._finished or self._away is not None):
            self._call()

    def _call(self) -> None:
        self._asleep = False
        self._called.set()

    def _go_ahead(self) -> None:
        """Send what is finished, and do not wait."""
        self._look_at = _NEVER
        batch = self._take_finished()
        under_way: UnderWay | None = None
        try:
            under_way = self.ahead(batch) if batch and self.ahead is not None else None
        finally:
            if under_way is None:
                self._finished.extendleft(reversed(batch))
        if under_way is not None:
            self._away = under_way, batch
            # Sooner it would be a smaller one, and its price is that of a call more than that of its jobs.
            self._look_at = self.ahead_after
            self.flowing = True

    def _arrive(self, *, go_on: bool) -> None:
        """Wait for the answer under way. With ``go_on`` the next call goes first, then this is read: the server need
        not wait for that.
        """
        assert self._away is not None
        under_way, batch = self._away
        brought = under_way.receive()
        self._away = None
        self._look_at = _NEVER
        if go_on and brought:
            try:
                self._go_ahead()
            except Exception:
                # What has been answered must be read, whatever becomes of the next call.
                log.exception("results_fault")
        outcomes: Sequence[Outcome] | None = None
        try:
            outcomes = under_way.read()
        finally:
            if outcomes is None:
                # The same is said alone: it may be repeated.
                self._finished.extendleft(reversed(batch))
        if outcomes is not None:
            self._hear(outcomes, batch)
            self._forget(batch)
        with self._turn:
            self._turn.notify_all()  # Who waits for the rest of this call may have something to run now.

    def _take_finished(self) -> list[ActiveJob]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _send(self, along: Along | None) -> None:
        batch = self._take_finished()
        if batch:
            self._say_done(batch, along)

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
            self._asleep = True
            # First this, then a look: who finishes a job does it the other way round, so one sees the other.
            if not self._finished and self._away is None:
                self._called.wait()
            self._asleep = False
            self._called.clear()
            moves = self._moves
            signs.alive()
            if self._stop.wait(_FLUSH_S):
                return
            if moves == self._moves and not self._sending:
                # Whoever runs jobs is at one that takes its time.
                self.flowing = False
                try:
                    self._flush(None)
                except Exception:
                    log.exception("results_fault")

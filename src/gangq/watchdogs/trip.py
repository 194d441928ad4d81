"""How a watchdog ends work in this process: collect evidence, report the trip with one statement, exit.

1. Arm a kernel timer that ends this process at the deadline. Everything after it may hang.
2. Hold the main thread, which runs the handler: it does not get back into Python (:mod:`gangq.watchdogs.pending`).
3. Report the results of jobs that are done.
4. Collect evidence, which reads ``/proc``; write the stacks to standard error, and the trip to the disk.
5. Report the trip to the database (:func:`report`). It may call it off: then undo 1, 2 and 4.
6. Kill the children and exit.

So a trip exits in time whether or not PostgreSQL answers; without an answer the jobs are free when the lease ends.
For the same reason the statement may say when this process will be gone: the timer guarantees it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from gangq import logqueue
from gangq.errors import GangqError, IncarnationEnded, NotFound, StaleToken, Unsupported
from gangq.proc.clock import boottime
from gangq.proc.within import within
from gangq.watchdogs import evidence as evidence_of
from gangq.watchdogs import waits
from gangq.watchdogs.deadman import Deadman
from gangq.watchdogs.family import Family
from gangq.watchdogs.findings import Trip, error_of, sentence
from gangq.watchdogs.numbers import length_s
from gangq.watchdogs.pending import Gate

if TYPE_CHECKING:
    from gangq.client.core import Target

log = logging.getLogger("gangq.watchdogs.trip")

PROMISED_S = 5.0
"""A worker and its supervisor are gone this long after the verdict, whatever the database does."""
_CALLED_OFF = ("held", "notify")
_FACT_S = 2.0
"""What telling and leaving get where the brake cannot hold the trip back (:attr:`ExitCode.may_be_held`)."""
_RESERVE_S = 0.5
"""What is left of the deadline for the exit itself."""
_FIRST_S = 1.0
_AFTER_DEADLINE_S = 0.75
"""The second timer's SIGKILL comes 0.25 s after the deadline; the rest is for the kernel."""
_SHOW_S = 0.2
_DATABASE_S = 2
"""Connect, lock and statement timeout, each."""
_RETRY_S = 0.25
_NOT_OURS = (StaleToken, IncarnationEnded, NotFound)
"""What the database says where the claim is not this worker's any more."""
_LEAVE_NOW_S = 2.0


class TripPath:
    """Carries out trips of work that runs in this process. Thread-safe: one trip at a time.

    - ``database``: a conninfo, URI or `Target`; ``incarnation``: the worker's.
    - ``deadline_s``: the kernel ends this process at most this long after the call, whatever hangs; five seconds are
      documented, the difference is for a host under load.
    - ``first``: called before the evidence is collected, to report results; it gets a second at most.
    - ``ignored``: pids below this process that are left alive; the rest of its children is killed.
    - ``leave(code)``: how to exit [at once].
    - ``keep``: stores the trip until it is reported, for the process that finds this one gone (None: called off).
    """

    def __init__(
        self,
        database: str | Target,
        incarnation: int,
        *,
        leave: Callable[[int], object] | None = None,
        deadline_s: float = 4.5,
        first: Callable[[], object] | None = None,
        ignored: Callable[[], Iterable[int]] | None = None,
        keep: Callable[[Mapping[str, Any] | None], object] | None = None,
        clock: Callable[[], float] = boottime,
    ) -> None:
        """Raises `InvalidInput` for numbers or a database address that make no sense."""
        from gangq.client import core

        self._target = core.target(database, {}) if isinstance(database, str) else database
        self._incarnation = incarnation
        self._leave = leave
        self._deadline_s = length_s("deadline_s", deadline_s, most=60)
        self._first = first
        self._ignored = ignored
        self._keep = keep
        self._clock = clock
        self._one = threading.Lock()
        self._storing = threading.Lock()
        self._to_store: Mapping[str, Any] | None = None
        self._deadman: Deadman | None = None
        self._gate = Gate()

    def __call__(self, trip: Trip, *, job_id: int, token: int) -> bool:
        """End this process with the trip's code.

        Returns only if nothing is to be ended: False, because the database called it off (the class only
        notifies, or too much of the fleet is suspect at once) or because the claim is not this worker's any
        more, which its lease keeper sees to. (True only where ``leave`` returns, as in tests.)
        """
        with self._one:
            began = self._clock()
            unarmed = self._arm(began + self._deadline_s, trip)
            with logqueue.running(*logqueue.WATCHDOGS), self._gate, logqueue.lines_about(trip.job or job_id):
                if unarmed is not None:
                    # Python runs at this moment, so the deadlines below still hold; only a freeze from here on would
                    # not be caught.
                    log.error("trip_without_timer", extra={"error": str(unarmed)})
                called_off = False
                try:
                    self._report_results()
                    evidence = self._collect(trip, job_id, token, began)
                    called_off = self._report(trip, job_id, token, evidence, began)
                except Exception as problem:
                    log.error("trip_fault", extra={"error": repr(problem)})
                if called_off:
                    if self._deadman is not None:
                        self._deadman.disarm()
                    self._put(None)
                    return False
                children = self._children()
                log.critical("leaving", extra={"code": int(trip.code), "reason": trip.message})
                logqueue.flush()
                leave_with(children, int(trip.code), self._leave)
            return True

    # -- the steps -------------------------------------------------------------------------------------------

    def _arm(self, deadline: float, trip: Trip) -> Exception | None:
        """1. Have the kernel end this process at the deadline; returns why it will not."""
        try:
            if self._deadman is None:
                self._deadman = Deadman()
            self._deadman.arm(deadline, int(trip.code))
        except (Unsupported, OSError) as problem:
            return problem
        return None

    def _report_results(self) -> None:
        """3. What is done must not run again. If that cannot be reported, the trip still is."""
        if self._first is None:
            return
        try:
            within(_FIRST_S, self._first, "gangq-trip")
        except Exception as problem:
            log.warning("results_not_reported", extra={"error": repr(problem)})

    def _collect(self, trip: Trip, job_id: int, token: int, began: float) -> dict[str, Any]:
        """4. Collect evidence, and keep it where it survives this process; returns it."""
        evidence = evidence_of.collect(own=True, trip=trip)
        within(_SHOW_S, lambda: _show(str(evidence.get("stacks", ""))), "gangq-trip")
        self._put(
            {
                **self._until(began),
                "job": job_id,
                "token": token,
                "code": int(trip.code),
                "class": trip.cls,
                "error": error_of(trip, evidence),
                "evidence": evidence,
                "devices": list(trip.devices),
            }
        )
        return evidence

    def _report(self, trip: Trip, job_id: int, token: int, evidence: Mapping[str, Any], began: float) -> bool:
        """5. Report the trip; True when it is called off."""
        deadline = began + self._deadline_s
        if not trip.code.may_be_held and self._deadman is not None:
            # The brake does not hold it back: only `notify_only` calls it off. The sooner the process is gone, the
            # sooner the job may run elsewhere; what is not reported in that time its supervisor reports.
            deadline = min(deadline, self._clock() + _FACT_S)
            self._arm(deadline, trip)
        now = self._clock()
        try:
            outcome = report(
                self._target,
                {
                    "incarnation": self._incarnation,
                    "job_id": job_id,
                    "token": token,
                    "code": int(trip.code),
                    "error": error_of(trip, evidence),
                    "evidence": evidence,
                    "devices": trip.devices,
                    "exit_in_s": deadline + _AFTER_DEADLINE_S - now,
                    "class_": trip.cls,
                },
                deadline - _RESERVE_S - now,
            )
        except _NOT_OURS as problem:
            log.warning("trip_of_a_lost_claim", extra={"error": str(problem)})
            return True
        said = "trip_reported" if outcome else "trip_unanswered"
        log.warning(said, extra={"outcome": outcome})
        if outcome is not None:
            self._put({**self._until(began), "reported": True})
        return outcome in _CALLED_OFF

    def _until(self, began: float) -> dict[str, Any]:
        return {"incarnation": self._incarnation, "until": began + PROMISED_S}

    def _put(self, what: Mapping[str, Any] | None) -> None:
        """Store the trip. A disk that is full or hangs does not stop the exit."""
        keep = self._keep
        if keep is None:
            return
        self._to_store = what

        def store() -> None:
            # The disk may hang for longer than is waited here. The last to be stored is the latest all the same.
            with self._storing:
                keep(self._to_store)

        try:
            within(_SHOW_S, store, "gangq-trip")
        except Exception as problem:
            log.warning("trip_not_kept", extra={"error": repr(problem)})

    def _children(self) -> list[int]:
        """6. The processes that the handler started. They are killed with it: a data loader would hold the device."""
        me = os.getpid()
        try:
            ignored = list(self._ignored()) if self._ignored is not None else []
            children = [pid for pid in Family().members({me}, ignored, self._clock()) if pid != me]
        except Exception as problem:
            log.warning("children_left", extra={"error": repr(problem)})
            return []
        ours: list[int] = []
        left: dict[int, str] = {}
        for pid in children:
            try:
                os.kill(pid, 0)
                ours.append(pid)
            except ProcessLookupError:
                continue
            except OSError as problem:
                # It runs as another user.
                left[pid] = str(problem)
        if left:
            log.warning("children_left", extra={"pids": sorted(left), "error": "; ".join(left.values())})
        return ours


def report(target: Target, told: Mapping[str, Any], within_s: float) -> str | None:
    """5. Report a trip to the database (SQL: gangq.trip, which takes ``told``).

    Over a connection of its own: the thread that hangs may hold the worker's. Returns the outcome, None if there was
    none within ``within_s`` seconds. Repeated until then: a repeat changes nothing.

    Raises:
        StaleToken, IncarnationEnded, NotFound: the claim is not this worker's any more.
    """
    limit_s = max(0.0, within_s)
    until = time.monotonic() + limit_s

    def repeat() -> str | None:
        while True:
            try:
                return _execute(target, told)
            except GangqError as problem:
                if not problem.retryable:
                    raise
                log.warning("database_silent", extra={"error": str(problem)})
            if time.monotonic() + _RETRY_S >= until:
                return None
            time.sleep(_RETRY_S)

    try:
        return within(limit_s, repeat, "gangq-trip")
    except _NOT_OURS:
        raise
    except Exception as problem:
        # A schema without the verb, or a login without the right to it: another try would fail too.
        log.error("database_refused", extra={"error": str(problem)})
        return None


def _execute(target: Target, told: Mapping[str, Any]) -> str:
    import psycopg
    from psycopg.conninfo import make_conninfo

    from gangq.client.sync import run
    from gangq.client.verbs import Verbs

    query = Verbs.trip(**told)
    limit_ms = 1000 * _DATABASE_S
    conninfo = make_conninfo(
        target.conninfo,
        connect_timeout=_DATABASE_S,
        tcp_user_timeout=limit_ms,
        application_name="gangq trip",
    )
    kwargs = {**target.kwargs, "autocommit": True, "prepare_threshold": None}
    try:
        connection = psycopg.connect(conninfo, **kwargs)
    except psycopg.Error as problem:
        raise target.unreachable(problem) from problem
    try:
        with connection, connection.transaction():
            # In the transaction and not at connecting: PgBouncer refuses to pass them on.
            connection.execute(
                f"set local lock_timeout = {limit_ms}; set local statement_timeout = {limit_ms}; "
                # Should this host freeze between two messages, its locks must not outlive it by much.
                f"set local idle_in_transaction_session_timeout = {limit_ms}"
            )
            return run(connection, query)
    except psycopg.Error as problem:
        raise target.failed(problem, query.name) from problem


def leave_with(children: Iterable[int], code: int, leave: Callable[[int], object] | None = None) -> None:
    """SIGKILL for these processes and the end of this one, with no bytecode in between.

    A handler that waits for one of them would otherwise go on: its wait returns when the child is dead. All of
    this is one call from Python into C that keeps the GIL, so no other thread gets it again.
    """
    libc = ctypes.PyDLL(None)
    steps: list[Callable[[], object]] = [partial(libc.kill, pid, int(signal.SIGKILL)) for pid in children]
    steps.append(partial(libc._exit, code) if leave is None else partial(leave, code))
    deque(map(methodcaller("__call__"), steps), maxlen=0)


def leave_now(trip: Trip, leave: Callable[[int], object] = os._exit) -> bool:
    """The default of watchdogs for a trip: all stacks to standard error, one line to the
    log, and exit with the trip's code, within two seconds even where standard error is a pipe that is not read.
    """
    with contextlib.suppress(Unsupported, OSError):
        Deadman().arm(boottime() + _LEAVE_NOW_S, int(trip.code))

    def write_evidence() -> None:
        said = sentence(trip, waits.of_handler().as_json())
        _show(f"{evidence_of.stacks()}\ngangq: {trip.cls} ({int(trip.code)}): {said}\n")
        log.critical("leaving", extra={"code": int(trip.code), "reason": said})

    with logqueue.running(*logqueue.WATCHDOGS), Gate():
        try:
            within(_LEAVE_NOW_S / 2, write_evidence, "gangq-trip")
        except Exception as problem:
            log.error("trip_fault", extra={"error": repr(problem)})
        logqueue.flush()
        leave(int(trip.code))
    return True


def _show(stacks: str) -> None:
    """Write the stacks to standard error too: the report may not reach the database."""
    stream = sys.__stderr__ or sys.stderr
    if stream is not None:
        # It may be closed, or a pipe whose reader has ended: the trip is reported all the same.
        with contextlib.suppress(OSError, ValueError):
            stream.write(stacks)
            stream.flush()

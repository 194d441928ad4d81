"""Final reports of jobs that an open transaction holds: repeated in a thread of their own until they are answered."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gangq import logqueue
from gangq.watchdogs import signs
from gangq.worker.jobs import ActiveJob
from gangq.worker.repeating import backoff

log = logging.getLogger("gangq.worker.held")

_FIRST_S = 0.25
_MOST_S = 8.0
"""A try may wait 2 s for a lock on the connection that renews the lease, so tries become rarer."""


class HeldReports:
    """The jobs, each with the call that reports it. Thread-safe; the thread starts with the first job."""

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
        pauses = backoff(_FIRST_S, _MOST_S)
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
                            pauses = backoff(_FIRST_S, _MOST_S)

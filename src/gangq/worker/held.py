"""Last words about jobs that somebody's open transaction holds: said again beside everything else, until taken."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gangq.watchdogs import signs
from gangq.worker.jobs import ActiveJob
from gangq.worker.retry import backoff

log = logging.getLogger("gangq.worker.held")

_FIRST_S = 0.25
_MOST_S = 8.0
"""A try may wait 2 s for a lock, on the connection that renews the lease: the longer it lasts, the rarer they are."""


class HeldReports:
    """The jobs, each with what says its last word. Thread-safe; its thread runs once there is one."""

    def __init__(self, freed: Callable[[], object]) -> None:
        """``freed()`` hears that a job has its last word."""
        self._freed = freed
        self._words: dict[ActiveJob, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __contains__(self, job: ActiveJob) -> bool:
        return job in self._words

    def __len__(self) -> int:
        return len(self._words)

    def add(self, job: ActiveJob, say: Callable[[], bool]) -> None:
        """``say()`` tries once; False: the job is still held."""
        log.warning("report_held", extra={**job.extra, "advice": "a transaction that is open holds this job"})
        with self._lock:
            self._words[job] = say
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gangq-held", daemon=True)
                self._thread.start()
        self._some.set()

    def stop(self) -> None:
        """Try no more."""
        self._stop.set()
        self._some.set()

    def _run(self) -> None:
        waits = backoff(_FIRST_S, _MOST_S)
        while not self._stop.is_set():
            self._some.wait()
            signs.alive()
            if self._stop.wait(next(waits)):
                return
            with self._lock:
                words = list(self._words.items())
            for job, say in words:
                try:
                    said = say()
                except Exception:
                    log.exception("report_fault", extra=job.extra)
                    said = True
                if said:
                    self._freed()
                    with self._lock:
                        del self._words[job]
                        if not self._words:
                            self._some.clear()
                            waits = backoff(_FIRST_S, _MOST_S)

"""Telling running members of a new epoch: another was replaced, or the gang goes on with fewer.

The heartbeat's answer names the epoch of every job. A newer one than the work was told of is looked up with
`barrier` in a thread of its own, for that call may wait and the lease may not. It is handed on once it is
whole; until then, every heartbeat asks again, and the database's wake-up brings the next one forward.
"""

from __future__ import annotations

import logging
import threading

from gangq.errors import GangqError
from gangq.watchdogs import signs
from gangq.worker.barrier import gang_info, who_is_who
from gangq.worker.jobs import ActiveJob
from gangq.worker.ports import PortHolder
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.epochs")


class EpochWatch:
    """Keeps what running members know of their gang up to date."""

    def __init__(self, session: Session, ports: PortHolder) -> None:
        self._session = session
        self._ports = ports
        self._heard = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._behind: dict[int, ActiveJob] = {}
        self._thread = threading.Thread(target=self._run, name="gangq-epochs", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """No more news. The thread ends when the call it is in does."""
        self._stop.set()
        self._heard.set()

    def heard(self, job: ActiveJob, epoch: int | None) -> None:
        """A heartbeat said that this job's gang is in this epoch."""
        gang = job.gang
        if gang is None or epoch is None or epoch <= gang.epoch:
            return
        with self._lock:
            self._behind[job.token] = job
        self._heard.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._heard.wait()
            signs.alive()
            self._heard.clear()
            with self._lock:
                behind, self._behind = self._behind, {}
            for job in behind.values():
                if self._stop.is_set() or job.told or job.reporting:
                    continue
                try:
                    self.look(job)
                except GangqError as problem:
                    # Lost, told to stop, or no answer: the next heartbeat knows which.
                    log.warning("epoch_unknown", extra={**job.extra, "error": str(problem)})
                except Exception:
                    log.exception("epoch_fault", extra=job.extra)

    def look(self, job: ActiveJob) -> None:
        """Ask who is who, and tell the work if the new epoch is whole.

        Raises:
            GangqError: the claim is over, or there was no answer.
        """
        members = who_is_who(self._session, job, self._ports)
        known = job.gang
        if known is None or not members or not members[0].go or members[0].epoch <= known.epoch:
            return
        job.change_gang(gang_info(job, members))

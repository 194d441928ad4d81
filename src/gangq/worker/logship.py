"""Writes a job's output to the database: as text, in chunks, bounded."""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gangq.errors import GangqError
from gangq.proc import bounded_log
from gangq.worker.jobs import ActiveJob
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Registration

log = logging.getLogger("gangq.worker.logs")

EVERY_S = 0.5
_CHUNK = 128 << 10
_FINAL_TRIES = 3


def log_sizes(terms: Registration) -> tuple[int, int]:
    """How many bytes to keep of the beginning and of the end, with room for the line between them."""
    head = terms.log_bytes * 3 // 4
    return head, max(0, terms.log_bytes - head - 128)


class LogReader:
    """Reads a log while it grows. A log that cannot be read (it was removed, the host has no more files) has nothing
    new: that is no reason to end its job.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self, limit: int) -> bytes:
        """What was written since the last call, at most ``limit`` bytes of it."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(limit)
        except OSError:
            return b""
        self._offset += len(data)
        return data

    def last(self, count: int) -> bytes:
        """The last ``count`` bytes as of now."""
        try:
            return bounded_log.last_bytes(str(self._path), count)
        except OSError:
            return b""


class LogShipper:
    """Appends what one job prints, at most twice a second, at most ``log_bytes`` in all.

    The log is for people: losing a piece of it to an outage must never hold up the job, and what cannot be
    decoded is replaced rather than refused.
    """

    def __init__(
        self,
        session: Session,
        job: ActiveJob,
        read: Callable[[int], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read(limit)`` gives what has been printed since its last call, at most ``limit`` bytes of it."""
        self._session = session
        self._job = job
        self._read_new = read
        self._clock = clock
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._left = session.terms.log_bytes
        self._unsent = ""
        self._seq = 0
        self._next = 0.0

    def ship(self) -> None:
        """Send new output, at most twice a second."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + EVERY_S
        self._read()
        self._send()

    def finish(self) -> None:
        """Send the rest, once the job has ended."""
        # One turn for each chunk, and one for what an earlier call could not send.
        for _ in range(2 + self._session.terms.log_bytes // _CHUNK):
            at_end = self._read(final=True)
            for _ in range(_FINAL_TRIES):
                if self._send():
                    break
            if at_end and not self._unsent:
                return

    def _read(self, final: bool = False) -> bool:
        """Whether everything is read that was printed. While something is unsent nothing is read."""
        if self._unsent:
            return False
        data = self._read_new(_CHUNK)
        at_end = len(data) < _CHUNK
        text = self._decoder.decode(data, final and at_end)
        size = len(text.encode())
        if size > self._left:
            # Replacement characters are longer than what they replace; the limit is on what is stored.
            text = text.encode()[: self._left].decode("utf-8", "ignore")
            size = self._left
        self._left -= size
        self._unsent = text
        return at_end

    def _send(self) -> bool:
        if not self._unsent:
            return True
        try:
            self._session.thread_client.append_log(
                job_ids=[self._job.id], tokens=[self._job.token], seqs=[self._seq], chunks=[self._unsent]
            )
        except GangqError as problem:
            log.warning("log_not_stored", extra={**self._job.extra, "error": str(problem)})
            return False
        self._seq += 1
        self._unsent = ""
        return True

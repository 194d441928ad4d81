"""What a job prints: written to the database as text, in chunks, bounded (:class:`LogShipper`); and how what the
handler of an inline job prints is kept for its job as a command's output is (:class:`Capture`).

While an inline worker serves, `sys.stdout` and `sys.stderr` are tees: everything goes where it went before, and
what comes from the running handler goes to its job's log too. A job that writes nothing costs nothing: file and
thread begin with the first write. What a subprocess or a C library writes goes past Python, and past this.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gangq.errors import GangqError
from gangq.proc import bounded_log, statefile
from gangq.proc.bounded_log import BoundedLog
from gangq.worker.jobs import ActiveJob
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import Registration

log = logging.getLogger("gangq.worker.output")

_OWN_THREADS = "gangq-"
_EVERY_S = 0.5
_CHUNK = 128 << 10
_FINAL_TRIES = 3
_FINAL_S = 10.0
"""After so long the rest of the output is not tried again: an outage must not hold up the end of its job."""


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

    def __init__(self, session: Session, job: ActiveJob, read: Callable[[int], bytes]) -> None:
        """``read(limit)`` gives what has been printed since its last call, at most ``limit`` bytes of it."""
        self._session = session
        self._job = job
        self._read_new = read
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._left = session.terms.log_bytes
        self._unsent = ""
        self._seq = 0
        self._next = 0.0

    def ship(self) -> None:
        """Send new output, at most twice a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY_S
        self._read()
        self._send()

    def finish(self, lost: str | None) -> None:
        """Send the rest, once the job has ended. ``lost``: why some of it was not kept; the last line says so."""
        until = time.monotonic() + _FINAL_S
        # One turn for each chunk, one for what an earlier call could not send, and one for the last line.
        for _ in range(3 + self._session.terms.log_bytes // _CHUNK):
            at_end = self._read(final=True)
            for _ in range(_FINAL_TRIES):
                if self._send():
                    break
                if time.monotonic() >= until:
                    return
            if at_end and not self._unsent:
                if lost is None:
                    return
                self._unsent = f"\n[gangq: output is missing: {lost}]\n"[: self._left]
                lost = None

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


class Tee:
    """A text stream in place of another: ``write`` is told of its text, everything else is passed on."""

    def __init__(self, stream: TextIO, write: Callable[[TextIO, str], int]) -> None:
        """``write(stream, text)`` writes, and returns how much."""
        self.stream = stream
        self._write = write

    def write(self, text: str) -> int:
        """Write it."""
        return self._write(self.stream, text)

    def writelines(self, lines: Any) -> None:
        """Write each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @classmethod
    def install(cls, name: str, write: Callable[[TextIO, str], int]) -> Tee:
        """In place of ``sys.stdout`` or ``sys.stderr``, for log handlers that hold that too."""
        tee = cls(getattr(sys, name), write)
        setattr(sys, name, tee)
        _exchange(tee.stream, tee)
        return tee

    def remove(self, name: str) -> None:
        """Put back what was there, unless it has been replaced since."""
        if getattr(sys, name) is self:
            setattr(sys, name, self.stream)
        _exchange(self, self.stream)


def _exchange(old: Any, new: Any) -> None:
    """In all log handlers. Not by setStream, which flushes: what a handler has closed would end the worker here."""
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.stream = new


class Capture:
    """Which job is to be told of what is written; between :meth:`install` and :meth:`remove`.

    One handler runs at a time. Its threads are the one that serves and whatever was started since: not the
    worker's own, nor those that the program had before. A thread that an earlier job has left behind counts
    for the job that runs.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._tees: dict[str, Tee] = {}
        self._job: ActiveJob | None = None
        self._output: Output | None = None

    def install(self) -> None:
        """Put the tees in place, for log handlers that hold one of the streams too. Call it where jobs run."""
        here = threading.current_thread()
        self._others.update(thread for thread in threading.enumerate() if thread is not here)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                continue
            if isinstance(stream, io.TextIOWrapper) and not stream.line_buffering:
                # A pipe (systemd's journal) would get it late, and never where a watchdog ends the process. Standard
                # error is line-buffered already. To flush it here would wait for the thread that logs.
                stream.reconfigure(line_buffering=True)
            self._tees[name] = Tee.install(name, self._write)

    def remove(self) -> None:
        """Put back what was there, unless it has been replaced since."""
        for name, tee in self._tees.items():
            tee.remove(name)
        self._tees.clear()

    def _write(self, stream: TextIO, text: str) -> int:
        written = stream.write(text)
        self.take(text)
        return written

    def begin(self, job: ActiveJob) -> None:
        """Its handler is about to run."""
        self._job = job

    def end(self) -> Output | None:
        """The handler has returned: what it has written, if anything, which is to be finished."""
        with self._lock:
            self._job = None
            output, self._output = self._output, None
        return output

    def take(self, text: str) -> None:
        """Text was written. Never raises."""
        # A fork has the lock in whatever state it was; it is a subprocess, and its output stays out.
        if self._job is None or not text or os.getpid() != self._pid:
            return
        thread = threading.current_thread()
        if thread in self._others or thread.name.startswith(_OWN_THREADS):
            return
        with self._lock:
            job = self._job
            if job is None:
                return
            if self._output is None:
                self._output = Output(self._session, job)
                self._output.begin()
            self._output.write(text)


class Output:
    """The log of one job, from its first write."""

    def __init__(self, session: Session, job: ActiveJob) -> None:
        self._path = session.directory / f"{job.id}-{job.token}.output"
        self._ended = threading.Event()
        self._log: BoundedLog | None = None
        self._shipper = LogShipper(session, job, LogReader(self._path).read_new)
        self._thread = threading.Thread(target=self._ship, name="gangq-output", daemon=True)
        self._session, self._job = session, job

    def begin(self) -> None:
        """Make its file. If that fails a line of the log says so, which is itself written by the handler's thread: it
        has to find this output.
        """
        try:
            self._log = BoundedLog(str(self._path), *log_sizes(self._session.terms))
            self._thread.start()
        except (OSError, RuntimeError) as problem:  # No directory, no space, no more threads.
            self._not_kept(str(problem))

    def write(self, text: str) -> None:
        """Add it."""
        if self._log is not None:
            self._log.write(text.encode("utf-8", "replace"))

    def finish(self) -> None:
        """Send the rest, and leave no file. The job has ended and is not reported yet: no fault of a disk may make it
        a failed one.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._log is not None:
            self._log.finish()
            self._shipper.finish(self._log.error)
            statefile.remove(self._session.directory, self._path.name)
            if self._log.error is not None:
                self._not_kept(self._log.error)

    def _not_kept(self, error: str) -> None:
        log.warning("output_not_kept", extra={**self._job.extra, "error": error})

    def _ship(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._shipper.ship()

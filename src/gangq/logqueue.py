"""One thread writes the log lines of all others, so that no other thread of a worker waits for who reads its log.

Standard error may be a pipe that nobody reads any more. A write into it then never returns, and the thread that logs
would stop: the one that renews the lease, a watchdog, an event loop. So the lines of the library, of asyncio and of
psycopg go into a queue, and the thread ``gangq-log`` hands each of them to the handlers that would have got it. No
thread waits for that one, but the end of the process does for a moment (``wait_written``). When the queue is full,
further lines are dropped, and the next line that is kept says how many, as ``lines_lost``.

A worker queues from its start to its end; a watchdog without a worker as long as its thread runs, and so does a trip:
they are for jobs that hang, and a job may hang in the log. A fork of such a process has no ``gangq-log`` and logs
where it is called. What is logged in a handler's own threads is never queued: it is output of its job, in the order
of its writes.

An application's configuration of logging is as before at the end. Meanwhile its handlers of :data:`LOGGERS` and of
the root logger get the lines; those of a logger below are called where the line is logged.

Which attempt a line is about is known by the thread that logs it, as long as it works for one (:data:`about`): these
lines get its fields. What a line says itself counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

from gangq import context

LOGGERS = ("gangq", "asyncio", "psycopg")
MOMENT_S = 0.2
"""What the end of a process waits for its lines."""
THREAD_NAME = "gangq-log"
about: contextvars.ContextVar[object] = contextvars.ContextVar("gangq_about", default=None)
"""The job that this thread works for: its lines get the fields of its ``extra``, or ``job`` where it has none."""
_OWN_THREADS = "gangq-"
_LINES_KEPT = 1000
_TRACEBACKS = logging.Formatter()


def is_own_thread() -> bool:
    """Whether this is a thread of the library's, and not one of a handler."""
    return threading.current_thread().name.startswith(_OWN_THREADS)


@contextlib.contextmanager
def lines_about(job: object) -> Iterator[None]:
    """What this thread logs is about this job."""
    former = about.set(job)
    try:
        yield
    finally:
        about.reset(former)


def _fields_of(job: object) -> Mapping[str, Any]:
    extra: Mapping[str, Any] | None = getattr(job, "extra", None)
    return {"job": getattr(job, "id", job)} if extra is None else extra


class LogQueue(QueueHandler):
    """Stands in for the handlers of :data:`LOGGERS` while somebody uses it. Thread-safe. To log takes no lock.

    The main thread could hold such a lock while the trip path keeps it from going on
    (:class:`gangq.watchdogs.pending.Gate`), and the trip would wait for it. So two threads that drop a line at the
    same instant may count one.
    """

    queue: SimpleQueue[logging.LogRecord | threading.Event | None]

    def __init__(self, lines_kept: int = _LINES_KEPT) -> None:
        super().__init__(SimpleQueue())
        self.lost = 0
        """Lines dropped since the last one that was kept."""
        self._lines_kept = lines_kept
        self._lock = threading.Lock()
        self._users = 0
        self._thread: threading.Thread | None = None
        self._former: dict[str, tuple[list[logging.Handler], bool]] = {}
        os.register_at_fork(after_in_child=self._after_fork)

    def start(self) -> None:
        """Queue lines until as many calls of :meth:`stop` have come.

        Raises:
            RuntimeError: no thread can be started; nothing has changed.
        """
        with self._lock:
            if not self._users:
                # The handler of a signal may log while its thread is in put(): queue.Queue would wait for itself.
                # A new one, because a thread that was left behind may still write the lines of the last.
                queue: SimpleQueue[Any] = SimpleQueue()
                thread = threading.Thread(target=self._run, args=(queue,), name=THREAD_NAME, daemon=True)
                thread.start()
                self.queue, self._thread = queue, thread
                for name in LOGGERS:
                    logger = logging.getLogger(name)
                    self._former[name] = logger.handlers, logger.propagate
                    # In this order a line of this moment is written twice rather than not at all.
                    logger.handlers, logger.propagate = [self], False
            self._users += 1

    def stop(self) -> None:
        """Take one :meth:`start` back. The last one gives the loggers back what they had, and waits for a moment
        until the lines are written.
        """
        with self._lock:
            if not self._users:
                return  # This is a fork, and it is its parent that has called start().
            self._users -= 1
            if self._users:
                return
            self._give_back()
            thread = self._thread
            self.queue.put(None)
        if thread is not None:
            thread.join(MOMENT_S)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """:meth:`start`, and :meth:`stop` at the end. Where no thread can be started, nothing is queued."""
        try:
            self.start()
        except RuntimeError:
            yield
            return
        try:
            yield
        finally:
            self.stop()

    def wait_written(self, within_s: float = MOMENT_S) -> bool:
        """Before the end of this process: wait until all lines so far are written, for ``within_s`` seconds at most.

        False: they are not. True also where nothing is queued.
        """
        if not self._users:
            return True
        written = threading.Event()
        self.queue.put(written)
        return written.wait(within_s)

    # -- in the thread that logs -----------------------------------------------------------------------------

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue it, without the lock that other handlers take here (why: :class:`LogQueue`); the lines of a handler
        are written at once.
        """
        if (job := about.get()) is not None:
            fields, said = _fields_of(job), vars(record)
            if said.get("job", fields["job"]) == fields["job"]:  # Otherwise it is about another one.
                said.update({**fields, **said})
        if context.runs_handler() and not is_own_thread():
            self._write(record)
        else:
            self.emit(record)
        return True

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy that holds text only: frames of a traceback would keep the memory of failed work."""
        kept = copy.copy(record)
        kept.msg, kept.args = record.getMessage(), None
        if record.exc_info:
            kept.exc_text = record.exc_text or _TRACEBACKS.formatException(record.exc_info)
            kept.exc_info = None
        return kept

    def enqueue(self, record: logging.LogRecord) -> None:
        """Drop it rather than wait."""
        if self.queue.qsize() >= self._lines_kept:
            self.lost += 1
            return
        lost, self.lost = self.lost, 0
        if lost:
            vars(record)["lines_lost"] = lost
        self.queue.put(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a record whose text cannot be made. The usual complaint would go to standard error."""
        del record
        self.lost += 1

    # -- in gangq-log ----------------------------------------------------------------------------------------

    def _run(self, queue: SimpleQueue[logging.LogRecord | threading.Event | None]) -> None:
        while (due := queue.get()) is not None:
            if isinstance(due, threading.Event):
                due.set()
                continue
            try:
                self._write(due)
            except Exception:
                # This line is lost, and what it said of others. Those that follow are not.
                self.lost += 1 + vars(due).get("lines_lost", 0)

    def _write(self, record: logging.LogRecord) -> None:
        own, propagate = self._former[record.name.partition(".")[0]]
        handlers: list[logging.Handler | None] = [*own, *(logging.getLogger().handlers if propagate else [])]
        for handler in handlers or [logging.lastResort]:
            if handler is not None and record.levelno >= handler.level:
                handler.handle(record)

    # -- the application's loggers ---------------------------------------------------------------------------

    def _give_back(self) -> None:
        for name, (handlers, propagate) in self._former.items():
            logger = logging.getLogger(name)
            if self in logger.handlers:  # Otherwise the application has configured this logger anew.
                logger.propagate = propagate
                logger.handlers = [*handlers, *(added for added in logger.handlers if added is not self)]

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._give_back()


_of_process = LogQueue()
"""However many workers and watchdogs a process has, they use one."""
start, stop, running, wait_written = (
    _of_process.start,
    _of_process.stop,
    _of_process.running,
    _of_process.wait_written,
)

"""One thread writes the log lines of all others, so that no other thread of a worker waits for who reads its log.

Standard error may be a pipe that nobody reads any more. A write into it then never returns, and the thread that logs
would stop: the one that renews the lease, a watchdog, an event loop. So a worker's lines go into a queue, and the
thread ``gangq-log`` hands each of them to the handlers that would have got it. No thread waits for that one, but the
end of the process does for a moment (``flush``). When the queue is full, further lines are dropped, and the next
line that is kept says how many, as ``lines_lost``.

Where lines are queued:

- A worker queues the lines of the library, of asyncio and of psycopg from its start to its end (:data:`WORKER`).
- A watchdog without a worker queues its own lines (:data:`WATCHDOGS`) as long as its thread runs, and so does a trip:
  they are for jobs that hang, and a job may hang in the log.
- All else logs where it is called, as any library does. So does a fork of such a process: it has no ``gangq-log``.
- What is logged in a handler's own threads is never queued: it is output of its job, in the order of its writes.

An application's configuration of logging stays as it is. A line passes the levels and filters of its logger in the
thread that logs it; the handlers are looked up when the line is written. Handlers of a logger below those named here
are called where the line is logged.

Which attempt a line is about is known by the thread that logs it, as long as it works for one (:data:`about`): these
lines get its fields. What a line says itself counts.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

from gangq import context

WATCHDOGS = ("gangq.watchdogs",)
WORKER = (
    *WATCHDOGS,
    "gangq.client",
    "gangq.decider",
    "gangq.hooks",
    "gangq.embedded",
    "gangq.gpu",
    "gangq.metrics",
    "gangq.schema",
    "gangq.server",
    "gangq.worker",
    "asyncio",
    "psycopg",
)
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


class LogQueue:
    """Writes the lines of some loggers in a thread of its own. Thread-safe. :meth:`put` takes no lock.

    The main thread could hold such a lock while the trip path keeps it from going on
    (:class:`gangq.watchdogs.pending.Gate`), and the trip would wait for it. So two threads that drop a line at the
    same instant may count one.
    """

    def __init__(self, lines_kept: int = _LINES_KEPT) -> None:
        """Raises RuntimeError when no thread can be started."""
        self.lost = 0
        """Lines dropped since the last one that was kept."""
        self._lines_kept = lines_kept
        # The handler of a signal may log while its thread is in put(): queue.Queue would wait for itself.
        self._due: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._handlers: dict[str, _QueueHandler] = {}
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def attach(self, *loggers: str) -> None:
        """Queue the lines of these loggers and of those below them."""
        for name in loggers:
            if name not in self._handlers:
                self._handlers[name] = _QueueHandler(self, logging.getLogger(name))

    def detach(self) -> None:
        """Give the loggers back what they had."""
        for handler in self._handlers.values():
            handler.detach()
        self._handlers.clear()

    def put(self, record: logging.LogRecord, write: Callable[[logging.LogRecord], object]) -> None:
        """Have the thread call ``write(record)``; drop the record when the queue is full."""
        if self._due.qsize() >= self._lines_kept:
            self.lost += 1
            return
        lost, self.lost = self.lost, 0
        if lost:
            vars(record)["lines_lost"] = lost
        self._due.put(partial(write, record))

    def flush(self, within_s: float = MOMENT_S) -> bool:
        """Wait until all lines so far are written, for ``within_s`` seconds at most. False: they are not."""
        written = threading.Event()
        self._due.put(written.set)
        return written.wait(within_s)

    def close(self) -> None:
        """End the thread once it has written all lines; wait a moment for that. Detach before."""
        self._due.put(None)
        self._thread.join(MOMENT_S)

    def _run(self) -> None:
        while (step := self._due.get()) is not None:
            step()


class _QueueHandler(QueueHandler):
    """Stands in for the handlers of one logger and of those above it.

    1. In the thread that logs, a line passes the levels and filters of its logger, and comes to :meth:`handle`.
    2. There it becomes text (:meth:`prepare`) and is queued (:meth:`enqueue`), or is dropped if the queue is full.
    3. In ``gangq-log`` it goes to the handlers that the logger and those above it have then (:meth:`_write`).

    Where a line is lost, ``LogQueue.lost`` counts it.
    """

    def __init__(self, owner: LogQueue, logger: logging.Logger) -> None:
        super().__init__(owner._due)
        self._owner = owner
        self._logger = logger
        self._own, self._propagate = logger.handlers, logger.propagate
        # In this order a line of this moment is written twice rather than not at all.
        logger.handlers = [self]
        logger.propagate = False

    def detach(self) -> None:
        logger = self._logger
        # Also where the application has configured this logger anew: logging.config removes its handlers, and leaves
        # propagate as it finds it unless it is named.
        logger.propagate = logger.propagate or self._propagate
        if self in logger.handlers:
            logger.handlers = [*self._own, *(added for added in logger.handlers if added is not self)]

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
        self._owner.put(record, self._write_queued)

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a record whose text cannot be made. The usual complaint would go to standard error."""
        del record
        self._owner.lost += 1

    def _write_queued(self, record: logging.LogRecord) -> None:
        try:
            self._write(record)
        except Exception:
            # This line is lost, and what it said of others. Those that follow are not.
            self._owner.lost += 1 + vars(record).get("lines_lost", 0)

    def _write(self, record: logging.LogRecord) -> None:
        handlers: list[logging.Handler | None] = [*self._own, *self._inherited()]
        for handler in handlers or [logging.lastResort]:
            if handler is not None and record.levelno >= handler.level:
                handler.handle(record)

    def _inherited(self) -> Iterator[logging.Handler]:
        logger = self._logger.parent if self._propagate else None
        while logger is not None:
            yield from logger.handlers
            logger = logger.parent if logger.propagate else None


class _Shared:
    """The one queue of a process, however many workers and watchdogs it has: it exists while somebody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._queue: LogQueue | None = None
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.flush)  # A watchdog need not be closed before its program ends.

    def start(self, *loggers: str) -> None:
        """Queue the lines of these loggers until as many calls of :meth:`stop` have come.

        Raises:
            RuntimeError: no thread can be started; nothing has changed.
        """
        with self._lock:
            if self._queue is None:
                self._queue = LogQueue()
            self._queue.attach(*loggers)
            self._users += 1

    def stop(self) -> None:
        """Take one :meth:`start` back. The last one gives the loggers back what they had, and waits for a moment
        until the lines are written.
        """
        with self._lock:
            queue = self._queue
            if queue is None:
                return  # This is a fork, and it is its parent that has called start().
            self._users -= 1
            if self._users:
                return
            self._queue = None
            queue.detach()
        queue.close()

    @contextlib.contextmanager
    def running(self, *loggers: str) -> Iterator[None]:
        """:meth:`start`, and :meth:`stop` at the end. Where no thread can be started, nothing is queued."""
        try:
            self.start(*loggers)
        except RuntimeError:
            yield
            return
        try:
            yield
        finally:
            self.stop()

    def flush(self, within_s: float = MOMENT_S) -> bool:
        """Before the end of this process: wait until all lines are written, for ``within_s`` seconds at most.

        False: they are not. True also where nothing is queued.
        """
        queue = self._queue
        return queue is None or queue.flush(within_s)

    def in_use(self) -> bool:
        """Whether this process queues lines now."""
        return self._queue is not None

    def _after_fork(self) -> None:
        queue, self._queue, self._users, self._lock = self._queue, None, 0, threading.Lock()
        if queue is not None:
            queue.detach()


_shared = _Shared()
start, stop, running = _shared.start, _shared.stop, _shared.running
flush, in_use = _shared.flush, _shared.in_use

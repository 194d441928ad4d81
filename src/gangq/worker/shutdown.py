"""The end of a worker's process, whatever its handlers have left behind.

The interpreter waits for every thread that is no daemon before it ends. A worker has retired by then: its
process would stay for as long as such a thread runs, and do nothing. It would also stay where a log line cannot be
written: its thread holds the lock of a stream that the interpreter flushes at its end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from gangq import logqueue

log = logging.getLogger("gangq.worker.shutdown")

_FLUSH_S = 1.0


def end_soon(code: int, within_s: float = 3.0, leave: Callable[[int], None] = os._exit) -> None:
    """Call before the interpreter is let go: it ends with `code` by itself, or is ended, by `leave(code)`,
    when threads still keep it after `within_s`.

    Threads of idle executors end by themselves within that time. Functions registered with ``atexit`` run
    when all threads do.
    """
    if _left():
        threading.Thread(
            target=_exit_when_late, args=(code, within_s, leave), name="gangq-shutdown", daemon=True
        ).start()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            # A handler has closed what is below it: the interpreter would fail at the same, and end with 120.
            setattr(sys, name, None)


def _left() -> list[threading.Thread]:
    """Threads that keep the process: those that are no daemon, and the one that still writes the worker's log."""

    def keeps(thread: threading.Thread) -> bool:
        return not thread.daemon or (thread.name == logqueue.THREAD_NAME and not logqueue.in_use())

    return [t for t in threading.enumerate() if t is not threading.main_thread() and keeps(t)]


def _exit_when_late(code: int, within_s: float, leave: Callable[[int], None]) -> None:
    until = time.monotonic() + within_s
    for thread in _left():
        thread.join(max(0.0, until - time.monotonic()))
    left = _left()
    if not left:
        return
    names = sorted(thread.name for thread in left if not thread.daemon)
    try:
        # In a thread of its own: one that was left behind may hold the lock of what is flushed.
        flush = threading.Thread(target=_log_and_flush, args=(names,), name="gangq-flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
    finally:
        leave(code)


def _log_and_flush(names: list[str]) -> None:
    if names:
        log.warning(
            "threads_left",
            extra={
                "threads": names,
                "advice": "handlers have started these and not ended them: end them before the handler returns, "
                "or make them daemon=True",
            },
        )
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A handler may have closed it, or put None there.
        if stream is not None and not stream.closed:
            stream.flush()

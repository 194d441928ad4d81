"""The end of a worker's process, whatever its handlers have left behind.

The interpreter waits for every thread that is no daemon before it ends, and for such processes of multiprocessing. A
worker has retired by then: its process would stay for as long as one of them runs, and do nothing. It would also stay
where a log line cannot be written: its thread holds the lock of a stream that the interpreter flushes at its end. So
does a thread of a handler's that prints into a pipe that nobody reads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from functools import partial
from typing import Any

from gangq import logqueue

log = logging.getLogger("gangq.worker.shutdown")

_SAY_S = 0.5
"""How long the line about it may take: a thread that was left behind may hold the lock of the log."""


def end_soon(code: int, within_s: float = 3.0) -> None:
    """Call before the interpreter is let go: it ends with `code` by itself, or is ended when threads or processes
    still keep it after `within_s`, or its standard output or error is not read.

    Those of idle executors end by themselves within that time. Functions registered with ``atexit`` run
    when all threads do.
    """
    flushing = threading.Thread(target=_flush, name="gangq-shutdown", daemon=True)
    try:
        if _left():
            for after_s, step in ((within_s, _say), (within_s + _SAY_S, partial(_exit, code))):
                timer = threading.Timer(after_s, step)
                timer.name, timer.daemon = "gangq-shutdown", True
                timer.start()
        flushing.start()
    except RuntimeError:
        # No thread could end it later.
        _flush()
        _exit(code)
        return
    flushing.join(within_s + _SAY_S)
    if flushing.is_alive():
        os._exit(code)  # Nobody reads them: the interpreter would wait at its end, too.


def _flush() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            # A handler has closed what is below it: the interpreter would fail at the same, and end with 120.
            setattr(sys, name, None)


def _left() -> list[str]:
    """The names of what keeps the process: threads and processes that are no daemon, and the thread that still writes
    the worker's log.
    """

    def keeps(thread: threading.Thread) -> bool:
        return not thread.daemon or (thread.name == logqueue.THREAD_NAME and not logqueue.in_use())

    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread() and keeps(t)]
    return sorted([*threads, *(process.name for process in _processes() if not process.daemon)])


def _processes() -> list[Any]:
    # Not imported for this: most handlers start none.
    multiprocessing = sys.modules.get("multiprocessing")
    return [] if multiprocessing is None else multiprocessing.active_children()


def _say() -> None:
    names = [name for name in _left() if name != logqueue.THREAD_NAME]
    if names:
        log.warning(
            "threads_left",
            extra={
                "threads": names,
                "advice": "handlers have started these threads or processes and not ended them: end them before the "
                "handler returns, or make them daemon=True",
            },
        )


def _exit(code: int) -> None:
    if _left():
        # Those that are daemons too: only the interpreter would end them.
        for process in _processes():
            with contextlib.suppress(OSError):
                process.kill()
        os._exit(code)

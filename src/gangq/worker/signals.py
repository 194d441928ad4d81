"""SIGTERM and SIGINT, noticed even while the main thread is deep inside a library.

A handler runs in the main thread, and Python runs its signal handlers there too: during a long call into C
they would come too late. The C half of Python's signal handling writes to a pipe at once, whatever the main
thread does, and a thread reads it. A handler that uses ``asyncio`` may redirect that pipe, so the Python half
reports as well, and every signal is counted once, by its number of arrival on either path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("gangq.worker.signals")

_WATCHED = (signal.SIGTERM, signal.SIGINT)
_SAME_S = 0.05


class SignalWatch:
    """Calls ``on_stop()`` from its own thread for every SIGTERM or SIGINT."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._pid = os.getpid()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1
        self._thread = threading.Thread(target=self._run, name="gangq-signals", daemon=True)

    def install(self) -> None:
        """Take over the signals; in any other thread than the main one Python allows nothing of the kind."""
        for number in _WATCHED:
            self._former[number] = signal.signal(number, self._handler)
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # What a handler forks is not a worker: there, these signals mean what they always mean.
        os.register_at_fork(after_in_child=self._forked)
        self._thread.start()

    def renew(self) -> None:
        """Take the pipe back from whatever ran in the main thread."""
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def stop(self) -> None:
        """Give the signals back."""
        if not self._former:
            return
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
        os.close(self._write)
        self._thread.join(5)

    def _handler(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            os.write(self._write, bytes([number]))

    def _forked(self) -> None:
        if not self._former:
            return
        signal.set_wakeup_fd(-1)
        for number in _WATCHED:
            signal.signal(number, signal.SIG_DFL)

    def _run(self) -> None:
        last: dict[int, float] = {}
        while data := os.read(self._read, 64):
            for number in set(data):
                if number not in _WATCHED:
                    continue
                now = time.monotonic()
                # The same signal arrives by both paths, microseconds apart.
                if now - last.get(number, -1.0) < _SAME_S:
                    continue
                last[number] = now
                log.info("signal", extra={"signal": signal.Signals(number).name})
                self._on_stop()
        os.close(self._read)

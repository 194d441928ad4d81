"""SIGINT, SIGTERM and SIGHUP as something a loop can wait for."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP while it is entered, instead of breaking off wherever the program is.

    A SIGHUP that was ignored, as nohup does it, stays ignored.

    A KeyboardInterrupt in the middle of a submit would leave a job behind whose id nobody has seen. From the
    `last`th signal on (0: never) KeyboardInterrupt is raised after all: whoever presses it again wants out
    now, also when a call to the database hangs.
    """

    def __init__(self, last: int = 2) -> None:
        self.count = 0
        self._last = last
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        os.set_blocking(self._read, False)
        self._before: list[tuple[signal.Signals, Any]] = []

    def __enter__(self) -> Interrupts:
        # Elsewhere than in the main thread Python sets no handlers: the program is embedded, and not ours.
        if threading.current_thread() is threading.main_thread():
            self._before = [
                (number, signal.signal(number, self._handle))
                for number in _SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        with contextlib.suppress(OSError):
            os.write(self._write, b"!")
        if self._last and self.count >= self._last:
            raise KeyboardInterrupt

    def wait(self, seconds: float, files: Sequence[int] = ()) -> bool:
        """Wait until a signal comes, one of `files` can be read, or the time is up; whether it was a file."""
        until = time.monotonic() + seconds
        ready, _, _ = select.select([self._read, *files], [], [], max(0.0, until - time.monotonic()))
        if self._read in ready:
            with contextlib.suppress(OSError):
                os.read(self._read, 64)
        return any(file in ready for file in files)

"""Hanging up on lines that are acknowledged and never answered: a proxy that hangs, a server that is frozen.

Every thread of a worker may be the one that waits on such a line, the one that registers it too. So this one
belongs to the process and not to an incarnation, and makes no calls itself.
"""

from __future__ import annotations

import logging
import threading

from gangq.client.core import Lines
from gangq.watchdogs import signs

log = logging.getLogger("gangq.worker.lines")

_LOOK_S = 1.0


class LineWatch:
    """Hangs up on connections of the worker's client that have fallen silent."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._stop = threading.Event()
        self.answer_s = 30.0
        """How long an answer may take."""
        self._thread = threading.Thread(target=self._run, name="gangq-lines", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """From here on, who waits waits."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            signs.alive()
            silent = self._lines.hang_up(self.answer_s)
            if silent:
                log.warning("hung_up", extra={"connections": silent, "after_s": self.answer_s})

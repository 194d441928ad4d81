"""What an inline handler forks dies with its worker.

Processes that a handler *executes* inherit the worker's mark and are found by it. One that it only forks
(``multiprocessing`` does) shows the environment the worker itself was started with, without the mark. So the
kernel is asked to send it SIGKILL when the worker dies.

Only for forks of the main thread: the kernel binds this to the *thread* that forked, and a helper
thread of the handler may end long before its children.
"""

from __future__ import annotations

import os
import threading

from gangq.proc import kernel


class ForkGuard:
    """Sees to the forks of this process from :meth:`install` to :meth:`stop`."""

    def __init__(self) -> None:
        self._worker = os.getpid()
        self._forker_is_main = False

    def install(self) -> None:
        """Watch forks from now on."""
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def stop(self) -> None:
        """Leave forks alone from now on. The hook itself stays: Python has no way back."""
        self._worker = 0

    def _before(self) -> None:
        self._forker_is_main = threading.current_thread() is threading.main_thread()

    def _in_child(self) -> None:
        # Not for children of children: a daemon's double fork must not end with the process in the middle.
        if self._forker_is_main and self._worker and os.getppid() == self._worker:
            kernel.die_with_parent()

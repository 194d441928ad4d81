"""What a handler forks is no worker: signals mean there what they always mean, and it dies with its worker.

:func:`restore_signals` is called for the worker and for the process of a handler, :class:`ForkGuard` is the worker's.
Processes that a handler *executes* inherit the worker's mark and are found by it. One that it only forks
(``multiprocessing`` does) shows the environment the worker itself was started with, without the mark. So the
kernel is asked to send it SIGKILL when the worker dies.

Only for forks of the main thread: the kernel binds this to the *thread* that forked, and a helper
thread of the handler may end long before its children.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

from gangq.proc import kernel


def restore_signals(signals: Sequence[signal.Signals], active: Callable[[], bool] = lambda: True) -> None:
    """In what this process forks from now on, give these signals their default actions while ``active()``.

    They are blocked during the fork. One that came before the fork has given up this process's handlers would be
    lost there, and a pool that ends its processes with SIGTERM would wait for ever; or it would be written into the
    wake-up descriptor of this process.
    """
    masks = threading.local()

    def before() -> None:
        masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.former)

    def in_child() -> None:
        if active():
            signal.set_wakeup_fd(-1)
            for number in signals:
                signal.signal(number, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


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

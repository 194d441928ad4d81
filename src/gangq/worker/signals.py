"""SIGTERM and SIGINT, noticed even while the main thread is deep inside a library.

A handler runs in the main thread, and Python runs its signal handlers there too: during a long call into C they
would come too late. The C half of Python's signal handling writes to a pipe at once, whatever the main thread does,
and the control loop reads it. A handler that uses ``asyncio`` may redirect that pipe, so the Python half reports as
well. Both are counted apart, because the second report of one signal may come long after the first (when the
library call returns), and a second SIGTERM means something else than the first.

What a handler forks is no worker: signals mean there what they always mean (:func:`restore_signals`), and it dies
with its worker (:class:`ForkGuard`).
"""

from __future__ import annotations

# For its getsignal(), called after every job: signal.getsignal() takes microseconds longer, because it first
# tries to convert the function to an enum member.
import _signal  # type: ignore[import-not-found]
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from gangq.proc import kernel

if TYPE_CHECKING:
    from gangq.worker.control import Control

log = logging.getLogger("gangq.worker.signals")

_WATCHED = (signal.SIGTERM, signal.SIGINT)
_RESTORED = (signal.SIGALRM, signal.SIGCHLD, signal.SIGPIPE)
"""After a job these do what they did before it. Otherwise a handler's alarm would raise in the worker, a default
SIGPIPE would end the worker when a client hangs up, and with SIGCHLD ignored every command of a later job would seem
to end with 0.
"""
_getsignal, _set_wakeup_fd = _signal.getsignal, _signal.set_wakeup_fd
_FROM_PYTHON = 0x80


class Signals(Protocol):
    """What has signals stop a worker."""

    def install(self) -> None:
        """Take them over. Called in the main thread."""

    def renew(self) -> None:
        """Take them back from whatever a handler has installed. Called after every job, in any thread."""

    def stop(self) -> None:
        """Give them back. Called in the main thread."""


class SignalWatch:
    """Calls ``on_stop()`` in the control loop for every SIGTERM or SIGINT."""

    def __init__(self, control: Control, on_stop: Callable[[], None]) -> None:
        self._control = control
        self._on_stop = on_stop
        self._counts = {False: 0, True: 0}
        self._handled = 0
        self._pid = os.getpid()
        self._read: int
        self._write: int
        self._former: dict[signal.Signals, Any] = {}
        self._actions: dict[int, Any] = {}
        """What each signal does between two jobs."""
        self._timed = False
        """Whether the program that this worker runs in has a timer of its own."""
        self._former_fd = -1
        # The bound method is made once, so `is` tells whether it is still the installed handler.
        self._installed = self._handler

    def install(self) -> None:
        """Take over the signals; in any other thread than the main one Python allows nothing of the kind."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in _WATCHED:
            self._former[number] = signal.signal(number, self._installed)
        actions = {int(number): _getsignal(number) for number in (*_WATCHED, *_RESTORED)}
        # None: C code has installed it, and Python cannot install it again.
        self._actions = {number: action for number, action in actions.items() if action is not None}
        self._timed = signal.getitimer(signal.ITIMER_REAL)[0] > 0
        self._former_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        restore_signals(_WATCHED, lambda: bool(self._former))
        self._control.watch(self._read, self._arrived)

    def renew(self) -> None:
        """Take the signals and the pipe back from whatever ran in the main thread: frameworks install handlers
        of their own and leave them behind, and a worker that misses SIGTERM would be killed with its next job. A
        handler's alarm ends with it.
        """
        if not self._former:
            return
        try:
            if not self._timed:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for number, action in self._actions.items():
                found = _getsignal(number)
                # What a library hears of its own processes by, as PyTorch's loader of data does, it installs once.
                if found is not action and not (number == signal.SIGCHLD and callable(found)):
                    signal.signal(number, action)
            _set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            return  # Another thread than the main one.

    def stop(self) -> None:
        """Give the signals back."""
        if not self._former:
            return
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}
        self._control.unwatch(self._read)
        os.close(self._write)
        os.close(self._read)

    def _handler(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            os.write(self._write, bytes([number | _FROM_PYTHON]))

    def _arrived(self) -> None:
        for byte in os.read(self._read, 64):
            if byte & ~_FROM_PYTHON in _WATCHED:
                self._counts[bool(byte & _FROM_PYTHON)] += 1
        while self._handled < max(self._counts.values()):
            self._handled += 1
            log.info("signal", extra={"nth": self._handled})
            self._on_stop()


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
    """Has what this process forks die with it, from :meth:`install` to :meth:`stop`.

    Processes that a handler *executes* inherit the worker's mark and are found by it. One that it only forks
    (``multiprocessing`` does) shows the environment the worker itself was started with, without the mark. So the
    kernel is asked to send it SIGKILL when the worker dies.

    Only for forks of the main thread: the kernel binds this to the *thread* that forked, and a helper thread of the
    handler may end long before its children.
    """

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

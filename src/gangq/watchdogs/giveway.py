"""Has the main thread let the other threads run, when they had no turn for too long.

A handler that makes calls which hold the GIL, one after another, starves the library's threads: each gap between
two calls is one turn for one of them, and to renew a lease takes many. So a timer of the kernel, which needs no
turn, asks CPython for a pending call (``Py_AddPendingCall``): the main thread makes it as soon as it is back in
bytecode, and in it the thread sleeps for a moment without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

from gangq.watchdogs.deadman import KernelTimer, load_libc

_MOMENT_S = 0.05
_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_kept: list[object] = []
"""Every callback there was: a call of it may be pending long after its timer is off."""


class GiveWay:
    """One timer on the monotonic clock; at :meth:`at` the main thread is asked to give way, once."""

    def __init__(self, then: Callable[[], object]) -> None:
        """``then`` is called in the main thread before it sleeps; it must not wait for a lock.

        Raises:
            Unsupported: this platform has no such timers.
        """
        self._then = then
        self._usleep = ctypes.CDLL(None).usleep
        callback = _CALLBACK(self._give_way)
        _kept.append(callback)
        function = ctypes.cast(ctypes.pythonapi.Py_AddPendingCall, ctypes.c_void_p).value
        argument = ctypes.cast(callback, ctypes.c_void_p).value
        # Py_AddPendingCall takes a second argument, which it hands to the callback. The timer gives it none, so the
        # callback uses none.
        self._timer = KernelTimer.calling(load_libc(), function, argument, time.CLOCK_MONOTONIC)

    def at(self, instant: float) -> None:
        """Ask at this instant (monotonic seconds), and not at the one given before."""
        self._timer.set(instant)

    def off(self) -> None:
        """Do not ask."""
        self._timer.off()

    def _give_way(self, _: object) -> int:
        try:
            self._then()
            # Not time.sleep(): a signal's handler would run in it, and what that raises belongs to the program.
            self._usleep(int(_MOMENT_S * 1e6))
        except BaseException as problem:
            # A signal arrived in this moment and its handler raised. ctypes would print that and go on.
            with contextlib.suppress(AttributeError):
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(threading.get_ident()), ctypes.py_object(type(problem))
                )
        return 0

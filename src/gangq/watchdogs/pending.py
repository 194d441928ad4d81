"""What the main thread, in which handlers run, is made to do before its next bytecode.

CPython has a queue of pending calls (``Py_AddPendingCall``): the main thread makes them as soon as it is back in
bytecode, whatever call into C it was in. The watchdogs use it for three things:

- :func:`ask` has the main thread call a function once: by that :class:`gangq.watchdogs.steps.PythonSteps` sees
  whether it came back.
- :class:`Gate` holds the main thread there, while the end of this process is being prepared.
- :class:`GiveWay` has it let the other threads run, when they had no turn for too long.

The queue has 32 places (Python 3.11) and refuses what does not fit, so the library takes one for all of these: the
call that waits there calls whatever was asked for by the time it is made. And each watchdog with a job takes that
place at every look. So a trip finds it taken, whoever has filled the rest of the queue.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from gangq.watchdogs.deadman import KernelTimer, load_libc

_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_MUTEX_BYTES = 128
"""More than any C library's ``pthread_mutex_t``."""
_GIVE_WAY_S = 0.05

_due: dict[Callable[[], object], None] = {}
_placed = False
"""Whether the call of :func:`ask` is in the queue."""
_placing = threading.RLock()
_kept: list[object] = []
"""Callbacks that timers put into the queue: one may be called long after its timer is off."""


def ask(act: Callable[[], object]) -> bool:
    """Have the main thread call ``act()`` before its next bytecode, once, however often it was asked meanwhile.

    ``act`` must not wait for a lock of Python's, and may be called within the thread that asks. False: the queue is
    full of other programs' calls. Then ``act`` is called with the next that finds a place.
    """
    global _placed
    _due[act] = None
    with _placing:
        if _placed:
            return True
        # First, because the main thread may make the call at once.
        _placed = True
        if ctypes.pythonapi.Py_AddPendingCall(_FUNCTION, _ARGUMENT) == 0:
            return True
        _placed = False
        return False


def keep_place() -> bool:
    """Take the library's place in the queue. False: it is full."""
    return ask(_nothing)


def _nothing() -> None:
    return None


class _Call:
    """The library's call in the queue: C asks whether this object is true."""

    def __bool__(self) -> bool:
        """Call what was asked for. In the main thread, perhaps within :func:`ask`, so without its lock.

        A signal may arrive meanwhile. What its handler raises belongs to the program, and is raised there.
        """
        global _placed
        _placed = False
        raised: BaseException | None = None
        while _due:
            try:
                act, _ = _due.popitem()
                act()
            except BaseException as problem:
                raised = problem
        if raised is not None:
            raise raised
        return False  # To the queue, anything but 0 is an error.


# Not a callback of ctypes, which would print an exception and return nothing of meaning.
_FUNCTION = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
_ARGUMENT = ctypes.py_object(_Call())


class Gate:
    """``with Gate(): ...`` keeps the main thread from going on, unless it is the one that waits here.

    A thread cannot be stopped from outside. But the call into C that the main thread is in may return, and nothing
    after it is run until the gate is open: no line of the handler, and no handler of a signal. It then goes on as if
    nothing had been. For one use after another.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._shut: ctypes.Array[ctypes.c_char] | None = None
        """Locked by the thread that shut the gate; None while it is open."""

    def __enter__(self) -> Gate:
        if threading.current_thread() is not threading.main_thread():
            # Not a lock of Python's, which a signal would interrupt: its handler would run, and might raise. One for
            # each use, because the main thread never gives it back: that too would be bytecode for a handler.
            mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
            self._libc.pthread_mutex_init(mutex, None)
            self._libc.pthread_mutex_lock(mutex)
            self._shut = mutex
            ask(self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        mutex, self._shut = self._shut, None
        if mutex is not None:
            self._libc.pthread_mutex_unlock(mutex)

    def _hold(self) -> None:
        mutex = self._shut
        if mutex is not None:
            self._libc.pthread_mutex_lock(mutex)


class GiveWay:
    """One timer on the monotonic clock; at :meth:`at` the main thread is asked to give way, once.

    A handler that makes calls which hold the GIL, one after another, starves the library's threads: each gap between
    two calls is one turn for one of them, and to renew a lease takes many. So a timer of the kernel, which needs no
    turn, puts a call into the queue, and in it the main thread sleeps for a moment without the GIL.
    """

    def __init__(self, then: Callable[[], object]) -> None:
        """``then`` is called in the main thread before it sleeps; it must not wait for a lock.

        Raises:
            Unsupported: this platform has no such timers.
        """
        self._then = then
        self._usleep = ctypes.CDLL(None).usleep
        callback = _CALLBACK(self._in_time)
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

    def _in_time(self, _: object) -> int:
        ask(self._give_way)
        return 0

    def _give_way(self) -> None:
        self._then()
        # Not time.sleep(): a signal's handler would run in it.
        self._usleep(int(_GIVE_WAY_S * 1e6))

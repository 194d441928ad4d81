"""Ends this process at a deadline, even if no Python code runs any more.

An inline handler may be in a C library that holds the GIL. Then no Python thread and no Python signal handler runs,
while the lease runs out, and the work must be dead by then. So kernel timers on ``CLOCK_BOOTTIME`` end the process.
They are moved ahead with every renewed lease, which takes some microseconds, and fire without any Python code.

Two of them, because each works where the other does not:

* At the deadline ``SIGEV_THREAD`` has libc start a thread on ``_exit`` itself, with the exit code as its
  argument. It gives a chosen code, and it works for PID 1 of a container, to whom the kernel delivers no
  SIGKILL sent from inside. But it needs memory for that thread, and a process that is not stopped (SIGSTOP).
* A quarter second later ``SIGEV_SIGNAL`` sends a plain SIGKILL. It needs neither.

Optionally a third, a grace earlier, raises a signal on which ``faulthandler`` writes every thread's stack,
again without the interpreter: what it was doing when it was killed is then in the log.

Timers do not survive ``exec`` and are not inherited by ``fork``: a forked child is not killed by its
parent's.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from typing import IO

from gangq.errors import Unsupported
from gangq.proc.clock import boottime

_SIGEV_SIGNAL = 0
_SIGEV_THREAD = 2
_TIMER_ABSTIME = 1
_KILL_AFTER_S = 0.25


class _Sigevent(ctypes.Structure):
    # The value is an int or a pointer. As a pointer-sized number its low half is the int in the register that
    # _exit reads, on either byte order.
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 64),
    ]


class _Itimerspec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class KernelTimer:
    """One POSIX timer on this clock."""

    def __init__(self, libc: ctypes.CDLL, event: _Sigevent, clock: int) -> None:
        self._libc = libc
        self._id = ctypes.c_void_p()
        if libc.timer_create(clock, ctypes.byref(event), ctypes.byref(self._id)) != 0:
            code = ctypes.get_errno()
            raise Unsupported(f"this kernel gives no timer on clock {clock}: {os.strerror(code)}")
        # Made once: of a worker that runs one small job after another, every job sets its timers and takes them back.
        self._spec = _Itimerspec(0, 0, 0, 0)
        self._settime = functools.partial(
            libc.timer_settime, self._id, _TIMER_ABSTIME, ctypes.byref(self._spec), None
        )

    @classmethod
    def calling(
        cls, libc: ctypes.CDLL, function: int | None, argument: int | None, clock: int
    ) -> KernelTimer:
        """One that has libc start a thread on the C function at this address."""
        event = _Sigevent(value=argument, signo=0, notify=_SIGEV_THREAD, function=function)
        return cls(libc, event, clock)

    def set(self, at: float) -> None:
        """Fire at this instant, at once if it is past. For one thread at a time."""
        self._spec.at_s, self._spec.at_ns = divmod(int(at * 1e9), 1_000_000_000)
        if self._settime() != 0:
            raise OSError(ctypes.get_errno(), "timer_settime")

    def off(self) -> None:
        """Do not fire."""
        self._spec.at_s = self._spec.at_ns = 0
        if self._settime() != 0:
            raise OSError(ctypes.get_errno(), "timer_settime")

    def delete(self) -> None:
        """Give it back to the kernel."""
        self._libc.timer_delete(self._id)


class Deadman:
    """Kills this process at an instant that :meth:`arm` keeps moving ahead. Thread-safe."""

    def __init__(
        self,
        clock: str = "boottime",
        *,
        dump_file: IO[str] | None = None,
        dump_signal: int | None = None,
    ) -> None:
        """Create the timers, unarmed.

        ``clock`` is what :meth:`arm` counts on: ``boottime``, as leases do, or ``monotonic``, which stands
        still while the host sleeps (seconds of ``time.monotonic()``).
        ``dump_file`` (a real file, kept open) is where stacks go when :meth:`arm` is given a grace; the
        signal for it is ``dump_signal`` [SIGRTMIN + 7], which nothing else in this process may use.

        Raises:
            Unsupported: not Linux, or a C library without POSIX timers.
            ValueError: another clock; all others can be set back.
        """
        if clock not in ("boottime", "monotonic"):
            raise ValueError(f"clock {clock!r}: leases are counted on 'boottime', silence on 'monotonic'")
        if not sys.platform.startswith("linux"):
            raise Unsupported(
                f"inline work needs Linux timers to keep its lease; this is {sys.platform}: use Linux"
            )
        self._libc = load_libc()
        self._now = boottime if clock == "boottime" else time.monotonic
        self._clock = time.CLOCK_BOOTTIME if clock == "boottime" else time.CLOCK_MONOTONIC
        self._exit_address = ctypes.cast(self._libc._exit, ctypes.c_void_p).value
        self._lock = threading.Lock()
        self._code: int | None = None
        # What the timers are set to: the arguments of arm(), () for off, None for not known.
        self._set_to: tuple[float, ...] | None = ()
        self._exit_timer: KernelTimer | None = None
        event = _Sigevent(signo=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        self._kill_timer = KernelTimer(self._libc, event, self._clock)
        self._dump_timer: KernelTimer | None = None
        if dump_file is not None:
            number = signal.SIGRTMIN + 7 if dump_signal is None else dump_signal
            faulthandler.register(number, file=dump_file, all_threads=True)
            event = _Sigevent(signo=number, notify=_SIGEV_SIGNAL)
            self._dump_timer = KernelTimer(self._libc, event, self._clock)

    def arm(self, at: float, code: int = 77, *, dump_before_s: float = 0.0) -> None:
        """Die with exit status ``code`` at this instant (seconds of the clock), at once if it is past.

        Again with a later instant to live on; again with the same arguments costs next to nothing. With
        ``dump_before_s`` > 0 and a ``dump_file``, stacks are written that much earlier. Should the exit itself not
        be possible (stopped, or no memory), SIGKILL follows 0.25 s later.
        """
        wanted = (at, code, dump_before_s)
        if wanted == self._set_to:
            # Without the lock: a thread that changes the timers sets this to None first, or comes after this call.
            return
        with self._lock:
            if wanted == self._set_to:
                return
            # Not known until all of it is done: the next call then starts afresh, should this one fail.
            self._set_to = None
            self._set(at, code, dump_before_s)
            self._set_to = wanted

    def disarm(self) -> None:
        """Live on. :meth:`arm` may follow."""
        with self._lock:
            if self._set_to == ():
                return
            self._set_to = None
            for timer in (self._dump_timer, self._exit_timer, self._kill_timer):
                if timer is not None:
                    timer.off()
            self._set_to = ()

    def _set(self, at: float, code: int, dump_before_s: float) -> None:
        # A past instant counts from now: else SIGKILL, due at once too, would take the exit code away.
        at = max(at, self._now())
        # The later one first: at no instant between these calls may the process be without a switch.
        self._kill_timer.set(at + _KILL_AFTER_S)
        if self._exit_timer is None or code != self._code:
            # The kernel may refuse it: then the former timer is still there, with its own code.
            made = KernelTimer.calling(self._libc, self._exit_address, code, self._clock)
            former, self._exit_timer, self._code = self._exit_timer, made, code
            self._exit_timer.set(at)
            if former is not None:
                former.delete()
        else:
            self._exit_timer.set(at)
        if self._dump_timer is not None and dump_before_s > 0:
            self._dump_timer.set(max(at - dump_before_s, 1e-6))
        elif self._dump_timer is not None:
            self._dump_timer.off()


def load_libc() -> ctypes.CDLL:
    """The C library, or the ``librt`` that held its timers before glibc 2.34 (which also finds ``_exit``).

    Its calls keep the GIL: to set a timer takes a microsecond, to win the GIL back from a handler that holds it may
    take minutes.
    """
    for name in (None, "librt.so.1"):
        try:
            library = ctypes.PyDLL(name, use_errno=True)
            if hasattr(library, "timer_create"):
                return library
        except OSError:
            continue
    raise Unsupported("this C library has no timer_create: run workers with glibc or musl on Linux")

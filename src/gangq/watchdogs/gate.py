"""Keeps the handler's thread from going on while the end of this process is being prepared.

A thread cannot be stopped from outside. But the main thread, in which handlers run, makes pending calls before its
next bytecode, and one that does not return holds it right there: the call into C that it is in may return, and
nothing after it is run. It holds no lock, and once the gate is open it goes on as if nothing had been.
"""

from __future__ import annotations

import ctypes
import threading

_LOOK_S = 0.01
_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_kept: list[object] = []
"""Every callback there was: a call of it may be pending long after its gate is gone."""


class Gate:
    """For one thread that is not the main one, and one use after another: ``with Gate(): ...``."""

    def __init__(self) -> None:
        self._closed = False
        self._usleep = ctypes.CDLL(None).usleep
        self._callback = _CALLBACK(self._hold)
        _kept.append(self._callback)

    def __enter__(self) -> Gate:
        if threading.current_thread() is not threading.main_thread():
            self._closed = True
            ctypes.pythonapi.Py_AddPendingCall(self._callback, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = False

    def _hold(self, _: object) -> int:
        while self._closed:
            # Without the GIL, and no wait of Python's: the handler of a signal would run in it.
            self._usleep(int(_LOOK_S * 1e6))
        return 0

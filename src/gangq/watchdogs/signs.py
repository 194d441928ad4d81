"""Signs of life of this process: every thread of the library gives one whenever it runs.

Whether Python still runs cannot be left to one thread. While a handler makes calls that hold the GIL, one after
another, a dozen threads wait for each gap between two of them, and any of them may get it. Each proves the same.
"""

from __future__ import annotations

from collections.abc import Callable

_listeners: tuple[Callable[[], object], ...] = ()


def alive() -> None:
    """This thread runs. Cheap, takes no lock, never waits: for loops, and for every beat of a job."""
    for listener in _listeners:
        listener()


def listen(listener: Callable[[], object]) -> None:
    """From now on ``listener()`` is called with every sign, in whatever thread gives it."""
    global _listeners
    _listeners = (*_listeners, listener)


def forget(listener: Callable[[], object]) -> None:
    """Call it no more."""
    global _listeners
    _listeners = tuple(known for known in _listeners if known != listener)

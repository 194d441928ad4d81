"""Garbage collection, which a pass does without."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_passes: set[object] = set()
"""Those that are under way in this process."""
_was_on = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing in this process is searched for garbage meanwhile; decorates a function as well.

    A pass makes very many objects and no cycles. The collector would walk the whole board again and again: that took
    a third of the time on 300 hosts.
    """
    global _was_on
    this = object()
    with _lock:
        if not _passes:
            _was_on = gc.isenabled()
        _passes.add(this)
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _passes.discard(this)
            if _was_on and not _passes:
                gc.enable()


def _in_child() -> None:
    # A handler may fork while another thread of its worker decides. In the child that thread is gone.
    global _lock
    _lock = threading.RLock()
    if _passes and _was_on:
        gc.enable()
    _passes.clear()


os.register_at_fork(after_in_child=_in_child)

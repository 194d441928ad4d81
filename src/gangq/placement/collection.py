"""Garbage collection, which a pass does without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing in this process is searched for garbage meanwhile; decorates a function as well.

    A pass makes very many objects and no cycles. The collector would walk the whole board again and again: that took
    a third of the time on 300 hosts.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

"""A call with a time limit, for what may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, act: Callable[[], T], name: str) -> T | None:
    """Call ``act()`` in a thread of this name and return its result, or raise what it raised.

    None if it takes longer than ``limit_s`` seconds (the thread then goes on, and its result is dropped), or if no
    thread can be started.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(act())
        except Exception as problem:
            failed.append(problem)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return done[0] if done else None

"""Trying again: how long to wait in between, and which errors are worth it."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from gangq.errors import (
    Busy,
    DatabaseUnreachable,
    GangqError,
    IncarnationEnded,
    InvalidInput,
    NotAllowed,
    NotFound,
    StaleToken,
    WrongIsolation,
    WrongState,
)

log = logging.getLogger("gangq.worker.repeating")

TRANSIENT = (Busy, DatabaseUnreachable)
"""What may be gone a moment later: a lock held too long, a restart, a failover, a cut line."""

ANSWERS = (InvalidInput, NotFound, StaleToken, WrongState, IncarnationEnded, NotAllowed, WrongIsolation)
"""What the same call would be told again."""

_PATIENCE_S = 15.0
"""How long to repeat a call that met anything else. While a migration rebuilds the code, calls in flight find
functions gone that are there again a moment later.
"""

T = TypeVar("T")


def backoff(first_s: float = 0.05, most_s: float = 1.0) -> Iterator[float]:
    """Waiting times in seconds: doubling from ``first_s`` to ``most_s``, each with half of it random.

    Random, because a whole fleet notices a restart in the same instant and must not come back in one.
    """
    wait = first_s
    while True:
        yield wait * (0.5 + random.random() / 2)
        wait = min(most_s, wait * 2)


def until_answered(
    call: Callable[[], T],
    what: str,
    give_up: Callable[[], bool],
    pause: threading.Event | None = None,
    answers: tuple[type[GangqError], ...] = ANSWERS,
) -> T | None:
    """Repeat ``call`` until the database answers, and return the answer; None once ``give_up()`` says so.

    Only for calls that may be repeated: every one that carries a token or a request id is. ``pause`` ends the
    waiting between two tries early when set. Errors that are among `answers` (a stale token, say) are raised at
    once, and unknown ones after 15 s.
    """
    pauses = backoff()
    until: float | None = None
    while True:
        try:
            return call()
        except answers:
            raise
        except GangqError as problem:
            if not isinstance(problem, TRANSIENT):
                now = time.monotonic()
                until = now + _PATIENCE_S if until is None else until
                if now >= until:
                    raise
            if give_up():
                log.warning("gave_up", extra={"call": what, "error": str(problem)})
                return None
            log.warning("call_repeated", extra={"call": what, "error": str(problem)})
            (pause or threading.Event()).wait(next(pauses))

"""Which errors of a handler are tried again, and when."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gangq.durations import Duration, seconds
from gangq.errors import Fail, InvalidInput, RetryLater

_DOUBLINGS = 30


@dataclass(frozen=True)
class Again:
    """What follows from an error: whether to try again, and after how many seconds (None: the queue's backoff)."""

    retryable: bool
    delay_s: float | None = None


AGAIN = Again(True)
NEVER = Again(False)


@dataclass(frozen=True)
class Retry:
    """How often a task is tried, how long it waits before it is tried again, and after which errors.

    - `attempts`: how many in all, 1 to 1000 [the queue's].
    - `backoff`: a `Duration` before each further attempt, or two of them, "10s..10m": doubled from the first to the
      second. Half of each is random. [The queue's.]
    - `on`: only after these exceptions it is tried again [after all]. `never`: not after these.

    The worker that caught the error applies it. A lost worker or a trip of a watchdog is no error of the handler:
    those have counters of their own (`max_crashes`, `max_trips`).
    """

    attempts: int | None = None
    backoff: Duration | None = None
    on: tuple[type[BaseException], ...] = ()
    never: tuple[type[BaseException], ...] = ()

    def __post_init__(self) -> None:
        if self.attempts is not None and not (
            isinstance(self.attempts, int)
            and not isinstance(self.attempts, bool)
            and 1 <= self.attempts <= 1000
        ):
            raise InvalidInput(f"attempts is {self.attempts!r}: 1 to 1000 are possible")
        for name in ("on", "never"):
            object.__setattr__(self, name, _classes(getattr(self, name), name))
        self._pauses()

    def _pauses(self) -> tuple[float, float] | None:
        """The first and the longest pause, seconds."""
        if self.backoff is None:
            return None
        parts: list[Any] = [self.backoff]
        if isinstance(self.backoff, str):
            parts = self.backoff.split("..")
        if len(parts) > 2:
            raise InvalidInput(f'backoff is {self.backoff!r}: say "10s", or "10s..10m" for doubling')
        found = [seconds(part, f"backoff {self.backoff!r}", most=1e7) for part in parts]
        if found[0] > found[-1]:
            raise InvalidInput(f"backoff is {self.backoff!r}: the first pause is longer than the longest")
        return found[0], found[-1]

    def after(self, problem: BaseException, attempt: int) -> Again:
        """What follows from this error of the attempt with this number, from 1."""
        if isinstance(problem, self.never) or (self.on and not isinstance(problem, self.on)):
            return NEVER
        pauses = self._pauses()
        if pauses is None:
            return AGAIN
        doubled = pauses[0] * 2.0 ** min(max(attempt - 1, 0), _DOUBLINGS)
        return Again(True, min(pauses[1], doubled) * random.uniform(0.5, 1.0))


def after(policy: Retry | None, problem: BaseException, attempt: int) -> Again:
    """What follows from an error of a handler whose task has this policy."""
    if isinstance(problem, RetryLater):
        return Again(True, problem.delay_s)
    if isinstance(problem, Fail):
        return NEVER
    return AGAIN if policy is None else policy.after(problem, attempt)


def _classes(given: Any, name: str) -> tuple[type[BaseException], ...]:
    listed = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, type)) else (given,)
    for one in listed:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise InvalidInput(f"{name} holds {one!r}: list classes of exceptions, {name}=(OSError,)")
    return listed

"""How far a run is, and about how long it will go on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

Step = tuple[str, str]
"""A measure and a system."""


class Progress:
    """Steps that are taken again in every round. A step's time is guessed from its own earlier rounds, else from the
    same measure of other systems, else from all steps so far.
    """

    def __init__(self, steps: Sequence[Step], rounds: int, now: Callable[[], float] = time.monotonic) -> None:
        self._left = list(steps) * rounds
        self._total = len(self._left)
        self._rounds = rounds
        self._now = now
        self._began = self._step_began = now()
        self._took: dict[Step, list[float]] = {}

    def begin(self, step: Step) -> str:
        """A step begins; returns the time so far, the place in the run, and a guess of what is left."""
        self._step_began = self._now()
        place = self._total - len(self._left) + 1
        left = "" if not self._took else f", about {_human(self.left_s())} left"
        return f"{self._step_began - self._began:5.0f} s  {place}/{self._total}{left}"

    def end(self, step: Step) -> None:
        """It has ended."""
        self._took.setdefault(step, []).append(self._now() - self._step_began)
        self._left.remove(step)

    def left_s(self) -> float:
        """Seconds that the steps left will take, about."""
        return sum(self._guess(step) for step in self._left)

    def _guess(self, step: Step) -> float:
        alike = [took for known, each in self._took.items() if known[0] == step[0] for took in each]
        every = [took for each in self._took.values() for took in each]
        return statistics.mean(self._took.get(step) or alike or every or [0.0])


def _human(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

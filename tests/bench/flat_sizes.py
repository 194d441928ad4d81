"""How much of everything the measures of flatness take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlatSizes:
    """``beats_s`` is the ``--beats-s`` of the command line: ten minutes show what a minute may hide."""

    few: int = 10_000
    waiting: int = 1_000_000
    finished: int = 10_000_000
    turns: int = 12
    asleep: int = 100_000
    due: int = 50
    held_s: float = 60.0
    window_s: float = 5.0
    clients: int = 64
    burst_s: float = 4.0
    bursts: int = 3
    polls: int = 10
    workers: int = 2_000
    beats_s: float = 60.0
    idle_s: float = 30.0


FULL_FLAT = FlatSizes()
QUICK_FLAT = FlatSizes(
    waiting=100_000, finished=500_000, turns=5, asleep=20_000, due=12, held_s=6.0, window_s=1.5,
    burst_s=1.5, bursts=2, polls=3, beats_s=20.0, idle_s=10.0,
)  # fmt: skip

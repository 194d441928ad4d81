"""What a pass decides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one member or job goes."""

    worker: int
    """The incarnation."""
    devices: tuple[int, ...] = ()
    role: int = 0
    ends_by: float | None = None
    """A single job's place: nothing that may end later is to be put there, because a planned start needs it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why something does not start now, with the numbers the gate that refused it had in hand."""

    gate: str
    need: float = 0
    have: float = 0
    of: str = ""
    """What is needed and had: ``gpus``, ``workers``, ``room``, ``jobs`` ..."""
    limit: float | None = None
    """Of a limit, what it is: so much less ``have`` is used."""
    where: str = ""
    """The queue, host or domain that these numbers are of."""
    holders: tuple[str, ...] = ()
    """The units or asks that hold it."""
    at: float | None = None
    """When that will be another way, as far as it can be told."""


@dataclass(slots=True)
class Decision:
    """What becomes of one ask. Seats now, or a planned start, or units told to stop, and why the rest waits."""

    ask: str
    seats: tuple[Seat, ...] = ()
    """A gang: all its members, ranks in order. Single jobs: a place each."""
    planned: tuple[Seat, ...] = ()
    starts_at: float | None = None
    """When the planned seats are free."""
    stop: tuple[str, ...] = ()
    """Units that are told to stop for it; for a move, the unit itself."""
    lost_s: tuple[float, ...] = ()
    """The work that each of them loses: seconds times its GPUs."""
    refused: Refused | None = None
    """Why it waits, or why more of its jobs do."""

    @property
    def action(self) -> str:
        """``start``, ``stop``, ``plan``, ``move`` or ``wait``."""
        if self.seats:
            return "start"
        if self.stop:
            return "move" if self.stop == (self.ask,) else "stop"
        return "plan" if self.planned else "wait"

    def to_json(self) -> dict[str, Any]:
        """As ``gangq.apply`` takes it; what is empty is left out."""
        said = {"ask": self.ask, "action": self.action, **asdict(self)}
        return {name: value for name, value in said.items() if value not in (None, ())}

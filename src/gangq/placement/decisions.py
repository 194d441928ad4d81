"""What a pass decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gangq.placement.gates import Gate

HOLDERS = 8
"""How many units or asks are named that something waits for."""


class Seat(NamedTuple):
    """Where one member or job goes."""

    worker: int
    """The incarnation."""
    devices: tuple[int, ...] = ()
    role: int = 0
    ends_by: float | None = None
    """A single job's place: nothing that may end later is to be put there, because a planned start needs it."""
    min_priority: int | None = None
    """A single job's place: others that wait for its room have this priority, so no lower one may fill it."""
    refills: bool | None = None
    """A single job's place: whether the next job of its kind may follow there."""
    place: int | None = None
    """The open place that this is already."""


class Short(NamedTuple):
    """Something that one more member lacks on a worker."""

    of: str
    """``slots``, ``memory_mb``, ``cpus``, ``gpus``, ``linked GPUs``."""
    need: float
    have: float
    """What is free of it there, once as many as fit have theirs."""


class Refused(NamedTuple):
    """Why something does not start now, with the numbers that the gate had in hand."""

    gate: Gate
    need: float = 0
    have: float = 0
    of: str = ""
    """What is needed and had: ``gpus``, ``workers``, ``room``, ``jobs`` ..."""
    limit: float | None = None
    """Of a limit, what it is: so much less ``have`` is used."""
    where: str = ""
    """The queue, host or domain that these numbers are of."""
    holders: tuple[str, ...] = ()
    """The units or asks that hold it; of room, on the worker ``nearest``. Of `workers` and `infeasible`, the workers
    that serve it and take no new work now.
    """
    nearest: str = ""
    """The worker that is nearest to having room for one more member."""
    short: tuple[Short, ...] = ()
    """All that one more member lacks there."""
    plans: tuple[str, ...] = ()
    """The asks whose planned starts keep some of the room that it has; at most so much is ``left`` for this one."""
    left: float | None = None
    at: float | None = None
    """The moment of a planned start: of the one that needs the room, or of its own; or when a rate allows it."""
    may_stop: tuple[str, ...] = ()
    """Units that may be told to stop for it later, once they have run their minimum time."""
    may_stop_at: float | None = None
    """When that is."""


class End(NamedTuple):
    """The end of something that a planned start waits for."""

    unit: str
    by: str
    """What its moment rests on: as ``Unit.ends_by``; ``plan``: what waits itself, and starts before."""


class Refill(NamedTuple):
    """A place whose job may be followed by the next of its kind."""

    place: int
    min_priority: int = -1000


@dataclass(slots=True)
class Decision:
    """What becomes of one ask: seats now, or units told to stop, or a planned start; and why the rest waits.

    Of single jobs some may have seats and the first of the others a planned start.
    """

    ask: str
    seats: tuple[Seat, ...] = ()
    """A gang: all its members, ranks in order. Single jobs: a place each."""
    planned: tuple[Seat, ...] = ()
    starts_at: float | None = None
    """When the planned seats are free."""
    after: tuple[End, ...] = ()
    """What has to end on the planned seats' workers before, the last first."""
    stop: tuple[str, ...] = ()
    """Units that are told to stop for it; for a move, the unit itself."""
    lost_s: tuple[float, ...] = ()
    """The work that each of them loses: seconds times its GPUs."""
    refused: Refused | None = None
    """Why it waits, or why more of its jobs do."""
    refills: tuple[Refill, ...] = ()
    """Of single jobs: the places that its kind may go on using."""

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
        return {"ask": self.ask, "action": self.action, **_said(self)}


def _said(value: Any) -> Any:
    # dataclasses.asdict copies each number and string with copy.deepcopy: that took four fifths of this.
    if (names := _NAMES.get(type(value))) is not None:
        return {name: _said(one) for name in names if (one := getattr(value, name)) is not None and one != ()}
    return [_said(one) for one in value] if isinstance(value, tuple) else value


_NAMES = {kind: [*kind.__annotations__] for kind in (Decision, Seat, Refused, Short, End, Refill)}

"""Places: which of them stay open, and what may follow in them.

A place is refilled by its worker without another pass. So it stays open only while that is what a pass would
decide: while nothing that comes before its kind waits for the same worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from gangq.placement.decisions import Decision, Refill, Seat

if TYPE_CHECKING:
    from gangq.placement.board import Ask, Board, Kind, Place

LOWEST = -1000
"""No priority is lower."""


class Rivals:
    """What waits, in the order in which a pass came to it.

    A rival of a kind of single jobs, on workers of one class, is what waits for room that such a worker could give,
    or for a limit that counts the jobs of that kind. In a place no warm model lets a job pass a rival: a pass may.
    """

    def __init__(self, kinds: Mapping[int, Kind]) -> None:
        self._kinds = kinds
        self._waiting: dict[str, tuple[Ask, str, str]] = {}
        self._kinds_waiting: set[int] = set()
        self._blocked: dict[tuple[int, int], bool] = {}
        self._floors: dict[tuple[int, int], int] = {}

    def add(self, ask: Ask, queue: str = "", key: str = "") -> None:
        """It waits, for a limit of this queue or limit key or else for room; what was added before it comes first."""
        self._waiting.setdefault(ask.id, (ask, queue, key))
        self._kinds_waiting.add(ask.kind)

    def waits(self, kind: int) -> bool:
        """Whether jobs of this kind wait."""
        return kind in self._kinds_waiting

    def is_blocked(self, kind: int, class_id: int) -> bool:
        """Whether a rival comes before the first job of this kind that waits; if none waits, whether there is any."""
        if (kind, class_id) not in self._blocked:
            first = next((ask for ask in self._rivals(kind, class_id, itself=True)), None)
            self._blocked[kind, class_id] = first is not None and first.kind != kind
        return self._blocked[kind, class_id]

    def floor(self, kind: int, class_id: int) -> int:
        """The highest priority of its rivals: no job of a lower one may go ahead of them."""
        if (kind, class_id) not in self._floors:
            rivals = self._rivals(kind, class_id)
            self._floors[kind, class_id] = max((ask.priority for ask in rivals), default=LOWEST)
        return self._floors[kind, class_id]

    def _rivals(self, kind: int, class_id: int, itself: bool = False) -> Iterator[Ask]:
        """In their order; ``itself``: with the asks of this kind."""
        own = self._kinds[kind]
        for ask, queue, key in self._waiting.values():
            if ask.kind == kind:
                if itself:
                    yield ask
            elif queue or key:
                if key == own.limit_key if key else f"{own.queue}.".startswith(f"{queue}."):
                    yield ask
            elif any(class_id in role.serves for role in self._kinds[ask.kind].roles):
                yield ask


class Places:
    """The places of a board: which are the seats of what was decided, and which are refilled."""

    def __init__(self, board: Board, rivals: Rivals) -> None:
        self._rivals = rivals
        self._classes = {worker.id: worker.class_id for worker in board.workers}
        running = {unit.id for unit in board.units if not unit.leaving}
        self._vacant: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
        self._filled: dict[int, list[Place]] = defaultdict(list)
        """By kind, those whose job runs on, until it has been said which of them are refilled."""
        for place in board.places:
            if not place.job:
                self._vacant[place.worker, place.kind, place.devices].append(place.id)
            elif place.job in running and place.worker in self._classes:
                self._filled[place.kind].append(place)

    def seats(self, seats: Sequence[Seat], ask: Ask) -> tuple[Seat, ...]:
        """The seats of single jobs as places: which open one each is already, and what may follow there."""
        return tuple(self._seat(seat, ask) for seat in seats)

    def _seat(self, seat: Seat, ask: Ask) -> Seat:
        class_id = self._classes[seat.worker]
        same = self._vacant[seat.worker, ask.kind, seat.devices]
        # The job that a place is opened for may fill it in any case.
        return seat._replace(
            place=same.pop(0) if same else None,
            refills=not self._rivals.is_blocked(ask.kind, class_id),
            min_priority=min(self._rivals.floor(ask.kind, class_id), ask.priority),
        )

    def refills(self, ask: Ask) -> tuple[Refill, ...]:
        """The places in which the next job of its kind may follow: said with the first decision about that kind."""
        classes = ((place, self._classes[place.worker]) for place in self._filled.pop(ask.kind, ()))
        return tuple(
            Refill(place.id, min_priority=self._rivals.floor(ask.kind, class_id))
            for place, class_id in classes
            if self._rivals.waits(ask.kind) and not self._rivals.is_blocked(ask.kind, class_id)
        )


def closed_places(board: Board, decisions: Sequence[Decision]) -> list[int]:
    """The open places of a board that nothing of what was decided uses any more."""
    used = {seat.place for decision in decisions for seat in decision.seats}
    used |= {refill.place for decision in decisions for refill in decision.refills}
    return [place.id for place in board.places if place.id not in used]

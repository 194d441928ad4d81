"""Places: which of them stay open, and what may follow in them.

A place is refilled by its worker without another pass. So it stays open only while that is what a pass would
decide: while nothing that comes before its kind waits for the same worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gangq.placement.decisions import Decision, Refill, Seat

if TYPE_CHECKING:
    from gangq.placement.board import Ask, Board, Kind, Place

LOWEST = -1000


class Rivals:
    """What waits for room, in the order in which a pass came to it."""

    def __init__(self, kinds: Mapping[int, Kind]) -> None:
        self._kinds = kinds
        self._waiting: dict[str, tuple[Ask, str]] = {}
        self._kinds_waiting: set[int] = set()
        self._found: dict[tuple[int, int], tuple[bool, int]] = {}

    def add(self, ask: Ask, limited: str = "") -> None:
        """It waits, for a limit of the queue ``limited`` or else for room; what was added before it comes first."""
        self._waiting.setdefault(ask.id, (ask, limited))
        self._kinds_waiting.add(ask.kind)

    def waits(self, kind: int) -> bool:
        """Whether jobs of this kind wait."""
        return kind in self._kinds_waiting

    def to(self, kind: int, class_id: int) -> tuple[bool, int]:
        """Whether anything that comes before this kind waits for a worker of this class, or for the same limit; and
        the highest priority of what comes after it, of which no job of a lower one may go ahead. A warm model passes
        nobody here: a pass may let it.
        """
        if (kind, class_id) not in self._found:
            before, highest, own = False, LOWEST, False
            for ask, limited in self._waiting.values():
                if ask.kind == kind:
                    own = True
                elif (
                    f"{self._kinds[kind].queue}.".startswith(f"{limited}.")
                    if limited
                    else any(class_id in role.serves for role in self._kinds[ask.kind].roles)
                ):
                    before = before or not own
                    highest = max(highest, ask.priority)
            self._found[kind, class_id] = before, highest
        return self._found[kind, class_id]


class Places:
    """The places of a board: which are the seats of what was decided, and which are refilled."""

    def __init__(self, board: Board, rivals: Rivals) -> None:
        self._rivals = rivals
        self._classes = {worker.id: worker.class_id for worker in board.workers}
        running = {unit.id for unit in board.units if not unit.leaving}
        self._vacant: dict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
        self._filled: dict[int, list[Place]] = defaultdict(list)
        """By kind, those whose job runs on."""
        for place in board.places:
            if not place.job:
                self._vacant[place.worker, place.kind, place.devices].append(place.id)
            elif place.job in running and place.worker in self._classes:
                self._filled[place.kind].append(place)

    def keep(self, decision: Decision, ask: Ask) -> None:
        """Say of each seat of a single job which open place it is already; and of the places of its kind, with the
        first decision about that, which are refilled.
        """
        decision.seats = tuple(self._keep(seat, ask) for seat in decision.seats)
        for place in self._filled.pop(ask.kind, ()):
            before, highest = self._rivals.to(ask.kind, self._classes[place.worker])
            if not before and self._rivals.waits(ask.kind):
                decision.refills += (Refill(place.id, min_priority=highest),)

    def _keep(self, seat: Seat, ask: Ask) -> Seat:
        before, highest = self._rivals.to(ask.kind, self._classes[seat.worker])
        same = self._vacant[seat.worker, ask.kind, seat.devices]
        # The job that a place is opened for may fill it in any case.
        return replace(
            seat,
            place=same.pop(0) if same else None,
            refills=not before,
            min_priority=min(highest, ask.priority),
        )


def closed_places(board: Board, decisions: Sequence[Decision]) -> list[int]:
    """The open places of a board that nothing of what was decided uses any more."""
    used = {seat.place for decision in decisions for seat in decision.seats}
    used |= {refill.place for decision in decisions for refill in decision.refills}
    return [place.id for place in board.places if place.id not in used]

"""Boards as they would be: what ``gangq plan`` asks about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from gangq.placement.board import Board, Kind, Worker

Change = Mapping[str, Any]
"""What somebody asks about: ``{"cancel": {"gang": 7}}``."""
Preview = Mapping[str, Any]
"""What ``gangq.preview`` says of a change, which it has checked."""


def edit(board: Board, changes: Sequence[Change], previews: Sequence[Preview]) -> Board:
    """The board with these changes: first those of queues and of what waits, then cancels, then workers."""
    for change, preview in sorted(
        zip(changes, previews, strict=True), key=lambda both: _VERBS.index(_verb(both[0]))
    ):
        board = _EDITS[_verb(change)](board, change, preview)
    return board


def _verb(change: Change) -> str:
    return next(verb for verb in _VERBS if verb in change)


def quota(board: Board, change: Change, _: Preview) -> Board:
    """Other limits of a queue, or paused or not; each limit given replaces the one there is."""
    given = change["quota"]
    fields = {"max_running_gangs": "max_gangs", "max_running_jobs": "max_jobs"}
    new = {fields.get(name, name): value for name, value in given.items() if name != "queue"}
    return board._replace(
        queues=tuple(q._replace(**new) if q.name == given["queue"] else q for q in board.queues)
    )


def priority(board: Board, change: Change, preview: Preview) -> Board:
    """Another priority of a gang that waits or is placed; one that waits behind all that is shown is added."""
    id, value = f"g{change['priority']['gang']}", change["priority"]["value"]
    asks = board.asks
    if preview.get("ask") and all(ask.id != id for ask in asks):
        more = Board.from_json({"format": board.format, "now": 0, "asks": [preview["ask"]]}).asks
        asks += tuple(ask for ask in more if any(kind.id == ask.kind for kind in board.kinds))
    return board._replace(
        asks=tuple(ask._replace(priority=value) if ask.id == id else ask for ask in asks),
        units=tuple(
            unit._replace(priority=value) if id in (unit.id, unit.part_of) else unit for unit in board.units
        ),
    )


def cancel(board: Board, _: Change, preview: Preview) -> Board:
    """Without a job or a gang, whether it waits or has stopped, and without what is kept for it."""
    if not preview.get("light"):
        return _without(board, {preview["unit"]})
    queues = (
        q._replace(light_jobs=q.light_jobs - 1) if q.name == preview["queue"] else q for q in board.queues
    )
    return board._replace(queues=tuple(queues))


def submit(board: Board, _: Change, preview: Preview) -> Board:
    """With one gang more, which waits behind all others. Its roles name the workers that serve them: a class of which
    only some do becomes two.
    """
    data = {"format": board.format, "now": 0, "kinds": [preview["kind"]], "asks": [preview["ask"]]}
    new = Board.from_json(data)
    roles = new.kinds[0].roles
    for role in roles:
        board = _split_classes(board, role.serves)
    kind = new.kinds[0]._replace(
        roles=tuple(
            role._replace(serves=frozenset(w.class_id for w in board.workers if w.id in role.serves))
            for role in roles
        ),
    )
    return board._replace(kinds=(*board.kinds, kind), asks=(*board.asks, *new.asks))


def remove_host(board: Board, change: Change, _: Preview) -> Board:
    """Without a host and what is placed on it: a gang with a member there has stopped everywhere, and seats of which
    one is there are kept no more.
    """
    gone = {worker.id for worker in board.workers if worker.host == change["remove_host"]}
    there = {
        unit.part_of or unit.id for unit in board.units if any(hold.worker in gone for hold in unit.holds)
    }
    units = tuple(unit for unit in board.units if not {unit.id, unit.part_of} & there)
    kept = tuple(kept for kept in board.kept if all(hold.worker not in gone for hold in kept.holds))
    return board._replace(workers=tuple(w for w in board.workers if w.id not in gone), units=units, kept=kept)


def add_workers(board: Board, _: Change, preview: Preview) -> Board:
    """With new idle workers. Those that serve the same are of one class."""
    classes: dict[frozenset[tuple[int, int]], int] = {}
    first = max((worker.class_id for worker in board.workers), default=0) + 1
    added: list[Worker] = []
    for one in preview["workers"]:
        serves = frozenset((kind, role) for kind, role in one["serves"])
        class_id = classes.setdefault(serves, first + len(classes))
        new = Board.from_json({"format": board.format, "now": 0, "workers": [one["worker"]]})
        added.append(new.workers[0]._replace(class_id=class_id))

    def extended(kind: Kind) -> Kind:
        roles = (
            role._replace(serves=role.serves | {c for serves, c in classes.items() if (kind.id, n) in serves})
            for n, role in enumerate(kind.roles)
        )
        return kind._replace(roles=tuple(roles))

    kinds = tuple(extended(kind) for kind in board.kinds)
    return board._replace(workers=(*board.workers, *added), kinds=kinds)


_EDITS: dict[str, Callable[[Board, Change, Preview], Board]] = {
    "quota": quota,
    "priority": priority,
    "submit": submit,
    "cancel": cancel,
    "remove_host": remove_host,
    "add_workers": add_workers,
}
_VERBS = [*_EDITS]
"""In the order in which they are made."""


def _without(board: Board, gone: Set[str]) -> Board:
    return board._replace(
        asks=tuple(ask for ask in board.asks if ask.id not in gone),
        units=tuple(unit for unit in board.units if unit.id not in gone and unit.part_of not in gone),
        kept=tuple(kept for kept in board.kept if kept.ask not in gone),
    )


def _split_classes(board: Board, workers: Set[int]) -> Board:
    """The same board, on which each class lies wholly among these workers or wholly among the others."""
    inside = {worker.class_id for worker in board.workers if worker.id in workers}
    outside = {worker.class_id for worker in board.workers if worker.id not in workers}
    first = max((worker.class_id for worker in board.workers), default=0) + 1
    twins = {class_id: first + n for n, class_id in enumerate(sorted(inside & outside))}
    if not twins:
        return board

    def extended(kind: Kind) -> Kind:
        roles = (
            role._replace(serves=role.serves | {twins[c] for c in role.serves if c in twins})
            for role in kind.roles
        )
        return kind._replace(roles=tuple(roles))

    return board._replace(
        workers=tuple(
            w._replace(class_id=twins[w.class_id]) if w.id in workers and w.class_id in twins else w
            for w in board.workers
        ),
        kinds=tuple(extended(kind) for kind in board.kinds),
    )

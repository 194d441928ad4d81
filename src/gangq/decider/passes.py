"""A pass: the board is read, decided on here, and what was decided is carried out by the database, part by part."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gangq.client.rows import PassRow, ReplayRow
from gangq.client.verb import Steps
from gangq.client.verbs import Verbs
from gangq.errors import GangqError
from gangq.placement.board import Board
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision
from gangq.placement.explain import told
from gangq.placement.gates import RATE
from gangq.placement.places import closed_places

PART = 50
"""How many decisions that change something one transaction carries out: as long as that takes, the workers they are
about cannot claim."""
MOST = 1000
"""How many there are in a part at most."""
ROUNDS = 20
"""How many passes follow one another before the next tick has its turn."""
REST = 3
"""Between two passes is so many times what the first has taken, up to `REST_MOST_S`. So deciding takes no more than a
quarter of a core, unless a pass takes longer than a third of a second."""
REST_MOST_S = 1.0
"""So that what a pass has come too early for need not wait long for the next one. The price: where a pass takes 2 s,
deciding takes two thirds of a core."""


@dataclass(frozen=True)
class Passed:
    """What came of a pass: of each decision that changes something done, stale, busy, or why it was refused."""

    outcomes: dict[str, str]
    placed: int
    again: bool
    """Somebody has asked for another one meanwhile, or something was busy."""
    next_in_s: float | None = None
    """When a rate allows the next start; None: none holds anything back."""


def run_passes() -> Steps[Passed]:
    """Decide until nobody has asked for more meanwhile; the last pass says whether something is left."""
    for _ in range(ROUNDS):
        began = time.monotonic()
        passed = yield from run_pass()
        if not passed.again:
            break
        yield min(REST_MOST_S, REST * (time.monotonic() - began))
    return passed


def run_pass() -> Steps[Passed]:
    """Read the board, decide, and carry it out."""
    text = yield from Verbs.board()
    seen = Board.from_json(json.loads(text))
    decided = decide(seen)
    about: dict[str, Any] = {
        "digest": hashlib.md5(text.encode()).hexdigest(),
        "asked": seen.asked,
        "now": seen.now,
    }
    outcomes: dict[str, str] = {}
    again = _sees_more(seen, decided)
    parts = list(_parts(decided))
    for n, part in enumerate(parts, 1):
        failed = any(one.refused and one.refused.gate == "error" for one in part)
        more = {"board": text} if failed or (seen.recorded and n == 1) else {}
        report = yield from Verbs.apply(
            pass_=seen.pass_number,
            decisions=told(seen, part),
            part=n,
            last=n == len(parts),
            closes=closed_places(seen, decided) if n == 1 else [],
            seen=about | more,
        )
        outcomes |= report.outcomes
        again = again or report.again
        if not report.accepted:
            break
    placed = sum(outcomes.get(one.ask) == "done" for one in decided if one.action == "start")
    opens = [one.refused.at for one in decided if one.refused and one.refused.gate == RATE]
    next_in_s = min((max(0.0, at - seen.now) for at in opens if at is not None), default=None)
    return Passed(outcomes, placed, again, next_in_s)


def _sees_more(board: Board, decided: Sequence[Decision]) -> bool:
    """Whether all that was shown of a kind starts, and there may be more of it."""
    waits = {one.ask for one in decided if one.action != "start" or one.refused is not None}
    left = {ask.kind for ask in board.asks if ask.id in waits}
    return not left.issuperset(board.cut)


def _parts(decided: Sequence[Decision]) -> Iterator[list[Decision]]:
    """What changes something first, because no plan goes before it is known what could start. Then what is only
    noted, plans first: `apply` numbers those of one part.
    """
    changes = [decision for decision in decided if decision.action in ("start", "stop", "move")]
    notes = [one for action in ("plan", "wait") for one in decided if one.action == action]
    while len(changes) > PART:
        yield changes[:PART]
        del changes[:PART]
    while len(changes) + len(notes) > MOST:
        yield changes + notes[: MOST - len(changes)]
        del notes[: MOST - len(changes)]
        changes = []
    yield changes + notes


def replayed(written: Iterable[PassRow]) -> list[ReplayRow]:
    """Decide on recorded boards once more, and compare. `written`: parts of passes, oldest first."""
    by_pass: dict[int, list[PassRow]] = {}
    for part in written:
        by_pass.setdefault(part.pass_, []).append(part)
    return [_again(parts) for parts in by_pass.values()]


def _again(written: Sequence[PassRow]) -> ReplayRow:
    first = written[0]
    then = {one["ask"]: one for part in written for one in part.decisions}
    count = sum(1 + len(one.get("alike", ())) for one in then.values())
    row = ReplayRow(at=first.at, digest=first.digest or "", decisions=count, same=None, difference=None)
    board = next((part.board for part in written if part.board is not None), None)
    if board is None:
        return row._replace(difference="its board was not recorded")
    try:
        seen = Board.from_json(board)
    except GangqError as problem:
        return row._replace(difference=f"its board cannot be read: {problem}")
    parts = json.loads(json.dumps([told(seen, part) for part in _parts(decide(seen))]))
    now = {one["ask"]: one for part in parts for one in part}
    names = dict.fromkeys([*then, *now])
    apart = [
        (n, then.get(name), now.get(name))
        for n, name in enumerate(names, 1)
        if then.get(name) != now.get(name)
    ]
    if not apart:
        return row._replace(same=True)
    n, was, is_now = apart[0]
    return row._replace(
        same=False, difference=f"decision {n} of {count} was {_said(was)} and is {_said(is_now)}"
    )


def _said(decision: dict[str, Any] | None) -> str:
    return "none" if decision is None else json.dumps(decision)

"""A decision in words: what is needed, what there is, who holds it, and what would change that.

Made in the pass and stored by `apply`; `gangq explain` prints the stored sentence (141_explain_verdict.sql).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gangq.durations import in_short
from gangq.placement.board import Board
from gangq.placement.decisions import Decision, Refused
from gangq.placement.gates import ERROR, PLANNED_START, RATE, Words, listed

MOST = 400
"""How long a sentence may be."""


def told(board: Board, decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Decisions as ``gangq.apply`` takes them, with words. What waits for the same as another one of its kind is only
    named there, as ``alike``: hundreds wait behind one.
    """
    kinds = {ask.id: ask.kind for ask in board.asks}
    first: dict[tuple[int, Refused], dict[str, Any]] = {}
    said = []
    for one in decisions:
        if one.action == "wait" and one.refused and one.refused.gate != ERROR and not one.refills:
            key = kinds[one.ask], one.refused
            if key in first:
                first[key].setdefault("alike", []).append(one.ask)
                continue
            first[key] = worded = _told(one)
            said.append(worded)
        else:
            said.append(_told(one))
    return said


def _told(decision: Decision) -> dict[str, Any]:
    """With ``why`` it waits, what ``unblocks`` it, and what a planned start ``follows``."""
    said = decision.to_json()
    if decision.refused is not None:
        said["why"], said["unblocks"] = (words[:MOST] for words in explain(decision.refused))
    if decision.after:
        said["follows"] = follows(decision)[:MOST]
    return said


ENDS = {
    "budget": "at the latest then, by its budget",
    "history": "an estimate, from what its task took before",
    "late": "it has outrun its budget",
    "stop": "told to stop",
    "plan": "an estimate: it waits itself",
}
"""What the moment of an end rests on, in words."""


def follows(decision: Decision) -> str:
    """Whose end a planned start waits for, and what each moment rests on."""
    return "when these have ended: " + ", ".join(f"{end.unit} ({ENDS[end.by]})" for end in decision.after)


UNTIL = {PLANNED_START: ", in {}", RATE: "; in {} it may start"}
"""What is added of a refusal's moment where it is shown; in SQL ``explain_verdict`` adds the same."""


def explain_at(refused: Refused, now: float) -> Words:
    """The same, with how long it is from now until the moment that the refusal names."""
    why, unblocks = explain(refused)
    if refused.at is not None and refused.gate in UNTIL:
        why += UNTIL[refused.gate].format(in_short(refused.at - now))
    return why, unblocks


def explain(refused: Refused) -> Words:
    """Why something waits, with its numbers; and what would let it start."""
    why, unblocks = refused.gate.words(refused)
    if refused.plans:
        why += f"; beside the planned start of {listed(refused.plans)} there is room for {refused.left:g} of them"
    if refused.may_stop:
        unblocks += f"; it may have {', '.join(refused.may_stop)} stop once their minimum run time is over"
    return why, unblocks

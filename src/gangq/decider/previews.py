"""What would be decided: the same decision on other boards, without effects."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gangq.client.rows import PlanRow, Reason
from gangq.client.verb import Query, Steps
from gangq.client.verbs import Verbs
from gangq.durations import in_short
from gangq.placement.board import Board
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision
from gangq.placement.explain import explain_at, follows
from gangq.placement.whatif import edit


def plan_steps(changes: Sequence[Mapping[str, Any]]) -> Steps[list[PlanRow]]:
    """Decide on the board as it is and as it would be."""
    seen = Board.from_json(json.loads((yield from Verbs.board())))
    previews = yield from Verbs.preview(changes=changes, kinds=[kind.id for kind in seen.kinds])
    edited = edit(seen, changes, previews)
    was, becomes = _Decided(seen), _Decided(edited)
    told = [*becomes.by, *(ask for ask in was.by if ask not in becomes.by)]
    told += [unit for unit in becomes.stopped if unit not in told]
    # Gangs, and what the changes submit (`new1`). An ask of single jobs stands for any number of them, and a row is
    # about one; single jobs that are told to stop are named in the row of the gang.
    names = [name for name in told if name[0] in "gn"]
    ids = [int(name[1:]) for name in names if name[0] == "g"]
    gangs = {f"g{row.id}": row._asdict() for row in (yield from Verbs.gangs(ids=ids, limit=None))}
    about = {f"new{n}": change["submit"] for n, change in enumerate(changes, 1) if "submit" in change}
    return [_row(name, was, becomes, gangs.get(name), about.get(name, {})) for name in names]


class _Decided:
    """A board, and what is decided on it."""

    def __init__(self, seen: Board) -> None:
        self.board = seen
        self.by = {decision.ask: decision for decision in decide(seen)}
        self.asks = {ask.id: ask for ask in seen.asks}
        self.kinds = {kind.id: kind for kind in seen.kinds}
        self.hosts = {worker.id: worker.host for worker in seen.workers}
        self.units = {unit.id for unit in seen.units}
        self.stopped = {
            unit: one.ask for one in self.by.values() for unit in one.stop if one.action == "stop"
        }
        planned = [one for one in self.by.values() if one.action == "plan"]
        self.places = {one.ask: n for n, one in enumerate(planned, 1)}

    def action(self, name: str, missing: str) -> str:
        if name in self.by:
            return self.by[name].action
        if name in self.stopped:
            return "displaced"
        return "placed" if name in self.units else missing

    def starts_at(self, name: str) -> datetime | None:
        decision = self.by.get(name)
        at = decision.starts_at if decision else None
        return None if at is None else datetime.fromtimestamp(at, UTC)


def _row(
    name: str, was: _Decided, becomes: _Decided, gang: Mapping[str, Any] | None, spec: Mapping[str, Any]
) -> PlanRow:
    decision = becomes.by.get(name)
    ask = becomes.asks.get(name)
    seats = (decision.seats or decision.planned) if decision else ()
    about = dict(gang or {})
    if gang is None and ask is not None:
        kind = becomes.kinds[ask.kind]
        about = {
            "queue": kind.queue,
            "task": spec.get("task"),
            "size": sum(role.most for role in kind.roles),
        }
    return PlanRow(
        gang_id=int(name[1:]) if name[0] == "g" else None,
        queue=about.get("queue", ""),
        task=about.get("task"),
        priority=ask.priority if ask else about.get("priority", 0),
        size=about.get("size", 0),
        before=was.action(name, "absent"),
        after=becomes.action(name, "gone"),
        starts_before=was.starts_at(name),
        starts_after=becomes.starts_at(name),
        place=becomes.places.get(name),
        members=len(seats) or None,
        hosts=dict(Counter(becomes.hosts[seat.worker] for seat in seats)) or None,
        stop=list(decision.stop) if decision else [],
        gate=decision.refused.gate if decision and decision.refused else None,
        changed=_told(was.by.get(name)) != _told(decision),
        why=_why(name, becomes),
    )


def _told(decision: Decision | None) -> Any:
    """What makes a decision another one."""
    if decision is None:
        return None
    gate = decision.refused.gate if decision.refused else None
    return decision.action, decision.starts_at, decision.seats, decision.planned, decision.stop, gate


def _why(name: str, becomes: _Decided) -> str:
    decision = becomes.by.get(name)
    if decision is not None:
        return summary(decision, becomes.board.now)
    if name in becomes.stopped:
        return f"is told to stop for {becomes.stopped[name]}"
    return "stays where it is" if name in becomes.units else "is no longer there"


def summary(decision: Decision, now: float) -> str:
    """What becomes of something that waits, in a sentence."""
    match decision.action:
        case "start":
            return "starts now"
        case "move":
            return "moves to another host"
        case "stop":
            return f"starts once these have stopped: {', '.join(decision.stop)}"
        case "plan":
            return f"starts {follows(decision)}" if decision.after else "has a planned start"
    return explain_at(decision.refused, now)[0] if decision.refused else "waits"


def explain_now_steps(stored: Query[list[Reason]]) -> Steps[list[Reason]]:
    """What explain says, with the verdict of a decision made here and now in place of the last pass's."""
    reasons: list[Reason] = yield stored
    ask = next((str((r.numbers or {}).get("ask")) for r in reasons if r.gate == "state"), "")
    if all(r.gate not in ("start", "unblock") for r in reasons):
        return reasons
    seen = Board.from_json(json.loads((yield from Verbs.board())))
    decision = next((one for one in decide(seen) if one.ask == ask), None)
    if decision is None:
        return reasons
    kept = [r for r in reasons if not _is_verdict(r) and r.gate not in ("start", "unblock")]
    return kept + list(_reasons(decision, seen))


def _is_verdict(reason: Reason) -> bool:
    """Whether a pass said this, whatever its gate: `gangq.explain_verdict` alone says when it was decided."""
    return "decided_at" in (reason.numbers or {})


def _reasons(decision: Decision, seen: Board) -> list[Reason]:
    names = {worker.id: worker.name for worker in seen.workers}
    where = dict(Counter(names[seat.worker] for seat in decision.seats or decision.planned))
    on = ", ".join(f"{worker}: {members}" for worker, members in where.items())
    numbers: dict[str, Any] = {"where": where, "stop": list(decision.stop)}
    start = {
        "start": f"a pass now starts it on {on}",
        "stop": f"a pass now has these stop for it: {', '.join(decision.stop)}",
    }.get(decision.action, "not planned")
    if decision.starts_at is not None and decision.action == "plan":
        in_s = max(0, round(decision.starts_at - seen.now))
        numbers |= {
            "in_s": in_s,
            "starts_at": datetime.fromtimestamp(decision.starts_at, UTC).isoformat(),
            "follows": follows(decision) if decision.after else None,
        }
        start = f"planned in {in_short(in_s)} on {on}" + (f", {follows(decision)}" if decision.after else "")
    said = [Reason("start", True, start, numbers)]
    if decision.refused is None:
        return [Reason("verdict", True, "nothing holds it (decided now)", None), *said]
    why, unblocks = explain_at(decision.refused, seen.now)
    return [
        Reason(decision.refused.gate, False, f"{why} (decided now)", None),
        *said,
        Reason("unblock", True, unblocks, None),
    ]

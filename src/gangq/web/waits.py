"""What a gang waited for, and who can do something about it: each stretch of its life in which it did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Row = dict[str, Any]

OWNERS = {
    "paused": "paused by an operator",
    "quota": "over a quota or limit",
    "fragmented": "room, but not together",
    "full": "no room",
    "unserved": "no worker serves it",
    "unjudged": "backing off, not due, or not judged",
    "claim": "workers had to claim it",
    "barrier": "members had to reach the start barrier",
    "stopping": "members had to stop",
}
"""What a wait is for, one colour each, and what that means."""

OF_GATE = {
    "paused": "paused",
    **dict.fromkeys(("quota", "running_limit", "submitter_limit", "limit_key", "rate"), "quota"),
    **dict.fromkeys(("fragmented", "hosts", "one_host", "one_domain", "apart"), "fragmented"),
    **dict.fromkeys(("room", "stopping", "planned_start"), "full"),
    **dict.fromkeys(("workers", "infeasible", "unknown", "error"), "unserved"),
}
"""The owner of each gate of a pass (:mod:`gangq.placement.gates`)."""
_FOLLOWING = {
    "reserve": "claim",
    "claim": "barrier",
    "go": "",
    "drain": "stopping",
    "drained": "placement",
    "rollback": "placement",
    "end": "",
}


@dataclass(frozen=True)
class Wait:
    """From when to when, and for how many seconds it was what. Of a wait for a place the order is not on record."""

    since: datetime
    until: datetime
    seconds: Mapping[str, float]


def waits(steps: Sequence[Row], waited: Mapping[str, float] | None, end: datetime) -> list[Wait]:
    """Read the waits off the steps of gangq.timeline; `waited`: of gangq.gangs, of the wait that goes on."""
    found: list[Wait] = []
    since, kind = steps[0]["at"], "placement"
    for row in steps[1:]:
        # A member that is replaced is reserved while the others run on.
        becomes = None if (row["data"] or {}).get("replaces") else _FOLLOWING.get(row["what"])
        if becomes is None or becomes == kind or (becomes == "barrier" and kind != "claim"):
            continue
        if kind:
            found.append(_wait(since, row["at"], kind, (row["data"] or {}).get("waited")))
        since, kind = row["at"], becomes
    if kind:
        found.append(_wait(since, end, kind, waited))
    return [wait for wait in found if wait.until > wait.since]


def _wait(since: datetime, until: datetime, kind: str, waited: Mapping[str, float] | None) -> Wait:
    whole = (until - since).total_seconds()
    if kind != "placement":
        return Wait(since, until, {kind: whole})
    seconds = dict.fromkeys(OWNERS, 0.0)
    for gate, amount in (waited or {}).items():
        seconds[OF_GATE.get(gate, "unjudged")] += float(amount)
    # The clocks are those of its kind: they run on while this gang backs off.
    scale = min(1.0, whole / (sum(seconds.values()) or 1.0))
    seconds = {owner: amount * scale for owner, amount in seconds.items()}
    seconds["unjudged"] = whole - sum(seconds.values())
    # The gates are written to a tenth of a second.
    return Wait(
        since,
        until,
        {owner: amount for owner, amount in seconds.items() if amount >= 0.1} or {"unjudged": whole},
    )

"""A decision in words: what is needed, what there is, who holds it, and what would change that.

The words name moments nowhere, because they are kept: whoever shows them adds how long it is until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gangq.placement.board import Board
from gangq.placement.decisions import Decision, Refused

Words = tuple[str, str]
"""Why it waits, and what would let it start."""

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
        if one.action == "wait" and one.refused and one.refused.gate != "error" and not one.refills:
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


def explain(refused: Refused) -> Words:
    """Why something waits, with its numbers; and what would let it start.

    Raises:
        ValueError: a gate that nobody has found words for.
    """
    if refused.gate not in WORDS:
        raise ValueError(f"no words for gate {refused.gate!r}")
    why, unblocks = WORDS[refused.gate](refused)
    if refused.may_stop:
        unblocks += f"; it may have {', '.join(refused.may_stop)} stop once their minimum run time is over"
    return why, unblocks


def _paused(r: Refused) -> Words:
    return f"queue {r.where} is paused", f"gangq queue resume {r.where}"


def _limit(name: str) -> Callable[[Refused], Words]:
    def words(r: Refused) -> Words:
        lacking = r.need - r.have
        most = f", {number(r.limit, r.of)}," if r.limit is not None else ""
        left, enough = number(max(0, r.have), r.of), number((r.limit or 0) + lacking, r.of)
        held = f" (held by {', '.join(r.holders)})" if r.holders else ""
        return (
            f"{name} of queue {r.where}{most} leaves {left}, and it needs {number(r.need, r.of)}{held}",
            f"{number(lacking, r.of)} given back in queue {r.where}, or a limit of {enough}",
        )

    return words


def _stopping(r: Refused) -> Words:
    if not r.holders:
        return (
            "seats are kept for it, and not all of them are free yet",
            "nothing: they come free by themselves",
        )
    holders = ", ".join(r.holders)
    return f"it starts as soon as these have stopped: {holders}", f"the end of {holders}"


def _planned_start(r: Refused) -> Words:
    holders = ", ".join(r.holders)
    return (
        f"it may run {r.need:.0f} s, and its room is needed before for {holders}",
        f"a budget short enough to end before {holders}, or room elsewhere",
    )


def _apart(r: Refused) -> Words:
    holders = ", ".join(r.holders)
    return (
        f"it is kept apart ({r.where}) from {holders}, and only beside them is there room",
        f"room on other hosts, or the end of {holders}",
    )


def _workers(r: Refused) -> Words:
    role = f" its role {r.where}" if r.where else " it"
    if r.holders:
        return (
            f"the workers that serve{role} take no new work now: {', '.join(r.holders)}",
            "one of them back: gangq uncordon, gangq unquarantine --worker, or a restart",
        )
    return (
        f"no worker serves{role}: its queue, task, labels, selector or taints rule out each of them",
        "a worker that serves it, or asking for less: explain names what rules out how many",
    )


def _room(r: Refused) -> Words:
    lacking, short = r.need - r.have, " or ".join(r.short)
    if r.need == 1 and r.of == "members":
        return (
            "no worker has room for it" + (f": {short} are short" if short else ""),
            f"more {short} free on one worker" if short else "room on one worker",
        )
    most = f", the most on {r.where}" if r.have else ""
    return (
        f"there is room for {r.have:g} of its {number(r.need, r.of)}{most}"
        + (f": {short} are short" if short else ""),
        f"room for {lacking:g} more" + (f": free {short}" if short else ""),
    )


def _hosts(r: Refused) -> Words:
    return (
        f"{number(r.have, 'hosts')} have room, and each of its {r.need:g} members needs another one",
        f"room on {number(r.need - r.have, 'hosts')} more",
    )


def _one_host(r: Refused) -> Words:
    return (
        f"the roomiest host, {r.where or 'none'}, has room for {r.have:g} of the {r.need:g} that share one",
        f"room for {r.need - r.have:g} more on one host",
    )


def _one_domain(r: Refused) -> Words:
    return (
        f"the roomiest {r.of}, {r.where or 'none'}, has room for {r.have:g} of its {r.need:g} members",
        f"room for {r.need - r.have:g} more in one {r.of}",
    )


def _infeasible(r: Refused) -> Words:
    if r.of == "workers":
        return _workers(r)
    return (
        f"it would not start even when all that runs has ended; now {r.have:g} of its "
        f"{number(r.need, r.of)} would fit",
        "workers that are large enough",
    )


def _devices(_: Refused) -> Words:
    return "its roles cannot share the devices that are free", "other free devices on its workers"


def _error(r: Refused) -> Words:
    return f"deciding about it failed: {r.where}", "a bug report with `gangq board --save`"


WORDS: dict[str, Callable[[Refused], Words]] = {
    "paused": _paused,
    "running_limit": _limit("the running limit"),
    "quota": _limit("the maximum"),
    "submitter_limit": _limit("the limit for each submitter"),
    "stopping": _stopping,
    "planned_start": _planned_start,
    "apart": _apart,
    "workers": _workers,
    "room": _room,
    "hosts": _hosts,
    "one_host": _one_host,
    "one_domain": _one_domain,
    "infeasible": _infeasible,
    "devices": _devices,
    "error": _error,
}
"""By the gate that refused. A new gate is a function above and a line here."""


def number(amount: float, of: str) -> str:
    """``1 GPU``, ``3 GPUs``, ``1.5 CPUs``, ``2 GiB``."""
    if of == "memory_mb":
        return f"{amount / 1024:.4g} GiB"
    one = {"gpus": "GPU", "cpus": "CPU"}.get(of, of.removesuffix("s"))
    return f"{amount:.12g} {one}{'' if amount == 1 else 's'}"

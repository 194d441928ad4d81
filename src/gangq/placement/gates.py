"""The gates: every reason why something does not start now, declared once.

A gate is a word for people (`room`), the sentences that explain it, and what a pass makes of it. A new gate is a
`Gate(...)` here. The code that refuses passes it to `Refused`; that is why each has words. Of a task's pause SQL says
more, who paused it and why (`explain_verdict` in 141_explain_verdict.sql), but only to what a pass has judged. What
has come since is told the words from here.

The words name moments nowhere, because they are kept: whoever shows them adds how long it is until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gangq.placement.decisions import Refused

Words = tuple[str, str]
"""Why it waits, and what would let it start."""


class Gate(str):
    """One of them, by its name."""

    words: Callable[[Refused], Words]
    waits_for: Literal["room", "limit", ""]
    """What it waits for: room on workers, a limit of the queue or limit key that the refusal names, or nothing that
    others could take. Jobs that come after it do not take that without another pass
    (:class:`gangq.placement.places.Rivals`).
    """
    remembered: bool
    """Whether others of its kind may be refused for the same reason without another look in this pass."""

    def __new__(
        cls,
        name: str,
        words: Callable[[Refused], Words],
        *,
        waits_for: Literal["room", "limit", ""] = "room",
        remembered: bool = True,
    ) -> Gate:
        """``words``: of a refusal, why it waits and what would let it start."""
        gate = super().__new__(cls, name)
        gate.words, gate.waits_for, gate.remembered = words, waits_for, remembered
        return gate


def number(amount: float, of: str) -> str:
    """``1 GPU``, ``3 GPUs``, ``1.5 CPUs``, ``2 GiB``."""
    if of == "memory_mb":
        return f"{amount / 1024:.4g} GiB"
    one = {"gpus": "GPU", "cpus": "CPU"}.get(of, of.removesuffix("s"))
    return f"{amount:.12g} {one}{'' if amount == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """``g1, g2 and g3``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _held_by(holders: Sequence[str]) -> str:
    return f" (held by {', '.join(holders)})" if holders else ""


# Before any worker is looked at -------------------------------------------------------------------------------


def _paused(r: Refused) -> Words:
    what = r.of or "queue"
    return f"{what} {r.where} is paused", f"gangq {what} resume {r.where}"


def _unknown(r: Refused) -> Words:
    return (
        f"this library knows no {r.of} {r.where!r}, so it cannot decide about it",
        "the release that knows it, on every host that decides (gangq worker, gangq tick)",
    )


def _limit(name: str) -> Callable[[Refused], Words]:
    """``name``: of the limit and of what has it, up to its own name."""
    of = name.partition(" of ")[2]

    def words(r: Refused) -> Words:
        lacking = r.need - r.have
        most = f", {number(r.limit, r.of)}," if r.limit is not None else ""
        left, enough = number(max(0, r.have), r.of), number((r.limit or 0) + lacking, r.of)
        unblocks = f"a limit of {enough}"
        # A limit that is below what this one needs refuses it however much the others give back.
        if r.limit is None or r.need <= r.limit:
            unblocks = f"{number(lacking, r.of)} given back in {of} {r.where}, or {unblocks}"
        return (
            f"{name} {r.where}{most} leaves {left}, and it needs {number(r.need, r.of)}"
            + _held_by(r.holders),
            unblocks,
        )

    return words


def _rate(r: Refused) -> Words:
    return (
        f"the rate of {r.where} leaves {number(r.have, 'starts')} now, and it needs {number(r.need, 'starts')}",
        "nothing: its time comes by itself" if r.at is not None else f"a rate of {r.need:g} or more",
    )


PAUSED = Gate("paused", _paused, waits_for="", remembered=False)
UNKNOWN = Gate("unknown", _unknown, waits_for="", remembered=False)
RUNNING_LIMIT = Gate(
    "running_limit", _limit("the running limit of queue"), waits_for="limit", remembered=False
)
QUOTA = Gate("quota", _limit("the maximum of queue"), waits_for="limit", remembered=False)
SUBMITTER_LIMIT = Gate(
    "submitter_limit", _limit("the limit for each submitter of queue"), waits_for="limit", remembered=False
)
RATE = Gate("rate", _rate, waits_for="", remembered=False)
LIMIT_KEY = Gate("limit_key", _limit("the limit of limit key"), waits_for="limit", remembered=False)


# On the workers -----------------------------------------------------------------------------------------------


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


def _apart(r: Refused) -> Words:
    holders = ", ".join(r.holders)
    return (
        f"it is kept apart ({r.where}) from {holders}, and only beside them is there room",
        f"room on other hosts, or the end of {holders}",
    )


def _more(r: Refused) -> float:
    """How many more it needs room for."""
    return r.need - (r.have if r.left is None else r.left)


def _room(r: Refused) -> Words:
    if r.need == 1 and r.of == "members":
        why, unblocks, then = "no worker has room for it", "room on one worker", ":"
    else:
        most = f", the most on {r.where}" if r.have else ""
        why = f"there is room for {r.have:g} of its {number(r.need, r.of)}{most}"
        unblocks, then = f"room for {_more(r):g} more", "; for one more"
    if not r.short:
        return why, unblocks
    has = listed([f"{_amount(one.have, one.of)} of {_amount_of(one.need, one.of)}" for one in r.short])
    more = listed([_amount_of(one.need - one.have, one.of) for one in r.short])
    return (
        f"{why}{then} the nearest worker, {r.nearest}, has {has} free{_held_by(r.holders)}",
        f"{unblocks}: {more} more on {r.nearest} would do" + (" for one" if _more(r) > 1 else ""),
    )


def _fragmented(r: Refused) -> Words:
    why, unblocks = _room(r)
    return f"what is free would be enough, were it together: {why}", unblocks


def _amount(amount: float, of: str) -> str:
    return f"{amount / 1024:.4g}" if of == "memory_mb" else f"{amount:.12g}"


def _amount_of(amount: float, of: str) -> str:
    return number(amount, of) + (" of memory" if of == "memory_mb" else "")


def _hosts(r: Refused) -> Words:
    return (
        f"{number(r.have, 'hosts')} {'has' if r.have == 1 else 'have'} room, "
        f"and each of its {r.need:g} members needs another one",
        f"room on {number(_more(r), 'hosts')} more",
    )


def _one_host(r: Refused) -> Words:
    return (
        f"the roomiest host, {r.where or 'none'}, has room for {r.have:g} of the {r.need:g} that share one",
        f"room for {_more(r):g} more on one host",
    )


def _one_domain(r: Refused) -> Words:
    return (
        f"the roomiest {r.of}, {r.where or 'none'}, has room for {r.have:g} of its {r.need:g} members",
        f"room for {_more(r):g} more in one {r.of}",
    )


def _infeasible(r: Refused) -> Words:
    if r.of == "workers":
        return _workers(r)
    why = (
        f"it would not start even when all that runs has ended; now {r.have:g} of its "
        f"{number(r.need, r.of)} would fit"
    )
    unblocks = "workers that are large enough"
    if any(one.of == "linked GPUs" for one in r.short):
        unblocks += ", with so many GPUs joined by one link"
    if r.holders:
        why += f"; not counted, because no new work is given to them now: {', '.join(r.holders)}"
        unblocks += "; or those back: gangq uncordon, gangq unquarantine --worker, or a restart"
    return why, unblocks


def _error(r: Refused) -> Words:
    return f"deciding about it failed: {r.where}", "a bug report with `gangq board --save`"


STOPPING = Gate("stopping", _stopping, remembered=False)
PLANNED_START = Gate("planned_start", _planned_start)
WORKERS = Gate("workers", _workers)
APART = Gate("apart", _apart)
ROOM = Gate("room", _room)
FRAGMENTED = Gate("fragmented", _fragmented)
HOSTS = Gate("hosts", _hosts)
ONE_HOST = Gate("one_host", _one_host)
ONE_DOMAIN = Gate("one_domain", _one_domain)
INFEASIBLE = Gate("infeasible", _infeasible, waits_for="")
ERROR = Gate("error", _error, waits_for="", remembered=False)

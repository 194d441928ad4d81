"""A refusal in words: what is needed, what there is, who holds it, and what would change that."""

from __future__ import annotations

from gangq.placement.decisions import Refused


def explain(refused: Refused) -> tuple[str, str]:
    """Why something waits, with its numbers; and what would let it start.

    Raises:
        ValueError: a gate that nobody has found words for.
    """
    r, lacking = refused, refused.need - refused.have
    holders = ", ".join(r.holders)
    match r.gate:
        case "paused":
            return f"queue {r.where} is paused", f"gangq queue resume {r.where}"
        case "quota" | "running_limit" | "submitter_limit":
            whose = {"quota": "the maximum", "running_limit": "the running limit"}
            limit = f"{whose.get(r.gate, 'the limit for each submitter')} of queue {r.where}"
            left = number(max(0, r.have), r.of)
            held = f" (held by {holders})" if holders else ""
            return (
                f"{limit} leaves {left}, and it needs {number(r.need, r.of)}{held}",
                f"{number(lacking, r.of)} given back in queue {r.where}, or a higher limit",
            )
        case "stopping":
            return f"it starts as soon as these have stopped: {holders}", f"the end of {holders}"
        case "planned_start":
            return (
                f"it may run {r.need:.0f} s, and its room is needed in {r.have:.0f} s for {holders}",
                f"a budget of {r.have:.0f} s or less, or room elsewhere",
            )
        case "room":
            most = f", the most on {r.where}" if r.have else ""
            return (
                f"there is room for {r.have:g} of its {number(r.need, r.of)}{most}",
                f"room for {lacking:g} more",
            )
        case "hosts":
            return (
                f"{number(r.have, 'hosts')} have room, and each of its {r.need:g} members needs another one",
                f"room on {number(lacking, 'hosts')} more",
            )
        case "one_host":
            return (
                f"the roomiest host, {r.where or 'none'}, has room for {r.have:g} of the {r.need:g} that share one",
                f"room for {lacking:g} more on one host",
            )
        case "one_domain":
            return (
                f"the roomiest {r.of}, {r.where or 'none'}, has room for {r.have:g} of its {r.need:g} members",
                f"room for {lacking:g} more in one {r.of}",
            )
        case "infeasible":
            return (
                f"it would not start even when all that runs has ended; now {r.have:g} of its "
                f"{number(r.need, r.of)} would fit",
                "workers that are large enough",
            )
        case "devices":
            return "its roles cannot share the devices that are free", "other free devices on its workers"
        case "error":
            return f"deciding about it failed: {r.where}", "a bug report with `gangq board --save`"
        case _:
            raise ValueError(f"no words for gate {r.gate!r}")


def number(amount: float, of: str) -> str:
    """``1 GPU``, ``3 GPUs``, ``1.5 CPUs``, ``2 GiB``."""
    if of == "memory_mb":
        return f"{amount / 1024:.4g} GiB"
    one = {"gpus": "GPU", "cpus": "CPU"}.get(of, of.removesuffix("s"))
    return f"{amount:.12g} {one}{'' if amount == 1 else 's'}"

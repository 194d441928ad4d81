"""What the watchdogs did and saw of a job, as `gangq show` and `gangq trips --evidence` print it.

First one sentence for a person and the stack of the handler. With `--evidence` the rest: an object that watchdogs,
supervisors and other languages write. It is printed as the JSON that it is; text of several lines (stacks, the end of
its output) stands below it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gangq.cli import output
from gangq.cli.tables import columns, table
from gangq.client.rows import EventRow, EvidenceRow

KINDS = ("suspect", "trip", "notify", "held", "poison", "straggler")
"""Events of a job that come from watchdogs."""
NOT_SHOWN = "what the watchdogs saw is shown to those who may read the job's payload"
_CONVICT = ("trip", "notify", "held")

_VERBS = ("waited ", "made no progress ")
"""How the sentences of `gangq.watchdogs.findings.sentence` begin."""
_LINES = 200
_DEEP = 16
"""Columns to the right of which nothing begins a line."""
_LAST = "log_tail"
"""The end of its output stands next to the prompt."""


def history(
    events: Sequence[EventRow], seen: Sequence[EvidenceRow] | None, wide: bool | None = None
) -> list[EventRow]:
    """Print a table of what the watchdogs did of one job; return the events whose evidence is worth reading.

    `seen`: the evidence, None for those who may not see it. `wide`: as `gangq.cli.tables.table` takes it.
    What ended it comes first, newest on top; doubts count only when nothing else happened.
    """
    found = [event for event in events if event.kind in KINDS]
    evidence = by_event(seen or ())
    shown = columns(
        ">ago at:4 what=kind class=data.class:2 code=data.code:2 worker host=data.host:3 "
        "outcome=data.outcome:1 reason",
        {
            "reason": lambda event: said(event, evidence.get((event.at, event.kind))),
        },
    )
    table(found, shown, wide=wide)
    decided = [event for event in found if event.kind in _CONVICT]
    return decided[::-1] or [event for event in found if event.kind == "suspect"][-1:]


def by_event(seen: Sequence[EvidenceRow]) -> dict[tuple[Any, str], dict[str, Any]]:
    """Evidence by the instant and kind of its event."""
    return {(row.at, row.kind): row.data for row in seen}


def said(event: EventRow, evidence: Mapping[str, Any] | None) -> str:
    """Why, in the most telling words there are."""
    return str(_of(event, "message") or (evidence or {}).get("message") or event.reason or "")


def headline(event: EventRow, evidence: Mapping[str, Any] | None) -> str:
    """What happened in one sentence: whom it befell, and why."""
    rank = _of(event, "rank")
    whom = f"job {event.job_id}" if event.gang_id is None else f"rank {rank} of g{event.gang_id}"
    word = said(event, evidence)
    # A sentence of a watchdog has no subject of its own; any other text is quoted behind one.
    return f"{whom} {word}" if word.startswith(_VERBS) else f"{whom}: {word}"


def brief(event: EventRow, evidence: Mapping[str, Any]) -> None:
    """Print the sentence, and what is known of the gang."""
    output.write(output.plain(headline(event, evidence)))
    together = _of(event, "gang")
    if together:
        output.write(output.plain(together))


def stack(evidence: Mapping[str, Any]) -> None:
    """Print the handler's stack, if there is one."""
    if evidence.get("handler"):
        output.block("handler", str(evidence["handler"]), most=_LINES)


def show(evidence: Mapping[str, Any]) -> None:
    """Print one piece of evidence, but for its sentence."""
    stack(evidence)
    rest = {key: value for key, value in evidence.items() if key not in ("handler", "message")}
    blocks = {
        key: rest.pop(key) for key, value in [*rest.items()] if isinstance(value, str) and "\n" in value
    }
    if rest:
        for line in _indented(rest).split("\n"):
            output.write(output.plain(line))
    for key in sorted(blocks, key=lambda key: (key == _LAST, key)):
        output.block(output.plain(key), blocks[key], most=_LINES)


def _indented(value: Any, margin: str = "") -> str:
    """JSON, where an object or list below the top that holds no other one is a line, and so is what lies deep."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    holds_others = any(isinstance(part, (dict, list)) for part in parts)
    if len(margin) >= _DEEP or ((margin or not parts) and not holds_others):
        return json.dumps(value, ensure_ascii=False)
    inner = f"{margin}  "
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(key, ensure_ascii=False)}: {_indented(part, inner)}" for key, part in value.items()
        ]
    else:
        lines = [_indented(part, inner) for part in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n{inner}" + f",\n{inner}".join(lines) + f"\n{margin}{end}"


def _of(event: EventRow, key: str) -> Any:
    return (event.data or {}).get(key)

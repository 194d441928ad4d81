"""What the watchdogs did and saw of a job, as `gangq show` and `gangq trips --evidence` print it.

First one sentence for a person and the stack of the handler. With `--evidence` the rest, in the order of the
questions: what was decided and why, how long it had been silent and where it stood, what its devices and
processes did meanwhile, where every thread waits, all stacks, and at the bottom, next to the prompt, the end of
its output. Evidence is an object that watchdogs, supervisors and other languages write:
what is not known by name here is printed all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gangq.cli import output
from gangq.cli.tables import Column, columns, table
from gangq.client.rows import EventRow, EvidenceRow

KINDS = ("suspect", "trip", "notify", "held", "poison", "straggler")
"""Events of a job that come from watchdogs."""
NOT_SHOWN = "what the watchdogs saw is shown to those who may read the job's payload"
_CONVICT = ("trip", "notify", "held")

_VERBS = ("waited ", "made no progress ")
"""How the sentences of `gangq.watchdogs.findings.sentence` begin."""
_LINES = 200
_SOONER = ("why", "event", "last_beat", "beats", "members", "devices", "moved")
"""Parts, and pairs, that answer the first questions; the database keeps no order of its own."""
_LATER = ("handler", "threads", "processes", "stacks", "stack", "stack_dump", "traceback", "log_tail")
"""Long or wide, and looked at once the rest has been read; in this order."""
_TITLES = {
    "beats": "last beats",
    "last_beat": "last beat",
    "devices": "device readings",
    "moved": "what its processes did",
    "event": "what befell the device",
    "members": "the members of the gang",
    "stacks": "stacks",
    "stack": "stacks",
    "stack_dump": "stacks",
    "traceback": "stacks",
    "log_tail": "end of its output",
}
_INNER: dict[str, str] = {"window_s": "looked_s", "samples": "looks", "host": "moved"}
"""Parts of a window whose names outside of it mean something else."""
_BEAT = ("step", "total", "phase", "kind", "code", "advice")
_LEFT = (
    "at",
    "rank",
    "uuid",
    "tid",
    "name",
    "state",
    "wchan",
    "moved",
    "why",
    "gpu_pct",
    "memory_pct",
    "used_mb",
)
"""Columns that are looked at first."""
_SHORT = {"gpu_pct": "gpu %", "memory_pct": "memory %", "scope": "whose"}


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
    """Print the sentence, what is known of the gang, and the handler's stack."""
    output.write(output.plain(headline(event, evidence)))
    together = _of(event, "gang")
    if together:
        output.write(output.plain(together))
    if evidence.get("handler"):
        output.block("handler", str(evidence["handler"]), most=_LINES)


def show(evidence: Mapping[str, Any], wide: bool | None = None) -> None:
    """Print one piece of evidence; `wide`: as `gangq.cli.tables.table` takes it."""
    flat = dict(_opened(evidence))
    pairs = [key for key, value in flat.items() if key not in _LATER and _is_pair(value)]
    pairs.sort(key=lambda key: _in_order(key, _SOONER))
    output.pairs([(_name(key), _value(key, flat[key])) for key in pairs])
    sections = [key for key, value in flat.items() if key not in pairs and value]
    sections.sort(key=lambda key: (_in_order(key, _LATER, others=-1), _in_order(key, _SOONER)))
    for key in sections:
        _section(key, flat[key], wide)


def _opened(evidence: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The window of a watchdog holds what its readers look for first: its parts are parts of the evidence."""
    for key, value in evidence.items():
        if key in ("window", "samples") and isinstance(value, Mapping):
            for inner, part in value.items():
                yield _INNER.get(str(inner), str(inner)), part
        elif key != "message":
            yield key, value


def _section(key: str, value: Any, wide: bool | None) -> None:
    output.write()
    title = _TITLES.get(key, _name(key))
    if key == "processes":
        for process in value:
            _process(process, wide)
    elif isinstance(value, str):
        output.block(title, value, most=_LINES)
    elif isinstance(value, Mapping):
        output.write(f"{title}:")
        names = sorted((name for name in value if name != "at"), key=lambda name: _in_order(name, _BEAT))
        output.pairs([(f"  {_name(name)}", _value(name, value[name])) for name in names])
    else:
        output.write(f"{title}:")
        _table(value, wide)


def _process(process: Mapping[str, Any], wide: bool | None) -> None:
    about = "gone" if process.get("gone") else process.get("command") or ""
    output.write(f"process {process.get('pid')}: {output.plain(about)}")
    opened = process.get("devices_open") or {}
    if opened:
        output.write(f"  has open: {output.plain(', '.join(sorted(set(map(str, opened.values())))))}")
    threads = process.get("threads") or []
    if threads:
        _table(threads, wide)
        more = (process.get("threads_in_all") or 0) - len(threads)
        if more > 0:
            output.write(f"  and {more} threads more")


def _table(found: Sequence[Any], wide: bool | None) -> None:
    """Objects by their keys, whatever these are; anything else in a line each."""
    if not all(isinstance(row, Mapping) for row in found):
        for row in found:
            output.write(f"  {output.plain(row)}")
        return
    names = list(dict.fromkeys(name for row in found for name in row))
    names.sort(key=lambda name: _in_order(name, _LEFT))
    latest = max((row["at"] for row in found if _is_number(row.get("at"))), default=None)

    def cell(name: str, row: Mapping[str, Any]) -> object:
        value = row.get(name)
        if name == "at" and latest is not None and _is_number(value):
            # Seconds since boot mean nothing to anybody; the order and the distances do.
            return f"{value - latest:.1f}s"
        return "?" if value is None else _value(name, value)

    shown = [Column(_SHORT.get(name, _name(name)), partial(cell, name)) for name in names]
    table(found, shown, wide=wide)


def _value(name: str, value: Any) -> object:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {part}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if _is_number(value) and name.endswith("_s"):
        return output.seconds(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def _in_order(key: str, order: Sequence[str], others: int | None = None) -> int:
    if key in order:
        return order.index(key)
    return len(order) if others is None else others


def _is_pair(value: Any) -> bool:
    if isinstance(value, list):
        return not any(isinstance(part, (Mapping, list)) for part in value)
    return (
        value is None
        or isinstance(value, (bool, int, float))
        or (isinstance(value, str) and "\n" not in value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _name(key: str) -> str:
    return key.removesuffix("_s").replace("_", " ")


def _of(event: EventRow, key: str) -> Any:
    return (event.data or {}).get(key)

"""How a job, gang or batch is doing, in one line: for terminals, logs and notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangq.client.rows import BatchRow, GangRow, JobRow, Reason

ENDED = frozenset({"done", "failed", "cancelled"})
RUNS = frozenset({"running", "preempting", "draining"})
WAITS = frozenset({"pending", "blocked", "waiting", "scheduled"})
LETTERS = {"job": "", "gang": "g", "batch": "b"}
"""How the id of a gang or batch begins wherever somebody reads or types it."""


def phrase(kind: str, id: int) -> str:
    """A job, gang or batch in a sentence: job 12, gang g12, batch b12."""
    return f"{kind} {LETTERS[kind]}{id}"


@dataclass(frozen=True)
class Status:
    """A job, gang or batch as it was when it was asked for: `kind` ("Job", "Gang" or "Batch"), `id`, `task`, `state`.

    `said`: its progress while it runs, why it waits, or why it failed; "" for nothing. Of a batch: how far it is.
    """

    kind: str
    id: int
    task: str
    state: str
    said: str = ""

    @classmethod
    def of(cls, row: JobRow | GangRow | BatchRow, why: str = "") -> Status:
        """Return that of a job, gang or batch; `why` it waits, or how far a gang is."""
        match row:
            case JobRow():
                kind, said = "Job", why or said_of(row)
            case GangRow():
                kind, said = "Gang", row.reason or why
            case BatchRow():
                kind, said = "Batch", f"{row.name}, {batch_in_words(row)}"
        return cls(kind, row.id, row.task, row.state, said)

    def __str__(self) -> str:
        # Tasks, reasons, errors and progress come from others, and a terminal would obey what is not printable.
        line = f"{self._name} ({self.task}) {self.state}" + (f": {self.said}" if self.said else "")
        return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)

    @property
    def _name(self) -> str:
        return phrase(self.kind.lower(), self.id).capitalize()

    def _repr_html_(self) -> str:
        head = html.escape(self._name)
        rest = html.escape(f"{self.task}: {self.said}" if self.said else self.task)
        return f"<div><b>{head}</b> <code>{html.escape(self.state)}</code> {rest}</div>"


def batch_in_words(batch: BatchRow) -> str:
    """How far a batch is: 3 of 10 done, 1 failed, 4 running."""
    parts = [f"{batch.done} of {batch.size} done"]
    counts = {"failed": batch.failed, "cancelled": batch.cancelled, "running": batch.running}
    return ", ".join(parts + [f"{n} {state}" for state, n in counts.items() if n])


def said_of(job: JobRow) -> str:
    """The progress of a job that runs, or the error of one that failed."""
    told = progress_in_words(job.progress) if job.state == "running" else ""
    # The error of a job that runs is of an attempt before.
    return told or (error_in_words(job.error) if job.error and job.state != "done" else "")


def holding(reasons: Sequence[Reason]) -> list[Reason]:
    """Those of the answers of `explain` that say what holds a job or gang."""
    held = [reason for reason in reasons if not reason.ok]
    # The state alone says nothing, unless nothing else holds it.
    return [reason for reason in held if reason.gate != "state"] or held


def why_it_waits(held: Sequence[Reason]) -> str:
    """What holds a job or gang, in a line."""
    return "; ".join(reason.detail for reason in held) or "about to start"


def slowest(members: Sequence[JobRow]) -> str:
    """The progress of the member of a gang that has made the fewest steps."""
    said = [(step, member) for member in members if (step := _step(member.progress)) is not None]
    if not said:
        return ""
    _, last = min(said, key=lambda one: (one[0], one[1].rank or 0))
    return f"rank {last.rank} at {progress_in_words(last.progress)}"


def _step(beat: Any) -> float | None:
    step = beat.get("step") if isinstance(beat, Mapping) else None
    return step if isinstance(step, int | float) else None


def progress_in_words(beat: Any) -> str:
    """A beat in words: its phase, step and total, then the rest."""
    if not isinstance(beat, Mapping):
        return ""
    rest = dict(beat)
    phase, step, total = rest.pop("phase", None), rest.pop("step", None), rest.pop("total", None)
    parts = [str(phase)] if phase is not None else []
    if step is not None:
        parts.append(f"{step}/{total}" if total is not None else f"step {step}")
    parts += [
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in rest.items()
    ]
    return " ".join(parts)


def error_in_words(error: Mapping[str, Any]) -> str:
    """The type and the message of an error."""
    return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))

"""The timed measures and the WAL as bars (SVG), a picture for each family."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import BASIS, Summary, number

sys.path.append(str(Path(__file__).parents[1]))  # A script finds only what lies beside it.
from drawing import bar, document, text

FLOORS = ("floor", "fused", "insert", "notify", "pgbench")
_OURS, _FLOOR, _OTHER = "#d62728", "#7f7f7f", "#1f77b4"
_LEFT, _BARS, _RIGHT, _ROW = 130, 480, 150, 20
_TOP, _HEADING, _GAP = 40, 24, 16


@dataclass(frozen=True)
class Family:
    """Measures whose names begin so are one picture. ``logarithmic``: where systems differ by orders of magnitude."""

    name: str
    title: str
    beginnings: tuple[str, ...]
    logarithmic: bool = False


FAMILIES = (
    Family("drain", "Drain of no-op jobs", ("drain, batch", "drain, best", "drain, two")),
    Family("single", "Drain, one job claimed and finished at a time", ("drain, one",)),
    Family("enqueue", "Enqueue over one connection", ("enqueue,",)),
    Family(
        "pickup", "From the enqueue call's return to the handler's start", ("pick-up by",), logarithmic=True
    ),
    Family("wal", "WAL of a job, from its submission to its end", ("WAL,",)),
)


def write(beside: Path, summaries: Sequence[Summary]) -> list[Path]:
    """Draw what was measured, beside that file and with its name; returns the pictures."""
    drawn = []
    for family in FAMILIES:
        rows = [row for row in summaries if row.measure.startswith(family.beginnings)]
        if rows:
            path = beside.with_name(f"{beside.stem}-{family.name}.svg")
            path.write_text(svg(family, rows))
            drawn.append(path)
    return drawn


def svg(family: Family, rows: Sequence[Summary], *, beside_others: bool = True) -> str:
    """A panel for each measure: a bar as long as each system's median, a line from its least to its most.

    Without `beside_others` every row is gangq's own, and there is no legend.
    """
    drawn: list[str] = []
    y = _TOP
    for measure in dict.fromkeys(row.measure for row in rows):
        mine = [row for row in rows if row.measure == measure]
        better = "more" if mine[0].higher_is_better else "less"
        scale = ", logarithmic" if family.logarithmic else ""
        drawn.append(
            text(20, y + 14, f"{measure} ({mine[0].unit}; {better} is better{scale})", 13, bold=True)
        )
        y += _HEADING
        length = _lengths(mine, family.logarithmic)
        for row in mine:
            ours = row.system == BASIS or not beside_others
            fill = _OURS if ours else _FLOOR if row.system in FLOORS else _OTHER
            drawn.append(text(_LEFT - 8, y + 12, row.system, 12, anchor="end"))
            drawn.append(bar(_LEFT, y + 2, length(row.median), _ROW - 6, fill))
            least, most = length(row.least), length(row.most)
            if most > least:
                drawn.append(bar(_LEFT + least, y + _ROW / 2 - 2, most - least, 2, "black"))
            drawn.append(text(_LEFT + most + 6, y + 12, _label(row), 11))
            y += _ROW
        y += _GAP
    if not beside_others:
        return document(_LEFT + _BARS + _RIGHT, y, family.title, drawn)
    legend = ((_OURS, BASIS), (_FLOOR, "floors: the same work by the least SQL"), (_OTHER, "other queues"))
    shown = "in brackets: how many times gangq's"
    x = _LEFT
    for fill, words in legend:
        drawn += [bar(x, y, 12, 12, fill), text(x + 18, y + 10, words, 11)]
        x += 40 + 6 * len(words)
    drawn.append(text(x, y + 10, shown, 11))
    return document(_LEFT + _BARS + _RIGHT, y + 28, family.title, drawn)


def _lengths(rows: Sequence[Summary], logarithmic: bool) -> Lengths:
    values = [value for row in rows for value in (row.least, row.median, row.most) if value > 0] or [1.0]
    return Lengths(max(values), 10 ** math.floor(math.log10(min(values))) if logarithmic else None)


@dataclass(frozen=True)
class Lengths:
    """How long a bar is: in proportion, or, from ``least`` on, by its logarithm."""

    most: float
    least: float | None = None

    def __call__(self, value: float) -> float:
        if self.least is None:
            return _BARS * value / self.most
        if value <= self.least:
            return 0.0
        return _BARS * math.log(value / self.least) / math.log(max(self.most, 10 * self.least) / self.least)


def _label(row: Summary) -> str:
    ratio = "" if row.ratio is None or row.system == BASIS else f" ({row.ratio:.2f})"
    return f"{number(row.median)}{ratio}"

"""Outcomes as a table for the terminal, a table in Markdown, and a picture (SVG)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from outcome import Figures, Outcome
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # A script finds only what lies beside it.
from drawing import COLOURS, bar, document, text

HEADINGS = (
    "policy", "utilisation", "slowdown", "wait, s", "longest wait, s",
    "largest gangs: slowdown", "wait, s", "longest wait, s", "outran", "displaced",
)  # fmt: skip
BOOK = ", textbook"
"""How the textbook's schedule under the same policy is named: drawn paler."""


def row(outcome: Outcome) -> tuple[str, ...]:
    """One line of the table."""
    return (
        outcome.policy, f"{outcome.utilisation:.3f}", *_figures(outcome.all), *_figures(outcome.largest),
        str(outcome.outran), str(outcome.displaced),
    )  # fmt: skip


def _figures(figures: Figures) -> tuple[str, str, str]:
    return f"{figures.slowdown:,.0f}", f"{figures.wait_s:,.0f}", f"{figures.longest_wait_s:,}"


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the table."""
    table = Table()
    for n, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if n == 0 else "right")
    for outcome in outcomes:
        table.add_row(*row(outcome))
    console.print(table)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table, and one for each class of sizes."""
    lines = _rows(HEADINGS, [row(outcome) for outcome in outcomes])
    sizes = list(outcomes[0].by_class)
    for title, of in (
        ("average slowdown", lambda f: f"{f.slowdown:,.0f}"),
        ("average wait, s", lambda f: f"{f.wait_s:,.0f}"),
        ("longest wait, s", lambda f: f"{f.longest_wait_s:,}"),
    ):
        counts = [f"{size} ({outcomes[0].by_class[size].jobs})" for size in sizes]
        body = [(o.policy, *(of(o.by_class[size]) for size in sizes)) for o in outcomes]
        lines += ["", *_rows((f"{title}, by slots (jobs)", *counts), body)]
    return "\n".join(lines) + "\n"


def _rows(headings: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|---" * len(headings) + "|",
        *("| " + " | ".join(cells) + " |" for cells in body),
    ]


def svg(outcomes: Sequence[Outcome], title: str) -> str:
    """Bars: slowdown, longest wait and utilisation of all, and the wait of each class of sizes."""
    sizes = list(outcomes[0].by_class)
    panels = [
        ("utilisation", [("all", [o.utilisation for o in outcomes])], "{:.3f}"),
        ("average bounded slowdown", [("all", [o.all.slowdown for o in outcomes])], "{:,.0f}"),
        ("longest wait, hours", [("all", [o.all.longest_wait_s / 3600 for o in outcomes])], "{:,.0f}"),
        (
            "average wait by slots, hours",
            [(size, [o.by_class[size].wait_s / 3600 for o in outcomes]) for size in sizes],
            "{:,.0f}",
        ),
    ]
    wide, gap, tall, top = 20, 20, 240, 100
    kinds = list(dict.fromkeys(outcome.policy.removesuffix(BOOK) for outcome in outcomes))
    fills = [
        f'fill="{COLOURS[kinds.index(outcome.policy.removesuffix(BOOK)) % len(COLOURS)]}"'
        + ' fill-opacity="0.45"' * outcome.policy.endswith(BOOK)
        for outcome in outcomes
    ]
    drawn: list[str] = []
    left = 20
    for heading, groups, form in panels:
        most = max((value for _, values in groups for value in values), default=0) or 1
        drawn.append(text(left, 52, heading, 13, bold=True))
        right = left + 9 * len(heading)
        for name, values in groups:
            for n, value in enumerate(values):
                high = tall * value / most
                x, y = left + n * wide, top + tall - high
                drawn.append(bar(x, y, wide - 4, high, fills[n]))
                drawn.append(text(x + wide - 8, y - 4, form.format(value), 10, upright=True))
            drawn.append(text(left + len(values) * wide / 2, top + tall + 16, name, 11, anchor="middle"))
            left += len(values) * wide + gap
        left = max(left, right) + gap
    for n, outcome in enumerate(outcomes):
        y = top + tall + 36 + 18 * n
        drawn.append(bar(20, y, 12, 12, fills[n]))
        drawn.append(text(38, y + 10, outcome.policy, 12))
    return document(left, top + tall + 50 + 18 * len(outcomes), title, drawn)

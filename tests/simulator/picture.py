"""Outcomes as a table for the terminal, a table in Markdown, and a picture (SVG, written by hand)."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from outcome import Figures, Outcome
from rich.console import Console
from rich.table import Table

HEADINGS = (
    "policy", "utilisation", "slowdown", "wait, s", "longest wait, s",
    "largest gangs: slowdown", "wait, s", "longest wait, s", "outran", "displaced",
)  # fmt: skip
BOOK = ", textbook"
"""How the textbook's schedule under the same policy is named: drawn paler."""
_COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")


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
    bar, gap, tall, top = 20, 20, 240, 100
    kinds = list(dict.fromkeys(outcome.policy.removesuffix(BOOK) for outcome in outcomes))
    fills = [
        f'fill="{_COLOURS[kinds.index(outcome.policy.removesuffix(BOOK)) % len(_COLOURS)]}"'
        + ' fill-opacity="0.45"' * outcome.policy.endswith(BOOK)
        for outcome in outcomes
    ]
    drawn: list[str] = []
    left = 20
    for heading, groups, form in panels:
        most = max((value for _, values in groups for value in values), default=0) or 1
        drawn.append(_text(left, 52, heading, 13, bold=True))
        right = left + 9 * len(heading)
        for name, values in groups:
            for n, value in enumerate(values):
                high = tall * value / most
                x, y = left + n * bar, top + tall - high
                drawn.append(f'<rect x="{x}" y="{y:.1f}" width="{bar - 4}" height="{high:.1f}" {fills[n]}/>')
                drawn.append(_text(x + bar - 8, y - 4, form.format(value), 10, upright=True))
            wide = len(values) * bar
            drawn.append(_text(left + wide / 2, top + tall + 16, name, 11, middle=True))
            left += wide + gap
        left = max(left, right) + gap
    for n, outcome in enumerate(outcomes):
        y = top + tall + 36 + 18 * n
        drawn.append(f'<rect x="20" y="{y}" width="12" height="12" {fills[n]}/>')
        drawn.append(_text(38, y + 10, outcome.policy, 12))
    high = top + tall + 50 + 18 * len(outcomes)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left}" height="{high}" '
            'font-family="sans-serif">',
            f'<rect width="{left}" height="{high}" fill="white"/>',
            _text(20, 24, title, 15, bold=True),
            *drawn,
            "</svg>\n",
        ]
    )


def _text(
    x: float,
    y: float,
    words: str,
    size: int,
    *,
    bold: bool = False,
    middle: bool = False,
    upright: bool = False,
) -> str:
    style = ' font-weight="bold"' * bold + ' text-anchor="middle"' * middle
    style += f' transform="rotate(-90 {x:.1f} {y:.1f})"' * upright
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{style}>{escape(words)}</text>'

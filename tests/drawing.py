"""Pictures as SVG, written by hand: what the bench and the simulator draw with."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")


def document(width: float, height: float, title: str, drawn: Sequence[str]) -> str:
    """A white page with a title and what is drawn on it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            text(20, 24, title, 15, bold=True),
            *drawn,
            "</svg>\n",
        ]
    )


def bar(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A filled rectangle; ``fill``: a colour, or attributes that hold one."""
    style = fill if "=" in fill else f'fill="{fill}"'
    return f'<rect x="{x:g}" y="{y:.1f}" width="{width:.5g}" height="{height:.1f}" {style}/>'


def text(
    x: float,
    y: float,
    words: str,
    size: int,
    *,
    bold: bool = False,
    anchor: str = "start",
    upright: bool = False,
) -> str:
    """Words that begin at the point, or have their "middle" or "end" there. ``upright``: read upwards."""
    style = ' font-weight="bold"' * bold + f' text-anchor="{anchor}"' * (anchor != "start")
    style += f' transform="rotate(-90 {x:.1f} {y:.1f})"' * upright
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}"{style}>{escape(words)}</text>'

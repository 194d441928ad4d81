"""The life of a gang as SVG: ranks as lanes over all epochs, and above them the wait. Pure: rows in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Any

Row = dict[str, Any]

_LEFT, _RIGHT, _LANE, _TOP = 56, 944, 18, 44
_MOST = 128
"""Lanes that are drawn; a larger gang shows its first ranks."""
_MARKS = {
    "ack": ("confirmed gone", "o"),
    "force": ("forced to stop", "x"),
    "dead": ("ended with its worker", "x"),
    "trip": ("tripped", "!"),
    "lost": ("worker lost", "x"),
}


def timeline(steps: Sequence[Row], attempts: Sequence[Row], now: datetime, ended: datetime | None) -> str:
    """Draw a gang's life: `steps` of gangq.timeline, `attempts` of gangq.attempts."""
    if not steps:
        return ""
    start, end = steps[0]["at"], ended or now
    length = max((end - start).total_seconds(), 0.001)

    def x(at: datetime) -> float:
        share: float = (at - start).total_seconds() / length
        return _LEFT + (_RIGHT - _LEFT) * min(max(share, 0.0), 1.0)

    ranks = sorted({row["rank"] for row in attempts if row["rank"] is not None})[:_MOST]
    lane = {rank: _TOP + _LANE * place for place, rank in enumerate(ranks)}
    bottom = _TOP + _LANE * len(ranks)
    parts = [
        f'<svg class="timeline" viewBox="0 0 960 {bottom + 26}" role="img" '
        f'aria-label="Timeline of {len(ranks)} ranks over {length:.0f} seconds">'
    ]
    parts += [
        _bar(x(a), x(b), 10, 14, kind, f"{kind}: {(b - a).total_seconds():.1f} s")
        for a, b, kind in _waits(steps, end)
    ]
    parts.append('<text x="4" y="21">wait</text>')
    parts += [f'<text x="4" y="{y + 12}">rank {rank}</text>' for rank, y in lane.items()]
    for row in attempts:
        if row["rank"] in lane:
            until = row["ended_at"] or end
            said = f"epoch {row['epoch'] or '?'} on {row['worker']} ({row['host']}): {row['cause'] or 'runs'}"
            kind = {"done": "done", None: "runs"}.get(row["cause"], "ended")
            parts.append(_bar(x(row["started_at"]), x(until), lane[row["rank"]], 13, kind, said))
    for row in steps:
        at = x(row["at"])
        said = f"{row['at']:%H:%M:%S} {row['what']} {row['reason'] or ''}"
        if row["what"] in ("drain", "preempt", "reserve", "go", "end"):
            parts.append(
                f'<line class="step {row["what"]}" x1="{at:.1f}" x2="{at:.1f}" y1="30" y2="{bottom}">'
                f"<title>{escape(said)}</title></line>"
            )
        if row["what"] in ("drain", "preempt"):
            parts.append(
                f'<text class="mark" x="{at:.1f}" y="38">{"stop" if row["what"] == "drain" else "displaced"}</text>'
            )
        elif row["what"] in _MARKS and row["rank"] in lane:
            label, sign = _MARKS[row["what"]]
            parts.append(
                f'<text class="mark" x="{at:.1f}" y="{lane[row["rank"]] + 11}">{sign}'
                f"<title>{escape(label)}: {escape(said)}</title></text>"
            )
    parts.append(f'<text x="{_LEFT}" y="{bottom + 18}">{start:%Y-%m-%d %H:%M:%S}</text>')
    parts.append(f'<text x="{_RIGHT}" y="{bottom + 18}" text-anchor="end">{end:%H:%M:%S}</text></svg>')
    return "".join(parts)


def _waits(steps: Sequence[Row], end: datetime) -> list[tuple[datetime, datetime, str]]:
    """When the gang waited: to be placed, to be claimed, and at the start barrier."""
    found: list[tuple[datetime, datetime, str]] = []
    since, kind = steps[0]["at"], "placement"
    following = {
        "reserve": "claim",
        "claim": "barrier",
        "go": "",
        "drain": "stopping",
        "drained": "placement",
    }
    following |= {"rollback": "placement", "end": ""}
    for row in steps[1:]:
        becomes = following.get(row["what"])
        if becomes is None or becomes == kind:
            continue
        if kind:
            found.append((since, row["at"], kind))
        since, kind = row["at"], becomes
    return [*found, (since, end, kind)] if kind else found


def _bar(left: float, right: float, top: float, height: float, kind: str, said: str) -> str:
    return (
        f'<rect class="bar {kind}" x="{left:.1f}" y="{top}" width="{max(right - left, 1):.1f}" height="{height}">'
        f"<title>{escape(said)}</title></rect>"
    )

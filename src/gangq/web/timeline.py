"""The life of a gang as SVG: ranks as lanes over all epochs, and above them the wait. Pure: rows in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape

from gangq.web.waits import OWNERS, Row, Wait

_LEFT, _RIGHT, _WIDTH, _LANE = 56, 900, 960, 18
_BAR, _TOLD, _WHO, _TOP = 8, 36, 48, 54
"""From the top: the wait, when it was told to stop, who displaced it, the lanes."""
_MOST = 128
"""Lanes that are drawn; a larger gang shows its first ranks."""
_CHARACTER = 5.6
_MARKS = {
    "ack": ("confirmed gone", "o"),
    "force": ("forced to stop", "x"),
    "dead": ("ended with its worker", "x"),
    "trip": ("tripped", "!"),
    "lost": ("worker lost", "x"),
}


def day_and_time(at: datetime) -> str:
    """A moment with its zone, the same for everybody who looks."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"


@dataclass
class Life:
    """What is drawn: rows of gangq.timeline (one at least), attempts, member_beats (of all attempts) and preemptions;
    the waits.
    """

    steps: Sequence[Row]
    attempts: Sequence[Row]
    beats: Sequence[Row]
    displaced: Sequence[Row]
    waits: Sequence[Wait]
    epoch: int
    end: datetime
    base: str = field(kw_only=True)
    """The path that links begin with."""

    def __post_init__(self) -> None:
        self._start = self.steps[0]["at"]
        self._length = max((self.end - self._start).total_seconds(), 0.001)
        ranks = sorted({(r["rank"], r["job_id"]) for r in self.attempts if r["rank"] is not None})[:_MOST]
        self._lanes = {job: (_TOP + _LANE * place, rank) for place, (rank, job) in enumerate(ranks)}
        self._bottom = _TOP + _LANE * len(ranks)

    def drawn(self) -> str:
        """From the first step on record to the end of the gang, or now."""
        parts = [
            f'<svg class="timeline" viewBox="0 0 {_WIDTH} {self._bottom + 26}" role="group" '
            f'aria-label="Timeline of {len(self._lanes)} ranks over {self._length:.0f} seconds">',
            f'<text x="4" y="{_BAR + 11}">wait</text>',
            *self._waits(),
            *(f'<text x="4" y="{y + 12}">rank {rank}</text>' for y, rank in self._lanes.values()),
            *self._attempts(),
            *self._beats(),
            *self._steps(),
            f'<text x="{_LEFT}" y="{self._bottom + 18}">{day_and_time(self._start)}</text>',
            f'<text x="{_RIGHT}" y="{self._bottom + 18}" text-anchor="end">{_time(self.end)}</text></svg>',
        ]
        return "".join(parts)

    def _x(self, at: datetime) -> float:
        share: float = (at - self._start).total_seconds() / self._length
        return _LEFT + (_RIGHT - _LEFT) * min(max(share, 0.0), 1.0)

    def _waits(self) -> list[str]:
        parts = []
        for wait in self.waits:
            left = self._x(wait.since)
            scale = (self._x(wait.until) - left) / (wait.until - wait.since).total_seconds()
            for owner, seconds in wait.seconds.items():
                width = seconds * scale
                parts.append(_bar(left, width, _BAR, 14, owner, f"{owner}: {seconds:.1f} s, {OWNERS[owner]}"))
                if width > _CHARACTER * len(owner):
                    parts.append(f'<text class="on" x="{left + 2:.1f}" y="{_BAR + 11}">{owner}</text>')
                left += width
        return parts

    def _attempts(self) -> list[str]:
        parts = []
        for row in self.attempts:
            if row["job_id"] in self._lanes:
                y, _ = self._lanes[row["job_id"]]
                epoch = row["epoch"] or (self.epoch if row["cause"] is None else "not on record")
                said = f"epoch {epoch} on {row['worker']} ({row['host']}): {row['cause'] or 'runs'}"
                kind = {"done": "done", None: "runs"}.get(row["cause"], "ended")
                left = self._x(row["started_at"])
                width = self._x(row["ended_at"] or self.end) - left
                parts.append(_bar(left, width, y, 13, kind, said))
        return parts

    def _beats(self) -> list[str]:
        """Of each attempt the last beat, how long it was silent after it, and its newest checkpoint."""
        parts = []
        drawn: set[tuple[int, datetime]] = set()
        for row in self.beats:
            if row["job_id"] not in self._lanes:
                continue
            y, _ = self._lanes[row["job_id"]]
            if row["beat_at"] is not None:
                end = row["stopped_at"] or self.end
                at, gap = self._x(row["beat_at"]), (end - row["beat_at"]).total_seconds()
                known = row["longest_gap_s"]
                kind = "silent" if known is not None and gap > known else "quiet"
                ago = "before it stopped" if row["stopped_at"] else "ago"
                said = f"last beat {_time(row['beat_at'])}, {gap:.0f} s {ago}, step {_or(row['step'])}"
                if known is not None:
                    said += f"; beats of its task have stayed away for {known:.0f} s without harm"
                parts += [
                    _bar(at, self._x(end) - at, y + 10, 3, kind, said),
                    f'<circle class="beat" cx="{at:.1f}" cy="{y + 6.5}" r="3"><title>{escape(said)}</title></circle>',
                ]
                if row["step"] is not None and row["stopped_at"] is None:
                    parts.append(f'<text x="{_RIGHT + 6}" y="{y + 11}">{row["step"]}</text>')
            # A checkpoint that is restored belongs to the attempts after it too.
            if row["saved_at"] is not None and (row["job_id"], row["saved_at"]) not in drawn:
                drawn.add((row["job_id"], row["saved_at"]))
                at = self._x(row["saved_at"])
                parts.append(
                    f'<path class="saved" d="M{at:.1f} {y + 1} l5 5.5 l-5 5.5 l-5 -5.5z">'
                    f"<title>checkpoint of step {row['saved_step']}, {_time(row['saved_at'])}</title></path>"
                )
        return parts

    def _steps(self) -> list[str]:
        parts: list[str] = []
        free = _LEFT
        first: dict[int, bool] = {}
        for row in self.steps:
            at, what = self._x(row["at"]), row["what"]
            said = f"{_time(row['at'])} {what} {row['reason'] or ''}"
            if what in ("drain", "reserve", "go", "end"):
                parts.append(
                    f'<line class="step {what}" x1="{at:.1f}" x2="{at:.1f}" y1="26" y2="{self._bottom}">'
                    f"<title>{escape(said)}</title></line>"
                )
            if what == "drain":
                first[row["epoch"]] = row["job_id"] in self._lanes
                if first[row["epoch"]]:
                    parts.append(self._mark(row["job_id"], at, "1st", f"first to stop: {said}", "end"))
                if at >= free:
                    parts.append(f'<text class="mark" x="{at + 2:.1f}" y="{_TOLD}">told to stop</text>')
                    free = round(at + 13 * _CHARACTER)
            elif what in _MARKS and row["job_id"] in self._lanes:
                label, sign = _MARKS[what]
                if what != "trip" and not first.setdefault(row["epoch"], True):
                    first[row["epoch"]] = True
                    parts.append(self._mark(row["job_id"], at, "1st", f"first to stop: {said}", "end"))
                parts.append(self._mark(row["job_id"], at, sign, f"{label}: {said}", "start"))
        return [*parts, *self._displaced()]

    def _displaced(self) -> list[str]:
        """Who displaced it, as a link below the moment."""
        parts: list[str] = []
        most = float(_WIDTH)
        for row in reversed(self.displaced):
            what, path = displacer(row)
            said = f"displaced by {what}"
            # Where the picture or the next one would be in the way, it moves to the left.
            at = min(self._x(row["at"]) + 2, most - _CHARACTER * (len(said) + 1))
            most = at
            parts.append(
                f'<a href="{escape(self.base + path)}"><text class="mark" x="{at:.1f}" y="{_WHO}">'
                f"{said}<title>{said}, {_time(row['at'])}</title></text></a>"
            )
        return parts[::-1]

    def _mark(self, job_id: int, at: float, sign: str, said: str, anchor: str) -> str:
        y, _ = self._lanes[job_id]
        return (
            f'<text class="mark on" text-anchor="{anchor}" x="{at + (2 if anchor == "start" else -2):.1f}" '
            f'y="{y + 11}">{sign}<title>{escape(said)}</title></text>'
        )


def displacer(row: Row) -> tuple[str, str]:
    """The name and the path of what displaced this, of a row of gangq.preemptions."""
    if row["for_gang"] is not None:
        return f"g{row['for_gang']}", f"/gangs/{row['for_gang']}"
    return f"job {row['for_job']}", f"/jobs/{row['for_job']}"


def _or(step: int | None) -> str:
    return "not told" if step is None else str(step)


def _bar(left: float, width: float, top: float, height: float, kind: str, said: str) -> str:
    return (
        f'<rect class="bar {kind}" x="{left:.1f}" y="{top}" width="{max(width, 1):.1f}" height="{height}">'
        f"<title>{escape(said)}</title></rect>"
    )

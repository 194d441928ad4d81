"""How far running jobs are: as bars below what a command prints, on a terminal only."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangq.cli import output
from gangq.cli.tables import cut

if TYPE_CHECKING:
    from gangq.client.rows import JobRow

_BAR = 10


def bar(done: float | None, total: float | None, width: int = _BAR) -> str:
    """Progress as a bar with percent, or nothing where it is not known."""
    if done is None or not total or total < 0:
        return ""
    share = min(1.0, max(0.0, done / total))
    full = int(share * width)
    return f"{share:4.0%} {'█' * full}{'░' * (width - full)}"


def remaining_s(done: float | None, total: float | None, rate: float | None) -> float | None:
    """Seconds until the last step at the present rate; None where that is not known."""
    if done is None or total is None or not rate or rate < 0:
        return None
    return max(0.0, total - done) / rate


def number(value: object) -> float | None:
    """A step or a total as a handler said it; None for what is no number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def line(job: JobRow) -> str:
    """How far a running job is, with its rank in front if it is a member; nothing of one that tells no steps."""
    beat: Mapping[str, Any] = job.progress if isinstance(job.progress, Mapping) else {}
    step, total = number(beat.get("step")), number(beat.get("total"))
    if job.state not in ("running", "preempting") or step is None:
        return ""
    left = remaining_s(step, total, job.step_rate)
    said = [
        f"[{job.rank}]" if job.rank is not None else "",
        bar(step, total, 20),
        f"step {step:.15g}" + (f"/{total:.15g}" if total is not None else ""),
        f"{job.step_rate:.3g} steps/s" if job.step_rate else "",
        f"{output.seconds(left)} left" if left is not None else "",
        str(beat.get("phase") or ""),
    ]
    return output.plain("  ".join(part for part in said if part))


class Bars:
    """Lines below all others on standard error, drawn again in their place. Without a terminal nothing is drawn.

    Whoever prints calls `clear` first; the next `draw` puts them below what was printed.
    """

    def __init__(self) -> None:
        self.on = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn = 0
        self._text = ""

    def clear(self) -> None:
        """Take the lines away."""
        if self._drawn:
            output.write(self._up(), err=True, nl=False)
        self._drawn, self._text = 0, ""

    def draw(self, jobs: Sequence[JobRow]) -> None:
        """Draw a line of each job that tells its steps, as many as the terminal has room for."""
        if not self.on:
            return
        size = shutil.get_terminal_size()
        lines = [text for job in jobs if (text := line(job))]
        most = max(1, size.lines - 4)
        if len(lines) > most:
            lines = [*lines[: most - 1], f"and {len(lines) - most + 1} more"]
        # The last column stays empty: a terminal would put the next character into a line of its own.
        text = "".join(f"{cut(one, size.columns - 1)}\n" for one in lines)
        if text != self._text:
            output.write(self._up(), text, err=True, nl=False)
            self._drawn, self._text = len(lines), text

    def _up(self) -> str:
        return output.Coloured(f"\r\x1b[{self._drawn}A\x1b[J" if self._drawn else "")

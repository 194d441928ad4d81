"""How far running jobs are: as bars below what a command prints, on a terminal only."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangq.cli import output
from gangq.cli.tables import cut
from gangq.errors import GangqError
from gangq.status import batch_in_words

if TYPE_CHECKING:
    from gangq.cli.which import Which
    from gangq.client import Client
    from gangq.client.rows import BatchRow, JobRow

_BAR = 10
_ASK_EVERY_S = 1.0
_RUNNING = ("running", "preempting")
_CLEAR_BELOW = output.Coloured("\r\x1b[J")


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


def job_line(job: JobRow, whose: str = "") -> str:
    """How far a running job is, with `whose` job it is and its rank or index in front; nothing of one that tells no
    steps.
    """
    beat: Mapping[str, Any] = job.progress if isinstance(job.progress, Mapping) else {}
    step, total = number(beat.get("step")), number(beat.get("total"))
    if job.state not in ("running", "preempting") or step is None:
        return ""
    left = remaining_s(step, total, job.step_rate)
    place = job.array_index if job.rank is None else job.rank
    said = [
        whose,
        f"[{place}]" if place is not None else "",
        bar(step, total, 20),
        f"step {step:.15g}" + (f"/{total:.15g}" if total is not None else ""),
        f"{job.step_rate:.3g} steps/s" if job.step_rate else "",
        f"{output.seconds(left)} left" if left is not None else "",
        str(beat.get("phase") or ""),
    ]
    return output.plain("  ".join(part for part in said if part))


class Bars:
    """Lines below all others on standard error, drawn again in their place: of each job that tells its steps, of each
    member of a gang, and of a batch with its running jobs. Without a terminal nothing is drawn.

    Whoever prints calls `clear` first; the next `draw` puts them below what was printed. The cursor rests where the
    lines begin, so that they go whole wherever a Ctrl-C interrupts: nobody must know how many were written.
    """

    def __init__(self, client: Client, targets: Sequence[Which]) -> None:
        self.on = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._client = client
        self._targets = list(targets)
        self._ask_at = time.monotonic()
        self._lines: list[str] = []
        self._ended_first: dict[int, tuple[float, int]] = {}
        self._text = ""

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def leave_out(self, target: Which) -> None:
        """Draw nothing of this one any more."""
        self._targets.remove(target)
        self._ask_at = time.monotonic()
        self.clear()

    def clear(self) -> None:
        """Take the lines away."""
        if self._text:
            output.write(_CLEAR_BELOW, err=True, nl=False)
            self._text = ""

    def draw(self) -> None:
        """Ask how far they are, once a second at most, and draw as many lines as the terminal has room for."""
        if not self.on:
            return
        size = shutil.get_terminal_size()
        most = max(1, size.lines - 4)
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_EVERY_S
            try:
                self._lines = self._look(now, most)
            except GangqError as problem:
                # Who waits for the database says so.
                if not problem.retryable:
                    raise
        lines = self._lines
        if len(lines) > most:
            lines = [*lines[: most - 1], f"and {len(lines) - most + 1} more"]
        # The last column stays empty: a terminal would put the next character into a line of its own.
        text = "".join(f"{cut(one, size.columns - 1)}\n" for one in lines)
        if text != self._text:
            self._text = text
            back = output.Coloured(f"\x1b[{len(lines)}A" if lines else "")
            output.write(_CLEAR_BELOW, text, back, err=True, nl=False)

    def _look(self, now: float, most: int) -> list[str]:
        several = len(self._targets) > 1
        jobs = [target.id for target in self._targets if target.kind == "job"]
        # One more than there is room for: then the last line says that there are more.
        rows = self._client.jobs(ids=jobs, state=_RUNNING, limit=most + 1) if jobs else []
        lines = [job_line(job, str(job.id) if several else "") for job in reversed(rows)]
        for target in self._targets:
            whose = str(target) if several else ""
            if target.gang:
                members = self._client.jobs(gang_id=target.id, state=_RUNNING, limit=None)
                members.sort(key=lambda member: member.rank or 0)
                lines += [job_line(member, whose) for member in members]
            elif target.batch:
                batch = self._client.batch(id=target.id)
                running = self._client.jobs(batch_id=target.id, state=_RUNNING, limit=most + 1)
                lines.append(self._batch_line(batch, now))
                lines += [job_line(job, whose) for job in reversed(running)]
        return [line for line in lines if line]

    def _batch_line(self, batch: BatchRow, now: float) -> str:
        """How much of a batch has ended, and how fast that went since it was first asked for."""
        ended = batch.done + batch.failed + batch.cancelled
        since, before = self._ended_first.setdefault(batch.id, (now, ended))
        rate = (ended - before) / (now - since) if now > since else 0.0
        left = remaining_s(ended, batch.size, rate)
        said = [
            f"b{batch.id}",
            bar(ended, batch.size, 20),
            batch_in_words(batch),
            f"{rate:.3g} jobs/s" if rate else "",
            f"{output.seconds(left)} left" if left is not None else "",
        ]
        return "  ".join(part for part in said if part)

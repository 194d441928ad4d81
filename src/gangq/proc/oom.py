"""Telling a kill by the kernel for want of memory from any other SIGKILL.

Both look the same to a parent. But the kernel counts the former, per memory cgroup, before it sends the signal.
"""

from __future__ import annotations

from . import cgroup

_SETTLE_S = 1.0


class OomWatch:
    """Whether a process in a memory cgroup was killed for want of memory just before a process in it died."""

    def __init__(self, group: cgroup.Group | None) -> None:
        self._group = group
        first = cgroup.oom_kills(group)
        self._known = first
        self._newest = first
        self._newest_at = 0.0

    def look(self, now: float) -> None:
        """Note the count; to be called now and then while all is well.

        What is compared at the end was read a second earlier at least: a worker that is being killed may
        still give a sign of life between the count and its death.
        """
        if now - self._newest_at >= _SETTLE_S:
            self._known, self._newest, self._newest_at = self._newest, cgroup.oom_kills(self._group), now

    def killed(self) -> bool:
        """Whether the count has risen since."""
        now = cgroup.oom_kills(self._group)
        return now is not None and self._known is not None and now > self._known

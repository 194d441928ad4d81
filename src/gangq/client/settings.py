r"""What administrators may set of a queue and of a task, by name; what they may set of all is not listed here.

Lengths of time, whose names end in _s, are seconds, texts such as "90s", or timedeltas. What each means, its default
and its bounds: `\d+ gangq.settings`, `\d+ gangq.queues_table` and `\d+ gangq.task_settings` in psql.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypedDict

from gangq.durations import Duration


class QueueSettings(TypedDict, total=False):
    """Of one queue. None takes a setting away where there may be none."""

    paused: bool
    paused_until: datetime | None
    draining: bool
    policy: str
    guaranteed: Mapping[str, float] | None
    maximum: Mapping[str, float] | None
    submitter_maximum: Mapping[str, int] | None
    max_running_gangs: int | None
    max_running_jobs: int | None
    rate: str | None
    weight: float
    preempts: bool
    preemptible: bool
    min_run_s: Duration
    placement_timeout_s: Duration | None
    timeout_style: str | None
    others: str
    ceilings: Mapping[str, int] | None
    max_attempts: int
    max_crashes: int
    max_trips: int
    backoff_s: Duration
    backoff_max_s: Duration
    budget_s: Duration | None
    max_payload_bytes: int
    retention_done: str
    retention_failed: str


class TaskSettings(TypedDict, total=False):
    """Of one task. None takes a setting away: the installation's holds."""

    budget_s: Duration | None
    stall_timeout_s: Duration | None
    load_grace_s: Duration | None
    health_window_s: Duration | None
    long_phase_s: Duration | None
    notify_only: Sequence[str] | None

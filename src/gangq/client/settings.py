r"""What administrators may set, by name.

Lengths of time, whose names end in _s, are seconds, texts such as "90s", or timedeltas. What each means, its default
and its bounds: `\d+ gangq.settings` and `\d+ gangq.queues_table` in psql.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
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


class InstallationSettings(TypedDict, total=False):
    """Of the whole installation."""

    heartbeat_s: Duration
    lease_s: Duration
    lease_margin_s: Duration
    grace_s: Duration
    claim_deadline_s: Duration
    ack_timeout_s: Duration
    candidate_silence_s: Duration
    pass_over_s: Duration
    flag_after_s: Duration
    tick_s: Duration
    gang_backoff_s: Duration
    gang_backoff_max_s: Duration
    topology: Sequence[str]
    reservations: int
    placement_timeout_s: Duration
    preemptions_per_pass: int
    warm_s: Duration
    record_decisions: bool
    max_stops: int
    budget_s: Duration
    budget_gpu_s: Duration
    stall_timeout_s: Duration
    load_grace_s: Duration
    health_window_s: Duration
    long_phase_s: Duration
    gang_stall_s: Duration
    straggler_s: Duration
    brake_share: float
    brake_hold_s: Duration
    device_trips: int
    bounces_per_hour: int
    notify_only: Sequence[str]
    new_shapes_per_day: int
    checkpoint_bytes: int
    log_bytes: int
    retention_short: timedelta | str
    retention_long: timedelta | str
    incarnation_retention: timedelta | str

r"""What administrators may set, by name.

What each means, its default and its bounds: `\d+ gangq.settings` and `\d+ gangq.queues_table` in psql.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypedDict


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
    weight: float
    preempts: bool
    preemptible: bool
    min_run_s: float
    placement_timeout_s: float | None
    timeout_style: str | None
    others: str
    ceilings: Mapping[str, int] | None
    max_attempts: int
    max_crashes: int
    max_trips: int
    backoff_s: float
    backoff_max_s: float
    budget_s: float | None
    max_payload_bytes: int
    retention_done: str
    retention_failed: str


class TaskSettings(TypedDict, total=False):
    """Of one task. None takes a setting away: the installation's holds."""

    budget_s: float | None
    stall_timeout_s: float | None
    load_grace_s: float | None
    health_window_s: float | None
    long_phase_s: float | None
    notify_only: Sequence[str] | None


class InstallationSettings(TypedDict, total=False):
    """Of the whole installation."""

    heartbeat_s: float
    lease_s: float
    lease_margin_s: float
    grace_s: float
    claim_deadline_s: float
    ack_timeout_s: float
    candidate_silence_s: float
    pass_over_s: float
    flag_after_s: float
    tick_s: float
    gang_backoff_s: float
    gang_backoff_max_s: float
    topology: Sequence[str]
    reservations: int
    placement_timeout_s: float
    preemptions_per_pass: int
    warm_s: float
    record_decisions: bool
    max_stops: int
    budget_s: float
    budget_gpu_s: float
    stall_timeout_s: float
    load_grace_s: float
    health_window_s: float
    long_phase_s: float
    gang_stall_s: float
    straggler_s: float
    brake_share: float
    brake_hold_s: float
    device_trips: int
    bounces_per_hour: int
    notify_only: Sequence[str]
    new_shapes_per_day: int
    checkpoint_bytes: int
    log_bytes: int
    retention_short: timedelta | str
    retention_long: timedelta | str
    incarnation_retention: timedelta | str

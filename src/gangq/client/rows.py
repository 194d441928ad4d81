r"""What the database answers, as named tuples: one per SQL function that returns rows, one per view (`gangq.jobs` is
read as `JobRow`s; `gangq.client.views` says so of each).

What a column means is said with its view or function: `\d+ gangq.jobs`, `\df+ gangq.claim` in psql, or the reference
of SQL. NULL is None.

Field names are column names, and every call selects exactly these: a newer schema may add columns and reorder
them under a running process. Times are timezone-aware, by the database's clock; memory is in MiB; a name that
ends in `_s` is seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from typing import Annotated, Any, NamedTuple, get_type_hints


@functools.cache
def columns(row: Any) -> str:
    """Return the select list of a row type: its fields, or the expressions that they are annotated with."""
    hints = get_type_hints(row, include_extras=True)
    # A sum of bigint is numeric, which would arrive as Decimal; a keyword of Python has an underscore behind it.
    return ", ".join(getattr(hint, "__metadata__", [name.rstrip("_")])[0] for name, hint in hints.items())


# Answers of functions ---------------------------------------------------------------------------------------


class GangSubmitted(NamedTuple):
    """A gang just submitted. `note`: why no worker set could hold it now, if so."""

    gang_id: int
    job_ids: list[int]
    note: str | None


class UniqueSubmitted(NamedTuple):
    """The job that a unique key stands for."""

    job_id: int
    existed: bool
    replaced: bool


class UniqueGangSubmitted(NamedTuple):
    """The gang that a unique key stands for."""

    gang_id: int
    job_ids: list[int]
    note: str | None
    existed: bool


class ScheduledRun(NamedTuple):
    """What a schedule submitted by hand: a job, or a gang and its rank 0."""

    job_id: int
    gang_id: int | None


class UnplannedSchedule(NamedTuple):
    """A schedule whose next due time is to be computed: the first after `after`."""

    name: str
    cron: str
    tz: str
    catch_up: str
    after: datetime
    now: datetime


class StateChange(NamedTuple):
    """State of a job, or of a gang (`job_id` None), after cancel, retry or set_priority."""

    job_id: int | None
    gang_id: int | None
    state: str


class Registration(NamedTuple):
    """A worker's new incarnation, and the numbers it lives by."""

    incarnation: int
    lease_granted_s: float
    heartbeat_s: float
    lease_margin_s: float
    grace_s: float
    ack_timeout_s: float
    tick_s: float
    log_bytes: int
    checkpoint_bytes: int
    withheld: list[str]
    registered_at: datetime


class Instruction(NamedTuple):
    """What to do with one claim: continue, preempt, cancel or lost."""

    job_id: int
    token: int
    action: str
    reason: str | None
    gang_id: int | None
    epoch: int | None


class Predecessor(NamedTuple):
    """The latest incarnation of a name. `exits_at` and `exit_code` belong to a trip whose process is not proven gone
    yet.
    """

    incarnation: int
    state: str
    host: str
    boot_id: str | None
    pid: int | None
    identity: dict[str, Any]
    ended_at: datetime | None
    quarantined: str | None
    reboot_needed: bool
    exits_at: datetime | None
    exit_code: int | None
    devices: list[str]


class Claim(NamedTuple):
    """One claimed job. Gang fields are None for a solo job, `master_port` for every rank but 0."""

    job_id: int
    token: int
    state: str
    queue: str
    task: str
    payload: Any
    attempt: int
    max_attempts: int
    priority: int
    budget_s: float | None
    gang_id: int | None
    epoch: int | None
    rank: int | None
    world_size: int | None
    master_port: int | None
    checkpoint_step: int | None
    devices: list[dict[str, Any]]
    submitted_at: datetime
    light: bool
    model: Annotated[str | None, "model_needed"]
    trace: str | None
    array_index: int | None = None


class WatchTerms(NamedTuple):
    """What the watchdogs allow jobs of one task."""

    budget_s: float
    budget_gpu_s: float
    stall_timeout_s: float
    load_grace_s: float
    health_window_s: float
    long_phase_s: float
    notify_only: list[str]
    learned: bool


class BarrierMember(NamedTuple):
    """One member of this epoch of the caller's gang, by rank."""

    go: bool
    epoch: int
    rank: int
    job_id_of_rank: int
    worker: str | None
    host: str | None
    local_rank: int
    node_rank: int
    local_world_size: int
    master_addr: str | None
    master_port: int | None
    role: str
    role_rank: int
    service: str | None
    revision: int | None
    health: str | None


class Outcome(NamedTuple):
    """What a final call did for one job: done or released, repeated, stale, or busy."""

    job_id: int
    outcome: str


class CompletedAndClaimed(NamedTuple):
    """What became of the finished jobs, and what was claimed in the same call."""

    outcomes: list[Outcome]
    claims: list[Claim]

    @staticmethod
    def select_list() -> str:
        """What is selected: of what was finished only the columns that say so hold something."""
        return f"outcome, {columns(Claim)}"

    @staticmethod
    def of_rows(found: Sequence[Sequence[Any]]) -> CompletedAndClaimed:
        """Tell the two kinds of rows apart."""
        return CompletedAndClaimed(
            [Outcome(row[1], row[0]) for row in found if row[0] != "claimed"],
            [Claim._make(row[1:]) for row in found if row[0] == "claimed"],
        )


class SavedCheckpoint(NamedTuple):
    """The checkpoint to resume from."""

    step: int
    data: bytes


class Input(NamedTuple):
    """How a job ended that another one waited for."""

    on_job_id: int
    gang_id: int | None
    rank: int | None
    state: str
    readable: bool
    result: Any
    error: dict[str, Any] | None


class ApplyReport(NamedTuple):
    """What became of a part of a pass."""

    accepted: bool
    outcomes: dict[str, str]
    again: bool


class TickReport(NamedTuple):
    """What a tick did, and when to call it again."""

    ran: bool
    again: bool
    next_in_s: float | None
    detail: dict[str, Any] | None
    next_turn: int | None
    decide: bool
    unplanned: int


class Reason(NamedTuple):
    """One gate between a gang or job and running: whether it is passed, why, with the numbers."""

    gate: str
    ok: bool
    detail: str
    numbers: dict[str, Any] | None


class PlanRow(NamedTuple):
    """What the next pass would do with a gang, `before` and `after` the changes asked about: start, plan, wait, stop
    (others for it) or move; absent, placed, displaced or gone. `gang_id` None: one that the changes submit. `stop`:
    who is told to stop, g7 or j12.
    """

    gang_id: int | None
    queue: str
    task: str | None
    priority: int
    size: int
    before: str
    after: str
    starts_before: datetime | None
    starts_after: datetime | None
    place: int | None
    members: int | None
    hosts: dict[str, int] | None
    stop: list[str]
    gate: str | None
    changed: bool
    why: str


class ReplayRow(NamedTuple):
    """A recorded pass run once more. `same`: it decides what it decided then; None: its board was not recorded."""

    at: datetime
    digest: str
    decisions: int
    same: bool | None
    difference: str | None


class Unproven(NamedTuple):
    """An incarnation that ended by a trip, with `exit_code`, and is to be gone by `exits_at`; not yet proven."""

    incarnation: int
    host: str
    boot_id: str | None
    pid: int | None
    identity: dict[str, Any]
    exits_at: datetime
    exit_code: int | None


# Views ------------------------------------------------------------------------------------------------------


class JobRow(NamedTuple):
    id: int
    queue: str
    task: str
    state: str
    priority: int
    gang_id: int | None
    rank: int | None
    worker: str | None
    host: str | None
    attempts: int
    max_attempts: int
    crashes: int
    trips: int
    stops: int
    submitted_at: datetime
    due_at: datetime | None
    claimed_at: datetime | None
    finished_at: datetime | None
    told_at: datetime | None
    stop_reason: str | None
    token: int | None
    budget_s: float | None
    progress: Any
    payload: Any
    result: Any
    error: dict[str, Any] | None
    submitter: str
    login: str
    readable: bool
    model: str | None
    gpus: int
    vram_mb: int
    memory_mb: int
    labels: dict[str, Any]
    parent: int | None
    max_trips: int
    batch_id: int | None
    array_index: int | None
    cpus: Annotated[float, "cpus::float8"]
    step_rate: float | None
    snoozes: int
    max_snoozes: int


class BatchRow(NamedTuple):
    id: int
    name: str
    tags: list[str]
    queue: str
    task: str
    state: str
    size: int
    at_most: int | None
    waiting: int
    running: int
    done: int
    failed: int
    cancelled: int
    submitted_at: datetime
    finished_at: datetime | None
    submitter: str
    login: str


class GangRow(NamedTuple):
    id: int
    name: str | None
    queue: str
    task: str
    state: str
    size: int
    epoch: int
    priority: int
    attempts: int
    max_attempts: int
    placement_misses: int
    never_started: int
    preemptions: int
    submitted_at: datetime
    not_before: datetime | None
    reserved_at: datetime | None
    deadline_at: datetime | None
    go_at: datetime | None
    finished_at: datetime | None
    drain_cause: str | None
    note: str | None
    reason: str | None
    hosts: list[str] | None
    submitter: str
    login: str
    service: str | None


class WorkerRow(NamedTuple):
    name: str
    host: str
    state: str
    incarnation: int
    slots: int
    used_slots: int
    light: int
    used_light: int
    prefetch: int
    queues: list[str]
    tasks: list[str] | None
    labels: dict[str, Any]
    gpus: int
    memory_mb: int
    pid: int | None
    registered_at: datetime
    renewed_at: datetime | None
    flagged_at: datetime | None
    passed_over_until: datetime | None
    quarantined: str | None
    model: str | None
    exits_at: datetime | None
    exit_code: int | None
    reboot_needed: bool
    last_beat_at: datetime | None
    step_rate: float | None
    cordoned: str | None
    taints: list[str]
    login: str | None
    task_options: dict[str, dict[str, Any]] | None
    cgroups: bool | None
    cpus: Annotated[float, "cpus::float8"]
    silent_s: Annotated[float | None, "silent_s::float8"]
    lease_left_s: Annotated[float | None, "lease_left_s::float8"]


class DeviceRow(NamedTuple):
    uuid: str
    host: str
    index: int  # type: ignore[assignment]  # in place of the method of tuples
    vram_mb: int
    model: str
    source: str
    link: int | None
    worker: str | None
    state: str
    job_id: int | None
    reason: str | None
    since: datetime | None
    health: str
    trips_day: int
    reading: dict[str, Any] | None
    read_at: datetime | None


class TripRow(NamedTuple):
    at: datetime
    code: int | None
    reason: str | None
    outcome: str | None
    task: str | None
    queue: str | None
    job_id: int
    gang_id: int | None
    epoch: int | None
    rank: int | None
    worker: str | None
    host: str | None
    devices: list[str]
    trips: int | None
    poison: bool
    evidence: dict[str, Any] | None
    class_: str | None


class FlaggedRow(NamedTuple):
    worker: str
    host: str
    incarnation: int
    flagged_at: datetime
    jobs: list[int]
    pid: int | None
    identity: dict[str, Any]
    silent_s: Annotated[float, "silent_s::float8"]


class CordonRow(NamedTuple):
    kind: str
    name: str
    state: str
    drain: bool
    since: datetime
    deadline: datetime | None
    reason: str
    operator: str
    workers: int
    gangs: list[int]
    jobs: list[int]


class EvidenceRow(NamedTuple):
    at: datetime
    kind: str
    job_id: int | None
    token: int | None
    incarnation: int | None
    data: dict[str, Any]


class WaitingRow(NamedTuple):
    kind: str
    id: int
    queue: str
    task: str
    priority: int
    size: int
    state: str
    since: datetime
    why: str | None
    gate: str | None
    starts_at: datetime | None


class TimelineRow(NamedTuple):
    gang_id: int
    epoch: int | None
    at: datetime
    what: str
    job_id: int | None
    rank: int | None
    worker: str | None
    host: str | None
    reason: str | None
    data: dict[str, Any] | None
    actor: str | None


class DrainRow(NamedTuple):
    gang_id: int
    epoch: int
    cause: str | None
    trigger_job: int | None
    moved: int
    acked: int
    forced: int
    dead: int
    outcome: str | None
    started_at: datetime
    ended_at: datetime | None


class ScheduleRow(NamedTuple):
    name: str
    task: str
    queue: str
    cron: str | None
    every: timedelta | None
    tz: str | None
    next_due: datetime | None
    last_due: datetime | None
    last_at: datetime | None
    last_job: int | None
    last_gang: int | None
    paused: bool
    paused_until: datetime | None
    passed_over: datetime | None
    why: str | None
    problem: str | None
    catch_up: str
    skip_if_running: bool
    due_as: str | None
    payload: Any
    work: dict[str, Any] | None
    submitter: str
    login: str
    set_at: datetime
    source: str | None
    undeclared_at: datetime | None
    readable: bool


class ServiceRow(NamedTuple):
    name: str
    task: str
    queue: str
    state: str
    replicas: int
    gang: int
    ready_replicas: int
    gangs: int
    revision: int
    good_revision: int | None
    why: str | None
    failures: int
    next_try_at: datetime | None
    surge: int
    ready_within_s: float
    linger_s: float
    health: str | None
    version: str | None
    load: float | None
    payload: Any
    work: dict[str, Any] | None
    submitter: str
    login: str
    set_at: datetime
    source: str | None
    undeclared_at: datetime | None
    readable: bool


class ServiceGangRow(NamedTuple):
    service: str
    gang_id: int
    revision: int
    state: str | None
    members: int
    ready_members: int
    serves: bool
    leaves: bool
    why: str | None
    hosts: list[str]
    load: float | None
    made_at: datetime
    ready_at: datetime | None
    stop_at: datetime | None


class ScalingRow(NamedTuple):
    service: str
    replicas: int
    min_replicas: int
    max_replicas: int
    target_load: float | None
    target_depth: float | None
    depth_of: str | None
    up_after_s: float
    down_after_s: float
    wants: int | None
    since: datetime | None
    due_at: datetime | None
    why: str | None
    scaled_at: datetime | None
    scaled_why: str | None


class EndpointRow(NamedTuple):
    service: str
    gang_id: int
    revision: int
    job_id: int
    rank: int
    worker: str
    host: str
    address: str
    port: int
    load: float | None
    ready_since: datetime


class ViolationRow(NamedTuple):
    rule: str
    subject: str
    detail: str | None


class RetentionRow(NamedTuple):
    part_of: str
    keep: timedelta | None
    partitions: int
    bytes: int
    oldest: date | None
    next_drop: datetime | None
    missing: list[date]
    no_default: bool
    class_: str


class AttemptRow(NamedTuple):
    job_id: int
    token: int
    gang_id: int | None
    epoch: int | None
    rank: int | None
    worker: str | None
    host: str | None
    queue: str
    task: str
    submitter: str
    gpus: int
    devices: list[str]
    started_at: datetime
    ended_at: datetime | None
    cause: str | None


class UsageRow(NamedTuple):
    """GPU hours of what one group has used; None: summed over, or of no service."""

    submitter: str | None
    queue: str | None
    task: str | None
    service: str | None
    attempts: int
    gpu_hours: float
    wasted_hours: float
    displaced_hours: float


class MetricRow(NamedTuple):
    """One number of the installation: a sample of a metric, as Prometheus has them."""

    name: str
    labels: dict[str, str]
    value: float


class NotificationRow(NamedTuple):
    target: str
    kinds: list[str]
    queue: str | None
    submitter: str | None
    task: str | None
    max_attempts: int
    waiting: int
    oldest_at: datetime | None
    dead: int
    dead_error: str | None
    delivered: int
    delivered_at: datetime | None
    dropped: int
    dropped_at: datetime | None
    failures: int
    error: str | None
    paused_until: datetime | None
    created_at: datetime
    created_by: str


class UndeliveredRow(NamedTuple):
    target: str
    id: int
    kind: str
    at: datetime
    state: str
    attempts: int
    due_at: datetime
    dead_at: datetime | None
    error: str | None
    job_id: int | None
    gang_id: int | None
    reason: str | None
    body: dict[str, Any] | None


class Fetched(NamedTuple):
    """The notification to deliver now: its `body` is JSON text, and this is its `delivery`th delivery."""

    id: int | None
    kind: str | None
    delivery: int | None
    next_in_s: float | None
    body: Annotated[str | None, "body::text"]


class EventRow(NamedTuple):
    id: int
    at: datetime
    kind: str
    gang_id: int | None
    epoch: int | None
    job_id: int | None
    token: int | None
    incarnation: int | None
    worker: str | None
    reason: str | None
    data: dict[str, Any] | None
    actor: str | None


class PassRow(NamedTuple):
    at: datetime
    pass_: int
    digest: str | None
    decisions: list[dict[str, Any]]
    board: dict[str, Any] | None


class LogRow(NamedTuple):
    job_id: int
    token: int
    seq: int
    at: datetime
    chunk: str


class QueueRow(NamedTuple):
    name: str
    paused: bool
    paused_until: datetime | None
    policy: str
    max_attempts: int
    max_crashes: int
    max_trips: int
    backoff_s: float
    backoff_max_s: float
    budget_s: float | None
    max_payload_bytes: int
    retention_done: str
    retention_failed: str
    depth: int
    paused_by: str | None
    draining: bool
    guaranteed: dict[str, float]
    maximum: dict[str, float]
    weight: float
    max_running_gangs: int | None
    max_running_jobs: int | None
    rate: str | None
    submitter_maximum: dict[str, int]
    placement_timeout_s: float | None
    timeout_style: str | None
    preempts: bool
    preemptible: bool
    min_run_s: float
    others: str
    ceilings: dict[str, int]
    running_gangs: int
    running_jobs: int
    used_gpus: int
    used_memory_mb: int
    waiting_gangs: int
    waiting_jobs: int
    used_cpus: Annotated[float, "used_cpus::float8"]


class LimitRow(NamedTuple):
    name: str
    most: int | None
    rate: str | None
    used: int
    pinned: bool
    login: str
    made_at: datetime
    opens_at: datetime | None


class TaskRow(NamedTuple):
    task: str
    budget_s: float | None
    stall_timeout_s: float | None
    load_grace_s: float | None
    health_window_s: float | None
    long_phase_s: float | None
    notify_only: list[str] | None
    device_class: str | None
    longest_gap_s: float | None
    beats: int | None
    learned_at: datetime | None
    declared: dict[str, Any] | None
    declared_by: str | None
    declared_at: datetime | None
    paused: bool | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None

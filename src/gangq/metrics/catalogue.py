"""Every metric: its name, type, labels and meaning. The numbers come from `gangq.metrics()`, but for three."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric. `name` is as queries write it; a histogram has the samples _bucket, _sum and _count."""

    name: str
    type: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


def _counter(name: str, labels: str, help: str) -> Metric:
    return Metric(name, "counter", tuple(labels.split()), help)


def _gauge(name: str, labels: str, help: str) -> Metric:
    return Metric(name, "gauge", tuple(labels.split()), help)


METRICS = (
    _gauge(
        "gangq_up",
        "",
        "Whether the database answered this scrape; 0: it did not, and nothing else is served.",
    ),
    _gauge("gangq_scrape_duration_seconds", "", "How long the database took to answer this scrape."),
    _gauge("gangq_build_info", "version", "Always 1; the version of gangq that serves this."),
    _gauge(
        "gangq_jobs",
        "queue state",
        "Live jobs of a queue by state, members of gangs included: waiting for other jobs, scheduled, pending, "
        "blocked (members that wait to be placed), reserved, running, preempting (told to stop), preempted.",
    ),
    _gauge(
        "gangq_oldest_waiting_seconds",
        "queue",
        "How long the job or gang that has waited longest in a queue has waited to be placed or claimed since it was "
        "submitted, due, or last began; 0: nothing waits.",
    ),
    _gauge("gangq_queue_paused", "queue", "Whether the queue itself is paused."),
    _counter(
        "gangq_jobs_submitted_total",
        "queue task",
        "Jobs that have entered a queue, retries and members included.",
    ),
    _counter("gangq_jobs_started_total", "queue task", "Attempts that workers have claimed."),
    _counter(
        "gangq_jobs_ended_total", "queue task outcome", "Jobs that have ended: done, failed or cancelled."
    ),
    _counter(
        "gangq_attempts_ended_total",
        "queue task cause",
        "Attempts that have ended, by cause: done, or one of gangq.causes (fail, crash, trip, preempt, ...).",
    ),
    _counter("gangq_gangs_preempted_total", "", "Gangs that were told to stop to make room for others."),
    _counter(
        "gangq_preemptions_completed_total",
        "outcome",
        "Preempted gangs of which every member has stopped: blocked (the gang waits to be placed again), done, "
        "failed or cancelled.",
    ),
    _counter(
        "gangq_force_drained_total",
        "",
        "Jobs and members that were told to stop, never confirmed it, and were given up; their devices are "
        "quarantined.",
    ),
    Metric(
        "gangq_drain_duration_seconds",
        "histogram",
        ("le",),
        "From the moment a gang is told to stop until all of its members have.",
    ),
    _counter(
        "gangq_trips_total",
        "class outcome",
        "Watchdogs that tripped, by class; outcome: trip (the job was stopped), notify or held (it was not).",
    ),
    _gauge("gangq_workers", "state", "Workers that have not ended: live, draining, or silent (flagged)."),
    _gauge(
        "gangq_worst_lease_age_seconds",
        "",
        "How long ago the worker that has been silent longest renewed its lease; those that have ended do not count.",
    ),
    _gauge(
        "gangq_devices",
        "model state",
        "Devices by model: busy (a job runs on them), held (reserved), free, or quarantined.",
    ),
    _gauge("gangq_last_tick_age_seconds", "", "How long ago maintenance last ran; as a rule within tick_s."),
    _counter("gangq_ticks_total", "", "Runs of maintenance."),
    _gauge(
        "gangq_last_pass_age_seconds",
        "",
        "How long ago the last pass ended. Without waiting work there are none.",
    ),
    _gauge(
        "gangq_last_pass_duration_seconds",
        "",
        "How long the last pass took from reading its board to its end.",
    ),
    _gauge(
        "gangq_notification_queue_usage_ratio", "", "How full PostgreSQL's queue of notifications is, 0 to 1."
    ),
    _gauge(
        "gangq_oldest_transaction_seconds",
        "",
        "Age of the oldest transaction that holds a snapshot in the cluster: vacuum keeps what it might see. Of "
        "other logins it is seen if the owner of the schema has pg_read_all_stats.",
    ),
    _gauge("gangq_outbox_waiting", "target", "Notifications that a target has not been told yet."),
    _gauge("gangq_outbox_dead", "target", "Notifications that were given up."),
    _gauge(
        "gangq_outbox_lag_seconds",
        "target",
        "How long the oldest notification of a target has waited; 0: none waits.",
    ),
    _counter("gangq_outbox_delivered_total", "target", "Notifications delivered to a target."),
    _counter(
        "gangq_outbox_dropped_total", "target", "Notifications dropped because they were too old or too many."
    ),
)
"""In the order in which they are served."""

WORKER_METRICS = (
    _gauge("gangq_worker_info", "worker host incarnation version", "Always 1; who serves this."),
    _gauge("gangq_worker_draining", "", "Whether it takes no more jobs because it stops."),
    _gauge(
        "gangq_worker_lease_age_seconds",
        "",
        "How long ago it sent the last renewal that the database accepted.",
    ),
    _gauge(
        "gangq_worker_lease_left_seconds",
        "",
        "In how long its work is killed unless the lease is renewed; negative: it has been.",
    ),
    _gauge("gangq_worker_slots", "lane", "How many jobs it runs at once, by lane: placed, light."),
    _gauge("gangq_worker_jobs", "lane", "Jobs that it has claimed and not reported yet, by lane."),
    _counter("gangq_worker_jobs_claimed_total", "", "Jobs that it has claimed since it registered."),
    _counter(
        "gangq_worker_trips_total",
        "class outcome",
        "Watchdogs that tripped since this process began, by class; outcome: trip, notify or held. The trip of a "
        "handler in the main thread ends the process, and is in gangq_trips_total alone.",
    ),
    _gauge(
        "gangq_worker_device_state",
        "device model state",
        "Always 1; state: busy (a job holds it), free, or doubtful (its driver is late with an answer).",
    ),
    _gauge("gangq_worker_device_busy_ratio", "device", "Its utilisation, 0 to 1."),
    _gauge("gangq_worker_device_memory_used_bytes", "device", "Memory in use on it."),
    _gauge("gangq_worker_device_memory_bytes", "device", "Memory of it."),
    _gauge("gangq_worker_device_temperature_celsius", "device", "Its temperature."),
    _gauge("gangq_worker_device_power_watts", "device", "What it draws."),
)
"""Of one worker, which serves them itself. What its driver does not tell is left out."""

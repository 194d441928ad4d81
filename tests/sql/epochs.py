"""Gangs with roles, failure policies and completion rules, placed by hand: admission is another file's subject."""

from __future__ import annotations

from typing import Any

from psycopg.types.json import Jsonb

from sql.drive import Claim, Gang, Q, Worker

Role = tuple[str, int, int]


def submit_roles(q: Q, *roles: Role, policy: str = "restart_gang", **options: Any) -> Gang:
    """A blocked gang of these roles: name, fewest members, most members."""
    named = {key: options.pop(key) for key in ("completion", "timeout_s") if key in options}
    shapes = options.pop("shapes", {})
    gang = q.submit_gang(sum(most for _, _, most in roles), checkpoint_mode="rank0", **options)
    own = gang.live["shape_id"]
    spec = [
        {
            "name": name,
            "shape": shapes.get(name, own),
            "min": fewest,
            "max": most,
            "strategy": "pack",
            "require": None,
            "prefer": None,
            "balanced": False,
        }
        for name, fewest, most in roles
    ]
    q.sql(
        "update gangq.live_gangs set failure_policy = %(policy)s, completion = %(completion)s, "
        "timeout_s = coalesce(%(timeout_s)s, timeout_s), "
        "kind_id = gangq.intern_kind('default', %(spec)s, null, null, null) where id = %(id)s",
        id=gang.id,
        policy=policy,
        completion=named.get("completion"),
        timeout_s=named.get("timeout_s"),
        spec=Jsonb(spec),
    )
    q.sql(
        "update gangq.live_jobs j set role = r.ordinal, shape_id = r.shape_id from gangq.kind_roles r "
        "join gangq.live_gangs g on g.kind_id = r.kind_id where g.id = %(id)s and j.gang_id = g.id "
        "and j.rank between r.first_rank and r.first_rank + r.max_members - 1",
        id=gang.id,
    )
    return gang


def reserve(gang: Gang, jobs: list[int], workers: list[Worker]) -> bool:
    return bool(
        gang.q.one(
            "reserve_gang",
            gang_id=gang.id,
            job_ids=jobs,
            incarnations=[worker.incarnation for worker in workers],
        )
    )


def run(gang: Gang, workers: list[Worker], jobs: list[int] | None = None) -> list[Claim]:
    """Reserve these members (all of them), one on each worker, and let them be claimed; claims by rank."""
    assert reserve(gang, gang.job_ids if jobs is None else jobs, workers)
    claims = gang.claimed_by(*dict.fromkeys(workers))
    assert gang.state == "running"
    return claims


def replace(gang: Gang, jobs: list[int], workers: list[Worker]) -> list[Claim]:
    """Let the missing members take these places and be claimed there."""
    gang.skip_backoff()
    assert reserve(gang, jobs, workers)
    return gang.claimed_by(*dict.fromkeys(workers))


def who(gang: Gang) -> dict[int, int | None]:
    """By place, the rank in this epoch of those that have a part in it and run."""
    return {
        row["rank"]: row["epoch_rank"]
        for row in gang.members
        if row["state"] == "running" and row["epoch_rank"] is not None
    }


def epochs_told(worker: Worker, *claims: Claim) -> dict[int, int]:
    """What heartbeat names as each job's epoch."""
    rows = worker.q.call(
        "heartbeat",
        incarnation=worker.incarnation,
        job_ids=[claim.job_id for claim in claims],
        tokens=[claim.token for claim in claims],
    )
    return {row["job_id"]: row["epoch"] for row in rows}

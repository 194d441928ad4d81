"""Steps that the tests of trips, devices, the brake and stuck processes share."""

from __future__ import annotations

from typing import Any

from sql.drive import Claim, Q


def running(q: Q, name: str = "w1", devices: list[dict[str, Any]] | None = None, **options: Any) -> Claim:
    """One job, claimed by one new worker."""
    q.submit(**options)
    return q.worker(name, devices=devices or []).take()


def tripping(q: Q, job_id: int, name: str, **offer: Any) -> Claim:
    """A new worker claims this pending job."""
    claim = q.worker(name, **offer).take()
    assert claim.job_id == job_id
    return claim


def health(q: Q) -> dict[str, str]:
    return {row["uuid"]: row["health"] for row in q.sql("select uuid, health from gangq.devices")}


def setting(q: Q, **values: Any) -> None:
    q.call("configure", **values)

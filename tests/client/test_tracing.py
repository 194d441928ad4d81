"""A submission notes the active span; nothing where there is none, or where nobody has imported OpenTelemetry."""

from __future__ import annotations

import sys
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider

from gangq import tracing
from gangq.client import Client
from gangq.errors import InvalidInput

Db = psycopg.Connection[dict[str, Any]]
TRACER = TracerProvider().get_tracer("test")


def noted(db: Db) -> list[str | None]:
    return [row["trace"] for row in db.execute("select trace from gangq.live_jobs order by id").fetchall()]


def test_jobs_and_members_note_the_span_and_a_retry_keeps_it(client: Client, db: Db) -> None:
    with TRACER.start_as_current_span("request"):
        here = tracing.active()
        (job,) = client.submit(task="t")
        client.submit_gang(task="t", size=2)
        client.submit_unique(task="t", unique_key="k")
    client.submit(task="t")
    assert here is not None
    assert noted(db) == [here] * 4 + [None]
    client.cancel(job_ids=[job])
    client.retry(job_ids=[job])
    assert noted(db)[0] == here


def test_claims_bring_it(client: Client) -> None:
    row = client.register_worker(name="w", host="h", queues=["default"])
    with TRACER.start_as_current_span("request"):
        here = tracing.active()
        client.submit(task="t")
    (claim,) = client.claim(incarnation=row.incarnation)
    assert claim.trace == here


def test_where_nobody_imported_opentelemetry_nothing_is_noted(
    client: Client, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TRACER.start_as_current_span("request"):
        monkeypatch.delitem(sys.modules, "opentelemetry.trace")
        client.submit(task="t")
    assert noted(db) == [None]


@pytest.mark.parametrize("said", ["", "x", "00-1-2-3", "00-" + "A" * 32 + "-" + "a" * 16 + "-01"])
def test_what_is_no_traceparent_is_refused(client: Client, said: str) -> None:
    with pytest.raises(InvalidInput, match="trace"):
        client.call("submit", task="t", options={"trace": said})

"""A job continues the span it was submitted in: in a handler, in a child process, in a command, in its children."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from cli.cli_process import eventually, running
from gangq.client import Client

pytestmark = pytest.mark.slow

Db = psycopg.Connection[dict[str, Any]]

TASKS = """
import json
import logging
import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import gangq

app = gangq.App()
OUT = {out!r}


class ToFile(SpanExporter):
    def export(self, spans):
        with open(OUT, "a") as file:
            for span in spans:
                file.write(json.dumps(json.loads(span.to_json(indent=None))) + "\\n")
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ToFile()))
trace.set_tracer_provider(provider)


def work():
    with trace.get_tracer("mine").start_as_current_span("mine"):
        pass


def snooze_once(ctx, seen):
    if not os.path.exists(seen):
        open(seen, "w").close()
        ctx.snooze(0)


@app.task
def inline(ctx):
    work()
    logging.getLogger("mine").warning("said by a handler")
    child.submit()


@app.task
def child(ctx):
    pass


@app.task(isolate=True)
def apart(ctx):
    work()


@app.task
async def awaits(ctx):
    work()


@app.task
def breaks(ctx):
    raise OSError("boom")


@app.task
def gives_a_generator(ctx):
    return (n for n in [])


class Unsayable(Exception):
    def __str__(self):
        raise SystemExit(3)


@app.task
def unsayable(ctx):
    raise Unsayable


@app.task
def snoozes(ctx, seen):
    snooze_once(ctx, seen)


@app.task(isolate=True)
def snoozes_apart(ctx, seen):
    snooze_once(ctx, seen)


@app.on_end
def after(ctx, outcome):
    with trace.get_tracer("mine").start_as_current_span("after " + ctx.job.task):
        pass
"""


@pytest.fixture
def tracer() -> trace.Tracer:
    """Of this process, with a provider that sends nothing anywhere."""
    return TracerProvider().get_tracer("test")


class Traced:
    """A worker whose spans go to a file."""

    def __init__(self, spans: Path, process: Any, db: Db) -> None:
        self._spans, self.process, self._db = spans, process, db

    def done(self, *ids: int) -> None:
        def all_over() -> bool:
            row = self._db.execute(
                "select count(*) as n from gangq.history where job_id = any (%s)", [list(ids)]
            ).fetchone()
            return row is not None and row["n"] == len(ids)

        self.process.until(all_over, "the jobs have ended")

    def spans(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            lines = self._spans.read_text().splitlines() if self._spans.exists() else []
            named = [span for line in lines for span in [json.loads(line)] if span["name"] == name]
            return named if len(named) >= count else []

        return eventually(found, f"{count} spans {name}")

    def span(self, name: str) -> dict[str, Any]:
        (found,) = self.spans(name)
        return found


@pytest.fixture
def traced(dsn: str, db: Db, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Traced]:
    out = tmp_path / "spans"
    (tmp_path / "tasks.py").write_text(TASKS.replace("{out!r}", repr(str(out))))
    args = ("worker", "tasks:app", "--name", "w1", "--devices", "none", "--slots", "2", "--json")
    with running(dsn, tmp_path, "w1", *args, TRACEPARENT=f"00-{'9' * 32}-{'9' * 16}-01") as process:
        yield Traced(out, process, db)


def at(span: trace.Span) -> tuple[str, str]:
    context = span.get_span_context()
    return f"0x{context.trace_id:032x}", f"0x{context.span_id:016x}"


def ids(span: dict[str, Any]) -> tuple[str, str]:
    return span["context"]["trace_id"], span["context"]["span_id"]


def test_wait_start_and_run_follow_the_span_of_the_submission_and_what_a_handler_does_follows_run(
    traced: Traced, client: Client, tracer: trace.Tracer
) -> None:
    with tracer.start_as_current_span("request") as request:
        (job,) = client.submit(task="inline")
    traced.done(job)
    for name in ("wait inline", "start inline", "run inline"):
        span = traced.span(name)
        assert (span["context"]["trace_id"], span["parent_id"]) == at(request), name
        assert span["attributes"] == {
            "gangq.job": job,
            "gangq.task": "inline",
            "gangq.queue": "default",
            "gangq.attempt": 1,
            "gangq.worker": "w1",
        }
    run = traced.span("run inline")
    assert traced.span("mine")["parent_id"] == ids(run)[1]
    assert traced.span("run child")["parent_id"] == ids(run)[1], "what it submits follows it"
    assert (
        traced.span("wait inline")["end_time"] <= traced.span("start inline")["end_time"] <= run["end_time"]
    )
    # And its lines name it.
    lines = [json.loads(line) for line in traced.process.out.splitlines()]
    (said,) = [line for line in lines if line["message"] == "said by a handler"]
    assert (said["job"], said["worker"], bool(said["token"])) == (job, "w1", True)
    assert {line.get("worker") for line in lines if "logger" in line} == {"w1"}


def test_a_handler_in_a_process_of_its_own_and_a_command_follow_it_too(
    traced: Traced, client: Client, tracer: trace.Tracer, tmp_path: Path
) -> None:
    env = tmp_path / "env"
    command = {"argv": ["/bin/sh", "-c", f"echo $TRACEPARENT > {env}; exit 3"]}
    with tracer.start_as_current_span("request") as request:
        (apart,) = client.submit(task="apart")
        (ran,) = client.submit(task="command", payloads=[command], max_attempts=1)
    traced.done(apart, ran)
    assert traced.span("mine")["parent_id"] == ids(traced.span("run apart"))[1]
    run = traced.span("run command")
    assert (run["context"]["trace_id"], run["parent_id"]) == at(request)
    assert run["status"] == {"status_code": "ERROR", "description": "exited with 3"}
    assert env.read_text().strip().split("-")[1:3] == [part[2:] for part in ids(run)]


def test_what_was_submitted_in_no_span_begins_a_trace_of_its_own_and_not_that_of_the_worker(
    traced: Traced, client: Client
) -> None:
    (job,) = client.submit(task="breaks", max_attempts=1)
    traced.done(job)
    run = traced.span("run breaks")
    assert run["parent_id"] is None
    assert run["context"]["trace_id"] != "0x" + "9" * 32
    for name in ("wait breaks", "start breaks"):
        span = traced.span(name)
        assert (span["context"]["trace_id"], span["parent_id"]) == ids(run), name
    assert run["status"]["status_code"] == "ERROR"
    (event,) = run["events"]
    assert event["attributes"]["exception.message"] == "boom"


@pytest.mark.parametrize("task", ["awaits", "apart"])
def test_what_a_coroutine_and_hooks_do_follows_run_too(traced: Traced, client: Client, task: str) -> None:
    (job,) = client.submit(task=task)
    traced.done(job)
    run = ids(traced.span(f"run {task}"))[1]
    assert traced.span("mine")["parent_id"] == run
    assert traced.span(f"after {task}")["parent_id"] == run


def test_async_jobs_that_share_a_process_follow_each_its_own(
    dsn: str, db: Db, client: Client, tmp_path: Path
) -> None:
    out = tmp_path / "spans"
    (tmp_path / "tasks.py").write_text(TASKS.replace("{out!r}", repr(str(out))))
    args = ("worker", "tasks:app", "--name", "w1", "--devices", "none", "--light", "2", "--slots", "0")
    with running(dsn, tmp_path, "w1", *args) as process:
        traced = Traced(out, process, db)
        traced.done(*client.submit(task="awaits", payloads=[{}, {}]))
        runs = {ids(span)[1] for span in traced.spans("run awaits", 2)}
        for name in ("mine", "after awaits"):
            assert {span["parent_id"] for span in traced.spans(name, 2)} == runs


def test_a_handler_that_gives_a_generator_is_an_error_of_the_span_and_an_exception_without_text_ends_no_worker(
    traced: Traced, client: Client
) -> None:
    (generator,) = client.submit(task="gives_a_generator", max_attempts=1)
    (unsayable,) = client.submit(task="unsayable", max_attempts=1)
    traced.done(generator, unsayable)
    assert traced.span("run gives_a_generator")["status"]["status_code"] == "ERROR"
    (job,) = client.submit(task="awaits")
    traced.done(job)


@pytest.mark.parametrize("task", ["snoozes", "snoozes_apart"])
def test_an_attempt_that_was_snoozed_has_not_failed(
    traced: Traced, client: Client, task: str, tmp_path: Path
) -> None:
    (job,) = client.submit(task=task, payloads=[{"seen": str(tmp_path / "seen")}])
    traced.done(job)
    for run in traced.spans(f"run {task}", 2):
        assert run["status"]["status_code"] == "UNSET"


def test_members_of_a_gang_say_their_rank_and_epoch(
    traced: Traced, client: Client, tracer: trace.Tracer
) -> None:
    with tracer.start_as_current_span("request") as request:
        gang = client.submit_gang(task="command", size=2, payload={"argv": ["true"]})
    traced.done(*gang.job_ids)
    runs = traced.spans("run command", 2)
    assert {run["parent_id"] for run in runs} == {at(request)[1]}
    said = {(run["attributes"]["gangq.gang"], run["attributes"]["gangq.epoch"]) for run in runs}
    assert said == {(gang.gang_id, 1)}
    assert {run["attributes"]["gangq.rank"] for run in runs} == {0, 1}


def test_a_worker_that_makes_no_spans_hands_on_what_the_submission_said(
    dsn: str, db: Db, client: Client, tracer: trace.Tracer, tmp_path: Path
) -> None:
    command = {"argv": ["/bin/sh", "-c", f"echo $TRACEPARENT > {tmp_path}/$GANGQ_JOB_ID"]}
    with tracer.start_as_current_span("request") as request:
        (inside,) = client.submit(task="command", payloads=[command])
    (outside,) = client.submit(task="command", payloads=[command])
    args = ("worker", "--name", "w2", "--devices", "none")
    with running(dsn, tmp_path, "w2", *args, TRACEPARENT=f"00-{'9' * 32}-{'9' * 16}-01") as process:
        Traced(tmp_path / "none", process, db).done(inside, outside)
    trace_id, span_id = (part[2:] for part in at(request))
    assert (tmp_path / str(inside)).read_text().startswith(f"00-{trace_id}-{span_id}-")
    assert (tmp_path / str(outside)).read_text() == "\n"

"""Traces of OpenTelemetry (extra `gangq[otel]`): a job remembers the span it was submitted in, and continues it.

gangq makes spans through the API of OpenTelemetry and configures nothing: where they go the application says, with
its SDK or with `opentelemetry-instrument`. In a program that has not imported the API nothing is noted and no span is
made, except that a job which was submitted in a span is continued where the API is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gangq.errors import Snoozed, Stopped

if TYPE_CHECKING:
    from gangq.worker.jobs import ActiveJob

log = logging.getLogger("gangq.worker.tracing")

_API = "opentelemetry.trace"
_FLUSH_MS = 5000
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def active() -> str | None:
    """The active span of this thread or task, as a W3C traceparent; None where there is none."""
    api = sys.modules.get(_API)
    return None if api is None else _written(api.get_current_span())


def begin(job: ActiveJob, worker: str) -> Spans:
    """Begin the span `run`, and write `wait` (from submission to the claim, of a first attempt) and `start` (from the
    claim to now).
    """
    api = _api(job.claim.trace)
    if api is None:
        return NO_SPANS if job.claim.trace is None else Spans(None, None, job.claim.trace)
    try:
        return _begun(api, job, worker)
    except Exception as problem:
        # A tracer that does not work is no reason not to run the job.
        log.warning("spans_not_begun", extra={**job.extra, "error": repr(problem)[:500]})
        return Spans(None, None, job.claim.trace)


def _begun(api: Any, job: ActiveJob, worker: str) -> Spans:
    claim, now = job.claim, time.time_ns()
    parent = _remote(api, claim.trace)
    tracer = api.get_tracer("gangq")
    attributes = _attributes(job, worker)
    span = tracer.start_span(
        f"run {claim.task}", parent, api.SpanKind.CONSUMER, attributes=attributes, start_time=now
    )
    # Without a span of the submission the attempt is one trace all the same: then `run` is its root.
    before = parent if claim.trace else api.set_span_in_context(span, parent)
    if claim.attempt == 1 and (claim.epoch or 1) == 1:
        submitted = min(int(claim.submitted_at.timestamp() * 1e9), job.claimed_at_ns)
        _write(tracer, f"wait {claim.task}", before, attributes, submitted, job.claimed_at_ns)
    _write(tracer, f"start {claim.task}", before, attributes, min(job.claimed_at_ns, now), now)
    return Spans(api, span, _written(span) or claim.trace)


class Spans:
    """The span `run` of one attempt. `traceparent` hands it to another process."""

    def __init__(self, api: Any, span: Any, traceparent: str | None) -> None:
        self.traceparent = traceparent
        self._api = api
        self._span = span

    def active(self) -> AbstractContextManager[object]:
        """While it is entered, this span is the active one of its thread."""
        return contextlib.nullcontext() if self._span is None else self._api.use_span(self._span)

    def end(self, problem: BaseException | str | None) -> None:
        """End the span; `problem`: why the attempt failed. One that was stopped or snoozed has not failed."""
        if self._span is None:
            return
        try:
            if isinstance(problem, BaseException) and not isinstance(problem, (Snoozed, Stopped)):
                self._span.record_exception(problem)
                self._failed(type(problem).__qualname__)
            elif isinstance(problem, str):
                self._failed(problem)
            self._span.end()
        except BaseException as trouble:
            # What formats the exception may be the handler's own __str__, which may raise anything.
            log.warning("span_not_ended", extra={"error": type(trouble).__qualname__})

    def _failed(self, why: str) -> None:
        self._span.set_status(self._api.Status(self._api.StatusCode.ERROR, why))


NO_SPANS = Spans(None, None, None)
"""Of a job that belongs to no trace, in a program that makes none."""


@contextlib.contextmanager
def continued(traceparent: str | None, *, send: bool = True) -> Iterator[None]:
    """Make the span of another process the active one. `send`: at the end send what this one has recorded, as it may
    not live to its next batch.
    """
    api = _api(traceparent)
    if api is None or traceparent is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(_remote(api, traceparent))
    try:
        yield
    finally:
        context.detach(token)
        flush = getattr(api.get_tracer_provider(), "force_flush", None)
        if send and flush is not None:
            # What the handler returned is still to be reported.
            with contextlib.suppress(Exception):
                flush(_FLUSH_MS)


def _api(traceparent: str | None) -> Any:
    """The API where the application has imported it, or a job of a trace is installed beside it; else None."""
    api = sys.modules.get(_API)
    if api is None and traceparent is not None:
        with contextlib.suppress(ImportError):
            api = importlib.import_module(_API)
    return api


def _written(span: Any) -> str | None:
    context = span.get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _remote(api: Any, traceparent: str | None) -> Any:
    """A context of OpenTelemetry in which this span is the active one; an empty one for none."""
    from opentelemetry.context import Context

    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return Context()
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    remote = api.SpanContext(trace_id, span_id, is_remote=True, trace_flags=api.TraceFlags(flags))
    return api.set_span_in_context(api.NonRecordingSpan(remote), Context())


def _attributes(job: ActiveJob, worker: str) -> dict[str, str | int]:
    claim, extra = job.claim, job.extra
    found = {
        "gangq.job": job.id,
        "gangq.task": claim.task,
        "gangq.queue": claim.queue,
        "gangq.attempt": claim.attempt,
        "gangq.gang": extra["gang"],
        "gangq.epoch": extra["epoch"],
        "gangq.rank": extra["rank"],
        "gangq.worker": worker,
    }
    return {name: value for name, value in found.items() if value is not None}


def _write(tracer: Any, name: str, parent: Any, attributes: Any, began_ns: int, ended_ns: int) -> None:
    tracer.start_span(name, parent, attributes=attributes, start_time=began_ns).end(ended_ns)

"""What a worker serves about itself under ``/metrics``, where it was asked to.

It knows all of it: a scrape asks the database nothing and waits for nothing. The server is a task of the control loop
and has no thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from gangq.client.rows import MetricRow
from gangq.errors import InvalidInput
from gangq.proc.clock import boottime
from gangq.worker.options import Lanes

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from gangq.gpu import Detection, SamplerProcess
    from gangq.worker.control import Control
    from gangq.worker.drain import Drain
    from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.metrics")

_READ_S = 10.0
"""How long a client may take to send its request, or to read the answer."""
_HEAD_BYTES = 8 << 10
_AT_ONCE = 16
"""Connections; for one more, the oldest of them is cut."""


class WorkerMetrics:
    """The numbers of one worker, over all its incarnations. A collector of prometheus_client."""

    def __init__(self, lanes: Lanes, detection: Detection, sampler: SamplerProcess, drain: Drain) -> None:
        self._lanes = lanes
        self._devices = detection.devices
        self._sampler = sampler
        self._drain = drain
        self._lock = threading.Lock()
        self._trips: Counter[tuple[str, str]] = Counter()
        self.session: Session | None = None
        """The present incarnation; None: it has not registered yet."""

    def tripped(self, cls: str, outcome: str) -> None:
        """A watchdog of this class has tripped; ``outcome``: ``trip``, ``notify`` or ``held``. From any thread."""
        with self._lock:
            self._trips[cls, outcome] += 1

    def collect(self) -> Iterator[Family]:
        """The metrics of now."""
        # Not at the top: few workers serve metrics.
        from gangq.metrics.catalogue import WORKER_METRICS
        from gangq.metrics.collector import families

        yield from families(list(self._rows()), WORKER_METRICS)

    def _rows(self) -> Iterator[MetricRow]:
        with self._lock:
            trips = list(self._trips.items())
        for (cls, outcome), count in trips:
            yield _row("trips_total", count, **{"class": cls, "outcome": outcome})
        yield _row("draining", self._drain.requested.is_set())
        for lane, slots in (("placed", self._lanes.slots), ("light", self._lanes.light)):
            yield _row("slots", slots, lane=lane)
        held: set[str] = set()
        if (session := self.session) is not None:
            who = {"worker": session.name, "host": session.host, "incarnation": str(session.incarnation)}
            yield _row("info", 1, **who, version=version("gangq"))
            now = boottime()
            yield _row("lease_age_seconds", now - session.renewed_at)
            yield _row("lease_left_seconds", session.kill_at - now)
            yield _row("jobs_claimed_total", session.table.added)
            jobs = session.table.snapshot()
            for lane in ("placed", "light"):
                yield _row("jobs", sum(job.lane == lane for job in jobs), lane=lane)
            held = {str(device["uuid"]) for job in jobs for device in job.claim.devices}
        yield from self._of_devices(held)

    def _of_devices(self, held: set[str]) -> Iterator[MetricRow]:
        doubtful, readings = self._sampler.doubtful(), self._sampler.readings()
        for device in self._devices:
            uuid = device.uuid
            state = "doubtful" if uuid in doubtful else "busy" if uuid in held else "free"
            yield _row("device_state", 1, device=uuid, model=device.model, state=state)
            yield _row("device_memory_bytes", device.vram_mb << 20, device=uuid)
            if (last := readings.get(uuid)) is None:
                continue
            values = {
                "busy_ratio": None if last.gpu_pct is None else last.gpu_pct / 100,
                "memory_used_bytes": None if last.used_mb is None else last.used_mb << 20,
                "temperature_celsius": last.temperature_c,
                "power_watts": last.power_w,
            }
            for name, value in values.items():
                if value is not None:
                    yield _row(f"device_{name}", value, device=uuid)


def _row(name: str, value: float, **labels: str) -> MetricRow:
    return MetricRow(f"gangq_worker_{name}", labels, float(value))


class MetricsEndpoint:
    """Serves them over HTTP."""

    def __init__(self, address: str, numbers: WorkerMetrics) -> None:
        """Listen from now on; :meth:`start` answers.

        Raises:
            InvalidInput: nothing can listen there.
            GangqError: prometheus_client is missing.
        """
        from gangq.metrics.address import Address
        from gangq.metrics.serve import exposition

        self._exposition, self._numbers = exposition, numbers
        # It fails here if it would at every scrape, and no later scrape has to import anything.
        exposition(numbers)
        host, port = Address.of(address)
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as problem:
            raise InvalidInput(
                f"--metrics: nothing can listen on {Address(host, port)}: {problem.strerror or problem}"
            ) from problem
        self.address = Address(host, self._socket.getsockname()[1])
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}

    def start(self, control: Control) -> None:
        """Answer in the control loop."""
        control.wait(self._start())
        log.info("serves_metrics", extra={"url": f"http://{self.address}/metrics"})

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=_HEAD_BYTES)

    def stop(self, control: Control) -> None:
        """Stop listening."""

        async def close() -> None:
            if self._server is not None:
                self._server.close()

        control.wait(close())
        self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _AT_ONCE:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.decode("latin-1")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *fields = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"", "text/plain")
        if path != "/metrics":
            return _response("404 Not Found", b"gangq: see /metrics\n", "text/plain")
        accept = next((field[7:].strip() for field in fields if field.lower().startswith("accept:")), "")
        body, content_type = self._exposition(self._numbers, accept)
        return _response("200 OK", body, content_type, with_body=method == "GET")


def _response(status: str, body: bytes, content_type: str, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")

"""What a worker serves about itself under ``/metrics``, where it was asked to.

It knows all of it: a scrape asks the database nothing and waits for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING

from gangq.client.rows import MetricRow
from gangq.proc.clock import boottime
from gangq.worker.options import Lanes

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

    from gangq.gpu import Detection, SamplerProcess
    from gangq.metrics import MetricsServer
    from gangq.worker.drain import Drain
    from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.metrics")


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

    def serve(self, address: str) -> MetricsServer:
        """Serve them over HTTP, in a thread.

        Raises:
            InvalidInput: nothing can listen there.
            GangqError: prometheus_client is missing.
        """
        # Not at the top: few workers serve metrics.
        from gangq.metrics.address import Address
        from gangq.metrics.serve import MetricsServer

        server = MetricsServer(self, Address.of(address))
        log.info("serves_metrics", extra={"url": f"http://{server.address}/metrics"})
        return server

    def collect(self) -> Iterator[Family]:
        """The metrics of now."""
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

"""Numbers for machines: what `gangq metrics` serves to a Prometheus (extra `gangq[metrics]`)."""

from __future__ import annotations

from gangq.metrics.address import Address
from gangq.metrics.catalogue import METRICS, WORKER_METRICS, Metric
from gangq.metrics.collector import Collector
from gangq.metrics.serve import MetricsServer, registry_of

__all__ = ["METRICS", "WORKER_METRICS", "Address", "Collector", "Metric", "MetricsServer", "registry_of"]

"""The numbers of the database as metrics of prometheus_client (extra `gangq[metrics]`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from gangq.client.rows import MetricRow
from gangq.errors import GangqError
from gangq.metrics.catalogue import METRICS, Metric

if TYPE_CHECKING:
    from prometheus_client import Metric as Family

_FRESH_S = 1.0
"""However many scrape, the database is asked at most so often."""


class Collector:
    """A collector for `prometheus_client.CollectorRegistry.register`. `read` asks the database: `client.metrics`.

    Safe to share between threads. A scrape that fails serves `gangq_up 0` and nothing else but the version, and calls
    `failed` with the error.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[MetricRow]],
        *,
        failed: Callable[[GangqError], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._failed = failed
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = 0.0
        self._rows: list[MetricRow] | None = None

    def describe(self) -> Iterable[Family]:
        """Nothing: to register it asks no database."""
        return []

    def collect(self) -> Iterator[Family]:
        """The metrics of now, or of a second ago at most."""
        yield from families(self.rows())

    def rows(self) -> list[MetricRow]:
        """All samples, with those that are not the database's."""
        # One at a time: those that wait are served what the first has read.
        with self._lock:
            now = self._clock()
            if self._rows is None or now - self._read_at > _FRESH_S:
                self._rows = self._asked(now)
                self._read_at = self._clock()
            return self._rows

    def _asked(self, began: float) -> list[MetricRow]:
        about = MetricRow("gangq_build_info", {"version": version("gangq")}, 1.0)
        try:
            found = self._read()
        except GangqError as problem:
            self._failed(problem)
            return [MetricRow("gangq_up", {}, 0.0), about]
        took = MetricRow("gangq_scrape_duration_seconds", {}, self._clock() - began)
        return [MetricRow("gangq_up", {}, 1.0), took, about, *found]


def families(rows: Sequence[MetricRow], catalogue: Sequence[Metric] = METRICS) -> Iterator[Family]:
    """Samples by metric, in the order of the catalogue; what it does not know comes from a newer schema and is left
    out.
    """
    from prometheus_client import Metric as Family

    for metric in catalogue:
        names = _samples(metric)
        found = [row for row in rows if row.name in names]
        if not found:
            continue
        family = Family(metric.name.removesuffix("_total"), metric.help, metric.type)
        for row in sorted(found, key=lambda row: (names.index(row.name), _bound(row))):
            family.add_sample(row.name, row.labels, row.value)
        yield family


def _samples(metric: Metric) -> list[str]:
    if metric.type != "histogram":
        return [metric.name]
    return [f"{metric.name}{suffix}" for suffix in ("_bucket", "_count", "_sum")]


def _bound(row: MetricRow) -> float:
    """Buckets stand in ascending order."""
    return float(row.labels.get("le", 0))

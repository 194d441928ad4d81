"""`gangq metrics` as a Prometheus sees it: over HTTP, from processes of its own."""

from __future__ import annotations

import errno
import gzip
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from socketserver import TCPServer
from typing import Any

import psycopg
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gangq.client import Client
from gangq.client.rows import MetricRow
from gangq.errors import DatabaseUnreachable, InvalidInput
from gangq.metrics import METRICS, Address, Collector, MetricsServer, registry_of, serve

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Samples:
    """All samples of an exposition, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def get(url: str, **headers: str) -> tuple[str, str]:
    """The body and the content type."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


@contextmanager
def served(collector: Collector) -> Iterator[str]:
    """The address of a server in this process."""
    server = MetricsServer(collector, Address("127.0.0.1", 0))
    yield f"http://{server.address}"
    server.close()


def once(client: Client) -> str:
    return generate_latest(registry_of(Collector(client.metrics))).decode()


def run_one(client: Client, task: str = "t") -> None:
    row = client.register_worker(name="w", host="h", queues=["default"])
    client.submit(task=task)
    (claim,) = client.claim(incarnation=row.incarnation)
    client.complete(job_ids=[claim.job_id], tokens=[claim.token])


def test_a_scrape_gives_every_number_as_prometheus_reads_it(client: Client) -> None:
    run_one(client)
    client.add_notification(target="oncall")
    with served(Collector(client.metrics)) as url:
        body, content_type = get(f"{url}/metrics")
    assert content_type.startswith("text/plain; version=0.0.4")
    found = samples(body)
    assert found["gangq_up", ()] == 1
    assert found["gangq_jobs_ended_total", (("outcome", "done"), ("queue", "default"), ("task", "t"))] == 1
    assert found["gangq_jobs", (("queue", "default"), ("state", "pending"))] == 0
    bounds = re.findall(r'gangq_drain_duration_seconds_bucket\{le="(.*?)"\}', body)
    assert bounds == sorted(bounds, key=float)
    assert bounds[-1] == "+Inf"


def test_a_scraper_that_asks_for_openmetrics_gets_it(client: Client) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

    with served(Collector(client.metrics)) as url:
        body, content_type = get(f"{url}/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert {"gangq_up", "gangq_drain_duration_seconds"} <= {family.name for family in parsed(body)}


def test_the_catalogue_and_the_database_name_the_same_metrics_and_labels(client: Client, db: Any) -> None:
    """Whatever has one label in one sample has it in all."""
    devices = [{"uuid": "G", "index": 0, "vram_mb": 1024, "source": "declared"}]
    client.register_worker(name="d", host="h", queues=["default"], devices=devices)
    client.add_notification(target="oncall")
    run_one(client)
    client.tick(force=True)
    db.execute("update gangq.decider set decided_at = gangq.now(), pass_s = 1")
    told: dict[str, set[str]] = {}
    for row in Collector(client.metrics).rows():
        name = (
            re.sub("_(bucket|sum|count)$", "", row.name) if "drain_duration_seconds" in row.name else row.name
        )
        told.setdefault(name, set()).update(row.labels)
    assert told == {metric.name: set(metric.labels) for metric in METRICS}


def test_names_are_as_prometheus_wants_them() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.type == "counter"), metric.name
        assert re.fullmatch(r"gangq_[a-z_]+", metric.name)
        assert metric.help.endswith("."), metric.name
        assert not re.search(r"_(ms|minutes|hours|mb|percent)(_|$)", metric.name), "base units"
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_it_answers_what_prometheus_asks_and_nothing_is_written_to_it(client: Client) -> None:
    with served(Collector(client.metrics)) as url:
        small = urllib.request.Request(f"{url}/metrics", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(small, timeout=20) as answer:
            assert b"gangq_up 1.0" in gzip.decompress(answer.read())
            assert answer.headers["Server"].strip() == "gangq"  # Not which Python to look up.
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(f"{url}/metrics", data=b"x", timeout=20)
        head = urllib.request.Request(f"{url}/metrics", method="HEAD")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(head, timeout=20)


def test_without_the_database_a_scrape_says_so_and_the_next_one_recovers() -> None:
    away = True
    problems: list[str] = []

    def read() -> Sequence[MetricRow]:
        if away:
            raise DatabaseUnreachable("gone")
        return [MetricRow("gangq_ticks_total", {}, 5.0), MetricRow("gangq_of_a_newer_schema", {}, 1.0)]

    now = 0.0
    collector = Collector(read, failed=lambda problem: problems.append(str(problem)), clock=lambda: now)
    with served(collector) as url:
        found = samples(get(f"{url}/metrics")[0])
        assert {name for name, _ in found} == {"gangq_up", "gangq_build_info"}
        assert found["gangq_up", ()] == 0
        assert problems == ["gone"]
        away, now = False, 2.0
        found = samples(get(f"{url}/metrics")[0])
    assert (found["gangq_up", ()], found["gangq_ticks_total", ()]) == (1, 5)
    assert ("gangq_of_a_newer_schema", ()) not in found


def test_a_database_that_hangs_is_one_that_is_down_and_is_asked_again(dsn: str) -> None:
    # A migration may hold such a lock.
    with (
        Client(dsn, max_size=1, connect_s=1, timeout_s=1) as hurried,
        psycopg.connect(dsn) as holder,
        served(Collector(hurried.metrics)) as url,
    ):
        holder.execute("lock table gangq.counters in access exclusive mode")
        began = time.monotonic()
        assert samples(get(f"{url}/metrics")[0])["gangq_up", ()] == 0
        assert time.monotonic() - began < 8
        holder.rollback()
        deadline = time.monotonic() + 20
        while samples(get(f"{url}/metrics")[0])["gangq_up", ()] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_server_that_accepts_and_says_nothing_is_one_that_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"postgresql://x@127.0.0.1:{silent.getsockname()[1]}/x"
        with Client(dsn, max_size=1, connect_s=1, timeout_s=1) as hurried:
            began = time.monotonic()
            with served(Collector(hurried.metrics)) as url:
                assert samples(get(f"{url}/metrics")[0])["gangq_up", ()] == 0
            assert time.monotonic() - began < 8


def test_however_many_scrape_the_database_is_asked_once_a_second() -> None:
    asked = 0
    now = 0.0

    def read() -> Sequence[MetricRow]:
        nonlocal asked
        asked += 1
        return []

    collector = Collector(read, clock=lambda: now)
    for _ in range(5):
        collector.rows()
    assert asked == 1
    now = 1.5
    collector.rows()
    assert asked == 2


def test_a_client_that_says_nothing_keeps_no_other_from_being_served(client: Client) -> None:
    with served(Collector(client.metrics)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))):
            assert samples(get(f"{url}/metrics")[0])["gangq_up", ()] == 1


def test_clients_that_send_nothing_or_a_byte_at_a_time_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_READ_S", 2.0)
    with served(Collector(list)) as url, ExitStack() as open_ones:
        address = Address.of(url.removeprefix("http://"))
        slow = open_ones.enter_context(socket.create_connection(address))
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + 20:
                slow.sendall(b"G")
                time.sleep(0.1)
        assert 1.5 < time.monotonic() - began < 15
        monkeypatch.setattr(serve, "_READ_S", 60.0)
        for _ in range(100):
            open_ones.enter_context(socket.create_connection(address)).sendall(b"GET /met")
        time.sleep(0.3)
        assert get(f"{url}/metrics")


def test_a_client_that_has_asked_is_answered_however_long_the_database_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_READ_S", 0.5)

    def read() -> list[MetricRow]:
        time.sleep(1.5)
        return []

    with served(Collector(read)) as url:
        assert "gangq_up 1.0" in get(f"{url}/metrics")[0]


def test_clients_that_go_away_are_no_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with served(Collector(list)) as url:
        with socket.create_connection(Address.of(url.removeprefix("http://"))) as client:
            client.sendall(b"GET /met")
            time.sleep(0.2)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.3)
        assert get(f"{url}/metrics")
    assert caplog.records == []


def test_without_a_file_to_spare_it_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0

    def accept(_: object) -> Any:
        nonlocal refused
        refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(TCPServer, "get_request", accept)
    with (
        served(Collector(list)) as url,
        socket.create_connection(Address.of(url.removeprefix("http://"))) as client,
    ):
        time.sleep(1)
        assert 0 < refused < 30
        monkeypatch.undo()
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 200 ")


def test_a_scrape_imports_nothing() -> None:
    # What a handler forks in that moment would find the module half imported, and locked by nobody.
    code = """
import sys
from gangq.metrics import Collector, registry_of
collected = registry_of(Collector(list))
from prometheus_client import generate_latest
before = {*sys.modules}
generate_latest(collected)
print(sorted({*sys.modules} - before))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_an_address_of_ipv6_lets_nobody_in_by_ipv4(client: Client) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6")
    server = MetricsServer(Collector(client.metrics), Address("::", 0))
    try:
        socket.create_connection(("::1", server.address.port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.address.port), timeout=5)
    finally:
        server.close()


def test_where_nothing_can_listen_is_said(client: Client) -> None:
    with served(Collector(client.metrics)) as url, pytest.raises(InvalidInput, match="nothing can listen"):
        MetricsServer(Collector(client.metrics), Address.of(url.removeprefix("http://")))


def test_counters_of_one_scrape_after_another_never_fall_whatever_happens_between(
    client: Client, db: Any
) -> None:
    before = samples(once(client))
    row = client.register_worker(name="w", host="h", queues=["default"])
    for turn in range(12):
        client.submit(task="t", payloads=[{}, {}])
        claims = client.claim(incarnation=row.incarnation, max_jobs=2)
        for claim in claims[: turn % 3]:
            client.complete(job_ids=[claim.job_id], tokens=[claim.token])
        for claim in claims[turn % 3 :]:
            client.fail(job_id=claim.job_id, token=claim.token, retryable=False)
        if turn % 4 == 1:
            client.tick(force=True)
        if turn % 4 == 3:
            db.execute("select gangq.count_ended()")
            db.execute("truncate gangq.history, gangq.attempt_history, gangq.events")
        after = samples(once(client))
        counters = {key for key in before if key[0].endswith(("_total", "_bucket", "_count"))}
        assert {
            key: (before[key], after.get(key)) for key in counters if after.get(key, -1) < before[key]
        } == {}
        before = after


def test_the_manual_has_a_table_of_every_metric_as_the_code_has_it() -> None:
    page = (Path(__file__).parents[2] / "docs/manual/metrics.md").read_text()
    page = page.partition("## Every metric of a worker")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `gangq_")]
    written = [[f"`{m.name}`", m.type, *([", ".join(m.labels)] if m.labels else []), m.help] for m in METRICS]
    assert [[cell for cell in row if cell.strip(" |")] for row in rows] == written

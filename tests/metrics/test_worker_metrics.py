"""`gangq worker --metrics`: what a worker serves about itself, scraped from real workers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cli.cli_process import Running, eventually, finished, running
from gangq.client import Client
from gangq.errors import InvalidInput
from gangq.metrics import WORKER_METRICS, Address

THREADS = {"MainThread", "gangq-control", "gangq-log", "gangq-backstop", "gangq-budget", "gangq-metrics"}
"""Of a worker with a light job."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

TASKS = """
import logging, multiprocessing, os, threading, time
from gangq import App
app = App(os.environ["GANGQ_DSN"])

@app.task
def busy(ctx):
    while not ctx.stopping:
        time.sleep(0.05)

@app.task
def threads(ctx):
    return sorted(one.name for one in threading.enumerate())

@app.task
def forks(ctx):
    ends = []
    for _ in range(20):
        child = multiprocessing.get_context("fork").Process(target=logging.warning, args=["forked"])
        child.start()
        child.join(10)
        ends.append(child.exitcode)
    return ends
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def get(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(port: int) -> Samples:
    status, text = get(port)
    assert status == 200, text
    return {
        (sample.name.removeprefix("gangq_worker_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def served(worker: Running, port: int, client: Client) -> Samples:
    """Once it has registered."""
    worker.until(lambda: client.workers(), "it is registered")
    return eventually(
        lambda: found if ("draining", ()) in (found := scrape(port)) else None, "it serves its numbers"
    )


def test_a_worker_serves_its_lease_slots_jobs_devices_and_trips(
    dsn: str, client: Client, db: psycopg.Connection[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    port = free_port()
    client.configure(grace_s=1)
    args = [
        "tasks:app",
        "--name",
        "w1",
        "--host",
        "h1",
        "--devices",
        "2x1GiB",
        "--slots",
        "2",
        "--metrics",
        port,
    ]
    with running(dsn, tmp_path, "w1", "worker", *args) as worker:
        first = served(worker, port, client)
        info = {labels for name, labels in first if name == "info"}
        assert {("worker", "w1"), ("host", "h1")} <= set(next(iter(info)))
        assert first["slots", (("lane", "placed"),)] == 2
        assert first["jobs", (("lane", "placed"),)] == first["jobs_claimed_total", ()] == 0
        (job,) = client.submit(task="command", payloads=[{"argv": ["sleep", "60"]}], gpus=1, budget_s=3)
        worker.until(lambda: client.job(id=job).state == "running", "it runs")
        at_work = scrape(port)
        assert at_work["jobs", (("lane", "placed"),)] == at_work["jobs_claimed_total", ()] == 1
        states = sorted(dict(labels)["state"] for name, labels in at_work if name == "device_state")
        assert states == ["busy", "free"]
        assert [v for (name, _), v in at_work.items() if name == "device_memory_bytes"] == [1 << 30] * 2
        assert -1 < at_work["lease_age_seconds", ()] < at_work["lease_left_seconds", ()] < 120
        tripped = ("trips_total", (("class", "budget"), ("outcome", "trip")))
        worker.until(lambda: scrape(port).get(tripped), "its watchdog has tripped")
        # The database stays away: what the worker knows is served all the same.
        allow = "update pg_database set datallowconn = %s where datname = current_database()"
        db.execute(allow, [False])
        try:
            db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'gangq worker%'"
            )
            age = scrape(port)["lease_age_seconds", ()]
            eventually(lambda: scrape(port)["lease_age_seconds", ()] > age + 2, "its lease grows old")
        finally:
            db.execute(allow, [True])


def test_one_thread_serves_it_and_clients_that_stay_do_no_harm(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    port = free_port()
    args = ["tasks:app", "--name", "w1", "--devices", "none", "--metrics", f"127.0.0.1:{port}"]
    with running(dsn, tmp_path, "w1", "worker", *args) as worker:
        served(worker, port, client)
        (busy,) = client.submit(task="busy")
        worker.until(lambda: client.job(id=busy).state == "running", "its main thread is busy")
        with contextlib.ExitStack() as silent:
            for _ in range(40):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            began = time.monotonic()
            assert get(port)[0] == 200
            assert time.monotonic() - began < 5
        assert get(port, method="POST")[0] == 501
        assert get(port, Accept="application/openmetrics-text")[1].endswith("# EOF\n")
        client.cancel(job_ids=[busy])
        (names,) = client.submit(task="threads")
        worker.until(lambda: client.job(id=names).state == "done", "it is idle")
        found = set(client.job(id=names).result)
        assert {name for name in found if not name.startswith(("gangq-call_", "gangq-lookup_"))} <= THREADS


def test_clients_that_stay_take_64_threads_at_most_and_hold_no_exit_up(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    port = free_port()
    args = ["tasks:app", "--name", "w1", "--devices", "none", "--metrics", port]
    with (
        running(dsn, tmp_path, "w1", "worker", *args) as worker,
        contextlib.ExitStack() as silent,
    ):
        served(worker, port, client)
        for _ in range(100):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), 5)).sendall(b"GET /met")
        (names,) = client.submit(task="threads")
        worker.until(lambda: client.job(id=names).state == "done", "it works")
        assert len(client.job(id=names).result) <= len(THREADS) + 64 + 4
        assert get(port)[0] == 200
        began = time.monotonic()
        worker.interrupt()
        assert worker.code() == 0
        assert time.monotonic() - began < 5
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_what_a_handler_forks_while_it_is_scraped_ends(dsn: str, client: Client, tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    port = free_port()
    args = ["tasks:app", "--name", "w1", "--devices", "none", "--metrics", port]
    over = threading.Event()

    def scrape_on() -> None:
        while not over.is_set():
            get(port)

    with running(dsn, tmp_path, "w1", "worker", *args) as worker:
        served(worker, port, client)
        scraper = threading.Thread(target=scrape_on)
        scraper.start()
        try:
            (forks,) = client.submit(task="forks")
            worker.until(lambda: client.job(id=forks).state == "done", "it has forked")
        finally:
            over.set()
            scraper.join()
        assert client.job(id=forks).result == [0] * 20


def test_a_port_that_is_taken_is_one_sentence_and_code_2_before_it_registers(
    dsn: str, client: Client
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = finished(dsn, "worker", "--devices", "none", "--once", "--metrics", port)
    assert ended.returncode == 2, ended.stderr
    assert f"metrics: nothing can listen on 127.0.0.1:{port}: " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert client.workers() == []


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("9188", ("127.0.0.1", 9188), "127.0.0.1:9188"),
        (":9188", ("0.0.0.0", 9188), "0.0.0.0:9188"),
        ("db.example:0", ("db.example", 0), "db.example:0"),
        ("[::1]:9188", ("::1", 9188), "[::1]:9188"),
    ],
)
def test_an_address_is_a_port_or_host_and_port(text: str, address: tuple[str, int], written: str) -> None:
    assert Address.of(text) == address
    assert str(Address.of(text)) == written


@pytest.mark.parametrize("text", ["", "x", "1:2:3", "::1:9188", "65536", "a b:1", "host:", "-1"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no address"):
        Address.of(text)


def test_the_manual_has_a_table_of_every_metric_of_a_worker() -> None:
    page = (Path(__file__).parents[2] / "docs/manual/metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `gangq_worker_")]
    assert rows == [f"| `{m.name}` | {m.type} | {', '.join(m.labels)} | {m.help} |" for m in WORKER_METRICS]

"""Replicas of services on real workers: ready by their own word or by a health URL, and told who they are."""

from __future__ import annotations

import http.server
import itertools
import json
import socket
import statistics
import sys
import threading
import time
import urllib.request

import pytest

from databases import connect
from gangq.client import Client
from gangq.client.rows import EndpointRow
from worker.worker_process import Fleet, eventually

SERVER = """
import http.server, json, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({k: v for k, v in os.environ.items() if k.startswith("GANGQ_") and "KEY" not in k}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["GANGQ_PORT"])), Handler).serve_forever()
"""
TASKS = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_): pass

@app.service(name="chat", replicas=2, gang=2, linger=0)
def serve(ctx, model="m"):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", ctx.service.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ctx.ready()
    ctx.load(0.5)
    ctx.wait_stopping()
    server.shutdown()
"""


def until_endpoints(client: Client, name: str, count: int) -> list[EndpointRow]:
    eventually(lambda: len(client.endpoints(service=name)) == count, f"{count} endpoints of {name}", 30)
    return client.endpoints(service=name)


def get(endpoint: EndpointRow) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/", timeout=5) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("slots", [1, 2])
def test_handlers_say_that_they_are_ready_inline_and_in_child_processes(
    client: Client, fleet: Fleet, slots: int
) -> None:
    fleet.define(TASKS)
    for n in range(3 - slots):
        fleet.start(f"w{n}", slots=slots, address="127.0.0.1")
    found = until_endpoints(client, "chat", 2)
    assert [one.rank for one in found] == [0, 1]
    assert len({one.port for one in found}) == 2
    assert [get(one) for one in found] == [b"ok", b"ok"]
    eventually(lambda: [one.load for one in client.endpoints(service="chat")] == [0.5, 0.5], "loads")
    client.stop_service(name="chat")
    until_endpoints(client, "chat", 0)
    eventually(lambda: client.services(name="chat")[0].state == "stopped", "it is stopped")


def test_what_handlers_say_of_their_load_scales_the_service(client: Client, fleet: Fleet) -> None:
    fleet.define(TASKS)
    for n in range(2):
        fleet.start(f"w{n}", slots=2, address="127.0.0.1")
    until_endpoints(client, "chat", 2)
    client.set_service(name="chat", min_replicas=2, max_replicas=4, target_load=0.25, up_after_s=0)
    until_endpoints(client, "chat", 4)
    (row,) = client.scaling()
    assert (row.replicas, row.scaled_why) == (4, "load 0.50, target 0.25")


def test_a_command_is_ready_while_its_health_url_answers(client: Client, fleet: Fleet) -> None:
    fleet.start("w1", slots=2, address="127.0.0.1")
    argv = [sys.executable, "-c", SERVER]
    client.set_service(
        name="web", task="command", payload={"argv": argv}, replicas=2, health="/healthz", linger_s=0
    )
    first, second = until_endpoints(client, "web", 2)
    said = json.loads(get(first))
    assert (said["GANGQ_SERVICE"], said["GANGQ_REVISION"], said["GANGQ_PORT"]) == (
        "web",
        "1",
        str(first.port),
    )
    assert json.loads(get(second))["GANGQ_PORT"] == str(second.port)


class Server:
    """An HTTP server that answers with 200; `asked`: when, by `time.monotonic`."""

    def __init__(self) -> None:
        asked = self.asked = list[float]()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(time.monotonic())
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/health"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def sleeping(client: Client, name: str, health: str) -> None:
    """Make a service whose health is not that of its process."""
    payload = {"argv": ["sleep", "600"]}
    client.set_service(name=name, task="command", payload=payload, health=health, linger_s=0)


def test_a_health_url_that_cannot_be_read_leaves_the_other_replicas_alone(
    client: Client, fleet: Fleet, dsn: str
) -> None:
    bad = ("http://h:99999/", "http://h:x/", "http://[h/")
    with Server() as server:
        for n, url in enumerate(bad):
            sleeping(client, f"bad{n}", server.url)
            # set_service refuses it, and has not always done so.
            with connect(dsn) as conn:
                conn.execute(
                    "update gangq.service_revisions set health = %s where service = %s", [url, f"bad{n}"]
                )
        worker = fleet.start("w1", slots=4, address="127.0.0.1")
        eventually(lambda: worker.log.count("replica_not_ready_yet") == len(bad), "each is logged")
        sleeping(client, "good", server.url)
        (one,) = until_endpoints(client, "good", 1)
    assert one.port == server.port


def test_a_health_url_that_hangs_delays_the_polls_of_no_other_replica(client: Client, fleet: Fleet) -> None:
    with Server() as server, socket.create_server(("127.0.0.1", 0)) as hung:
        sleeping(client, "hung", f"http://127.0.0.1:{hung.getsockname()[1]}/")
        sleeping(client, "good", server.url)
        fleet.start("w1", slots=2, address="127.0.0.1")
        until_endpoints(client, "good", 1)
        hung.settimeout(20)
        with hung.accept()[0]:
            before = len(server.asked)
            eventually(lambda: len(server.asked) >= before + 6, "it is polled")
    gaps = [after - first for first, after in itertools.pairwise(server.asked[before:])]
    assert statistics.median(gaps) < 2, gaps


def test_a_command_says_so_itself_and_takes_it_back(client: Client, fleet: Fleet) -> None:
    fleet.start("w1", slots=1, address="127.0.0.1")
    gangq = f"{sys.executable} -m gangq"
    script = f"{gangq} load 0.25; {gangq} ready --port 8123; sleep 2; {gangq} ready --not; sleep 60"
    payload = {"argv": [script], "shell": True}
    client.set_service(name="web", task="command", payload=payload, linger_s=0)
    (one,) = until_endpoints(client, "web", 1)
    assert (one.port, one.address) == (8123, "127.0.0.1")
    until_endpoints(client, "web", 0)
    assert client.service_gangs(service="web")[0].load == 0.25


def test_what_is_no_replica_serves_nothing(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def alone(ctx):
    ctx.ready()
    ctx.load(1)
    return ctx.service is None
""")
    fleet.start("w1")
    job = client.submit(task="alone")[0]
    eventually(lambda: client.job(id=job).state == "done", "the job is done")
    assert client.job(id=job).result is True

"""A service of 2 x 2 replicas behind a real HAProxy that follows its endpoints, under constant requests."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gangq.client import Client
from gangq.client.rows import EndpointRow
from gangq.proc import procfs
from process.floor import PATIENCE_S, Floor
from worker.worker_process import eventually

HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed (apt-get install haproxy)"),
]

CLIENTS = 4
"""Requests in flight at most."""
SERVERS = 24
CONFIG = """
global
    stats socket {directory}/admin level admin
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server 10s
    retries 4
    option redispatch 1
frontend in
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    balance roundrobin
    server-template s 1-{servers} 127.0.0.1:1 disabled
"""
TASKS = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def do_GET(self):
        time.sleep(0.03)
        body = self.server.says.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 64

@app.task
def serve(ctx, version):
    server = Server(("127.0.0.1", ctx.service.port), Handler)
    server.says = version
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    ctx.ready()
    ctx.wait_stopping()
    time.sleep(0.4)  # The proxy is being told.
    server.shutdown()
    server.server_close()  # Requests in progress are answered first.
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Proxy:
    """HAProxy, and what tells it of the endpoints."""

    def __init__(self, client: Client, dsn: str, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._client = Client(dsn)
        self._listener = client.connect_listener()
        self._listener.execute("listen gangq_endpoints")
        self._slots: dict[tuple[int, int], str] = {}
        self._stop = threading.Event()
        self.partial: list[list[EndpointRow]] = []
        self.looks = 0
        config = directory / "haproxy.cfg"
        config.write_text(CONFIG.format(directory=directory, port=self.port, servers=SERVERS))
        assert HAPROXY is not None
        self._process = subprocess.Popen([HAPROXY, "-db", "-f", str(config)])
        eventually((directory / "admin").exists, "HAProxy listens")
        self._thread = threading.Thread(target=self._follow, name="follower")
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            found = self._client.endpoints(service="web")
            self.looks += 1
            if set(Counter(one.gang_id for one in found).values()) - {2}:
                self.partial.append(found)
            self._tell({(one.job_id, one.port): one for one in found})
            any(self._listener.notifies(timeout=0.05, stop_after=1))

    def _tell(self, found: dict[tuple[int, int], EndpointRow]) -> None:
        for key in self._slots.keys() - found.keys():
            self._say(f"set server replicas/{self._slots.pop(key)} state maint")
        for key in found.keys() - self._slots.keys():
            used = set(self._slots.values())
            slot = next(f"s{n}" for n in range(1, SERVERS + 1) if f"s{n}" not in used)
            self._slots[key] = slot
            self._say(f"set server replicas/{slot} addr 127.0.0.1 port {key[1]}")
            self._say(f"set server replicas/{slot} state ready")

    def _say(self, line: str) -> None:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self._directory / "admin"))
            admin.sendall(line.encode() + b"\n")
            admin.recv(1 << 16)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        self._listener.close()
        self._client.close()
        self._process.kill()
        self._process.wait(10)


class Requests:
    """Clients that ask all the time, and what came of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._stop = threading.Event()
        self.answers: list[str] = []
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, name=f"client {n}") for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
            try:
                connection.request("GET", "/")
                answer = connection.getresponse()
                body = answer.read().decode()
                if answer.status == 200:
                    self.answers.append(body)
                else:
                    self.failed.append(f"status {answer.status}")
            except (OSError, http.client.HTTPException) as problem:
                self.failed.append(repr(problem))
            finally:
                connection.close()

    def some_more(self) -> None:
        """Return once some more were answered."""
        until = len(self.answers) + 5 * CLIENTS
        eventually(lambda: len(self.answers) >= until, f"requests are answered; {self.failed[-3:]}")

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(15)


@contextmanager
def asking(floor: Floor, dsn: str) -> Iterator[tuple[Proxy, Requests]]:
    proxy = Proxy(floor.client, dsn, floor.directory)
    try:
        until_ready(floor.client, 4)
        time.sleep(0.3)  # The proxy is being told.
        requests = Requests(proxy.port)
        try:
            requests.some_more()
            yield proxy, requests
        finally:
            requests.close()
    finally:
        proxy.close()


def until_ready(client: Client, replicas: int, revision: int = 1) -> None:
    def look() -> bool:
        row = client.services(name="web")[0]
        gangs = client.service_gangs(service="web")
        return row.ready_replicas == replicas == 2 * len(gangs) and {g.revision for g in gangs} == {revision}

    eventually(look, f"{replicas} replicas of revision {revision} are ready and no others", PATIENCE_S)


def below(pid: int) -> list[int]:
    """A process and all below it."""
    table = procfs.table()
    found = [pid]
    for one in found:
        found += [entry.pid for entry in table.values() if entry.ppid == one]
    return found


def test_only_requests_in_flight_on_what_was_killed_fail(floor: Floor, dsn: str) -> None:
    floor.configure(grace_s=3, ack_timeout_s=8)
    floor.fleet.define(TASKS)
    # A gang fills a host.
    workers = {name: floor.start(name, slots=2, host=f"host-{name}", address="127.0.0.1") for name in "abcde"}
    client = floor.client
    client.set_service(name="web", task="serve", payload={"version": "1"}, replicas=4, gang=2, linger_s=0.5)
    with asking(floor, dsn) as (proxy, requests):
        assert requests.failed == []

        # A replica is killed.
        victim = client.endpoints(service="web")[0]
        inside = [pid for pid in below(workers[victim.worker].process.pid) if listens(pid, victim.port)]
        assert inside
        for pid in inside:
            os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: victim.job_id not in {e.job_id for e in client.endpoints(service="web")}, "it is out"
        )
        until_ready(client, 4)
        requests.some_more()
        assert len(requests.failed) <= CLIENTS, requests.failed

        # A host is killed.
        failed = len(requests.failed)
        host = client.endpoints(service="web")[0].worker
        for pid in below(workers[host].process.pid):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: host not in {e.worker for e in client.endpoints(service="web")}, "it is out", 20)
        until_ready(client, 4)
        requests.some_more()
        assert len(requests.failed) - failed <= CLIENTS, requests.failed

        # A new version, then one gang, four, and one again: nothing may fail.
        failed = len(requests.failed)
        client.set_service(name="web", payload={"version": "2"})
        until_ready(client, 4, revision=2)
        time.sleep(0.3)
        at = len(requests.answers)
        requests.some_more()
        assert set(requests.answers[at + CLIENTS :]) == {"2"}
        for replicas in (2, 8, 2):
            client.set_service(name="web", replicas=replicas)
            until_ready(client, replicas, revision=2)
            requests.some_more()
        assert requests.failed[failed:] == []
        assert proxy.partial == []
        assert proxy.looks > 50
    client.stop_service(name="web")
    eventually(lambda: client.services(name="web")[0].state == "stopped", "it is stopped", PATIENCE_S)


def listens(pid: int, port: int) -> bool:
    """Whether a process holds the socket that listens at this port."""
    inodes = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    try:
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link == f"socket:[{inode}]" for link in links for inode in inodes)

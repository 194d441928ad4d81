"""Metrics over HTTP: a server of its own for `gangq metrics`, and an ASGI application to mount in another."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Protocol

from gangq.errors import GangqError, InvalidInput
from gangq.metrics.collector import Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_READ_S = 10.0
"""How long a client may take to send its request, or to read the answer."""

Message = MutableMapping[str, Any]


class Collects(Protocol):
    """A collector of prometheus_client."""

    def collect(self) -> Iterable[Family]:
        """The metrics of now."""


def exposition(collector: Collects, accept: str = "") -> tuple[bytes, str]:
    """The text that a scrape is answered with, and its content type.

    `accept`: its header Accept: Prometheus's own format unless it asks for OpenMetrics. Raises `GangqError` where
    prometheus_client is missing.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
    except ModuleNotFoundError as missing:
        raise GangqError(f"metrics need {missing.name}: pip install 'gangq[metrics]'") from missing
    scraped = CollectorRegistry(auto_describe=False)
    scraped.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(scraped), content_type


class MetricsApp:
    """An ASGI application that answers each GET with the metrics: `Mount("/metrics", MetricsApp(collector))`."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Serve one request."""
        del receive
        if scope["type"] != "http":
            raise ValueError(f"metrics are served over HTTP, not {scope['type']}")
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, b"", "text/plain")
            return
        accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
        # In a thread: the database may take its time, and the event loop is somebody else's.
        text, content_type = await asyncio.to_thread(exposition, self._collector, accept)
        await _answer(send, 200, b"" if scope["method"] == "HEAD" else text, content_type)


async def _answer(
    send: Callable[[Message], Awaitable[None]], status: int, body: bytes, content_type: str
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class MetricsServer:
    """Serves `/metrics` on `host` and `port` (0: any that is free) in a thread until it is closed.

    Raises `InvalidInput` where nothing can listen there, and `GangqError` where prometheus_client is missing.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        exposition(Collector(list))  # It fails here if it would at every scrape.

        class Handler(_Handler):
            of = collector

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except OSError as problem:
            raise InvalidInput(
                f"nothing can listen on {host}:{port}: {problem.strerror or problem}"
            ) from problem
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="gangq-metrics",
            daemon=True,
            kwargs={"poll_interval": 0.1},
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    of: Collector
    timeout = _READ_S
    server_version = "gangq"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the metrics."""
        path = self.path.partition("?")[0]
        if path == "/":
            self._send(200, b"gangq: see /metrics\n", "text/plain; charset=utf-8")
        elif path == "/metrics":
            text, content_type = exposition(self.of, self.headers.get("Accept", ""))
            self._send(200, text, content_type)
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each scrape."""

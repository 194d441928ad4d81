"""Metrics over HTTP, as prometheus_client writes them."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any

from gangq.errors import GangqError, InvalidInput
from gangq.metrics.address import Address

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

log = logging.getLogger("gangq.metrics")

_READ_S = 10.0
"""How long a client may take to send its request, and to read the answer."""
_AT_ONCE = 64
"""Clients that have a thread and a file of this process; one more is turned away."""
_NEWEST = 32
"""Clients that may still send their request: of older ones nothing more is read."""
_PAUSE_S = 0.1


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry of prometheus_client with this collector alone.

    Raises `GangqError` where prometheus_client is missing.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError as missing:
        raise GangqError(f"metrics need {missing.name}: pip install 'gangq[metrics]'") from missing
    collected = CollectorRegistry()
    collected.register(collector)
    return collected


class MetricsServer:
    """Serves the metrics over HTTP at an address (port 0: any that is free) in a thread until it is closed.

    Raises `InvalidInput` where nothing can listen there, and `GangqError` where prometheus_client is missing.
    """

    def __init__(self, collector: Collector, address: Address) -> None:
        collected = registry_of(collector)
        from prometheus_client import MetricsHandler

        class Handler(MetricsHandler):
            timeout = _READ_S
            server_version, sys_version = "gangq", ""

        try:
            self._server = _Server(address, Handler.factory(collected))
        except OSError as problem:
            raise InvalidInput(
                f"metrics: nothing can listen on {address}: {problem.strerror or problem}"
            ) from problem
        self.address = address._replace(port=self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="gangq-metrics",
            daemon=True,
            kwargs={"poll_interval": _PAUSE_S},
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening; it waits for no client."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingTCPServer):
    """A thread for each client, of at most 64. With the server of prometheus_client, which has no limit, whoever
    opens connections and leaves them open would use up the files of a worker: its jobs would fail.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _AT_ONCE

    def __init__(self, address: Address, handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._lock = threading.Lock()
        self._clients: dict[Any, float] = {}
        """When each came, the oldest first."""
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Called before it listens."""
        if self.address_family == socket.AF_INET6:
            # Where people ask for addresses of IPv6, IPv4 gets no answer.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        super().server_bind()

    def get_request(self) -> Any:
        """Called when a client has come."""
        try:
            return super().get_request()
        except OSError:
            # Where no file is left, say: the client still waits, and this would be called again at once.
            time.sleep(_PAUSE_S)
            raise

    def verify_request(self, request: Any, *_: Any) -> bool:
        """Whether it is answered."""
        with self._lock:
            self._clients[request] = time.monotonic()
            return len(self._clients) <= _AT_ONCE

    def service_actions(self) -> None:
        """Called after each client and every 0.1 s: whoever has not sent its request by now does so no more.

        A request that was read is answered all the same.
        """
        # Under the lock, because a closed file's number may be another file's by now.
        with self._lock:
            late, most = time.monotonic() - _READ_S, len(self._clients) - _NEWEST
            for older, (request, came) in enumerate(self._clients.items()):
                if older < most or came < late:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RD)

    def shutdown_request(self, request: Any) -> None:
        """Called once for each client, answered or not."""
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Called while the exception is handled."""
        # The others have gone away.
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            log.warning("scrape_not_answered", exc_info=True)

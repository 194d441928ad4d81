"""A receiver of notifications: a real HTTP server that remembers what it was sent, and answers as a test wants."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What came so far, and how to answer: `status`, or never where `hangs`."""

    def __init__(self, port: int = 0, certificate: str | None = None) -> None:
        self.status = 204
        self.location: str | None = None
        self.hangs = threading.Event()
        self.drips = False
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.arrived = threading.Condition()
        self._go_on = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.arrived:
                    receiver.bodies.append(body)
                    receiver.headers.append(dict(self.headers))
                    receiver.paths.append(self.path)
                    receiver.arrived.notify_all()
                if receiver.drips:
                    receiver._drip(self.connection)
                    return
                if receiver.hangs.is_set():
                    receiver._go_on.wait(30)
                self.send_response(receiver.status)
                if receiver.location is not None:
                    self.send_header("Location", receiver.location)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # A client that was killed, or gave up.

        self._server = Server(("127.0.0.1", port), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def _drip(self, connection: socket.socket) -> None:
        try:
            while not self._go_on.wait(0.05):
                connection.sendall(b"H")
        except OSError:
            with self.arrived:
                self.drips = False
                self.arrived.notify_all()

    def go_on(self) -> None:
        """Answer what hangs."""
        self._go_on.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?token=hunter2"

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    def close(self) -> None:
        """Stop listening: the next connection is refused."""
        self._go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def receiver(port: int = 0, certificate: str | None = None) -> Iterator[Receiver]:
    """A receiver that listens as long as the block."""
    made = Receiver(port, certificate)
    try:
        yield made
    finally:
        made.close()

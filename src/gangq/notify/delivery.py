"""How one notification is delivered: by an HTTP POST, or by a program.

The address and the program come from the command line of the host that delivers, never from the database. What the
database says, text of jobs included, is data: the JSON that is posted, or that the program reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gangq.errors import InvalidInput
from gangq.host.commands import run


@dataclass(frozen=True)
class Failed:
    """Why a delivery failed. `reason` is stored in the database, where every role reads it, so no part of an address
    or of a program's output is in it; `detail` is for this host.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return self.detail or self.reason


Deliver = Callable[[int, bytes], Failed | None]
"""Delivers the notification with this id, its JSON text, once; None: it has arrived."""


def signature(secret: bytes, body: bytes, at: int) -> str:
    """The header `Gangq-Signature` of a body: `t=<Unix time>,v1=<HMAC-SHA-256 of "<t>.<body>" in hexadecimal>`.

    A receiver computes v1 over the bytes that it got, compares in constant time, and refuses a t that is minutes old.
    """
    return f"t={at},v1={hmac.new(secret, b'%d.' % at + body, hashlib.sha256).hexdigest()}"


@dataclass(frozen=True)
class Post:
    """POSTs to one address, without following redirects. An answer from 200 to 299 within `timeout_s` is success."""

    url: str
    timeout_s: float = 10.0
    secret: bytes | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        # The address may be a secret: no message quotes it.
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or not self.url.isascii() or any(c.isspace() or not c.isprintable() for c in self.url):
            raise InvalidInput("the address is no URL such as https://host.example/path")
        if parts.username is not None:
            raise InvalidInput(
                "the address holds a user name: a receiver tells its callers by their signature"
            )

    def __call__(self, id: int, body: bytes) -> Failed | None:
        """Deliver `body`. In a thread of its own: no timeout of a socket bounds the look-up of a name."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        https = parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        # Always with a port: without one http.client takes the end of an IPv6 address for it.
        connection = kind(parts.hostname, parts.port or kind.default_port, timeout=self.timeout_s)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "gangq",
            "Gangq-Notification": str(id),
        }
        if self.secret is not None:
            headers["Gangq-Signature"] = signature(self.secret, body, int(self.clock()))
        ended: list[Failed | None] = []

        def post() -> None:
            ended.append(_posted(connection, path, body, headers))

        thread = threading.Thread(target=post, name="gangq-post", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if ended:
            return ended[0]
        # Its thread reads an answer that comes byte by byte: without the socket it ends.
        with contextlib.suppress(OSError, AttributeError):
            connection.sock.shutdown(socket.SHUT_RDWR)
        return Failed(f"no answer within {self.timeout_s:g} s")


def _posted(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
) -> Failed | None:
    try:
        with contextlib.closing(connection):
            connection.request("POST", path, body, dict(headers))
            status = connection.getresponse().status
    except TimeoutError:
        return Failed("no answer in time")
    except ssl.SSLError as problem:
        return Failed(f"TLS: {problem.reason}", f"TLS: {problem}")
    except (socket.gaierror, UnicodeError) as problem:  # UnicodeError: no name has such a part.
        return Failed("the name of the host cannot be looked up", str(problem))
    except (OSError, http.client.HTTPException) as problem:
        words = getattr(problem, "strerror", None) or type(problem).__name__
        return Failed(words, str(problem))
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return Failed(f"HTTP {status}: redirects are not followed")
    return Failed(f"HTTP {status}{_named(status)}")


def _named(status: int) -> str:
    name = http.client.responses.get(status)
    return f" ({name})" if name else ""


@dataclass(frozen=True)
class Program:
    """Runs a program, without a shell or arguments, that reads the JSON from standard input. Exit code 0 within
    `timeout_s` is success; at the limit its process group is killed.
    """

    path: str
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if shutil.which(self.path) is None:
            raise InvalidInput(f"there is no program {self.path!r} that this user may execute")

    def __call__(self, id: int, body: bytes) -> Failed | None:
        """Deliver `body`."""
        del id
        ran = run((self.path,), self.timeout_s, stdin=body)
        if ran.ok:
            return None
        if ran.code is not None:
            return Failed(f"the program ended with {ran.code}", ran.why)
        return Failed(f"the program did not start, or did not end within {self.timeout_s:g} s", ran.why)

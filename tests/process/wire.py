"""A line to PostgreSQL that can fail, and that counts: a proxy on a Unix socket, in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_READY = b"Z\x00\x00\x00\x05"
"""How PostgreSQL ends every answer; the transaction's status follows."""

_PLAIN = {"sslmode": "disable", "gssencmode": "disable"}
"""The server's first word is a message then, and no byte of its own."""


class _Wanted(NamedTuple):
    """The answer that something is to happen to."""

    request: tuple[bytes, ...]
    """All of it is in what was asked."""
    content: bytes
    kept: bool
    """It is kept back, not lost."""

    def is_asked(self, asked: bytes) -> bool:
        return all(part in asked for part in self.request)


class _Line:
    """One client's connection and its other half."""

    def __init__(self, wire: Wire, client: socket.socket) -> None:
        self.wire = wire
        self.client = client
        self.server = socket.socket(socket.AF_UNIX)
        try:
            self.server.connect(wire.upstream)
        except OSError:
            self.server.close()
            raise
        self.open = threading.Event()
        self.open.set()
        """Cleared, nothing passes in either direction, and both ends stay as they are."""
        self.asked = b""
        self._heard = b""
        for source, target in ((client, self.server), (self.server, client)):
            threading.Thread(target=self._pump, args=(source, target), name="wire", daemon=True).start()

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.set()

    def _count(self, data: bytes) -> None:
        """Count the whole answers in what the server has said."""
        heard = self._heard + data
        start = 0
        while len(heard) - start >= 5:
            length = 1 + int.from_bytes(heard[start + 1 : start + 5], "big")
            if len(heard) - start < length:
                break
            if heard[start : start + 5] == _READY:
                self.wire.round_trips += 1
            start += length
        self._heard = heard[start:]

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        answer = b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.open.wait()
                if source is self.client:
                    self.asked = (self.asked + data)[-(1 << 16) :]
                    target.sendall(data)
                    continue
                if self.wire.slow_s:
                    time.sleep(self.wire.slow_s)
                self._count(data)
                # An answer is passed on as a whole: half of one would be another kind of fault.
                answer += data
                if self.wire.loses(self, answer):
                    break
                self.open.wait()
                if answer[-6:-1] == _READY or not self.wire.minding:
                    self.asked = b""
                    target.sendall(answer)
                    answer = b""
                elif not self.wire.is_asked(self.asked):
                    target.sendall(answer)
                    answer = b""
        self.close()


class Wire:
    """Passes everything on until told otherwise. A context manager."""

    def __init__(self, upstream: str, directory: Path) -> None:
        """``upstream`` is the server's socket; this one appears in ``directory``."""
        self.upstream = upstream
        directory.mkdir()
        self.directory = directory
        self.lost: list[bytes] = []
        """The answers that never arrived."""
        self.held: list[bytes] = []
        """The answers that were kept back."""
        self.round_trips = 0
        """Answers that came to their end: one for each time that a client had to wait."""
        self._lock = threading.Lock()
        self._lines: list[_Line] = []
        self._frozen_from_now = False
        self._refusing = False
        self.slow_s = 0.0
        """How long every answer is late."""
        self._wanted: _Wanted | None = None
        self._socket = socket.socket(socket.AF_UNIX)

    def __enter__(self) -> Wire:
        self._socket.bind(str(self.directory / ".s.PGSQL.5432"))
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="wire-accept", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        for line in self._lines:
            line.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                with self._lock:
                    if self._refusing:
                        client.close()
                        continue
                    try:
                        line = _Line(self, client)
                    except OSError:
                        client.close()
                        continue
                    if self._frozen_from_now:
                        line.open.clear()
                    self._lines.append(line)

    # -- faults ----------------------------------------------------------------------------------------------

    def lose(self, request: bytes, answer: bytes = b"") -> None:
        """The next whole answer to a request containing ``request``, if it contains ``answer``, is dropped,
        and that connection closed: the server has done what was asked, and the client cannot know.
        """
        with self._lock:
            self._wanted = _Wanted((request,), answer, kept=False)

    def hold(self, *request: bytes) -> None:
        """The next whole answer to a request containing all of these is kept back, and its connection frozen: the
        server has done what was asked, and the client waits to hear it. :meth:`thaw` sends it on its way.
        """
        with self._lock:
            self._wanted = _Wanted(request, b"", kept=True)

    @property
    def minding(self) -> bool:
        """Whether an answer is being waited for."""
        return self._wanted is not None

    def is_asked(self, asked: bytes) -> bool:
        """Whether what was asked is what is waited for."""
        wanted = self._wanted
        return wanted is not None and wanted.is_asked(asked)

    def loses(self, line: _Line, answer: bytes) -> bool:
        """Whether this answer is to be lost. One that is to be kept back freezes its line."""
        with self._lock:
            wanted = self._wanted
            if wanted is None or answer[-6:-1] != _READY:
                return False
            if not wanted.is_asked(line.asked) or wanted.content not in answer:
                return False
            self._wanted = None
            if wanted.kept:
                line.open.clear()
            (self.held if wanted.kept else self.lost).append(answer)
            return not wanted.kept

    def freeze(self, *, new_ones_too: bool) -> None:
        """A black hole: nothing passes on any connection there is, or will be, and none is closed."""
        with self._lock:
            self._frozen_from_now = new_ones_too
            for line in self._lines:
                line.open.clear()

    def cut(self, *, refuse: bool = False) -> None:
        """Every connection is closed; with ``refuse`` every new one too, until cut again."""
        with self._lock:
            self._refusing = refuse
            lines, self._lines = self._lines, []
        for line in lines:
            line.close()

    def thaw(self) -> None:
        """What was held back goes on its way."""
        with self._lock:
            self._frozen_from_now = False
            for line in self._lines:
                line.open.set()


@contextlib.contextmanager
def wire_to(dsn: str, directory: Path) -> Iterator[tuple[Wire, str]]:
    """A wire to this database, and the DSN that leads through it."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    parts = conninfo_to_dict(dsn)
    upstream = f"{parts['host']}/.s.PGSQL.{parts.get('port') or 5432}"
    with Wire(upstream, directory) as wire:
        yield wire, make_conninfo(**{**parts, "host": str(directory), "port": "5432", **_PLAIN})

"""A command's output on disk: the first bytes, the last bytes, and how many were dropped in between.

A command may print gigabytes; it must neither block on that nor fill a disk nor grow anyone's memory. So the
first ``head_bytes`` are appended to the log as they come (a reader can follow them live), and everything
later goes round in a ring of ``tail_bytes`` in a second file, ``<log>.tail``. At the end the ring is unrolled
behind the head, with one line that says how much is missing, and the second file is removed: what stays is
one plain text file of bounded size.

The ring is a file and not memory, so that the last output of a command survives the death of the process that wrote
it. Its first 16 bytes are its size and the number of bytes ever put into it, little endian.
"""

from __future__ import annotations

import os

_HEADER = 16


class BoundedLog:
    """Writes one log. A full disk or a lost mount drops output and is remembered; the command never stops."""

    def __init__(self, path: str, head_bytes: int, tail_bytes: int) -> None:
        """Create the log, replacing one of that name.

        Raises:
            OSError: the directory is missing, not writable, or the path is a symbolic link.
        """
        self.path = path
        self.error: str | None = None
        self._head_left = head_bytes
        self._tail_bytes = tail_bytes
        self._ringed = 0
        self._ring = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW
        self._head = os.open(path, flags, 0o600)

    def write(self, data: bytes) -> None:
        """Take output in any amount, at any time, at a cost that does not depend on what came before."""
        try:
            if self._head_left > 0:
                first = data[: self._head_left]
                self._head_left -= len(first)
                data = data[len(first) :]
                _write_all(self._head, first)
            if data:
                self._write_ring(data)
        except OSError as problem:
            self.error = str(problem)

    def finish(self) -> None:
        """Unroll the ring behind the head and close; the log is one file from now on. Never raises."""
        try:
            os.close(self._head)
        except OSError as problem:
            self.error = str(problem)
        if self._ring >= 0:
            try:
                os.close(self._ring)
                unroll(self.path)
            except OSError as problem:
                self.error = str(problem)

    def _write_ring(self, data: bytes) -> None:
        if self._ring < 0:
            self._ring = os.open(
                self.path + ".tail", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
            )
        kept = data[-self._tail_bytes :] if self._tail_bytes else b""
        start = self._ringed + len(data) - len(kept)
        while kept:
            at = start % self._tail_bytes
            piece = kept[: self._tail_bytes - at]
            os.pwrite(self._ring, piece, _HEADER + at)
            start += len(piece)
            kept = kept[len(piece) :]
        # The count moves last: a reader after a crash finds at worst some bytes newer than it says, never
        # garbage.
        self._ringed += len(data)
        header = self._tail_bytes.to_bytes(8, "little") + self._ringed.to_bytes(8, "little")
        os.pwrite(self._ring, header, 0)


def unroll(path: str) -> None:
    """Append the ring of this log, if it has one, behind its head and remove it. A second call does nothing.

    The worker calls it too, for a guardian that was killed before it could.

    Raises:
        OSError: the disk is full or gone; the ring is then left where it is.
    """
    dropped, tail = _read_ring(path)
    if dropped or tail:
        head = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            before = os.fstat(head).st_size
            try:
                _write_all(head, _marker(dropped) + tail)
            except OSError:
                # The next call appends all of it again.
                os.ftruncate(head, before)
                raise
        finally:
            os.close(head)
    if os.path.lexists(path + ".tail"):
        os.unlink(path + ".tail")


def last_bytes(path: str, count: int) -> bytes:
    """The last ``count`` bytes of output as of now: live, finished, or left behind by a killed writer.

    Read beside a writer it is a best effort: bytes that come round the ring meanwhile may show up in the
    wrong place.
    """
    dropped, tail = _read_ring(path)
    if 0 < count <= len(tail):
        return tail[len(tail) - count :]
    try:
        with open(path, "rb") as file:
            wanted = count - len(tail)
            file.seek(max(0, os.fstat(file.fileno()).st_size - wanted))
            head = file.read(wanted)
    except FileNotFoundError:
        head = b""
    return (head + _marker(dropped) + tail)[-count:] if count > 0 else b""


def _read_ring(path: str) -> tuple[int, bytes]:
    """How many bytes of the ring's past are lost, and those it still holds, oldest first."""
    try:
        with open(path + ".tail", "rb") as file:
            header = file.read(_HEADER)
            body = file.read()
    except FileNotFoundError:
        return 0, b""
    size, total = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
    if total <= size:
        return 0, body[:total]
    if not size:
        return total, b""
    at = total % size
    return total - size, body[at:] + body[:at]


def _marker(dropped: int) -> bytes:
    return f"\n[gangq: {dropped} bytes dropped here]\n".encode() if dropped else b""


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]

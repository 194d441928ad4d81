"""Small files in a worker's private directory: written whole or not at all, and read without trusting them.

The directory is the worker's, and a job may run as the same user: what stands there may be a FIFO without a writer,
a link to a device without end, or a file of any size. Reading never waits and takes no more than it was told to.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NOTE_BYTES = 32
"""The longest note: the number of an incarnation."""
TRIP = "trip"
"""A trip that the worker began to tell the database."""
DEATH = "death"
"""What the supervisor saw of the end."""
REPORT_BYTES = 1 << 20
"""The longest of these two."""

_DIRECTORY = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0) | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_KIND, _REGULAR = 0o170000, 0o100000


def read(directory: str | os.PathLike[str], name: str, *, uid: int, most: int = NOTE_BYTES) -> bytes | None:
    """The content of that file; None where there is none, or directory or file are not ``uid``'s, or it is no regular
    file, or longer than ``most`` bytes.
    """
    try:
        place = os.open(directory, _DIRECTORY)
    except (OSError, ValueError):
        return None
    try:
        if os.fstat(place).st_uid != uid:
            return None
        file = os.open(name, _READ, dir_fd=place)
    except OSError:
        return None
    finally:
        os.close(place)
    try:
        about = os.fstat(file)
        if about.st_mode & _KIND != _REGULAR or about.st_uid != uid or about.st_size > most:
            return None
        found = os.read(file, most + 1)
    except OSError:
        return None
    finally:
        os.close(file)
    return found if len(found) <= most else None


def read_report(
    directory: str | os.PathLike[str], name: str, incarnation: int, *, uid: int
) -> dict[str, Any] | None:
    """What that file (:data:`TRIP`, :data:`DEATH`) says of this incarnation; None: nothing, or it is junk."""
    import json

    raw = read(directory, name, uid=uid, most=REPORT_BYTES)
    try:
        found = json.loads(raw or b"null")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("incarnation") == incarnation else None


def write(directory: str | os.PathLike[str], name: str, data: bytes) -> None:
    """Put this into that file, mode 0600, in place of what was there.

    Raises:
        OSError: it cannot be written.
    """
    place = os.open(directory, _DIRECTORY)
    fresh = f".{name}.{os.urandom(8).hex()}"
    try:
        # O_EXCL: a symbolic link is not followed.
        file = os.open(fresh, _WRITE, 0o600, dir_fd=place)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.rename(fresh, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError:
        remove(directory, fresh)
        raise
    finally:
        os.close(place)


def remove(directory: str | os.PathLike[str], name: str) -> None:
    """Take that file away, if it is there."""
    try:
        os.unlink(os.path.join(directory, name))
    except OSError:
        return

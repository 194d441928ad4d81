"""What a worker leaves on its host, so that its successor may end what it left behind.

Which processes an incarnation started is written in the database, and every login of a worker can write there. It is
good for looking, never for killing: an attacker could name any process there. So a worker also writes its
name, its mark and its process into a file of its own private directory. A successor kills, and removes the directory,
only where it finds that file: in a directory that belongs to its own user and is closed to all others.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from gangq.proc import statefile
from gangq.proc.proof import ProcessIdentity, is_same_process

DIRECTORY_PREFIX = "gangq-w-"
"""How the private directory of a worker is called."""
SOCKET = "s"
"""The socket in it, on which the worker answers its jobs."""
_FILE = "worker"
_MOST = 4096
_ANSWER_S = 1.0


@dataclass(frozen=True)
class HostRecord:
    """A worker of this host and user, as it described itself. ``directory`` is its private one."""

    worker: str
    mark: str
    process: ProcessIdentity
    directory: Path

    def lives(self) -> bool:
        """Whether the worker's process is alive, or its socket is answered."""
        if is_same_process(self.process):
            return True
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_ANSWER_S)
            try:
                probe.connect(str(self.directory / SOCKET))
            except BlockingIOError:
                return True  # So many wait to be answered that it has no room for one more.
            except OSError:
                return False
        return True


def places() -> Iterator[Path]:
    """Where workers of this user have their private directories, best first."""
    named = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")
    yield from dict.fromkeys(Path(place) for place in named if place)


def write(directory: Path, worker: str, mark: str, process: ProcessIdentity) -> None:
    """Describe this worker in its private directory, in place of what it said before.

    Raises:
        OSError: the directory cannot be written.
    """
    words = {"worker": worker, "mark": mark, "process": asdict(process)}
    statefile.write(directory, _FILE, json.dumps(words).encode())


def find(worker: str, mark: str) -> HostRecord | None:
    """What the worker of this name wrote here as the incarnation with this mark; None where there is no such file,
    or another user could have written it.
    """
    for place in places():
        try:
            named = [entry for entry in os.listdir(place) if entry.startswith(DIRECTORY_PREFIX)]
        except OSError:
            continue
        for name in named:
            found = read(place / name, os.geteuid())
            if found is not None and (found.worker, found.mark) == (worker, mark):
                return found
    return None


def read(directory: Path, uid: int) -> HostRecord | None:
    """What a worker of this user wrote in its private directory; None where there is no such file, or another user
    could have written it.
    """
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o077 or about.st_uid != uid:
            return None
        said = json.loads(statefile.read(directory, _FILE, uid=uid, most=_MOST) or b"")
        process = ProcessIdentity.of(said["process"])
        worker, mark = said["worker"], said["mark"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if process is None or not isinstance(worker, str) or not (isinstance(mark, str) and mark):
        return None
    return HostRecord(worker, mark, process, directory)

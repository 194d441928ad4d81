"""The directory of a private server: made, locked, looked into for the server that runs, cleared after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from gangq.embedded import identity as identities
from gangq.embedded.binaries import Binaries, digest
from gangq.embedded.identity import Identity, nobody, user_name
from gangq.errors import EmbeddedError

SUPERUSER = "postgres"
PORT = 5432
_SOCKET = f".s.PGSQL.{PORT}"
_SOCKET_PATH_MAX = 103  # the smaller of Linux's 107 bytes and macOS's 103


@dataclass(frozen=True)
class Postmaster:
    """A live server as its postmaster.pid describes it; the last two are None while it is still starting
    up."""

    pid: int
    port: int | None
    socket_dir: Path | None


class DataDirectory:
    """One data directory, and the socket of its server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.path / "server.log"

    @property
    def version(self) -> str | None:
        """The major version of its data; None: it holds none."""
        try:
            return (self.path / "PG_VERSION").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as e:
            raise EmbeddedError(no_access(self.path, e)) from e

    def make(self, identity: Identity) -> None:
        """Create the data directory and its parents where missing; no existing directory is touched."""
        missing = [d for d in self.path.parents if not d.exists()]
        try:
            for directory in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    directory.mkdir()
                    directory.chmod(0o755 if identity.switch else 0o700)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(0o700)
            owner = self.path.stat().st_uid
        except OSError as e:
            raise EmbeddedError(no_access(self.path, e)) from e
        if identity.switch:
            self._hand_over(identity, owner)
        elif owner != os.geteuid():
            raise EmbeddedError(
                f"{self.path} belongs to user {user_name(owner)}, you are {user_name(os.geteuid())}: "
                "run as its owner, or name another data directory in GANGQ_DATA_DIR"
            )

    def _hand_over(self, identity: Identity, owner: int) -> None:
        """Root only: give the data directory to the user the server runs as, if that user can get there."""
        if identity.run(["test", "-x", str(self.path.parent)])[0] != 0:
            raise EmbeddedError(
                f"PostgreSQL cannot run as root, and user {user_name(identity.uid)} cannot reach "
                f"{self.path}; name a data directory that everyone can reach in GANGQ_DATA_DIR (such as "
                "/var/lib/gangq/pg), or run as an ordinary user"
            )
        if owner != identity.uid:
            for path in (self.path, *self.path.rglob("*")):
                with contextlib.suppress(FileNotFoundError):
                    os.chown(path, identity.uid, identity.gid, follow_symlinks=False)

    def socket_dir(self, identity: Identity) -> Path:
        """Where a server started now would put its socket: the data directory if its path is one for a socket."""
        if self._fits(self.path):
            return self.path
        bases = [Path(tempfile.gettempdir()), Path("/tmp")]
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime and not identity.switch and _owner(Path(runtime)) == os.geteuid():
            bases.insert(0, Path(runtime))
        for base in bases:
            directory = base / f"gangq-{identity.uid}" / digest(self.path)
            if self._fits(directory):
                return directory
        raise EmbeddedError(
            f"no directory is short enough for a socket (tried {', '.join(map(str, bases))}); set TMPDIR"
        )

    def _fits(self, directory: Path) -> bool:
        path = os.fsencode(directory / _SOCKET)
        # A comma separates: a server has several directories, and a client several hosts.
        return len(path) <= _SOCKET_PATH_MAX and b"," not in path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this data directory's lock: one process at a time starts, stops or clears up."""
        deadline = time.monotonic() + 90.0
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(flocked(self.path))
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"another process has been starting or stopping the server in {self.path} "
                            f"for 90 s; see {self.log_path}, or find it with: fuser -v {self.path}"
                        ) from None
                    time.sleep(0.02)
                except OSError as e:
                    raise EmbeddedError(no_access(self.path, e)) from e
            yield

    def postmaster(self) -> Postmaster | None:
        """The live server of this data directory, or None. A pid file proves nothing: its process may be a
        zombie (for ever, under a PID 1 that never reaps) or the pid may be somebody else's by now."""
        try:
            lines = (self.path / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
            return None
        except OSError as e:
            raise EmbeddedError(no_access(self.path, e)) from e
        process = alive(pid)
        if process is None or not self.works_here(process):
            return None
        known = len(lines) >= 5 and lines[4].strip() != ""
        return Postmaster(pid, int(lines[3]) if known else None, Path(lines[4].strip()) if known else None)

    def works_here(self, process: psutil.Process) -> bool:
        """Is this process PostgreSQL's, of this data directory? That is its servers' working directory; where
        we may not look (another user's process and no CAP_SYS_PTRACE), the command line says it."""
        try:
            argv = process.cmdline()
            if not argv or not (argv[0].startswith("postgres:") or os.path.basename(argv[0]) == "postgres"):
                return False
            with contextlib.suppress(psutil.AccessDenied, PermissionError):
                # Not by name: the same directory may go by another one there (a bind mount, a container).
                cwd = f"/proc/{process.pid}/cwd" if psutil.LINUX else process.cwd()
                return os.path.samefile(cwd, self.path)
            return str(self.path) in argv
        except (psutil.Error, FileNotFoundError, ProcessLookupError):
            return False

    def initialise(self, identity: Identity, programs: Path, binaries: Binaries, durable: bool) -> None:
        """Make the cluster where there is none. It is made in a subdirectory and moved into place,
        PG_VERSION last, so that an `initdb` cut short (Ctrl-C in the first `make demo`) is never taken for a
        cluster."""
        if (self.path / "PG_VERSION").exists():
            return
        ours = ("initdb.partial-", "server.log", "binaries-")
        other = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(ours))
        if other:
            raise EmbeddedError(
                f"{self.path} is not empty and holds no PostgreSQL data (there is: "
                f"{', '.join(other[:5])}); name an empty or missing directory, or remove this one if its first "
                "start was cut short"
            )
        self.path.chmod(0o700)
        # A name of our own: the initdb of a killed caller may still be at work in its directory.
        partial = self.path / f"initdb.partial-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        argv = [str(programs / "initdb"), "-D", str(partial), "-U", SUPERUSER, "-E", "UTF8", "--locale=C"]
        argv += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]
        status, said = identity.run(argv if durable else [*argv, "--no-sync"])
        if status != 0:
            raise EmbeddedError(f"initdb of {binaries} failed in {self.path} (status {status}):\n{said}")
        for entry in sorted(partial.iterdir(), key=lambda e: e.name == "PG_VERSION"):
            entry.rename(self.path / entry.name)
        for leftover in self.path.glob("initdb.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def clear_crash(self, socket_dir: Path) -> None:
        """Remove what a crashed server left. The caller holds the lock and has seen that no server runs.

        PostgreSQL clears a stale pid file itself only when the pid is free: a zombie, or a stranger that got
        the pid, makes it refuse.
        """
        # Sockets and their locks, of whatever port the crashed server had.
        for path in (self.path / "postmaster.pid", *socket_dir.glob(".s.PGSQL.*")):
            path.unlink(missing_ok=True)

    def log_tail(self, start: int = 0, lines: int = 15) -> str:
        """The last lines of the log, from byte `start` on."""
        try:
            with self.log_path.open("rb") as f:
                f.seek(max(start, self.log_path.stat().st_size - 8192))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as e:
            return f"(not readable: {e})"


@contextlib.contextmanager
def flocked(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on a directory itself, so that no lock file is needed; BlockingIOError if it is
    taken, or was replaced by a new directory before we had it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            same = os.path.samestat(os.fstat(fd), directory.stat())
        except FileNotFoundError:
            same = False
        if not same:
            raise BlockingIOError(f"{directory} was replaced")
        yield
    finally:
        os.close(fd)


def default_base() -> Path:
    """Where data directories are that nobody has named."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gangq"
    if os.geteuid() == 0 and not identities.userns_works():
        existing = next(d for d in base.parents if d.exists())
        if nobody().run(["test", "-x", str(existing)])[0] != 0:
            # The home of root is closed to nobody, who has to run the server, and it stays closed.
            return Path("/var/lib/gangq")
    return base


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def private_dir(path: Path, identity: Identity) -> None:
    """Make a 0700 directory of the server's user, or accept one that is exactly that; anything else in a
    shared temp directory may be a trap."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if identity.switch and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        os.chown(path, identity.uid, identity.gid, follow_symlinks=False)
        found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != identity.uid or found.st_mode & 0o077:
        raise EmbeddedError(
            f"{path} should be a directory of user {user_name(identity.uid)} with mode 0700, for the "
            f"server's socket; it belongs to {user_name(found.st_uid)} with mode "
            f"{stat.filemode(found.st_mode)}. Remove it or set TMPDIR"
        )


def alive(pid: int) -> psutil.Process | None:
    """The process, unless it is gone or dead and only waiting to be reaped."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process
    except (psutil.Error, ValueError):
        return None


def no_access(data_dir: Path, error: OSError) -> str:
    """What is said where the directory cannot be used."""
    return (
        f"cannot use {data_dir} for the private PostgreSQL: {error.strerror} ({error.filename}). Run as the "
        "user it belongs to, or name another data directory in GANGQ_DATA_DIR"
    )

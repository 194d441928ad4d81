"""What the server does for one job, from its submission to its end: counted, not timed.

A worker that has run two jobs is awake and known to the server's caches; then jobs are submitted while it is held in
the first of them, and it works them off. Statements that clients send are counted in the server's log; nearly all of
them are a round trip each (some peers send several at once). Those inside functions are counted where the server has
pg_stat_statements.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
from measures import Result, Sizes, share
from psycopg import sql
from stage import Stage, wait_until
from systems import System

from gangq.embedded import Binaries

SETTINGS = {"log_line_prefix": "%d "}
EXTENSION = "pg_stat_statements"
MODES = ("in batches", "one at a time")
QUANTITIES = {
    "WAL": "bytes/job",
    "statements": "1/job",
    "inside functions": "1/job",
    "transactions": "1/job",
    "dead rows": "1/job",
    "buffers": "1/job",
}
_SETTLE_S = (1.1, 0.2)
"""After each warm-up: a session reports its counters when it falls idle and has not within the last second."""
_POLL_S = 0.1

_COUNTERS = """
select xact_commit + xact_rollback as transactions, blks_hit + blks_read as buffers,
  (select coalesce(sum(n_tup_upd + n_tup_del), 0) from pg_stat_user_tables) as dead
from pg_stat_database where datname = current_database()
"""
_OTHERS = (
    "select exists (select 1 from pg_stat_activity where datname = %s and backend_type = 'client backend')"
)
_WAL = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"
_INSIDE = """
select coalesce(sum(s.calls), 0) from pg_stat_statements s join pg_database d on d.oid = s.dbid
where d.datname = %s and not s.toplevel
"""


def title(quantity: str, mode: str) -> str:
    """How a quantity is called in results."""
    return f"{quantity}, {mode}"


def has_extension(binaries: Binaries) -> bool:
    """Whether pg_stat_statements lies beside these programs."""
    return any(binaries.bindir.parent.glob(f"lib/**/{EXTENSION}.*"))


def settings(binaries: Binaries) -> dict[str, str]:
    """What the server must be started with. Nothing is tracked until a database asks for it."""
    if not has_extension(binaries):
        return SETTINGS
    return {**SETTINGS, "shared_preload_libraries": EXTENSION, f"{EXTENSION}.track": "none"}


@dataclass(frozen=True)
class _Counters:
    transactions: int
    buffers: int
    dead: int


class _Observer:
    """Looks on from another database, so that it is not seen itself."""

    def __init__(self, stage: Stage, dsn: str) -> None:
        self._log: Path = stage.server.log_path
        self._dsn = dsn
        self._database = str(psycopg.conninfo.conninfo_to_dict(dsn)["dbname"])
        self._session = psycopg.connect(stage.server.dsn(), autocommit=True)
        self._inside = has_extension(stage.server.binaries)
        wanted = {"log_statement": "all", "log_parameter_max_length": "0"}
        if self._inside:
            self._session.execute(f"create extension if not exists {EXTENSION}".encode())
            wanted[f"{EXTENSION}.track"] = "all"
        # Its tidying of whatever database is nobody's job.
        self._autovacuum("alter system set autovacuum = off")
        for name, value in wanted.items():
            self._session.execute(
                sql.SQL("alter database {} set {} = {}").format(
                    sql.Identifier(self._database), sql.SQL(name), sql.Literal(value)
                )
            )

    def _autovacuum(self, statement: str) -> None:
        self._session.execute(statement.encode())
        self._session.execute("select pg_reload_conf()")

    def one(self, query: str, *values: object) -> int:
        row = self._session.execute(query.encode(), values or None).fetchone()
        assert row is not None
        return int(row[0])

    def wal(self) -> int:
        return self.one(_WAL)

    def inside(self) -> int | None:
        """Statements inside functions so far; None: nobody counts them."""
        return self.one(_INSIDE, self._database) if self._inside else None

    def log_end(self) -> int:
        return self._log.stat().st_size

    def sent(self, begin: int) -> int:
        """Statements that clients of the database have sent since the log was so long."""
        with self._log.open("rb") as log:
            log.seek(begin)
            return count_statements(log.read().decode(errors="replace"), self._database)

    def counters(self) -> _Counters:
        """Those of the database, of all sessions that have reported theirs."""
        with psycopg.connect(self._dsn, autocommit=True, options="-c log_statement=none") as session:
            row = session.execute(_COUNTERS.encode()).fetchone()
        assert row is not None
        return _Counters(*map(int, row))

    def left_alone(self) -> bool:
        return not self.one(_OTHERS, self._database)

    def close(self) -> None:
        self._autovacuum("alter system reset autovacuum")
        self._session.close()


def count_statements(log: str, database: str) -> int:
    """Statements that clients of that database sent, in a log whose lines begin with the database's name."""
    beginnings = (f"{database} LOG:  statement: ", f"{database} LOG:  execute ")
    return sum(line.startswith(beginnings) for line in log.splitlines())


@contextlib.contextmanager
def _observer(stage: Stage, dsn: str) -> Iterator[_Observer]:
    observer = _Observer(stage, dsn)
    try:
        yield observer
    finally:
        observer.close()


def _counted(stage: Stage, system: System, count: int, batch: int) -> dict[str, float]:
    """Each quantity for one job."""
    marks = stage.marks(numbered=1)
    quiet = "-c log_statement=none -c pg_stat_statements.track=none"
    with stage.database(system) as dsn, _observer(stage, dsn) as observer:
        with psycopg.connect(dsn, autocommit=True, options=quiet) as look:

            def finished() -> bool:
                row = look.execute(system.unfinished.encode()).fetchone()
                return row is not None and not row[0]

            with system.enqueuer(dsn) as enqueuer, stage.worker(system, dsn, marks, batch) as worker:
                for warm_up, settle_s in enumerate(_SETTLE_S, 1):
                    enqueuer.numbered(0)
                    wait_until(lambda: marks.count >= warm_up, "a job started", worker)  # noqa: B023
                    wait_until(finished, "a job was finished", worker, poll_s=_POLL_S)
                    time.sleep(settle_s)
                before, inside = observer.counters(), observer.inside()
                marks.shut()
                log, wal = observer.log_end(), observer.wal()
                if batch == 1:
                    enqueuer.one_by_one(count)
                else:
                    enqueuer.many(count)
                marks.open()
                wait_until(lambda: marks.count >= count + 2, "every job started", worker)
                wait_until(finished, "every job was finished", worker, poll_s=_POLL_S)
                wal, sent = observer.wal() - wal, observer.sent(log)
                inside = None if inside is None else (observer.inside() or 0) - inside
        wait_until(observer.left_alone, "its sessions ended")
        after = observer.counters()
    done = {
        "WAL": wal,
        "statements": sent,
        "inside functions": inside,
        "transactions": after.transactions - before.transactions,
        "dead rows": after.dead - before.dead,
        "buffers": after.buffers - before.buffers,
    }
    return {quantity: value / count for quantity, value in done.items() if value is not None}


def work(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """Submitted in one call and worked off in batches (of 100, or as the system likes), and one by one."""
    modes = [(MODES[0], 100 if system.takes_100 else system.best, share(sizes.per_job, system))]
    if "single" in system.measures:
        modes.append((MODES[1], 1, share(sizes.per_job_single, system)))
    return [
        Result(title(quantity, mode), QUANTITIES[quantity], value, False, {"jobs": count, "batch": batch})
        for mode, batch, count in modes
        for quantity, value in _counted(stage, system, count, batch).items()
    ]

"""A database that tests use in turn is like a new one for each; one that cannot be put back is not used again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from databases import Clock, Connection, Databases, connect
from gangq.embedded import Server
from sql.drive import Q, gpus

TABLES = "select relname from pg_class where relnamespace = 'gangq'::regnamespace and relkind = %s"


def contents(db: Connection) -> dict[str, list[str]]:
    """Every row of every table, and where every sequence stands."""
    asked = {row["relname"]: "t::text" for row in db.execute(TABLES, ["r"]).fetchall()}
    asked |= {
        row["relname"]: "row(t.last_value, t.is_called)::text" for row in db.execute(TABLES, ["S"]).fetchall()
    }
    return {
        name: sorted(
            row["text"] for row in db.execute(f"select {what} as text from gangq.{name} t").fetchall()
        )
        for name, what in asked.items()
    }


def dump(dsn: str) -> dict[str, list[str]]:
    with connect(dsn) as db:
        return contents(db)


@pytest.fixture
def databases(server: Server) -> Iterator[Databases]:
    """Apart from those of the other tests."""
    with closing(Databases(server)) as made:
        yield made


def touch_everything(q: Q) -> None:
    """Work of each kind, done and lost, and every setting."""
    q.call("configure", tick_s=3)
    q.call("set_queue", name="other", max_running_jobs=5)
    q.call("set_task", task="work", budget_s=100)
    w1, w2 = (q.worker(n, slots=4, prefetch=4, devices=gpus(80000, prefix=n)) for n in ("w1", "w2"))
    gang, claims = q.running_gang(w1, w2, gpus=1)
    claims[0].save(1)
    w1.beat(claims[0], beats=[{"step": 1}], readings=[{"uuid": "w10", "gpu_pct": 1}])
    q.call("append_log", job_ids=[claims[0].job_id], tokens=[claims[0].token], seqs=[0], chunks=["x"])
    claims[1].trip()
    first = q.submit(request_id=uuid.uuid4())
    q.submit(after=[first])
    q.submit("work", gpus=1, vram_mb=1000)
    w1.take().complete()
    waits = q.submit_gang(5)
    q.call("cordon", worker="w2", reason="r")
    q.live_on(60, w1)
    for gang_id in (waits.id, gang.id):
        q.call("cancel", gang_ids=[gang_id])
    q.call("retry", gang_ids=[waits.id])
    w2.report_dead()
    q.tick()


def test_after_a_test_that_touched_everything_every_row_and_sequence_is_as_in_the_template(
    databases: Databases, template: str
) -> None:
    with databases.own(template) as dsn:
        fresh = dump(dsn)
    with databases.kept(template) as kept:
        db = connect(kept.dsn)
        touch_everything(Q(db, Clock(db)))
        used = contents(db)
        assert len([name for name in fresh if used[name] and not fresh[name]]) > 20
        # What has rows in the template loses them, and every sequence goes on.
        db.execute("set session_replication_role = replica")
        for row in db.execute(TABLES, ["r"]).fetchall():
            if fresh[row["relname"]]:
                db.execute(f"delete from gangq.{row['relname']}")
        db.execute("select setval(oid::regclass, 5000) from pg_class where relkind = 'S'")
        db.close()
    with databases.kept(template) as again:
        assert again is kept
        assert dump(kept.dsn) == fresh


def changes_a_function(db: Connection) -> None:
    db.execute("create or replace function gangq.caller() returns text language sql return 'x'")


def makes_a_table(db: Connection) -> None:
    db.execute("create table public.effects (n integer)")


def drops_a_table(db: Connection) -> None:
    db.execute("drop table gangq.logs_rest")


def gives_the_planner_statistics(db: Connection) -> None:
    db.execute("analyze gangq.settings")


def sets_something_of_the_database(db: Connection) -> None:
    db.execute(f"alter database {db.info.dbname} set work_mem = '8MB'")


def cuts_every_connection(db: Connection) -> None:
    with pytest.raises(psycopg.OperationalError):
        db.execute(
            # Its own as the last: after that it cuts no others.
            "select pg_terminate_backend(a.pid) from (select pid from pg_stat_activity "
            "where datname = current_database() order by pid = pg_backend_pid()) a"
        )


@pytest.mark.parametrize(
    "change",
    [
        changes_a_function,
        makes_a_table,
        drops_a_table,
        gives_the_planner_statistics,
        sets_something_of_the_database,
        cuts_every_connection,
    ],
)
def test_what_cannot_be_put_back_makes_a_new_database(
    databases: Databases, template: str, change: Callable[[Connection], None]
) -> None:
    with databases.kept(template) as kept:
        with connect(kept.dsn) as db:
            change(db)
    with databases.kept(template) as other:
        assert other is not kept
        with connect(other.dsn) as db:
            assert db.info.dbname == other.name


def test_a_connection_that_a_test_leaves_open_makes_a_new_database(
    databases: Databases, template: str
) -> None:
    with databases.kept(template) as kept:
        left = psycopg.connect(kept.dsn)
    with databases.kept(template) as other:
        assert other is not kept
    left.close()


def leave_something_of_everything(db: psycopg.Connection[Any]) -> None:
    db.execute("set statement_timeout = '5s'; set role gangq_viewer; select pg_advisory_lock(7)")
    db.execute("listen gangq_tick; notify gangq_tick", prepare=False)
    db.execute("select 1", prepare=True)
    db.execute("begin")


@pytest.mark.parametrize("ends", [psycopg.Connection.__exit__, lambda db, *_: db.close()])
def test_a_session_is_as_a_new_one_and_has_kept_its_plans(
    databases: Databases, template: str, ends: Callable[..., object]
) -> None:
    with databases.kept(template) as kept:
        db = connect(kept.dsn)
        backend = db.info.backend_pid
        leave_something_of_everything(db)
        ends(db, None, None, None)
        assert db.closed
        with pytest.raises(psycopg.OperationalError, match="closed"):
            db.execute("select 1")
    with databases.kept(template) as again:
        assert again is kept
        with connect(kept.dsn) as db:
            assert db.info.backend_pid == backend
            (row,) = db.execute(
                "select current_setting('statement_timeout') as timeout, current_user = session_user as self, "
                "(select count(*) from pg_locks where locktype = 'advisory') as locks, "
                "(select count(*) from pg_prepared_statements) as prepared, "
                "(select count(*) from pg_listening_channels()) as channels"
            ).fetchall()
            assert row == {"timeout": "0", "self": True, "locks": 0, "prepared": 0, "channels": 0}
            assert list(db.notifies(timeout=0.1)) == []

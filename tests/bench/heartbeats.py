"""A fleet that does nothing but say that it is alive, beside the bare UPDATE of one row of a table as wide.

Every worker heartbeats once in five seconds, spread evenly, through a pool; after each heartbeat comes the bare
UPDATE of that worker's row through a pool like it, once as a person would write it and once with synchronous_commit
off, as heartbeats have it. So all of them meet the same machine. What is compared is the CPU of the server processes
that serve them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import psycopg
from machine import CpuMeter
from measures import Result, Sizes
from stage import Stage, scalar
from systems import System

from gangq.client import Client

_EVERY_S = 5.0
_TICK_S = 1.0

_BARE = """
create schema bare;
create table bare.leases (like gangq.leases including defaults including constraints, primary key (incarnation))
  with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into bare.leases select * from gangq.leases;
create table bare.leases_off (like bare.leases including defaults including constraints, primary key (incarnation))
  with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
insert into bare.leases_off select * from gangq.leases;
vacuum analyze
"""
_UPDATE = (
    "update bare.{table} set expires_at = clock_timestamp() + make_interval(secs => lease_s), "
    "renewed_at = clock_timestamp() where incarnation = %s"
)
_SIZE = (
    "select sum(pg_total_relation_size(oid))::bigint from pg_class "
    "where relnamespace = 'gangq'::regnamespace and relkind = 'r'"
)
_UPDATES = "select sum(n_tup_upd)::bigint from pg_stat_user_tables where schemaname = 'gangq'"
_HOT = "select sum(n_tup_hot_upd)::bigint from pg_stat_user_tables where schemaname = 'gangq'"


def _cpu_us(pids: list[int]) -> float:
    """CPU that these processes have used, to the nanosecond where the kernel says so."""
    total = 0.0
    for pid in pids:
        try:
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3
        except OSError:
            total += sum(psutil.Process(pid).cpu_times()[:2]) * 1e6
    return total


def _pool(dsn: str, name: str, **parameters: Any) -> Client:
    return Client(dsn, min_size=2, max_size=2, application_name=name, **parameters)


def fleet(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """CPU a heartbeat, the share of HOT updates, and how much the tables grew."""
    with (
        stage.database(system) as dsn,
        _pool(dsn, "fleet") as pool,
        Client(dsn, min_size=1, max_size=1) as ticker,
        psycopg.connect(dsn, autocommit=True) as look,
        _pool(dsn, "bare") as bare,
        _pool(dsn, "bare_off", options="-c synchronous_commit=off") as bare_off,
    ):
        fleet = [
            pool.register_worker(
                name=f"w{n}", host=f"host{n // 8}", queues=["default"], lease_s=120
            ).incarnation
            for n in range(sizes.flat.workers)
        ]
        for statement in _BARE.split(";\n"):
            look.execute(statement.encode())
        updates = (
            (bare, _UPDATE.format(table="leases").encode()),
            (bare_off, _UPDATE.format(table="leases_off").encode()),
        )

        def beat(number: int) -> None:
            incarnation = fleet[number % len(fleet)]
            pool.heartbeat(incarnation=incarnation, durable=False)
            for other, update in updates:
                with other.connection() as connection:
                    connection.execute(update, (incarnation,))

        for number in range(len(fleet)):
            beat(number)
        arms = {
            name: [
                pid
                for (pid,) in look.execute(
                    "select pid from pg_stat_activity where application_name = %s", (said,)
                )
            ]
            for name, said in (("gangq", "fleet"), ("bare", "bare"), ("bare, asynchronous", "bare_off"))
        }
        size, rows, hot = (int(str(scalar(look, query))) for query in (_SIZE, _UPDATES, _HOT))
        before = {name: _cpu_us(pids) for name, pids in arms.items()}
        meter, began, ticked, beats = CpuMeter(stage.server), time.monotonic(), 0.0, 0
        while (passed := time.monotonic() - began) < sizes.flat.beats_s:
            if beats > passed / _EVERY_S * len(fleet):
                time.sleep(0.001)
                continue
            if passed - ticked > _TICK_S:
                ticker.tick()
                ticked = passed
            beat(beats)
            beats += 1
        foreign = round(meter.read().foreign_cores, 2)
        spent = {name: (_cpu_us(pids) - before[name]) / beats for name, pids in arms.items()}
        time.sleep(_TICK_S + 1)  # By then every session has said what it did.
        pool.close()
        grown = int(str(scalar(look, _SIZE))) - size
        rows, hot = int(str(scalar(look, _UPDATES))) - rows, int(str(scalar(look, _HOT))) - hot
    of = f"{sizes.flat.workers:,} workers for {sizes.flat.beats_s:g} s"
    notes = {f"{name}_us": round(us, 1) for name, us in spent.items()}
    notes |= {"beats": beats, "updates": rows, "foreign_cores": foreign}
    return [
        Result("server CPU of a heartbeat", "us", spent["gangq"], False, notes),
        Result("the same to a bare UPDATE (1.30 or less)", "ratio", spent["gangq"] / spent["bare"], False),
        Result(
            "the same to one with synchronous_commit off",
            "ratio",
            spent["gangq"] / spent["bare, asynchronous"],
            False,
        ),
        Result("updates that are HOT (0.95 or more)", "share", hot / rows if rows else 0.0),
        Result(f"tables grew by, {of} (0)", "KiB", grown / 1024, False),
    ]

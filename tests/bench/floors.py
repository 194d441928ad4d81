"""What pgbench reports of the floor's SQL. Its clock does not count the time to connect."""

from __future__ import annotations

from measures import Result, Sizes, drain_title, enqueue_title
from stage import Stage
from systems import System
from systems.pgbench_system import Pgbench


def _drained(stage: Stage, system: System, count: int, batch: int) -> list[Result]:
    assert isinstance(system, Pgbench)
    with stage.database(system) as dsn:
        with system.enqueuer(dsn) as enqueuer:
            enqueuer.many(count)
        stage.tidy(dsn)
        rate = system.drain(dsn, stage.scratch / "pgbench.sql", count, batch)
    return [Result(drain_title(batch), "jobs/s", rate, notes={"jobs": count, "batch": batch})]


def drain(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """A claim of 100 and the finish of those 100, over and over."""
    return _drained(stage, system, sizes.drain, 100)


def single(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The same one by one."""
    return _drained(stage, system, sizes.drain_single, 1)


def enqueue(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """One INSERT after the other."""
    assert isinstance(system, Pgbench)
    count = sizes.enqueue_single
    with stage.database(system) as dsn:
        rate = system.insert(dsn, stage.scratch / "pgbench.sql", count)
    return [Result(enqueue_title(1), "jobs/s", rate, notes={"jobs": count})]

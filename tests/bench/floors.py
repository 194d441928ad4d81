"""What pgbench reports of the floor's SQL. Its clock does not count the time to connect."""

from __future__ import annotations

from measures import Result, Sizes, drain_title, enqueue_title
from stage import Stage
from systems import System
from systems.pgbench_system import Pgbench


def _drained(stage: Stage, system: Pgbench, count: int, batch: int) -> float:
    with stage.database(system) as dsn:
        with system.enqueuer(dsn) as enqueuer:
            enqueuer.many(count)
        stage.tidy(dsn)
        return system.drain(dsn, stage.scratch / "pgbench.sql", count, batch)


def _of(system: System) -> Pgbench:
    assert isinstance(system, Pgbench)
    return system


def drain(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """A claim of 100 and the finish of those 100, over and over."""
    return [Result(drain_title(100), "jobs/s", _drained(stage, _of(system), sizes.drain, 100))]


def single(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """The same one by one."""
    return [Result(drain_title(1), "jobs/s", _drained(stage, _of(system), sizes.drain_single, 1))]


def enqueue(stage: Stage, system: System, sizes: Sizes) -> list[Result]:
    """One INSERT after the other."""
    with stage.database(system) as dsn:
        rate = _of(system).insert(dsn, stage.scratch / "pgbench.sql", sizes.enqueue_single)
    return [Result(enqueue_title(1), "jobs/s", rate)]

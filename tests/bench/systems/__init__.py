"""The systems that are measured, by name; gangq first, because the others are compared with it.

A worker process imports its own system only, and what is not installed is missed by nobody but its own rows.
"""

from __future__ import annotations

import importlib

from systems.base import Absent, Enqueuer, System

_CLASSES = {
    "gangq": "gangq_system.Gangq",
    "floor": "floor.Floor",
    "fused": "floor.Fused",
    "insert": "insert_system.Insert",
    "notify": "notify_system.Notify",
    "pgbench": "pgbench_system.Pgbench",
    "pgqueuer": "pgqueuer_system.PgQueuer",
    "graphile": "graphile_system.Graphile",
    "chancy": "chancy_system.Chancy",
    "procrastinate": "procrastinate_system.Procrastinate",
    "absurd": "absurd_system.Absurd",
    "dbos": "dbos_system.Dbos",
}
NAMES = tuple(_CLASSES)


def load(name: str) -> System:
    """The system of that name. `Absent`: its package cannot be imported."""
    module, _, of = _CLASSES[name].partition(".")
    try:
        made: System = getattr(importlib.import_module(f"systems.{module}"), of)()
    except ImportError as error:
        raise Absent(f"{error}; pip install 'gangq[bench]' brings it") from error
    return made


__all__ = ["NAMES", "Absent", "Enqueuer", "System", "load"]

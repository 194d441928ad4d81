"""The systems that are measured, by name; gangq first, because the others are compared with it."""

from __future__ import annotations

from systems.base import Enqueuer, System
from systems.floor import Floor
from systems.gangq_system import Gangq
from systems.pgqueuer_system import PgQueuer

SYSTEMS: dict[str, System] = {system.name: system for system in (Gangq(), Floor(), PgQueuer())}

__all__ = ["SYSTEMS", "Enqueuer", "System"]

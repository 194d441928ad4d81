"""How many jobs a worker runs at once, and where: in its main thread, or in child processes.

A worker has slots for placed work (gangs, and jobs that the decision places) and slots for light jobs. The lanes are
apart: neither takes a slot of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gangq.errors import InvalidInput
from gangq.worker.options import WorkerOptions

log = logging.getLogger("gangq.worker.lanes")

Lane = Literal["placed", "light"]


@dataclass(frozen=True)
class Lanes:
    """The slots of both lanes, and the lane that has the main thread; None: all jobs run in children."""

    slots: int
    light: int
    main: Lane | None

    @property
    def children(self) -> int:
        """How many jobs run in child processes at once."""
        return self.slots + self.light - (self.main is not None)

    @property
    def of_children(self) -> Lane | None:
        """The lane whose jobs run in child processes; None: both."""
        if self.main is None and self.slots and self.light:
            return None
        return "light" if self.main == "placed" or not self.slots else "placed"


def choose(
    options: WorkerOptions, devices: int, handlers: bool, unreachable: Callable[[], str | None]
) -> Lanes:
    """The lanes of a worker with so many devices.

    ``handlers``: it runs Python handlers. The main thread then has the placed lane where the worker offers devices,
    else the light one, if that lane has exactly one slot. ``unreachable()`` says why a child process could not find
    the handlers; None: it can. If it could not, the main thread's lane is the only one, with one slot.
    """
    slots = max(1, devices) if options.slots is None else options.slots
    own: Lane = "placed" if slots and (devices or not options.light) else "light"
    one = (slots if own == "placed" else options.light) == 1
    lanes = Lanes(slots, options.light, own if handlers and one else None)
    if handlers and lanes.children and (reason := unreachable()) is not None:
        if (options.slots or 0) > 1 or options.light > 1:
            raise InvalidInput(
                f"more than one slot needs the App in a module that can be imported: {reason}. Move it there, or "
                "leave out --slots and --light"
            )
        log.warning("one_lane", extra={"lane": own, "reason": reason})
        lanes = Lanes(int(own == "placed"), int(own == "light"), own)
    if options.prefetch > 1 and lanes.main != "light":
        log.warning(
            "prefetch_unused",
            extra={
                "advice": "only light jobs in the main thread are prefetched: --devices none or --slots 0"
            },
        )
    return lanes

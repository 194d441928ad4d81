"""The colour of each state, the same in the command line, in `gangq top` and on the page.

The names are those of a terminal. The page has a CSS class of each name.
"""

from __future__ import annotations

from collections.abc import Mapping

_STATES_OF: Mapping[str, str] = {
    # Waits for a time, an event or another job; or is idle, or has ended without a failure.
    "bright_black": "scheduled waiting free unknown withdrawn retired stopped drained ended",
    # Waits for room.
    "bright_blue": "pending blocked",
    # Has room, and does not run yet.
    "blue": "reserved starting updating",
    "cyan": "running live held busy serving",
    "green": "done ok ready",
    # Is being stopped, or needs an eye.
    "yellow": "preempting preempted draining stopping leaving deleting silent degraded exiting cordoned paused",
    "red": "failed dead quarantined crash_loop halted",
    "magenta": "cancelled kept",
}
COLOURS: Mapping[str, str] = {
    state: colour for colour, states in _STATES_OF.items() for state in states.split()
}
"""By state: of jobs, gangs, batches, services, workers, hosts, devices, queues and notifications."""


def colour_of(state: str) -> str | None:
    """The colour of a state, which may go on after its first word ("paused until 12:00"); None: it is none."""
    return COLOURS.get(state.partition(" ")[0])

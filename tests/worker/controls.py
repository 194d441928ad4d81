"""Control loops for tests of a worker's parts."""

from __future__ import annotations

from typing import Any

from gangq.worker.control import Control

running: list[Control] = []
"""Those of the test that runs; stopped at its end."""


def control_of(client: Any) -> Control:
    """A control loop that runs, with a connection to where ``client`` calls."""
    control = Control(client, "w")
    control.start()
    running.append(control)
    return control

"""The host's side: restarting the workers that are flagged dead, and the systemd units that gangq ships.

:class:`Bouncer` is what ``gangq bounce`` runs; :mod:`gangq.host.backends` restarts one worker;
:mod:`gangq.host.units` puts the units in place.
"""

from __future__ import annotations

from gangq.host.backends import (
    Backend,
    Choice,
    DockerContainer,
    RestartCommand,
    Restarted,
    SystemdUnit,
    WorkerMap,
    choose,
)
from gangq.host.bouncer import Action, Bouncer, Proof, Prover

__all__ = [
    "Action",
    "Backend",
    "Bouncer",
    "Choice",
    "DockerContainer",
    "Proof",
    "Prover",
    "RestartCommand",
    "Restarted",
    "SystemdUnit",
    "WorkerMap",
    "choose",
]

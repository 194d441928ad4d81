"""The environment of a command: its own, without the worker's secrets, and with what gangq tells it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangq import private
from gangq.context import Checkpoint, GangInfo
from gangq.gpu import Detection, Device
from gangq.worker.jobs import ActiveJob

_OF_THE_WORKERS_TRACE = {"TRACEPARENT", "TRACESTATE", "BAGGAGE"}
"""What an environment says of the trace that the worker was started in, which is none of a job's."""


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """What a child may inherit: no DSN, no password, nothing of another job's."""
    return {
        name: value
        for name, value in environ.items()
        if not (name.startswith("GANGQ_") or private.is_secret(name))
    }


def visible_devices(detection: Detection, devices: list[dict[str, Any]]) -> dict[str, str]:
    """The variables that show a child exactly the devices its job holds; none of them hides all.

    Empty where the worker offers no device: gangq then has no say in what the child sees.
    """
    known = {device.uuid: device for device in detection.devices}
    held: list[Device] = [known[device["uuid"]] for device in devices if device["uuid"] in known]
    return detection.visible_env(held)


def for_child(
    job: ActiveJob,
    *,
    base: Mapping[str, str],
    own: Mapping[str, str],
    devices: Mapping[str, str],
    checkpoint: Checkpoint | None,
    socket_path: Path,
    traceparent: str | None,
) -> dict[str, str]:
    """The whole environment of a job's command.

    ``base`` is the worker's own environment, ``own`` what the job was submitted with; what gangq says wins
    over both. ``traceparent``: the span that it continues. ``GANGQ_MARK`` is added by
    :class:`gangq.worker.child.Child`.
    """
    env = {**_inherited(base), **own, **devices}
    if traceparent is not None:
        env["TRACEPARENT"] = traceparent
    env |= {
        "GANGQ_JOB_ID": str(job.id),
        "GANGQ_TOKEN": str(job.token),
        "GANGQ_ATTEMPT": str(job.claim.attempt),
        "GANGQ_SOCKET": str(socket_path),
        "GANGQ_KEY": job.key,
    }
    if job.claim.array_index is not None:
        env["GANGQ_ARRAY_INDEX"] = str(job.claim.array_index)
    if checkpoint is not None:
        env["GANGQ_CHECKPOINT"] = str(checkpoint.path)
        env["GANGQ_CHECKPOINT_STEP"] = str(checkpoint.step)
    if job.gang is not None:
        env |= for_gang(job.gang)
    if job.replica is not None:
        service = job.replica.service
        env |= {
            "GANGQ_SERVICE": service.name,
            "GANGQ_REVISION": str(service.revision),
            "GANGQ_PORT": str(service.port),
        }
    return env


def for_shared(
    key: str,
    *,
    base: Mapping[str, str],
    own: Mapping[str, str],
    devices: Mapping[str, str],
    socket_path: Path,
) -> dict[str, str]:
    """The whole environment of a process that runs many jobs, whose own key this is: it names none of them."""
    return {**_inherited(base), **own, **devices, "GANGQ_SOCKET": str(socket_path), "GANGQ_KEY": key}


def _inherited(base: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in scrubbed(base).items() if name not in _OF_THE_WORKERS_TRACE}
    return {"PYTHONUNBUFFERED": "1", **kept}


def for_gang(gang: GangInfo) -> dict[str, str]:
    """How a member is told who it is, in gangq's names and in those that torch expects."""
    return {
        "GANGQ_GANG_ID": str(gang.id),
        "GANGQ_EPOCH": str(gang.epoch),
        "GANGQ_ROLE": gang.role,
        "GANGQ_ROLE_RANK": str(gang.role_rank),
        "GANGQ_PEERS": json.dumps(
            [
                {
                    "rank": peer.rank,
                    "job_id": peer.job_id,
                    "host": peer.host,
                    "worker": peer.worker,
                    "role": peer.role,
                }
                for peer in gang.peers
            ]
        ),
        "RANK": str(gang.rank),
        "WORLD_SIZE": str(gang.world_size),
        "LOCAL_RANK": str(gang.local_rank),
        "LOCAL_WORLD_SIZE": str(gang.local_world_size),
        "NODE_RANK": str(gang.node_rank),
        "MASTER_ADDR": gang.master_addr,
        "MASTER_PORT": str(gang.master_port),
    }


@dataclass(frozen=True)
class Surroundings:
    """The environment and the directory of the worker when it began: what its children start with.

    Not those of the moment: a handler in the main thread may change both (``os.environ``, ``os.chdir``) while a job
    of the other lane starts.
    """

    environ: Mapping[str, str]
    directory: str

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process now."""
        try:
            directory = os.getcwd()
        except OSError:
            directory = "."  # It was removed: a job that names no directory of its own fails, and says so.
        return cls(dict(os.environ), directory)

    def path(self, given: str | None) -> str:
        """The directory a command runs in: the one it asked for [the worker's own]."""
        return os.path.join(self.directory, given or "")

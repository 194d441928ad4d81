"""How one worker of this host is restarted: as ``--map`` says, else as the worker registered itself.

Names and identities come from the database, where every worker's login can write them. So :func:`choose` gives a
backend only for a worker that was seen on this host. The exception is a command without the worker's name in it.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gangq.errors import InvalidInput
from gangq.host.backends import (
    Backend,
    DockerContainer,
    RestartCommand,
    SystemdUnit,
    container_name,
    unit_name,
)

KINDS = ("unit", "user-unit", "docker", "command")
"""What ``--map`` takes before the colon."""


@dataclass(frozen=True)
class WorkerMap:
    """One ``--map``: for workers whose name fits ``pattern``, restart ``value``, which is a ``kind``."""

    pattern: str
    kind: str
    value: str

    @classmethod
    def parse(cls, text: str) -> WorkerMap:
        """Read ``NAME=unit:...``, ``NAME=user-unit:...``, ``NAME=docker:...`` or ``NAME=command:...``.

        NAME may hold ``*`` and ``?``; ``{worker}`` in what follows stands for the worker's name, of a worker that is
        seen on this host.

        Raises:
            InvalidInput: it is none of these.
        """
        pattern, equals, target = text.partition("=")
        kind, colon, value = target.partition(":")
        if not (pattern and equals and colon and value.strip()) or kind not in KINDS:
            raise InvalidInput(
                f"{text!r} maps no worker: write NAME=unit:gangq-worker@0.service, NAME=user-unit:..., "
                "NAME=docker:CONTAINER or NAME='command:PROGRAM ARG ...' (* in NAME: any; {worker}: its name)"
            )
        made = cls(pattern, kind, value.strip())
        made.backend("worker-1")
        return made

    def backend(self, worker: str) -> SystemdUnit | DockerContainer | RestartCommand:
        """The backend for that worker.

        Raises:
            InvalidInput: what it would restart is not a name of such a thing.
        """
        if self.kind == "command":
            try:
                words = shlex.split(self.value)
            except ValueError as e:
                raise InvalidInput(f"the command {self.value!r} cannot be split into words: {e}") from None
            return RestartCommand([word.replace("{worker}", worker) for word in words])
        name = self.value.replace("{worker}", worker)
        if self.kind == "docker":
            return DockerContainer(container_name(name))
        return SystemdUnit(unit_name(name), user=self.kind == "user-unit")


Seer = Callable[[str, Mapping[str, Any]], tuple[int, ...] | str]
"""Finds a worker among the processes of this host: its pid and those of its ancestors; else why it is not seen."""


def choose(
    worker: str,
    identity: Mapping[str, Any],
    *,
    see: Seer,
    maps: Sequence[WorkerMap] = (),
    trusted: Sequence[str] = ("gangq-*",),
) -> Backend:
    """How to restart a worker: the first of ``maps`` that fits its name, else what it said when it registered.

    Name and identity come from the database, where every worker's login can write them. So ``see`` looks for a worker
    of that name on this host, and what it finds decides:

    ====================================  ========  =====================  ===============================
    what would be restarted               not seen  seen                   seen, and is or is below the
                                                                           main process of it
    ====================================  ========  =====================  ===============================
    a command without ``{worker}``        yes       yes                    -
    a command with ``{worker}``           no        yes                    -
    a unit or container, mapped           no        no                     yes
    a unit that the worker registered     no        no                     yes, if ``trusted`` fits its name
    ====================================  ========  =====================  ===============================

    Raises:
        InvalidInput: this host does not know how; what to do.
    """
    if not isinstance(identity, Mapping):
        identity = {}
    for one in maps:
        if fnmatch.fnmatchcase(worker, one.pattern):
            backend = one.backend(worker)
            if isinstance(backend, RestartCommand) and "{worker}" not in one.value:
                return backend
            break
    else:
        backend = _registered(worker, identity, trusted)
    seen = see(worker, identity)
    if isinstance(seen, str):
        raise InvalidInput(
            f"{seen}, so {backend} might hit another: look at the host; a command without {{worker}} in it is run "
            "without this check, --map NAME='command:PROGRAM ARG'",
        )
    if not isinstance(backend, RestartCommand) and (main_pid := backend.main_pid()) not in seen:
        raise InvalidInput(
            f"its process {seen[0]} does not belong to the main process of what {backend} would restart "
            f"({main_pid or 'none'}): map it to what it runs as, --map NAME=unit:... or NAME=docker:...",
        )
    return backend


def _registered(worker: str, identity: Mapping[str, Any], trusted: Sequence[str]) -> SystemdUnit:
    """What the worker said it is."""
    user = "user_unit" in identity and _text(identity, "unit") is None
    unit = _text(identity, "unit") or _text(identity, "user_unit")
    if unit is None:
        raise InvalidInput(
            "it does not run as a unit: say how to restart it, --map NAME=docker:CONTAINER or "
            f"--map '{worker}=command:PROGRAM ARG'"
        )
    name = unit_name(unit)
    host = identity.get("host")
    its_uid = host.get("uid") if isinstance(host, Mapping) else None
    if user and (not isinstance(its_uid, int) or its_uid != os.getuid()):
        raise InvalidInput(
            f"it runs as unit {name} of the user with id {its_uid}: run gangq bounce as that user, too"
        )
    if not any(fnmatch.fnmatchcase(name, pattern) for pattern in trusted):
        raise InvalidInput(
            f"it says it is unit {name}, and that is trusted only for names like {', '.join(trusted)}: allow it with "
            f"--trust '{name}' or --map '{worker}={'user-unit' if user else 'unit'}:{name}'"
        )
    return SystemdUnit(name, user=user)


def _text(identity: Mapping[str, Any], key: str) -> str | None:
    value = identity.get(key)
    return value if isinstance(value, str) and value else None

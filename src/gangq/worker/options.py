"""What a worker offers and how it behaves: the options of ``gangq worker`` and ``App.run_worker()``; and what follows
for how many jobs it runs at once, and where: in its main thread, or in child processes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psutil

from gangq import names
from gangq.durations import seconds
from gangq.errors import InvalidInput
from gangq.proc import cgroup

log = logging.getLogger("gangq.worker.options")


@dataclass(frozen=True)
class WorkerOptions:
    """A worker's options. Memory in MiB; lengths of time as seconds, which "90s" and timedeltas become.

    ``queues`` it serves; ``name`` [the host's, with ``-gpu<index>`` where CUDA_VISIBLE_DEVICES restricts it]
    is unique among live workers and stays the same over restarts; ``slots`` [one for each device, at least 1] is
    how many placed jobs run at once (members of gangs, and jobs that ask for devices, memory or CPUs, for a model,
    or wait in a queue with limits or a fair order), ``light`` [1] how many of all others; 0 in either: it takes none.
    The main thread runs the jobs of one lane, if that has one slot (the placed lane where there are devices, else the
    light one), child processes run all others; ``prefetch`` [1] is how many light jobs it may hold for its main
    thread; ``devices`` declares GPUs
    where no driver answers (``2x24GiB``) or none at all (``none``); ``memory_mb`` and ``cpus`` [all this process may
    use]; ``address`` [the host's name where that resolves] is where members of a gang reach this host; ``taints``
    (``key`` or ``key=value``) keep off every job that does not tolerate them; ``lease_s`` [the installation's] is
    its lease;
    ``connections`` [2] is how many to the database it has: one for claims and reports of the main thread, if that has
    a lane, and one for all else. With 1 the main thread shares that one, and its short jobs take longer. A watchdog
    that trips opens its own, only then; ``metrics`` (``HOST:PORT``, or ``PORT`` of 127.0.0.1) is where it serves
    numbers about itself for a Prometheus (extra ``gangq[metrics]``);
    ``drain_timeout_s`` [0] is how long running jobs may go on when the worker is told to stop, before they
    are told to stop too; ``commands`` [True] is whether it runs submitted commands; ``once`` ends it when
    nothing is left to claim.
    """

    queues: Sequence[str] = ("default",)
    name: str = ""
    host: str = ""
    slots: int | None = None
    light: int = 1
    prefetch: int = 1
    devices: str | None = None
    memory_mb: int | None = None
    cpus: float | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)
    taints: Sequence[str] = ()
    address: str | None = None
    lease_s: float | None = None
    connections: int = 2
    metrics: str | None = None
    drain_timeout_s: float = 0.0
    commands: bool = True
    once: bool = False

    def resolved(self) -> WorkerOptions:
        """With every default filled in from this host.

        Raises:
            InvalidInput: an option that no worker could have.
        """
        if isinstance(self.queues, str) or not self.queues:
            raise InvalidInput(f"queues is {self.queues!r}: name at least one queue, as a list: ['default']")
        if isinstance(self.taints, str):
            raise InvalidInput(f"taints is {self.taints!r}: pass a list of strings, e.g. [{self.taints!r}]")
        if (self.slots is not None and self.slots < 0) or self.light < 0:
            raise InvalidInput(f"slots is {self.slots} and light is {self.light}: neither is negative")
        if self.slots == 0 and self.light == 0:
            raise InvalidInput("slots and light are both 0: a worker has at least one slot")
        if self.prefetch < 1 or (self.prefetch > 1 and self.light != 1):
            raise InvalidInput(
                f"prefetch is {self.prefetch} with {self.light} light slots: it is at least 1, and more than 1 only "
                "where the worker has one light slot"
            )
        if self.connections not in (1, 2):
            raise InvalidInput(
                f"connections is {self.connections}: 2 (one of them for the main thread), or 1 for everything"
            )
        host = names.check("host", self.host, "pass --host NAME") if self.host else names.host_name()
        name = self.name or default_name(host, os.environ)
        address = self.address or reachable_address(host)
        return replace(
            self,
            queues=tuple(self.queues),
            name=names.check("a worker's name", name, "pass --name NAME"),
            host=host,
            memory_mb=usable_memory_mb() if self.memory_mb is None else self.memory_mb,
            cpus=usable_cpus() if self.cpus is None else self.cpus,
            labels=dict(self.labels),
            taints=tuple(self.taints),
            lease_s=None if self.lease_s is None else seconds(self.lease_s, "lease_s"),
            drain_timeout_s=seconds(self.drain_timeout_s, "drain_timeout_s"),
            address=names.check("a worker's address", address, "pass --address HOST"),
        )


def default_name(host: str, environ: Mapping[str, str]) -> str:
    """The host's name; with the GPUs in it where CUDA_VISIBLE_DEVICES tells several workers apart."""
    shown = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    if not shown:
        return host
    name = f"{host}-gpu{re.sub(r'[^A-Za-z0-9-]+', '-', shown)}"
    # Eight UUIDs are longer than a name may be.
    return (
        name
        if len(name) <= names.LONGEST
        else f"{host}-gpu-{hashlib.sha256(shown.encode()).hexdigest()[:12]}"
    )


def usable_memory_mb() -> int:
    """The memory of this host, or what the control groups around this process allow where that is less."""
    limit = cgroup.memory_limit(cgroup.find("memory"))
    total = int(psutil.virtual_memory().total)
    return (total if limit is None else min(total, limit)) >> 20


def usable_cpus() -> float:
    """The processors that this process may run on, or the share of them that its control groups allow."""
    limit = cgroup.cpu_limit(cgroup.find("cpu"))
    present = float(len(os.sched_getaffinity(0)))
    return present if limit is None else min(present, limit)


def reachable_address(host: str) -> str:
    """Where members of a gang find this host: its name if that resolves here, else this machine's.

    A name that resolves nowhere (a pretend host, a container without DNS) would let every rendezvous time
    out.
    """
    for name in (host, socket.gethostname()):
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            continue
        return name
    return "127.0.0.1"


Lane = Literal["placed", "light"]


@dataclass(frozen=True)
class Lanes:
    """The slots for placed work (gangs, and jobs that the decision places) and those for light jobs; neither lane
    takes a slot of the other. ``main``: the lane that has the main thread; None: all jobs run in children.
    """

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


def choose_lanes(options: WorkerOptions, devices: int, handlers: bool, unreachable: str | None) -> Lanes:
    """The lanes of a worker with so many devices.

    ``handlers``: it runs Python handlers. The main thread then has the placed lane where the worker offers devices,
    else the light one, if that lane has exactly one slot. ``unreachable`` says why a child process could not find
    the handlers; None: it can. If it could not, the main thread's lane is the only one, with one slot.
    """
    slots = max(1, devices) if options.slots is None else options.slots
    own: Lane = "placed" if slots and (devices or not options.light) else "light"
    one = (slots if own == "placed" else options.light) == 1
    lanes = Lanes(slots, options.light, own if handlers and one else None)
    if handlers and lanes.children and unreachable is not None:
        if (options.slots or 0) > 1 or options.light > 1:
            raise InvalidInput(
                f"more than one slot needs the App in a module that can be imported: {unreachable}. Move it there, "
                "or leave out --slots and --light"
            )
        log.warning("one_lane", extra={"lane": own, "reason": unreachable})
        lanes = Lanes(int(own == "placed"), int(own == "light"), own)
    if options.prefetch > 1 and lanes.main != "light":
        log.warning(
            "prefetch_unused",
            extra={
                "advice": "only light jobs in the main thread are prefetched: --devices none or --slots 0"
            },
        )
    return lanes

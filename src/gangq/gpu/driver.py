"""What a driver binding says about devices, and what all bindings do with the devices that they list: leave out those
that the operator does not show (CUDA_VISIBLE_DEVICES and its relatives), and name those that are joined.

The driver libraries list every card of the host whatever these variables say, so a worker that ignored them
would hand out cards that its operator gave to another program.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from gangq.gpu.device import Device, Source

_NOTHING = frozenset({"", "none", "nodevfiles"})


@dataclass(frozen=True)
class Candidate:
    """A device with the names an operator may call it by: its runtime's ordinal, and whole or cut UUIDs.

    A MIG instance also answers to the ordinal and the UUID of its card. `handle` is the driver's, where it is
    needed to read the device.
    """

    device: Device
    ordinal: int
    uuids: tuple[str, ...]
    handle: Any = field(default=None, compare=False)


def entries(value: str) -> list[str]:
    """Split the value of a *_VISIBLE_DEVICES variable; "", "none" and "NoDevFiles" mean no device.

    A negative index ends the list, as it does for CUDA: "0,-1,1" shows device 0 only.
    """
    if value.strip().lower() in _NOTHING:
        return []
    listed: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("-"):
            break
        if entry:
            listed.append(entry)
    return listed


def named(candidates: Iterable[Candidate], entry: str) -> list[Candidate]:
    """Return the candidates that one entry names: an ordinal, a UUID, or an unambiguous start of a UUID."""
    if entry.isdecimal():
        return [c for c in candidates if c.ordinal == int(entry)]
    matches = [(c, uuid) for c in candidates for uuid in c.uuids if uuid.lower().startswith(entry.lower())]
    if len({uuid for _, uuid in matches}) != 1:
        return []
    return [c for c, _ in matches]


def restrict(
    candidates: Sequence[Candidate], variable: str, value: str | None
) -> tuple[list[Candidate], list[str]]:
    """Keep what `value` lists, in its order; returns the kept candidates and one warning per unusable entry.

    None (variable not set) keeps everything. An entry that names nothing is passed over rather than ending
    the list: the card it means may be a lost one, and the healthy ones listed behind it are still wanted.
    """
    if value is None:
        return list(candidates), []
    kept: list[Candidate] = []
    warnings: list[str] = []
    for entry in entries(value):
        found = named(candidates, entry)
        if not found:
            warnings.append(
                f"{variable}={value!r}: {entry!r} names no usable device of this host, or more than one; it "
                "is passed over. List whole UUIDs (nvidia-smi -L, amd-smi list) or correct the variable."
            )
        kept.extend(c for c in found if c not in kept)
    return kept, warnings


def enforced_elsewhere(value: str, count: int) -> bool:
    """Say whether a NVIDIA_VISIBLE_DEVICES value is a note from the container runtime rather than a filter.

    The runtime mounts the chosen cards and the driver then counts them from 0, while the variable keeps the
    host's numbers: "3" in a container with one card is that card. Applying it again would leave none. Where
    every index is below `count` (what the driver counts, lost cards included) the two agree. "all" and
    the "void" or the path that device plugins leave behind, name no card either. An unknown UUID stays a
    filter: it must not open the whole host.
    """
    return any(
        not re.match(r"(GPU|MIG)-", entry) and not (entry.isdecimal() and int(entry) < count)
        for entry in entries(value)
    )


def linked(candidates: Sequence[Candidate], joined: Callable[[Candidate, Candidate], bool]) -> list[Device]:
    """Return the devices with their `Device.link`: in a group each device is joined with each other one.

    A device is in one group at most, the first whose devices it is joined with. In a DGX-1 each of eight cards
    reaches the three beside it and one across: that makes two groups of four.
    """
    groups: list[list[Candidate]] = []
    for candidate in candidates:
        for group in groups:
            if all(joined(member, candidate) for member in group):
                group.append(candidate)
                break
        else:
            groups.append([candidate])
    names = {
        member.device.uuid: group[0].device.uuid for group in groups if len(group) > 1 for member in group
    }
    return [replace(candidate.device, link=names.get(candidate.device.uuid)) for candidate in candidates]


class Driver(ABC):
    """One way to learn which devices there are and to hand some of them to a process."""

    name: Source
    library: str

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """``environ`` [this process's] may hold the operator's restriction."""
        self.warnings: list[str] = []
        """What the last :meth:`devices` call wants the operator to know, one sentence each."""
        self._environ = os.environ if environ is None else environ

    @abstractmethod
    def devices(self) -> list[Device]:
        """List the devices this process may use, after the operator's own restriction.

        A card that does not answer is left out with a warning. May block for as long as the driver likes: call it in
        a process that can be killed. Raises `DriverUnavailable` where there is no driver, or one that does not work.
        """

    @abstractmethod
    def visible_env(self, devices: Iterable[Device]) -> dict[str, str]:
        """Return the environment that shows a child process exactly these devices, in this order.

        No devices hides all of them: a job that holds none must not touch one.
        """

    def _restrict(self, candidates: Sequence[Candidate], variable: str) -> list[Candidate]:
        kept, warnings = restrict(candidates, variable, self._environ.get(variable))
        self.warnings += warnings
        return kept

    def _vram_mb(self, vram_mb: int, model: str, uuid: str) -> int:
        """What to register for a GPU that says so; all of the host's memory for one that has none of its own."""
        if vram_mb == 0:
            vram_mb = int(psutil.virtual_memory().total) // 2**20
            self.warnings.append(
                f"{model} ({uuid}) reports no memory of its own, as parts that share the system's memory do: it is "
                f"registered with all {vram_mb} MiB of this host. Declare less with --devices if other work needs it."
            )
        return vram_mb

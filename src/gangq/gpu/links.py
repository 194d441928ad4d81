"""Which GPUs are joined directly: by an NVLink bridge or NVSwitch, by XGMI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gangq.gpu.device import Device
from gangq.gpu.visible import Candidate


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

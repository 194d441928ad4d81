"""How members spread over hosts, and which GPUs each gets: one small class a strategy, and one line that names it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gangq.placement.board import Device

if TYPE_CHECKING:
    from gangq.placement.room import Rooms

ALL = sys.maxsize
"""As :attr:`Strategy.joined`: all GPUs of a member."""

Takes = list[tuple[int, int]]
"""(host, how many members it takes)."""


class Strategy(ABC):
    """How the members of a role spread over hosts, and which GPUs each gets."""

    one_host = False
    """All members share a host: one that is replaced goes where the others are."""
    own_hosts = False
    """No two members share a host: one that is replaced goes where no other is."""
    joined = 0
    """How many GPUs of each member one NVLink or XGMI has to join; 0: none, :data:`ALL`: all of them.

    A member takes its GPUs in parts of so many, each out of one link. A last part that is smaller counts as a whole
    one. With this line alone a strategy is right: the room of workers, what victims would free, and the GPUs that
    :meth:`devices` is offered are counted in such parts (:func:`gangq.placement.room.parts`).
    """

    @abstractmethod
    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """Which hosts take how many members; None: there is no room for all in this way."""

    def evenly(self, takes: Takes, _rooms: Rooms, /) -> Takes:
        """The same for a role that asks to be balanced; not every strategy does anything for it."""
        return takes

    def devices(self, equal: Sequence[Sequence[Device]], members: int, gpus: int) -> list[Device]:
        """The GPUs of members on one worker, so many each, in the order of their ranks.

        Here: the smallest that will do, because large ones stay free for what needs them; among equal ones those that
        NVLink or XGMI joins, and single ones out of groups that are broken already.

        Args:
            equal: enough free devices that will do, in classes of equal ones, those first that others can use least
                (:meth:`gangq.placement.free.Free.equal`). Their order is advice and no rule: any of them may be
                taken, but then a large one may go where a small one would do.
            members: how many members choose in this call: all on this worker if each needs one GPU, else 1. Members
                of one GPU each choose together, because they talk to each other as the GPUs of one member do.
            gpus: how many each takes in this call: all it needs, or one part of them (:attr:`joined`).

        Returns:
            ``members * gpus`` of these devices, none twice: otherwise the ask waits with the gate ``error``.
        """
        taken: list[Device] = []
        for devices in equal:
            taken += _joined(devices, min(len(devices), members * gpus - len(taken)))
        return taken


def by_link(devices: Iterable[Device]) -> list[list[Device]]:
    """Devices of one worker by the link that joins them; one that is joined to none is alone."""
    groups: dict[str, list[Device]] = defaultdict(list)
    for device in devices:
        groups[device.link or f"alone {device.id}"].append(device)
    return list(groups.values())


def _joined(equal: Sequence[Device], count: int) -> Sequence[Device]:
    """The tightest group that holds all, else whole groups, the largest first and the tightest last."""
    if count == len(equal) or not any(device.link for device in equal):
        return equal[:count]
    groups = by_link(equal)
    taken: list[Device] = []
    while lacking := count - len(taken):
        enough = [group for group in groups if len(group) >= lacking]
        best = min(enough, key=len) if enough else max(groups, key=len)
        groups.remove(best)
        taken += best[:lacking]
    return taken


class Pack(Strategy):
    """The fewest hosts: the roomiest first, as the last one the tightest that will do: large hosts stay whole."""

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """One host after another."""
        takes: Takes = []
        for room, host in rooms.descending():
            if room >= size:
                used = {taken for taken, _ in takes}
                host = next(host for _, host in rooms.ascending(size) if host not in used)
                return [*takes, (host, size)]
            takes.append((host, room))
            size -= room
        return None

    def evenly(self, takes: Takes, rooms: Rooms, /) -> Takes:
        """On as few hosts as without that or a few more, if the members then divide evenly among them."""
        size, roomiest = sum(take for _, take in takes), list(rooms.descending())
        for hosts in range(len(takes), len(roomiest) + 1 if len(takes) > 1 else 0):
            each, more = divmod(size, hosts)
            if each and roomiest[hosts - 1][0] >= each and (not more or roomiest[more - 1][0] > each):
                return [(host, each + (n < more)) for n, (_, host) in enumerate(roomiest[:hosts])]
        return takes


class StrictPack(Strategy):
    """One host, the tightest that holds all."""

    one_host = True

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """That one."""
        found = rooms.tightest(size)
        return found and [(found[1], size)]


class Spread(Strategy):
    """One member on each of as many hosts as there are, the roomiest first, then a second on each, and so on."""

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """One round after another."""
        roomiest = []
        for room, host in rooms.descending():
            roomiest.append((room, host))
            if len(roomiest) == size:
                break
        takes = Counter[int]()
        while size and roomiest:
            for _, host in roomiest[:size]:
                takes[host] += 1
            size -= min(size, len(roomiest))
            roomiest = [(room, host) for room, host in roomiest if room > takes[host]]
        return None if size else list(takes.items())


class StrictSpread(Strategy):
    """Each member on another host, the tightest ones, so that large hosts stay whole."""

    own_hosts = True

    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """As many hosts as there are members."""
        takes: Takes = []
        for _, host in rooms.ascending():
            takes.append((host, 1))
            if len(takes) == size:
                return takes
        return None


class Linked(Pack):
    """Packed, and all GPUs of each member are joined by one link: it waits where others only prefer that."""

    joined = ALL


STRATEGIES: dict[str, Strategy] = {
    "pack": Pack(),
    "spread": Spread(),
    "strict_pack": StrictPack(),
    "strict_spread": StrictSpread(),
    "linked": Linked(),
}
"""By the name that a role asks for: the client and the command line offer these."""

"""How members spread over hosts, and which devices each gets: one small class each, and one line that names it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol

from gangq.placement.board import Device
from gangq.placement.free import Rooms

Takes = list[tuple[int, int]]
"""(host, how many members it takes)."""


class Choice(Protocol):
    """Which of the free devices of a worker a member gets; members of one GPU each choose together."""

    def devices(self, good: Sequence[Sequence[Device]], count: int) -> Sequence[Device] | None:
        """So many of those that will do; None: these will not do. They are given in classes of equal ones
        (:meth:`gangq.placement.free.Free.equal`): all of a class is to be taken before any of the next.
        """


class Linked:
    """The smallest that will do: large ones stay free for what needs them. Of equal ones as few groups as possible
    that NVLink or XGMI joins; single ones come from groups that are broken already.

    Links decide between equal devices of one worker, and nothing more. Workers are chosen before, by their room, and
    what is left over has the same room as without links: nothing waits for a link.
    """

    def devices(self, good: Sequence[Sequence[Device]], count: int) -> Sequence[Device] | None:
        """One class after another; of the last one what is joined best."""
        taken: list[Device] = []
        for equal in good:
            taken += _joined(equal, min(len(equal), count - len(taken)))
        return taken if len(taken) == count else None


def _joined(equal: Sequence[Device], count: int) -> Sequence[Device]:
    """The tightest group that holds all, else whole groups, the largest first and the tightest last."""
    if count == len(equal) or not any(device.link for device in equal):
        return equal[:count]
    groups: dict[str, list[Device]] = defaultdict(list)
    for device in equal:
        groups[device.link or f"alone {device.id}"].append(device)
    taken: list[Device] = []
    while lacking := count - len(taken):
        enough = [name for name, group in groups.items() if len(group) >= lacking]
        name = (
            min(enough, key=lambda n: len(groups[n])) if enough else max(groups, key=lambda n: len(groups[n]))
        )
        taken += groups.pop(name)[:lacking]
    return taken


class Strategy(ABC):
    """How the members of a role spread over hosts."""

    choice: Choice = Linked()
    one_host = False
    """All members share a host: one that is replaced goes where the others are."""
    own_hosts = False
    """No two members share a host: one that is replaced goes where no other is."""

    @abstractmethod
    def hosts(self, size: int, rooms: Rooms) -> Takes | None:
        """Who takes how many members; None: there is no room for all in this way."""

    def evenly(self, takes: Takes, _rooms: Rooms, /) -> Takes:
        """The same for a role that asks to be balanced; not every strategy does anything for it."""
        return takes


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


STRATEGIES: dict[str, Strategy] = {
    "pack": Pack(),
    "spread": Spread(),
    "strict_pack": StrictPack(),
    "strict_spread": StrictSpread(),
}
"""By the name that a role asks for: the client and the command line offer these. A new one is a class above and a
line here; the database learns its name from the domain ``gangq.strategy``, and a test holds that both know the same.
If not just any free devices will do for it, :func:`gangq.placement.free.room_by` has to know too.
"""

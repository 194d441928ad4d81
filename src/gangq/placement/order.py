"""Whose turn it is: within a queue by its order, between queues by priority and share."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from gangq.placement.board import Ask, Board, Queue
from gangq.placement.limits import Usage

REPLACES_MEMBERS = 1001
"""Above every priority: a gang that runs without some of its members holds what it has in vain."""


def overtakes(ask: Ask, older: Ask, warm_s: float) -> bool:
    """Whether these single jobs may go before older ones of their lane where their model is loaded."""
    if ask.since is None or older.since is None:
        return False
    return ask.priority == older.priority and ask.since <= older.since + warm_s


class Order:
    """How one queue orders what waits in it. This one: priority, then age."""

    by_age = False
    """Nobody passes those before: an ask counts for no more than they do between queues."""
    by_submitter = False
    """Each submitter has a lane, and the one that uses least goes first."""

    def key(self, ask: Ask, _size: int, /) -> tuple[int, ...]:
        """Sorts the asks of a lane, of each of which it is also told how many members it has at most."""
        return -ask.priority, ask.order


class Fifo(Order):
    """Age alone."""

    by_age = True

    def key(self, ask: Ask, _size: int, /) -> tuple[int, ...]:
        """The oldest first."""
        return (ask.order,)


class Fair(Order):
    """Submitters take turns, the one that uses least first."""

    by_submitter = True


class LargestFirst(Order):
    """Priority, then size: what needs many is not left to the end."""

    def key(self, ask: Ask, size: int, /) -> tuple[int, ...]:
        """Of equal priority the one with most members first."""
        return -ask.priority, -size, ask.order


ORDERS: dict[str, Order] = {
    "priority": Order(),
    "fifo": Fifo(),
    "fair": Fair(),
    "largest_first": LargestFirst(),
}
"""By the name that a queue is given. A new one is a class above and a line here."""


class Lane:
    """What waits in one queue, or of one submitter in a fair one, in its order."""

    def __init__(self, queue: Queue, submitter: str, path: list[Queue]) -> None:
        self.queue = queue
        self.submitter = submitter
        self.path = path[::-1]
        """From the root of the tree to this queue."""
        self.asks: deque[tuple[int, Ask]] = deque()
        """(what its priority counts as between queues, the ask)"""
        self.models = False
        """Whether a single job among them needs a model."""


class Turns:
    """Gives out the asks of a board, one after another. What was placed meanwhile counts for whose turn is next."""

    def __init__(self, board: Board, usage: Usage, warm: Callable[[Ask], bool]) -> None:
        """``warm(ask)``: whether a worker that has its model loaded has room for it now."""
        self._usage = usage
        self._warm, self._warm_s = warm, board.warm_s
        kinds = {kind.id: kind for kind in board.kinds}
        lanes: dict[tuple[str, str], list[Ask]] = defaultdict(list)
        for ask in board.asks:
            queue = usage.path(kinds[ask.kind].queue)[0]
            lanes[queue.name, ask.submitter if ORDERS[queue.order].by_submitter else ""].append(ask)
        self._lanes = []
        for (name, submitter), asks in sorted(lanes.items()):
            path = usage.path(name)
            order = ORDERS[path[0].order]
            size = {ask.id: sum(role.most for role in kinds[ask.kind].roles) for ask in asks}
            asks.sort(key=lambda ask: (ask.missing is None, *order.key(ask, size[ask.id]), ask.id))
            lane = Lane(path[0], submitter, path)
            lowest = REPLACES_MEMBERS
            for ask in asks:
                counts_as = REPLACES_MEMBERS if ask.missing is not None else ask.priority
                lowest = min(lowest, counts_as)
                lane.asks.append((lowest if order.by_age else counts_as, ask))
            lane.models = any(ask.single and kinds[ask.kind].model for ask in asks)
            self._lanes.append(lane)
        self._last: tuple[Lane, int, int] | None = None

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Ask:
        lanes = [lane for lane in self._lanes if lane.asks]
        if not lanes:
            raise StopIteration
        highest = max(lane.asks[0][0] for lane in lanes)
        lane = self._prefer([lane for lane in lanes if lane.asks[0][0] == highest], 0)
        place = self._warmer(lane)
        counts_as, ask = lane.asks[place]
        del lane.asks[place]
        self._last = (lane, place, counts_as)
        return ask

    def _warmer(self, lane: Lane) -> int:
        """The place in a lane of what goes first: the first, unless one about as old finds its model loaded."""
        first = lane.asks[0][1]
        if not lane.models or not self._warm_s or ORDERS[lane.queue.order].by_age:
            return 0
        for place, (_, ask) in enumerate(lane.asks):
            if place and not overtakes(ask, first, self._warm_s):
                break
            if self._warm(ask):
                return place
        return 0

    def again(self, ask: Ask) -> None:
        """What is left of the ask that was given out last has another turn, in the same place of its lane."""
        assert self._last is not None
        lane, place, counts_as = self._last
        lane.asks.insert(place, (counts_as, ask))

    def _prefer(self, lanes: list[Lane], depth: int) -> Lane:
        """Down the tree: at the root and in a fair queue the child with the least share, elsewhere the oldest."""
        if len(lanes) == 1:
            return lanes[0]
        children: dict[tuple[str, str], list[Lane]] = defaultdict(list)
        for lane in lanes:
            inner = depth < len(lane.path)
            children[(lane.path[depth].name, "") if inner else ("", lane.submitter)].append(lane)
        fair = depth == 0 or lanes[0].path[depth - 1].order == "fair"

        def key(child: tuple[str, str]) -> tuple[float, int, tuple[str, str]]:
            mine = children[child]
            share = 0.0
            if fair and child[0]:
                share = self._usage.share(mine[0].path[depth])
            elif fair:
                share = self._usage.submitter_share(mine[0].queue.name, mine[0].submitter)
            return share, min(lane.asks[0][1].order for lane in mine), child

        chosen = children[min(children, key=key)]
        return chosen[0] if len(chosen) == 1 else self._prefer(chosen, depth + 1)

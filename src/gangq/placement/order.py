"""Whose turn it is: within a queue by its policy, between queues by priority and share."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from gangq.placement.board import Ask, Board, Queue
from gangq.placement.limits import Usage

REPLACES_MEMBERS = 1001
"""Above every priority: until its missing members are replaced, a running gang may hold its GPUs for nothing."""


def overtakes(ask: Ask, older: Ask, warm_s: float) -> bool:
    """Whether these single jobs may go before older ones of their lane where their model is loaded."""
    if ask.since is None or older.since is None:
        return False
    return ask.priority == older.priority and ask.since <= older.since + warm_s


class Policy:
    """How one queue orders what waits in it. This one: priority, then age."""

    by_age = False
    """Nothing goes before what is older. So an ask that waits behind one of a lower priority has no more than that
    priority, where asks of several queues are compared.
    """
    by_submitter = False
    """Each submitter has a lane, and the one that uses least goes first."""

    def key(self, ask: Ask, _size: int, /) -> tuple[int, ...]:
        """Sorts the asks of a lane; the size of an ask is the number of its members, at most."""
        return -ask.priority, ask.age


class Fifo(Policy):
    """Age alone."""

    by_age = True

    def key(self, ask: Ask, _size: int, /) -> tuple[int, ...]:
        """The oldest first."""
        return (ask.age,)


class Fair(Policy):
    """Submitters take turns, the one that uses least first."""

    by_submitter = True


class LargestFirst(Policy):
    """Priority, then size: what needs many is not left to the end."""

    def key(self, ask: Ask, size: int, /) -> tuple[int, ...]:
        """Of equal priority the one with most members first."""
        return -ask.priority, -size, ask.age


POLICIES: dict[str, Policy] = {
    "priority": Policy(),
    "fifo": Fifo(),
    "fair": Fair(),
    "largest_first": LargestFirst(),
}
"""By the name that a queue is given: the command line offers these."""


def policy_of(queue: Queue) -> Policy:
    """The policy of a queue. What waits where the policy is unknown is refused, whatever its turn."""
    return POLICIES.get(queue.policy, POLICIES["priority"])


class Turn(NamedTuple):
    """What waits for its turn."""

    priority: int
    """What its priority counts as, where asks of several queues are compared."""
    ask: Ask


class Lane:
    """What waits in one queue, or of one submitter in a fair one, in its order."""

    def __init__(self, queue: Queue, submitter: str, path: list[Queue]) -> None:
        self.queue = queue
        self.submitter = submitter
        self.path = path[::-1]
        """From the root of the tree to this queue."""
        self.turns: deque[Turn] = deque()
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
            lanes[queue.name, ask.submitter if policy_of(queue).by_submitter else ""].append(ask)
        self._lanes = []
        for (name, submitter), asks in sorted(lanes.items()):
            path = usage.path(name)
            policy = policy_of(path[0])
            size = {ask.id: sum(role.most for role in kinds[ask.kind].roles) for ask in asks}
            asks.sort(key=lambda ask: (ask.missing is None, *policy.key(ask, size[ask.id]), ask.id))
            lane = Lane(path[0], submitter, path)
            lowest = REPLACES_MEMBERS
            for ask in asks:
                priority = REPLACES_MEMBERS if ask.missing is not None else ask.priority
                lowest = min(lowest, priority)
                lane.turns.append(Turn(lowest if policy.by_age else priority, ask))
            lane.models = any(ask.single and kinds[ask.kind].model for ask in asks)
            self._lanes.append(lane)
        self._last: tuple[Lane, int, int] | None = None
        """The lane from which an ask was given out last, its place there, and what its priority counts as."""

    def __iter__(self) -> Turns:
        return self

    def __next__(self) -> Ask:
        lanes = [lane for lane in self._lanes if lane.turns]
        if not lanes:
            raise StopIteration
        highest = max(lane.turns[0].priority for lane in lanes)
        lane = self._prefer([lane for lane in lanes if lane.turns[0].priority == highest], 0)
        place = self._warmer(lane)
        turn = lane.turns[place]
        del lane.turns[place]
        self._last = (lane, place, turn.priority)
        return turn.ask

    def _warmer(self, lane: Lane) -> int:
        """The place in a lane of what goes first: the first, unless one about as old finds its model loaded."""
        first = lane.turns[0].ask
        if not lane.models or not self._warm_s or policy_of(lane.queue).by_age:
            return 0
        for place, turn in enumerate(lane.turns):
            if place and not overtakes(turn.ask, first, self._warm_s):
                break
            if self._warm(turn.ask):
                return place
        return 0

    def again(self, ask: Ask) -> None:
        """What is left of the ask that was given out last has another turn, in the same place of its lane."""
        assert self._last is not None
        lane, place, priority = self._last
        lane.turns.insert(place, Turn(priority, ask))

    def _prefer(self, lanes: list[Lane], depth: int) -> Lane:
        """Down the tree: at the root and in a fair queue the child with the least share, elsewhere the oldest."""
        if len(lanes) == 1:
            return lanes[0]
        children: dict[tuple[str, str], list[Lane]] = defaultdict(list)
        for lane in lanes:
            inner = depth < len(lane.path)
            children[(lane.path[depth].name, "") if inner else ("", lane.submitter)].append(lane)
        fair = depth == 0 or policy_of(lanes[0].path[depth - 1]).by_submitter

        def key(child: tuple[str, str]) -> tuple[float, int, tuple[str, str]]:
            mine = children[child]
            share = 0.0
            if fair and child[0]:
                share = self._usage.share(mine[0].path[depth])
            elif fair:
                share = self._usage.submitter_share(mine[0].queue.name, mine[0].submitter)
            return share, min(lane.turns[0].ask.age for lane in mine), child

        chosen = children[min(children, key=key)]
        return chosen[0] if len(chosen) == 1 else self._prefer(chosen, depth + 1)

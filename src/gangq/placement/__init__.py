"""Who starts where next: ``decide(board) -> decisions``, a pure function.

The database says what there is (:class:`~gangq.placement.board.Board`) and carries out what is decided. It
verifies every guarantee itself (no device twice, no limit passed, a gang whole): a wrong decision can waste capacity,
or miss what a strategy promises, and break nothing. Nothing here reads a clock, a file or the network, and the same
board gives the same decisions.

One pass, from top to bottom of :func:`gangq.placement.decide.decide`:

1. ``board``: what there is: workers, units that run, asks that wait, queues.
2. ``free``: what is free of it now, and beside each planned start. A planned start of an earlier ask counts for all
   that would still run when it comes.
3. ``order``: whose turn it is. Each ask is judged once; single jobs of one kind have a turn each.
4. ``decide.CHECKS``: cheap ones that need no look at workers: paused, limits (``limits``), others of its kind.
5. ``fit``: seats for it now: topology, roles, hosts by ``strategies``, devices. If there are, it starts.
6. ``displace``: otherwise, who is told to stop for it: the fewest, and never in vain.
7. ``plans``: otherwise, the first moment at which it fits, if not too many have a planned start already.
8. Otherwise it waits. Each of these says why not, as ``Refused`` with its numbers; ``gates`` puts that into words.
9. ``places``: what of single jobs may follow one another without another pass.

Where something new goes:

==========================  ======================================================================================
a strategy                  a class and a line in ``strategies.STRATEGIES``; its name in the domain ``gangq.strategy``
a policy of queues          a class and a line in ``order.POLICIES``; its name in the domain ``gangq.policy``
a gate                      a line in ``gates``, with its words; where it refuses: ``decide.CHECKS`` or ``fit``
something that is needed    ``room.room_by``, the one rule of what a worker has room for
a question of ``plan``      a function in ``whatif``, which edits a board: the same decision on another one
==========================  ======================================================================================

That is what goes into this package. All that a strategy, a policy or a gate needs besides is in
docs/manual/recipes.md.

A strategy says over which hosts members spread. Which GPUs each gets it may say too (``devices``); how many of a
member's one link must join it only declares (``joined``), and room, victims and devices are counted so.
``tests/placement/test_strategies.py`` adds some, and a policy. Boards are drawn as pictures there.
"""

from __future__ import annotations

from gangq.placement.board import Board
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision, Refused, Seat

__all__ = ["Board", "Decision", "Refused", "Seat", "decide"]

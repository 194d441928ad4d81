"""Who starts where next: ``decide(board) -> decisions``, a pure function.

The database says what there is (:class:`~gangq.placement.board.Board`) and carries out what is decided. It
verifies every guarantee itself: a wrong decision can waste capacity and break nothing. Nothing here reads a clock, a
file or the network, and the same board gives the same decisions.

Read in this order: ``board`` (what there is), ``free`` (what is free now, and beside planned starts), ``fit`` (where
members sit), ``strategies`` (how they spread over hosts, and on which devices), ``limits`` (what a queue may use),
``order`` (whose turn it is), ``plans`` (planned starts), ``displace`` (who is told to stop), ``decide`` (the loop),
``explain`` (a refusal in words).

``whatif`` edits a board: ``gangq plan`` is the same decision on another one. ``gangq explain`` shows what the last
pass has written down of its decisions.
"""

from __future__ import annotations

from gangq.placement.board import Board
from gangq.placement.decide import decide
from gangq.placement.decisions import Decision, Refused, Seat

__all__ = ["Board", "Decision", "Refused", "Seat", "decide"]

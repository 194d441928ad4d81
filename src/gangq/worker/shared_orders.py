"""The orders of a worker to a process of async jobs, and how each reaches it once: both ends of one protocol.

=============  ============  ==================================================================
order          is about      the process
=============  ============  ==================================================================
`Begin`        a job         runs it, with a context, a connection and a log of its own
`Stop`         a job         tells it to stop, and cancels it when the grace is over
`WhoHolds`     the process   answers which of its jobs holds the event loop
=============  ============  ==================================================================

1. The worker numbers its orders, and keeps each until the process says that it has it.
2. The process asks (``next``) for what comes after the last order that it has, and waits for the answer. If its
   connection breaks, it connects and asks again: what was in an answer that it did not get comes once more.
3. It answers a `WhoHolds` with ``holder``, by the number of that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gangq.errors import WorkerGone

if TYPE_CHECKING:
    from gangq.worker.child_context import Link
    from gangq.worker.control import Control

_NEXT_S = 30.0
"""After so long without an order, the answer to ``next`` is that there is none."""
_AGAIN_S = 0.1


@dataclass(frozen=True)
class Begin:
    """Run the job with this key."""

    key: str
    log: str
    """Where its output goes."""
    log_sizes: tuple[int, int]
    """How many bytes to keep of the beginning and of the end of that."""
    traceparent: str | None


@dataclass(frozen=True)
class Stop:
    """End the job with this key within the grace."""

    key: str
    grace_s: float


@dataclass(frozen=True)
class WhoHolds:
    """Which job holds the event loop?"""


Order = Begin | Stop | WhoHolds
_ORDERS: dict[str, type[Begin] | type[Stop] | type[WhoHolds]] = {
    "begin": Begin,
    "stop": Stop,
    "holder": WhoHolds,
}
_OPS = {order: op for op, order in _ORDERS.items()}


class Orders:
    """The worker's end: what a process was told and may not have yet. Thread-safe."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._given = 0
        self._kept: deque[tuple[int, Order]] = deque()
        self._asked: dict[int, Future[str | None]] = {}
        self._some = asyncio.Event()

    def give(self, order: Order) -> None:
        """Have the process carry it out."""
        with self._lock:
            self._give(order)
        self._control.soon(self._some.set)

    def who_holds(self) -> Future[str | None]:
        """The key of the job that holds its event loop, once it answers; None: the loop runs, or no job holds it."""
        answer: Future[str | None] = Future()
        with self._lock:
            self._asked[self._give(WhoHolds())] = answer
        self._control.soon(self._some.set)
        return answer

    async def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to a request of the process; None: it is none of this protocol. For the control loop.

        Raises:
            KeyError, TypeError, ValueError: it is incomplete or malformed.
        """
        if request["op"] == "next":
            return {"orders": await self._after(int(request["after"]))}
        if request["op"] == "holder":
            with self._lock:
                asked = self._asked.pop(int(request["number"]), None)
            if asked is not None:
                asked.set_result(request["by"])
            return {}
        return None

    def _give(self, order: Order) -> int:
        self._given += 1
        self._kept.append((self._given, order))
        return self._given

    async def _after(self, number: int) -> list[dict[str, Any]]:
        with self._lock:
            while self._kept and self._kept[0][0] <= number:
                self._kept.popleft()
            wait = not self._kept
        if wait:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._some.wait(), _NEXT_S)
        self._some.clear()
        with self._lock:
            return [{"number": n, "op": _OPS[type(order)], **asdict(order)} for n, order in self._kept]


def taken(link: Link) -> Iterator[tuple[int, Order]]:
    """The process's end: each order once, with its number, until the worker refuses.

    Raises:
        GangqError: the worker knows this process no more.
    """
    last = 0
    while True:
        try:
            orders = link.ask("next", after=last)["orders"]
        except WorkerGone:
            # The connection broke. If the worker has ended, the guardian ends this process.
            time.sleep(_AGAIN_S)
            continue
        for fields in orders:
            last = fields.pop("number")
            yield last, _ORDERS[fields.pop("op")](**fields)


def say_holder(link: Link, number: int, key: str | None) -> None:
    """Answer the `WhoHolds` with this number. An answer that is lost is that no job holds the loop."""
    with contextlib.suppress(WorkerGone):
        link.ask("holder", number=number, by=key)

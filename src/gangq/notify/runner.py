"""What delivers the notifications of one target: fetch, deliver, acknowledge, until none is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangq.notify.delivery import Deliver, Failed

if TYPE_CHECKING:
    from gangq.client import Client

_LEASE_MARGIN_S = 30.0
"""How long a delivery that has ended may take to be acknowledged before the notification is given out again."""


@dataclass(frozen=True)
class Outcome:
    """What became of one delivery. `outcome`: delivered, waiting (for the next one), dead, or stale."""

    id: int
    kind: str
    delivery: int
    outcome: str
    error: str | None


class Runner:
    """Delivers what one target is to be told. Several may run for one target: each gets notifications of its own."""

    def __init__(
        self,
        client: Client,
        target: str,
        deliver: Deliver,
        *,
        timeout_s: float,
        tell: Callable[[Outcome], object],
    ) -> None:
        self._client = client
        self._target = target
        self._deliver = deliver
        self._lease_s = timeout_s + _LEASE_MARGIN_S
        self._tell = tell
        self._owed: tuple[int, str, int, Failed | None] | None = None
        self.failed = 0
        """How many deliveries have failed."""

    def run(self, stopped: Callable[[], bool]) -> float | None:
        """Deliver all that is due, or until `stopped`; in how many seconds the next is due, None where none waits.

        Raises `GangqError`. What was delivered then and not acknowledged is acknowledged by the next call: until its
        lease ends nobody else delivers it.
        """
        while True:
            self._acknowledge()
            if stopped():
                return None
            found = self._client.fetch_notification(target=self._target, lease_s=self._lease_s)
            if found.id is None or found.kind is None or found.delivery is None or found.body is None:
                return found.next_in_s
            failed = self._deliver(found.id, found.body.encode())
            self._owed = found.id, found.kind, found.delivery, failed

    def _acknowledge(self) -> None:
        if self._owed is None:
            return
        id, kind, delivery, failed = self._owed
        outcome = self._client.acknowledge_notification(
            target=self._target, id=id, delivery=delivery, error=None if failed is None else failed.reason
        )
        self._owed = None
        self.failed += failed is not None
        self._tell(Outcome(id, kind, delivery, outcome, None if failed is None else str(failed)))

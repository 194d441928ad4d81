"""The rendezvous port of a gang: held by rank 0's worker from before the reservation until its code starts.

A port that is merely *chosen* may be taken by another program before the training binds it. So a worker keeps
sockets bound (not listening) and offers their numbers with every claim; the database picks one that no other
live epoch of this host uses. A bound socket that never listened leaves nothing behind when it closes.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence

_RANGE = range(20000, 32000)
"""Below Linux's ephemeral ports: there, between our close and the handler's bind, any outgoing connection of
the host could be given the very number.
"""
_TRIES = 64


class PortHolder:
    """Keeps a number of ports bound. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._bound: dict[int, socket.socket] = {}
        self._given: set[int] = set()
        self._offered: Sequence[int] | None = None
        """What to offer, as long as it stays so: every claim asks."""

    def offer(self) -> Sequence[int]:
        """The ports held and not yet given to a member; binds new ones up to the count."""
        with self._lock:
            if self._offered is not None:
                return self._offered
            while len(self._bound) - len(self._given & self._bound.keys()) < self._count:
                bound = _bind()
                self._bound[bound.getsockname()[1]] = bound
            self._offered = sorted(self._bound.keys() - self._given)
            return self._offered

    def give(self, port: int) -> None:
        """This port belongs to a claimed member now: it stays bound and is not offered again."""
        with self._lock:
            self._given.add(port)
            self._offered = None

    def take(self) -> int:
        """Bind one that is not offered with claims: for a member that becomes rank 0 while it runs."""
        bound = _bind()
        port: int = bound.getsockname()[1]
        with self._lock:
            self._bound[port] = bound
            self._given.add(port)
            self._offered = None
        return port

    def release(self, port: int) -> None:
        """Close it: its member starts, or will not. A repeat is harmless, even if the number is offered again."""
        with self._lock:
            if port not in self._given:
                return
            self._given.remove(port)
            bound = self._bound.pop(port, None)
            self._offered = None
        if bound is not None:
            bound.close()

    def renew(self) -> None:
        """Offer others from now on: the database knows these as another worker's of the same host name."""
        with self._lock:
            refused = [self._bound.pop(port) for port in self._bound.keys() - self._given]
            self._offered = None
            self._bound |= {bound.getsockname()[1]: bound for bound in (_bind() for _ in refused)}
        for bound in refused:
            bound.close()

    def close(self) -> None:
        """Let go of all of them."""
        with self._lock:
            held, self._bound = self._bound, {}
            self._offered = None
        for bound in held.values():
            bound.close()


def _bind() -> socket.socket:
    for _ in range(_TRIES):
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind(("", random.choice(_RANGE)))
        except OSError:
            candidate.close()
        else:
            return candidate
    anywhere = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    anywhere.bind(("", 0))
    return anywhere

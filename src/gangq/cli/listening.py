"""Notifications of one channel as hints, for commands that loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gangq.cli.interrupts import Interrupts

if TYPE_CHECKING:
    import psycopg

    from gangq.client import Client


class Listener:
    """Listens on a channel. After an error `close` it: then the next `listen` makes a connection again."""

    def __init__(self, client: Client, channel: str) -> None:
        self._client = client
        self._channel = channel
        self._connection: psycopg.Connection[object] | None = None

    def listen(self) -> None:
        """Make the connection unless there is one. Raises `DatabaseUnreachable`, `Busy`."""
        if self._connection is None:
            self._connection = self._client.connect_listener()
            with self._translated():
                self._connection.execute(f"listen {self._channel}".encode())

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def wait(self, interrupts: Interrupts, seconds: float) -> bool:
        """Wait for a notification, a signal, or the end of the time; whether there was a notification. Raises
        `DatabaseUnreachable`.
        """
        assert self._connection is not None
        with self._translated():
            # What came meanwhile lies in the connection's buffer, where select does not see it.
            if any(True for _ in self._connection.notifies(timeout=0)):
                return True
            if not interrupts.wait(seconds, [self._connection.fileno()]):
                return False
            return any(True for _ in self._connection.notifies(timeout=0))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        # Not at the top: completion asks the commands for options, without a database.
        import psycopg

        try:
            yield
        except psycopg.Error as e:
            raise self._client.target.failed(e, "") from e

"""A call whose answer is read later: what lets a worker run jobs while the server finishes and claims others.

psycopg sends and waits in one; apart, the two are spoken to libpq directly. For the worker's own calls only, whose
parameters are text, numbers and lists of these: what a caller passes to a client goes the way psycopg knows.
"""

from __future__ import annotations

import functools
import random
import re
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

    from gangq.client import Client
    from gangq.client.calls import Query

R = TypeVar("R")

_PREPARE_AFTER = 5
# There is no such statement any more (a pooler changed the session), or its columns are not what they were.
_NO_LONGER_GOOD = ("26000", "0A000")
_FAILED = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.BAD_RESPONSE, pq.ExecStatus.PIPELINE_ABORTED)


class Statements:
    """What one connection knows of the statements sent over it, and how its answers are read."""

    def __init__(self, connection: psycopg.Connection[Any], prepare: bool) -> None:
        self._connection = connection
        self._prepare = prepare
        self._used: dict[str, int] = {}
        self._names: dict[str, bytes] = {}
        # A pooler may hand a connection on with what another client has prepared on it.
        self._made = random.getrandbits(48)
        # As psycopg reads it: of SQL_ASCII the server knows no more than that it is bytes.
        self._encoding = "utf-8" if connection.info.encoding == "ascii" else connection.info.encoding
        self._reader = Transformer(connection)
        self._reading = threading.Lock()

    def send(self, query: Query[Any]) -> None:
        """Have it on its way; does not wait for the answer.

        Raises:
            psycopg.Error: it was not sent, or nobody knows.
        """
        pgconn = self._connection.pgconn
        text = query.text
        encoding = self._encoding
        values = [_text(value).encode(encoding) for value in query.params.values()]
        name = self._names.get(text)
        if name is None and self._prepare:
            used = self._used[text] = self._used.get(text, 0) + 1
            if used > _PREPARE_AFTER:
                name = self._prepared(text, tuple(query.params))
        if name is not None:
            pgconn.send_query_prepared(name, values)
        else:
            pgconn.send_query_params(_numbered(text, tuple(query.params)), values)
        while pgconn.flush():
            _wait(pgconn, select.POLLIN | select.POLLOUT)
            pgconn.consume_input()

    def receive(self) -> PGresult:
        """Wait for the answer, and leave the connection ready for the next call.

        Raises:
            psycopg.OperationalError: the connection is broken.
        """
        pgconn = self._connection.pgconn
        found = None
        while True:
            while pgconn.is_busy():
                _wait(pgconn, select.POLLIN)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                break
            found = result
        if found is None:
            raise psycopg.OperationalError("the connection was lost")
        return found

    def answers(self, timeout_ms: int) -> bool:
        """Whether there is something to receive by then."""
        try:
            return _wait(self._connection.pgconn, select.POLLIN, timeout_ms)
        except psycopg.Error:
            return True  # There is nothing to wait for any more.

    def rows(self, query: Query[R], result: PGresult) -> R:
        """What the answer says.

        Raises:
            psycopg.Error: it is a refusal.
        """
        if result.status in _FAILED:
            problem = error_from_result(result, encoding=self._encoding)
            if problem.sqlstate in _NO_LONGER_GOOD:
                self._names.pop(query.text, None)
                self._used.pop(query.text, None)
            raise problem
        with self._reading:
            # Given back, the connection may have been closed: then it says nothing about time zones any more.
            reader = Transformer(self._connection.adapters) if self._connection.closed else self._reader
            reader.set_pgresult(result)
            # No row factory of a query that is sent looks at the cursor.
            return query.read(reader.load_rows(0, result.ntuples, query.factory(None)))

    def _prepared(self, text: str, keys: tuple[str, ...]) -> bytes:
        name = b"gangq_%d" % self._made
        self._made += 1
        prepared = self._connection.pgconn.prepare(name, _numbered(text, keys))
        if prepared.status != pq.ExecStatus.COMMAND_OK:
            raise error_from_result(prepared, encoding=self._encoding)
        self._names[text] = name
        return name


def _text(value: object) -> str:
    if value is True or value is False:
        return "t" if value else "f"
    text = f"{{{','.join(map(_element, value))}}}" if isinstance(value, list) else str(value)
    if "\0" in text:
        raise psycopg.DataError("text of PostgreSQL cannot hold a NUL character")
    return text


def _wait(pgconn: PGconn, events: int, timeout_ms: int | None = None) -> bool:
    poll = select.poll()
    poll.register(pgconn.socket, events)
    return bool(poll.poll(timeout_ms))


@functools.lru_cache(maxsize=64)
def _numbered(text: str, keys: tuple[str, ...]) -> bytes:
    places = {key: f"${number}" for number, key in enumerate(keys, 1)}
    return re.sub(r"%\((\w+)\)s", lambda found: places[found[1]], text).encode()


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    quoted = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


class Sent(Generic[R]):
    """A call under way. Its connection is lent until the answer is in, which anybody may see to."""

    def __init__(
        self,
        query: Query[R],
        statements: Statements,
        give_back: Callable[[], None],
        failure: Callable[[psycopg.Error], Exception],
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``give_back()`` returns the connection; ``failure`` makes the error to raise of one of psycopg's;
        ``reading()`` is around whatever is done on the connection.
        """
        self._query = query
        self._statements = statements
        self._give_back = give_back
        self._failure = failure
        self._reading = reading
        self._lock = threading.Lock()
        self._result: PGresult | None = None
        self._problem: psycopg.Error | None = None
        self._received = False

    @property
    def arrived(self) -> bool:
        """Whether the answer is there, or begins to be: reading it does not take long."""
        if self._received:
            return True
        return self._statements.answers(0)

    def receive(self, timeout_s: float | None = None) -> None:
        """Wait for the answer, and give the connection back; :meth:`answer` says what it was. From any thread.

        ``timeout_s``: wait no longer for it to begin; what has not come by then is outstanding still.
        """
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            return
        try:
            if self._received:
                return
            if timeout_s is not None and not self._statements.answers(round(timeout_s * 1000)):
                return
            with self._reading():
                try:
                    self._result = self._statements.receive()
                except psycopg.Error as problem:
                    self._problem = problem
                self._received = True
                self._give_back()
        finally:
            self._lock.release()

    @property
    def failed(self) -> bool:
        """Whether what was received is no answer, or a refusal."""
        return self._result is None or self._result.status in _FAILED

    def column(self, number: int, last: int | None = None) -> list[bytes | None]:
        """A column of what was received, as it came: of all rows, or of so many at the end."""
        result = self._result
        if result is None:
            return []
        first = 0 if last is None else max(0, result.ntuples - last)
        return [result.get_value(n, number) for n in range(first, result.ntuples)]

    def answer(self) -> R:
        """Wait for the answer and read it.

        Raises:
            GangqError: as the call itself would have.
        """
        self.receive()
        try:
            if self._result is None:
                raise self._problem or psycopg.OperationalError("no answer came")
            return self._statements.rows(self._query, self._result)
        except psycopg.Error as problem:
            raise self._failure(problem) from problem


def send(client: Client, query: Query[R]) -> Sent[R]:
    """Have a call under way whose answer is read later: one whose parameters are text, numbers and lists of these,
    and whose rows are read by position.

    Raises:
        GangqError: it could not be sent, or nobody knows.
    """
    return client._send(query)

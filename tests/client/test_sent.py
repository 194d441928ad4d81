"""Calls whose answers are read later: one connection serves all threads, whoever has an answer outstanding on it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gangq.client import Client, calls
from gangq.client.sent import Statements, send
from gangq.errors import DatabaseUnreachable, GangqError, InvalidInput
from worker.worker_process import eventually


@pytest.fixture
def one(client: Client) -> Iterator[Client]:
    """A client with one connection."""
    with Client(client.target.conninfo, max_size=1) as made:
        yield made


def worker(client: Client, jobs: int = 10) -> int:
    client.submit(task="t", payloads=[{"n": n} for n in range(jobs)])
    return client.register_worker(name="w", host="h", queues=["default"], prefetch=5, lease_s=60).incarnation


def claim(incarnation: int, **more: Any) -> Any:
    return calls.claim(incarnation=incarnation, request_id=uuid.uuid4(), **more)


def backend(client: Client) -> int:
    with client.connection() as connection:
        return connection.info.backend_pid


def test_an_answer_is_read_once_and_the_same_for_all(one: Client) -> None:
    sent = send(one, claim(worker(one), max_jobs=2))
    assert [job.payload for job in sent.answer()] == [{"n": 0}, {"n": 1}]
    assert sent.answer() == sent.answer()
    assert sent.arrived


@pytest.mark.parametrize("thread", ["the same", "another"])
def test_who_wants_the_connection_next_need_not_wait_for_who_reads_the_answer(
    one: Client, thread: str
) -> None:
    me, before = worker(one), backend(one)
    sent = send(one, claim(me))
    seen: list[int] = []
    if thread == "another":
        other = threading.Thread(target=lambda: seen.append(backend(one)))
        other.start()
        other.join(10)
    else:
        seen.append(backend(one))
    assert seen == [before], "and has it on the one connection there is"
    assert len(sent.answer()) == 1


def test_a_call_amid_the_reading_of_an_answer_by_its_own_thread_goes_through(
    one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = send(one, claim(worker(one)))
    receive, within = Statements.receive, []

    def interrupted(self: Statements) -> Any:
        if not within:
            within.append(None)
            within.append(backend(one))  # As the handler of a signal would.
        return receive(self)

    monkeypatch.setattr(Statements, "receive", interrupted)
    assert len(sent.answer()) == 1
    assert within[1] != backend(one)


def test_a_call_amid_the_call_for_which_its_thread_had_to_read_an_answer_goes_through(client: Client) -> None:
    with Client(client.target.conninfo, max_size=1, timeout_s=0.5) as one:
        sent = send(one, claim(worker(one)))
        with one.connection() as connection:  # Which waited for the answer, and read it.
            amid = backend(one)  # As the handler of a signal would.
            assert amid != connection.info.backend_pid
        assert backend(one) == connection.info.backend_pid
        assert len(sent.answer()) == 1


def test_who_has_read_an_answer_goes_on_with_the_connection_it_came_on(one: Client) -> None:
    me, before = worker(one), backend(one)
    assert len(send(one, claim(me)).answer()) == 1
    assert backend(one) == before


def test_two_who_read_their_answers_at_once_get_each_its_own(one: Client) -> None:
    me = worker(one)
    first = send(one, claim(me))
    first.receive()
    second = send(one, claim(me))
    second.receive()
    amid, go_on, got = threading.Event(), threading.Event(), dict[str, Any]()
    statements = first._statements
    assert second._statements is statements

    class Lock:
        """Tells the one that reads to go on as soon as the other waits."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                go_on.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def factory(cursor: Any) -> Any:
        amid.set()
        assert go_on.wait(10)
        return query.factory(cursor)

    def read(name: str, sent: Any) -> None:
        got[name] = [job.payload for job in sent.answer()]
        if name == "second":
            go_on.set()

    query = first._query
    first._query, statements._reading = replace(query, factory=factory), Lock()  # type: ignore[assignment]
    threads = [threading.Thread(target=read, args=one) for one in (("first", first), ("second", second))]
    threads[0].start()
    assert amid.wait(10), "it is at the rows"
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert got == {"first": [{"n": 0}], "second": [{"n": 1}]}


def test_a_client_closed_with_an_answer_outstanding_closes_its_connection_once_it_is_read(
    one: Client, client: Client
) -> None:
    sent = send(one, claim(worker(one)))
    with client.connection() as beside:
        look = (
            "select pid from pg_stat_activity where datname = current_database() and query like '%gangq.claim%' "
            "and pid <> pg_backend_pid()"
        )
        # It was sent; the server may not have begun.
        pid = eventually(lambda: beside.execute(look).fetchone(), "the claim is at the server")[0]
        one.close()
        assert len(sent.answer()) == 1
        for _ in range(1000):
            if not beside.execute("select from pg_stat_activity where pid = %s", (pid,)).fetchall():
                return
    raise AssertionError("it is still open")


@pytest.mark.parametrize("size", [1, 2])
def test_an_answer_that_never_comes_is_an_error_and_the_connection_is_made_anew(
    client: Client, size: int
) -> None:
    with Client(client.target.conninfo, max_size=size) as cut:
        sent = send(cut, claim(worker(client)))
        cut.lines.hang_up(0.0)
        sent.receive()
        assert sent.failed
        with pytest.raises(DatabaseUnreachable):
            sent.answer()
        assert backend(cut)


def test_who_waits_already_while_a_call_is_sent_gets_the_connection_although_nobody_reads_the_answer(
    one: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, seen = worker(one), []
    other = threading.Thread(target=lambda: seen.append(backend(one)))
    sends = Statements.send

    def slowly(self: Statements, query: Any) -> None:
        other.start()
        while not one._pool._waiting:  # type: ignore[union-attr]
            time.sleep(0.001)
        sends(self, query)

    monkeypatch.setattr(Statements, "send", slowly)
    sent = send(one, claim(me))
    other.join(2)
    assert seen
    assert len(sent.answer()) == 1


def test_nobody_waits_for_an_answer_longer_than_for_the_connection(client: Client) -> None:
    with Client(client.target.conninfo, max_size=1, timeout_s=0.3) as one, client.connection() as other:
        me = worker(one)
        other.execute("begin; lock table gangq.incarnations in access exclusive mode")
        sent = send(one, claim(me))
        with pytest.raises(DatabaseUnreachable, match="none of the 1 connections"):
            backend(one)
        other.execute("rollback")
        assert len(sent.answer()) == 1
        assert backend(one)


def test_a_refusal_is_the_error_that_the_call_itself_would_raise(one: Client) -> None:
    me = worker(one)
    with pytest.raises(InvalidInput) as direct:
        one.claim(incarnation=me, max_jobs=5000)
    with pytest.raises(InvalidInput) as later:
        send(one, claim(me, max_jobs=5000)).answer()
    assert str(direct.value) == str(later.value)
    assert "max_jobs is 5000" in str(later.value)
    assert len(one.claim(incarnation=me)) == 1


@pytest.mark.parametrize("prepare", [True, False])
def test_a_statement_is_prepared_where_that_is_allowed_and_no_more_once_it_has_gone(
    client: Client, prepare: bool
) -> None:
    with Client(client.target.conninfo, max_size=1, prepare=prepare) as made:
        me = worker(client, 40)
        claimed = 0

        def take() -> None:
            nonlocal claimed
            jobs = send(made, claim(me)).answer()
            done = calls.complete(job_ids=[j.job_id for j in jobs], tokens=[j.token for j in jobs])
            claimed += len(send(made, done).answer())

        for _ in range(10):
            take()
        with made.connection() as connection:
            names = [
                row[0] for row in connection.execute("select name from pg_prepared_statements").fetchall()
            ]
            assert any(name.startswith("gangq_") for name in names) == prepare
            connection.execute("deallocate all")
        if prepare:
            with pytest.raises(GangqError):
                take()
        while claimed < 20:
            take()


def test_results_arrive_as_they_were_whatever_they_hold(one: Client) -> None:
    me = worker(one, 5)
    jobs = one.claim(incarnation=me, max_jobs=5)
    results = [{"a": 'quote " back \\ slash {,}'}, None, ["ü", "NULL"], "", 1.5]
    one.complete(job_ids=[j.job_id for j in jobs], tokens=[j.token for j in jobs], results=results)
    assert [one.job(id=j.job_id).result for j in jobs] == results


def test_text_that_postgresql_cannot_hold_is_refused_and_not_cut_off(one: Client) -> None:
    me = worker(one)
    with pytest.raises(GangqError):
        one.claim(incarnation=me, model="a\0b")
    with pytest.raises(GangqError):
        send(one, claim(me, model="a\0b"))
    assert len(one.claim(incarnation=me)) == 1


def test_a_line_with_an_answer_outstanding_counts_as_silent_until_it_is_received(one: Client) -> None:
    sent = send(one, claim(worker(one)))
    sent.receive()
    assert one.lines.hang_up(-1.0) == 0
    assert len(sent.answer()) == 1

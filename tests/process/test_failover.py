"""A standby that lacks the end of the log is promoted: nothing that a client has seen is given out a second time."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest

from databases import OwnServer
from gangq.client import Client
from gangq.embedded import Server
from worker.worker_process import eventually

KINDS = ("jobs", "gangs", "incarnations", "tokens", "places", "events")


@dataclass
class Seen:
    """Every number of each kind that a client was given."""

    jobs: list[int] = field(default_factory=list)
    gangs: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    events: list[int] = field(default_factory=list)


@dataclass
class Pair:
    """A primary and its asynchronous standby."""

    primary: Server
    standby: Server
    name: str

    def freeze(self) -> int:
        """Stop the standby's receiver of the log where it is; its pid."""
        with psycopg.connect(self.primary.dsn(self.name), autocommit=True) as conn:
            row = conn.execute("select pg_current_wal_insert_lsn()").fetchone()
            assert row is not None
        with psycopg.connect(self.standby.dsn(self.name), autocommit=True) as conn:
            eventually(
                lambda: (
                    conn.execute("select pg_last_wal_replay_lsn() >= %s::pg_lsn", row).fetchone() == (True,)
                ),
                "the standby has it all",
            )
            found = conn.execute("select pid from pg_stat_wal_receiver").fetchone()
            assert found is not None
        os.kill(found[0], signal.SIGSTOP)
        return int(found[0])

    def promote(self, receiver: int) -> None:
        """Promote the standby. Its receiver goes on only once it has been told to end, so it reads nothing more."""
        with psycopg.connect(self.standby.dsn(self.name), autocommit=True) as conn:
            conn.execute("select pg_promote(false)")
            eventually(lambda: _told_to_end(receiver), "the receiver is told to end")
            os.kill(receiver, signal.SIGCONT)
            eventually(
                lambda: conn.execute("select pg_is_in_recovery()").fetchone() == (False,), "it is the primary"
            )


def _told_to_end(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) & 1 << signal.SIGTERM - 1)


@pytest.fixture
def pair(server: Server, own_server: OwnServer, template: str) -> Iterator[Pair]:
    with own_server(durable=True) as primary:
        primary.create_database("failover", template=template)
        primary.stop()
        copy = primary.data_dir.with_name(
            "standby"
        )  # In the primary's own directory, which is removed with it.
        subprocess.run(["cp", "-a", primary.data_dir, copy], check=True)
        (copy / "standby.signal").touch()
        primary.start()
        conninfo = f"host={_socket_of(primary)} port=5432 user=postgres"
        standby = Server(
            copy, binaries=server.binaries, settings={"primary_conninfo": conninfo, "hot_standby": "on"}
        )
        try:
            yield Pair(primary, standby.start(), "failover")
        finally:
            standby.stop("immediate")


def _socket_of(server: Server) -> str:
    with psycopg.connect(server.dsn("postgres")) as conn:
        row = conn.execute("show unix_socket_directories").fetchone()
        assert row is not None
        return str(row[0])


def work(dsn: str, name: str, seen: Seen, jobs: int = 60) -> None:
    """Draw from every sequence, as clients do."""
    with Client(dsn) as client:
        incarnation = client.register_worker(
            name=name, host=name, queues=["default"], slots=100, light=100
        ).incarnation
        submitted = client.submit(task="t", payloads=[{}] * jobs)
        gang = client.submit_gang(task="t", size=2)
        claims = client.claim(incarnation=incarnation, request_id=uuid.uuid4(), max_jobs=jobs // 2)
        with client.connection() as conn:
            places = conn.execute(
                "select order_key from gangq.live_jobs where id = any (%s)", (submitted,)
            ).fetchall()
            events = conn.execute(
                "select id from gangq.events where incarnation = %s or gang_id = %s",
                (incarnation, gang.gang_id),
            ).fetchall()
    seen.incarnations.append(incarnation)
    seen.jobs += [*submitted, *gang.job_ids]
    seen.gangs.append(gang.gang_id)
    seen.tokens += [claim.token for claim in claims]
    seen.places += [row[0] for row in places]
    seen.events += [row[0] for row in events]


def test_nothing_is_given_twice_after_a_failover_that_loses_the_end_of_the_log(pair: Pair) -> None:
    old, new = pair.primary.dsn(pair.name), pair.standby.dsn(pair.name)
    seen = Seen()
    work(old, "before", seen)
    receiver = pair.freeze()
    for n in range(3):
        work(old, f"lost{n}", seen)
    pair.primary.kill()
    pair.promote(receiver)
    with Client(new) as client:
        kept = set(client.job_states(ids=seen.jobs))
        assert kept < set(seen.jobs), "the standby had all of it: the test shows nothing"

    # Two sessions at once are the first on the new timeline, before any tick.
    born = [Seen(), Seen()]
    threads = [threading.Thread(target=work, args=(new, f"after{n}", found)) for n, found in enumerate(born)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Client(new) as client:
        client.tick(force=True)
    late = Seen()
    work(new, "late", late)
    for kind in KINDS:
        first = [number for found in born for number in getattr(found, kind)]
        last = getattr(late, kind)
        assert first, kind
        assert last, kind
        assert min(first) > max(getattr(seen, kind)), kind
        assert len(set(first)) == len(first), kind
        assert min(last) > max(first), kind
    assert max(late.tokens) < 1 << 53
    with Client(new) as client:
        with client.connection() as conn:
            assert conn.execute("select timeline, base from gangq.sequence_base").fetchall() == [(2, 1 << 25)]
        assert client.violations() == []


@pytest.mark.slow
def test_a_due_time_is_one_job_across_a_failover_that_loses_the_end_of_the_log(pair: Pair) -> None:
    old, new = pair.primary.dsn(pair.name), pair.standby.dsn(pair.name)

    def until_submitted(client: Client, count: int) -> list[datetime]:
        def look() -> bool:
            client.tick(force=True)
            return len(client.jobs(task="due", limit=None)) >= count

        eventually(look, f"{count} due times are submitted")
        return sorted(datetime.fromisoformat(j.payload["at"]) for j in client.jobs(task="due", limit=None))

    with Client(old) as client:
        client.set_schedule(name="s", task="due", every="1s", catch_up="all", due_as="at")
        kept = until_submitted(client, 2)
        receiver = pair.freeze()
        seen = until_submitted(client, len(kept) + 3)
    pair.primary.kill()
    pair.promote(receiver)
    with Client(new) as client:
        assert len(client.jobs(task="due", limit=None)) < len(seen), "the standby had all of it"
        found = until_submitted(client, len(seen) + 2)
    assert found[: len(seen)] == seen, "what was lost is submitted again"
    assert {later - earlier for earlier, later in itertools.pairwise(found)} == {timedelta(seconds=1)}


def test_tokens_stay_under_two_to_the_53_for_thousands_of_failovers_and_after_a_restored_dump(
    client: Client,
) -> None:
    incarnation = client.register_worker(name="w", host="h", queues=["default"], light=9).incarnation

    def token_with(timeline: int, base: int) -> int:
        client.submit(task="t")
        with client.connection() as conn:
            conn.execute("update gangq.sequence_base set timeline = %s, base = %s", (timeline, base))
        return client.claim(incarnation=incarnation, request_id=uuid.uuid4())[0].token

    assert token_with(1, 0) < token_with(1, 1 << 25) < token_with(1, 4000 << 25) < 1 << 53
    # The timeline written is a later one than the server's: a dump was restored into a new cluster.
    restored = token_with(7, 3 << 25)
    assert restored >> 16 > 4 << 25

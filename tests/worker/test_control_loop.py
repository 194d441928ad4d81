"""The loop that has the worker's second connection, and makes the calls of its threads."""

from __future__ import annotations

import asyncio
import socket

import psycopg
import pytest

from databases import OwnServer
from gangq.client import Client
from gangq.client.aio import AsyncConnection
from gangq.worker.control import ListeningClient
from worker.controls import control_of
from worker.worker_process import Fleet


def test_threads_that_wait_for_its_calls_leave_it_one_to_look_up_the_host_of_the_database(
    own_server: OwnServer,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (
        own_server(settings={"listen_addresses": "127.0.0.1", "port": str(port)}) as server,
        psycopg.connect(server.dsn(), autocommit=True) as db,
    ):
        db.execute("create role one login password 'secret' in role gangq_worker")
        with Client(f"postgresql://one:secret@localhost:{port}/gangq") as client:
            control = control_of(client)
            version = control.for_threads.schema_version()
            db.execute("select pg_terminate_backend(pid, 5000) from pg_stat_activity where usename = 'one'")
            calls = [
                control.spawn(control.in_thread(control.for_threads.schema_version), f"call {n}")
                for n in range(6)
            ]
            assert [call.result(20) for call in calls] == [version] * 6


def test_a_connection_whose_call_is_cancelled_while_it_begins_to_listen_is_closed(dsn: str) -> None:
    made: list[AsyncConnection] = []

    class Held(ListeningClient):
        @staticmethod
        async def _tell(conn: AsyncConnection, *_statements: str) -> None:
            made.append(conn)
            await asyncio.sleep(60)

    async def attempt() -> None:
        call = asyncio.create_task(Held(dsn).schema_version())
        while not made:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(attempt())
    assert [one.closed for one in made] == [True]


def test_a_worker_whose_loop_breaks_ends(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def closes(ctx):
    os.closerange(3, 1000)
""")
    worker = fleet.start(slots=0, light=1)
    client.submit(task="closes")
    assert worker.exit_code() == 1
    assert "control_loop_broken" in worker.log

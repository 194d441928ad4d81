"""The loop that has the worker's second connection, and makes the calls of its threads."""

from __future__ import annotations

import socket

import psycopg
from controls import control_of

from gangq import schema
from gangq.client import Client
from gangq.embedded import Server


def test_threads_that_wait_for_its_calls_leave_it_one_to_look_up_the_host_of_the_database() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Server.temporary(port=port) as server, psycopg.connect(server.dsn(), autocommit=True) as db:
        schema.migrate(server.dsn())
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

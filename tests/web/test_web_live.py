"""What open pages are told, and when: by one connection that listens, and looks whether anything has changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from browsing import Serve, Shown

from gangq.client import AsyncClient
from gangq.web.live import Live
from sql.drive import Claim, Q, gpus

_LISTENING = """
  select count(*) from pg_stat_activity
  where datname = current_database() and pid <> pg_backend_pid() and query ~ '^listen|change_mark'"""


@contextmanager
def open_page(at: str) -> Iterator[Iterator[str]]:
    """The lines that an open page is told, once the connection behind it listens."""
    with httpx.stream("GET", f"{at}/live", timeout=20) as answer:
        lines = answer.iter_lines()
        while next(lines) != "event: changed":
            pass
        yield lines


def test_two_open_pages_share_one_connection(serve: Serve, dsn: str, shown: Shown) -> None:
    at = serve()
    with psycopg.connect(dsn, autocommit=True) as db, open_page(at), open_page(at):
        assert db.execute(_LISTENING).fetchall() == [(1,)]


def test_a_proxy_is_told_not_to_keep_a_stream_back(serve: Serve) -> None:
    with httpx.stream("GET", f"{serve()}/live", timeout=20) as answer:
        assert answer.headers["x-accel-buffering"] == "no"


async def told(changes: AsyncIterator[bool], within_s: float) -> bool:
    """Whether a page is told within so many seconds; not cut short, because that would end the stream."""
    began = time.monotonic()
    while time.monotonic() < began + within_s:
        if await anext(changes):
            return True
    return False


def a_light_job(q: Q, running: Claim) -> None:
    q.submit(queue="later")


def an_end(q: Q, running: Claim) -> None:
    running.complete()


def a_line_of_output(q: Q, running: Claim) -> None:
    q.call("append_log", job_ids=[running.job_id], tokens=[running.token], seqs=[0], chunks=["x"])


def a_setting(q: Q, running: Claim) -> None:
    q.call("set_queue", name="made-meanwhile")


def silence(q: Q, running: Claim) -> None:
    """Nothing is written: no tick runs."""
    q.later(3600)


@pytest.mark.parametrize("change", [a_light_job, an_end, a_line_of_output, a_setting, silence])
def test_what_the_database_does_not_notify_of_is_seen_by_the_poll(
    dsn: str, q: Q, shown: Shown, change: Callable[[Q, Claim], Any]
) -> None:
    q.submit()
    running = q.worker("w9").take()

    async def hear() -> None:
        async with AsyncClient(dsn) as client:
            live = Live(client)
            changes = live.changes()
            assert await told(changes, 4)
            for _ in range(3):  # What the fixture wrote is counted within 10 s.
                if not await told(changes, 11):
                    break
            else:
                raise AssertionError("pages are told of changes though nothing changes any more")
            change(q, running)
            await asyncio.sleep(1.1)
            q.sql("select 1")  # Its session goes on, as a worker's does.
            assert await told(changes, 16)
            await changes.aclose()  # type: ignore[attr-defined]
            await live.close()

    asyncio.run(hear())


def test_a_worker_that_comes_is_listened_to(dsn: str, q: Q) -> None:
    async def hear() -> None:
        async with AsyncClient(dsn) as client:
            live = Live(client)
            changes = live.changes()
            assert await told(changes, 4)
            worker = q.worker(devices=gpus(80000))
            assert await told(changes, 16)
            await asyncio.sleep(1)
            q.sql(f"select pg_notify('gangq_{worker.incarnation}', 'go')")
            assert await told(changes, 3)
            await changes.aclose()  # type: ignore[attr-defined]
            await live.close()

    asyncio.run(hear())

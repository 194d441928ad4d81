"""The page over HTTP against a real database: what it shows, escaping, headers, the base path, and live events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx
import psycopg
import pytest
from browsing import Shown, fetch, serving
from psycopg.conninfo import make_conninfo
from starlette.applications import Starlette
from starlette.routing import Mount

from gangq.client import AsyncClient
from gangq.errors import InvalidInput
from gangq.web import asgi
from gangq.web.live import PACE_S, Live


def test_the_fleet_is_shown_with_what_runs_and_what_waits(dsn: str, shown: Shown) -> None:
    (page,) = fetch(dsn, "/")
    assert page.status_code == 200
    assert page.text.count('class="gpu held" href="/gangs/') == 2
    assert "alpha" in page.text
    assert f'href="/gangs/{shown.gang}"' in page.text
    assert "hostile" in page.text


def test_a_gang_has_a_lane_for_each_rank_and_its_wait_by_owner(dsn: str, shown: Shown) -> None:
    (page,) = fetch(dsn, f"/gangs/{shown.gang}")
    assert page.text.count('class="bar runs"') == 3, "two lanes, and the legend"
    assert "<h2>Waits</h2>" in page.text
    assert "rank 1" in page.text


def test_text_of_others_is_escaped_and_no_script_is_inline(dsn: str, shown: Shown) -> None:
    for page in fetch(dsn, "/", f"/gangs/{shown.gang}", f"/jobs/{shown.job}", "/usage"):
        assert page.status_code == 200
        assert "<script>" not in page.text
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy


def test_an_unknown_host_and_an_unknown_job_are_refused(dsn: str) -> None:
    assert fetch(dsn, "/", host="evil.example")[0].status_code == 400
    assert fetch(dsn, "/jobs/99999999")[0].status_code == 404


def test_a_host_that_was_allowed_is_answered_however_its_name_is_written(dsn: str) -> None:
    for host in ("jobs.example", "JOBS.Example"):
        page = fetch(dsn, "/nowhere", host=host, hosts=["Jobs.example"])[0]
        assert page.status_code == 404, page.text


def test_what_is_no_id_or_no_page_is_answered_by_a_page_that_leads_on(dsn: str) -> None:
    numbers = ("99999999", "9" * 19, "9" * 5000, "-1", "1e3", "%00", "7%00", "x" * 300, "\u0663", "1 or true")
    paths = [f"/{kind}/{id}" for kind in ("jobs", "gangs", "batches") for id in numbers]
    for page in fetch(dsn, *paths, "/nowhere", "/jobs", "/jobs/1/2", "/static/nothing.css"):
        assert page.status_code == 404, page.url
        assert 'href="/usage"' in page.text
        assert len(page.text) < 5_000


def test_no_page_says_where_the_database_is_or_who_asks_it(caplog: pytest.LogCaptureFixture) -> None:
    (page,) = fetch("postgresql://harry:hidden@127.0.0.1:1/fleet", "/")
    assert page.status_code == 503
    assert "the database did not answer as it should" in page.text
    for said in ("harry", "hidden", "127.0.0.1"):
        assert said not in page.text
    (told,) = [record for record in caplog.records if record.message == "page_failed"]
    assert "harry" in vars(told)["error"]
    assert "hidden" not in str(vars(told))


def test_a_page_that_ran_into_a_lock_stays_live(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("lock table gangq.schedules_table in access exclusive mode")
        (page,) = fetch(make_conninfo(dsn, options="-c lock_timeout=100ms"), "/schedules")
    assert page.status_code == 503
    assert "lock timeout" in page.text
    assert 'hx-sse:connect="/live"' in page.text
    assert 'hx-get="/schedules" hx-trigger="changed from:#live"' in page.text
    assert [record.message for record in caplog.records] == ["page_failed"]


def test_a_slash_too_many_leads_nowhere_else(dsn: str) -> None:
    for page in fetch(dsn, "/usage/", "/q/usage/", "/jobs/1/", base_path="/q"):
        assert page.status_code == 404, page.headers.get("location")


def test_a_base_path_without_a_slash_is_refused() -> None:
    with pytest.raises(InvalidInput, match="write /q"):
        asgi("postgresql:///any", base_path="q")


def test_links_have_the_base_path(dsn: str, shown: Shown) -> None:
    stripped, kept = fetch(dsn, f"/jobs/{shown.job}", f"/q/jobs/{shown.job}", base_path="/q")
    for page in (stripped, kept):
        assert page.status_code == 200
        assert f'hx-get="/q/jobs/{shown.job}"' in page.text
        assert 'href="/q/static/style.css"' in page.text


def test_a_page_cannot_write(dsn: str) -> None:
    async def write() -> None:
        from gangq.web.queries import reading

        async with AsyncClient(dsn) as client, reading(client) as read:
            await read("select gangq.set_queue('x')")

    with pytest.raises(Exception, match="read-only"):
        asyncio.run(write())


def within(seconds: float, dsn: str, change: Callable[[], Awaitable[object]]) -> None:
    async def hear() -> None:
        async with AsyncClient(dsn) as client:
            changes = Live(client).changes()
            await asyncio.wait_for(anext(changes), 4)  # It listens.
            told = asyncio.ensure_future(anext(changes))
            await change()
            await asyncio.wait_for(told, seconds)
            await changes.aclose()  # type: ignore[attr-defined]

    asyncio.run(hear())


def test_a_page_is_told_of_a_gang_within_a_second(dsn: str) -> None:
    async def submit() -> None:
        async with AsyncClient(dsn) as client:
            await client.submit_gang(task="a", size=2, wait_for_hardware=True)

    within(1, dsn, submit)


def test_mounted_in_another_app_its_links_lead_to_it(dsn: str, shown: Shown) -> None:
    async def ask() -> httpx.Response:
        page = asgi(dsn)
        whole = Starlette(routes=[Mount("/ops", page)])
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=whole), base_url="http://127.0.0.1"
        ) as web:
            answer = await web.get(f"/ops/gangs/{shown.gang}")
        await page.close()
        return answer

    page = asyncio.run(ask())
    assert page.status_code == 200
    assert f'hx-get="/ops/gangs/{shown.gang}"' in page.text
    assert 'href="/ops/static/style.css"' in page.text


def test_no_connection_outlives_the_server(dsn: str) -> None:
    others = (
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    with psycopg.connect(dsn, autocommit=True) as db:

        def connections() -> int:
            row = db.execute(others).fetchone()
            assert row is not None
            return int(row[0])

        with serving(asgi(dsn)) as at:
            assert httpx.get(at).status_code == 200
            assert connections() > 0
            before = connections()
            assert "gangq_up 1" in httpx.get(f"{at}/metrics").text
            assert connections() == before + 1
        began = time.monotonic()
        while connections():
            assert time.monotonic() < began + 5
            time.sleep(0.05)


def test_who_comes_as_the_last_one_leaves_is_told_too(dsn: str) -> None:
    async def hear() -> None:
        async with AsyncClient(dsn) as client:
            live = Live(client)
            first, second = live.changes(), live.changes()
            await anext(first)
            leaves = asyncio.ensure_future(first.aclose())  # type: ignore[attr-defined]
            await asyncio.gather(leaves, asyncio.ensure_future(anext(second)))
            told = asyncio.ensure_future(anext(second))
            await asyncio.sleep(PACE_S)
            await client.submit_gang(task="a", size=2, wait_for_hardware=True)
            # Sooner than it looks for itself.
            await asyncio.wait_for(told, 3)
            await second.aclose()  # type: ignore[attr-defined]
            await live.close()

    asyncio.run(hear())


def test_when_it_is_closed_nothing_of_it_listens_any_more_even_if_the_last_page_was_just_left(
    dsn: str,
) -> None:
    """Whatever it was doing: connecting, waiting for an answer, or waiting for notifications."""

    async def leave(steps: int) -> list[str]:
        async with AsyncClient(dsn) as client:
            live = Live(client)
            page = asyncio.ensure_future(anext(live.changes()))
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            page.cancel()
            await asyncio.gather(page, return_exceptions=True)
            await live.close()
            return [task.get_name() for task in asyncio.all_tasks()]

    for steps in range(0, 60, 3):
        assert "gangq-web-live" not in asyncio.run(leave(steps)), steps


def test_who_comes_next_within_5_s_finds_it_listening(dsn: str) -> None:
    async def listeners() -> list[int]:
        async with (
            AsyncClient(dsn) as client,
            await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other,
        ):
            live, found = Live(client), list[int]()
            for _ in range(2):
                changes = live.changes()
                await asyncio.wait_for(anext(changes), 4)
                rows = await other.execute(
                    "select pid from pg_stat_activity where datname = current_database() "
                    "and pid <> pg_backend_pid() and query ~ '^listen|change_mark'"
                )
                found += [pid for (pid,) in await rows.fetchall()]
                await changes.aclose()  # type: ignore[attr-defined]
            await live.close()
            return found

    first, second = asyncio.run(listeners())
    assert first == second


def test_it_listens_to_every_worker_before_it_says_that_it_listens(dsn: str) -> None:
    async def hear() -> None:
        async with AsyncClient(dsn) as client, await psycopg.AsyncConnection.connect(dsn) as other:
            await other.execute("lock table gangq.incarnations")  # It cannot see yet which workers there are.
            changes = Live(client).changes()
            told = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(1)
            assert not told.done()
            await other.rollback()
            await asyncio.wait_for(told, 3)
            await changes.aclose()  # type: ignore[attr-defined]

    asyncio.run(hear())

"""gangq top: every tab beside a real database, its keys, 300 hosts, and a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import psycopg
import pytest
from cli_process import GANGQ, environment, gangq
from textual.pilot import Pilot
from textual.widgets import Input, Static

from gangq.cli.progress import bar, remaining_s
from gangq.client import Client
from gangq.top.app import Pages, Question, Top, answer_of
from gangq.top.tabs import MOST, TABS, summary

Db = psycopg.Connection[dict[str, Any]]
Steps = Callable[[Pilot[None], Top], Awaitable[None]]

NASTY = "[red]t\x1b]0;title\x07ask"


def register(client: Client, name: str, host: str, gpus: int = 2) -> int:
    devices = [
        {"uuid": f"GPU-{name}-{i}", "index": i, "vram_mb": 24576, "source": "declared"} for i in range(gpus)
    ]
    row = client.register_worker(name=name, host=host, queues=["default"], slots=8, devices=devices)
    return int(row.incarnation)


@pytest.fixture
def fleet(client: Client) -> int:
    """A worker with a job at step 3 of 12, a job that nobody takes, and a task with a name made to harm."""
    incarnation = register(client, "w1", "alpha")
    client.submit(task="train", gpus=1)
    (job,) = client.jobs()
    client.call("open_place", incarnation=incarnation, job_id=job.id)
    (claim,) = client.claim(incarnation=incarnation)
    beat = {"step": 3, "total": 12}
    client.heartbeat(incarnation=incarnation, job_ids=[job.id], tokens=[claim.token], beats=[beat])
    client.submit(task=NASTY, gpus=1)
    return job.id


def on_screen(client: Client, dsn: str, steps: Steps, *, size: tuple[int, int] = (120, 30)) -> None:
    """Run the steps in a Top that is drawn in memory."""

    def command(words: Sequence[str]) -> None:
        print(gangq(dsn, *words).output, end="")

    async def run() -> None:
        app = Top(client, answer_of(command), every_s=60)
        async with app.run_test(size=size) as pilot:
            await settled(pilot)
            await steps(pilot, app)

    asyncio.run(run())


async def settled(pilot: Pilot[None]) -> None:
    """Wait until what was asked of the database is shown."""
    await pilot.pause()
    while any(worker.is_running for worker in pilot.app.workers):
        await pilot.pause(0.01)
    await pilot.pause()


def lines(app: Top) -> list[str]:
    """The rows on the screen, with one blank between two words."""
    table = app._table()
    drawn = [table.render_line(y).text for y in range(1, table.size.height)]
    return [" ".join(line.split()) for line in drawn[: len(table.texts)]]


def test_the_first_tab_shows_what_runs_with_its_progress(client: Client, dsn: str, fleet: int) -> None:
    async def steps(pilot: Pilot[None], app: Top) -> None:
        (line,) = lines(app)
        assert line.startswith(f"{fleet} running train 1 1 25% ██░░░░░░░░")
        assert "alpha" in line
        above = str(app.query_one("#summary", Static).render())
        assert "1 workers" in above
        assert "GPUs 1 held, 1 free" in above
        assert "no tick yet" in above

    on_screen(client, dsn, steps)


def test_each_tab_asks_and_shows_and_no_name_drives_the_terminal(
    client: Client, dsn: str, fleet: int
) -> None:
    seen: dict[str, list[str]] = {}
    client.set_service(name="chat", task="serve", replicas=4, gang=2)

    async def steps(pilot: Pilot[None], app: Top) -> None:
        for number, tab in enumerate(TABS, 1):
            await pilot.press(str(number))
            await settled(pilot)
            assert app.tab is tab
            seen[tab.title] = lines(app)

    on_screen(client, dsn, steps)
    assert {title: len(rows) for title, rows in seen.items()} == {
        "Work": 1,
        "Waiting": 1,
        "Queues": 1,
        "Workers": 1,
        "Devices": 2,
        "Trips": 0,
        "Services": 1,
    }
    assert "[red]t\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}ask" in seen["Waiting"][0]
    assert seen["Workers"][0].startswith("w1 alpha live 1/8")
    assert seen["Services"][0].startswith("chat starting 0 of 4")


def test_a_filter_and_a_sort_are_kept_over_a_refresh(client: Client, dsn: str) -> None:
    for name in ("b", "c", "a"):
        register(client, name, f"host-{name}")

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("4")
        await settled(pilot)
        await pilot.press("s", "r")
        assert [line[0] for line in lines(app)] == ["c", "b", "a"]
        await pilot.press("slash", *"host-", "a")
        assert [line[0] for line in lines(app)] == ["a"]
        await pilot.press("enter", "space")
        await settled(pilot)
        assert [line[0] for line in lines(app)] == ["a"]
        assert "held" in str(app.query_one("#summary", Static).render())
        await pilot.press("escape")
        assert [line[0] for line in lines(app)] == ["c", "b", "a"]
        assert app.query_one("#filter", Input).value == ""

    on_screen(client, dsn, steps)


def test_enter_shows_e_explains_and_c_asks_before_it_cancels(client: Client, dsn: str, fleet: int) -> None:
    def opened(app: Top) -> str:
        return str(app.screen.query_one(Static).render())

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("enter")
        assert isinstance(app.screen, Pages)
        assert "train" in opened(app)
        await pilot.press("escape", "e")
        assert "runs for" in opened(app)
        await pilot.press("escape", "c")
        assert isinstance(app.screen, Question)
        assert f"Cancel {fleet}?" in opened(app)
        await pilot.press("enter")
        assert client.job(id=fleet).state == "running"
        await pilot.press("c", "y")
        await settled(pilot)
        assert client.job(id=fleet).state == "preempting"

    on_screen(client, dsn, steps)


def test_the_cursor_stays_on_its_row_when_others_come(client: Client, dsn: str, fleet: int) -> None:
    incarnation = register(client, "w2", "beta")

    async def steps(pilot: Pilot[None], app: Top) -> None:
        assert app._chosen() == str(fleet)
        client.submit(task="other", gpus=1, priority=9)
        (new,) = client.jobs(task="other")
        client.call("open_place", incarnation=incarnation, job_id=new.id)
        client.claim(incarnation=incarnation)
        await pilot.press("s", "r")
        app._ask()
        await settled(pilot)
        assert len(lines(app)) == 2
        assert app._chosen() == str(fleet)

    on_screen(client, dsn, steps)


def test_keys_and_clicks_move_the_cursor_and_the_titles_stay(client: Client, dsn: str) -> None:
    for i in range(MOST + 1):
        register(client, f"w{i:03}", f"host-{i:03}", gpus=0)

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("4")
        await settled(pilot)
        table, high = app._table(), app._table().size.height
        assert table.render_line(0).text.split()[:3] == ["NAME", "HOST", "STATE"]
        for key, cursor in (("pagedown", high - 1), ("down", high), ("up", high - 1), ("end", MOST - 1)):
            await pilot.press(key)
            assert table.cursor == cursor
            assert any(f"w{cursor:03}" in line for line in lines(app))
        assert table.render_line(0).text.split()[:3] == ["NAME", "HOST", "STATE"]
        await pilot.press("down", "s")
        assert table.cursor == MOST - 1
        assert f"{MOST} of {MOST + 1}" in table.render_line(high - 1).text
        await pilot.press("home")
        await pilot.click(table, offset=(5, 3))
        assert table.cursor == 2
        await pilot.click(table, offset=(5, 0))
        assert table.cursor == 2

    on_screen(client, dsn, steps)


def test_in_80_columns_hosts_reasons_and_titles_are_whole(client: Client, dsn: str, fleet: int) -> None:
    client.register_worker(
        name="gpu-node-00-0",
        host="gpu-node-00.example.org",
        queues=["default"],
        slots=8,
        devices=[{"uuid": "GPU-0", "index": 0, "model": "NVIDIA H100 80GB HBM3", "source": "declared"}],
    )

    async def steps(pilot: Pilot[None], app: Top) -> None:
        for key, words in (("2", "waits for a free worker"), ("3", ""), ("5", "gpu-node-00.example.org")):
            await pilot.press(key)
            await settled(pilot)
            titles = app._table().render_line(0).text.rstrip()
            assert any(titles.endswith(title) for title in (" WHY", " WAITING JOBS", " TRIPS DAY"))
            assert any(words in line for line in lines(app))

    on_screen(client, dsn, steps, size=(80, 24))


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(None, 5, ""), (3, None, ""), (0, 0, ""), (0, 4, "  0% " + "░" * 10), (9, 4, "100% " + "█" * 10)],
)
def test_a_bar_is_drawn_of_what_is_known(done: float | None, total: float | None, shown: str) -> None:
    assert bar(done, total) == shown


def test_what_remains_is_steps_by_rate() -> None:
    assert remaining_s(3, 12, 2.0) == pytest.approx(4.5)
    assert remaining_s(3, 12, None) is None


def test_three_hundred_hosts_are_drawn_in_fifty_milliseconds(client: Client, dsn: str, db: Db) -> None:
    """Every row anew, as after a refresh. Of processor time, the least of twelve: this machine is shared."""
    for host in range(300):
        register(client, f"w{host}", f"host-{host}", gpus=8)

    async def steps(pilot: Pilot[None], app: Top) -> None:
        for key, rows in (("4", 300), ("5", 2400)):
            await pilot.press(key)
            await settled(pilot)
            assert len(app._answer[1]) == rows
            assert len(app._table().texts) == MOST
            fleet, answer = client.execute(summary()), client.execute(app.tab.query())
            took = []
            for _ in range(12):
                began = time.process_time()
                app._answered(app.tab, fleet, answer)
                await pilot.pause()
                took.append(time.process_time() - began)
            assert min(took) < 0.05, took

    on_screen(client, dsn, steps)
    for query in (summary(), *(tab.query() for tab in TABS)):
        client.execute(query)


def test_in_a_real_terminal_of_80_columns_it_draws_and_q_ends_it(dsn: str, fleet: int) -> None:
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    run = subprocess.Popen(
        [*GANGQ, "top"], stdin=its, stdout=its, stderr=its, env=environment(dsn, TERM="xterm-256color")
    )
    os.close(its)
    drawn, until = b"", time.monotonic() + 60
    while b"train" not in drawn and time.monotonic() < until:
        if select.select([own], [], [], 0.2)[0]:
            drawn += os.read(own, 65536)
    os.write(own, b"q")
    while run.poll() is None and time.monotonic() < until:
        if select.select([own], [], [], 0.2)[0]:
            try:
                drawn += os.read(own, 65536)
            except OSError:
                break
    assert run.wait(10) == 0
    os.close(own)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", drawn).decode(errors="replace")
    assert "1 Work" in text
    assert "25%" in text


@pytest.mark.parametrize(
    "words", [("top", "--every", "0"), ("ls", "--watch", "0"), ("explain", "1", "--watch", "0.1")]
)
def test_no_look_is_repeated_without_a_pause(dsn: str, words: tuple[str, ...]) -> None:
    refused = gangq(dsn, *words)
    assert (refused.exit_code, "0.5s or more" in refused.stderr) == (2, True)

"""gangq top: every tab beside a real database, its keys, 300 hosts, and a real terminal."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from cli.cli_process import gangq
from cli.staged_fleet import stage
from cli.terminal import Terminal
from databases import Clock
from gangq.cli import output
from gangq.cli.progress import bar, remaining_s
from gangq.client import Client
from gangq.top.app import Pages, Question, Top
from gangq.top.tabs import MOST, TABS, summary
from sql.drive import Q, place

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


def on_screen(dsn: str, steps: Steps, *, size: tuple[int, int] = (120, 30)) -> None:
    """Run the steps in a Top that is drawn in memory."""

    async def run() -> None:
        app = Top(dsn, every_s=60)
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
        assert "1 worker " in above
        assert "GPUs 1 held, 1 free" in above
        assert "no tick yet" in above

    on_screen(dsn, steps)


def test_a_gang_is_one_row_as_far_as_the_slowest_of_its_members(client: Client, dsn: str, db: Db) -> None:
    first, second = register(client, "w1", "alpha"), register(client, "w2", "beta")
    gang = client.submit_gang(size=2, task="train", gpus=2).gang_id
    place(db)
    claims = [one for incarnation in (first, second) for one in client.claim(incarnation=incarnation)]
    assert len(claims) == 2
    for moment, steps_made in enumerate(((100, 60), (140, 80))):
        if moment:
            db.execute("select pg_sleep(0.2)")  # The rate is that of the database's clock.
        for claim, incarnation, step in zip(claims, (first, second), steps_made, strict=True):
            beat = {"step": step, "total": 200}
            client.heartbeat(
                incarnation=incarnation, job_ids=[claim.job_id], tokens=[claim.token], beats=[beat]
            )

    async def running(pilot: Pilot[None], app: Top) -> None:
        (line,) = lines(app)
        assert line.startswith(f"g{gang} running train 2 4 40% ████░░░░░░ "), line
        titles, cells = app._table()._titles, app._table().texts[0]
        of = dict(zip(titles, cells, strict=True))
        rate, left = float(of["STEPS/S"]), of["LEFT"]
        assert rate > 0
        assert left == output.seconds(remaining_s(80, 200, app._answer[1][0].row["step_rate"]))
        assert of["HOSTS"] == "alpha,beta"

    on_screen(dsn, running, size=(160, 30))
    client.cancel(job_ids=[], gang_ids=[gang])
    client.call("ack_preempted", job_id=claims[0].job_id, token=claims[0].token)

    async def stopping(pilot: Pilot[None], app: Top) -> None:
        assert lines(app)[0].startswith(f"g{gang} preempting train"), lines(app)

    on_screen(dsn, stopping)


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (("running", "running"), "running"),
        (("reserved", "running"), "reserved"),
        (("preempting", "running"), "preempting"),
        (("reserved", "preempting"), "preempting"),
    ],
)
def test_the_state_of_a_gang_is_that_of_the_members_that_keep_it(states: tuple[str, str], shown: str) -> None:
    rows = [
        {
            "id": id,
            "gang_id": 7,
            "state": state,
            "progress": progress,
            "step_rate": rate,
            "host": "h",
            "gpus": 1,
        }
        for id, state, progress, rate in (
            (1, states[0], {"step": 9, "total": 10}, 3.0),
            (2, states[1], None, None),
        )
    ]
    (gang,) = TABS[0].group(rows)  # type: ignore[arg-type]
    assert (gang["what"], gang["state"], gang["members"], gang["hosts"]) == ("g7", shown, 2, ["h"])
    assert (gang["step"], gang["step_rate"]) == (None, 3.0), "one that has said nothing is the slowest"


def test_devices_show_their_readings_and_trips_what_tripped(client: Client, dsn: str, fleet: int) -> None:
    incarnation = client.workers()[0].incarnation
    reading = {"gpu_pct": 87.0, "used_mb": 12288, "total_mb": 24576, "power_w": 301.5}
    client.heartbeat(incarnation=incarnation, readings=[{"uuid": "GPU-w1-0", **reading}])
    client.quarantine(device_uuid="GPU-w1-1", reason="Xid 79")
    token = client.job(id=fleet).token
    client.trip(
        incarnation=incarnation,
        job_id=fleet,
        token=token,
        code=76,
        error={"type": "Stalled", "message": "made no progress for 10m"},
        evidence={},
    )

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("5")
        await settled(pilot)
        busy, quarantined = lines(app)
        assert "87% 12GiB/24GiB 301.5W" in busy
        assert quarantined.startswith("alpha 1 ")
        assert "quarantined" in quarantined
        assert "Xid 79" in quarantined
        assert "? ? ?" in quarantined, "nobody has read it"
        await pilot.press("6")
        await settled(pilot)
        (trip,) = lines(app)
        assert f"76 stall train {fleet}" in trip
        assert "Stalled" in trip
        assert "1 quarantined" in str(app.query_one("#summary", Static).render())
        assert "1 trip in 1h" in str(app.query_one("#summary", Static).render())
        await pilot.press("enter")
        await settled(pilot)
        assert f"job {fleet}" in " ".join(str(app.screen.query_one(Static).render()).split())

    on_screen(dsn, steps, size=(160, 30))


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

    on_screen(dsn, steps)
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

    on_screen(dsn, steps)


def test_lengths_of_time_are_sorted_by_length_and_not_by_their_text(
    client: Client, dsn: str, clock: Clock
) -> None:
    now, ages = clock.now(), {"day": 90000, "hours": 7800, "minutes": 185, "seconds": 45, "new": 5}
    for task, age in ages.items():
        clock.set(now - timedelta(seconds=age))
        client.submit(task=task)
    clock.set(now)

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("2")
        await settled(pilot)
        for _ in range([column.title for column in app.tab.columns].index("for") + 1):
            await pilot.press("s")
        shown = [re.findall(r"\b\d\S*[smh]\b", line)[0] for line in lines(app)]
        assert shown == ["5.0s", "45s", "3m05s", "2h10m", "25h00m"]
        await pilot.press("r")
        assert [line.split()[2] for line in lines(app)] == list(ages)

    on_screen(dsn, steps)


def test_every_column_of_numbers_is_sorted_by_number(dsn: str, db: Db, clock: Clock) -> None:
    """Such a column is at the right of its cells; a text such as 12GiB would come before 8GiB."""
    stage(Q(db, clock))
    seen: set[str] = set()

    async def steps(pilot: Pilot[None], app: Top) -> None:
        for number, tab in enumerate(TABS, 1):
            await pilot.press(str(number))
            await settled(pilot)
            assert tab.keys.keys() <= {column.title for column in tab.columns}, tab.title
            for column in tab.columns:
                keys = {tab.key(column)(line.row) for line in app._answer[1]} - {None}
                if column.right or column.title in tab.keys:
                    assert {type(key) for key in keys} <= {int, float}, (tab.title, column.title, keys)
                    seen.update(f"{tab.title}.{column.title}" for key in keys if key)

    on_screen(dsn, steps)
    assert {"Work.left", "Queues.most", "Devices.memory", "Trips.ago", "Workers.silent"} <= seen, seen


def test_enter_shows_e_explains_and_c_asks_before_it_cancels(client: Client, dsn: str, fleet: int) -> None:
    def opened(app: Top) -> str:
        return str(app.screen.query_one(Static).render())

    async def steps(pilot: Pilot[None], app: Top) -> None:
        await pilot.press("enter")
        assert isinstance(app.screen, Pages)
        await settled(pilot)
        assert "train" in opened(app)
        await pilot.press("escape", "e")
        await settled(pilot)
        assert "runs for" in opened(app)
        await pilot.press("escape", "c")
        assert isinstance(app.screen, Question)
        assert f"Cancel {fleet}?" in opened(app)
        await pilot.press("enter")
        assert client.job(id=fleet).state == "running"
        await pilot.press("c", "y")
        await settled(pilot)
        assert client.job(id=fleet).state == "preempting"

    on_screen(dsn, steps)


def test_a_lock_that_another_holds_does_not_freeze_the_screen(dsn: str, fleet: int) -> None:
    async def steps(pilot: Pilot[None], app: Top) -> None:
        with psycopg.connect(dsn) as other:
            other.execute("lock table gangq.live_jobs in access exclusive mode")
            for key in ("enter", "e"):
                await pilot.press(key)
                assert isinstance(app.screen, Pages)
                assert f"gangq {'show' if key == 'enter' else 'explain'} {fleet}" in str(
                    app.screen.query_one(Static).render()
                )
                await pilot.press("escape")
                assert not isinstance(app.screen, Pages)
            await pilot.press("c", "y", "4")
            assert app.tab.title == "Workers"
            running = [worker for worker in app.workers if worker.is_running]
            assert {worker.name for worker in running} == {"_ask", "_cancel"}
            began = time.monotonic()
        await settled(pilot)
        assert time.monotonic() - began < 30
        assert lines(app)[0].startswith("w1 alpha live")

    on_screen(dsn, steps)


def test_q_ends_it_while_a_lock_holds_every_answer_back(dsn: str, fleet: int) -> None:
    terminal = Terminal(dsn, "top", TERM="xterm-256color")
    terminal.until(lambda said: "train" in said, 60)
    with psycopg.connect(dsn) as other:
        other.execute("lock table gangq.live_jobs in access exclusive mode")
        terminal.press("c")
        terminal.until(lambda said: f"Cancel {fleet}?" in said)
        terminal.press("y")
        # Ask again, and end. What is typed while the question closes is the question's.
        for _ in range(60):
            if terminal.process.poll() is not None:
                break
            terminal.press(" q")
            time.sleep(0.5)
        assert terminal.end(1) == 0


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

    on_screen(dsn, steps)


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

    on_screen(dsn, steps)


def test_in_80_columns_hosts_and_titles_are_whole(client: Client, dsn: str, fleet: int) -> None:
    hosts = ("gpu-node-00.example.org", "gpu-node-01.example.org")
    for number, host in enumerate(hosts):
        row = client.register_worker(
            name=f"gpu-node-0{number}-0",
            host=host,
            queues=["default"],
            slots=8,
            devices=[
                {"uuid": f"GPU-{number}", "index": 0, "model": "NVIDIA H100 80GB HBM3", "source": "declared"}
            ],
        )
        reading = {"gpu_pct": 87.0, "used_mb": 12288, "total_mb": 81920, "power_w": 301.5}
        client.heartbeat(incarnation=row.incarnation, readings=[{"uuid": f"GPU-{number}", **reading}])
    client.quarantine(device_uuid="GPU-0", reason="Xid 79: it has fallen off the bus")

    async def steps(pilot: Pilot[None], app: Top) -> None:
        for key, last_title, words in (
            ("2", " WHY", ("waits for a free worker",)),
            ("3", " GANGS WAITING", ("default",)),
            ("5", " REASON", hosts),
        ):
            await pilot.press(key)
            await settled(pilot)
            assert app._table().render_line(0).text.rstrip().endswith(last_title)
            for word in words:
                assert sum(word in line for line in lines(app)) == 1, (word, lines(app))

    on_screen(dsn, steps, size=(80, 24))


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(None, 5, ""), (3, None, ""), (0, 0, ""), (0, 4, "  0% " + "░" * 10), (9, 4, "100% " + "█" * 10)],
)
def test_a_bar_is_drawn_of_what_is_known(done: float | None, total: float | None, shown: str) -> None:
    assert bar(done, total) == shown


def test_what_remains_is_steps_by_rate() -> None:
    assert remaining_s(3, 12, 2.0) == pytest.approx(4.5)
    assert remaining_s(3, 12, None) is None


@pytest.mark.slow
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

    on_screen(dsn, steps)
    for query in (summary(), *(tab.query() for tab in TABS)):
        client.execute(query)


def test_in_a_real_terminal_of_80_columns_it_draws_and_q_ends_it(dsn: str, fleet: int) -> None:
    terminal = Terminal(dsn, "top", TERM="xterm-256color")
    terminal.until(lambda said: "train" in said, 60)
    terminal.press("q")
    assert terminal.end() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.said)
    assert "1 Work" in text
    assert "25%" in text


def test_without_a_terminal_it_is_refused(dsn: str) -> None:
    refused = gangq(dsn, "top")
    assert (refused.exit_code, "needs a terminal" in refused.stderr) == (2, True), refused.stderr


@pytest.mark.parametrize(
    "words", [("top", "--every", "0"), ("ls", "--watch", "0"), ("explain", "1", "--watch", "0.1")]
)
def test_no_look_is_repeated_without_a_pause(dsn: str, words: tuple[str, ...]) -> None:
    refused = gangq(dsn, *words)
    assert (refused.exit_code, "0.5s or more" in refused.stderr) == (2, True)

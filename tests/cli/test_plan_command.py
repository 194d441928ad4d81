"""gangq plan, replay and explain: what people read at three in the morning, and how bad input is refused."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import psycopg
import pytest

from cli.cli_process import answers, gangq, ok
from cli.terminal import Terminal, screen
from gangq.cli.parsing import NewWorkers
from gangq.client import Client


@pytest.fixture
def fleet(dsn: str, client: Client) -> str:
    """One worker, which runs a job for 20 minutes at most, and two gangs: g1 waits for its end, g2 for g1."""
    worker = client.register_worker(name="w1", host="h1", queues=["default"], slots=2, memory_mb=9)
    client.submit(task="busy", budget_s=1200, memory_mb=1)
    client.tick(force=True)
    client.claim(incarnation=worker.incarnation, max_jobs=1)
    client.submit_gang(task="train", size=2, budget_s=600)
    client.submit_gang(task="train", size=3, budget_s=600, wait_for_hardware=True)
    client.tick(force=True)
    return dsn


def test_a_plan_without_changes_lists_every_gang_that_waits(fleet: str) -> None:
    lines = ok(fleet, "plan").splitlines()
    assert lines[0].split() == ["GANG", "TASK", "QUEUE", "PRIO", "SIZE", "NEXT", "PASS", "HOSTS", "WHY"]
    assert [line.split()[0] for line in lines[1:]] == ["g1", "g2"]
    assert " in 1" in lines[1] or " in 20m00s " in lines[1]
    assert "waits" in lines[2]


def test_a_plan_with_changes_shows_now_and_then_of_what_differs(fleet: str, tmp_path: Path) -> None:
    (row,) = answers(fleet, "plan", "--add-worker", "2xw1")[:1]
    assert (row["gang_id"], row["before"], row["after"], row["hosts"]) == (1, "plan", "start", {"new1-1": 2})
    text = ok(fleet, "plan", "--add-worker", "2xw1")
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["g1", "g2"]
    assert "starts" in text.splitlines()[1]
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"task": "small", "size": 1, "priority": 9, "budget_s": 60}))
    rows = answers(
        fleet, "plan", "--submit", spec, "--priority", "2=50", "--cancel", "g1", "--quota", "default=gpus:8"
    )
    assert {row["gang_id"]: row["after"] for row in rows} == {None: "start", 2: "wait", 1: "gone"}
    assert "new" in ok(fleet, "plan", "--submit", "-", stdin=spec.read_text())
    assert ok(fleet, "ls", "gangs").count("train") == 2, "nothing was done"


def test_a_plan_and_explain_say_until_when_a_rate_holds_something(fleet: str, client: Client) -> None:
    client.set_queue(name="slow", rate="2/1h")
    client.register_worker(name="w2", host="h2", queues=["slow"], slots=5)
    for _ in range(2):
        client.submit_gang(task="paced", size=2, queue="slow", budget_s=60)
    client.tick(force=True)
    (why,) = [
        row["why"]
        for row in answers(fleet, "plan", "--quota", "slow=jobs:50", "--all")
        if row["gang_id"] == 4
    ]
    held = "the rate of queue slow, 2/1h, leaves 0 starts now, and it needs 2 starts"
    until = rf"{held}; in (1h00m|59m\d\ds) it may start"
    assert re.fullmatch(until, why)
    for words in (["g4"], ["g4", "--now"]):
        assert re.match(f"gang g4: {until} \\(decided ", ok(fleet, "explain", *words))


def test_a_plan_leaves_out_what_stays_as_it_is_unless_asked(fleet: str) -> None:
    result = gangq(fleet, "plan", "--quota", "default=gpus:100")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nothing changes" in result.stderr
    assert "g1" in ok(fleet, "plan", "--quota", "default=gpus:100", "--all")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--priority", "7"], "g7=50"),
        (["--priority", "x=5"], "no id"),
        (["--priority", "1=high"], "whole number"),
        (["--priority", "99=5"], "gang g99 is not live"),
        (["--quota", "default"], "gpus:8"),
        (["--quota", "default=gpus"], "gpus:8"),
        (["--quota", "nowhere=gpus:1"], "nowhere"),
        (["--add-worker", "many"], "2x8xH100"),
        (["--add-worker", "1xnobody"], "nobody"),
        (["--remove-host", "nowhere"], "nowhere"),
        (["--cancel", "99"], "99"),
        (["--submit", "-"], "JSON"),
        (["--submit", "nowhere.json"], "'nowhere.json': No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_refused_naming_it(fleet: str, args: list[str], named: str) -> None:
    result = gangq(fleet, "plan", *args, stdin="{")
    assert result.exit_code == 2, result
    assert named in result.stderr


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("2x8xH100", {"add_workers": 2, "gpus": 8, "labels": {"gpu": "h100"}}),
        ("1x4x80GiB", {"add_workers": 1, "gpus": 4, "vram_mb": 81920}),
        ("3xw1", {"add_workers": 3, "like": "w1"}),
        (
            "1x2xa100,slots=4,host=h9",
            {"add_workers": 1, "gpus": 2, "labels": {"gpu": "a100"}, "slots": 4, "host": "h9"},
        ),
    ],
)
def test_new_workers_are_read(text: str, change: dict[str, object]) -> None:
    assert NewWorkers().convert(text, None, None) == change


def test_explain_marks_what_holds_and_says_when_from_now(fleet: str) -> None:
    sentence, *brief = ok(fleet, "explain", "g1").splitlines()
    assert sentence.startswith("gang g1: ")
    assert "the nearest worker, w1, has 0 of 1 slot free (held by j1) (decided 0." in sentence
    assert [line.split()[:2] for line in brief] == [
        ["no", "state"], ["ok", "line"], ["->", "start"], ["->", "unblock"],
    ]  # fmt: skip
    lines = ok(fleet, "explain", "g1", "-v").splitlines()[1:]
    marks = {line.split()[1]: line.split()[0] for line in lines}
    assert marks == {
        "state": "no", "room": "no", "workers": "ok", "line": "ok", "start": "->", "unblock": "->",
    }  # fmt: skip
    assert "the nearest worker, w1, has 0 of 1 slot free (held by j1) (decided 0." in lines[1]
    starts = {line.index(line.split()[1]) for line in lines}
    assert starts == {4}, "the gates are a column"
    (start,) = [line for line in lines if "start " in line[:10]]
    assert "planned in 20m00s (" in start or "planned in 19m" in start
    assert "when these have ended: j1 (at the latest then, by its budget)" in start


def test_explain_is_one_screen_of_a_small_terminal(fleet: str) -> None:
    for words in (["g1"], ["g1", "-v"]):
        run = Terminal(fleet, "explain", *words, NO_COLOR="1")
        assert run.end() == 0
        shown = screen(run.said)
        assert shown[0].startswith("gang g1: ")
        assert len(shown) < 24
        assert max(map(len, shown)) <= 80


def test_explain_now_decides_again_without_effects(fleet: str, client: Client) -> None:
    client.register_worker(name="w2", host="h2", queues=["default"], slots=5)
    assert "decided now" not in ok(fleet, "explain", "g2")
    rows = {row["gate"]: row for row in answers(fleet, "explain", "g2", "--now")}
    assert rows["verdict"]["detail"] == "nothing holds it (decided now)"
    assert rows["start"]["detail"] == "a pass now starts it on w2: 3"
    assert client.gang(id=2).state == "blocked"
    assert "runs for" in ok(fleet, "explain", "1", "--now")


def test_replay_says_whether_each_pass_decides_the_same(dsn: str, client: Client) -> None:
    assert "no pass decided anything" in gangq(dsn, "replay").stderr
    with psycopg.connect(dsn, autocommit=True) as conn:
        client.register_worker(name="w1", host="h1", queues=["default"])
        client.submit_gang(task="a", size=1)
        client.tick(force=True)
        (row,) = answers(dsn, "replay", "--since", "1h")
        assert (row["same"], row["difference"]) == (None, "its board was not recorded")
        advice = "select gangq.configure('{\"record_decisions\": true}')"
        told = gangq(dsn, "replay")
        assert (told.stdout.count("not recorded"), told.stderr.count(advice)) == (1, 1)
        assert advice not in gangq(dsn, "replay", "--json").stderr
        conn.execute("update gangq.settings set record_decisions = true")
        client.register_worker(name="w2", host="h2", queues=["default"])
        client.submit_gang(task="a", size=1)
        client.tick(force=True)
        assert [row["same"] for row in answers(dsn, "replay")] == [None, True]
        assert advice not in gangq(dsn, "replay").stderr  # they are recorded now
        conn.execute("update gangq.passes set decisions = jsonb_set(decisions, '{0,ask}', '\"g7\"')")
        result = gangq(dsn, "replay")
        assert result.exit_code == 1
        assert '"ask": "g7"' in result.stdout


def test_a_board_is_saved_and_decided_on_without_a_database(dsn: str, client: Client, tmp_path: Path) -> None:
    client.register_worker(name="w1", host="h1", queues=["default"])
    one, two = (client.submit_gang(task="a", size=size, wait_for_hardware=True).gang_id for size in (1, 2))
    saved = tmp_path / "board.json"
    result = gangq(dsn, "board", "--save", saved)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"saved to {saved}: 1 worker, 0 units, 2 asks" in result.stderr
    shown = gangq(None, "decide", saved)
    assert shown.exit_code == 0, shown.output
    assert f"g{one}" in shown.stdout
    rows = {row["ask"]: row for row in answers(None, "decide", saved)}
    assert rows[f"g{one}"].keys() == {"ask", "action", "where", "stop", "why", "unblocks"}
    assert (rows[f"g{one}"]["action"], rows[f"g{one}"]["where"]) == ("start", {"w1": 1})
    assert rows[f"g{two}"]["action"] == "wait"
    assert (
        "would not start even when all that runs has ended; now 0 of its 2 members would fit"
        in rows[f"g{two}"]["why"]
    )
    told = gangq(dsn, "board").stdout
    assert answers(None, "decide", stdin=told) == list(rows.values())
    assert client.gang(id=one).state == "blocked", "nothing was carried out"


def test_a_board_is_saved_as_a_test_that_holds_what_is_decided_on_it(
    dsn: str, client: Client, tmp_path: Path
) -> None:
    client.register_worker(name="w1", host="h1", queues=["default"])
    client.submit_gang(task="a", size=1)
    saved = tmp_path / "test_saved.py"
    result = gangq(dsn, "board", "--make-test", saved)
    assert (result.exit_code, result.stdout) == (0, "")
    text = saved.read_text()
    test = runpy.run_path(str(saved))["test_what_is_decided"]
    test()
    changed = text.replace('"action": "start"', '"action": "wait"')
    assert changed != text
    saved.write_text(changed)
    with pytest.raises(AssertionError):
        runpy.run_path(str(saved))["test_what_is_decided"]()


@pytest.mark.parametrize("option", ["--save", "--make-test"])
def test_a_file_that_cannot_be_written_is_named(dsn: str, tmp_path: Path, option: str) -> None:
    result = gangq(dsn, "board", option, tmp_path / "missing" / "file")
    assert result.exit_code == 1
    assert "missing/file" in result.stderr
    assert "No such file or directory" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[]", "a board is an object"),
        ('{"now": 1, "format": 99}', "has format 99"),
        ('{"now": 1, "what": 2}', "board has unknown fields (what): it comes from a newer gangq"),
        ('{"format": 1}', "board lacks fields (now): it comes from an older gangq"),
        ('{"now": NaN}', "not a finite float"),
        ('{"now": 1, "asks": [{"id": "g1", "kind": 7}]}', "ask g1 is of kind 7, which is not on the board"),
    ],
)
def test_a_board_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "board.json"
    file.write_text(text)
    result = gangq(None, "decide", file)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_board_with_a_policy_of_a_newer_release_is_decided_and_says_what_it_does_not_know(
    tmp_path: Path,
) -> None:
    board = {
        "now": 1,
        "workers": [{"id": 1, "name": "w1", "host": "h1"}],
        "kinds": [{"id": 1, "roles": [{}]}, {"id": 2, "roles": [{}], "queue": "new"}],
        "asks": [{"id": "g1", "kind": 1}, {"id": "g2", "kind": 2}],
        "queues": [{"name": "default"}, {"name": "new", "policy": "random"}],
    }
    file = tmp_path / "board.json"
    file.write_text(json.dumps(board))
    rows = {row["ask"]: row for row in answers(None, "decide", file)}
    assert rows["g1"]["action"] == "start"
    assert rows["g2"]["why"] == "this library knows no policy 'random', so it cannot decide about it"

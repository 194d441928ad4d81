"""Tables on terminals of any width: no line is broken, what is left out is named, a pipe gets everything."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cli.cli_process import answers, gangq, ok, running
from gangq.cli import output
from gangq.cli.tables import Column, Listed, choose, columns, cut, pick, table
from gangq.client import Client
from gangq.client.rows import RetentionRow

ROWS: Sequence[Sequence[str]] = [
    ("17", "running", "train", "w" * 20, "waits for a gang of 4 that starts at 12:30, before it", ""),
    ("1234", "pending", "a task with a long name", "w2", "no worker offers 8 GPUs", ""),
]
TITLES = ("id", "state", "task", "worker", "why", "nothing")
RANKS = (0, 0, 0, 2, 0, 1)

Shown = Callable[[int, Sequence[Sequence[str]]], list[str]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """The lines of a table on a terminal of that width; 0: in a pipe. Last what standard error says, if anything."""

    def show(width: int, rows: Sequence[Sequence[str]]) -> list[str]:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: width > 0)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        columns = [
            Column(title, lambda row, i=i: row[i], right=not i, rank=RANKS[i])  # type: ignore[misc]
            for i, title in enumerate(TITLES)
        ]
        table(rows, columns, wide=False)
        out, err = capsys.readouterr()
        return [*out.splitlines(), *err.splitlines()]

    return show


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_broken(shown: Shown, width: int) -> None:
    lines = shown(width, ROWS)
    assert len([line for line in lines if not line.startswith("not shown")]) == 3
    assert max(len(line) for line in lines[:3]) <= width
    assert lines[1].split()[:2] == ["17", "running"]


def test_texts_are_cut_before_columns_go_and_those_that_go_are_named(shown: Shown) -> None:
    wide, at_80 = shown(200, ROWS), shown(80, ROWS)
    assert wide[0].split() == ["ID", "STATE", "TASK", "WORKER", "WHY"], (
        "a column that says nothing is not shown"
    )
    assert ROWS[0][4] in wide[1]
    assert "WORKER" not in at_80[0]
    assert "…" in at_80[1]
    assert at_80[3] == "not shown: worker (--wide or a pipe shows all)"


@pytest.mark.parametrize("unknown", ["?", "?,?,?,?", "?/?", ""])
def test_a_column_of_which_nothing_is_known_is_not_shown(shown: Shown, unknown: str) -> None:
    rows = [(*row[:3], unknown, *row[4:]) for row in ROWS]
    assert shown(200, rows)[0].split() == ["ID", "STATE", "TASK", "WHY"]
    assert "WORKER" in shown(0, rows)[0], "a pipe has it"
    assert not any("not shown: worker" in line for line in shown(80, rows)), "there is nothing to see"
    known = [(*rows[0][:3], "?,40%,?,?", *rows[0][4:]), rows[1]]
    assert shown(200, known)[0].split() == ["ID", "STATE", "TASK", "WORKER", "WHY"]


@pytest.mark.parametrize(("width", "lines"), [(40, 4), (60, 4), (80, 2), (100, 1), (0, 1)])
def test_a_list_in_the_last_column_is_whole_in_as_many_lines_as_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int, lines: int
) -> None:
    ids = [f"GPU-0000000{n}" for n in range(4)]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: width > 0)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    row = ("running", "on a host of a longer name", Listed(",".join(ids)))
    table([row], [Column(title, lambda row, i=i: row[i]) for i, title in enumerate(("state", "host", "ids"))])  # type: ignore[misc]
    shown = capsys.readouterr().out.splitlines()[1:]
    assert len(shown) == lines
    assert all(len(line) <= width for line in shown if width)
    assert "".join(line.split()[-1] for line in shown) == ",".join(ids)
    assert [line.startswith("running") for line in shown] == [True] + [False] * (lines - 1)


def test_a_pipe_gets_every_column_and_every_word(shown: Shown) -> None:
    lines = shown(0, ROWS)
    assert lines[0].split() == ["ID", "STATE", "TASK", "WORKER", "WHY", "NOTHING"]
    assert all(cell in lines[1] for cell in ROWS[0])
    assert lines[1] == lines[1].rstrip()


def test_wide_characters_take_two_columns_and_no_rows_are_a_header(shown: Shown) -> None:
    rows = [("1", "done", "画像の学習", "w", "x", ""), ("2", "done", "train", "w", "x", "")]
    first, second = shown(200, rows)[1:3]
    assert first.index("w") + len("画像の学習") == second.index("w")
    assert shown(200, []) == ["ID  STATE  TASK  WORKER  WHY  NOTHING"]


def test_wide_shows_everything_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    table(ROWS, [Column(title, lambda row, i=i: row[i], rank=i) for i, title in enumerate(TITLES)], wide=True)  # type: ignore[misc]
    out, err = capsys.readouterr()
    assert all(cell in out for row in ROWS for cell in row)
    assert err == ""


def test_columns_are_chosen_by_name_from_the_table_and_from_what_json_has(dsn: str, client: Client) -> None:
    (job,) = client.submit(task="train", priority=7)
    assert ok(dsn, "ls", "-o", "submitter,id,prio").split("\n")[:2] == [
        "SUBMITTER  ID  PRIO",
        f"postgres   {job:>2}     7",
    ]
    assert answers(dsn, "ls", "-o", "id,token") == [{"id": job, "token": client.job(id=job).token}]
    for form in ((), ("--json",)):
        refused = gangq(dsn, "ls", "-o", "id,colour", *form)
        assert (refused.exit_code, "'colour'" in refused.stderr, "submitter" in refused.stderr) == (
            2,
            True,
            True,
        )


def test_a_text_is_cut_in_a_time_that_grows_as_it_does() -> None:
    text = "e\N{COMBINING ACUTE ACCENT}日" * 50_000
    began = time.process_time()
    assert cut(text, 8) == "e\N{COMBINING ACUTE ACCENT}日" * 2 + "e\N{COMBINING ACUTE ACCENT}…"
    assert time.process_time() - began < 2
    assert (cut("日本", 4), cut("日本", 3), cut("日本", 2), cut("ab", 0)) == ("日本", "日…", "…", "…")


def test_ls_says_what_a_command_is_and_why_a_job_waits(dsn: str, client: Client) -> None:
    client.submit(task="command", payloads=[{"argv": ["./render", "a b.blend"]}])
    client.submit(task="train", gpus=1)
    shown = ok(dsn, "ls")
    assert "./render 'a b.blend'" in shown
    assert "no registered worker serves queue default with task train" in shown


def test_watch_answers_until_it_is_interrupted(dsn: str, client: Client, tmp_path: Path) -> None:
    with running(dsn, tmp_path, "watch", "ls", "--watch", "0.5s", "-o", "id,task") as watch:
        for task in ("first", "second"):
            client.submit(task=task)
            watch.until(lambda task=task: task in watch.out, f"{task} is shown")  # type: ignore[misc]
        assert watch.out.count("ID  TASK") >= 2
        watch.interrupt()
        assert watch.code() == 130


def test_a_time_is_told_from_now_and_as_a_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "clock", lambda: datetime(2026, 3, 4, 12, tzinfo=UTC))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert output.moment(datetime(2026, 3, 4, 11, 56, 55, tzinfo=UTC)) == "3m05s ago (11:56:55)"
    assert output.moment(datetime(2026, 3, 5, 14, tzinfo=UTC)) == "in 26h00m (2026-03-05 14:00:00)"
    assert output.moment(None) == ""


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (None, ""), (0.44, "0.4s"), (9.96, "10.0s"), (59.4, "59s"), (60, "1m00s"), (185, "3m05s"), (7800, "2h10m"),
        (172799, "47h59m"), (273600, "3d04h"), (-75, "-1m15s"), (-2, "-2.0s"),
    ],
)  # fmt: skip
def test_a_length_of_time_is_short(length: float | None, text: str) -> None:
    assert output.seconds(length) == text


def test_a_field_called_class_is_asked_for_by_that_name() -> None:
    row = RetentionRow(**{**dict.fromkeys(RetentionRow._fields), "class_": "events"})  # type: ignore[arg-type]
    (column,) = choose([], ["class"], row)
    assert column.cell(row) == "events"
    assert pick(row, ["class"]) == {"class": "events"}


def test_a_column_names_its_field_and_the_fields_name_says_how_it_looks() -> None:
    row = {
        "silent_s": 185.0,
        "vram_mb": 24576,
        "reading": {"gpu_pct": 40.0},
        "gang_id": 7,
        "hosts": ["a", "b"],
    }
    names = "silent=silent_s vram=vram_mb busy=reading.gpu_pct power=reading.power_w gang hosts"
    assert [column.cell(row) for column in columns(names)] == ["3m05s", "24GiB", "40%", "?", "g7", "a,b"]
    assert [column.value and column.value(row) for column in columns(names)] == [
        185.0,
        24576,
        40.0,
        None,
        7,
        "a,b",
    ]

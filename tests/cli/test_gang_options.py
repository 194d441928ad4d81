"""What a gang can ask for, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cli.cli_process import answers, gangq, ok, running
from gangq.client import Client

Db = psycopg.Connection[dict[str, Any]]


def roles(db: Db) -> list[dict[str, Any]]:
    """The roles of the latest gang."""
    return db.execute(
        "select r.name, r.min_members as least, r.max_members as most, r.strategy, r.balanced, s.task, s.gpus, "
        "s.labels, s.selector, s.tolerates from gangq.kind_roles r join gangq.shapes s on s.id = r.shape_id "
        "where r.kind_id = (select kind_id from gangq.live_gangs order by id desc limit 1) order by r.ordinal"
    ).fetchall()


def gang(db: Db) -> dict[str, Any]:
    """The latest gang, with its kind."""
    return db.execute(
        "select g.*, k.require, k.prefer, k.apart from gangq.live_gangs g "
        "join gangq.gang_kinds k on k.id = g.kind_id order by g.id desc limit 1"
    ).fetchall()[0]


def test_roles_are_written_as_pairs_or_as_json(dsn: str, db: Db) -> None:
    ok(
        dsn,
        "submit",
        "train",
        "n=1",
        "--role",
        "name=driver,count=1,task=drive",
        "--role",
        'name=executor,count=10,min=6,gpus=8,label.site=a,select="gpu=h100,!spot",select=rack in (a,b),tolerate=spot,'
        "strategy=spread,balanced,budget=2h",
        "--role",
        '{"name": "sink", "count": 1, "payload": {"n": 2}}',
        "--completion",
        "driver",
        "--failure-policy",
        "shrink",
    )
    driver, executor, sink = roles(db)
    assert (driver["name"], driver["task"], driver["least"], driver["most"]) == ("driver", "drive", 1, 1)
    assert (executor["least"], executor["most"], executor["gpus"], executor["labels"]) == (
        6,
        10,
        8,
        {"site": "a"},
    )
    assert [(c["key"], c["op"]) for c in executor["selector"]] == [
        ("gpu", "="),
        ("rack", "in"),
        ("spot", "absent"),
    ]
    assert (executor["tolerates"], executor["strategy"], executor["balanced"]) == (["spot"], "spread", True)
    assert (sink["name"], sink["task"]) == ("sink", "train")
    made = gang(db)
    assert (made["completion"], made["failure_policy"], made["budget_s"]) == ("driver", "shrink", 7200)
    payloads = db.execute("select payload, budget_s from gangq.live_jobs order by rank").fetchall()
    assert [p["payload"]["n"] for p in payloads] == [1] * 11 + [2]
    assert payloads[1]["budget_s"] == 7200


def test_every_option_of_a_gang_arrives(dsn: str, db: Db, client: Client) -> None:
    client.configure(topology=["zone", "rack", "host"])
    words = "--gang 4 --min 2 --strategy spread --require zone --prefer rack --balanced --apart x "
    words += "--failure-policy fail --completion member --timeout 5m --timeout-style hard --no-preempt"
    words += " --tolerate spot --tolerate old=yes"
    ok(
        dsn,
        "submit",
        "train",
        *words.split(),
        "--select",
        "gpu=h100, !spot",
        "--select",
        "nvme",
        "--avoid-host",
        "h1",
    )
    (role,) = roles(db)
    assert (role["least"], role["most"], role["strategy"], role["balanced"]) == (2, 4, "spread", True)
    assert role["tolerates"] == ["old=yes", "spot"]
    assert [(c["key"], c["op"], c["values"]) for c in role["selector"]] == [
        ("gpu", "=", ["h100"]),
        ("host", "notin", ["h1"]),
        ("nvme", "exists", []),
        ("spot", "absent", []),
    ]
    made = gang(db)
    columns = [
        "require",
        "prefer",
        "apart",
        "failure_policy",
        "completion",
        "timeout_s",
        "timeout_style",
        "preemptible",
    ]
    assert [made[c] for c in columns] == ["zone", "rack", "x", "fail", "member", 300, "hard", False]


def test_a_job_selects_and_tolerates_too(dsn: str, db: Db) -> None:
    ok(
        dsn,
        "submit",
        "a",
        "--select",
        "driver>=550",
        "--tolerate",
        "spot",
        "--avoid-host",
        "h1",
        "--avoid-host",
        "h2",
    )
    (shape,) = db.execute("select selector, tolerates from gangq.shapes").fetchall()
    assert [(c["key"], c["op"], c["values"]) for c in shape["selector"]] == [
        ("driver", ">=", [550]),
        ("host", "notin", ["h1", "h2"]),
    ]
    assert shape["tolerates"] == ["spot"]


def test_a_spec_is_a_file_and_the_command_line_comes_first(dsn: str, db: Db, tmp_path: Path) -> None:
    spec = tmp_path / "gang.json"
    spec.write_text(
        json.dumps(
            {
                "task": "train",
                "roles": [{"name": "driver", "count": 1}, {"name": "executor", "count": 3, "min": 1}],
                "payload": {"n": 1},
                "priority": 5,
                "timeout_s": 60,
                "selector": "gpu=h100",
                "preemptible": False,
            }
        )
    )
    ok(dsn, "submit", "--spec", spec)
    made = gang(db)
    assert [r["name"] for r in roles(db)] == ["driver", "executor"]
    assert (made["priority"], made["timeout_s"], made["preemptible"]) == (5, 60, False)
    ok(dsn, "submit", "other", "n=2", "--spec", spec, "--priority", "7", "--select", "!spot", "--gang", "2")
    (role,) = roles(db)
    assert (role["task"], role["most"], [c["key"] for c in role["selector"]]) == ("other", 2, ["spot"])
    assert (gang(db)["priority"], gang(db)["timeout_s"]) == (7, 60)
    payloads = db.execute("select payload from gangq.live_jobs where gang_id = 2").fetchall()
    assert [p["payload"] for p in payloads] == [{"n": 2}] * 2
    assert ok(dsn, "submit", "--spec", "-", stdin='{"task": "a", "size": 1}') == "g3\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "--min", "1"], "--min is for gangs"),
        (["a", "--strategy", "spread"], "--strategy is for gangs"),
        (["a", "--no-preempt"], "--no-preempt is for gangs"),
        (["a", "--timeout", "5m"], "--timeout is for gangs"),
        (["a", "--gang", "2", "--role", "name=x,count=1"], "either a size or roles"),
        (["a", "--role", "name=x,count=1", "--count", "2"], "exclude each other"),
        (["a", "--role", "name=x"], "it has no count"),
        (["a", "--role", "executor:2-4"], "write name=executor,count=10"),
        (["a", "--role", "count=1"], "it has no name"),
        (["a", "--role", "name=x,count=one"], "count is 'one': it must be a whole number"),
        (["a", "--role", "name=x,count=1,cpus=some"], "cpus is 'some': it must be a number"),
        (["a", "--role", "name=x,count=1,gpu=1"], "unknown field 'gpu'"),
        (["a", "--role", "name=x,count=1,gpus"], "'gpus' is not key=value"),
        (["a", "--role", "name=x,count=1,count=2"], "count is given twice"),
        (["a", "--role", "name=x,count=1,budget=long"], "'long' is no length of time"),
        (["a", "--role", "name=x,count=1,select=gpu>"], "a number missing"),
        (["a", "--role", '{"name": "x", '], "Expecting"),
        (["a", "--role", "name=x,count=1", "--role", "name=x,count=2"], "two roles are called 'x'"),
        (["a", "--select", "gpu="], "a value missing"),
        ([], "name the task"),
        (["--spec", "-"], 'neither "size" nor "roles"'),
    ],
)
def test_what_makes_no_sense_is_refused_and_says_why(dsn: str, words: list[str], said: str) -> None:
    result = gangq(dsn, "submit", *words, stdin="{}")
    assert result.exit_code == 2, result.output
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [("[]", "must be a JSON object"), ("{", "is not JSON"), ('{"sizes": 2}', "has the key 'sizes'")],
)
def test_a_bad_spec_is_refused_naming_the_file(dsn: str, tmp_path: Path, text: str, said: str) -> None:
    spec = tmp_path / "gang.json"
    spec.write_text(text)
    result = gangq(dsn, "submit", "a", "--spec", spec)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "gang.json" in result.stderr


def test_a_command_runs_in_roles(dsn: str, db: Db, tmp_path: Path) -> None:
    spec = tmp_path / "gang.json"
    spec.write_text(
        '{"roles": [{"name": "a", "count": 1}, {"name": "b", "count": 2, "gpus": 1}], "timeout_s": 9}'
    )
    ok(dsn, "run", "--detach", "--spec", spec, "--", "echo", "hello")
    assert [(r["name"], r["most"], r["task"]) for r in roles(db)] == [
        ("a", 1, "command"),
        ("b", 2, "command"),
    ]
    assert gang(db)["timeout_s"] == 9
    ok(dsn, "run", "--detach", "--role", "name=a,count=2,min=1", "--tolerate", "spot", "--", "echo", "hello")
    assert (gang(db)["size"], gang(db)["checkpoint_mode"]) == (2, "rank0")
    spec.write_text('{"size": 2, "task": "train"}')
    result = gangq(dsn, "run", "--detach", "--spec", spec, "--", "echo", "hello")
    assert result.exit_code == 2
    assert "has the key 'task'" in result.stderr


def test_a_worker_is_tainted_by_itself_and_by_an_operator(dsn: str, tmp_path: Path) -> None:
    job = int(ok(dsn, "submit", "a", "--tolerate", "spot"))
    with running(
        dsn, tmp_path, "w", "worker", "--name", "w1", "--once", "--devices", "none", "--taint", "spot=yes"
    ) as w:
        assert w.code() == 0, w.err
    assert answers(dsn, "workers")[0]["taints"] == ["spot=yes"]
    (said,) = answers(dsn, "taint", "w1", "repair", "old=yes")
    assert said == {"worker": "w1", "taints": ["repair", "old=yes"]}
    assert answers(dsn, "workers")[0]["taints"] == ["spot=yes", "old=yes", "repair"]
    assert ok(dsn, "taint", "w1") == "worker w1 has no taints but its own\n"
    assert answers(dsn, "workers")[0]["taints"] == ["spot=yes"]
    assert gangq(dsn, "taint", "nobody", "x").exit_code == 2
    assert job

"""The benchmark itself, on a PostgreSQL of its own: small, but all that it does to a queue."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import measures
import per_job
import psycopg
import pytest
import run
from measures import Sizes
from rich.console import Console
from systems import Absent, load

from gangq.embedded import Server

pytestmark = pytest.mark.slow

TINY = Sizes(
    drain=400, drain_single=20, enqueue_single=20, enqueue_many=200, pickups=10, warm_ups=1,
    per_job=200, per_job_single=20,
)  # fmt: skip
MEMORY = Path("/dev/shm")
FAMILIES = ("drain", "drain2", "single", "enqueue", "pickup", "work")
REQUESTS = {
    f"a request_id costs, {how}, {what}"
    for how in ("one at a time", "in calls of 1,000") for what in ("server CPU", "time")
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little of everything, on a server whose disk is memory."""
    monkeypatch.setattr(measures, "QUICK", TINY)
    monkeypatch.setattr(per_job, "_SETTLE_S", (0.0, 0.0))
    if MEMORY.is_dir():
        monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))


def test_every_measure_of_a_queue_is_taken_of_gangq_and_of_the_floor_and_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "bench.json"
    assert run.main(["--quick", "--json", str(path), "--only", "gangq", "floor", "requests", *FAMILIES]) == 0
    written = json.loads(path.read_text())
    found = {(row["measure"], row["system"]): row for row in written["summary"]}
    taken = {measure for measure, system in found if system == "gangq"}
    assert {measure for measure, system in found if system == "floor"} == taken - REQUESTS
    assert taken >= REQUESTS
    assert taken >= {
        "drain, batch 100", "drain, best settings", "drain, two processes", "two processes to one",
        "drain, one at a time", "enqueue, one by one", "enqueue, 200 in one call",
        "pick-up by an idle worker, p50", "pick-up by an idle worker, p99", "WAL, in batches", "WAL, one at a time",
    }  # fmt: skip
    assert all(row["median"] > 0 for row in found.values() if row["unit"] in ("jobs/s", "times", "bytes/job"))
    # So few calls say what it costs only of the CPU of long ones; make bench finds 1.05 or less of all four.
    assert all(found[measure, "gangq"]["median"] > 0.2 for measure in REQUESTS)
    assert found["a request_id costs, in calls of 1,000, server CPU", "gangq"]["median"] < 1.25
    # It inserts, claims and finishes, and looks in vain now and then.
    assert 0 <= found["statements, one at a time", "floor"]["median"] * 20 - 3 * 20 <= 10
    assert 0 <= found["statements, in batches", "floor"]["median"] * 200 - (1 + 2 * 2) <= 10
    assert found["drain, batch 100", "gangq"]["ratio"] == 1.0
    drawn = {picture.name for picture in tmp_path.glob("*.svg")}
    assert drawn == {f"bench-{family}.svg" for family in ("drain", "single", "enqueue", "pickup", "wal")}


def test_a_queue_whose_package_is_not_installed_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "procrastinate", None)
    monkeypatch.delitem(sys.modules, "systems.procrastinate_system", raising=False)
    console = Console(width=200, record=True, quiet=False)
    with console.capture() as said:
        found = run.found(["gangq", "procrastinate"], run.newest(None), console)
    assert list(found) == ["gangq"]
    assert "not measured: procrastinate (" in said.get()
    assert "gangq[bench]" in said.get()


def test_graphile_worker_without_node_is_said_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Absent, match="node and npm not found"):
        load("graphile").prepare(tmp_path)


def test_a_measurement_that_fails_is_said_and_the_others_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = type(load("floor"))

    def not_today(self: object, dsn: str) -> None:
        raise RuntimeError("not [today]")

    monkeypatch.setattr(broken, "install", not_today)
    path = tmp_path / "bench.json"
    assert run.main(["--quick", "--json", str(path), "--only", "gangq", "floor", "enqueue"]) == 1
    assert {row["system"] for row in json.loads(path.read_text())["summary"]} == {"gangq"}
    assert "not [today]" in capsys.readouterr().out


def test_a_slow_disk_is_one_whose_every_flush_waits() -> None:
    binaries = run.newest(None)
    with Server.temporary(binaries=binaries, settings=run.settings(20_000, binaries), durable=True) as server:
        with psycopg.connect(server.create_database("slow"), autocommit=True) as connection:
            connection.execute("create table one (n integer)")
            began = time.monotonic()
            connection.execute("insert into one values (1)")
            assert time.monotonic() - began >= 0.02


def test_what_is_named_is_run_and_nothing_else() -> None:
    systems = {name: load(name) for name in ("gangq", "floor", "fused", "insert", "notify", "pgbench")}

    def plan(*only: str) -> list[tuple[str, list[str]]]:
        named = {n: s for n, s in systems.items() if n in only} or systems
        return [(m.name, [s.name for s in takers]) for m, takers in run.chosen(list(only), named)]

    assert plan("drain", "gangq", "fused") == [("drain", ["gangq", "fused"])]
    assert plan("single", "pgbench") == [("single", ["pgbench"])]
    assert plan("insert") == [("enqueue", ["insert"])]
    assert plan("pickup") == [("pickup", ["gangq", "floor", "notify"])]

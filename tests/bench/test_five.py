"""The harness of the five numbers, on little of each: what each number is, and that a measurement can fail."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import five
import newcomer
import psycopg
import pytest
import recovery

from gangq.embedded import Server

pytestmark = pytest.mark.slow

MEMORY = Path("/dev/shm")


def test_planned_starts_and_explanations_are_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if MEMORY.is_dir():
        monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))
    few = ["--quick", "--jobs", "250", "--learned", "5", "--explanations", "4", "--out", str(tmp_path)]
    assert five.main([*few, "--only", "starts", "explanations"]) == 0
    (written,) = tmp_path.glob("*.json")
    lines = {(line["number"], line["of"]): line["seen"] for line in json.loads(written.read_text())["lines"]}
    assert lines["error of planned starts, minutes", "durations exact, 250 jobs"].startswith("median ")
    (seen,) = [seen for (number, _), seen in lines.items() if number.startswith("explanations")]
    assert seen == "4 of 4"
    assert "planned start" in written.with_suffix(".svg").read_text()
    assert written.with_suffix(".md").read_text().count("\n") == 2 + len(lines)


def test_nothing_seen_bounds_a_rate_by_three_over_the_time() -> None:
    assert five.at_most(730.5) == pytest.approx(3)
    with pytest.raises(ValueError, match="nothing seen"):
        five.at_most(10, seen=1)


def test_a_percentile_is_one_of_the_values() -> None:
    assert five.percentile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert five.percentile([float(n) for n in range(1, 11)], 0.9) == 9.0


def test_the_newcomer_types_what_readme_says() -> None:
    readme = (newcomer.TOP / "README.md").read_text(encoding="utf-8")
    tasks, commands, client = newcomer.blocks(readme)
    assert tasks.startswith("# tasks.py")
    assert [line.split()[1] for line in commands if line.startswith("gangq ")] == ["migrate", "worker"]
    assert client.splitlines()[-1].startswith("print(train.gang(4)")
    assert f"--devices {newcomer.DEVICES}" in readme


def test_a_gang_whose_rank_was_killed_is_timed_until_it_is_whole(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "DEATHS", {"rank": recovery.kill_rank})
    took = recovery.seconds_to_whole(dsn, tmp_path, rounds=1)
    assert list(took) == ["rank"]
    assert all(0 < seconds < 120 for seconds in took["rank"])


def test_a_gang_that_is_never_whole_again_fails_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_PATIENCE_S", 0.1)
    ranks = recovery.Ranks(tmp_path / "ranks")
    ranks.path.write_text("".join(f"1 {rank} 7 0.5\n" for rank in range(recovery.RANKS)))
    assert len(ranks.until_whole(after_epoch=0)) == recovery.RANKS
    with ranks.path.open("a") as file:
        file.writelines(f"2 {rank} 8 0.7\n" for rank in range(1, recovery.RANKS))
    with pytest.raises(RuntimeError, match="not whole"):
        ranks.until_whole(after_epoch=1)


def test_the_flaps_are_run_and_a_run_without_a_result_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = five.Sizes(rounds=1, soak_min=0.05, jobs=1, learned=1, explanations=1, seed=1)
    (line,) = five.kills(server, sizes).lines
    assert line.seen.startswith("0 killed; 95 % bound ")
    assert "flaps, 0.01 worker-hours" in line.of
    monkeypatch.setattr(five, "_SOAK", "tests/process/none.py")
    with pytest.raises(RuntimeError, match="came to no end"):
        five.kills(server, sizes)


def test_the_newcomers_commands_run_and_one_that_fails_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Path(psycopg.__file__).parents[1]
    tmp_path.chmod(0o755)
    taken = newcomer.steps(tmp_path, installed)
    assert [step.command for step in taken][-2:] == ["gangq migrate", "python first.py"]
    assert all(step.took_s > 0 for step in taken)
    with pytest.raises(RuntimeError, match="false ended with 1"):
        newcomer._timed(["false"], "false", tmp_path, {"PATH": "/usr/bin:/bin"})

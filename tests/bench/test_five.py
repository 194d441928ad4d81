"""The harness of the five numbers, on little of what is cheap: its table, its picture, and what each number is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import five
import newcomer
import pytest

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

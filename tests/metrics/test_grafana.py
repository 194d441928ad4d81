"""The dashboard and the alert rules ask for metrics that exist, by labels and values that those have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gangq.client import Client
from gangq.metrics import METRICS

HERE = Path(__file__).parents[2] / "examples/grafana"
BOARD: dict[str, Any] = json.loads((HERE / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0]["rules"]
EXPRESSIONS = {f"{p['title']} {t['refId']}": t["expr"] for p in BOARD["panels"] for t in p["targets"]}
EXPRESSIONS |= {rule["alert"]: rule["expr"] for rule in RULES}
LABELS = {
    name: set(metric.labels)
    for metric in METRICS
    for name in (
        [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
        if metric.type == "histogram"
        else [metric.name]
    )
}
COUNTERS = {name for name in LABELS if name.endswith(("_total", "_bucket"))}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_asks_for_what_there_is(name: str) -> None:
    expression = EXPRESSIONS[name]
    asked = re.findall(r"(gangq_\w+)(?:\{([^}]*)\})?(\[)?", expression)
    assert asked
    for metric, conditions, over_time in asked:
        assert metric in LABELS, metric
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", conditions)) <= LABELS[metric], metric
        assert (metric in COUNTERS) == bool(over_time), "a counter is asked for its growth, a gauge is not"
    known = set().union(*(LABELS[metric] for metric, *_ in asked))
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(labels.replace(" ", "").split(",")) <= known


def test_every_value_of_a_label_that_is_asked_for_exists(client: Client) -> None:
    devices = [{"uuid": "G", "index": 0, "vram_mb": 1024, "source": "declared"}]
    client.register_worker(name="d", host="h", queues=["default"], devices=devices)
    told = {(row.name, label, text) for row in client.metrics() for label, text in row.labels.items()}
    told |= {("gangq_jobs_ended_total", "outcome", text) for text in ("done", "failed", "cancelled")}
    for expression in EXPRESSIONS.values():
        for metric, conditions in re.findall(r"(gangq_\w+)\{([^}]*)\}", expression):
            for label, values in re.findall(r'(\w+)=~?"([^"$]+)"', conditions):
                for text in values.split("|"):
                    assert (metric, label, text) in told


def test_legends_name_labels_that_are_left() -> None:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_do_not_overlap_and_have_titles_of_their_own() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not mine & cells
        assert at["x"] + at["w"] <= 24
        cells |= mine
    assert len({panel["title"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_every_rule_says_what_is_wrong_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["alert"].startswith("Gangq")
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", HERE / "alerts.yaml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

"""Numbers, tables and pictures of the benchmark."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from measures import Result, percentile
from per_job import count_statements
from pictures import FAMILIES, svg
from progress import Progress
from report import Sample, Summary, summarise

SVG = "{http://www.w3.org/2000/svg}"


def sample(turn: int, system: str, value: float, measure: str = "drain") -> Sample:
    return Sample(turn, system, 0.1, Result(measure, "jobs/s", value))


def summary(system: str, median: float, least: float, most: float) -> Summary:
    return Summary("pick-up by an idle worker, p50", "ms", system, median, least, most, 1.0, False)


def test_a_ratio_is_the_median_of_the_ratios_within_a_round() -> None:
    drifting = [(1, 100.0, 50.0), (2, 200.0, 100.0), (3, 400.0, 20.0)]
    rows = summarise(
        [
            s
            for turn, ours, theirs in drifting
            for s in (sample(turn, "floor", theirs), sample(turn, "gangq", ours))
        ]
    )
    assert [row.system for row in rows] == ["gangq", "floor"]
    floor = rows[1]
    assert (floor.median, floor.least, floor.most) == (50.0, 20.0, 100.0)
    assert (
        floor.ratio == 0.5
    )  # Of 0.5, 0.5 and 2; that of the medians is 0.5 as well only by chance of the order.


def test_without_gangq_in_the_same_round_there_is_no_ratio() -> None:
    rows = summarise(
        [sample(1, "gangq", 100.0), sample(2, "floor", 50.0), sample(2, "pgqueuer", 5.0, "other")]
    )
    assert [(row.measure, row.system, row.ratio) for row in rows] == [
        ("drain", "gangq", 1.0), ("drain", "floor", None), ("other", "pgqueuer", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "p50", "p99"),
    [(range(1, 101), 50, 99), (range(1, 201), 100, 198), ([7.0], 7.0, 7.0), ([2, 1], 1, 2)],
)
def test_a_percentile_is_the_smallest_value_that_so_many_do_not_exceed(
    values: list[float], p50: float, p99: float
) -> None:
    assert (percentile(list(values), 0.5), percentile(list(values), 0.99)) == (p50, p99)


def test_statements_are_those_that_clients_of_one_database_sent() -> None:
    log = "\n".join(
        [
            "bench_1 LOG:  statement: BEGIN",
            "bench_1 LOG:  execute _pg3_0: select 1",
            "\tfrom bench_1 LOG:  statement: no line of its own",
            "bench_1 ERROR:  no",
            "bench_1 STATEMENT:  select 1/0",
            "bench_12 LOG:  statement: select 2",
            " LOG:  checkpoint starting",
            "bench_1 LOG:  statement: COMMIT",
        ]
    )
    assert count_statements(log, "bench_1") == 3


def test_what_is_left_is_guessed_from_the_same_step_then_the_same_measure_then_any() -> None:
    now = [0.0]
    steps = [("drain", "gangq"), ("single", "gangq"), ("single", "floor")]
    progress = Progress(steps, 2, now=lambda: now[0])
    assert progress.begin(steps[0]) == "    0 s  1/6"
    now[0] = 10.0
    progress.end(steps[0])
    assert progress.begin(steps[1]) == "   10 s  2/6, about 50 s left"
    now[0] = 12.0
    progress.end(steps[1])
    assert progress.begin(steps[2]) == "   12 s  3/6, about 16 s left"
    now[0] = 112.0
    progress.end(steps[2])
    assert progress.left_s() == 10 + 2 + 100
    for step in steps[:2]:
        progress.begin(step)
        progress.end(step)
    assert progress.left_s() == 100


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_bars_are_as_long_as_what_they_show_and_stay_on_the_page(family: object) -> None:
    assert family in FAMILIES
    values = [("gangq", 1.5, 1.0, 2.0), ("floor", 0.4, 0.3, 0.5), ("dbos", 500.0, 400.0, 1035.0)]
    page = ElementTree.fromstring(svg(family, [summary(*value) for value in values]))  # type: ignore[arg-type]
    wide, high = float(page.attrib["width"]), float(page.attrib["height"])
    boxes = [{k: float(v) for k, v in r.attrib.items() if k != "fill"} for r in page.iter(f"{SVG}rect")]
    for box in boxes:
        assert box.get("x", 0) >= 0
        assert box.get("x", 0) + box["width"] <= wide
        assert box.get("y", 0) + box["height"] <= high
    bars = [box["width"] for box in boxes if box["height"] == 14.0]
    lines = [box["width"] for box in boxes if box["height"] == 2.0]
    assert len(bars) == len(lines) == 3
    if family.logarithmic:  # type: ignore[attr-defined]
        # Tenfold is the same distance everywhere: from 0.1 on, the end of the page's bars being at 1035.
        assert bars[1] < bars[0] < bars[2]
        assert bars[2] / bars[1] == pytest.approx(3.69897 / 0.60206, rel=1e-3)
    else:
        assert bars[2] / bars[0] == pytest.approx(500 / 1.5, rel=1e-3)
    words = [element.text for element in page.iter(f"{SVG}text")]
    assert {"gangq", "floor", "dbos", "500 (1.00)", "0.40 (1.00)", "1.50"} <= set(words)


def test_what_took_no_time_at_all_is_drawn_without_a_bar() -> None:
    page = svg(next(f for f in FAMILIES if f.logarithmic), [summary("gangq", 0.0, 0.0, 0.0)])
    assert "gangq" in page

"""One way to say how long."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from gangq import Client, Role
from gangq.client.verbs import Verbs
from gangq.durations import parse_seconds, seconds
from gangq.errors import InvalidInput
from gangq.testing import FakeContext
from gangq.worker.options import WorkerOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_each_way_says_the_same_seconds(given: Any, expected: float) -> None:
    assert seconds(given, "budget") == expected


@pytest.mark.parametrize("given", ["soon", "5y", "", None, True, float("nan"), float("inf"), [1]])
def test_what_is_no_duration_is_refused_by_name_and_with_what_would_be_one(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r'budget is .*"90s"'):
        seconds(given, "budget")


@pytest.mark.parametrize("given", [-1, "11s", timedelta(seconds=-1)])
def test_what_is_out_of_range_is_refused_with_the_range(given: Any) -> None:
    with pytest.raises(InvalidInput, match="0 to 10 seconds are possible"):
        seconds(given, "budget", most=10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("1h30m", 5400), ("250ms", 0.25), ("2d", 172800), ("", None)],
)
def test_lengths_of_time_are_read(text: str, expected: float | None) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["h", "1h30", "-5", "1y", "1 h", "nan", "١s"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    assert parse_seconds(text) is None


@pytest.mark.parametrize("given", [90, "90s", timedelta(seconds=90)])
def test_each_way_is_taken_wherever_a_length_of_time_is(given: Any) -> None:
    def sent(query: Any, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(query.params[name])
        return found

    assert sent(Verbs.submit(task="t", budget_s=given), "options")["budget_s"] == 90
    gang = sent(Verbs.submit_gang(task="t", size=2, timeout_s=given, claim_deadline_s=given), "options")
    assert (gang["timeout_s"], gang["claim_deadline_s"]) == (90, 90)
    assert Role("a", 1, budget_s=given).as_json()["budget_s"] == 90
    assert Verbs.submit_unique(unique_key="k", task="t", keep_s=given).params["keep_s"] == 90
    assert sent(Verbs.set_queue(name="q", backoff_s=given), "settings") == {"backoff_s": 90}
    assert sent(Verbs.set_task(task="t", budget_s=given), "settings") == {"budget_s": 90}
    assert sent(Verbs.configure(lease_s=given, retention_short="7 days"), "settings") == {
        "lease_s": 90,
        "retention_short": "7 days",
    }
    worker = Verbs.register_worker(name="w", host="h", queues=["q"], lease_s=given)
    assert sent(worker, "options")["lease_s"] == 90
    options = WorkerOptions(lease_s=given, drain_timeout_s=given, address="localhost").resolved()
    assert (options.lease_s, options.drain_timeout_s) == (90, 90)
    assert Client("postgresql://nowhere.invalid/x", timeout_s=given).timeout_s == 90


def test_a_handler_waits_so_long_too() -> None:
    ctx = FakeContext()
    assert not ctx.wait_stopping("1ms")
    with pytest.raises(InvalidInput, match="timeout is 'soon'"):
        ctx.wait_stopping("soon")

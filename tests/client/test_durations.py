"""One way to say how long."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from gangq.durations import parse_seconds, seconds
from gangq.errors import InvalidInput


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

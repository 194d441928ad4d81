"""Which errors are tried again, and when: decided where the error was caught."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.errors import Fail, GangqError, InvalidInput, RetryLater
from gangq.retry import Again, Retry, after


def delays(policy: Retry, attempt: int) -> list[float]:
    found = [policy.after(OSError(), attempt) for _ in range(200)]
    assert all(again.retryable and again.delay_s is not None for again in found)
    return [again.delay_s or 0.0 for again in found]


@pytest.mark.parametrize(("attempt", "most"), [(1, 10), (2, 20), (3, 40), (7, 600), (1000, 600)])
def test_the_pause_doubles_up_to_the_longest_and_half_of_it_is_random(attempt: int, most: float) -> None:
    found = delays(Retry(backoff="10s..10m"), attempt)
    assert most / 2 <= min(found) < max(found) <= most
    assert max(found) - min(found) > most / 4


def test_one_pause_stays_the_same() -> None:
    assert max(delays(Retry(backoff=30), 1)) <= 30
    assert min(delays(Retry(backoff=30), 9)) >= 15


def test_without_a_backoff_the_queue_has_its_own() -> None:
    assert Retry(5).after(OSError(), 1) == Again(True, None)
    assert after(None, OSError(), 1) == Again(True, None)


@pytest.mark.parametrize(
    ("policy", "problem", "retryable"),
    [
        (Retry(on=(OSError,)), ConnectionError(), True),
        (Retry(on=(OSError,)), ValueError(), False),
        (Retry(never=(FileNotFoundError,)), FileNotFoundError(), False),
        (Retry(on=(OSError,), never=(FileNotFoundError,)), FileNotFoundError(), False),
        (Retry(on=(OSError,), never=(FileNotFoundError,)), PermissionError(), True),
        (Retry(on=[OSError]), OSError(), True),  # type: ignore[arg-type]
        (Retry(never=KeyError), KeyError(), False),  # type: ignore[arg-type]
    ],
)
def test_on_and_never_say_after_which_errors(policy: Retry, problem: BaseException, retryable: bool) -> None:
    assert policy.after(problem, 1).retryable is retryable


def test_a_handler_decides_for_itself_whatever_the_policy_says() -> None:
    strict = Retry(on=(OSError,), backoff="10s")
    assert after(strict, RetryLater("90s"), 1) == Again(True, 90.0)
    assert after(None, RetryLater(0, "no licence"), 1) == Again(True, 0.0)
    assert after(Retry(), Fail("bad input"), 1) == Again(False)
    assert issubclass(RetryLater, GangqError)
    assert issubclass(Fail, GangqError)
    assert str(RetryLater(5, "no licence")) == "no licence"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"attempts": 0}, "attempts"),
        ({"attempts": True}, "attempts"),
        ({"backoff": "soon"}, "backoff"),
        ({"backoff": "10m..10s"}, "longer than the longest"),
        ({"backoff": "1s..2s..3s"}, "doubling"),
        ({"on": (OSError, "ValueError")}, "on holds 'ValueError'"),
        ({"never": "OSError"}, "never holds 'OSError'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_where_it_is_written(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Retry(**wrong)


def test_a_delay_that_is_none_is_refused_where_it_is_raised() -> None:
    with pytest.raises(InvalidInput, match="the delay"):
        RetryLater("tomorrow")

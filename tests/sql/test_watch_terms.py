"""What the watchdogs allow each task: the settings, the task's own, the queue's budget, and what was learned."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, Q, refused

INSTALLATION = {
    "budget_s": 2100,
    "budget_gpu_s": 8100,
    "stall_timeout_s": 120,
    "load_grace_s": 1200,
    "health_window_s": 300,
    "long_phase_s": 3600,
    "notify_only": [],
    "learned": True,
}


def terms(q: Q, task: str = "train", **named: Any) -> dict[str, Any]:
    row: dict[str, Any] = q.one("watch_terms", task=task, **named)
    return row


def test_a_task_nobody_knows_has_the_installations_numbers(q: Q) -> None:
    assert terms(q) == INSTALLATION
    assert terms(q, queue="no such queue", device_class="H200") == INSTALLATION


def test_configure_changes_what_holds_for_every_task_and_null_leaves_it(q: Q) -> None:
    changed = {
        **INSTALLATION,
        "budget_s": 10,
        "budget_gpu_s": 20,
        "stall_timeout_s": 30,
        "load_grace_s": 40,
        "health_window_s": 50,
        "long_phase_s": 60,
        "notify_only": ["stall", "gang"],
    }
    q.call("configure", **{k: v for k, v in changed.items() if k != "learned"})
    assert terms(q) == changed
    more = {
        "gang_stall_s": 70,
        "straggler_s": 80,
        "brake_share": 0.5,
        "device_trips": 4,
        "bounces_per_hour": 5,
        "warm_s": 0,
    }
    q.call("configure", **more)
    settings = q.sql("select * from gangq.settings")[0]
    assert {k: settings[k] for k in more} == more
    assert terms(q) == changed, "what was not given stays"
    q.call("configure", notify_only=[])
    assert terms(q)["notify_only"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"stall_timeout_s": 0},
        {"brake_share": 1.5},
        {"device_trips": 0},
        {"device_trips": 100000},
        {"notify_only": ["memory"]},
        {"warm_s": -1},
    ],
)
def test_configure_refuses_what_would_disarm_a_watchdog_by_accident(q: Q, wrong: dict[str, Any]) -> None:
    with refused(INVALID):
        q.call("configure", **wrong)
    assert terms(q) == INSTALLATION


def test_the_budget_is_the_tasks_else_the_queues_else_the_installations(q: Q) -> None:
    q.call("set_queue", name="nightly", budget_s=900)
    assert (terms(q, queue="nightly")["budget_s"], terms(q, queue="nightly")["budget_gpu_s"]) == (900, 900)
    assert terms(q, queue="default")["budget_s"] == 2100
    q.call("set_task", task="train", budget_s=600)
    assert (terms(q, queue="nightly")["budget_s"], terms(q, queue="nightly")["budget_gpu_s"]) == (600, 600)
    assert terms(q, task="other", queue="nightly")["budget_s"] == 900


def test_jobs_take_their_own_budget_else_the_tasks_else_the_queues(q: Q) -> None:
    q.call("set_queue", name="nightly", budget_s=900)
    q.call("set_task", task="train", budget_s=600)
    assert q.job(q.submit(task="train", queue="nightly", budget_s=5))["budget_s"] == 5
    assert q.job(q.submit(task="train", queue="nightly"))["budget_s"] == 600
    assert q.job(q.submit(task="other", queue="nightly"))["budget_s"] == 900
    assert q.job(q.submit(task="other"))["budget_s"] is None, "the worker asks for the terms when it runs it"
    gang = q.submit_gang(2, task="train", queue="nightly")
    assert [m["budget_s"] for m in gang.members] == [600, 600]


def test_set_task_changes_what_is_given_and_leaves_the_rest(q: Q) -> None:
    q.call("set_task", task="train", stall_timeout_s=300, notify_only=["health"])
    q.call("set_task", task="train", load_grace_s=60)
    q.call("set_task", task="train", health_window_s=70, long_phase_s=80)
    assert terms(q) == {
        **INSTALLATION,
        "stall_timeout_s": 300,
        "load_grace_s": 60,
        "health_window_s": 70,
        "long_phase_s": 80,
        "notify_only": ["health"],
        "learned": False,
    }
    assert terms(q, task="other") == INSTALLATION
    q.call("set_task", task="train", notify_only=[])
    assert terms(q)["notify_only"] == [], "none, although the installation may say otherwise"


def test_forget_drops_what_was_set_and_learned_before_it_sets_what_is_given(q: Q) -> None:
    q.call("set_task", task="train", stall_timeout_s=300, budget_s=50)
    q.call("learn_gap", task="train", device_class="H200", longest_s=100, beats=9)
    q.call("set_task", task="train", budget_s=60, forget=True)
    assert terms(q, device_class="H200") == {**INSTALLATION, "budget_s": 60, "budget_gpu_s": 60}
    q.call("set_task", task="train", forget=True)
    assert q.sql("select * from gangq.tasks") == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": ""},
        {"task": "x" * 201},
        {"task": "t", "budget_s": 0},
        {"task": "t", "budget_s": "NaN"},
        {"task": "t", "stall_timeout_s": -1},
        {"task": "t", "notify_only": ["everything"]},
    ],
)
def test_set_task_refuses_what_makes_no_sense(q: Q, wrong: dict[str, Any]) -> None:
    with refused(INVALID):
        q.call("set_task", **wrong)


# Learned gaps -----------------------------------------------------------------------------------------------


def test_the_stall_timeout_is_five_times_the_longest_gap_but_never_under_the_floor(q: Q) -> None:
    q.call("learn_gap", task="train", device_class="", longest_s=20, beats=100)
    assert (terms(q)["stall_timeout_s"], terms(q)["learned"]) == (120, True)
    q.call("learn_gap", task="train", device_class="", longest_s=40, beats=10)
    assert (terms(q)["stall_timeout_s"], terms(q)["learned"]) == (200, True)


def test_the_longest_gap_is_kept_whatever_comes_later_and_beats_add_up(q: Q) -> None:
    for longest, beats in ((40, 100), (90, 5), (10, 1000)):
        q.call("learn_gap", task="train", device_class="", longest_s=longest, beats=beats)
    row = q.sql("select * from gangq.tasks")[0]
    assert (row["task"], row["device_class"], row["longest_gap_s"], row["beats"]) == ("train", "", 90, 1105)
    assert row["learned_at"] == q.clock.now()
    assert terms(q)["stall_timeout_s"] == 450


def test_gaps_are_learned_for_each_class_of_devices_apart(q: Q) -> None:
    q.call("learn_gap", task="train", device_class="H200", longest_s=30, beats=1)
    q.call("learn_gap", task="train", device_class="T4", longest_s=300, beats=1)
    assert [terms(q, device_class=c)["stall_timeout_s"] for c in ("", "H200", "T4")] == [120, 150, 1500]


def test_what_an_operator_set_comes_before_what_was_learned(q: Q) -> None:
    q.call("learn_gap", task="train", device_class="", longest_s=300, beats=1)
    q.call("set_task", task="train", stall_timeout_s=60)
    assert (terms(q)["stall_timeout_s"], terms(q)["learned"]) == (60, False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": ""},
        {"longest_s": -1},
        {"longest_s": float("nan")},
        {"longest_s": float("inf")},
        {"longest_s": None},
        {"beats": -1},
        {"beats": None},
    ],
)
def test_a_gap_that_is_none_is_refused(q: Q, wrong: dict[str, Any]) -> None:
    with refused(INVALID):
        q.call("learn_gap", **{"task": "t", "device_class": "", "longest_s": 1, "beats": 1, **wrong})
    assert q.sql("select * from gangq.beat_gaps") == []

"""What workers declare their tasks with, and what submit makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import INVALID, Q, gpus, refused

TRAIN = {
    "queue": "gpu",
    "priority": 5,
    "gpus": 1,
    "vram_mb": 8000,
    "memory_mb": 100,
    "cpus": 0.5,
    "labels": {"site": "a"},
    "model": "llama",
    "budget_s": 60,
    "max_attempts": 7,
    "max_crashes": 8,
    "max_trips": 9,
}


def declare(q: Q, name: str = "w1", **options: Any) -> None:
    q.call("set_queue", name="gpu")
    q.worker(
        name,
        queues=["default", "gpu"],
        devices=gpus(16000, 16000, prefix=f"{name}-"),
        memory_mb=1000,
        cpus=4,
        slots=8,
        labels={"site": "a"},
        task_options=options,
    )


def live(q: Q, job_id: int) -> dict[str, Any]:
    return q.sql(
        "select s.queue, j.priority, s.gpus, s.vram_mb, s.memory_mb, s.cpus::float8, s.labels, s.model, j.budget_s, "
        "j.max_attempts, j.max_crashes, j.max_trips from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
        "where j.id = %(id)s",
        id=job_id,
    )[0]


def test_what_is_left_open_is_as_the_task_is_declared(q: Q) -> None:
    declare(q, train=TRAIN, other={})
    for _ in range(2):
        assert live(q, q.submit("train")) == TRAIN
    for member in q.submit_gang(2, task="train").job_ids:
        assert live(q, member) == TRAIN
    other = live(q, q.submit("other"))
    assert (other["queue"], other["gpus"], other["budget_s"], other["max_attempts"]) == (
        "default",
        0,
        None,
        3,
    )


@pytest.mark.parametrize(
    "said",
    [{"queue": "default"}, {"priority": 0}, {"gpus": 2}, {"memory_mb": 0}, {"labels": {}}, {"max_attempts": 1},
     {"budget_s": 5}, {"model": "gpt"}, {"cpus": 0}],
    ids=lambda said: next(iter(said)),
)  # fmt: skip
def test_what_the_caller_says_wins(q: Q, said: dict) -> None:
    declare(q, train=TRAIN)
    for _ in range(2):
        assert live(q, q.submit("train", **said)) == TRAIN | said
    # A gang has one queue and one priority, members need for themselves.
    for member in q.submit_gang(1, task="train", **said).job_ids:
        assert live(q, member) == TRAIN | said


def test_who_asks_for_no_device_needs_no_memory_on_it(q: Q) -> None:
    declare(q, train=TRAIN)
    for id in (q.submit("train", gpus=0), q.submit_gang(1, task="train", gpus=0).job_ids[0]):
        assert live(q, id) == TRAIN | {"gpus": 0, "vram_mb": 0}


def test_a_declared_selector_and_tolerations_are_applied(q: Q) -> None:
    selector = [{"key": "site", "op": "=", "values": ["a"]}]
    declare(q, picky={"selector": selector, "tolerates": ["repair"]})
    for id in (q.submit("picky"), q.submit("picky"), *q.submit_gang(1, task="picky").job_ids):
        found = q.sql(
            "select s.selector, s.tolerates from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id "
            "where j.id = %(id)s",
            id=id,
        )[0]
        assert (found["selector"], found["tolerates"]) == (selector, ["repair"])


def test_each_role_has_what_its_own_task_is_declared_with(q: Q) -> None:
    declare(q, train=TRAIN, drive={"cpus": 1})
    roles = [{"name": "driver", "count": 1, "task": "drive"}, {"name": "rank", "count": 1, "gpus": 2}]
    driver, rank = q.submit_gang(task="train", roles=roles).job_ids
    assert (live(q, driver)["gpus"], live(q, driver)["cpus"], live(q, driver)["queue"]) == (0, 1, "gpu")
    assert (live(q, rank)["gpus"], live(q, rank)["vram_mb"], live(q, rank)["priority"]) == (2, 8000, 5)


def test_the_newest_registration_wins_and_says_whose_it_is(q: Q) -> None:
    declare(q, "w1", train={"gpus": 1})
    declare(q, "w2", train={"gpus": 2})
    assert live(q, q.submit("train"))["gpus"] == 2
    (row,) = q.sql("select declared, declared_by from gangq.tasks where task = 'train'")
    assert (row["declared"], row["declared_by"]) == ({"gpus": 2}, "w2")
    declare(q, "w3", train={})
    assert live(q, q.submit("train"))["gpus"] == 0
    q.worker("w4")  # It says nothing about tasks.
    assert q.sql("select * from gangq.tasks where task = 'train'") == []


@pytest.mark.parametrize(
    "options",
    [[], "x", {"t": 1}, {"t": {"colour": 1}}, {"t": {"gpus": -1}}, {"t": {"gpus": "many"}}, {"t": {"cpus": "NaN"}},
     {"t": {"budget_s": 0}}, {"t": {"labels": []}}, {"t": {"max_trips": 0}}, {"t": {"priority": 10**12}},
     {"t": {"selector": 7}}, {"t": {"tolerates": [","]}}, {"": {"gpus": 1}}, {"t": {"model": "x" * 300_000}}],
    ids=lambda options: str(options)[:40],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(q: Q, options: Any) -> None:
    with refused(INVALID):
        q.worker(task_options=options)

"""Slots: how many a worker has by default, and what is said when they are what is short."""

from __future__ import annotations

import pytest

from sql.drive import INVALID, Q, gpus, refused


@pytest.mark.parametrize(("devices", "slots"), [(0, 1), (1, 1), (8, 8)])
def test_a_worker_that_does_not_say_has_a_slot_for_each_device(q: Q, devices: int, slots: int) -> None:
    worker = q.worker(devices=gpus(*[8000] * devices))
    assert worker.row["slots"] == slots


def test_a_gang_that_lacks_slots_is_refused_in_these_words(q: Q) -> None:
    q.worker(slots=1, devices=gpus(8000, 8000))
    with refused(INVALID, "slots are short: 1 slot in all"):
        q.submit_gang(2, gpus=1)
    note = q.submit_gang(2, gpus=1, wait_for_hardware=True).note
    assert "slots are short" in note
    with refused(INVALID) as caught:
        q.submit_gang(1, gpus=3)
    assert "slots" not in str(caught.value)  # type: ignore[attr-defined]


def test_explain_says_slots_where_devices_would_do(q: Q) -> None:
    for n in range(2):
        q.worker(f"w{n}", slots=1, host="h", cpus=1, devices=gpus(8000, 8000, prefix=f"d{n}-"))
    q.submit(cpus=1)
    q.place()
    q.sql("select c.* from gangq.incarnations i, gangq.claim(incarnation => i.id, max_jobs => 1) c")
    gang = q.submit_gang(2, gpus=1)
    q.place()
    gates = {row["gate"]: row for row in q.call("explain_gang", gang_id=gang.id)}
    said = "there is room for 1 of its 2 members, the most on h; for one more the nearest worker, w0, "
    assert gates["room"]["detail"].startswith(f"{said}has 0 of 1 slot free (held by j1)")
    assert gates["unblock"]["detail"] == "room for 1 more: 1 slot more on w0 would do"


def test_explain_of_a_job_says_slots_where_devices_would_do(q: Q) -> None:
    worker = q.worker(slots=1, cpus=1, devices=gpus(8000, 8000))
    q.submit(cpus=1)
    worker.take()
    waiting = q.submit(gpus=1)
    q.place()
    gates = {row["gate"]: row for row in q.call("explain_job", job_id=waiting)}
    assert f"the nearest worker, {worker.name}, has 0 of 1 slot free" in gates["room"]["detail"]
    assert gates["unblock"]["detail"] == f"room on one worker: 1 slot more on {worker.name} would do"

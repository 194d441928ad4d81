"""The largest gang that could start now: the page says what the decision would do."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from browsing import cells, fetch

from gangq.client import Client
from sql.drive import Q, Worker, gpus

SIZES = (1, 2, 4, 8)
Stage = Callable[[Q], object]


def worker(q: Q, name: str = "w1", *, devices: int = 8, **offer: object) -> Worker:
    return q.worker(
        name,
        devices=gpus(*[80000] * devices, prefix=f"{name}-"),
        **{"slots": 8, "cpus": 64, "lease_s": 1e5, **offer},
    )


def half_used(q: Q) -> None:
    one = worker(q, slots=2)
    q.submit(gpus=4)
    assert len(one.claim()) == 1


def slots_full_of_cpu_jobs(q: Q) -> None:
    one = worker(q, slots=2)
    q.submit(count=2, cpus=1)
    assert len(one.claim()) == 2


def light_jobs_hold_no_slot(q: Q) -> None:
    one = worker(q, slots=2, light=4)
    q.submit(count=4)
    assert len(one.claim()) == 4


def reserved(q: Q) -> None:
    worker(q)
    worker(q, "w2", slots=2)
    gang = q.submit_gang(3, gpus=3)
    q.tick()
    assert gang.states == ["reserved"] * 3


def a_place_is_open(q: Q) -> None:
    worker(q, slots=2)
    q.submit(gpus=2)
    q.place()
    assert q.value("select count(*) from gangq.places_open") == 1


def cordoned(q: Q) -> None:
    worker(q)
    worker(q, "w2", devices=3)
    q.call("cordon", host="host-w1")


def draining(q: Q) -> None:
    worker(q).retire(final=False)
    worker(q, "w2", devices=2)


def silent(q: Q) -> None:
    worker(q)
    heard = worker(q, "w2", devices=2)
    q.live_on(300, heard, tick=False)


def passed_over(q: Q) -> None:
    worker(q)
    worker(q, "w2", devices=2)
    q.sql(
        "update gangq.incarnations set passed_over_until = gangq.now() + interval '1 min' where name = 'w1'"
    )


def a_device_is_quarantined(q: Q) -> None:
    worker(q)
    q.call("quarantine", device_uuid="w1-3", reason="xid 79")


def a_worker_is_quarantined(q: Q) -> None:
    worker(q)
    worker(q, "w2", devices=5)
    q.call("quarantine", worker="w1", reason="smells")


def others_stop_for_a_gang(q: Q) -> None:
    """Both slots of w2 are kept until the job on w1 has stopped."""
    one, two = worker(q, slots=1), worker(q, "w2", slots=2)
    q.submit(gpus=1, selector=[{"key": "worker", "op": "in", "values": ["w1"]}])
    assert len(one.claim()) == 1
    q.beyond_min_run(one, two)
    q.submit_gang(3, gpus=1, priority=5)
    q.place()
    assert q.value("select jsonb_array_length(seats) from gangq.plans where kept") == 3


@pytest.mark.parametrize(
    "stage",
    [
        worker,
        half_used,
        slots_full_of_cpu_jobs,
        light_jobs_hold_no_slot,
        reserved,
        a_place_is_open,
        cordoned,
        draining,
        silent,
        passed_over,
        a_device_is_quarantined,
        a_worker_is_quarantined,
        others_stop_for_a_gang,
    ],
)
def test_the_largest_gang_that_could_start_is_what_the_decision_would_start(
    dsn: str, q: Q, client: Client, stage: Stage
) -> None:
    stage(q)

    def starts(size: int, each: int) -> bool:
        (row,) = (
            row
            for row in client.plan(changes=[{"submit": {"task": "new", "size": size, "gpus": each}}])
            if row.gang_id is None
        )
        return row.after == "start"

    (page,) = fetch(dsn, "/")
    found = re.search(r"<td>test 78 GiB</td><td>\d+</td>" + r"<td>(\d+)</td>" * 4, cells(page.text))
    assert found
    said = dict(zip(SIZES, map(int, found.groups()), strict=True))
    assert said == {
        each: max(size for size in range(20) if size == 0 or starts(size, each)) for each in SIZES
    }


def test_free_gpus_are_counted_by_kind_where_work_is_taken(dsn: str, q: Q) -> None:
    half_used(q)
    q.worker("w2", slots=3, devices=[{**one, "model": "H9"} for one in gpus(*[1024] * 3, prefix="H")])
    q.worker("w3", devices=gpus(*[80000] * 2, prefix="C"))
    q.call("cordon", worker="w3")
    (page,) = fetch(dsn, "/")
    assert "<td>H9 1 GiB</td><td>3</td><td>3</td><td>1</td><td>0</td><td>0</td>" in cells(page.text)
    assert "<td>test 78 GiB</td><td>4</td><td>1</td><td>1</td><td>1</td><td>0</td>" in cells(page.text)

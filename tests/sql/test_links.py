"""GPUs that NVLink joins, from what a worker registers to the devices that its jobs hold."""

from __future__ import annotations

from collections.abc import Sequence

from gangq.gpu import Device
from sql.drive import Q, Row, gpus


def detected(*links: int | None) -> list[Row]:
    """Devices as detection hands them over; link: the number of the first that NVLink joins with it."""
    names = [None if link is None else f"GPU-{link}" for link in links]
    return [Device(n, f"GPU-{n}", 81920, "A100", "nvml", link=name).as_json() for n, name in enumerate(names)]


def linked(q: Q) -> list[int | None]:
    return [row["link"] for row in q.sql("select link from gangq.devices order by index")]


def held(devices: Sequence[Row]) -> list[str]:
    return sorted(device["uuid"] for device in devices)


def test_a_job_with_two_gpus_starts_on_a_pair_and_a_single_one_breaks_none(q: Q) -> None:
    worker = q.worker(devices=detected(0, 0, 2, 2, 4, 4), slots=6)
    assert linked(q) == [0, 0, 2, 2, 4, 4]
    q.submit(gpus=1)
    (single,) = worker.claim()
    assert held(single["devices"]) == ["GPU-0"]
    q.submit(gpus=2)
    (pair,) = worker.claim()
    assert held(pair["devices"]) == ["GPU-2", "GPU-3"]
    q.submit(gpus=1)
    (single,) = worker.claim()
    assert held(single["devices"]) == ["GPU-1"], "of the pair that is broken already"
    assert q.violations() == []


def test_members_with_a_gpu_each_are_placed_on_a_pair(q: Q) -> None:
    worker = q.worker(devices=detected(0, 0, 2, 2), slots=4)
    q.submit(gpus=1)
    worker.claim()
    q.submit_gang(size=2, gpus=1)
    assert q.place()["placed"] == 1
    devices = [device for claim in worker.claim() for device in claim["devices"]]
    assert held(devices) == ["GPU-2", "GPU-3"]


def test_a_job_does_not_wait_for_a_pair(q: Q) -> None:
    worker = q.worker(devices=detected(0, 0, 2, 2), slots=4)
    q.submit(count=2, gpus=1)
    q.submit(gpus=2)
    claims = worker.claim()
    assert len(claims) == 3
    claims[1].complete()
    claims[2].complete()
    q.call("quarantine", device_uuid="GPU-3", reason="ECC errors")
    q.submit(gpus=2)
    (across,) = worker.claim()
    assert held(across["devices"]) == ["GPU-1", "GPU-2"]


def test_a_gang_that_needs_links_waits_for_a_pair(q: Q) -> None:
    worker = q.worker(devices=detected(0, 0, 2, 2), slots=4)
    ones = [q.submit(gpus=1), q.submit(gpus=1)]
    first, second = worker.claim()
    assert held([*first["devices"], *second["devices"]]) == ["GPU-0", "GPU-1"]
    q.call("quarantine", device_uuid="GPU-3", reason="ECC errors")
    second.complete()
    gang = q.submit_gang(size=1, gpus=2, strategy="linked", wait_for_hardware=True)
    assert q.place()["placed"] == 0
    gates = {row["gate"]: row["detail"] for row in q.call("explain_gang", gang_id=gang.id)}
    assert gates["fragmented"].startswith(
        "what is free would be enough, were it together: there is room for 0 of its 1 member; "
        f"for one more the nearest worker, {worker.name}, has 1 of 2 linked GPUs free (held by j{ones[0]}) ("
    )
    assert gates["unblock"] == f"room for 1 more: 1 linked GPU more on {worker.name} would do"
    first.complete()
    assert q.place()["placed"] == 1
    (claim,) = worker.claim()
    assert held(claim["devices"]) == ["GPU-0", "GPU-1"]


def test_what_no_worker_said_is_not_known_and_a_new_registration_says_it_anew(q: Q) -> None:
    worker = q.worker(devices=gpus(8000, 8000, prefix="GPU-"))
    assert linked(q) == [None, None], "a worker of before links were known"
    worker.retire()
    worker = q.worker(devices=detected(0, 0))
    assert linked(q) == [0, 0]
    worker.retire()
    q.worker(devices=detected(None, None))
    assert linked(q) == [None, None]

"""A device that two workers claim to see is as the one that offers it says."""

from __future__ import annotations

from sql.drive import Q, gpus


def device(q: Q) -> tuple[str, int, int, str, str]:
    (row,) = q.sql("select host, index, vram_mb, model, source from gangq.device_registry")
    return row["host"], row["index"], row["vram_mb"], row["model"], row["source"]


AS_THE_FIRST_SAYS = ("host-a", 0, 8000, "test", "nvml")
ANOTHER_VIEW = [{"uuid": "G0", "index": 7, "vram_mb": 1, "model": "other", "source": "declared"}]


def test_a_withheld_device_stays_as_the_worker_that_offers_it_described_it(q: Q) -> None:
    first = q.worker("a", devices=gpus(8000))
    second = q.worker("b", devices=ANOTHER_VIEW)
    assert second.registration["withheld"] == ["G0"]
    assert device(q) == AS_THE_FIRST_SAYS
    job = q.submit(gpus=1, vram_mb=8000)
    claim = first.take()
    assert [(d["index"], d["vram_mb"]) for d in claim["devices"]] == [(0, 8000)]
    # Also while it is held, and however often somebody else registers.
    second.retire()
    q.worker("c", devices=ANOTHER_VIEW)
    assert device(q) == AS_THE_FIRST_SAYS
    assert (claim.complete(), q.state(job)) == ("done", "done")


def test_when_no_live_worker_offers_a_device_the_next_one_says_what_it_is(q: Q) -> None:
    q.worker("a", devices=gpus(8000)).retire()
    second = q.worker("b", devices=ANOTHER_VIEW)
    assert second.registration["withheld"] == []
    assert device(q) == ("host-b", 7, 1, "other", "declared")

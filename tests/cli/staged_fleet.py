"""One fleet in every state that the looks of the command line show, the same to the byte each time it is staged."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from sql.drive import Claim, Q, Worker

NOW = datetime(2026, 3, 4, 12, 0, 0, tzinfo=UTC)
"""When it is looked at."""
_GIB = 1024


def _uuid(host: str, n: int) -> str:
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{n}.{host}')}"


def _devices(host: str, count: int, vram_gib: int, model: str) -> list[dict[str, Any]]:
    return [
        {
            "uuid": _uuid(host, n),
            "index": n,
            "vram_mb": vram_gib * _GIB,
            "model": model,
            "source": "nvml",
        }
        for n in range(count)
    ]


def stage(q: Q) -> None:
    """Three hosts with GPUs and one without; queues, a limit, schedules, a service; work in most states."""
    q.clock.set(NOW - timedelta(hours=2))
    q.call("set_queue", name="prod", maximum={"gpus": 12})
    q.call("set_queue", name="prod.training", guaranteed={"gpus": 4})
    q.call("set_queue", name="night")
    q.call("set_task", task="train", stall_timeout_s=600, budget_s=86400)
    q.call("set_limit", key="license", most=2)
    workers = [
        q.worker(
            f"trainer-{host}",
            host=host,
            queues=["default", "prod.training"],
            slots=4,
            light=2,
            memory_mb=256 * _GIB,
            cpus=64,
            labels={"zone": zone},
            devices=_devices(host, 4, 80, "NVIDIA H100 80GB HBM3"),
        )
        for host, zone in (("gpu-node-01", "east"), ("gpu-node-02", "east"), ("gpu-node-03", "west"))
    ]
    clerk = q.worker(
        "clerk",
        host="cpu-node-01",
        queues=["default", "night"],
        slots=4,
        light=8,
        cpus=32,
        memory_mb=64 * _GIB,
    )
    fleet = _Fleet(q, [*workers, clerk])
    done, failed = q.submit("resize", count=2)
    for claim in clerk.claim(2):
        if claim.job_id == done:
            claim.complete({"pixels": 64})
        else:
            claim.fail("cannot open /data/images/000017.png: Permission denied", retryable=False)
    assert (q.state(done), q.state(failed)) == ("done", "failed")
    q.call("cancel", job_ids=[q.submit("resize")], reason="submitted by mistake")
    fleet.held += _sweep(q, clerk)
    fleet.live_until(NOW - timedelta(minutes=110))
    gang = q.submit_gang(
        4,
        queue="prod.training",
        gpus=1,
        vram_mb=70 * _GIB,
        name="llama-finetune",
        priority=10,
        max_attempts=3,
    )
    members = gang.start(*workers)
    evaluations, fleet.held = fleet.held, fleet.held + members
    fleet.live_until(NOW - timedelta(minutes=60))
    members[1].fail("CUDA error: an illegal memory access was encountered")
    for claim in members:
        if claim is not members[1]:
            claim.ack()
    gang.skip_backoff()
    fleet.held = evaluations + gang.restart(*workers)
    fleet.held += _rest(q, clerk)
    fleet.live_until(NOW - timedelta(minutes=38))
    _placed(q, workers[2], "pretrain", gpus=4).fail("NCCL error: unhandled system error", retryable=False)
    q.call("quarantine", device_uuid=_uuid("gpu-node-03", 3), reason="Xid 79: it has fallen off the bus")
    q.call("cordon", host="gpu-node-02", reason="kernel upgrade")
    _trips(q, workers[2])
    q.call("add_notification", target="oncall", kinds=["trip", "gang_failed"], queue="prod")
    q.call("add_notification", target="mail", submitter="postgres")
    fleet.live_until(NOW - timedelta(seconds=5))
    q.clock.set(NOW)


_READINGS = {
    f"trainer-{host}": [
        {
            "uuid": _uuid(host, n),
            "gpu_pct": busy,
            "used_mb": used_gib * _GIB,
            "total_mb": 80 * _GIB,
            "temperature_c": 31 + busy // 3,
            "power_w": 70 + 6.1 * busy,
            "throttle": ["hw_thermal"] if busy > 98 else [],
        }
        for n, (busy, used_gib) in enumerate(of)
    ]
    for host, of in (
        ("gpu-node-01", ((97, 71), (99, 71), (96, 70), (12, 71))),
        ("gpu-node-03", ((88, 40), (0, 0), (0, 0))),
    )
}
"""What two of the hosts read of their devices: the driver of the third says nothing, nor does a broken device."""


def _trips(q: Q, worker: Worker) -> None:
    """A job that stalled and is sent back, and one that was ended by its budget."""
    for task, code, type, message in (
        ("train", 76, "Stalled", "made no progress for 10m04s at step 1200, its devices idle"),
        ("render", 75, "OverBudget", "ran for 2h00m, as long as its budget allows"),
    ):
        claim = _placed(q, worker, task, gpus=1, priority=50)
        claim.trip(code, message, type, evidence={"silence_s": 604, "why": message})


def _placed(q: Q, worker: Worker, task: str, **asked: Any) -> Claim:
    """A job that has started on this worker."""
    job = q.submit(task, **asked)
    q.call("open_place", incarnation=worker.incarnation, job_id=job)
    (row,) = q.call("claim", incarnation=worker.incarnation, max_jobs=1, request_id=uuid.uuid4())
    assert row["job_id"] == job
    return Claim(q, row, worker.incarnation)


class _Fleet:
    """The workers, and what each of them holds and says."""

    def __init__(self, q: Q, workers: list[Worker]) -> None:
        self._q, self._workers = q, workers
        self.held: list[Claim] = []

    def live_until(self, at: datetime) -> None:
        """Heartbeats and ticks once a minute; the members of a gang make a step each second, rank 0 in front."""
        began = self._q.clock.now()
        while (now := self._q.clock.now()) < at:
            self._q.clock.set(min(at, now + timedelta(minutes=1)))
            seconds = (self._q.clock.now() - began).total_seconds()
            for worker in self._workers:
                own = [claim for claim in self.held if claim.incarnation == worker.incarnation]
                beats = [self._step(claim, seconds) for claim in own]
                worker.beat(*own, beats=beats, readings=_READINGS.get(worker.name))
            self._q.tick()

    def _step(self, claim: Claim, seconds: float) -> dict[str, Any]:
        return {"step": int(seconds / 5) - (claim["rank"] or 0), "total": 1000, "phase": "run"}


def _sweep(q: Q, clerk: Worker) -> list[Claim]:
    """A batch of which some are done, one has failed, and some wait."""
    ids = q.submit("evaluate", count=6, name="nightly-eval", tags=["eval", "v7"], at_most=4)
    claims = clerk.claim(4)
    for number, claim in enumerate(claims):
        if number == 2:
            claim.fail("the checkpoint of epoch 40 is missing", retryable=False)
        elif number < 2:
            claim.complete({"score": 0.5})
    assert len(ids) == 6
    return claims[3:]


def _rest(q: Q, clerk: Worker) -> list[Claim]:
    """What waits, each for a reason of its own, and a service with two replicas."""
    q.submit_gang(12, queue="prod.training", gpus=1)
    q.submit(
        "command",
        payloads=[
            {"argv": ["python", "-m", "render", "--scene", "castle at night.blend", "--frames", "1-240"]}
        ],
        gpus=1,
        queue="default",
    )
    q.submit("train", gpus=8, queue="default", wait_for_hardware=True)
    later = q.submit("report", due_at=NOW + timedelta(hours=3))
    q.submit("publish", after=[later])
    q.call(
        "set_schedule",
        name="nightly-report",
        cron="0 3 * * *",
        tz="Europe/Zurich",
        task="report",
        work={"queue": "night"},
    )
    q.call("set_schedule", name="sync", every=timedelta(minutes=30), task="sync")
    q.call(
        "set_service",
        name="chat",
        task="serve",
        replicas=2,
        work={"queue": "night", "cpus": 1},
        options={"linger_s": 0},
    )
    q.tick()
    replicas = clerk.claim(2)
    for port, replica in enumerate(replicas, 8000):
        q.call("report_ready", job_id=replica.job_id, token=replica.token, port=port)
    q.call("set_queue", name="paused-queue", paused=True)
    q.submit("train", queue="paused-queue")
    return replicas

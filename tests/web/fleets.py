"""Fleets for the tests of how pages look: nothing, much that goes well, and much that does not. No random name and no
true time is in them, so the same page is made each time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from browsing import HOSTILE, LONG
from lives import displaced_and_back

from sql.drive import Claim, Q, Worker, gpus
from sql.services import put

Paths = dict[str, str]
"""The pages of a fleet, by what they are called in the name of a picture."""
LISTS: Paths = {"fleet": "/", "services": "/services", "batches": "/batches", "schedules": "/schedules",
                "limits": "/limits", "usage": "/usage"}  # fmt: skip


def begin(q: Q) -> None:
    """The clock stands at a moment of its own, so that pictures do not change with the day."""
    q.clock.set(datetime(2027, 3, 1, 9, tzinfo=UTC))
    q.tick()


def host(q: Q, name: str, model: str, vram_mb: int, queues: list[str], **more: object) -> Worker:
    """A host with eight GPUs and one worker."""
    devices = [{**one, "model": model} for one in gpus(*[vram_mb] * 8, prefix=f"{name}-")]
    offer = {"slots": 16, "cpus": 64, "memory_mb": 512_000, "lease_s": 1e5, **more}
    return q.worker(name, host=name, devices=devices, queues=queues, **offer)


def start(q: Q, workers: list[Worker]) -> list[Claim]:
    """Place what waits, and let all workers claim."""
    q.tick()
    return [claim for worker in workers for claim in worker.claim(max_jobs=32)]


def empty(q: Q) -> Paths:
    """No worker, no job."""
    begin(q)
    return LISTS


def busy(q: Q) -> Paths:
    """Twelve hosts that are nearly full, a queue of what waits, a service, a batch, schedules and limits."""
    begin(q)
    for name, settings in {
        "research": {"maximum": {"gpus": 128}},
        "research.vision": {"maximum": {"gpus": 32}, "max_running_gangs": 4},
        "research.language": {},
        "serving": {"submitter_maximum": {"gpus": 16}},
        "nightly": {"rate": "60/1h", "paused": True},
    }.items():
        q.call("set_queue", name=name, **settings)
    queues = ["research.vision", "research.language", "research", "serving", "nightly"]
    workers = [host(q, f"gpu-{n:02}", "H100", 81920, queues) for n in range(1, 9)]
    workers += [host(q, f"gpu-{n:02}", "A100", 40960, queues) for n in range(9, 13)]
    life = q.submit_gang(
        4, "pretrain", queue="research.language", gpus=8, name="llm-7b", vram_mb=80000, budget_s=86400
    )
    q.submit_gang(8, "finetune", queue="research.vision", gpus=2, name="vit-l", vram_mb=80000, budget_s=7200)
    q.submit_gang(2, "finetune", queue="research.vision", gpus=4, name="unet", budget_s=10800)
    put(q, "chat", task="serve", replicas=3, work={"gpus": 2, "queue": "serving"})
    batch = q.submit("sweep", count=24, queue="research", gpus=1, name="lr-sweep", tags=["lr", "vit"], max_attempts=1,
                     budget_s=3600)  # fmt: skip
    q.submit("translate", count=6, queue="research", cpus=2, limit_key="mt-licence", limit=4, rate="10/1m",
             budget_s=1200)  # fmt: skip
    q.call("set_limit", key="image-api", rate="100/1h")
    q.call("set_schedule", name="nightly-eval", task="evaluate", every="6 hours", work={"queue": "nightly"})
    q.call(
        "set_schedule",
        name="retrain",
        task="finetune",
        every="1 day",
        work={"queue": "research.vision", "gpus": 1},
    )
    claims = start(q, workers)
    claims += start(q, workers)
    for claim in claims:
        if claim["task"] == "serve":
            claim.barrier()
            q.call("report_ready", job_id=claim.job_id, token=claim.token, port=8000)
    q.tick()
    q.live_on(600, *workers, step=120, tick=False)
    sweeps = [claim for claim in claims if claim.job_id in batch]
    for n, claim in enumerate(sweeps[:10]):
        claim.fail("loss is nan") if n == 3 else claim.complete({"loss": 0.1})
    claims += start(q, workers)
    for claim in claims:
        if claim["gang_id"] == life.id:
            worker = next(w for w in workers if w.incarnation == claim.incarnation)
            worker.beat(claim, beats=[{"step": 1200 + claim["rank"], "total": 50000, "phase": "train"}])
            claim.save(1000)
    q.submit_gang(
        4, "pretrain", queue="research.language", gpus=8, name="llm-13b", vram_mb=80000, budget_s=86400
    )
    q.submit_gang(2, "finetune", queue="research.vision", gpus=8, name="detr", budget_s=3600)
    q.submit("evaluate", count=40, queue="research", gpus=2, vram_mb=80000)
    q.submit("report", count=3, queue="nightly", cpus=1)
    q.tick()
    return {**LISTS, "gang": f"/gangs/{life.id}", "batch": f"/batches/{batch[0]}", "job": f"/jobs/{batch[3]}"}


def broken(q: Q) -> Paths:
    """A GPU in quarantine, a silent host and a cordoned one, trips, failures, and a gang that was displaced."""
    begin(q)
    life = displaced_and_back(q)
    q.call("set_queue", name="serving", paused=True)
    workers = [host(q, f"gpu-{n:02}", "H100", 81920, ["default", "serving"]) for n in range(1, 5)]
    gang = q.submit_gang(3, "pretrain", gpus=8, name=HOSTILE, vram_mb=80000, budget_s=86400)
    claims = start(q, workers)
    single = q.submit("render", gpus=1, vram_mb=80000, max_trips=1, payloads=[{"scene": HOSTILE}])
    batch = q.submit("sweep", count=3, gpus=1, vram_mb=80000, name=HOSTILE, max_attempts=1)
    claims += start(q, workers)
    q.call("append_log", job_ids=[single], tokens=[next(c.token for c in claims if c.job_id == single)], seqs=[0],
           chunks=["frame 1\nframe 2\nCUDA error: uncorrectable ECC error encountered\n"])  # fmt: skip
    for claim in claims:
        if claim.job_id == single:
            claim.trip(85, "GPU 0 reports uncorrectable ECC errors")
        elif claim.job_id in batch:
            claim.fail("FileNotFoundError: /data/shard-0007")
    q.call("quarantine", device_uuid="gpu-04-3", reason="Xid 79: fallen off the bus")
    q.call("cordon", host="gpu-03", reason="fan replacement")
    q.call("pause_task", task="render", reason="see the trips of today")
    put(q, "chat", task="serve", replicas=2, work={"gpus": 1, "queue": "serving"})
    q.call("set_schedule", name="nightly-eval", task="evaluate", cron="0 0 30 2 *", tz="Europe/Oslo")
    q.call("set_limit", key=LONG[:100], most=0, rate="1/1h")
    q.call("set_queue", name=f"long.{LONG[:90]}", maximum={"gpus": 99})
    q.submit_gang(9, LONG[:90], queue=f"long.{LONG[:90]}", gpus=8, name=LONG, budget_s=3600)
    q.live_on(120, *workers[1:], *life.workers, step=30, tick=False)
    q.submit_gang(2, "pretrain", gpus=8, name="llm-13b", vram_mb=80000)
    q.tick()
    return {**LISTS, "gang": f"/gangs/{gang.id}", "life": f"/gangs/{life.low.id}", "job": f"/jobs/{single}",
            "batch": f"/batches/{batch[0]}"}  # fmt: skip


FLEETS: dict[str, Callable[[Q], Paths]] = {"empty": empty, "busy": busy, "broken": broken}

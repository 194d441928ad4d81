"""What a handler is told about its job, put together once for both kinds of handler."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.context import Checkpoint, DeviceInfo, GangInfo, JobInfo, Peer
from gangq.errors import (
    WHO_READS,
    IncarnationEnded,
    JobCancelled,
    JobFailed,
    NotAllowed,
    NotFound,
    ResultNotStored,
    StaleToken,
    Stopped,
)
from gangq.worker.jobs import ActiveJob
from gangq.worker.repeating import until_answered
from gangq.worker.session import Session

if TYPE_CHECKING:
    from gangq.client.rows import SavedCheckpoint


def job_info(job: ActiveJob) -> JobInfo:
    """The job, from its claim."""
    claim = job.claim
    return JobInfo(
        id=claim.job_id,
        token=claim.token,
        attempt=claim.attempt,
        max_attempts=claim.max_attempts,
        queue=claim.queue,
        task=claim.task,
        priority=claim.priority,
        payload=claim.payload or {},
        budget_s=claim.budget_s,
        index=claim.array_index,
    )


def device_infos(job: ActiveJob) -> tuple[DeviceInfo, ...]:
    """The devices it holds."""
    return tuple(
        DeviceInfo(d["uuid"], d["index"], d.get("vram_mb", 0), d.get("source", "declared"))
        for d in job.claim.devices
    )


def fetch_checkpoint(session: Session, job: ActiveJob, directory: Path) -> Checkpoint | None:
    """Load the checkpoint to resume from and lay it down as a file; None where there is none.

    Asks until it is answered: starting from the beginning for want of an answer could throw days away.

    Raises:
        Stopped: the job must not go on: it was told to stop, its claim is over, the worker's directory was removed.
    """
    if job.claim.checkpoint_step is None and (job.gang is None or job.gang.epoch == job.claim.epoch):
        return None
    try:
        saved = until_answered(
            lambda: session.thread_client.load_checkpoint(job_id=job.id, token=job.token),
            "load_checkpoint",
            lambda: job.must_end or session.ended.is_set(),
            job.stopping,
        )
    except (StaleToken, NotFound, IncarnationEnded) as problem:
        raise Stopped(f"the claim of job {job.id} is over: {problem}") from None
    if saved is None:
        _refuse_if_stopping(job)
        return None
    path = directory / f"checkpoint-{saved.step}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(saved.data)
    except FileNotFoundError:
        job.tell_stop("directory", session.terms.grace_s)
        _refuse_if_stopping(job)
        raise
    return Checkpoint(saved.step, saved.data, path)


def _refuse_if_stopping(job: ActiveJob) -> None:
    if job.must_end:
        raise Stopped(f"job {job.id} was told to stop while it loaded its checkpoint")


def fetch_inputs(session: Session, job: ActiveJob) -> list[dict[str, Any]]:
    """How the jobs ended that this one waited for, as JSON.

    Raises:
        StaleToken: the claim is over.
        TooLarge: more than the database hands out at once.
    """
    found = until_answered(
        lambda: session.thread_client.inputs(job_id=job.id, token=job.token),
        "inputs",
        lambda: is_over(session, job),
    )
    if found is None:
        raise StaleToken(
            f"the database did not answer what job {job.id} waited for before its claim was over"
        )
    return [one._asdict() for one in found]


def inputs_from_wire(found: Iterable[dict[str, Any]]) -> dict[int, Any]:
    """What `Context.inputs` returns, from :func:`fetch_inputs`."""
    return {one["on_job_id"]: _input(**one) for one in found}


def _input(
    on_job_id: int, state: str, readable: bool, result: Any, error: dict[str, Any] | None, **_: object
) -> Any:
    said = ": ".join(str(error[key]) for key in ("type", "message") if error.get(key)) if error else ""
    because = f": {said}" if said else ""
    if state == "failed":
        return JobFailed(f"job {on_job_id} failed{because}", on_job_id, error)
    if state == "cancelled":
        return JobCancelled(
            f"job {on_job_id} was cancelled{because}", on_job_id, (error or {}).get("message")
        )
    if not readable:
        return NotAllowed(
            f"the submitter of this job may not read the result of job {on_job_id}. {WHO_READS}"
        )
    match result:
        case {ResultNotStored.KEY: str(note), **others} if not others:
            return ResultNotStored(f"job {on_job_id} is done, its result is not stored: {note}", on_job_id)
    return result


def load_checkpoint(session: Session, job: ActiveJob) -> SavedCheckpoint | None:
    """The checkpoint of this job as of now.

    Raises:
        StaleToken: the claim is over, and it is not known whether there is one.
    """
    saved = until_answered(
        lambda: session.thread_client.load_checkpoint(job_id=job.id, token=job.token),
        "load_checkpoint",
        lambda: is_over(session, job),
    )
    if saved is None and is_over(session, job):
        raise StaleToken(f"whether job {job.id} has a checkpoint is not known, and its claim is over")
    return saved


def is_over(session: Session, job: ActiveJob) -> bool:
    """Whether its claim is over, as far as that can be known without the database."""
    return job.lost is not None or session.lapsed()


def store_checkpoint(session: Session, job: ActiveJob, step: int, data: bytes) -> None:
    """Store a checkpoint; return once it is committed.

    Asks until it is answered or the claim is over. Repeating is harmless (same step, same bytes), and a handler that
    saves must survive an outage as one that computes does.

    Raises:
        StaleToken: the claim is over, and it is not known whether the checkpoint is stored.
        GangqError: the database refused it.
    """
    epoch = job.gang.epoch if job.gang is not None else None

    def save() -> bool:
        session.thread_client.save_checkpoint(
            job_id=job.id, token=job.token, step=step, data=data, epoch=epoch
        )
        return True

    if not until_answered(save, "save_checkpoint", lambda: is_over(session, job)):
        raise StaleToken(
            f"the checkpoint of job {job.id} at step {step} is not known to be stored: the database did not answer "
            f"before the claim was over ({job.lost or 'the lease has ended'}). Keep the older one, and stop"
        )


def as_wire(job: ActiveJob) -> dict[str, Any]:
    """What a child is told of its job, as JSON."""
    info, service = job_info(job), None if job.replica is None else job.replica.service
    return {
        # Not by asdict, which copies the payload deeply: the control loop does this.
        "job": {**vars(info), "payload": dict(info.payload)},
        "gang": None if job.gang is None else asdict(job.gang),
        "devices": [asdict(device) for device in device_infos(job)],
        "service": None if service is None else asdict(service),
    }


def checkpoint_as_wire(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """A checkpoint as JSON, for a child."""
    if checkpoint is None:
        return None
    return {
        "step": checkpoint.step,
        "data": base64.b64encode(checkpoint.data).decode(),
        "path": str(checkpoint.path),
    }


def gang_from_wire(gang: dict[str, Any] | None) -> GangInfo | None:
    """Its place in its gang, from JSON."""
    if gang is None:
        return None
    return GangInfo(**{**gang, "peers": tuple(Peer(**peer) for peer in gang["peers"])})


def checkpoint_from_wire(checkpoint: dict[str, Any] | None) -> Checkpoint | None:
    """The reverse of :func:`checkpoint_as_wire`."""
    if checkpoint is None:
        return None
    return Checkpoint(checkpoint["step"], base64.b64decode(checkpoint["data"]), Path(checkpoint["path"]))

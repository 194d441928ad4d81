"""A `Context` without a worker: what a handler is told is given, and what it says is kept."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangq.client.encoding import dumps
from gangq.context import Checkpoint, DeviceInfo, GangInfo, JobInfo, Peer, ServiceInfo
from gangq.errors import InvalidInput, StaleToken, TooLarge
from gangq.gpu.declared import parse_declared
from gangq.task_options import TaskOptions, declared
from gangq.testing.children import Children, Submission
from gangq.worker.context_impl import HandlerContext, job_log
from gangq.worker.jobs import BEAT_BYTES
from gangq.worker.results import as_progress, dumps_result

if TYPE_CHECKING:
    from gangq.context import Logger

CHECKPOINT_BYTES = 1 << 20
"""How large a checkpoint may be in a fresh installation."""
_MOST_STEP = (1 << 63) - 1
_MASTER_PORT = 29500
_DECLARED = ("queue", "priority", "max_attempts", "budget_s")
"""The facts of a job that its task declares."""


class FakeContext(HandlerContext):
    """The context of a handler that runs in a test; no worker and no database.

    What the handler is told:

    - `gang`: (rank, world size), all members on one host, or a `GangInfo`. None: a solo job.
    - `checkpoint`: (step, bytes) or a `Checkpoint` to resume from.
    - `inputs`: what it waited for, by the id of the job: its result, or an error such as `JobFailed`.
    - `devices`: "2x24GiB" declares them as `gangq worker --devices` does; or `DeviceInfo` objects.
    - `service`: the service that it is a replica of. None: it is none.
    - `attempt`: from 1. `index`: its place in its batch.
    - `job`: all facts of the job at once, in place of `attempt` and `index`; `run` replaces its task and payload.
      Without it the facts are those that the task declares.
    - `stop_at`: it is told to stop once it has beaten, or saved a checkpoint, at this step or a later one.
      :meth:`stop` tells it at once.
    - `checkpoint_bytes`: the limit of a checkpoint [1 MiB].

    Raises `InvalidInput` for what no worker tells a handler, such as attempt 0.

    What the handler said: `beats`, `phases`, `logs`, `checkpoints`, `model`, `submitted`, `snoozed_s`, `completed`,
    `result`, and of a replica `is_ready` and `loads`.
    """

    def __init__(
        self,
        *,
        gang: tuple[int, int] | GangInfo | None = None,
        checkpoint: tuple[int, bytes] | Checkpoint | None = None,
        inputs: Mapping[int, Any] | None = None,
        devices: str | Sequence[DeviceInfo] = (),
        service: ServiceInfo | None = None,
        attempt: int = 1,
        index: int | None = None,
        job: JobInfo | None = None,
        stop_at: int | None = None,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        super().__init__()
        if attempt < 1:
            raise InvalidInput(f"attempt is {attempt}: attempts count from 1")
        if index is not None and index < 0:
            raise InvalidInput(f"index is {index}: places in a batch count from 0")
        if job is not None and (attempt, index) != (1, None):
            raise InvalidInput("job has an attempt and an index of its own: pass job, or attempt and index")
        self._facts_given = job is not None
        # The token of a later attempt is larger.
        self._info = job or JobInfo(
            _job_id(gang), 100 + attempt, attempt, max(attempt, 3), "default", "task", index=index
        )
        self._gang = _gang_info(gang, self._info.id, epoch=1)
        self._given_inputs = {job_id: _as_input(job_id, given) for job_id, given in (inputs or {}).items()}
        self._devices = tuple(_declared(devices) if isinstance(devices, str) else devices)
        self._service = service
        self._stop_at = stop_at
        self._checkpoint_bytes = checkpoint_bytes
        self._told = threading.Event()
        self._lost = False
        peers = () if self._gang is None else self._gang.peers
        if peers and peers[0].job_id < 1:
            raise InvalidInput(
                f"job {self._info.id} cannot be a member of {gang}: the job of rank 0 would be {peers[0].job_id}"
            )
        self._children = Children(max([self._info.id, *(peer.job_id for peer in peers)]) + 1)
        self._directory: Path | None = None
        self._given = self._as_file(checkpoint)
        """What `checkpoint` is in this epoch; what is saved meanwhile is for the next one, or the next attempt."""
        self.beats: list[dict[str, Any]] = []
        """Each beat as it would be stored: step, total, phase and the handler's own fields, where given."""
        self.logs: list[logging.LogRecord] = []
        """What was written to `log`, at every level."""
        self.checkpoints: dict[int, bytes] = {}
        """What was saved, by step."""
        self.is_ready: tuple[bool, int | None] | None = None
        """What `ready` said last: whether it is, and its port. None: nothing yet."""
        self.loads: list[float] = []
        """What `load` said."""
        self.model: str | None = None
        """What `set_model` said last."""
        self.submitted: list[Submission] = []
        """The jobs that Apps without a dsn submitted inside this one."""
        self.snoozed_s: float | None = None
        """How long `snooze` asked to wait."""
        self.completed = False
        """Whether the handler has called `complete`."""
        self.result: Any = None
        """What it completed with, as it would be stored."""

    # -- what a test does ------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Tell the job to stop: `stopping` is true from now on, and `raise_if_stopping` raises `Stopped`."""
        self._told.set()

    def lose(self) -> None:
        """End the claim: the job is told to stop, and what needs the claim raises `StaleToken`."""
        self._lost = True
        self._told.set()

    def change_gang(self, gang: tuple[int, int] | GangInfo) -> None:
        """Begin a new epoch around this member: (rank, world size), or a `GangInfo` of a later epoch.

        `checkpoint` is the latest that was saved from now on. Callbacks of `on_gang_change` run in a thread, and have
        run when this returns.
        """
        if self._gang is None:
            raise InvalidInput("this job is in no gang: make its context with FakeContext(gang=(rank, size))")
        changed = _gang_info(gang, self._info.id, epoch=self._gang.epoch + 1)
        assert changed is not None
        if changed.epoch <= self._gang.epoch:
            raise InvalidInput(f"pass a later epoch than {self._gang.epoch}, or (rank, size)")
        with self._lock:
            self._given = self._latest()
            self._gang = changed
        teller = threading.Thread(target=self._gang_changed, args=(changed,), name="gangq-gang", daemon=True)
        teller.start()
        teller.join()

    def next_attempt(self) -> FakeContext:
        """Return the context of the next attempt: a new token, in a gang a new epoch, and the latest checkpoint.

        What this attempt submitted exists: its ids are taken, and its unique keys and request ids were given.
        """
        info = self._info
        attempt = replace(info, attempt=info.attempt + 1, token=info.token + 1)
        gang = None if self._gang is None else replace(self._gang, epoch=self._gang.epoch + 1)
        following = FakeContext(
            gang=gang,
            checkpoint=self._latest(),
            inputs=self._given_inputs,
            devices=self._devices,
            service=self._service,
            job=attempt,
            checkpoint_bytes=self._checkpoint_bytes,
        )
        following._children = self._children
        following._facts_given = self._facts_given
        return following

    @property
    def phases(self) -> list[str]:
        """The phases that beats named, in order; one that several beats in a row named is listed once."""
        named = [beat["phase"] for beat in self.beats if beat.get("phase") is not None]
        return [phase for phase, _ in itertools.groupby(named)]

    def is_for(self, task: str, options: TaskOptions, payload: Mapping[str, Any]) -> None:
        """For `run`: this is the job of that task with this payload."""
        needs = {} if self._facts_given else declared(options)
        facts = {name: needs[name] for name in _DECLARED if name in needs}
        self._info = replace(self._info, task=task, payload=payload, **facts)

    # -- what the handler sees -------------------------------------------------------------------------------

    @property
    def job(self) -> JobInfo:
        """See `Context.job`."""
        return self._info

    @property
    def _stop_event(self) -> threading.Event:
        return self._told

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """See `Context.devices`."""
        return self._devices

    def _load_checkpoint(self) -> Checkpoint | None:
        return self._given

    def _load_inputs(self) -> dict[int, Any]:
        self._require_claim()
        return self._given_inputs

    @property
    def log(self) -> Logger:
        """See `Context.log`. Every record is kept in `logs`; those of the level that logging is set to go on to its
        handlers.
        """
        adapter = job_log(self._info, self._gang)
        adapter.logger = _KeepingLogger(adapter.logger, self.logs)
        return adapter

    # -- what the handler says -------------------------------------------------------------------------------

    def _send_beat(self, data: dict[str, Any]) -> None:
        stored, _ = as_progress(data, BEAT_BYTES)
        with self._lock:
            self.beats.append(json.loads(dumps(stored, "a beat")))
        self._reached(stored.get("step"))

    @property
    def service(self) -> ServiceInfo | None:
        """See `Context.service`."""
        return self._service

    def ready(self, ready: bool = True, *, port: int | None = None) -> None:
        """See `Context.ready`. Kept in `is_ready`."""
        if self._service is not None and not self.told_to_stop:
            self.is_ready = (ready, self._service.port if port is None else port or None)

    def load(self, load: float) -> None:
        """See `Context.load`. Kept in `loads`."""
        if self._service is not None:
            self.loads.append(float(load))

    def set_model(self, name: str | None) -> None:
        """See `Context.set_model`."""
        self.model = name

    def save_checkpoint(self, step: int, data: bytes) -> None:
        """See `Context.save_checkpoint`."""
        kept = bytes(memoryview(data))
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(f"the step of a checkpoint is {step!r}: an integer is needed")
        self._require_step(step)
        if len(kept) > self._checkpoint_bytes:
            raise TooLarge(
                f"checkpoint of job {self._info.id} has {len(kept)} bytes, the limit is {self._checkpoint_bytes}. "
                "Save large states to shared storage and checkpoint their address, or raise the limit: "
                "gangq.configure('{\"checkpoint_bytes\": ...}')."
            )
        self._require_claim()
        with self._lock:
            self.checkpoints[step] = kept
        self._reached(step)

    def complete(self, connection: object, result: Any = None) -> None:
        """See `Context.complete`. The connection is not used."""
        del connection
        stored = json.loads(dumps_result(result, f"the result of job {self._info.id}"))
        self._require_claim()
        with self._lock:
            self._say_completed()
            self.result = stored

    def _say_snoozed(self, for_s: float) -> None:
        self.snoozed_s = for_s

    def _say_completed(self) -> None:
        self.completed = True

    def submit_child(self, verb: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Context.submit_child`. It is kept in `submitted`. Raises `InvalidInput` for a unique key or a request
        id that was given before, by an earlier attempt too: only a database knows what that comes to.
        """
        self._require_claim()
        return self._children.submit(verb, arguments, self.submitted)

    # ------------------------------------------------------------------------------------------------------

    def _require_claim(self) -> None:
        if self._lost:
            info = self._info
            raise StaleToken(
                f"token {info.token} is not the present claim of job {info.id}, which is over. The claim was lost "
                "(lease ended, cancelled, drained) or is over. Stop the work and report nothing."
            )

    def _require_step(self, step: int) -> None:
        if not 0 <= step <= _MOST_STEP:
            raise InvalidInput(
                f"checkpoint of job {self._info.id} at step {step}. A checkpoint needs a step from 0 and its bytes."
            )

    def _reached(self, step: object) -> None:
        if self._stop_at is not None and isinstance(step, int | float) and step >= self._stop_at:
            self.stop()

    def _latest(self) -> Checkpoint | None:
        step = max(self.checkpoints, default=-1)
        if self._given is not None and self._given.step > step:
            return self._given
        return self._as_file((step, self.checkpoints[step])) if self.checkpoints else None

    def _as_file(self, checkpoint: tuple[int, bytes] | Checkpoint | None) -> Checkpoint | None:
        """The checkpoint, with its bytes in a file of this context."""
        if checkpoint is None:
            return None
        step, data = checkpoint if isinstance(checkpoint, tuple) else (checkpoint.step, checkpoint.data)
        self._require_step(step)
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="gangq-fake-"))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        with tempfile.NamedTemporaryFile(
            prefix=f"checkpoint-{step}-", dir=self._directory, delete=False
        ) as file:
            file.write(data)
        return Checkpoint(step, data, Path(file.name))


class _KeepingLogger(logging.Logger):
    """Keeps each record in a list, and hands those to `logger` that it is enabled for."""

    def __init__(self, logger: logging.Logger, records: list[logging.LogRecord]) -> None:
        super().__init__(logger.name, logging.DEBUG)
        self._logger = logger
        self._records = records

    def callHandlers(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        if self._logger.isEnabledFor(record.levelno):
            self._logger.handle(record)


def _as_input(job_id: int, given: object) -> Any:
    """A result as it comes back out of JSON, or an error as it is."""
    return given if isinstance(given, BaseException) else json.loads(dumps(given, f"inputs[{job_id}]"))


def _declared(spec: str) -> list[DeviceInfo]:
    found = parse_declared(spec, host="localhost", worker="fake")
    return [DeviceInfo(device.uuid, device.index, device.vram_mb) for device in found]


def _job_id(gang: tuple[int, int] | GangInfo | None) -> int:
    """The job of a member, where the test does not say which it is: each rank has one of its own."""
    if gang is None:
        return 1
    if isinstance(gang, GangInfo):
        return {peer.rank: peer.job_id for peer in gang.peers}.get(gang.rank, 1 + gang.rank)
    return 1 + gang[0]


def _gang_info(gang: tuple[int, int] | GangInfo | None, job_id: int, *, epoch: int) -> GangInfo | None:
    """The gang as told, or of members that all run on this host; the ids of their jobs follow their ranks.
    Raises `InvalidInput` where job `job_id` cannot be the member.
    """
    if gang is None:
        return None
    if isinstance(gang, GangInfo):
        for peer in gang.peers:
            if peer.rank == gang.rank and peer.job_id != job_id:
                raise InvalidInput(
                    f"rank {peer.rank} of gang g{gang.id} is job {peer.job_id}, and this is job {job_id}"
                )
        return gang
    rank, size = gang
    if not 0 <= rank < size:
        raise InvalidInput(f"gang is {gang!r}: (rank, size), with a rank from 0 to {size - 1}")
    peers = (Peer(one, job_id - rank + one, "localhost", f"worker-{one}") for one in range(size))
    return GangInfo(
        id=1,
        epoch=epoch,
        rank=rank,
        world_size=size,
        local_rank=rank,
        node_rank=0,
        local_world_size=size,
        peers=tuple(peers),
        master_addr="127.0.0.1",
        master_port=_MASTER_PORT,
        role_rank=rank,
    )

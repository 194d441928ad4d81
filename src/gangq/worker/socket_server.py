"""The worker's side of ``GANGQ_SOCKET``: what a command may ask, and nothing more.

A Unix socket in the worker's own 0700 directory. Each job has a random key; a request is about the job whose key it
carries and can be about no other. A job that opens connections by the hundred is cut off alone.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangq import logqueue
from gangq.client.encoding import dumps
from gangq.context import Checkpoint
from gangq.durations import seconds
from gangq.errors import GangqError, InvalidInput, WrongState
from gangq.worker.context_impl import no_snooze, submit_child
from gangq.worker.endings import WORK_ENDS
from gangq.worker.handler_info import (
    as_wire,
    checkpoint_as_wire,
    fetch_checkpoint,
    fetch_inputs,
    load_checkpoint,
    store_checkpoint,
)
from gangq.worker.jobs import ActiveJob
from gangq.worker.replicas import Replica
from gangq.worker.results import clean
from gangq.worker.session import Session
from gangq.worker.shared import SharedProcess

log = logging.getLogger("gangq.worker.socket")

_PER_JOB = 64
_WITHOUT_KEY = 64
"""Connections that have not shown a key yet; for one more, the oldest of them is cut."""
_FIRST_WORD_S = 2.0
_BACKLOG = 16
"""asyncio accepts so many at once, before it closes any that were cut: a flood must not take the worker's files."""
_LINE_SLACK = 1 << 20
_SMALL = 64 << 10
"""A request of at most so many bytes is read in the control loop."""
_SLOW = frozenset({"checkpoint", "inputs", "load_checkpoint", "save_checkpoint", "submit"})
"""Requests whose answer has to wait for the database."""


class SocketServer:
    """Answers the processes of this session's jobs."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self.path = path
        self._checkpoints: dict[int, dict[str, Any] | None] = {}
        """By token, what each job that runs resumes from."""
        self._processes: dict[str, SharedProcess] = {}
        self._open: Counter[str] = Counter()
        self._without_key: dict[asyncio.StreamWriter, None] = {}
        self._server: asyncio.Server | None = None
        self._ops: dict[str, Callable[[ActiveJob, dict[str, Any]], dict[str, Any]]] = {
            "beat": self._beat,
            "checkpoint": self._checkpoint,
            "completed": self._completed,
            "describe": self._describe,
            "gang": self._gang,
            "inputs": self._inputs,
            "load": self._load,
            "load_checkpoint": self._load_checkpoint,
            "outcome": self._outcome,
            "ready": self._ready,
            "save_checkpoint": self._save_checkpoint,
            "status": self._status,
            "submit": self._submit,
        }

    async def start(self) -> None:
        """Listen from now on. For the control loop.

        Raises:
            OSError: the path is too long (about 100 bytes) or cannot be made.
        """
        self._server = await asyncio.start_unix_server(
            self._serve, str(self.path), limit=self._request_bytes, backlog=_BACKLOG
        )

    async def stop(self) -> None:
        """Stop listening; open connections end with their processes."""
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)

    def announce(self, job: ActiveJob, checkpoint: Checkpoint | None) -> None:
        """Its processes are about to ask what they are to do. From any thread, as :meth:`withdraw`."""
        self._checkpoints[job.token] = checkpoint_as_wire(checkpoint)

    def withdraw(self, job: ActiveJob) -> None:
        """The job has ended."""
        self._checkpoints.pop(job.token, None)

    def attach(self, process: SharedProcess) -> Callable[[], object]:
        """It runs many jobs, and has a key of its own; returns what ends that. From any thread."""
        self._processes[process.key] = process
        return lambda: self._processes.pop(process.key)

    @property
    def _request_bytes(self) -> int:
        return 2 * self._session.terms.checkpoint_bytes + _LINE_SLACK

    # -- connections -----------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted: ActiveJob | SharedProcess | None = None
        self._without_key[writer] = None
        if len(self._without_key) > _WITHOUT_KEY:
            oldest = next(iter(self._without_key))
            del self._without_key[oldest]
            oldest.transport.abort()
        try:
            first: float | None = _FIRST_WORD_S
            while True:
                async with asyncio.timeout(first):
                    line = await self._line(reader)
                if line == b"":
                    return
                job, answer = await self._answer(line)
                if job is not None and counted is None:
                    if self._open[job.key] >= _PER_JOB:
                        log.warning("socket_crowded", extra=job.extra)
                        return
                    self._open[job.key] += 1
                    counted, first = job, None
                    self._without_key.pop(writer, None)
                writer.write(answer)
                await writer.drain()
                if job is None:
                    return
        except (OSError, TimeoutError):
            return
        finally:
            self._without_key.pop(writer, None)
            if counted is not None:
                self._open[counted.key] -= 1
                if not self._open[counted.key]:
                    del self._open[counted.key]
            writer.close()

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes | None:
        """The next request; empty at the end, None where it is longer than any may be."""
        try:
            return await reader.readuntil()
        except asyncio.IncompleteReadError as end:
            return end.partial
        except asyncio.LimitOverrunError:
            return None

    async def _answer(self, line: bytes | None) -> tuple[ActiveJob | SharedProcess | None, bytes]:
        """Whose request it is, and the answer to it."""
        small = line is None or len(line) <= _SMALL
        job, request = self._read(line) if small else await asyncio.to_thread(self._read, line)
        if job is None:
            return None, _encoded(request)
        if isinstance(job, SharedProcess):
            return job, _encoded(await self._of_process(job, request))
        op = request["op"]
        if not small or (isinstance(op, str) and op in _SLOW):
            return job, await self._session.control.in_thread(self._carry_out, job, request)
        return job, self._carry_out(job, request)

    def _read(self, line: bytes | None) -> tuple[ActiveJob | SharedProcess | None, dict[str, Any]]:
        """The job of a request and its content; or None and a refusal."""
        try:
            request: dict[str, Any] = json.loads(line or b"")
            key, _ = request["key"], request["op"]
            job = self._processes.get(str(key)) or self._session.table.by_key(str(key))
        except (ValueError, TypeError, KeyError, RecursionError):
            said, most = (line or b"")[:100], self._request_bytes
            return None, _refusal(InvalidInput(f"not a request of at most {most} bytes: {said!r}"))
        if job is None:
            return None, _refusal(GangqError("no running job of this worker has that key: its claim is over"))
        return job, request

    @staticmethod
    async def _of_process(process: SharedProcess, request: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await process.orders.answer(request)
        except (KeyError, TypeError, ValueError) as problem:
            return _refusal(_malformed(request["op"], problem))
        if answer is not None:
            return {"ok": True, **answer}
        return _refusal(
            GangqError(
                "this process runs several jobs, and this is about none of them: use the ctx of the handler, or "
                "start the thread with asyncio.to_thread, which keeps gangq.current()"
            )
        )

    def _carry_out(self, job: ActiveJob, request: dict[str, Any]) -> bytes:
        op = request["op"]
        try:
            if op not in self._ops:
                raise InvalidInput(f"unknown request {op!r}; known: {', '.join(sorted(self._ops))}")
            with logqueue.lines_about(job):
                answer = {"ok": True, **self._ops[op](job, request)}
        except GangqError as problem:
            answer = _refusal(problem)
        except (KeyError, TypeError, ValueError) as problem:
            answer = _refusal(_malformed(op, problem))
        return _encoded(answer)

    # -- requests --------------------------------------------------------------------------------------------

    def _beat(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        data = request["data"]
        if not isinstance(data, dict):
            raise InvalidInput("a beat is a JSON object")
        job.beat(data)
        return {}

    def _checkpoint(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        directory = self._session.directory / f"{job.id}-{job.token}"
        return {"checkpoint": checkpoint_as_wire(fetch_checkpoint(self._session, job, directory))}

    def _completed(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        job.say_completed()
        return {}

    def _describe(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        checkpoint = self._checkpoints[job.token]
        return {**as_wire(job), "checkpoint": checkpoint, "request_bytes": self._request_bytes}

    def _gang(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        return {"gang": None if job.gang is None else asdict(job.gang)}

    def _inputs(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        return {"inputs": fetch_inputs(self._session, job)}

    def _ready(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        port = request.get("port")
        _replica(job).ready(bool(request["ready"]), None if port is None else int(port))
        return {}

    def _load(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        _replica(job).busy(float(request["load"]))
        return {}

    def _status(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        reason = (job.lost and "lost") or job.stop_reason
        epoch = None if job.gang is None else job.gang.epoch
        return {
            "stopping": job.stopping.is_set(),
            "reason": reason,
            "job": job.id,
            "token": job.token,
            "epoch": epoch,
        }

    def _outcome(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        kind = request["kind"]
        if kind not in WORK_ENDS:
            raise InvalidInput(f"unknown outcome {kind!r}")
        names = ("kind", "result", "error", "retryable", "retry_in_s", "for_s")
        work_end = {name: request.get(name) for name in names}
        if kind == "snoozed":
            work_end["for_s"] = seconds(request["for_s"], "for_s", most=1e7)
            if job.claim.gang_id is not None:
                raise no_snooze(job.id, job.claim.gang_id)
        if kind == "error" or request.get("error") is not None:
            try:
                work_end["error"] = _error(request.get("error"))
                if work_end["retry_in_s"] is not None:
                    work_end["retry_in_s"] = seconds(work_end["retry_in_s"], "retry_in_s", most=1e7)
            except GangqError as problem:
                # A report that the database refuses would be made again and again, and with it the job.
                error = {"type": "MalformedOutcome", "message": f"its process sent no error: {problem}"}
                job.say_end({"kind": "error", "error": error, "retryable": True})
                raise
        job.say_end(work_end)
        return {}

    def _submit(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        arguments = request["arguments"]
        if not isinstance(arguments, dict):
            raise InvalidInput("the arguments of a submission are a JSON object")
        return submit_child(self._session, job, str(request["verb"]), arguments)

    def _save_checkpoint(self, job: ActiveJob, request: dict[str, Any]) -> dict[str, Any]:
        try:
            data = base64.b64decode(request["data"], validate=True)
        except binascii.Error as problem:
            raise InvalidInput(f"a checkpoint travels as base64: {problem}") from problem
        step = int(request["step"])
        store_checkpoint(self._session, job, step, data)
        return {"step": step}

    def _load_checkpoint(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        saved = load_checkpoint(self._session, job)
        if saved is None:
            return {"step": None, "data": None}
        return {"step": saved.step, "data": base64.b64encode(saved.data).decode()}


def _replica(job: ActiveJob) -> Replica:
    if job.replica is None:
        raise WrongState(f"job {job.id} is no replica of a service: gangq service set makes one")
    return job.replica


def _error(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise InvalidInput(f"an error is a JSON object with type and message, not {said!r:.100}")
    for name in ("type", "message"):
        if not isinstance(said.get(name), str):
            raise InvalidInput(f"the {name} of an error is text, not {said.get(name)!r:.100}")
    error = {key: clean(value) if isinstance(value, str) else value for key, value in said.items()}
    dumps(error, "the error")
    return error


def _malformed(op: object, problem: Exception) -> InvalidInput:
    return InvalidInput(f"request {op!r} is incomplete or malformed: {problem!r}")


def _encoded(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _refusal(problem: GangqError) -> dict[str, Any]:
    return {"ok": False, "error": type(problem).__name__, "message": str(problem)}

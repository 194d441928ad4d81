"""The worker's side of ``GANGQ_SOCKET``: what a command may ask, and nothing more.

A Unix socket in the worker's own 0700 directory. Each job has a random key; a request is about the job whose
key it carries and can be about no other. A thread per connection, because an answer may have to wait for the
database; a job that opens connections by the hundred is cut off alone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangq.client.encoding import dumps
from gangq.errors import GangqError, InvalidInput
from gangq.worker.context_impl import submit_child
from gangq.worker.facts import checkpoint_as_wire, fetch_checkpoint, store_checkpoint
from gangq.worker.jobs import ActiveJob
from gangq.worker.reporter import clean
from gangq.worker.retry import until_answered
from gangq.worker.session import Session

log = logging.getLogger("gangq.worker.socket")

_PER_JOB = 64
_WITHOUT_KEY = 64
"""Connections that have not shown a key yet; for one more, the oldest of them is cut."""
_FIRST_WORD_S = 2.0
_PAUSE_S = 0.1
_LINE_SLACK = 1 << 20


class SocketServer:
    """Answers the processes of this session's jobs."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session = session
        self.path = path
        self._facts: dict[int, dict[str, Any]] = {}
        self._open: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._without_key: dict[socket.socket, None] = {}
        self._fewer = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._accept, name="gangq-socket", daemon=True)
        self._ops: dict[str, Callable[[ActiveJob, dict[str, Any]], dict[str, Any]]] = {
            "beat": self._beat,
            "checkpoint": self._checkpoint,
            "completed": self._completed,
            "describe": self._describe,
            "gang": self._gang,
            "load_checkpoint": self._load_checkpoint,
            "outcome": self._outcome,
            "save_checkpoint": self._save_checkpoint,
            "status": self._status,
            "submit": self._submit,
        }

    def start(self) -> None:
        """Listen from now on.

        Raises:
            OSError: the path is too long (about 100 bytes) or cannot be made.
        """
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; open connections end with their processes."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def announce(self, job: ActiveJob, facts: dict[str, Any]) -> None:
        """What ``describe`` answers this job's processes."""
        with self._lock:
            self._facts[job.token] = facts

    def withdraw(self, job: ActiveJob) -> None:
        """The job has ended."""
        with self._lock:
            self._facts.pop(job.token, None)

    @property
    def _request_bytes(self) -> int:
        return 2 * self._session.terms.checkpoint_bytes + _LINE_SLACK

    # -- connections -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as problem:
                # No descriptor left, most likely. Others come free, and jobs that beat must not find a deaf worker.
                if not self._closed.wait(_PAUSE_S):
                    log.warning("socket_not_accepted", extra={"error": str(problem)})
                continue
            with self._fewer:
                self._without_key[connection] = None
                while len(self._without_key) > _WITHOUT_KEY and not self._closed.is_set():
                    with contextlib.suppress(OSError):
                        next(iter(self._without_key)).shutdown(socket.SHUT_RDWR)
                    self._fewer.wait(_PAUSE_S)
            try:
                threading.Thread(
                    target=self._serve, args=(connection,), name="gangq-socket-client", daemon=True
                ).start()
            except RuntimeError as problem:  # No thread left.
                log.warning("socket_not_served", extra={"error": str(problem)})
                connection.close()
                self._known(connection)

    def _known(self, connection: socket.socket) -> None:
        """It has shown a key, or is closed."""
        with self._fewer:
            if connection in self._without_key:
                del self._without_key[connection]
                self._fewer.notify()

    def _serve(self, connection: socket.socket) -> None:
        counted: ActiveJob | None = None
        try:
            with connection, connection.makefile("rb") as lines:
                connection.settimeout(_FIRST_WORD_S)
                most = self._request_bytes
                while line := lines.readline(most):
                    job, answer = self._answer(line, most)
                    if job is not None and counted is None:
                        with self._lock:
                            if self._open[job.token] >= _PER_JOB:
                                log.warning("socket_crowded", extra=job.extra)
                                return
                            self._open[job.token] += 1
                        counted = job
                        self._known(connection)
                        connection.settimeout(None)
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                    if job is None:
                        return
        except OSError:
            return
        finally:
            self._known(connection)
            if counted is not None:
                with self._lock:
                    self._open[counted.token] -= 1
                    if not self._open[counted.token]:
                        del self._open[counted.token]

    def _answer(self, line: bytes, most: int) -> tuple[ActiveJob | None, dict[str, Any]]:
        try:
            request: dict[str, Any] = json.loads(line if len(line) < most else b"")
            key, op = request["key"], request["op"]
            job = self._session.table.by_key(str(key))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None, _refusal(InvalidInput(f"not a request of at most {most} bytes: {line[:100]!r}"))
        if job is None:
            return None, _refusal(GangqError("no running job of this worker has that key: its claim is over"))
        try:
            if op not in self._ops:
                raise InvalidInput(f"unknown request {op!r}; known: {', '.join(sorted(self._ops))}")
            return job, {"ok": True, **self._ops[op](job, request)}
        except GangqError as problem:
            return job, _refusal(problem)
        except (KeyError, TypeError, ValueError) as problem:
            return job, _refusal(InvalidInput(f"request {op!r} is incomplete or malformed: {problem!r}"))

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
        job.completed_by_handler = True
        return {}

    def _describe(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            told = dict(self._facts[job.token])
        return {**told, **self._gang(job, _request), "request_bytes": self._request_bytes}

    def _gang(self, job: ActiveJob, _request: dict[str, Any]) -> dict[str, Any]:
        return {"gang": None if job.gang is None else asdict(job.gang)}

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
        if request["kind"] not in ("result", "error", "stopped"):
            raise InvalidInput(f"unknown outcome {request['kind']!r}")
        outcome = {name: request.get(name) for name in ("kind", "result", "error", "retryable")}
        if request["kind"] == "error":
            try:
                outcome["error"] = _error(request.get("error"))
            except GangqError as problem:
                # A report that the database refuses would be made again and again, and with it the job.
                job.outcome = {
                    "kind": "error",
                    "error": {"type": "MalformedOutcome", "message": f"its process sent no error: {problem}"},
                    "retryable": True,
                }
                raise
        job.outcome = outcome
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
        saved = until_answered(
            lambda: self._session.client.load_checkpoint(job_id=job.id, token=job.token),
            "load_checkpoint",
            lambda: job.lost is not None or self._session.lapsed(),
        )
        if saved is None:
            return {"step": None, "data": None}
        return {"step": saved.step, "data": base64.b64encode(saved.data).decode()}


def _error(said: object) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise InvalidInput(f"an error is a JSON object with type and message, not {said!r:.100}")
    for name in ("type", "message"):
        if not isinstance(said.get(name), str):
            raise InvalidInput(f"the {name} of an error is text, not {said.get(name)!r:.100}")
    error = {key: clean(value) if isinstance(value, str) else value for key, value in said.items()}
    dumps(error, "the error")
    return error


def _refusal(problem: GangqError) -> dict[str, Any]:
    return {"ok": False, "error": type(problem).__name__, "message": str(problem)}

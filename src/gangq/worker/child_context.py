"""Talking to the worker from inside a command: the other end of ``GANGQ_SOCKET``.

Used by ``gangq.current()`` in a child, by isolated handlers and by ``gangq beat`` and ``gangq checkpoint``.
One JSON object a line each way; every request carries the job's key (``GANGQ_KEY``), without which the worker
refuses it. A child never learns a DSN.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangq import errors
from gangq.context import Checkpoint, DeviceInfo, JobInfo, ServiceInfo
from gangq.errors import GangqError, TooLarge, WorkerGone
from gangq.worker.context_impl import HandlerContext
from gangq.worker.handler_info import checkpoint_from_wire, gang_from_wire, inputs_from_wire
from gangq.worker.jobs import BEAT_BYTES
from gangq.worker.results import as_progress, dumps_result, note_for

_AROUND_RESULT_BYTES = 1 << 10
"""More than what a request says beside the result that it carries."""
_ONCE = frozenset({"submit"})
"""Requests that may have been carried out where the answer is lost, and must not be sent again."""
_POLL_S = 0.1
_GANG_POLL_S = 0.5


class Link:
    """Requests to the worker, one at a time. Thread-safe; reconnects in a forked child."""

    def __init__(self, path: str, key: str) -> None:
        self.path = Path(path)
        self._key = key
        self._lock = threading.Lock()
        self._pid = 0
        self._socket: socket.socket | None = None
        self._rest = b""

    @classmethod
    def from_environ(cls) -> Link:
        """To the worker of the job this process belongs to.

        Raises:
            GangqError: this process belongs to none.
        """
        path, key = os.environ.get("GANGQ_SOCKET"), os.environ.get("GANGQ_KEY")
        if not path or not key:
            raise GangqError(
                "no job runs here: GANGQ_SOCKET and GANGQ_KEY are set by a gangq worker for the commands it "
                "starts; run this inside one (gangq run -- ...), and pass both variables on"
            )
        return cls(path, key)

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            WorkerGone: no answer.
            GangqError: what the worker refused it with, as the class it was there.
        """
        request = json.dumps({"key": self._key, "op": op, **fields}).encode() + b"\n"
        with self._lock:
            try:
                try:
                    answer = self._exchange(request)
                except ConnectionError:
                    # A worker under a flood of connections cuts some, perhaps this one.
                    self._hang_up()
                    if op in _ONCE:
                        raise
                    answer = self._exchange(request)
            except OSError as problem:
                self._hang_up()
                raise WorkerGone(
                    f"the worker does not answer on {self.path} ({problem}): it has ended, and this command "
                    "is about to be stopped"
                ) from problem
            except BaseException:
                # Of a signal's handler, say: the answer that is to come would be taken for that to the next request.
                self._hang_up()
                raise
        if not answer.pop("ok"):
            raise _error(answer)
        return answer

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; a later request connects again."""
        with self._lock:
            self._hang_up()

    def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._socket is None or self._pid != os.getpid():
            # A forked child would mix its answers with its parent's.
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # No time limit: during an outage an answer may take as long as the lease. Where the worker has ended, so
            # has the connection; where it is stopped, the guardian ends this process.
            self._socket.setblocking(True)
            self._socket.connect(str(self.path))
            self._pid, self._rest = os.getpid(), b""
        self._socket.sendall(request)
        while b"\n" not in self._rest:
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionResetError("closed by the worker")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _hang_up(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            self._socket.close()
        self._socket = None


def _error(answer: dict[str, Any]) -> GangqError:
    kind = getattr(errors, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, GangqError):
        try:
            return kind(answer["message"])
        except TypeError:
            pass
    return GangqError(f"{answer['error']}: {answer['message']}")


class ChildContext(HandlerContext):
    """For a command, or a handler in a child process: asks the worker over its socket."""

    _poll_s = _POLL_S

    def __init__(self, link: Link, stopping: threading.Event | None = None) -> None:
        """``stopping`` is set when the worker says so; the caller may set it too."""
        super().__init__()
        self._link = link
        wire = link.ask("describe")
        self._info, self._gang = JobInfo(**wire["job"]), gang_from_wire(wire["gang"])
        self._device_infos = tuple(DeviceInfo(**device) for device in wire["devices"])
        self._checkpoint = checkpoint_from_wire(wire["checkpoint"])
        self._loaded_for = 0 if self._gang is None else self._gang.epoch
        service = wire["service"]
        self._service = None if service is None else ServiceInfo(**service)
        self._request_bytes: int = wire["request_bytes"]
        self._beat_noted = False
        self._gang_lock = threading.RLock()
        self._follower: threading.Thread | None = None
        self._event = threading.Event() if stopping is None else stopping
        self._asked_at = 0.0

    @property
    def job(self) -> JobInfo:
        return self._info

    @property
    def _stop_event(self) -> threading.Event:
        return self._event

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        return self._device_infos

    def _poll(self) -> None:
        # A loop may look at this a million times a second.
        now = time.monotonic()
        if self._event.is_set() or now - self._asked_at < _POLL_S / 2:
            return
        self._asked_at = now
        try:
            status = self._link.ask("status")
            if status["stopping"]:
                self._event.set()
            self._renew_gang(status.get("epoch"))
        except WorkerGone:
            self._event.set()

    def _renew_gang(self, epoch: int | None) -> None:
        with self._gang_lock:
            if self._gang is None or epoch is None or epoch <= self._gang.epoch:
                return
            gang = gang_from_wire(self._link.ask("gang")["gang"])
            if gang is None:
                return
            self._gang = gang
        self._gang_changed(gang)

    def _follow_gang(self) -> None:
        with self._gang_lock:
            if self._gang is None or self._follower is not None:
                return
            self._follower = threading.Thread(target=self._follow, name="gangq-gang", daemon=True)
            self._follower.start()

    def _follow(self) -> None:
        while not self._event.wait(_GANG_POLL_S):
            self._poll()

    @property
    def service(self) -> ServiceInfo | None:
        return self._service

    def ready(self, ready: bool = True, *, port: int | None = None) -> None:
        if self._service is not None:
            self._link.ask("ready", ready=ready, port=port)

    def load(self, load: float) -> None:
        if self._service is not None:
            self._link.ask("load", load=load)

    def _load_checkpoint(self) -> Checkpoint | None:
        return checkpoint_from_wire(self._link.ask("checkpoint")["checkpoint"])

    def _load_inputs(self) -> dict[int, Any]:
        return inputs_from_wire(self._link.ask("inputs")["inputs"])

    def _send_beat(self, data: dict[str, Any]) -> None:
        beat, why = as_progress(data, BEAT_BYTES)
        try:
            self._link.ask("beat", data=beat)
        except GangqError as problem:
            why = str(problem)
        if why is not None and not self._beat_noted:
            self._beat_noted = True
            self.log.warning("a beat was not stored as it was given: %s", why)

    def set_model(self, name: str | None) -> None:
        """What a child has loaded ends with it."""

    def save_checkpoint(self, step: int, data: bytes) -> None:
        self._link.ask("save_checkpoint", step=step, data=base64.b64encode(data).decode())

    def submit_child(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # Moments and UUIDs travel as text, which is cast in the database.
        sent = json.loads(json.dumps(dict(arguments), default=str))
        return self._link.ask("submit", verb=verb, arguments=sent)

    def _say_completed(self) -> None:
        self._link.ask("completed")

    def _say_snoozed(self, for_s: float) -> None:
        self.outcome("snoozed", for_s=for_s)

    def outcome(self, kind: str, **fields: Any) -> None:
        """How an isolated handler ended: ``error``, ``stopped`` or ``snoozed``. A command says the last."""
        self._link.ask("outcome", kind=kind, **fields)

    def returned(self, result: Any) -> None:
        """An isolated handler has returned this."""
        what = f"the result of task {self._info.task!r}"
        text = dumps_result(result, what)
        room = self._request_bytes - _AROUND_RESULT_BYTES
        if len(text) > room:
            text = note_for(TooLarge(f"{what} has {len(text)} bytes, a worker takes {room}"), what)
        self._link.ask("outcome", kind="result", result=json.loads(text))


def connect() -> ChildContext:
    """The context of the job that this process belongs to; what ``gangq.current()`` calls in a child."""
    return ChildContext(Link.from_environ())

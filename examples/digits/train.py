"""Train a small digit classifier data-parallel across the ranks of a gang: the real work of ``gangq demo``.

What happens
    Each rank holds its own shard of the UCI handwritten digits (``DATA.md``), computes a gradient on it, and
    all ranks average their gradients over TCP before every update, so all hold the same weights after each
    step. The model is a multilayer perceptron 64-``hidden``-10 with momentum SGD, in numpy alone.

How ranks meet
    Rank 0 listens on the master address and port that gangq handed out; the others connect until a deadline.
    The first message of a connection says gang, epoch, rank and world size. Rank 0 refuses whoever is not a
    member of its own epoch, so a zombie of an earlier epoch cannot push stale gradients into this one.

What survives a death
    Every ``checkpoint_every`` steps the state (weights, momentum, step) is saved. Batches are drawn from
    (seed, step, rank), so a run resumed from a checkpoint takes exactly the path of a run that never stopped.
    A lost rank is an error on all the others at once, never a hang; the gang drains and starts again.

Two ways to run it
    In a gangq handler, ``train(ctx)`` (what it needs of ``ctx`` is the protocol ``Context``), or as a plain
    script that needs no gangq, one process a rank, told who it is by ``RANK WORLD_SIZE MASTER_ADDR
    MASTER_PORT`` (and, where gangq runs it, ``GANGQ_GANG_ID``, ``GANGQ_EPOCH`` and ``GANGQ_CHECKPOINT``)::

        for r in 0 1 2 3; do
            RANK=$r WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400 python examples/digits/train.py &
        done; wait
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DATA = Path(__file__).with_name("digits.csv.gz")
PIXELS, CLASSES = 64, 10
GLOBAL_BATCH = 128  # split over the ranks, so the result hardly depends on the world size
LEARNING_RATE, MOMENTUM = 0.1, 0.9

_FRAME = struct.Struct("!cI")  # kind, bytes that follow
_STEP = struct.Struct("!qi")  # step, the lowest rank that was told to stop or -1
_JSON, _ARRAY = b"J", b"A"
_HELLO_BYTES = 4096
_SLICE_S = 0.2  # how soon a waiting rank notices that it was told to stop
_HANDSHAKE_S = 2.0
_HURRY_S = 2.0  # a rank told to stop waits no longer than this for a peer that may be frozen

log = logging.getLogger("gangq.examples.digits")


class PeerError(RuntimeError):
    """The ranks cannot go on together."""


class PeerLost(PeerError):
    """A rank closed its connection, fell silent, or broke step."""


class PeerRefused(PeerError):
    """Rank 0 does not take this process for a member of its epoch: a zombie, or a wrong address."""


class Gang(Protocol):
    """Who this process is. gangq's ``ctx.gang`` has these and more."""

    @property
    def id(self) -> object: ...
    @property
    def epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def master_addr(self) -> str: ...
    @property
    def master_port(self) -> int: ...


class Checkpoint(Protocol):
    """What was saved by the previous epoch."""

    @property
    def data(self) -> bytes: ...


class Context(Protocol):
    """The part of a gangq handler's ``ctx`` that this training uses."""

    @property
    def gang(self) -> Gang | None: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def checkpoint(self) -> Checkpoint | None: ...
    @property
    def log(self) -> logging.Logger: ...
    def beat(self, *, step: int, total: int, phase: str, loss: float) -> object: ...
    def raise_if_stopping(self) -> object: ...
    def save_checkpoint(self, step: int, data: bytes) -> object: ...


# --- the wire: length-prefixed frames between rank 0 and each other rank ------------------------------------


class Link:
    """One connection to a peer; every failure on it is a ``PeerLost`` that names the peer."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.sock, self.peer = sock, peer
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each step waits for a delayed ack
        sock.settimeout(timeout_s)

    def send(self, kind: bytes, payload: bytes) -> None:
        """Send one frame, or raise ``PeerLost``."""
        try:
            self.sock.sendall(_FRAME.pack(kind, len(payload)) + payload)
        except OSError as error:
            raise PeerLost(f"lost {self.peer}: sending to it failed ({error})") from error

    def recv(self, limit: int) -> tuple[bytes, bytes]:
        """Return the next frame's kind and payload; over ``limit`` bytes is refused before it is read."""
        kind, size = _FRAME.unpack(self._exactly(_FRAME.size))
        if kind not in (_JSON, _ARRAY) or size > limit:
            raise PeerLost(f"lost {self.peer}: it sent kind {kind!r} of {size} bytes, not this protocol")
        return kind, self._exactly(size)

    def say(self, **words: object) -> None:
        """Send one JSON frame."""
        self.send(_JSON, json.dumps(words).encode())

    def hear(self) -> dict[str, Any]:
        """Return the next frame, which must be a JSON object."""
        kind, payload = self.recv(_HELLO_BYTES)
        return self.words(kind, payload)

    def words(self, kind: bytes, payload: bytes) -> dict[str, Any]:
        """Return what a JSON frame holds."""
        try:
            words = json.loads(payload) if kind == _JSON else None
        except ValueError:
            words = None
        if not isinstance(words, dict):
            raise PeerLost(f"lost {self.peer}: it does not speak this protocol")
        return words

    def close(self) -> None:
        """Close; safe to repeat."""
        self.sock.close()

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.sock.recv(size - len(parts))
            except OSError as error:
                raise PeerLost(f"lost {self.peer}: reading from it failed ({error})") from error
            if not part:
                raise PeerLost(f"lost {self.peer}: it closed its connection (killed, or stopped by an error)")
            parts += part
        return bytes(parts)


class Reduced(NamedTuple):
    """One step's average over all ranks, and the lowest rank that was told to stop (None: nobody)."""

    mean: Floats
    stopper: int | None


class Star:
    """All ranks of one epoch, joined through rank 0, able to average an array. Use as a context manager.

    ``told_to_stop`` is asked while waiting, so that a rank whose gang drains does not sit out
    ``peer_timeout_s`` beside a frozen peer. Raises ``PeerRefused`` or ``PeerLost``.
    """

    def __init__(
        self,
        gang: Gang,
        *,
        join_timeout_s: float = 30.0,
        peer_timeout_s: float = 30.0,
        told_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.gang, self.told_to_stop = gang, told_to_stop
        # Rank 0 judges silence first: its verdict names the lost rank, the others could only blame rank 0.
        self.peer_timeout_s = peer_timeout_s + (0.0 if gang.rank == 0 else 2.0)
        self.links: dict[int, Link] = {}
        deadline = time.monotonic() + join_timeout_s
        try:
            if gang.rank == 0:
                self._welcome_all(deadline)
            else:
                self._connect(deadline)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Star:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.gang.rank == 0 and error is not None:
            for link in self.links.values():
                try:
                    link.say(lost=str(error) or type(error).__name__)
                except PeerLost:
                    continue
        self.close()

    def close(self) -> None:
        """Close every connection; the peers see it at once."""
        for link in self.links.values():
            link.close()

    def mean(self, values: Floats, *, step: int, stop: bool = False) -> Reduced:
        """Average ``values`` (same length on all ranks); every rank gets identical bytes back.

        ``step`` must be equal on all ranks. ``stop`` says that this rank was told to stop: all hear of it in
        the same step, so all can leave with the same state.
        """
        stopper = self.gang.rank if stop else -1
        if self.gang.rank == 0:
            return self._gather_and_share(values, step, stopper)
        hub = self.links[0]
        try:
            hub.send(_ARRAY, _STEP.pack(step, stopper) + values.tobytes())
        except PeerLost:
            # Rank 0 may have said why before it closed; that is the better message.
            self._take(hub, values.nbytes, step)
            raise
        self._wait(self.links, step)
        return self._take(hub, values.nbytes, step)

    def _gather_and_share(self, values: Floats, step: int, stopper: int) -> Reduced:
        parts = {0: values}
        stoppers = [stopper]
        while len(parts) < self.gang.world_size:
            missing = {rank: link for rank, link in self.links.items() if rank not in parts}
            for rank in self._wait(missing, step):
                # A rank whose part is already here is listened to as well: its death shows at once, not when
                # the slowest of the others has answered.
                parts[rank], its_stopper = self._take(self.links[rank], values.nbytes, step)
                stoppers.append(-1 if its_stopper is None else its_stopper)
        # Summed in rank order, not in order of arrival: a resumed run must repeat the same roundings.
        mean = sum((parts[rank] for rank in sorted(parts)), np.zeros_like(values)) / len(parts)
        first = min((rank for rank in stoppers if rank >= 0), default=-1)
        for link in self.links.values():
            link.send(_ARRAY, _STEP.pack(step, first) + mean.tobytes())
        return Reduced(mean, None if first < 0 else first)

    def _wait(self, missing: Mapping[int, Link], step: int) -> list[int]:
        """Return the ranks that have something to read; ``missing`` are those to blame if none ever has."""
        begun = time.monotonic()
        hurried: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, link in self.links.items():
                selector.register(link.sock, selectors.EVENT_READ, rank)
            while True:
                ready = selector.select(_SLICE_S)
                if ready:
                    return [key.data for key, _ in ready]
                now = time.monotonic()
                if hurried is None and self.told_to_stop():
                    hurried = now
                if now - begun > self.peer_timeout_s or (hurried is not None and now - hurried > _HURRY_S):
                    names = ", ".join(f"rank {rank}" for rank in sorted(missing))
                    raise PeerLost(
                        f"lost {names}: silent for {now - begun:.1f} s at step {step}, not disconnected; "
                        "see whether its process is frozen or its host unreachable"
                    )

    def _take(self, link: Link, values_bytes: int, step: int) -> Reduced:
        expected = _STEP.size + values_bytes
        kind, payload = link.recv(max(_HELLO_BYTES, expected))
        if kind == _JSON:
            raise PeerLost(f"{link.peer} gave up: {link.words(kind, payload).get('lost')}")
        if len(payload) != expected:
            raise PeerLost(
                f"{link.peer} sent {len(payload)} bytes at step {step}, not {expected}: "
                "start all ranks with the same arguments"
            )
        its_step, stopper = _STEP.unpack_from(payload)
        if its_step != step:
            raise PeerLost(
                f"{link.peer} is at step {its_step}, rank {self.gang.rank} at step {step}: "
                "all ranks must resume from the same checkpoint"
            )
        values = np.frombuffer(payload, dtype=np.float64, offset=_STEP.size)
        return Reduced(values, stopper if stopper >= 0 else None)

    # --- joining: rank 0 listens, the others connect --------------------------------------------------------

    def _welcome_all(self, deadline: float) -> None:
        with _listen(self.gang, deadline) as listener:
            listener.settimeout(_SLICE_S)
            while len(self.links) + 1 < self.gang.world_size:
                self._leave_if_told("waiting for the other ranks")
                if time.monotonic() > deadline:
                    absent = sorted(set(range(1, self.gang.world_size)) - set(self.links))
                    raise PeerLost(
                        f"ranks {absent} of gang {self.gang.id} epoch {self.gang.epoch} never connected to "
                        f"{self.gang.master_addr}:{self.gang.master_port}; "
                        "see their logs, or the firewall between the hosts"
                    )
                try:
                    sock, address = listener.accept()
                except TimeoutError:
                    continue
                self._welcome(sock, str(address[0]))

    def _welcome(self, sock: socket.socket, host: str) -> None:
        link = Link(sock, f"a caller from {host}", _HANDSHAKE_S)
        try:
            hello = link.hear()
            why = self._objection(hello)
            if why is None:
                link.say(ok=True)
            else:
                link.say(ok=False, why=why, gang=str(self.gang.id), epoch=self.gang.epoch)
        except PeerLost as error:
            why = str(error)
        if why is not None:
            # Whoever is turned away must not harm this epoch: say so, and go on waiting for the real members.
            log.warning("digits.refused %s: %s", host, why, extra={"epoch": self.gang.epoch, "host": host})
            link.close()
            return
        rank = int(hello["rank"])
        self.links[rank] = Link(sock, f"rank {rank} ({host})", self.peer_timeout_s)

    def _objection(self, hello: Mapping[str, Any]) -> str | None:
        mine = {"gang": str(self.gang.id), "epoch": self.gang.epoch, "world_size": self.gang.world_size}
        for name, value in mine.items():
            if hello.get(name) != value:
                return f"it says {name} {hello.get(name)!r}, this is {name} {value!r}"
        rank = hello.get("rank")
        if not isinstance(rank, int) or not 0 < rank < self.gang.world_size:
            return f"rank {rank!r} is not between 1 and {self.gang.world_size - 1}"
        if rank in self.links:
            return f"rank {rank} has already joined"
        return None

    def _connect(self, deadline: float) -> None:
        where = f"{self.gang.master_addr}:{self.gang.master_port}"
        last = "no attempt yet"
        while True:
            self._leave_if_told(f"connecting to rank 0 at {where}")
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {self.gang.rank} cannot reach rank 0 at {where} ({last}); "
                    "see rank 0's log, or the firewall between the hosts"
                )
            try:
                sock = socket.create_connection((self.gang.master_addr, self.gang.master_port), _HANDSHAKE_S)
            except OSError as error:
                last = str(error)
                time.sleep(_SLICE_S / 4)
                continue
            link = Link(sock, f"rank 0 ({where})", _HANDSHAKE_S)
            if sock.getsockname() == sock.getpeername():
                # A connect to a free ephemeral port of this host can meet itself. Reset, not closed: the port
                # would sit in TIME_WAIT for a minute, and rank 0 could not bind it.
                last = "nobody listens"
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                try:
                    last = self._greet(link)
                except PeerLost as error:
                    last = str(error)
                except BaseException:
                    link.close()
                    raise
                if last == "":
                    self.links[0] = Link(sock, link.peer, self.peer_timeout_s)
                    return
            link.close()
            time.sleep(_SLICE_S / 4)

    def _greet(self, link: Link) -> str:
        """Return "" when welcome, or why to try again; raise ``PeerRefused`` when that is pointless."""
        me = self.gang
        link.say(gang=str(me.id), epoch=me.epoch, rank=me.rank, world_size=me.world_size)
        answer = link.hear()
        if answer.get("ok") is True:
            return ""
        why = f"rank 0 refused gang {me.id} epoch {me.epoch} rank {me.rank}: {answer.get('why')}"
        epoch = answer.get("epoch")
        if answer.get("gang") == str(me.id) and isinstance(epoch, int) and epoch < me.epoch:
            return f"{why}; an older epoch still holds the port"
        raise PeerRefused(f"{why}; this process is not part of the present epoch and must stop")

    def _leave_if_told(self, doing: str) -> None:
        if self.told_to_stop():
            raise PeerLost(f"told to stop while {doing}")


def _listen(gang: Gang, deadline: float) -> socket.socket:
    """Bind the master port; whoever held it before us may need a moment to let go."""
    # A host's own name often resolves to loopback on that host alone, which would lock the other hosts out.
    local = gang.master_addr in ("localhost", "::1") or gang.master_addr.startswith("127.")
    while True:
        try:
            family = socket.getaddrinfo(gang.master_addr, gang.master_port, type=socket.SOCK_STREAM)[0][0]
            address = (gang.master_addr if local else "", gang.master_port)
            return socket.create_server(address, family=family, backlog=gang.world_size + 16)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank 0 cannot listen on {gang.master_addr}:{gang.master_port} ({error}); "
                    "see who holds the port with: ss -ltnp"
                ) from error
            time.sleep(_SLICE_S / 4)


# --- the model ----------------------------------------------------------------------------------------------


def load_digits(seed: int) -> tuple[Floats, Ints, Floats, Ints]:
    """Return training pixels and labels, then held-out ones (20 %): the same split for the same seed."""
    with gzip.open(DATA, "rt", encoding="ascii") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    pixels, labels = rows[:, :PIXELS] / 16.0, rows[:, PIXELS]
    held_out = len(rows) // 5
    return pixels[held_out:], labels[held_out:], pixels[:held_out], labels[:held_out]


@dataclass
class Model:
    """Weights and momentum of a 64-``hidden``-10 perceptron, each one flat array, and the steps taken."""

    hidden: int
    weights: Floats
    momentum: Floats
    step: int = 0

    @classmethod
    def fresh(cls, hidden: int, seed: int) -> Model:
        """Return the untrained model: random weights, zero biases, equal on all ranks."""
        rng = np.random.default_rng(seed)
        first = rng.standard_normal((PIXELS, hidden)) * np.sqrt(2 / PIXELS)
        second = rng.standard_normal((hidden, CLASSES)) * np.sqrt(2 / hidden)
        weights = np.concatenate([first.ravel(), np.zeros(hidden), second.ravel(), np.zeros(CLASSES)])
        return cls(hidden, weights, np.zeros_like(weights))

    @classmethod
    def from_bytes(cls, data: bytes, hidden: int) -> Model:
        """Return the model that ``to_bytes`` saved; a different ``hidden`` is a ``ValueError``."""
        with np.load(io.BytesIO(data), allow_pickle=False) as saved:
            model = cls(int(saved["hidden"]), saved["weights"], saved["momentum"], int(saved["step"]))
        if model.hidden != hidden:
            raise ValueError(
                f"the checkpoint at step {model.step} has {model.hidden} hidden units, this run {hidden}: "
                f"pass hidden={model.hidden}, or start without the checkpoint"
            )
        return model

    def to_bytes(self) -> bytes:
        """Return the whole state, compressed: about 70 KB at 64 hidden units."""
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer, hidden=self.hidden, weights=self.weights, momentum=self.momentum, step=self.step
        )
        return buffer.getvalue()

    def logits(self, pixels: Floats) -> tuple[Floats, Floats]:
        """Return the hidden activations and the score of each class."""
        first, bias, second, last_bias = self._layers(self.weights)
        active = np.maximum(pixels @ first + bias, 0.0)
        return active, active @ second + last_bias

    def gradient(self, pixels: Floats, labels: Ints) -> tuple[Floats, float]:
        """Return the gradient of the mean cross-entropy over this batch, flat, and that loss."""
        active, scores = self.logits(pixels)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong = scores / scores.sum(axis=1, keepdims=True)
        picked = np.arange(len(labels)), labels
        loss = float(-np.log(wrong[picked] + 1e-12).mean())
        wrong[picked] -= 1.0
        wrong /= len(labels)
        second = self._layers(self.weights)[2]
        back = (wrong @ second.T) * (active > 0)
        parts = [(pixels.T @ back).ravel(), back.sum(axis=0), (active.T @ wrong).ravel(), wrong.sum(axis=0)]
        return np.concatenate(parts), loss

    def update(self, gradient: Floats) -> None:
        """Take one step of momentum SGD."""
        self.momentum = MOMENTUM * self.momentum + gradient
        self.weights = self.weights - LEARNING_RATE * self.momentum
        self.step += 1

    def accuracy(self, pixels: Floats, labels: Ints) -> float:
        """Return the share of images whose digit is guessed right."""
        return float((self.logits(pixels)[1].argmax(axis=1) == labels).mean())

    def _layers(self, flat: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        edges = np.cumsum([PIXELS * self.hidden, self.hidden, self.hidden * CLASSES])
        first, bias, second, last_bias = np.split(flat, edges)
        return first.reshape(PIXELS, self.hidden), bias, second.reshape(self.hidden, CLASSES), last_bias


def train(
    ctx: Context,
    *,
    steps: int = 400,
    step_delay_s: float = 0.02,
    checkpoint_every: int = 20,
    hidden: int = 64,
    checkpoint_mode: Literal["rank0", "each"] = "rank0",
    seed: int = 7,
    join_timeout_s: float = 30.0,
    peer_timeout_s: float = 30.0,
) -> dict[str, Any]:
    """Train as the rank that ``ctx.gang`` names (alone if it is None) and return what was reached.

    ``step_delay_s`` stretches each step, so that a demo has time to kill a rank half-way: by default a run
    takes about 9 s. ``checkpoint_mode`` must be the gang's own: with ``rank0`` only rank 0 saves, with
    ``each`` every rank. The result has ``steps``, ``resumed_from`` (the checkpoint's step or None), ``epoch``
    and ``rank``; on rank 0 also ``accuracy``, on the fifth of the data that nobody trained on.

    Told to stop, all ranks leave after the same step, save it, and raise what ``ctx.raise_if_stopping()``
    raises. Raises ``PeerLost`` or ``PeerRefused`` when the ranks cannot go on together, and ``ValueError``
    for a checkpoint of another ``hidden``.
    """
    gang = ctx.gang
    rank, world_size = (gang.rank, gang.world_size) if gang else (0, 1)
    pixels, labels, held_out_pixels, held_out_labels = load_digits(seed)
    pixels, labels = pixels[rank::world_size], labels[rank::world_size]
    batch = min(len(labels), max(1, GLOBAL_BATCH // world_size))

    saved = ctx.checkpoint
    model = Model.from_bytes(saved.data, hidden) if saved else Model.fresh(hidden, seed)
    resumed_from = model.step if saved else None
    if saved:
        ctx.log.info("resumed at step %d", model.step, extra={"step": model.step})
    saver = rank == 0 or checkpoint_mode == "each"

    def run(star: Star | None) -> None:
        while model.step < steps:
            chosen = np.random.default_rng((seed, model.step, rank)).permutation(len(labels))[:batch]
            gradient, loss = model.gradient(pixels[chosen], labels[chosen])
            stopper = rank if ctx.stopping else None
            if star:
                reduced = star.mean(np.append(gradient, loss), step=model.step, stop=stopper is not None)
                gradient, loss, stopper = reduced.mean[:-1], float(reduced.mean[-1]), reduced.stopper
            model.update(gradient)
            ctx.beat(step=model.step, total=steps, phase="run", loss=loss)
            if saver and (model.step % checkpoint_every == 0 or stopper is not None):
                ctx.save_checkpoint(model.step, model.to_bytes())
            if stopper is not None:
                _leave(ctx, stopper, model.step)
            if step_delay_s > 0:
                time.sleep(step_delay_s)

    if gang is None or world_size == 1:
        run(None)
    else:
        try:
            with Star(
                gang,
                join_timeout_s=join_timeout_s,
                peer_timeout_s=peer_timeout_s,
                told_to_stop=lambda: ctx.stopping,
            ) as star:
                run(star)
        except PeerError:
            # In a drain the siblings go one by one: losing one is then its echo, not a failure of ours.
            if ctx.stopping and saver and model.step > (resumed_from or 0):
                ctx.save_checkpoint(model.step, model.to_bytes())
            ctx.raise_if_stopping()
            raise
    result: dict[str, Any] = {
        "steps": model.step,
        "resumed_from": resumed_from,
        "epoch": gang.epoch if gang else None,
        "rank": rank,
    }
    if rank == 0:
        result = {"accuracy": round(model.accuracy(held_out_pixels, held_out_labels), 4), **result}
    return result


def _leave(ctx: Context, stopper: int, step: int, *, wait_s: float = 5.0) -> None:
    """End this rank after a stop was heard of: as told, if the order reaches it too, else as a lost peer."""
    deadline = time.monotonic() + wait_s
    while True:
        ctx.raise_if_stopping()
        if time.monotonic() > deadline:
            raise PeerLost(
                f"rank {stopper} was told to stop after step {step}; the others cannot go on without it"
            )
        time.sleep(0.02)


# --- as a plain script, without gangq -----------------------------------------------------------------------


@dataclass(frozen=True)
class LocalGang:
    """A gang described by the environment variables that torch made customary."""

    id: str
    epoch: int
    rank: int
    world_size: int
    master_addr: str
    master_port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> LocalGang | None:
        """Return the gang, or None where ``WORLD_SIZE`` is absent: a run on its own."""
        if "WORLD_SIZE" not in env:
            return None
        try:
            return cls(
                id=env.get("GANGQ_GANG_ID", "local"),
                epoch=int(env.get("GANGQ_EPOCH", "1")),
                rank=int(env["RANK"]),
                world_size=int(env["WORLD_SIZE"]),
                master_addr=env["MASTER_ADDR"],
                master_port=int(env["MASTER_PORT"]),
            )
        except KeyError as missing:
            raise SystemExit(
                f"WORLD_SIZE is set but {missing} is not: set RANK, MASTER_ADDR and MASTER_PORT too"
            ) from None
        except ValueError as bad:
            raise SystemExit(
                f"RANK, WORLD_SIZE, MASTER_PORT and GANGQ_EPOCH must be whole numbers: {bad}"
            ) from None


@dataclass(frozen=True)
class FileCheckpoint:
    """A checkpoint read from a file."""

    data: bytes


class LocalContext:
    """Stands in for gangq's ``ctx``: checkpoints to a file (mode ``rank0``), stopped by SIGTERM or SIGINT."""

    def __init__(self, gang: LocalGang | None, restore: Path | None, save: Path | None) -> None:
        self.gang, self.stopping, self.save = gang, False, save
        self.log = log
        self.checkpoint: FileCheckpoint | None = None
        if restore is not None and restore.exists():
            self.checkpoint = FileCheckpoint(restore.read_bytes())

    def stop(self) -> None:
        """Ask the training to leave after its present step."""
        self.stopping = True

    def raise_if_stopping(self) -> None:
        """Exit with the status a shell shows for SIGTERM."""
        if self.stopping:
            raise SystemExit(128 + signal.SIGTERM)

    def beat(self, *, step: int, total: int, phase: str, loss: float) -> None:
        """Log the progress every 50 steps."""
        if step % 50 == 0 or step == total:
            self.log.info("step %d of %d, loss %.4f", step, total, loss, extra={"phase": phase})

    def save_checkpoint(self, step: int, data: bytes) -> None:
        """Replace the file in one move: a kill leaves the old checkpoint or the new one, never half."""
        if self.save is not None:
            half = self.save.with_suffix(".part")
            half.write_bytes(data)
            half.replace(self.save)
            self.log.info("saved step %d", step, extra={"step": step})


def main(argv: list[str] | None = None) -> int:
    """Run one rank; return the exit status: 0 trained, 1 the ranks could not go on together."""
    parser = argparse.ArgumentParser(
        description="Train the digits classifier as one rank (see the module's docstring)."
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-delay", type=float, default=0.02, metavar="SECONDS")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, help="file to save to, and to resume from if it exists")
    parser.add_argument("--join-timeout", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--peer-timeout", type=float, default=30.0, metavar="SECONDS")
    args = parser.parse_args(argv)

    gang = LocalGang.from_env(os.environ)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"rank {gang.rank if gang else 0}: %(message)s"
    )
    handed = os.environ.get("GANGQ_CHECKPOINT")
    ctx = LocalContext(gang, Path(handed) if handed else args.checkpoint, args.checkpoint)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: ctx.stop())
    try:
        result = train(
            ctx,
            steps=args.steps,
            step_delay_s=args.step_delay,
            checkpoint_every=args.checkpoint_every,
            hidden=args.hidden,
            join_timeout_s=args.join_timeout,
            peer_timeout_s=args.peer_timeout,
        )
    except PeerError as error:
        log.error("%s", error)
        return 1
    if "accuracy" in result:
        sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

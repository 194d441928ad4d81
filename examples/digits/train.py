"""Train a small digit classifier data-parallel across the ranks of a gang: the real work of ``gangq demo``.

Each rank holds its own shard of the UCI handwritten digits (``DATA.md``) and computes a gradient on it. Before every
update all ranks average their gradients over TCP: rank 0 listens on the address that gangq handed out, the others
connect to it. So all hold the same weights after each step.

Every 20 steps rank 0 saves the weights. Batches are drawn from (seed, step, rank), so a gang that starts again takes
exactly the path of one that never stopped. A lost rank is an error on all the others at once, never a hang.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import gangq

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DATA = Path(__file__).with_name("digits.csv.gz")
SEED = 7
PIXELS, HIDDEN, CLASSES = 64, 64, 10
GLOBAL_BATCH = 128  # split over the ranks, so the result hardly depends on how many there are
LEARNING_RATE, MOMENTUM = 0.1, 0.9
CHECKPOINT_EVERY = 20

HELLO = struct.Struct("!qqq")  # gang, epoch, rank
TIMEOUT_S = 10.0  # how long to wait for another rank; less than the grace of a job that is told to stop
HELLO_S = 2.0  # how long one that has connected may take to say who it is


class PeerLost(RuntimeError):
    """The ranks cannot go on together: one is gone or silent, or was told to stop."""


# --- how the ranks meet, and average ------------------------------------------------------------------------


class Link:
    """The connection to another rank."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        # Else a step may wait for a delayed acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, values: Floats) -> None:
        try:
            self.connection.sendall(values.tobytes())
        except OSError as error:
            raise PeerLost(f"lost rank {self.rank}: {error}") from error

    def receive(self, count: int) -> Floats:
        try:
            return np.frombuffer(read(self.connection, 8 * count))
        except OSError as error:
            raise PeerLost(f"lost rank {self.rank}: {error}") from error


def read(connection: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionError("it closed its connection")
        found += part
    return bytes(found)


@contextlib.contextmanager
def joined(gang: gangq.GangInfo | None) -> Iterator[list[Link]]:
    """Rank 0's links to all others in the order of rank, or another rank's link to rank 0; none without a gang."""
    with contextlib.ExitStack() as connections:
        if gang is None:
            yield []
        elif gang.rank == 0:
            yield accept_all(gang, connections)
        else:
            yield [connect(gang, connections)]


def accept_all(gang: gangq.GangInfo, connections: contextlib.ExitStack) -> list[Link]:
    links: dict[int, Link] = {}
    deadline = time.monotonic() + TIMEOUT_S
    # The name of this host may mean loopback here, and then no other host could reach an address made of it.
    local = gang.master_addr.startswith("127.")
    try:
        with socket.create_server((gang.master_addr if local else "", gang.master_port)) as server:
            while len(links) + 1 < gang.world_size:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                connection = connections.enter_context(server.accept()[0])
                if member := member_of(gang, connection):
                    connection.settimeout(TIMEOUT_S)
                    links[member] = Link(member, connection)
                else:
                    connection.close()
    except OSError as error:
        absent = sorted(set(range(1, gang.world_size)) - set(links))
        raise PeerLost(f"ranks {absent} did not connect to port {gang.master_port}: {error}") from error
    return [links[rank] for rank in sorted(links)]


def member_of(gang: gangq.GangInfo, connection: socket.socket) -> int | None:
    """Return which rank has connected, or None for a stranger.

    A process that is left of an earlier epoch is one, too: it must not push its gradients into this one.
    """
    try:
        connection.settimeout(HELLO_S)
        gang_id, epoch, rank = HELLO.unpack(read(connection, HELLO.size))
    except OSError:
        return None
    return rank if (gang_id, epoch) == (gang.id, gang.epoch) else None


def connect(gang: gangq.GangInfo, connections: contextlib.ExitStack) -> Link:
    deadline = time.monotonic() + TIMEOUT_S
    address = gang.master_addr, gang.master_port
    while True:
        try:
            connection = connections.enter_context(socket.create_connection(address, TIMEOUT_S))
            # Rank 0 knows which rank is silent, the others do not: it loses patience first.
            connection.settimeout(TIMEOUT_S + 2)
            connection.sendall(HELLO.pack(gang.id, gang.epoch, gang.rank))
            return Link(0, connection)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(f"cannot reach rank 0 at {address[0]}:{address[1]}: {error}") from error
            time.sleep(0.05)  # Rank 0 does not listen yet.


def average(rank: int, links: list[Link], values: Floats) -> Floats:
    """Return the mean of ``values`` over all ranks: the same bytes on each."""
    if rank != 0:
        links[0].send(values)
        return links[0].receive(len(values))
    # Added in the order of rank, not of arrival: a run that is resumed repeats every rounding.
    mean = sum((link.receive(len(values)) for link in links), values) / (1 + len(links))
    for link in links:
        link.send(mean)
    return mean


# --- the model: a perceptron whose weights are one flat array -----------------------------------------------


def load_digits() -> tuple[Floats, Ints, Floats, Ints]:
    """Return pixels and labels to train on, then those of a fifth that is held out: the same split on every rank."""
    with gzip.open(DATA, "rt", encoding="ascii") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    rows = rows[np.random.default_rng(SEED).permutation(len(rows))]
    pixels, labels = rows[:, :PIXELS] / 16.0, rows[:, PIXELS]
    held_out = len(rows) // 5
    return pixels[held_out:], labels[held_out:], pixels[:held_out], labels[:held_out]


def fresh_weights() -> Floats:
    rng = np.random.default_rng(SEED)
    first = rng.standard_normal((PIXELS, HIDDEN)) * np.sqrt(2 / PIXELS)
    second = rng.standard_normal((HIDDEN, CLASSES)) * np.sqrt(2 / HIDDEN)
    return np.concatenate([first.ravel(), np.zeros(HIDDEN), second.ravel(), np.zeros(CLASSES)])


def layers(weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    first, bias, second, last_bias = np.split(weights, np.cumsum([PIXELS * HIDDEN, HIDDEN, HIDDEN * CLASSES]))
    return first.reshape(PIXELS, HIDDEN), bias, second.reshape(HIDDEN, CLASSES), last_bias


def scores_of(weights: Floats, pixels: Floats) -> tuple[Floats, Floats]:
    """Return the hidden activations and the score of each class."""
    first, bias, second, last_bias = layers(weights)
    active = np.maximum(pixels @ first + bias, 0.0)
    return active, active @ second + last_bias


def gradient_of(weights: Floats, pixels: Floats, labels: Ints) -> tuple[Floats, float]:
    """Return the gradient of the mean cross-entropy over this batch, flat, and that loss."""
    active, scores = scores_of(weights, pixels)
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    wrong = scores / scores.sum(axis=1, keepdims=True)
    picked = np.arange(len(labels)), labels
    loss = float(-np.log(wrong[picked] + 1e-12).mean())
    wrong[picked] -= 1.0
    wrong /= len(labels)
    back = (wrong @ layers(weights)[2].T) * (active > 0)
    parts = [(pixels.T @ back).ravel(), back.sum(axis=0), (active.T @ wrong).ravel(), wrong.sum(axis=0)]
    return np.concatenate(parts), loss


# --- the training -------------------------------------------------------------------------------------------


def train(ctx: gangq.Context, *, steps: int = 400, step_delay_s: float = 0.02) -> dict[str, Any]:
    """Train as the rank that ``ctx.gang`` names (alone if it is None) and return what was reached.

    ``step_delay_s`` stretches each step, so that a demo has time to kill a rank half-way: a run takes about 9 s.
    Where one rank is told to stop, all leave after the same step, with a checkpoint of it.

    Raises ``PeerLost``.
    """
    rank, world_size = (ctx.gang.rank, ctx.gang.world_size) if ctx.gang else (0, 1)
    pixels, labels, held_out_pixels, held_out_labels = load_digits()
    pixels, labels = pixels[rank::world_size], labels[rank::world_size]
    batch = max(1, GLOBAL_BATCH // world_size)

    saved = ctx.checkpoint
    if saved:
        weights, momentum = np.frombuffer(saved.data).reshape(2, -1)
        ctx.log.info("resumed at step %d", saved.step)
    else:
        weights = fresh_weights()
        momentum = np.zeros_like(weights)

    with joined(ctx.gang) as links:
        for step in range(saved.step if saved else 0, steps):
            chosen = np.random.default_rng((SEED, step, rank)).permutation(len(labels))[:batch]
            gradient, loss = gradient_of(weights, pixels[chosen], labels[chosen])
            # Whether this rank is told to stop is averaged, too: then all ranks know it after the same step.
            mean = average(rank, links, np.concatenate([gradient, [loss, ctx.stopping]]))
            gradient, (loss, told) = mean[:-2], mean[-2:]
            momentum = MOMENTUM * momentum + gradient
            weights = weights - LEARNING_RATE * momentum
            ctx.beat(step=step + 1, total=steps, phase="run", loss=float(loss))
            if rank == 0 and ((step + 1) % CHECKPOINT_EVERY == 0 or told):
                ctx.save_checkpoint(step + 1, np.stack([weights, momentum]).tobytes())
            if told:
                raise PeerLost("a rank was told to stop")
            time.sleep(step_delay_s)

    guessed = scores_of(weights, held_out_pixels)[1].argmax(axis=1)
    return {
        "accuracy": round(float((guessed == held_out_labels).mean()), 4),
        "resumed_from": saved.step if saved else None,
        "epoch": ctx.gang.epoch if ctx.gang else None,
    }

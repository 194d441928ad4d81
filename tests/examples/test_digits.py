"""The demo's training: ranks as threads of this process, over real sockets, without PostgreSQL."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gangq import GangInfo
from gangq.proc import supervision
from gangq.testing import FakeContext, run

pytestmark = pytest.mark.slow

np = pytest.importorskip("numpy")

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"


def load_program() -> Any:
    spec = importlib.util.spec_from_file_location("digits_train", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_train"] = module
    spec.loader.exec_module(module)
    return module


digits: Any = load_program()


def gangs(world_size: int, epoch: int = 1) -> list[GangInfo]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [FakeContext(gang=(rank, world_size)).gang for rank in range(world_size)]
    return [replace(gang, epoch=epoch, master_port=port) for gang in ranks if gang]


class Told(FakeContext):
    """Told to stop at step `at`, or dead there."""

    at, dies = -1, False

    def beat(self, **said: Any) -> None:
        super().beat(**said)
        if said["step"] == self.at:
            if self.dies:
                raise MemoryError
            self.stop()


def trained(contexts: list[Any], steps: int = 400, step_delay_s: float = 0) -> list[Any]:
    """What each rank returned or raised."""

    def one(context: FakeContext) -> Any:
        try:
            return digits.train(context, steps=steps, step_delay_s=step_delay_s)
        except Exception as problem:
            return problem

    with ThreadPoolExecutor(len(contexts)) as ranks:
        return list(ranks.map(one, contexts))


@pytest.fixture
def at_once() -> Iterator[Callable[..., Any]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_four_ranks_reach_the_held_out_accuracy_and_only_rank_0_saves() -> None:
    contexts = [FakeContext(gang=gang) for gang in gangs(4)]
    results = trained(contexts)
    assert results[0] == {"accuracy": results[0]["accuracy"], "resumed_from": None, "epoch": 1}
    assert results[0]["accuracy"] >= 0.95
    assert results == results[:1] * 4
    assert [len(context.checkpoints) for context in contexts] == [20, 0, 0, 0]
    assert contexts[1].beats == contexts[0].beats
    assert contexts[0].beats[-1]["loss"] < 0.1


def test_one_that_resumes_ends_with_the_weights_and_the_loss_of_one_that_never_stopped() -> None:
    whole = [FakeContext(gang=gang) for gang in gangs(4)]
    trained(whole)
    half = 200, whole[0].checkpoints[200]
    again = [FakeContext(gang=gang, checkpoint=half) for gang in gangs(4, epoch=2)]
    results = trained(again)
    assert (results[0]["resumed_from"], results[0]["epoch"]) == (200, 2)
    assert again[0].checkpoints[400] == whole[0].checkpoints[400]
    assert again[0].beats == whole[0].beats[200:]
    assert len(half[1]) < 1024 * 1024


def test_a_rank_that_dies_is_an_error_on_the_others_at_once() -> None:
    contexts = [Told(gang=gang) for gang in gangs(3)]
    contexts[2].at, contexts[2].dies = 50, True
    began = time.monotonic()
    results = trained(contexts)
    assert time.monotonic() - began < digits.TIMEOUT_S / 2
    assert [type(result) for result in results] == [digits.PeerLost, digits.PeerLost, MemoryError]
    assert str(results[0]).startswith("lost rank 2: ")
    assert list(contexts[0].checkpoints) == [20, 40]


def test_one_rank_told_to_stop_takes_all_out_after_the_same_step() -> None:
    contexts = [Told(gang=gang) for gang in gangs(3)]
    contexts[1].at = 30
    assert {str(result) for result in trained(contexts)} == {"a rank was told to stop"}
    assert [context.beats[-1]["step"] for context in contexts] == [31] * 3
    assert [list(context.checkpoints) for context in contexts] == [[20, 31], [], []]


def test_a_frozen_rank_is_named_by_rank_0_before_the_others_lose_patience(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[..., Any]
) -> None:
    monkeypatch.setattr(digits, "TIMEOUT_S", 0.3)
    gang = gangs(3)
    with digits.contextlib.ExitStack() as stays:
        frozen = at_once(lambda: stays.enter_context(digits.joined(gang[2])))
        results = trained([FakeContext(gang=one) for one in gang[:2]])
        assert str(results[0]) == "lost rank 2: timed out"
        assert "timed out" not in str(results[1])
        assert frozen.result(5)


def test_a_victim_takes_the_blame_only_when_the_supervisor_of_a_frozen_rank_would_have_ended_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    program = importlib.import_module("digits_app")
    waited: list[float] = []

    class Victim(FakeContext):
        def wait_stopping(self, timeout: Any = None) -> bool:
            waited.append(timeout)
            return False

    def lost(*_: Any, **__: Any) -> None:
        raise program.train.PeerLost("lost rank 2: timed out")

    monkeypatch.setattr(program.train, "train", lost)
    with pytest.raises(program.train.PeerLost):
        run(program.train_digits, steps=1, context=Victim(gang=(0, 4)))
    # Its report takes up to 5 s.
    assert digits.TIMEOUT_S + waited[0] > supervision.SILENCE_S + 5


def test_a_process_of_an_earlier_epoch_is_turned_away_and_harms_nobody(at_once: Callable[..., Any]) -> None:
    now = gangs(2, epoch=2)
    zombie = replace(now[1], epoch=1)
    rank0 = at_once(lambda: trained([FakeContext(gang=now[0])], steps=3)[0])
    (refused,) = trained([FakeContext(gang=zombie)], steps=3)
    assert str(refused).startswith("lost rank 0: ")
    assert not rank0.done()
    (rank1,) = trained([FakeContext(gang=now[1])], steps=3)
    assert rank0.result(5) == rank1


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / ", b"GET / HTTP/1.1\r\n\r\n" * 3, None],
    ids=["closes", "stammers", "speaks", "silent"],
)
def test_a_stranger_on_the_port_is_turned_away_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, at_once: Callable[..., Any], noise: bytes | None
) -> None:
    monkeypatch.setattr(digits, "HELLO_S", 0.2)
    gang = gangs(2)
    rank0 = at_once(lambda: trained([FakeContext(gang=gang[0])], steps=3)[0])
    with digits.contextlib.ExitStack() as connections:
        # One of an earlier epoch, which waits until rank 0 listens.
        digits.connect(replace(gang[1], epoch=0), connections)
        address = "127.0.0.1", gang[0].master_port
        with socket.create_connection(address, 5) as stranger:
            if noise is None:
                assert stranger.recv(1) == b""
            else:
                stranger.sendall(noise)
        (rank1,) = trained([FakeContext(gang=gang[1])], steps=3)
    assert rank0.result(5) == rank1


def test_ranks_that_never_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "TIMEOUT_S", 0.1)
    gang = gangs(3)
    (rank0,) = trained([FakeContext(gang=gang[0])])
    assert str(rank0) == f"ranks [1, 2] did not connect to port {gang[0].master_port}: timed out"
    (rank1,) = trained([FakeContext(gang=gang[1])])
    assert str(rank1).startswith(f"cannot reach rank 0 at 127.0.0.1:{gang[1].master_port}: ")


def test_it_trains_without_a_gang() -> None:
    alone = Told()
    (result,) = trained([alone])
    assert (result["resumed_from"], result["epoch"]) == (None, None)
    assert result["accuracy"] >= 0.95


def test_the_shipped_data_are_the_1797_digits() -> None:
    with gzip.open(digits.DATA, "rt") as lines:
        rows = [[int(cell) for cell in line.split(",")] for line in lines]
    assert {len(row) for row in rows} == {65}
    assert len(rows) == 1797
    assert {row[64] for row in rows} == set(range(10))
    assert {pixel for row in rows for pixel in row[:64]} == set(range(17))

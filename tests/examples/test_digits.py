"""The demo's training: real processes, real sockets, real signals, without gangq and without PostgreSQL."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

np = pytest.importorskip("numpy")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "digits" / "train.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("digits_train", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_train"] = module
    spec.loader.exec_module(module)
    return module


digits: Any = load_script()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = 15.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


# --- plain processes ---------------------------------------------------------------------------------------


@dataclass
class Ranks:
    """Processes of one gang, and what each of them has written."""

    processes: list[subprocess.Popen[str]]

    def finish(self, deadline_s: float) -> list[tuple[int, str, str]]:
        end = time.monotonic() + deadline_s
        ended = []
        for rank in self.processes:
            out, err = rank.communicate(timeout=max(0.1, end - time.monotonic()))
            ended.append((rank.returncode, out, err))
        return ended


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    begun: list[subprocess.Popen[str]] = []

    def start_ranks(*args: str, world_size: int = 4, **extra: str) -> Ranks:
        base = {name: value for name, value in os.environ.items() if not name.startswith("GANGQ_")}
        base |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        base |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *args],
                env={**base, **extra, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        begun.extend(processes)
        return Ranks(processes)

    yield start_ranks
    for process in begun:
        process.kill()
        process.communicate()


def saved_step(path: Path) -> int:
    if not path.exists():
        return 0
    with np.load(io.BytesIO(path.read_bytes())) as saved:
        return int(saved["step"])


def test_four_plain_processes_reach_the_held_out_accuracy_and_only_rank_0_reports(start) -> None:
    ended = start("--step-delay", "0").finish(30)
    assert [code for code, _, _ in ended] == [0, 0, 0, 0], ended
    result = json.loads(ended[0][1])
    assert result == {
        "accuracy": result["accuracy"],
        "steps": 400,
        "resumed_from": None,
        "epoch": 1,
        "rank": 0,
    }
    assert result["accuracy"] >= 0.95
    assert [out for _, out, _ in ended[1:]] == ["", "", ""]


def test_killing_rank_2_ends_the_others_with_an_error_and_a_restart_resumes_where_it_was_saved(
    start, tmp_path
) -> None:
    whole = json.loads(start("--step-delay", "0").finish(30)[0][1])
    file = tmp_path / "digits.npz"
    ranks = start("--step-delay", "0.005", "--checkpoint", str(file))
    wait_for(lambda: saved_step(file) >= 100, "a checkpoint at step 100")
    killed_at = time.monotonic()
    ranks.processes[2].kill()
    ended = ranks.finish(5)
    assert time.monotonic() - killed_at < 3, "the others must notice at once"
    assert [code for code, _, _ in ended] == [1, 1, -signal.SIGKILL, 1], ended
    for rank in (0, 1, 3):
        assert "rank 2" in ended[rank][2], "everybody is told who was lost"

    step = saved_step(file)
    assert step % 20 == 0
    assert 100 <= step < 400
    ended = start("--step-delay", "0", "--checkpoint", str(file)).finish(30)
    assert f"resumed at step {step}" in ended[0][2]
    assert json.loads(ended[0][1]) == {**whole, "resumed_from": step}, "the path of a run that never stopped"
    assert file.stat().st_size < 1024 * 1024


def test_told_to_stop_all_ranks_save_one_step_and_leave_and_the_next_epoch_goes_on_from_it(
    start, tmp_path
) -> None:
    file = tmp_path / "digits.npz"
    ranks = start("--step-delay", "0.01", "--checkpoint-every", "1000", "--checkpoint", str(file))
    assert ranks.processes[0].stderr.readline().startswith("rank 0: step 50 of 400")
    assert not file.exists()
    for process in ranks.processes:
        process.terminate()
    assert [process.wait(10) for process in ranks.processes] == [143] * 4
    step = saved_step(file)
    assert 50 < step < 400

    ended = start(
        "--step-delay", "0", GANGQ_CHECKPOINT=str(file), GANGQ_EPOCH="2", GANGQ_GANG_ID="17"
    ).finish(30)
    assert f"resumed at step {step}" in ended[3][2]
    result = json.loads(ended[0][1])
    assert (result["resumed_from"], result["steps"], result["epoch"]) == (step, 400, 2)
    assert result["accuracy"] >= 0.95


def test_a_frozen_rank_is_named_after_the_peer_timeout_and_nobody_hangs(start, tmp_path) -> None:
    file = tmp_path / "digits.npz"
    ranks = start("--step-delay", "0.01", "--peer-timeout", "1", "--checkpoint", str(file), world_size=3)
    wait_for(lambda: saved_step(file) >= 20, "a first checkpoint")
    ranks.processes[2].send_signal(signal.SIGSTOP)
    for rank in (0, 1):
        _, err = ranks.processes[rank].communicate(timeout=8)
        assert ranks.processes[rank].returncode == 1
        assert "lost rank 2: silent for" in err


# --- ranks as threads of this process ----------------------------------------------------------------------


def gangs(world_size: int, *, epoch: int = 1, gang_id: str = "g", port: int | None = None) -> list[Any]:
    port = port or free_port()
    return [
        digits.LocalGang(gang_id, epoch, rank, world_size, "127.0.0.1", port) for rank in range(world_size)
    ]


class Stopped(Exception):
    """What gangq's ``ctx.raise_if_stopping()`` would raise."""


@dataclass
class Told:
    """A ``ctx`` as a gangq worker would pass it, told to stop when ``step`` reaches ``stop_at``."""

    gang: Any
    checkpoint: Any = None
    stop_at: int | None = None
    stopping: bool = False
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("test.digits"))
    beats: list[int] = field(default_factory=list)
    saved: list[tuple[int, bytes]] = field(default_factory=list)

    def beat(self, *, step: int, total: int, phase: str, loss: float) -> None:
        assert (total, phase) == (400, "run")
        assert loss > 0
        self.beats.append(step)
        self.stopping = self.stopping or step == self.stop_at

    def raise_if_stopping(self) -> None:
        if self.stopping:
            raise Stopped

    def save_checkpoint(self, step: int, data: bytes) -> None:
        self.saved.append((step, data))


@contextlib.contextmanager
def together(size: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        yield pool


def test_the_all_reduce_gives_every_rank_the_same_mean_of_known_arrays() -> None:
    def one(gang: Any) -> Any:
        with digits.Star(gang) as star:
            first = star.mean(np.array([1.0, 10.0]) * gang.rank, step=0)
            second = star.mean(np.full(3, 2.0**gang.rank), step=1, stop=gang.rank in (2, 3))
            return first.mean.tolist(), first.stopper, second.mean.tolist(), second.stopper

    with together(4) as pool:
        results = list(pool.map(one, gangs(4)))
    assert results == [([1.5, 15.0], None, [3.75, 3.75, 3.75], 2)] * 4


def test_ranks_that_are_not_at_the_same_step_stop_instead_of_mixing_gradients() -> None:
    def one(gang: Any) -> None:
        with digits.Star(gang) as star:
            star.mean(np.ones(2), step=20 if gang.rank == 1 else 40)

    with together(2) as pool:
        ended = [pool.submit(one, gang) for gang in gangs(2)]
        for future in ended:
            with pytest.raises(digits.PeerLost, match="must resume from the same checkpoint"):
                future.result(10)


@pytest.mark.parametrize(
    ("zombie", "why"),
    [
        ({"epoch": 1}, "it says epoch 1, this is epoch 2"),
        ({"gang_id": "other"}, "it says gang 'other'"),
    ],
)
def test_a_peer_of_an_old_epoch_or_another_gang_is_refused_and_harms_nobody(
    zombie: dict[str, Any], why: str
) -> None:
    port = free_port()
    members = gangs(2, epoch=2, port=port)

    def one(gang: Any) -> list[float]:
        with digits.Star(gang) as star:
            mean: list[float] = star.mean(np.array([float(gang.rank)]), step=0).mean.tolist()
            return mean

    with together(2) as pool:
        rank0 = pool.submit(one, members[0])
        with pytest.raises(digits.PeerRefused, match=why):
            one(gangs(2, port=port, **{"epoch": 2, **zombie})[1])
        assert not rank0.done()
        rank1 = pool.submit(one, members[1])
        assert (rank0.result(10), rank1.result(10)) == ([0.5], [0.5])


def test_a_second_process_of_one_rank_and_noise_on_the_port_are_turned_away() -> None:
    members = gangs(3)
    joined = threading.Event()

    def one(gang: Any) -> list[float]:
        with digits.Star(gang) as star:
            joined.set()
            mean: list[float] = star.mean(np.array([float(gang.rank)]), step=0).mean.tolist()
            return mean

    with together(3) as pool:
        rank0 = pool.submit(one, members[0])
        rank1 = pool.submit(one, members[1])
        assert joined.wait(10)
        with pytest.raises(digits.PeerRefused, match="rank 1 has already joined"):
            digits.Star(members[1])
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("!cI", b"J", 2**31),
            struct.pack("!cI", b"J", 2) + b"[]",
        ):
            with socket.create_connection(("127.0.0.1", members[0].master_port), 5) as stranger:
                stranger.sendall(noise)
                sent_at = time.monotonic()
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b"", "a stranger is told nothing"
                assert time.monotonic() - sent_at < 1.5, "nobody waits for 2 GiB that a stranger promised"
        rank2 = pool.submit(one, members[2])
        assert [f.result(10) for f in (rank0, rank1, rank2)] == [[1.0]] * 3


def test_a_newer_epoch_waits_for_the_zombie_that_still_holds_the_port() -> None:
    port = free_port()
    old, new = gangs(2, epoch=1, port=port), gangs(2, epoch=2, port=port)
    old_must_go = threading.Event()

    def zombie() -> None:
        with contextlib.suppress(digits.PeerLost):
            digits.Star(old[0], told_to_stop=old_must_go.is_set)

    def one(gang: Any) -> bool:
        with digits.Star(gang):
            return True

    refused = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: refused.set()  # type: ignore[method-assign]
    digits.log.addHandler(handler)
    try:
        with together(3) as pool:
            pool.submit(zombie)
            rank1 = pool.submit(one, new[1])
            assert refused.wait(10)
            assert not rank1.done()
            old_must_go.set()
            rank0 = pool.submit(one, new[0])
            assert rank0.result(10)
            assert rank1.result(10)
    finally:
        digits.log.removeHandler(handler)


def test_ranks_that_never_come_are_named_at_the_deadline() -> None:
    gang = gangs(3)
    with pytest.raises(digits.PeerLost, match=r"ranks \[1, 2\] of gang g epoch 1 never connected"):
        digits.Star(gang[0], join_timeout_s=0.1)
    with pytest.raises(digits.PeerLost, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1"):
        digits.Star(gang[1], join_timeout_s=0.1)


def test_a_rank_that_dies_after_its_part_is_noticed_while_a_slow_one_is_still_awaited() -> None:
    members = gangs(3)
    with together(3) as pool:
        stars = list(pool.map(digits.Star, members))
        rank0 = pool.submit(lambda: stars[0].mean(np.ones(1), step=0))
        stars[1].links[0].send(b"A", struct.pack("!qi", 0, -1) + np.ones(1).tobytes())
        stars[1].close()
        with pytest.raises(digits.PeerLost, match=r"lost rank 1 \(127\.0\.0\.1\): it closed its connection"):
            rank0.result(5)
        for star in stars:
            star.close()


def test_a_rank_told_to_stop_does_not_sit_out_the_peer_timeout_beside_a_frozen_peer(monkeypatch) -> None:
    monkeypatch.setattr(digits, "_HURRY_S", 0.2)
    told = threading.Event()
    members = gangs(2)
    with together(2) as pool:
        rank0 = pool.submit(lambda: digits.Star(members[0]))
        rank1 = digits.Star(members[1], told_to_stop=told.is_set)
        waiting = pool.submit(lambda: rank1.mean(np.ones(1), step=5))
        told.set()
        with pytest.raises(digits.PeerLost, match="lost rank 0: silent for"):
            waiting.result(5)
        rank0.result(5).close()
        rank1.close()


def test_rank_0_waits_for_its_port_to_be_let_go(monkeypatch) -> None:
    gang = gangs(1)[0]
    binds: list[object] = []
    create = socket.create_server

    def counted(*args: Any, **kwargs: Any) -> socket.socket:
        binds.append(args)
        return create(*args, **kwargs)

    with create(("127.0.0.1", gang.master_port)) as holder, together(1) as pool:
        monkeypatch.setattr(socket, "create_server", counted)
        with pytest.raises(digits.PeerLost, match="see who holds the port"):
            digits.Star(gang, join_timeout_s=0.1)
        binds.clear()
        rank0 = pool.submit(lambda: digits.Star(gang))
        wait_for(lambda: len(binds) >= 2, "a second attempt to bind")
        holder.close()
        rank0.result(5).close()


def test_a_rank_that_met_itself_on_a_free_port_tries_again(monkeypatch) -> None:
    members = gangs(2)
    connect = socket.create_connection
    itself: list[socket.socket] = []

    def meets_itself_once(address: tuple[str, int], timeout: float) -> socket.socket:
        if itself:
            return connect(address, timeout)
        itself.append(socket.socket())
        itself[0].bind(address)
        itself[0].connect(address)
        return itself[0]

    monkeypatch.setattr(socket, "create_connection", meets_itself_once)
    with together(2) as pool:
        rank1 = pool.submit(digits.Star, members[1])
        wait_for(lambda: bool(itself) and itself[0].fileno() == -1, "the connection to itself being dropped")
        rank0 = pool.submit(digits.Star, members[0])
        for star in (rank0, rank1):
            star.result(10).close()


def test_one_rank_told_to_stop_takes_all_out_at_the_same_step_with_the_same_state() -> None:
    members = [Told(gang) for gang in gangs(3)]
    members[1].stop_at = 30

    def run(ctx: Told) -> None:
        digits.train(ctx, step_delay_s=0, checkpoint_mode="each")

    def told(futures: list[Future[None]]) -> bool:
        return futures[1].done() and all(ctx.beats[-1:] == [31] for ctx in members)

    with together(3) as pool:
        futures = [pool.submit(run, ctx) for ctx in members]
        wait_for(lambda: told(futures), "the rank that was told to leave")
        # The drain reaches the others a moment later, as the heartbeat's answer would.
        for ctx in members:
            ctx.stopping = True
        for future in futures:
            with pytest.raises(Stopped):
                future.result(10)
    assert [[step for step, _ in ctx.saved] for ctx in members] == [[20, 31]] * 3
    states = {digits.Model.from_bytes(ctx.saved[-1][1], 64).weights.tobytes() for ctx in members}
    assert len(states) == 1


def test_in_rank0_mode_only_rank_0_saves_and_a_resumed_run_ends_with_the_very_same_weights() -> None:
    pair = [Told(gang) for gang in gangs(2)]
    with together(2) as pool:
        results = list(pool.map(lambda ctx: digits.train(ctx, step_delay_s=0, checkpoint_every=200), pair))
    assert [[step for step, _ in ctx.saved] for ctx in pair] == [[200, 400], []]
    assert "accuracy" not in results[1]

    half = SimpleNamespace(data=pair[0].saved[0][1])
    again = [Told(ctx.gang, checkpoint=half) for ctx in pair]
    with together(2) as pool:
        list(pool.map(lambda ctx: digits.train(ctx, step_delay_s=0, checkpoint_every=200), again))
    whole, resumed = (digits.Model.from_bytes(ctx.saved[-1][1], 64) for ctx in (pair[0], again[0]))
    assert (whole.step, resumed.step) == (400, 400)
    assert whole.weights.tobytes() == resumed.weights.tobytes(), "a resumed run repeats every rounding"


def test_a_solo_run_needs_no_gang_and_stops_when_told() -> None:
    half = SimpleNamespace(data=digits.Model.fresh(64, 7).to_bytes())
    alone = digits.train(Told(None, checkpoint=half), step_delay_s=0)
    assert (alone["resumed_from"], alone["epoch"], alone["steps"]) == (0, None, 400)
    assert alone["accuracy"] >= 0.95

    stopped = Told(None, stop_at=7)
    with pytest.raises(Stopped):
        digits.train(stopped, step_delay_s=0)
    assert [step for step, _ in stopped.saved] == [8]


def test_a_peer_lost_in_a_drain_counts_as_being_told_to_stop() -> None:
    pair = [Told(gang) for gang in gangs(2)]

    class Killed(Exception):
        pass

    def dies_at_50(*, step: int, total: int, phase: str, loss: float) -> None:
        if step == 50:
            pair[0].stopping = True
            raise Killed

    pair[1].beat = dies_at_50  # type: ignore[method-assign]
    with together(2) as pool:
        rank0, rank1 = [pool.submit(digits.train, ctx, step_delay_s=0.001) for ctx in pair]
        with pytest.raises(Stopped):
            rank0.result(10)
        with pytest.raises(Killed):
            rank1.result(10)
    assert pair[0].saved[-1][0] in (50, 51), "the last common step is saved, not only every twentieth"


def test_a_checkpoint_of_another_shape_says_what_to_do() -> None:
    saved = digits.Model.fresh(32, 7).to_bytes()
    with pytest.raises(ValueError, match="pass hidden=32, or start without the checkpoint"):
        digits.train(Told(None, checkpoint=SimpleNamespace(data=saved)), hidden=64)


def test_an_incomplete_environment_is_named() -> None:
    with pytest.raises(SystemExit, match="WORLD_SIZE is set but 'MASTER_ADDR' is not"):
        digits.LocalGang.from_env({"WORLD_SIZE": "2", "RANK": "0"})
    assert digits.LocalGang.from_env({}) is None


def test_the_shipped_data_are_the_1797_digits() -> None:
    with gzip.open(digits.DATA, "rt") as lines:
        rows = [[int(cell) for cell in line.split(",")] for line in lines]
    assert {len(row) for row in rows} == {65}
    assert len(rows) == 1797
    assert {row[64] for row in rows} == set(range(10))
    assert {pixel for row in rows for pixel in row[:64]} == set(range(17))

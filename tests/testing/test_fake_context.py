"""A context without a worker says and keeps what a real one does."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import gangq
from gangq import App, Checkpoint, Context, DeviceInfo, GangInfo, JobInfo, Peer, Role, ServiceInfo
from gangq.errors import (
    GangqError,
    InvalidInput,
    JobFailed,
    NotSerializable,
    RetryLater,
    StaleToken,
    Stopped,
    TooLarge,
)
from gangq.testing import FakeContext, assert_submitted, drain, run
from gangq.worker.context_impl import HandlerContext

PAGE = (Path(__file__).parents[2] / "docs/manual/testing.md").read_text(encoding="utf-8")


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers_static(kind) if not name.startswith("_")}


def test_it_has_every_member_of_a_context_with_the_same_signature() -> None:
    wanted, found = public(Context), public(FakeContext)
    assert wanted.keys() - found.keys() == set()
    for name, member in wanted.items():
        assert type(found[name]) is type(member), name
        if inspect.isfunction(member):
            assert inspect.signature(found[name]) == inspect.signature(member), name
    # What is abstract, or says nothing unless a worker does, is its own.
    inherited = {name for name, member in wanted.items() if found[name] is member}
    assert inherited == {"token", "attempt", "index", "raise_if_stopping"}


def test_the_page_of_the_manual_names_each_argument_and_each_member() -> None:
    table = PAGE.partition("| `FakeContext` | |")[2].partition("\n\n")[0]
    cells = "".join(re.findall(r"(?m)^\| (.*?) \|", table))
    named = re.findall(r"`(\w+)(=?)", cells)
    assert len(set(named)) == len(named)
    assert {name for name, given in named if given} == inspect.signature(FakeContext).parameters.keys()
    own = {*public(FakeContext), *(name for name in vars(FakeContext()) if not name.startswith("_"))}
    of_all = {*public(HandlerContext), "stop_seen", "is_for"}
    assert {name for name, given in named if not given} == own - of_all


@pytest.mark.parametrize("function", [run, drain, assert_submitted])
def test_the_page_of_the_manual_names_each_keyword(function: Any) -> None:
    keywords = inspect.signature(function).parameters.values()
    names = [one.name for one in keywords if one.kind is inspect.Parameter.KEYWORD_ONLY]
    assert names
    assert [name for name in names if not re.search(rf"`{name}\b|\b{name}=", PAGE)] == []


def test_neither_the_package_nor_a_program_that_uses_it_imports_what_is_for_tests() -> None:
    script = (
        "import sys, gangq; [getattr(gangq, name) for name in gangq.__all__]; import gangq.worker.main; "
        "print([name for name in sys.modules if 'testing' in name or 'pytest' in name])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_it_keeps_what_the_handler_says(caplog: pytest.LogCaptureFixture) -> None:
    ctx = FakeContext()
    ctx.beat(step=1, total=10, phase="load")
    ctx.beat(phase="load", loss=float("nan"))
    ctx.beat(phase="run")
    ctx.beat(phase="load", reader=object())
    ctx.log.debug("quiet %s", 1)
    with caplog.at_level(logging.INFO):
        ctx.log.warning("loud", extra={"shard": 3})
    ctx.set_model("llama")
    ctx.save_checkpoint(3, b"three")
    assert ctx.beats[:2] == [{"step": 1, "total": 10, "phase": "load"}, {"phase": "load", "loss": None}]
    assert str(ctx.beats[3]["reader"]).startswith("<object object")
    assert ctx.phases == ["load", "run", "load"]
    assert [record.getMessage() for record in ctx.logs] == ["quiet 1", "loud"]
    assert vars(ctx.logs[1])["shard"] == 3
    assert (vars(ctx.logs[1])["job"], vars(ctx.logs[1])["token"]) == (ctx.job.id, ctx.token)
    assert "loud" in caplog.messages
    assert (ctx.model, ctx.checkpoints) == ("llama", {3: b"three"})


def test_stop_is_what_the_handler_sees() -> None:
    ctx = FakeContext()
    ctx.raise_if_stopping()
    assert not ctx.stopping
    assert not ctx.wait_stopping(0.001)
    threading.Timer(0.01, ctx.stop).start()
    assert ctx.wait_stopping(10)
    assert ctx.stopping
    with pytest.raises(Stopped, match="job 1 was told to stop"):
        ctx.raise_if_stopping()


@pytest.mark.parametrize("says", ["beat", "save_checkpoint"])
def test_it_can_be_told_to_stop_at_a_step(says: str) -> None:
    ctx = FakeContext(stop_at=3)
    for step in range(1, 10):
        if says == "beat":
            ctx.beat(step=step)
        else:
            ctx.save_checkpoint(step, b"")
        if ctx.stopping:
            break
    assert step == 3


def test_checkpoints_go_round() -> None:
    assert FakeContext().checkpoint is None
    first = FakeContext(checkpoint=(3, b"three"), gang=(1, 2), devices="1x8GiB")
    assert first.checkpoint is not None
    assert (first.checkpoint.step, first.checkpoint.data) == (3, b"three")
    assert first.checkpoint.path.read_bytes() == b"three"
    first.save_checkpoint(5, b"five")
    first.save_checkpoint(4, bytearray(b"four"))
    # As in a worker: what this attempt has saved is for the next one.
    assert first.checkpoint.step == 3
    second = first.next_attempt()
    assert second.checkpoint is not None
    assert (second.checkpoint.step, second.checkpoint.data) == (5, b"five")
    assert (second.attempt, second.token > first.token, second.devices) == (2, True, first.devices)
    assert second.gang is not None
    assert (second.gang.epoch, second.gang.rank) == (2, 1)
    replica = FakeContext(service=ServiceInfo("chat", 1, 8000))
    assert replica.next_attempt().service == replica.service
    third = FakeContext(checkpoint=second.checkpoint).next_attempt()
    path = second.checkpoint.path
    del first, second
    assert third.checkpoint is not None
    assert third.checkpoint.path.read_bytes() == b"five"
    assert not path.exists()


def test_a_later_attempt_knows_what_the_first_was_given_and_what_it_submitted() -> None:
    first = FakeContext(inputs={7: "seven"}, checkpoint_bytes=3)
    (child,) = first.submit_child("submit", {"task": "t"})["job_ids"]
    second = first.next_attempt()
    assert second.inputs == {7: "seven"}
    with pytest.raises(TooLarge, match="the limit is 3"):
        second.save_checkpoint(1, b"four")
    assert second.submitted == []
    assert second.submit_child("submit", {"task": "t"})["job_ids"] != [child]


def test_inputs_come_out_of_json_as_results_do() -> None:
    failed = JobFailed("it failed", 3)
    ctx = FakeContext(inputs={1: (1, 2), 2: {"a": (None,)}, 3: failed})
    assert ctx.inputs == {1: [1, 2], 2: {"a": [None]}, 3: failed}
    with pytest.raises(NotSerializable, match=r"inputs\[4\] has set"):
        FakeContext(inputs={4: {5}})


def test_a_checkpoint_that_was_handed_out_keeps_its_bytes() -> None:
    ctx = FakeContext(gang=(0, 2), checkpoint=(1, b"old"))
    before = ctx.checkpoint
    ctx.save_checkpoint(1, b"new")
    ctx.change_gang((0, 2))
    assert before is not None
    assert ctx.checkpoint is not None
    assert (before.path.read_bytes(), ctx.checkpoint.path.read_bytes()) == (b"old", b"new")


def test_a_beat_is_kept_as_it_was_then_and_any_step_may_be_said() -> None:
    ctx = FakeContext(stop_at=2)
    fields = {"a": 1}
    ctx.beat(shape=(1, 2), m=fields)
    fields["a"] = 99
    assert (ctx.beats[0]["shape"], ctx.beats[0]["m"]) == ([1, 2], {"a": 1})
    ctx.beat(step="3")  # type: ignore[arg-type]
    assert not ctx.stopping


def test_a_record_below_the_level_of_logging_is_kept_and_goes_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ctx = FakeContext()
    logger = logging.getLogger(ctx.log.logger.name)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.WARNING, logger.name):
        # The handler takes all levels, as one does that is configured for another logger.
        caplog.handler.setLevel(logging.DEBUG)
        ctx.log.debug("little")
        ctx.log.warning("much")
    assert [record.getMessage() for record in ctx.logs] == ["little", "much"]
    assert caplog.messages == ["much"]


def test_a_later_attempt_that_runs_first_has_the_facts_of_its_task() -> None:
    @App().task(max_attempts=5, queue="gpu")
    def looks(ctx: Context) -> tuple[int, str]:
        return ctx.job.max_attempts, ctx.job.queue

    assert list(run(looks, context=FakeContext().next_attempt())) == [5, "gpu"]


def test_facts_that_the_test_gives_win_over_those_that_the_task_declares() -> None:
    app = App()

    @app.task(max_attempts=5)
    def attempts(ctx: Context) -> int:
        return ctx.job.max_attempts

    assert run(attempts) == 5
    assert run(attempts, context=FakeContext(attempt=2)) == 5
    assert FakeContext(attempt=7).job.max_attempts == 7
    job = JobInfo(7, 101, 1, 1, "default", "task")
    assert run(attempts, context=FakeContext(job=job)) == 1


def test_all_ranks_see_the_same_gang() -> None:
    ranks = [FakeContext(gang=(rank, 3)) for rank in range(3)]
    assert [[peer.job_id for peer in ctx.gang.peers] for ctx in ranks if ctx.gang] == [[1, 2, 3]] * 3
    assert [ctx.job.id for ctx in ranks] == [1, 2, 3]
    assert ranks[0].submit_child("submit", {"task": "a"})["job_ids"] == [4]


def test_a_member_is_the_job_that_its_gang_names_at_its_rank() -> None:
    peers = tuple(Peer(rank, 40 + rank, "h", "w") for rank in range(3))
    gang = GangInfo(7, 3, 2, 3, 0, 0, 1, peers, "h", 1)
    ctx = FakeContext(gang=gang)
    assert ctx.job.id == 42
    assert ctx.submit_child("submit", {"task": "a"})["job_ids"] == [43]
    with pytest.raises(InvalidInput, match="rank 1 of gang g7 is job 41, and this is job 42"):
        ctx.change_gang(replace(gang, epoch=4, rank=1, world_size=2))
    job = JobInfo(2, 101, 1, 1, "default", "task")
    with pytest.raises(InvalidInput, match="rank 2 of gang g7 is job 42, and this is job 2"):
        FakeContext(gang=gang, job=job)
    assert FakeContext(gang=(1, 3), job=job).job.id == 2
    with pytest.raises(InvalidInput, match="the job of rank 0 would be 0"):
        FakeContext(gang=(2, 3), job=job)


def test_a_gang_is_told_who_it_is() -> None:
    gang = FakeContext(gang=(2, 4)).gang
    assert isinstance(gang, GangInfo)
    assert (gang.rank, gang.world_size, gang.local_rank, gang.node_rank, gang.epoch) == (2, 4, 2, 0, 1)
    assert [peer.rank for peer in gang.peers] == [0, 1, 2, 3]
    assert gang.peers[2].job_id == 3
    given = GangInfo(7, 3, 0, 1, 0, 0, 1, (), "h", 1)
    assert FakeContext(gang=given).gang is given
    assert FakeContext().gang is None
    with pytest.raises(InvalidInput, match=r"gang is \(4, 4\)"):
        FakeContext(gang=(4, 4))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attempt": 0}, "attempt is 0: attempts count from 1"),
        ({"index": -1}, "index is -1: places in a batch count from 0"),
        ({"checkpoint": (-1, b"")}, "at step -1. A checkpoint needs a step from 0"),
        ({"job": JobInfo(1, 101, 1, 1, "q", "t"), "attempt": 2}, "pass job, or attempt and index"),
        ({"job": JobInfo(1, 101, 1, 1, "q", "t"), "index": 0}, "pass job, or attempt and index"),
    ],
)
def test_what_no_worker_would_tell_a_handler_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        FakeContext(**given)


def test_a_new_epoch_is_heard_and_restores_what_was_saved(caplog: pytest.LogCaptureFixture) -> None:
    ctx = FakeContext(gang=(1, 4))
    heard: list[int] = []
    ctx.on_gang_change(lambda gang: 1 // 0)
    ctx.on_gang_change(lambda gang: heard.append(gang.world_size))
    ctx.save_checkpoint(2, b"two")
    assert not ctx.gang_changed.is_set()
    ctx.change_gang((1, 3))
    assert ctx.gang_changed.is_set()
    assert heard == [3]
    assert "on_gang_change_failed" in caplog.messages
    assert ctx.gang is not None
    assert (ctx.gang.epoch, ctx.gang.world_size) == (2, 3)
    assert ctx.checkpoint is not None
    assert ctx.checkpoint.data == b"two"
    with pytest.raises(InvalidInput, match="in no gang"):
        FakeContext().change_gang((0, 1))


def test_a_new_epoch_is_heard_in_a_thread_of_gangq_as_in_a_worker() -> None:
    heard: list[tuple[str, bool]] = []

    @App().task
    def trains(ctx: Context) -> None:
        def changed(gang: GangInfo) -> None:
            heard.append((threading.current_thread().name, gangq.current() is ctx))
            ctx.save_checkpoint(1, b"one")

        assert isinstance(ctx, FakeContext)
        ctx.on_gang_change(changed)
        ctx.change_gang((0, 1))
        # The test need not wait for it.
        assert heard == [("gangq-gang", True)]

    run(trains, context=FakeContext(gang=(0, 2)))
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("rank", "changed"), [(1, (1, 4)), (1, (1, 3)), (1, (0, 3)), (3, (0, 1)), (0, (0, 2))]
)
def test_a_gang_goes_on_with_the_members_that_are_left_and_their_ranks_close_up(
    rank: int, changed: tuple[int, int]
) -> None:
    ctx = FakeContext(gang=(rank, 4))
    ctx.change_gang(changed)
    assert ctx.gang is not None
    assert (ctx.gang.rank, ctx.gang.world_size) == changed
    assert ctx.gang.peers[ctx.gang.rank].job_id == ctx.job.id
    assert {peer.job_id for peer in ctx.gang.peers} <= {1, 2, 3, 4}


def test_a_new_epoch_is_a_later_one() -> None:
    ctx = FakeContext(gang=(1, 4))
    assert ctx.gang is not None
    with pytest.raises(InvalidInput, match="pass a later epoch than 1"):
        ctx.change_gang(ctx.gang)
    assert not ctx.gang_changed.is_set()
    ctx.change_gang(replace(ctx.gang, epoch=3))
    assert ctx.gang.epoch == 3


def test_devices_are_declared_as_a_worker_declares_them() -> None:
    devices = FakeContext(devices="2x24GiB").devices
    assert [(d.index, d.vram_mb, d.source) for d in devices] == [
        (0, 24576, "declared"),
        (1, 24576, "declared"),
    ]
    own = DeviceInfo("GPU-1", 3, 80, "nvml")
    assert FakeContext(devices=[own]).devices == (own,)
    with pytest.raises(GangqError, match="COUNTxSIZE"):
        FakeContext(devices="two")


def test_a_lost_claim_is_stale_for_all_that_needs_it() -> None:
    ctx = FakeContext()
    ctx.lose()
    assert ctx.stopping
    for call in (
        lambda: ctx.save_checkpoint(1, b""),
        lambda: ctx.complete(None),
        lambda: ctx.submit_child("submit", {"task": "a"}),
        lambda: ctx.inputs,
    ):
        with pytest.raises(StaleToken, match="token 101 is not the present claim of job 1"):
            call()
    assert (ctx.checkpoints, ctx.completed, ctx.submitted) == ({}, False, [])


SAVED: list[tuple[Any, Any]] = [
    (0, b""),
    (5, b"five"),
    (2, b"an older one"),
    (5, bytearray(b"again")),
    (6, b"x" * (1 << 20)),
    (7, b"x" * ((1 << 20) + 1)),
    (-1, b""),
    (1 << 63, b""),
]


def _saves(ctx: Context) -> list[Any]:
    """What came of saving each of them: nothing, or the error and its first words."""
    found: list[Any] = []
    for step, data in SAVED:
        try:
            ctx.save_checkpoint(step, data)
        except GangqError as problem:
            found.append((type(problem), str(problem).partition(".")[0].replace("job 1 ", "job N ")))
        else:
            found.append(None)
    return found


def test_save_checkpoint_raises_what_the_real_one_raises(dsn: str) -> None:
    heard: list[Any] = []
    with App(dsn) as app:

        @app.task
        def saves(ctx: Context) -> str:
            heard.extend(_saves(ctx))
            return repr(ctx.checkpoint)

        job = saves.submit()
        assert app.run_worker(once=True, devices="none", name="w1") == 0
        assert job.result(1) == "None"
        assert job.id == 1
    fake = _saves(FakeContext())
    assert [kind and kind[0] for kind in fake] == [None] * 5 + [TooLarge, InvalidInput, InvalidInput]
    # The largest step is told by PostgreSQL in other words.
    assert fake[:-1] == heard[:-1]
    assert fake[-1][0] is heard[-1][0]


def test_the_next_attempt_starts_from_the_highest_step_as_in_the_database(dsn: str) -> None:
    steps = iter([20, 5, 20])
    found: list[tuple[int, bytes] | None] = []

    def restored(ctx: Context) -> tuple[int, bytes] | None:
        return ctx.checkpoint and (ctx.checkpoint.step, ctx.checkpoint.data)

    with App(dsn) as app:

        @app.task(max_attempts=4)
        def trains(ctx: Context) -> None:
            found.append(restored(ctx))
            step = next(steps, None)
            if step is not None:
                ctx.save_checkpoint(step, str(ctx.attempt).encode())
                raise RetryLater(0)

        job = trains.submit()
        assert drain(app).ended[0].id == job.id
    assert found == [None, (20, b"1"), (20, b"1"), (20, b"3")]
    fake = FakeContext()
    for step, then in zip([20, 5, 20], found[1:], strict=True):
        fake.save_checkpoint(step, str(fake.attempt).encode())
        fake = fake.next_attempt()
        assert restored(fake) == then


def test_a_checkpoint_is_bytes_at_a_whole_step() -> None:
    with pytest.raises(TypeError, match="bytes-like"):
        FakeContext().save_checkpoint(1, "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"step of a checkpoint is 1\.5"):
        FakeContext().save_checkpoint(1.5, b"")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step of a checkpoint is True"):
        FakeContext().save_checkpoint(True, b"")


def test_an_app_inside_the_job_submits_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    app = App()

    @app.task
    def report(ctx: Context, n: int) -> None: ...

    @app.task
    def parent(ctx: Context, n: int = 0) -> list[int]:
        assert gangq.current() is ctx
        one = report.options(priority=5).submit(n=1)
        many = report.options(after=[one]).submit_many([{"n": 2}, {"n": 3}])
        gang = report.gang(2).submit(n=4)
        each = report.gang(2).submit_each([{"n": 5}, {"n": 6}])
        roles = report.gang(
            roles=[Role("a", 2, payload={"n": 7}), Role("b", 1, task=parent, payload={"n": 8})]
        ).submit()
        with pytest.raises(InvalidInput, match="a job has none of its own"):
            one.state()
        with pytest.raises(InvalidInput, match="cancel needs a database"):
            one.cancel()
        soon = report.options(delay="1h").submit(n=10)
        return [one.id, many[0].id, many[1].id, *gang.job_ids, *each.job_ids, *roles.job_ids, soon.id]

    ctx = FakeContext()
    ids = run(parent, context=ctx)
    assert len(set(ids)) == len(ids) == 11
    assert [one.payload["n"] for one in ctx.submitted] == [1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 10]
    assert [one.task for one in ctx.submitted] == ["report"] * 9 + ["parent", "report"]
    assert [one.job_id for one in ctx.submitted] == ids
    gangs = [one.gang_id for one in ctx.submitted]
    assert gangs[:3] == [None] * 3
    assert [gangs.count(gang) for gang in dict.fromkeys(gangs[3:-1])] == [2, 2, 3]
    assert ctx.submitted[0].options == {"priority": 5}
    assert ctx.submitted[1].options == {"after": [ids[0]]}
    with pytest.raises(InvalidInput, match="not with 'cancel'"):
        ctx.submit_child("cancel", {})


def test_each_member_of_a_role_has_the_payload_that_the_role_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    app = App()

    @app.task
    def leaf(ctx: Context, n: int = 0) -> None: ...

    @app.task
    def parent(ctx: Context) -> None:
        roles = [Role("a", 2, payloads=[{"n": 1}, {"n": 2}]), Role("b", 1), Role("c", 1, payload={})]
        leaf.gang(roles=roles).submit(n=3)

    ctx = FakeContext()
    run(parent, context=ctx)
    assert [one.payload for one in ctx.submitted] == [{"n": 1}, {"n": 2}, {"n": 3}, {}]


def test_a_key_is_recorded_once_and_what_it_comes_to_the_second_time_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GANGQ_DSN", raising=False)
    app = App()

    @app.task
    def leaf(ctx: Context, n: int) -> None: ...

    @app.task
    def parent(ctx: Context) -> None:
        once = leaf.options(unique="k", unique_for="1h", replace=True)
        job = once.submit(n=1)
        assert (job.existed, job.replaced) == (False, False)
        leaf.options(unique="k", queue="other").submit(n=2)
        assert not leaf.options(unique="gang").gang(2).submit(n=3).existed
        for again in (once, leaf.options(unique="k").gang(2)):
            with pytest.raises(InvalidInput, match="unique_key 'k' was given before, and a FakeContext"):
                again.submit(n=4)

    ctx = FakeContext()
    run(parent, context=ctx)
    assert [one.payload["n"] for one in ctx.submitted] == [1, 2, 3, 3]
    assert ctx.submitted[0].options == {"unique_key": "k", "keep_s": 3600.0, "replaces": True}
    with pytest.raises(InvalidInput, match="unique_key 'k' was given before"):
        run(parent, context=ctx.next_attempt())


def test_a_request_id_that_is_given_again_is_not_guessed_at() -> None:
    ctx = FakeContext()
    given = {"task": "leaf", "request_id": UUID(int=1)}
    ctx.submit_child("submit", given)
    with pytest.raises(InvalidInput, match=f"request_id '{UUID(int=1)}' was given before"):
        ctx.next_attempt().submit_child("submit", given)
    assert len(ctx.submitted) == 1


def test_a_checkpoint_given_as_one_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere"
    path.write_bytes(b"x")
    given = FakeContext(checkpoint=Checkpoint(4, b"x", path)).checkpoint
    assert given is not None
    assert (given.step, given.path != path, os.path.exists(path)) == (4, True, True)


def test_a_replica_says_that_it_is_ready_and_how_busy_it_is() -> None:
    ctx = FakeContext(service=ServiceInfo("chat", 1, 8000))
    assert ctx.is_ready is None
    ctx.ready()
    assert ctx.is_ready == (True, 8000)
    ctx.ready(False, port=0)
    ctx.load(0.5)
    assert (ctx.is_ready, ctx.loads) == ((False, None), [0.5])
    alone = FakeContext()
    alone.ready()
    alone.load(1)
    assert (alone.service, alone.is_ready, alone.loads) == (None, None, [])


def test_a_replica_that_was_told_to_stop_takes_no_requests_any_more() -> None:
    ctx = FakeContext(service=ServiceInfo("chat", 1, 8000))
    ctx.stop()
    ctx.ready()
    assert (ctx.is_ready, ctx.stop_seen) == (None, False)

"""Gangs on real workers: together or not at all, told who they are, and again after a failure."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from gangq import Role
from gangq.client import Client
from worker.worker_process import Fleet, eventually, until_state


def until_gang(client: Client, gang_id: int, *states: str) -> None:
    eventually(lambda: client.gang(id=gang_id).state in states, f"gang {gang_id} is {states}", 30)


def test_three_members_on_three_workers_on_two_hosts_know_each_other(client: Client, fleet: Fleet) -> None:
    fleet.define("""
import socket
@app.task
def meet(ctx):
    g = ctx.gang
    if g.rank == 0:
        # The port was held until now, so nobody can have taken it.
        with socket.create_server(("127.0.0.1", g.master_port)) as server:
            for _ in range(g.world_size - 1):
                server.accept()[0].close()
    else:
        while True:
            try:
                socket.create_connection(("127.0.0.1", g.master_port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    return {
        "rank": g.rank, "world": g.world_size, "local": g.local_rank, "node": g.node_rank,
        "local_world": g.local_world_size, "epoch": g.epoch, "addr": g.master_addr, "port": g.master_port,
        "peers": [[p.rank, p.job_id, p.host, p.worker] for p in g.peers],
    }
""")
    fleet.start("a1", host="hosta", address="10.0.0.1")
    fleet.start("a2", host="hosta", address="10.0.0.1")
    fleet.start("b1", host="hostb", address="10.0.0.2")
    eventually(lambda: len(client.workers()) == 3, "there is room for all three")
    gang = client.submit_gang(task="meet", size=3)
    until_gang(client, gang.gang_id, "done")
    results = [client.job(id=i).result for i in gang.job_ids]
    assert [r["rank"] for r in results] == [0, 1, 2]
    assert {r["world"] for r in results} == {3}
    assert len({json.dumps([r["peers"], r["addr"], r["port"], r["epoch"]]) for r in results}) == 1
    assert [p[:2] for p in results[0]["peers"]] == [[i, job_id] for i, job_id in enumerate(gang.job_ids)]
    assert {p[3] for p in results[0]["peers"]} == {"a1", "a2", "b1"}
    assert sorted((r["node"], r["local"], r["local_world"]) for r in results) in (
        [(0, 0, 2), (0, 1, 2), (1, 0, 1)],
        [(0, 0, 1), (1, 0, 2), (1, 1, 2)],
    )
    assert results[0]["addr"] == {"hosta": "10.0.0.1", "hostb": "10.0.0.2"}[results[0]["peers"][0][2]]
    assert client.violations() == []


def test_commands_of_one_worker_form_a_gang_with_the_names_torch_expects(
    client: Client, fleet: Fleet
) -> None:
    fleet.start(slots=2)
    script = (
        "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $NODE_RANK "
        "$GANGQ_GANG_ID $GANGQ_EPOCH; echo $GANGQ_PEERS; [ $MASTER_PORT -gt 1024 ] && [ -n $MASTER_ADDR ]"
    )
    gang = client.submit_gang(task="command", size=2, payload={"argv": [script], "shell": True})
    until_gang(client, gang.gang_id, "done")
    for rank, job_id in enumerate(gang.job_ids):
        first, peers = "".join(row.chunk for row in client.logs(job_id=job_id)).splitlines()
        assert first == f"{rank} 2 {rank} 2 0 {gang.gang_id} 1"
        assert [p["job_id"] for p in json.loads(peers)] == gang.job_ids


def test_nobody_begins_before_everybody_is_there(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def begins(ctx):
    (HERE / f"began-{ctx.gang.rank}").touch()
""")
    first, second = fleet.start("w1"), fleet.start("w2")
    eventually(lambda: "listening" in first.log and "listening" in second.log, "both are ready")
    second.signal(signal.SIGSTOP)
    gang = client.submit_gang(task="begins", size=2)
    eventually(lambda: "job_begins" in first.log, "one member is claimed")
    eventually(lambda: client.gang(id=gang.gang_id).state != "blocked", "the gang is placed")
    assert [client.job(id=i).state for i in gang.job_ids].count("running") == 1
    assert list(fleet.directory.glob("began-*")) == []
    second.signal(signal.SIGCONT)
    until_gang(client, gang.gang_id, "done")
    assert len(list(fleet.directory.glob("began-*"))) == 2


def test_a_member_that_fails_takes_its_siblings_down_and_all_start_again(
    client: Client, fleet: Fleet
) -> None:
    fleet.define("""
@app.task
def steps(ctx):
    g = ctx.gang
    start = ctx.checkpoint.step if ctx.checkpoint else 0
    for step in range(start + 1, 6):
        ctx.save_checkpoint(step, f"{g.rank}:{step}".encode())
        if g.epoch == 1 and g.rank == 0 and step == 2:
            (HERE / "saved").touch()
        if g.epoch == 1 and step == 3:
            if g.rank == 1:
                while not (HERE / "saved").exists():
                    ctx.wait_stopping(0.01)
                raise RuntimeError("rank 1 breaks")
            ctx.wait_stopping(10)
            ctx.raise_if_stopping()
    return [g.epoch, start, ctx.checkpoint.data.decode()]
""")
    for name in ("w1", "w2"):
        fleet.start(name)
    eventually(lambda: len(client.workers()) == 2, "there is room for both")
    gang = client.submit_gang(task="steps", size=2)
    until_gang(client, gang.gang_id, "done", "failed")
    results = [client.job(id=i).result for i in gang.job_ids]
    # Rank 0 may have been told before it saved its step 3; both restore the same step then.
    start = results[0][1]
    assert start in (2, 3)
    assert results == [[2, start, f"0:{start}"], [2, start, f"1:{start}"]]
    assert [client.job(id=i).attempts for i in gang.job_ids] == [1, 2]
    drains = client.drains(gang_id=gang.gang_id)
    assert [(d.cause, d.outcome, d.forced) for d in drains] == [("fail", "blocked", 0)]
    assert client.violations() == []


def test_a_gang_survives_the_kill_of_a_member_and_its_worker(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def waits(ctx):
    if ctx.gang.epoch == 1:
        (HERE / f"pid-{ctx.gang.rank}").write_text(str(os.getpid()))
        ctx.wait_stopping()
        ctx.raise_if_stopping()
    return ctx.gang.epoch
""")
    gang = client.submit_gang(task="waits", size=2)
    for name in ("w1", "w2"):
        fleet.start(name, light=0)
    pids = [fleet.directory / f"pid-{rank}" for rank in (0, 1)]
    eventually(lambda: all(pid.exists() and pid.read_text() for pid in pids), "both run")
    name = client.job(id=gang.job_ids[1]).worker
    os.kill(int(pids[1].read_text()), signal.SIGKILL)
    fleet.start(str(name), light=0)
    until_gang(client, gang.gang_id, "done")
    assert [client.job(id=i).result for i in gang.job_ids] == [2, 2]
    assert client.violations() == []


def test_a_solo_job_does_not_disturb_a_cancelled_gang(client: Client, fleet: Fleet) -> None:
    fleet.define("""
@app.task
def waits(ctx):
    ctx.wait_stopping()

@app.task
def solo(ctx):
    return "ran"
""")
    # Before the workers: what the first of them alone could not hold is refused.
    gang = client.submit_gang(task="waits", size=2)
    for name in ("w1", "w2"):
        fleet.start(name)
    until_gang(client, gang.gang_id, "running")
    client.cancel(gang_ids=[gang.gang_id], reason="changed my mind")
    until_gang(client, gang.gang_id, "cancelled")
    assert until_state(client, client.submit(task="solo")[0], "done").result == "ran"


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_a_running_handler_is_told_that_another_member_was_replaced(
    client: Client, fleet: Fleet, isolate: bool
) -> None:
    fleet.define(f"""
@app.task(isolate={isolate})
def trains(ctx):
    g = ctx.gang
    if g.rank == 1:
        if g.epoch == 1:
            while not (HERE / "saved").exists():
                time.sleep(0.01)
            raise RuntimeError("rank 1 breaks")
        return [g.epoch, ctx.checkpoint.step]
    heard, told = [], threading.Event()
    def changed(gang):
        ctx.inputs  # The database is asked: a callback may do what a handler may.
        heard.append(gang.epoch)
        told.set()
    ctx.on_gang_change(changed)
    assert ctx.checkpoint is None
    ctx.save_checkpoint(3, b"three")
    (HERE / "saved").touch()
    assert told.wait(30)
    assert ctx.gang_changed.is_set()
    return [g.epoch, ctx.gang.epoch, heard, ctx.checkpoint.step, ctx.gang.role, not ctx.stopping]
""")
    gang = client.submit_gang(
        task="trains",
        roles=[Role("trainer", 2)],
        failure_policy="restart_member",
        checkpoint_mode="rank0",
        max_attempts=5,
    )
    for name in ("w1", "w2"):
        fleet.start(name, light=int(isolate))
    until_gang(client, gang.gang_id, "done", "failed")
    assert [client.job(id=i).result for i in gang.job_ids] == [[1, 2, [2], 3, "trainer", True], [2, 3]]
    assert client.violations() == []


@pytest.mark.parametrize("isolate", [False, True], ids=["inline", "in a child"])
def test_those_who_go_on_with_fewer_meet_at_the_new_rank_0(
    client: Client, fleet: Fleet, isolate: bool
) -> None:
    fleet.define(f"""
import socket
@app.task(isolate={isolate})
def meet(ctx):
    if ctx.gang.epoch == 1:
        if ctx.gang.rank == 0:
            raise RuntimeError("rank 0 breaks")
        assert ctx.gang_changed.wait(30)
    g = ctx.gang
    if g.rank == 0:
        with socket.create_server(("127.0.0.1", g.master_port)) as server:
            server.accept()[0].close()
    else:
        while True:
            try:
                socket.create_connection(("127.0.0.1", g.master_port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
    return [g.epoch, g.rank, g.role_rank, g.world_size, len(g.peers), g.local_rank]
""")
    for name in ("w1", "w2", "w3"):
        fleet.start(name, light=int(isolate))
    eventually(lambda: len(client.workers()) == 3, "there is room for all three at once")
    gang = client.submit_gang(task="meet", size=3, min_size=1, failure_policy="shrink")
    until_gang(client, gang.gang_id, "done", "failed")
    assert [client.job(id=i).state for i in gang.job_ids] == ["cancelled", "done", "done"]
    assert [client.job(id=i).result for i in gang.job_ids[1:]] == [[2, 0, 0, 2, 2, 0], [2, 1, 1, 2, 2, 1]]
    assert client.violations() == []


def test_a_command_asks_who_it_is_now(client: Client, fleet: Fleet) -> None:
    script = (
        'if [ $RANK = 1 ]; then [ $GANGQ_EPOCH = 2 ]; exit $?; fi; echo "$GANGQ_ROLE $GANGQ_ROLE_RANK"; '
        f"until {sys.executable} -m gangq gang | grep -q GANGQ_EPOCH=2; do sleep 0.2; done; "
        f"{sys.executable} -m gangq gang --json; echo started in $GANGQ_EPOCH"
    )
    gang = client.submit_gang(
        task="command",
        payload={"argv": [script], "shell": True},
        roles=[Role("trainer", 2)],
        failure_policy="restart_member",
        max_attempts=5,
    )
    fleet.start(slots=2)
    until_gang(client, gang.gang_id, "done", "failed")
    lines = "".join(row.chunk for row in client.logs(job_id=gang.job_ids[0])).splitlines()
    assert (lines[0], lines[2]) == ("trainer 0", "started in 1")
    told = json.loads(lines[1])
    assert (told["epoch"], told["rank"], told["world_size"]) == (2, 0, 2)
    assert [peer["job_id"] for peer in told["peers"]] == gang.job_ids

"""What a worker tells a process of async jobs arrives once; and the log of each job in it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.proc import bounded_log
from gangq.worker.async_main import _JobLog
from gangq.worker.shared import SharedProcess, SharedProcesses
from gangq.worker.shared_orders import Begin, Orders, Stop
from worker.controls import control_of
from worker.worker_process import Fleet, short_leases, until_state


def test_an_order_is_given_until_the_process_asks_for_a_later_one(client: Client) -> None:
    control = control_of(client)
    orders = Orders(control)

    def after(number: int) -> list[tuple[int, str]]:
        answer = control.wait(orders.answer({"op": "next", "after": number}))
        assert answer is not None
        return [(one["number"], one["key"]) for one in answer["orders"]]

    orders.give(Stop("a", 1.0))
    orders.give(Stop("b", 1.0))
    assert after(0) == after(0) == [(1, "a"), (2, "b")]
    orders.give(Stop("c", 1.0))
    assert after(2) == [(3, "c")]
    assert after(1) == [(3, "c")], "what the process had is gone"


def test_while_the_process_of_a_task_starts_the_jobs_of_another_begin_and_end() -> None:
    control: Any = SimpleNamespace(soon=lambda _: None)
    processes = SharedProcesses(control, lambda _: lambda: None)
    starts, may_start = threading.Event(), threading.Event()

    def start(process: SharedProcess) -> None:
        child: Any = SimpleNamespace(pid=1, poll=lambda: None)
        process.child = child

    def start_late(process: SharedProcess) -> None:
        starts.set()
        may_start.wait(30)
        start(process)

    def run(task: str, start: Any) -> None:
        job: Any = SimpleNamespace(key=task, claim=SimpleNamespace(task=task))
        with processes.joined(job, Begin(task, "log", (1, 1), None), start):
            pass

    slow = threading.Thread(target=run, args=("slow", start_late))
    other = threading.Thread(target=run, args=("other", start))
    slow.start()
    starts.wait(30)
    other.start()
    other.join(5)
    waits = other.is_alive()
    may_start.set()
    slow.join()
    other.join()
    assert not waits


def test_an_answer_is_to_the_question_that_it_names(client: Client) -> None:
    control = control_of(client)
    orders = Orders(control)
    first, second = orders.who_holds(), orders.who_holds()
    control.wait(orders.answer({"op": "holder", "number": 2, "by": "b"}))
    assert second.result(0) == "b"
    control.wait(orders.answer({"op": "holder", "number": 2, "by": "a"}))
    assert not first.done()


CUT = """
import gangq.worker.socket_server

server, cut = gangq.worker.socket_server.SocketServer, []
answers = server._of_process

async def cuts(process, request):
    answer = await answers(process, request)
    if answer.get("orders") and len(cut) < 2:
        cut.append(request)
        raise ConnectionResetError("cut")
    return answer

server._of_process = staticmethod(cuts)

@app.task
async def once(ctx):
    print("ran")
"""


def test_orders_whose_answer_was_cut_arrive_all_the_same_and_once(client: Client, fleet: Fleet) -> None:
    fleet.define(CUT)
    fleet.start(slots=0, light=2)
    for _ in range(3):
        job = until_state(client, client.submit(task="once", max_attempts=1)[0], "done")
        assert "".join(row.chunk for row in client.logs(job_id=job.id)) == "ran\n"


# Its log ----------------------------------------------------------------------------------------------------


def test_a_thread_that_outlives_its_job_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    write_all = bounded_log._write_all

    def waits(fd: int, data: bytes) -> None:
        begun.set()
        assert go.wait(10)
        write_all(fd, data)

    monkeypatch.setattr(bounded_log, "_write_all", waits)
    log = _JobLog(str(tmp_path / "one"), (100, 100))
    writes = threading.Thread(target=log.write, args=("late",))
    writes.start()
    assert begun.wait(10)
    finishes = threading.Thread(target=log.finish)
    finishes.start()
    finishes.join(0.3)
    # Without a lock this file has the number of the one that is written to.
    with (tmp_path / "other").open("wb"):
        go.set()
        writes.join(10)
        finishes.join(10)
    assert ((tmp_path / "one").read_text(), (tmp_path / "other").read_text()) == ("late", "")
    assert log.write("later") is False


PRINTS = """
import asyncio

@app.task
async def prints(ctx, killed=False):
    for n in range(400):
        print(f"line {n:05} of {ctx.job.id}")
        if n % 50 == 0:
            await asyncio.to_thread(print, f"thread {n:05} of {ctx.job.id}")
    if killed:
        (HERE / f"printed-{ctx.job.id}").touch()
        while len(list(HERE.glob("printed-*"))) < 2:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("killed", [False, True], ids=["done", "killed"])
def test_each_log_has_the_beginning_and_the_end_of_what_its_own_job_has_printed(
    client: Client, fleet: Fleet, killed: bool
) -> None:
    short_leases(client, log_bytes=4096)
    fleet.define(PRINTS)
    fleet.start(slots=0, light=2)
    payloads: list[Any] = [{"killed": killed}] * 2
    jobs = client.submit(task="prints", payloads=payloads, max_attempts=1)
    for job in jobs:
        until_state(client, job, "failed" if killed else "done")
        text = "".join(row.chunk for row in client.logs(job_id=job))
        assert text.startswith(f"line 00000 of {job}\nthread 00000 of {job}\n")
        assert text.endswith(f"line 00399 of {job}\n")
        assert text.count("bytes dropped here]") == 1
        other = next(one for one in jobs if one != job)
        assert f"of {other}\n" not in text

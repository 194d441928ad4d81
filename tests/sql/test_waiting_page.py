"""docs/manual/waiting.md: every sentence in its tables is printed by `explain` in the situation that it is about.

Numbers may differ, and `...` stands for any words. All else on the page is as the program says it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gangq.placement import decide, gates
from gangq.placement.explain import explain
from gangq.placement.fit import Search
from placement.drawn_boards import Picture
from sql.drive import PLACED, Gang, Q, Worker, gpus
from sql.services import Replicas, put

Row = dict[str, Any]
TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs/manual/waiting.md").read_text(encoding="utf-8")


def rows_of_the_page() -> list[tuple[str, str]]:
    """Word and sentence of each row of its tables; a row without a word has that of the row before."""
    found: list[tuple[str, str]] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "word" and not line.startswith("| |"):
            found.append((cells[0].strip("`"), cells[1]))
        elif line.startswith("| | "):
            found.append((found[-1][0], cells[1].strip()))
    return found


ROWS = rows_of_the_page()


def alpha(q: Q, count: int = 8, slots: int = 8, name: str = "alpha", **offer: Any) -> Worker:
    """A worker with GPUs, on a host of its name."""
    devices = gpus(*[24576] * count, prefix="GPU-" if name == "alpha" else name)
    return q.worker(name, host=name, slots=slots, devices=devices, **{"lease_s": 1e5, **offer})


def job(q: Q, job_id: int) -> list[Row]:
    return q.call("explain_job", job_id=job_id)


def passed(q: Q, gang: Gang) -> list[Row]:
    """What is said of it after a pass."""
    q.place()
    return gang_rows(q, gang)


def gang_rows(q: Q, gang: Gang) -> list[Row]:
    return q.call("explain_gang", gang_id=gang.id)


# Before it waits for a place --------------------------------------------------------------------------------


def backing_off_after_a_failure(q: Q) -> list[Row]:
    failed = q.submit()
    q.call("fail", job_id=failed, token=q.worker().take().token, error={"type": "OSError", "message": "no"})
    return job(q, failed)


def after_others(q: Q) -> list[Row]:
    return job(q, q.submit(after=q.submit(count=3)))


def lone(q: Q) -> list[Row]:
    q.worker()
    return gang_rows(q, q.submit_gang(1))


def reserved(q: Q) -> list[Row]:
    one, _ = q.workers(2)
    gang = q.submit_gang(2)
    q.place()
    one.claim()
    return gang_rows(q, gang)


def draining(q: Q) -> list[Row]:
    gang, _ = q.running_gang(*q.workers(2))
    gang.cancel()
    q.later(12)
    return gang_rows(q, gang)


def member(q: Q) -> list[Row]:
    q.workers(2)
    return job(q, q.submit_gang(2).job_ids[1])


def replica(q: Q) -> list[Row]:
    fleet = Replicas.of_hosts(q, 1)
    put(q, "chat", replicas=1)
    fleet.settle()
    put(q, "chat", replicas=2, work={"cpus": 2})
    fleet.turn()
    return gang_rows(q, Gang(q, q.value("select max(id) from gangq.live_gangs"), [], None))


def rolled_back(q: Q) -> list[Row]:
    gang = q.submit_gang(2)
    q.sql("update gangq.live_gangs set not_before = gangq.now() + interval '35 s', placement_misses = 2")
    return gang_rows(q, gang)


def avoiding(q: Q) -> list[Row]:
    worker = alpha(q, 2)
    tripped = q.submit(gpus=1)
    worker.take().trip(code=85)
    return job(q, tripped)


def lacking(q: Q) -> list[Row]:
    one, two = q.workers(2)
    gang = q.submit_gang(2, failure_policy="restart_member", timeout_s=60)
    gang.start(one, two)
    two.report_dead()
    q.live_on(10, one)
    return gang_rows(q, gang)


# What a pass finds ------------------------------------------------------------------------------------------


def paused_queue(q: Q) -> list[Row]:
    q.call("set_queue", name="research", paused=True)
    q.worker(queues=["research"])
    return passed(q, q.submit_gang(1, queue="research"))


def paused_task(q: Q) -> list[Row]:
    q.worker()
    q.call("pause_task", task="train")
    return passed(q, q.submit_gang(1))


def limited(q: Q, **limit: Any) -> list[Row]:
    q.call("set_queue", name="research", **limit)
    worker = alpha(q, slots=16, queues=["research"])
    q.submit_gang(2, queue="research", gpus=2).start(worker)
    q.submit(queue="research", gpus=1)
    worker.take()
    return passed(q, q.submit_gang(2, queue="research", gpus=1))


def of_a_key(q: Q, **limit: Any) -> list[Row]:
    worker = q.worker(slots=4)
    *_, last = q.submit(count=3, **limit)
    q.place()
    worker.claim()
    q.place()
    return job(q, last)


def nobody_serves(q: Q) -> list[Row]:
    alpha(q, taints=["debug"])
    return passed(q, q.submit_gang(1, wait_for_hardware=True))


def cordoned(q: Q) -> list[Row]:
    alpha(q)
    q.call("cordon", host="alpha")
    return passed(q, q.submit_gang(1))


def full(q: Q) -> list[Row]:
    first, second = alpha(q), alpha(q, name="beta")
    q.submit(gpus=2)
    first.take()
    q.submit(gpus=2, selector=[{"key": "worker", "op": "in", "values": ["beta"]}])
    second.take()
    return passed(q, q.submit_gang(4, gpus=4))


def alone(q: Q) -> list[Row]:
    worker = alpha(q)
    q.submit(gpus=2)
    worker.take()
    waits = q.submit(gpus=8)
    q.place()
    return job(q, waits)


def in_pieces(q: Q) -> list[Row]:
    for name in ("alpha", "beta"):
        worker = alpha(q, name=name)
        q.submit(gpus=3, selector=[{"key": "worker", "op": "in", "values": [name]}])
        worker.take()
    waits = q.submit(gpus=8)
    q.place()
    return job(q, waits)


def a_host_each(q: Q) -> list[Row]:
    workers = [alpha(q, name=name, cpus=8) for name in ("alpha", "beta", "gamma", "delta")]
    for worker in workers[:2]:
        q.submit(cpus=8, selector=[{"key": "worker", "op": "in", "values": [worker.name]}])
        worker.take()
    return passed(q, q.submit_gang(4, cpus=1, strategy="strict_spread"))


def on_one_host(q: Q) -> list[Row]:
    worker = alpha(q)
    q.submit(gpus=2)
    worker.take()
    alpha(q, 4, name="beta")
    return passed(q, q.submit_gang(8, gpus=1, strategy="strict_pack"))


def in_a_rack(q: Q) -> list[Row]:
    q.sql("update gangq.settings set topology = '{rack,host}'")
    worker = alpha(q, labels={"rack": "r2"})
    q.submit(gpus=2)
    worker.take()
    alpha(q, 4, name="beta", labels={"rack": "r1"})
    return passed(q, q.submit_gang(8, gpus=1, require="rack"))


def kept_apart(q: Q) -> list[Row]:
    q.submit_gang(1, apart="exp").start(alpha(q))
    return passed(q, q.submit_gang(1, apart="exp"))


def before_a_plan(q: Q) -> list[Row]:
    first = q.worker(cpus=4)
    q.worker("w2", cpus=4)
    q.submit(cpus=1, budget_s=100)
    first.take()
    q.submit_gang(2, priority=3)
    q.place()
    return passed(q, q.submit_gang(1, budget_s=8100))


def beside_a_plan(q: Q) -> list[Row]:
    first, _ = (q.worker(name, host=name, slots=3, lease_s=1e5) for name in ("alpha", "beta"))
    q.submit_gang(2, budget_s=300, strategy="strict_pack").start(first)
    q.submit_gang(6, priority=3)
    return passed(q, q.submit_gang(5, budget_s=4000))


def victim(q: Q) -> list[Row]:
    worker = q.worker(lease_s=1e5, cpus=4)
    q.submit(cpus=1, budget_s=5000)
    worker.take()
    q.beyond_min_run(worker)
    return passed(q, q.submit_gang(1, priority=5))


def too_large(q: Q) -> list[Row]:
    alpha(q, 2, slots=4)
    return passed(q, q.submit_gang(4, gpus=1, wait_for_hardware=True))


def unknown_to_this_library(q: Q) -> list[Row]:
    board = Picture("h0 ...\nX 2").board
    kinds = tuple(k._replace(roles=(k.roles[0]._replace(strategy="x"),)) for k in board.kinds)
    (refused,) = (one.refused for one in decide(board._replace(kinds=kinds)) if one.refused)
    return [{"gate": str(refused.gate), "detail": explain(refused)[0]}]


def decision_that_fails(q: Q) -> list[Row]:
    def fails(*_: object, **__: object) -> None:
        raise KeyError("rank")

    q.worker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "seats", fails)
        return passed(q, q.submit_gang(1))


def not_judged(q: Q) -> list[Row]:
    q.worker()
    return gang_rows(q, q.submit_gang(1))


def not_judged_for_long(q: Q) -> list[Row]:
    gang = q.submit_gang(1)
    q.later(60)
    return gang_rows(q, gang)


def nothing_against_it(q: Q) -> list[Row]:
    q.worker(cpus=4)
    waits = q.submit(cpus=1)
    q.place()
    return job(q, waits)


def no_worker(q: Q) -> list[Row]:
    return passed(q, q.submit_gang(1, wait_for_hardware=True))


# Around it --------------------------------------------------------------------------------------------------


def not_tolerated(q: Q) -> list[Row]:
    alpha(q)
    alpha(q, name="beta", taints=["debug"])
    return gang_rows(q, q.submit_gang(1))


def light_job(q: Q) -> list[Row]:
    q.worker(light=4)
    return job(q, q.submit())


def light_jobs(q: Q) -> list[Row]:
    q.worker()
    return job(q, q.submit(count=3)[2])


def third_in_line(q: Q) -> list[Row]:
    q.sql("update gangq.settings set reservations = 1")
    worker = q.worker()
    q.submit(**PLACED)
    worker.take()
    gangs = [q.submit_gang(1) for _ in range(3)]
    return passed(q, gangs[2])


def planned(q: Q) -> list[Row]:
    worker = q.worker(slots=2)
    q.submit_gang(2, budget_s=500).start(worker)
    return passed(q, q.submit_gang(2))


SITUATIONS: dict[str, list[Callable[[Q], list[Row]]]] = {
    "state": [backing_off_after_a_failure, after_others, light_job, lone, reserved, draining],
    "gang": [member],
    "service": [replica],
    "backoff": [rolled_back],
    "avoids": [avoiding],
    "missing": [lacking],
    "paused": [paused_queue, paused_task],
    "running_limit": [lambda q: limited(q, max_running_jobs=4)],
    "quota": [lambda q: limited(q, maximum={"gpus": 6})],
    "submitter_limit": [lambda q: limited(q, submitter_maximum={"gpus": 6})],
    "limit_key": [lambda q: of_a_key(q, limit_key="licence", limit=2)],
    "rate": [lambda q: of_a_key(q, limit_key="api", rate="2/1m")],
    "workers": [no_worker, not_tolerated],
    "infeasible": [nobody_serves, cordoned, too_large],
    "room": [full, alone, beside_a_plan],
    "fragmented": [in_pieces],
    "hosts": [a_host_each],
    "one_host": [on_one_host],
    "one_domain": [in_a_rack],
    "apart": [kept_apart],
    "planned_start": [before_a_plan],
    "stopping": [victim],
    "unknown": [unknown_to_this_library],
    "error": [decision_that_fails],
    "verdict": [not_judged, not_judged_for_long, nothing_against_it],
    "hardware": [too_large],
    "light": [light_job],
    "line": [third_in_line, light_jobs],
    "start": [planned, third_in_line],
    "unblock": [full, light_job],
}
"""For the rows of a word, in their order, what makes `explain` print them."""


def of_the_page(word: str) -> list[str]:
    return [sentence for row, sentence in ROWS if row == word]


def pattern(sentence: str) -> str:
    """What the program prints where the page has this sentence."""
    found = re.escape(sentence).replace(r"\ ", " ")
    found = re.sub(r"held by .*?\\\)", r"held by [gj\\d, ]+\\)", found)
    found = re.sub(r"paused by \w+", r"paused by \\w+", found).replace(r"\.\.\.", ".*")
    found = re.sub(r"\d+m\d+s|\b\d+ s\b", r"(\\d+m\\d+s|[\\d.]+ s)", found)
    return re.sub(r"\b([gj]?)\d+\b(?!\w)", r"\1[\\d.]+", found) + r"( \(decided [\d.]+ s ago\))?"


@pytest.mark.parametrize(
    ("word", "n"), [(word, n) for word, asked in SITUATIONS.items() for n in range(len(asked))]
)
def test_what_the_page_says_is_printed(q: Q, word: str, n: int) -> None:
    said = [row["detail"] for row in SITUATIONS[word][n](q) if row["gate"] == word]
    wanted = pattern(of_the_page(word)[n])
    assert any(re.fullmatch(wanted, detail) for detail in said), f"{wanted}\n{said}"


def test_each_row_of_the_page_has_a_situation_and_each_word_of_the_program_a_row() -> None:
    assert {word: len(of_the_page(word)) for word, _ in ROWS} == {w: len(s) for w, s in SITUATIONS.items()}
    files = ("140_explain_needs", "141_explain_verdict", "142_explain")
    sql = "".join((TOP / f"sql/{name}.sql").read_text(encoding="utf-8") for name in files)
    words = set(re.findall(r"select '(\w+)',|\('(\w+)', true, ", sql))
    named = {one or other for one, other in words} - {"gpus", "vram_mb", "memory_mb", "cpus", "members"}
    assert {"service", "gang", "start", "unblock"} < named
    every = {gate for gate in vars(gates).values() if isinstance(gate, gates.Gate)} | named | {"verdict"}
    assert every == set(SITUATIONS)

"""The page of a gang: what its lanes show, what it waited for and who owned that, and who displaced it."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from browsing import cells, fetch
from lives import displaced_and_back

import gangq.web
from gangq.placement import gates
from gangq.web.timeline import Life
from gangq.web.waits import OF_GATE, OWNERS, Wait, waits
from sql.drive import PLACED, Claim, Q, Worker, ack_all

START = datetime(2026, 1, 1, tzinfo=UTC)


def step(seconds: float, what: str, **data: Any) -> dict[str, Any]:
    return {"at": START + timedelta(seconds=seconds), "what": what, "reason": None, "data": data or None}


def bars(text: str) -> list[str]:
    return re.findall(r'<rect class="bar (\w+)"', text)


def test_a_gang_that_was_displaced_shows_each_part_of_its_life(dsn: str, q: Q) -> None:
    life = displaced_and_back(q)
    (page,) = fetch(dsn, f"/q/gangs/{life.low.id}", base_path="/q")
    assert bars(page.text) == [
        "quota",
        "unjudged",
        "stopping",
        "full",
        "ended",
        "ended",
        "runs",
        "runs",
        "silent",
        "silent",
        "silent",
        "silent",
    ]
    assert page.text.count(">told to stop</text>") == 1
    assert f'<a href="/q/gangs/{life.high.id}"><text class="mark"' in page.text
    assert f"displaced by g{life.high.id}<title>" in page.text
    assert page.text.count(">1st<title>first to stop") == 1
    assert page.text.count(">o<title>confirmed gone") == 2
    assert page.text.count("<title>checkpoint of step 7") == 2
    assert "40 s ago, step 9; beats of its task have stayed away for 20 s without harm" in page.text
    for gap in (315, 325):
        assert f"{gap} s before it stopped, step 7; beats of its task have stayed away for 20 s" in page.text
    assert "epoch 2 on w1 (node1): runs" in page.text
    assert f'<td><a href="/q/gangs/{life.high.id}">g{life.high.id}</a></td><td>620</td>' in cells(page.text)
    assert "quota 30.0, unjudged 10.0" in page.text
    assert "restores step 7" in page.text


def marks(page: str) -> list[tuple[str, str]]:
    """The last beats and the newest checkpoints that are drawn, as (rank, what)."""
    ranks = {int(y) - 12: rank for y, rank in re.findall(r'y="(\d+)">rank (\d)</text>', page)}
    beats = re.findall(r'class="beat" cx="[\d.]+" cy="([\d.]+)" r="3"><title>[^<]*(step \d+)', page)
    saved = re.findall(r'class="saved" d="M[\d.]+ (\d+) [^"]*"><title>(checkpoint of step \d+)', page)
    found = [(ranks[int(float(y) - 6.5)], what) for y, what in beats]
    return sorted(found + [(ranks[int(y) - 1], what) for y, what in saved])


def beat_and_save(workers: list[Worker], claims: list[Claim], *, step: int) -> None:
    for worker, claim in zip(workers, claims, strict=True):
        worker.beat(claim, beats=[{"step": step + claim["rank"]}])
        claim.save(step)


def test_each_epoch_shows_its_last_beats_and_its_newest_checkpoints(dsn: str, q: Q) -> None:
    workers = q.workers(2, lease_s=1e5)
    gang = q.submit_gang(2, max_attempts=9)
    claims = gang.start(*workers)
    beat_and_save(workers, claims, step=10)
    beat_and_save(workers, claims, step=20)
    q.later(7)
    claims[1].fail()
    claims[0].ack()
    claims = gang.restart(*workers)
    q.later(5)
    beat_and_save(workers, claims, step=30)
    q.later(5)
    first = [
        ("0", "checkpoint of step 20"),
        ("0", "step 20"),
        ("1", "checkpoint of step 20"),
        ("1", "step 21"),
    ]
    second = [
        ("0", "checkpoint of step 30"),
        ("0", "step 30"),
        ("1", "checkpoint of step 30"),
        ("1", "step 31"),
    ]
    (running,) = fetch(dsn, f"/gangs/{gang.id}")
    assert marks(running.text) == sorted(first + second)
    assert all(f" 7 s before it stopped, step {step}<" in running.text for step in (20, 21))
    for claim in claims:
        claim.complete()
    (ended,) = fetch(dsn, f"/gangs/{gang.id}")
    assert marks(ended.text) == sorted(first + second)
    assert all(f" 5 s before it stopped, step {step}<" in ended.text for step in (30, 31))


def test_a_checkpoint_that_outlives_its_epoch_is_drawn_once(dsn: str, q: Q) -> None:
    workers = q.workers(2, lease_s=1e5)
    gang = q.submit_gang(2, max_attempts=9)
    claims = gang.start(*workers)
    beat_and_save(workers, claims, step=10)
    for _ in range(2):
        claims[1].fail()
        claims[0].ack()
        claims = gang.restart(*workers)
    (page,) = fetch(dsn, f"/gangs/{gang.id}")
    assert marks(page.text) == [
        ("0", "checkpoint of step 10"),
        ("0", "step 10"),
        ("1", "checkpoint of step 10"),
        ("1", "step 11"),
    ]


@pytest.mark.parametrize("policy", ["restart_member", "shrink"])
def test_a_member_that_the_others_go_on_without_shows_what_it_last_told(dsn: str, q: Q, policy: str) -> None:
    workers = q.workers(2, lease_s=1e5)
    gang = q.submit_gang(2, failure_policy=policy, **({"min_size": 1} if policy == "shrink" else {}))
    claims = gang.start(*workers)
    beat_and_save(workers, claims, step=10)
    q.later(3)
    claims[1].fail()
    (page,) = fetch(dsn, f"/gangs/{gang.id}")
    assert ("1", "step 11") in marks(page.text)
    assert "3 s before it stopped, step 11" in page.text


def test_members_that_never_beat_or_saved_write_nothing_of_it(q: Q) -> None:
    workers = q.workers(2, lease_s=1e5)
    gang = q.submit_gang(2, max_attempts=9)
    claims = gang.start(*workers)
    claims[1].fail()
    claims[0].ack()
    for claim in gang.restart(*workers):
        claim.complete()
    assert {"drain", "ack", "done"} <= {event["kind"] for event in q.events()}
    assert [event for event in q.events() if "last_beats" in (event["data"] or {})] == []


def test_who_was_displaced_by_a_single_job_has_a_link_to_it(dsn: str, q: Q) -> None:
    worker = q.worker(slots=1, lease_s=1e5)
    low, _ = q.running_gang(worker)
    q.beyond_min_run(worker)
    job = q.submit(priority=5, **PLACED)
    q.tick()
    (page,) = fetch(dsn, f"/gangs/{low.id}")
    assert f'<a href="/jobs/{job}"><text class="mark"' in page.text
    assert f"displaced by job {job}<title>" in page.text


def test_a_single_job_that_was_displaced_says_by_whom(dsn: str, q: Q) -> None:
    worker = q.worker(slots=1, lease_s=1e5)
    low = q.submit(**PLACED)
    q.tick()
    worker.take()
    q.beyond_min_run(worker)
    high = q.submit_gang(1, priority=5)
    q.tick()
    (page,) = fetch(dsn, f"/jobs/{low}")
    assert f'<td><a href="/gangs/{high.id}">g{high.id}</a></td>' in cells(page.text)


def test_the_member_whose_end_began_a_drain_is_the_first_to_stop(dsn: str, q: Q) -> None:
    workers = q.workers(2)
    gang, (first, second) = q.running_gang(*workers)
    second.fail()
    ack_all([first])
    (page,) = fetch(dsn, f"/gangs/{gang.id}")
    (mark,) = re.findall(r'y="(\d+)">1st<title>first to stop', page.text)
    lanes = re.findall(r'y="(\d+)">rank (\d)</text>', page.text)
    assert {rank for y, rank in lanes if int(y) - 1 == int(mark)} == {"1"}


def test_every_gate_has_an_owner() -> None:
    known = {gate for gate in vars(gates).values() if isinstance(gate, gates.Gate)}
    assert known == OF_GATE.keys()
    assert set(OF_GATE.values()) < OWNERS.keys()


def test_each_owner_of_a_wait_has_a_colour_of_its_own() -> None:
    style = (Path(gangq.web.__file__).parent / "static" / "style.css").read_text()
    colours = {owner: re.findall(rf"\.{owner} {{ --bar: (var\(--\w+\)); }}", style) for owner in OWNERS}
    assert all(len(found) == 1 for found in colours.values()), colours
    assert len({found[0] for found in colours.values()}) == len(OWNERS), colours


def test_a_wait_is_split_by_owner_and_what_is_not_on_record_is_left_over() -> None:
    steps = [
        step(0, "submit"),
        step(100, "reserve", waited={"quota": 20, "submitter_limit": 5, "one_host": 30}),
        step(103, "claim"),
        step(104, "claim"),
        step(110, "go"),
    ]
    found = waits(steps, None, START + timedelta(seconds=200))
    assert [dict(wait.seconds) for wait in found] == [
        {"quota": 25, "fragmented": 30, "unjudged": 45},
        {"claim": 3},
        {"barrier": 7},
    ]


def test_clocks_that_ran_on_while_it_backed_off_do_not_make_a_wait_longer() -> None:
    steps = [step(0, "submit"), step(50, "reserve", waited={"room": 150, "paused": 50})]
    assert dict(waits(steps, None, START + timedelta(seconds=50))[0].seconds) == {
        "paused": 12.5,
        "full": 37.5,
    }


def test_a_wait_that_goes_on_is_what_the_gang_has_waited_so_far() -> None:
    found = waits([step(0, "submit")], {"room": 9}, START + timedelta(seconds=10))
    assert [dict(wait.seconds) for wait in found] == [{"full": 9, "unjudged": 1}]


def test_a_member_that_is_replaced_is_no_wait_of_the_gang() -> None:
    steps = [
        step(0, "submit"),
        step(1, "reserve"),
        step(2, "claim"),
        step(3, "go"),
        step(50, "replace"),
        step(60, "reserve", replaces=[1]),
        step(61, "claim"),
    ]
    assert [wait.until for wait in waits(steps, None, START + timedelta(seconds=90))] == [
        START + timedelta(seconds=n) for n in (1, 2, 3)
    ]


def test_links_of_two_displacements_at_once_do_not_lie_on_each_other() -> None:
    at = START + timedelta(seconds=99)
    rows = [{"at": at, "for_gang": n, "for_job": None} for n in (7, 8)]
    end = START + timedelta(seconds=100)
    wait = Wait(START, end, {"full": 100})
    text = Life([step(0, "submit")], [], [], rows, [wait], 1, end, base="").drawn()
    first, second = (float(x) for x in re.findall(r'class="mark" x="([\d.]+)" y="48"', text))
    assert 960 - second > 80
    assert second - first > 80

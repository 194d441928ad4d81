"""What a decision is made from, as `gangq.board()` tells it and `gangq.placement.board` reads it."""

from __future__ import annotations

from collections import Counter

import pytest

from gangq.placement.board import Ask, Board, Hold, Needs
from sql.drive import Q, gpus

SHAPE_OF = "select shape_id from gangq.live_jobs where id = %(job)s"


def board(q: Q) -> Board:
    return Board.from_json(q.one("board"))


def test_a_board_is_a_file_that_says_the_same_again(q: Q) -> None:
    worker = q.worker(devices=gpus(10, 20), labels={"rack": "r1"}, slots=4, memory_mb=1000, cpus=2.5)
    q.call("configure", topology=["rack", "host"])
    q.call("set_queue", name="default.low", maximum={"gpus": 3}, weight=2)
    q.submit_gang(size=2, gpus=1, priority=5, queue="default.low", require="rack")
    q.running_gang(worker, gpus=1)
    seen = board(q)
    assert Board.from_json(seen.to_json()) == seen
    (mine,) = seen.workers
    assert (mine.id, mine.slots, mine.memory_mb, mine.millicpus) == (worker.incarnation, 4, 1000, 2500)
    assert (mine.domains, mine.open, [d.vram_mb for d in mine.devices]) == (
        ("r1", mine.host),
        True,
        [10, 20],
    )
    assert {queue.name: (dict(queue.maximum), queue.weight) for queue in seen.queues} == {
        "default": ({}, 1),
        "default.low": ({"gpus": 3}, 2),
    }


def test_what_waits_is_an_ask_and_what_is_placed_a_unit(q: Q) -> None:
    worker = q.worker(devices=gpus(10), slots=4)
    running, _ = q.running_gang(worker, gpus=1, budget_s=100)
    waiting = q.submit_gang(size=3, gpus=1, priority=7, budget_s=60, wait_for_hardware=True)
    seen = board(q)
    (ask,) = seen.asks
    (kind,) = seen.kinds
    assert ask == Ask(f"g{waiting.id}", kind.id, 7, ask.age, ask.submitter, 60.0)
    (role,) = kind.roles
    assert (role.least, role.most, role.needs, role.serves) == (3, 3, Needs(gpus=1), {1})
    (unit,) = seen.units
    device = seen.workers[0].devices[0].id
    assert unit.holds == (Hold(worker.incarnation, (device,)),)
    assert (unit.id, unit.ends_at, unit.since) == (f"g{running.id}", seen.now + 100, seen.now)
    assert not unit.movable, "it has only begun"
    q.clock.advance(301)
    (unit,) = board(q).units
    assert unit.movable
    assert unit.lost_s == 301


def test_a_placed_job_is_a_unit_and_light_jobs_are_none(q: Q) -> None:
    q.call("set_queue", name="limited", maximum={"jobs": 9})
    worker = q.worker(slots=4, light=1, prefetch=3, memory_mb=100, cpus=4)
    job = q.submit(memory_mb=60, cpus=0.5, budget_s=50)
    worker.take()
    q.submit(count=3)
    assert len(worker.claim(max_jobs=3)) == 3
    q.submit_gang(size=9, wait_for_hardware=True)
    seen = board(q)
    units = {unit.id: unit for unit in seen.units}
    assert units[f"j{job}"].holds == (Hold(worker.incarnation, (), 60, 500),)
    assert units[f"j{job}"].ends_at == seen.now + 50
    assert set(units) == {f"j{job}"}
    assert (seen.workers[0].slots, seen.queues[0].light_jobs) == (4, 3), (
        "limits of other queues may count them"
    )


def test_what_is_told_to_stop_leaves_and_what_is_drained_says_so(q: Q) -> None:
    workers = q.workers(2)
    moving, _ = q.running_gang(*workers, size=1)
    stopping, _ = q.running_gang(*workers, size=1)
    q.call("preempt_gang", gang_id=stopping.id)
    q.call("cordon", worker=moving.placed_on[0], reason="a fan", drain=True)
    seen = board(q)
    units = {unit.id: unit for unit in seen.units}
    assert (units[f"g{moving.id}"].drained, units[f"g{moving.id}"].leaving) == (True, False)
    assert (units[f"g{stopping.id}"].drained, units[f"g{stopping.id}"].leaving) == (False, True)
    assert units[f"g{stopping.id}"].ends_at <= seen.now + seen.grace_s
    assert {worker.name for worker in seen.workers if worker.open} == set(stopping.placed_on)


def test_a_device_in_quarantine_is_withheld_and_one_that_works_is_not(q: Q) -> None:
    worker = q.worker(devices=gpus(10, 20, 30), slots=3)
    q.running_gang(worker, gpus=1)
    q.call("quarantine", device_uuid="G2", reason="a fan")
    devices = board(q).workers[0].devices
    assert [(device.vram_mb, device.withheld) for device in devices] == [(10, False), (20, False), (30, True)]


@pytest.mark.parametrize("policy", ["priority", "fifo"])
def test_what_backs_off_is_no_ask_before_its_time(q: Q, policy: str) -> None:
    q.call("configure", gang_backoff_s=60)
    q.call("set_queue", name="default", policy=policy)
    gang = q.submit_gang(size=1)
    q.worker()
    q.tick()
    q.call("rollback_gang", gang_id=gang.id)
    assert gang.state == "blocked"
    assert board(q).asks == ()
    q.later(200)
    assert [ask.id for ask in board(q).asks] == [f"g{gang.id}"]


def test_workers_that_serve_the_same_are_one_class_and_a_role_names_those_that_can_run_it(q: Q) -> None:
    q.worker("a1", labels={"gpu": "a"})
    q.worker("a2", labels={"gpu": "a"})
    q.worker("b1", labels={"gpu": "b"})
    q.worker("c1", tasks=["other"])
    q.submit_gang(size=2, labels={"gpu": "a"})
    seen = board(q)
    classes = {worker.name: worker.class_id for worker in seen.workers}
    assert classes["a1"] == classes["a2"]
    assert len({classes["a1"], classes["b1"], classes["c1"]}) == 3
    assert seen.kinds[0].roles[0].serves == {classes["a1"]}


@pytest.mark.slow
def test_of_each_kind_the_first_200_are_seen_and_fewer_where_there_are_many_kinds(q: Q) -> None:
    gangs = q.sql(
        "select g.gang_id from generate_series(0, 449) n cross join lateral gangq.submit_gang('train', 1, "
        "priority => n % 2, options => '{\"wait_for_hardware\": true}') g order by n"
    )
    seen = board(q)
    assert [ask.id for ask in seen.asks] == [f"g{gang['gang_id']}" for gang in gangs[1:401:2]]
    q.sql(
        "select from generate_series(12, 12 * 100 - 1) n cross join lateral gangq.submit_gang('train', 1, "
        "options => jsonb_build_object('memory_mb', n / 12, 'wait_for_hardware', true))"
    )
    seen = board(q)
    assert len(seen.asks) == 1000
    assert max(Counter(ask.kind for ask in seen.asks).values()) == 10
    assert len({ask.kind for ask in seen.asks}) == 100


def test_a_submitter_whose_gangs_fit_nowhere_hides_nobody_elses(q: Q, logins: dict[str, Q]) -> None:
    """Gangs of 41 kinds, one of each size, on a board that shows 40."""
    logins["s1"].sql(
        "select count(*) from generate_series(1, 40) n cross join lateral "
        "gangq.submit_gang('train', n, options => '{\"memory_mb\": 7, \"wait_for_hardware\": true}') g"
    )
    other = logins["s2"].submit_gang(41, memory_mb=7, wait_for_hardware=True)
    shown = [row["id"] for row in q.sql("select id from gangq.board_gangs(gangq.now(), 200, 40)")]
    assert len(shown) == 40
    assert other.id in shown


def test_what_has_a_planned_start_or_seats_kept_is_seen_by_every_pass(q: Q) -> None:
    made = q.sql(
        "select g.gang_id from generate_series(1, 8) n cross join lateral "
        "gangq.submit_gang('train', n, options => '{\"memory_mb\": 7, \"wait_for_hardware\": true}') g"
    )
    last = made[-1]["gang_id"]
    q.sql(
        "insert into gangq.plans values ('g' || %(g)s::bigint, false, 1, gangq.now() + interval '1 h', 1, '[]')",
        g=last,
    )
    for _ in range(12):
        shown = [row["id"] for row in q.sql("select id from gangq.board_gangs(gangq.now(), 200, 4)")]
        assert (len(shown), last in shown) == (4, True)


@pytest.mark.slow
def test_a_submitter_whose_jobs_fit_nowhere_hides_nobody_elses(q: Q, logins: dict[str, Q]) -> None:
    """Nor what stands behind a job of that submitter: it is seen in some pass."""
    s1, s2 = logins["s1"], logins["s2"]
    q.call("configure", new_shapes_per_day=1100)
    s1.sql(
        "select count(*) from generate_series(1, 1050) n cross join lateral gangq.submit('train', options => "
        "jsonb_build_object('memory_mb', n, 'wait_for_hardware', true)) w"
    )
    s1.submit(cpus=1)
    shapes = {cpus: q.value(SHAPE_OF, job=s2.submit(cpus=cpus)) for cpus in (1, 2)}
    boards = [[ask.id for ask in board(q).asks] for _ in range(12)]
    assert {len(asks) for asks in boards} == {1000}
    assert all(f"k{shapes[2]}/0" in asks for asks in boards)
    assert any(f"k{shapes[1]}/0" in asks for asks in boards)


def test_a_gang_that_runs_and_lacks_members_says_which_and_beside_whom(q: Q) -> None:
    one, two = q.workers(2)
    gang, claims = q.running_gang(one, two, failure_policy="restart_member")
    claims[1].fail()
    seen = board(q)
    q.clock.advance(60)
    seen = board(q)
    (ask,) = seen.asks
    assert (ask.id, ask.missing, ask.mates) == (f"g{gang.id}", (1,), ((one.incarnation,),))

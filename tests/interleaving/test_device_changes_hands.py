"""A device is taken once, also while it passes from one worker to the next: nobody ever meets the other's hold."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from interleaving.sessions import Arena, Later, both_ends, call, first_of_two, value
from sql.drive import place

ONE, TWO = ({"uuid": f"GPU-{n}", "index": n, "vram_mb": 1000} for n in (1, 2))


def devices(meeting: Arena) -> dict[str, tuple[str, str | None]]:
    rows = meeting.db.execute("select uuid, state, worker from gangq.devices order by uuid").fetchall()
    return {row["uuid"]: (row["state"], row["worker"]) for row in rows}


def register(conn: Any, name: str, *offered: dict[str, Any]) -> int:
    (row,) = call(conn, "register_worker", name=name, host="h", queues=["default"], devices=list(offered))
    incarnation: int = row["incarnation"]
    return incarnation


@both_ends
def test_a_worker_that_comes_while_its_device_is_put_into_quarantine_waits_to_hear_of_it(meeting, end):
    value(meeting.db, "retire_worker", incarnation=register(meeting.db, "old", ONE))
    meeting.job(gpus=1)

    def come_and_claim(conn):
        incarnation = register(conn, "new", ONE)
        place(conn)
        return call(conn, "claim", incarnation=incarnation)

    met = meeting.meet(lambda conn: value(conn, "quarantine", device_uuid="GPU-1"), come_and_claim, end)
    assert met.later.waited
    assert len(met.later.result()) == (0 if end == "commit" else 1)
    assert devices(meeting) == {"GPU-1": ("quarantined" if end == "commit" else "held", "new")}


def test_a_quarantine_that_waited_while_the_device_changed_hands_does_not_meet_the_new_holder(meeting):
    old, new = register(meeting.db, "old", ONE), register(meeting.db, "new", ONE)
    meeting.job(gpus=1)
    retiring, between, claiming = (meeting.connect(autocommit=False) for _ in range(3))
    value(retiring, "retire_worker", incarnation=old)
    # In line before the quarantine, so that it still waits when the device has passed on.
    in_line = Later(
        between,
        lambda conn: conn.execute("select 1 from gangq.incarnations where id = %s for update", (old,)),
    ).start(meeting.db)
    quarantine = Later(meeting.connect(), lambda conn: value(conn, "quarantine", device_uuid="GPU-1"))
    quarantine.start(meeting.db)
    assert in_line.waited
    assert quarantine.waited
    retiring.commit()
    in_line.join().result()
    meeting.place()
    (claimed,) = call(claiming, "claim", incarnation=new)
    between.commit()
    quarantine.join()
    assert quarantine.sqlstate == "55P03", quarantine.error
    assert "try again" in str(quarantine.error.diag.message_hint)
    claiming.commit()
    assert devices(meeting) == {"GPU-1": ("held", "new")}
    assert meeting.state(claimed["job_id"]) == "running"
    assert meeting.violations() == []


def test_a_registration_that_was_held_up_takes_no_device_from_a_worker_that_came_meanwhile(meeting):
    value(meeting.db, "retire_worker", incarnation=register(meeting.db, "old", ONE, TWO))
    blocker, claiming = meeting.connect(autocommit=False), meeting.connect(autocommit=False)
    blocker.execute("select 1 from gangq.device_registry where uuid = 'GPU-1' for update")
    slow = Later(meeting.connect(), lambda conn: register(conn, "slow", ONE, TWO)).start(meeting.db)
    assert slow.waited  # its incarnation is older than that of the next one
    quick = register(meeting.db, "quick", TWO)
    meeting.job(gpus=1)
    meeting.place()
    assert len(call(claiming, "claim", incarnation=quick)) == 1
    blocker.rollback()
    incarnation = slow.join().result()
    assert incarnation < quick
    meeting.job(gpus=1)
    meeting.place()
    claim = Later(meeting.connect(), lambda conn: call(conn, "claim", incarnation=incarnation)).start(
        meeting.db
    )
    assert not claim.waited
    assert len(claim.join().result()) == 1
    claiming.commit()
    assert devices(meeting) == {"GPU-1": ("held", "slow"), "GPU-2": ("held", "quick")}
    assert meeting.violations() == []


@pytest.mark.parametrize("heir", ["first", "second"])
def test_a_device_passes_to_the_longest_standing_of_those_left(meeting, heir):
    value(meeting.db, "retire_worker", incarnation=register(meeting.db, "gone", ONE))
    names = {name: register(meeting.db, name, ONE) for name in ("offers", "first", "second")}
    value(meeting.db, "retire_worker", incarnation=names["offers"])
    if heir == "second":
        value(meeting.db, "retire_worker", incarnation=names["first"])
    assert devices(meeting) == {"GPU-1": ("free", heir)}


@first_of_two
@both_ends
def test_a_device_whose_worker_retires_while_another_registers_with_it_is_offered_by_the_one_that_lives(
    meeting, turn, end
):
    old = register(meeting.db, "old", ONE)
    pair = [
        lambda conn: register(conn, "new", ONE),
        lambda conn: value(conn, "retire_worker", incarnation=old),
    ]
    met = meeting.meet(pair[turn], pair[1 - turn], end)
    assert met.later.waited
    met.later.result()
    undone = None if end == "commit" else ("new", "old")[turn]
    offers = {None: "new", "new": None, "old": "old"}[undone]
    assert devices(meeting) == {"GPU-1": ("free" if offers else "withdrawn", offers)}


def test_a_worker_ends_though_the_one_its_device_passes_to_is_claiming(meeting):
    old, heir = register(meeting.db, "old", ONE), register(meeting.db, "heir", ONE)
    meeting.job()
    met = meeting.meet(
        lambda conn: call(conn, "claim", incarnation=heir),
        lambda conn: value(conn, "retire_worker", incarnation=old),
    )
    assert not met.later.waited
    met.later.result()
    assert devices(meeting) == {"GPU-1": ("free", "heir")}


def test_two_workers_that_end_at_once_and_see_the_same_device_both_end(meeting):
    """The first passes the device to the second, which has begun to end and wants the device itself."""
    old, heir = register(meeting.db, "old", ONE), register(meeting.db, "heir", ONE)
    blocker = meeting.connect(autocommit=False)
    blocker.execute("select 1 from gangq.device_registry for no key update")
    ends = [
        Later(meeting.connect(), lambda conn: value(conn, "retire_worker", incarnation=old)),
        Later(meeting.connect(), lambda conn: value(conn, "retire_worker", incarnation=heir)),
    ]
    for end in ends:
        assert end.start(meeting.db).waited
    blocker.rollback()
    for end in ends:
        end.join().result()
    assert devices(meeting) == {"GPU-1": ("withdrawn", None)}
    assert meeting.violations() == []


def renewed(conn: Any, place_id: int, shape_id: int) -> None:
    """A pass renews a place that was vacated since its board was read."""
    refills = [{"place": place_id, "min_priority": 5}]
    (report,) = conn.execute(
        "select a.* from gangq.lock_rows l cross join lateral gangq.apply(l.runs, %s) a where l.name = 'pass'",
        [Jsonb([{"ask": f"k{shape_id}/0", "action": "wait", "refills": refills}])],
    ).fetchall()
    assert report["accepted"]


@pytest.mark.parametrize("how", ["quarantine", "report_stuck"])
@both_ends
def test_a_device_whose_place_a_pass_renews_is_quarantined_all_the_same(meeting, end, how):
    worker = register(meeting.db, "w1", ONE)
    job = meeting.job(gpus=1)
    value(meeting.db, "open_place", incarnation=worker, job_id=job)
    (place_row,) = meeting.db.execute("select id, shape_id from gangq.places").fetchall()

    def take_out(conn):
        if how == "quarantine":
            return value(conn, "quarantine", device_uuid="GPU-1")
        return value(conn, "report_stuck", worker="w1", incarnation=gone, evidence={"pid": 1})

    if how == "report_stuck":
        # An incarnation that had the device before is found to have left a process on it.
        value(meeting.db, "retire_worker", incarnation=worker)
        gone, worker = worker, register(meeting.db, "w1", ONE)
        value(meeting.db, "open_place", incarnation=worker, job_id=job)
        (place_row,) = meeting.db.execute("select id, shape_id from gangq.places").fetchall()
    met = meeting.meet(lambda conn: renewed(conn, place_row["id"], place_row["shape_id"]), take_out, end)
    met.later.result()
    assert met.later.waited
    assert devices(meeting) == {"GPU-1": ("quarantined", "w1")}
    assert meeting.db.execute("select id from gangq.places").fetchall() == []

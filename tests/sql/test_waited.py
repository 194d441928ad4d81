"""For how long a gang waited at which gate: on record without a write for a gang that goes on waiting."""

from __future__ import annotations

import pytest
from test_timeouts import open_again, shut

from sql.drive import Q


def test_a_wait_is_on_record_by_gate_when_it_ends(q: Q) -> None:
    q.submit_gang(2)
    shut(q, "running_limit")
    q.later(500)
    gang = q.submit_gang(2)
    q.later(40)
    assert gang.row["waited"] == {"running_limit": 40}
    open_again(q)
    q.later(25)
    shut(q, "paused")
    q.later(10)
    assert gang.row["waited"] == {"running_limit": 40, "workers": 25, "paused": 10}
    workers = q.workers(4)
    q.call("set_queue", name="default", paused=False)
    claims = gang.start(*workers)
    assert gang.row["waited"] is None
    reserve = q.events("reserve", gang_id=gang.id)[0]
    assert reserve["data"]["waited"] == {"running_limit": 40, "workers": 25, "paused": 10}
    # The next wait begins at zero.
    q.call("set_queue", name="default", paused=True)
    q.call("preempt_gang", gang_id=gang.id)
    for claim in claims:
        claim.ack()
    q.tick()
    q.later(7)
    assert gang.row["waited"] == {"paused": 7}
    gang.cancel()
    assert q.events("end", gang_id=gang.id)[0]["data"]["waited"] == {"paused": 7}


def test_a_gang_that_ends_as_another_kind_keeps_what_it_waited_before(q: Q) -> None:
    gang, other = q.submit_gang(2), q.submit_gang(3)
    q.tick()
    q.later(30)
    kind = "update gangq.live_gangs set kind_id = %(kind)s where id = %(id)s"
    q.db.execute(kind.encode(), {"kind": other.live["kind_id"], "id": gang.id})
    q.later(5)
    assert gang.row["waited"] == {"workers": 35}
    q.db.execute(kind.encode(), {"kind": gang.live["kind_id"], "id": gang.id})


@pytest.mark.slow
def test_a_pass_over_a_thousand_gangs_that_go_on_waiting_writes_none_of_them(q: Q) -> None:
    written = (
        "select relname, (n_tup_ins + n_tup_upd + n_tup_del)::integer as rows from pg_stat_xact_user_tables "
        "where schemaname = 'gangq' and n_tup_ins + n_tup_upd + n_tup_del > 0"
    )
    for _ in range(1000):
        q.submit_gang(2)
    q.tick()
    assert q.value("select count(*) from gangq.live_gangs where state = 'blocked'") == 1000
    q.later(20)
    with q.db.transaction():
        before = {row["relname"]: row["rows"] for row in q.sql(written)}
        q.place()
        after = {row["relname"]: row["rows"] for row in q.sql(written)}
    changed = {name: rows - before.get(name, 0) for name, rows in after.items() if rows > before.get(name, 0)}
    assert changed == {"lock_rows": 1, "decider": 1}
    shut(q, "quota")
    assert q.value("select count(*) from gangq.verdicts where waited <> '{}'") == 1

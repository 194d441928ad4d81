"""Where the members of a gang sit, on the tables: domains, devices, and large fleets."""

from __future__ import annotations

import pytest

from sql.drive import Q, Worker, gpus


def test_a_slash_in_the_name_of_a_domain_is_part_of_the_name(q: Q) -> None:
    """Rack z of zone x/y is not rack y/z of zone x."""
    q.call("configure", topology=["zone", "rack", "host"])
    q.worker("a", labels={"zone": "x/y", "rack": "z"})
    q.worker("b", labels={"zone": "x", "rack": "y/z"})
    q.worker("c", labels={"zone": "x\\", "rack": "y/z"})
    q.worker("d", labels={"zone": "x/y\\", "rack": "z"})
    gang = q.submit_gang(2, require="rack", wait_for_hardware=True)
    q.tick()
    assert gang.state == "blocked"
    q.worker("e", labels={"zone": "x", "rack": "y/z"})
    q.tick()
    assert sorted(gang.placed_on) == ["b", "e"]


def test_the_role_that_avoids_a_device_gets_the_other_one(q: Q) -> None:
    """The first role would take the smallest that is free: the one the second role could use."""
    worker = q.worker(slots=2, devices=gpus(80000, 80000))
    roles = [{"name": name, "task": name, "count": 1, "gpus": 1} for name in ("driver", "executor")]
    gang = q.submit_gang(roles=roles, max_trips=5)
    driver, executor = gang.start(worker)
    bad = executor["devices"][0]["uuid"]
    executor.trip(code=85)
    driver.ack()
    q.settle()
    q.sql("delete from gangq.device_holds where kind = 'quarantine'")
    driver, executor = gang.restart(worker)
    assert [device["uuid"] for device in driver["devices"]] == [bad]
    assert [device["uuid"] for device in executor["devices"]] != [bad]


@pytest.fixture
def large(q: Q) -> Q:
    """A fleet too large to be looked at whole for a few gangs; its only rack of more than one host comes last."""
    q.sql("update gangq.settings set topology = '{rack,host}'")
    q.sql(
        "insert into gangq.incarnations "
        "(id, name, host, address, slots, light, memory_mb, cpus, queues, labels, registered_at) "
        "select n, 'w' || n, 'h' || n, 'a', 1, 1, 0, 0, '{default}', "
        "jsonb_build_object('rack', case when n > 1090 then 'whole' else 'r' || n end), gangq.now() "
        "from generate_series(1, 1100) n"
    )
    q.sql(
        "insert into gangq.leases "
        "select i.id, gangq.now() + interval '1 day', gangq.now(), 86400 from gangq.incarnations i"
    )
    return q


def test_a_preferred_domain_is_found_on_a_large_fleet_whatever_is_looked_at_first(large: Q) -> None:
    q = large
    gang = q.submit_gang(4)
    near = q.submit_gang(4, prefer="rack")
    q.place()
    assert (gang.state, near.state) == ("reserved", "reserved")
    assert all(int(name[1:]) > 1090 for name in near.placed_on), near.placed_on


def test_an_elastic_gang_takes_all_it_may_of_a_large_fleet(large: Q) -> None:
    gang = large.submit_gang(600, min_size=2, checkpoint_mode="rank0")
    large.place()
    assert gang.live["world_size"] == 600


def test_a_large_fleet_is_packed_and_spread_as_a_look_at_everything_would(large: Q) -> None:
    q = large
    q.sql("update gangq.incarnations set slots = 8")
    wide = q.submit_gang(200, strategy="spread")
    q.place()
    assert len(set(wide.placed_on)) == 200
    # The hosts that are looked at first can hold the next one, and not together.
    q.sql("update gangq.incarnations set slots = case when id <= 300 then 1 else 8 end")
    wide.cancel()
    narrow = q.submit_gang(8)
    q.place()
    assert len(set(narrow.placed_on)) == 1
    # Of those that are looked at first a single one is open.
    q.sql("update gangq.incarnations set slots = 8, quarantined = case when id < 128 then 'new' end")
    apart = q.submit_gang(2, strategy="spread")
    q.place()
    assert len(set(apart.placed_on)) == 2


def test_on_a_large_fleet_a_replacement_sits_in_the_rack_of_its_mates(large: Q) -> None:
    q = large
    q.sql("update gangq.incarnations set slots = 600, light = 600 where id = 1")
    q.submit(count=600, cpus=0)
    busy = Worker(q, "w1", {"incarnation": 1})
    while busy.claim(max_jobs=100):
        pass
    q.sql("update gangq.incarnations set labels = jsonb_build_object('rack', 'r' || id / 100)")
    q.sql("update gangq.incarnations set quarantined = 'new' where labels ->> 'rack' <> 'r10'")
    gang = q.submit_gang(2, require="rack", failure_policy="restart_member", max_attempts=9)
    q.place()
    claims = gang.claimed_by(*(Worker(q, name, {"incarnation": int(name[1:])}) for name in gang.placed_on))
    assert gang.state == "running"
    q.sql("update gangq.incarnations set quarantined = null")
    claims[1].fail()
    gang.skip_backoff()
    assert q.place()["placed"] == 1
    assert gang.states == ["running", "reserved"]
    assert {int(name[1:]) // 100 for name in gang.placed_on} == {10}

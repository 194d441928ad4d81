"""Steps and readings that heartbeats bring, and what the tick makes of the steps of a gang."""

from __future__ import annotations

from typing import Any

import pytest

from sql.drive import Claim, Gang, Q, Row, Worker, gpus


def stored(q: Q, claim: Claim) -> Row:
    return q.sql("select * from gangq.progress where job_id = %(id)s", id=claim.job_id)[0]


def solo(q: Q) -> tuple[Worker, Claim]:
    worker = q.worker()
    q.submit()
    return worker, worker.take()


# Steps ------------------------------------------------------------------------------------------------------


def test_the_first_step_is_dated_and_has_no_rate_yet(q: Q) -> None:
    worker, claim = solo(q)
    worker.beat(claim, beats=[{"step": 7, "phase": "run", "loss": 0.5}])
    row = stored(q, claim)
    assert (row["step"], row["phase"], row["step_at"], row["rate"]) == (7, "run", q.clock.now(), None)
    assert row["data"] == {"step": 7, "phase": "run", "loss": 0.5}


def test_step_at_moves_only_when_the_step_does(q: Q) -> None:
    worker, claim = solo(q)
    worker.beat(claim, beats=[{"step": 7}])
    first = q.clock.now()
    for beat in ({"step": 7}, {"phase": "save"}, {}):
        q.later(5)
        worker.beat(claim, beats=[beat])
        row = stored(q, claim)
        assert (row["step"], row["step_at"], row["beat_at"]) == (7, first, q.clock.now())
    q.later(5)
    worker.beat(claim, beats=[{"step": 8}])
    assert stored(q, claim)["step_at"] == q.clock.now()


def test_the_rate_is_steps_a_second_smoothed(q: Q) -> None:
    worker, claim = solo(q)
    rates = []
    for step in (0, 10, 20, 40, 40):
        worker.beat(claim, beats=[{"step": step}])
        rates.append(stored(q, claim)["rate"])
        q.later(5)
    assert rates == [None, 2, 2, 3, 3]
    worker.beat(claim, beats=[{"step": 50}])
    assert stored(q, claim)["rate"] == 2, "ten steps in ten seconds: the time without a step counts"


def test_two_steps_within_one_instant_are_no_error_and_no_rate(q: Q) -> None:
    worker, claim = solo(q)
    worker.beat(claim, beats=[{"step": 1}])
    worker.beat(claim, beats=[{"step": 2}])
    assert (stored(q, claim)["step"], stored(q, claim)["rate"]) == (2, None)


def test_counting_from_the_start_again_forgets_the_rate(q: Q) -> None:
    worker, claim = solo(q)
    for step in (0, 10):
        worker.beat(claim, beats=[{"step": step}])
        q.later(5)
    worker.beat(claim, beats=[{"step": 1}])
    row = stored(q, claim)
    assert (row["step"], row["rate"], row["step_at"]) == (1, None, q.clock.now())


def test_a_new_attempt_starts_without_the_steps_of_the_last_one(q: Q) -> None:
    worker, claim = solo(q)
    for step in (0, 10):
        worker.beat(claim, beats=[{"step": step, "phase": "run"}])
        q.later(5)
    q.sql("update gangq.progress set lags_since = step_at")
    claim.requeue()
    again = worker.take()
    worker.beat(again, beats=[{"phase": "load"}])
    row = stored(q, again)
    assert (row["token"], row["phase"]) == (again.token, "load")
    assert (row["step"], row["step_at"], row["rate"], row["lags_since"]) == (None, None, None, None)


@pytest.mark.parametrize(
    "beat",
    [
        {"step": "seven"},
        {"step": None},
        {"step": True},
        {"step": [1]},
        {"step": 10**30},
        {"step": -(10**30)},
        {"phase": 3},
        {"phase": "dreaming"},
        "just text",
        [1, 2],
        5,
    ],
)
def test_a_beat_that_says_nonsense_is_kept_and_costs_nobody_the_lease(q: Q, beat: Any) -> None:
    worker, claim = solo(q)
    worker.beat(claim, beats=[{"step": 3}])
    q.later(5)
    assert worker.beat(claim, beats=[beat]) == {claim.job_id: "continue"}
    row = stored(q, claim)
    assert (row["data"], row["step"], row["phase"], row["beat_at"]) == (beat, 3, None, q.clock.now())


def test_steps_at_the_ends_of_bigint_do_not_overflow(q: Q) -> None:
    worker, claim = solo(q)
    for step in (-8 * 10**18, 8 * 10**18, 1.5):
        worker.beat(claim, beats=[{"step": step}])
        q.later(5)
    assert stored(q, claim)["step"] == 1


@pytest.mark.own_database
def test_beats_and_readings_stay_within_their_page(q: Q) -> None:
    """HOT: with an index on what a heartbeat rewrites, each one would leave rows behind in it."""
    worker = q.worker(devices=gpus(1000))
    q.submit()
    claim = worker.take()
    for step in range(40):
        worker.beat(claim, beats=[{"step": step, "phase": "run"}], readings=[{"uuid": "G0", "gpu_pct": step}])
        q.later(5)
    q.sql("select pg_stat_force_next_flush()" if q.db.info.server_version >= 150000 else "select pg_sleep(1)")
    for table in ("progress", "device_readings", "leases"):
        row = q.sql(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = 'gangq' and relname = %(t)s",
            t=table,
        )[0]
        assert row["n_tup_upd"] >= 39, table
        assert row["n_tup_hot_upd"] == row["n_tup_upd"], table


# Readings ---------------------------------------------------------------------------------------------------


def readings(q: Q) -> dict[str, Row]:
    return {
        row["uuid"]: row
        for row in q.sql(
            "select r.uuid, d.* from gangq.device_readings d join gangq.device_registry r on r.id = d.device_id"
        )
    }


def test_the_latest_reading_of_each_device_is_kept(q: Q) -> None:
    worker = q.worker(devices=gpus(1000, 1000))
    worker.beat(
        readings=[{"uuid": "G0", "gpu_pct": 5}, {"uuid": "G1", "gpu_pct": None, "throttle": ["power"]}]
    )
    assert {u: r["data"] for u, r in readings(q).items()} == {
        "G0": {"gpu_pct": 5},
        "G1": {"gpu_pct": None, "throttle": ["power"]},
    }
    q.later(5)
    worker.beat(readings=[{"uuid": "G0", "gpu_pct": 99}])
    kept = readings(q)
    assert (kept["G0"]["data"], kept["G0"]["at"]) == ({"gpu_pct": 99}, q.clock.now())
    assert kept["G1"]["at"] < q.clock.now()
    worker.beat()
    assert readings(q) == kept, "no readings, no change"


def test_a_worker_reads_only_the_devices_it_offers(q: Q) -> None:
    q.worker("other", devices=gpus(1000, prefix="O"))
    worker = q.worker(devices=gpus(1000))
    worker.beat(readings=[{"uuid": u, "gpu_pct": 1} for u in ("O0", "G0", "nowhere")])
    assert set(readings(q)) == {"G0"}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"uuid": "G0"},
        "text",
        [],
        [1, "x", None, [], ["G0"], {}, {"uuid": None}, {"uuid": 7}],
        [{"uuid": "G0", "log": "x" * 5000}],
    ],
)
def test_readings_that_are_none_are_left_out_and_cost_nobody_the_lease(q: Q, nonsense: Any) -> None:
    worker = q.worker(devices=gpus(1000))
    q.later(5)
    worker.beat(readings=nonsense)
    assert readings(q) == {}
    assert q.value("select renewed_at from gangq.leases") == q.clock.now()


def test_the_last_of_two_readings_of_one_device_counts(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    worker.beat(readings=[{"uuid": "G0", "gpu_pct": 1}, {"uuid": "G0", "gpu_pct": 2}])
    assert readings(q)["G0"]["data"] == {"gpu_pct": 2}


def test_a_heartbeat_waits_for_no_reading_and_no_beat_that_somebody_has_locked(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    q.submit()
    claim = worker.take()
    worker.beat(claim, beats=[{"step": 1}], readings=[{"uuid": "G0", "gpu_pct": 1}])
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.device_readings, gangq.progress for update")
        q.sql("set statement_timeout = '5s'")
        q.later(5)
        assert worker.beat(claim, beats=[{"step": 2}], readings=[{"uuid": "G0", "gpu_pct": 2}]) == {
            claim.job_id: "continue"
        }
        assert q.value("select renewed_at from gangq.leases") == q.clock.now()
    assert (stored(q, claim)["step"], readings(q)["G0"]["data"]) == (1, {"gpu_pct": 1})


# A gang that stands still -----------------------------------------------------------------------------------


class Team:
    """A running gang of which each member's worker heartbeats every five seconds."""

    def __init__(self, q: Q, size: int = 3, **options: Any) -> None:
        self.q = q
        self.gang: Gang = q.submit_gang(size, **options)
        self.workers = q.workers(size)
        self.claims = self.gang.start(*self.workers)
        self.by_rank = [next(w for w in self.workers if w.name == name) for name in self.gang.placed_on]

    def beats(self, *beats: Row | None) -> None:
        """One heartbeat of every member, by rank, and a tick."""
        for worker, claim, beat in zip(self.by_rank, self.claims, beats, strict=True):
            worker.beat(claim, beats=[beat])
        self.q.tick()

    def go_on(self, seconds: float, *beats: Row | None) -> None:
        """The same beats every 60 s for so long."""
        while seconds > 0:
            self.q.later(min(60, seconds))
            seconds -= 60
            self.beats(*beats)


def test_a_gang_without_a_step_for_too_long_is_drained_and_the_rank_that_stopped_first_is_blamed(
    q: Q,
) -> None:
    team = Team(q)
    team.beats({"step": 10}, {"step": 10}, {"step": 10})
    q.later(5)
    team.beats({"step": 11}, {"step": 10}, {"step": 11})
    stopped_at = q.clock.now()
    team.go_on(1199, *[{"step": 11}, {"step": 10}, {"step": 11}])
    assert team.gang.state == "running"
    team.go_on(6, *[{"step": 11}, {"step": 10}, {"step": 11}])
    assert (team.gang.state, team.gang.live["drain_cause"]) == ("draining", "trip")
    assert team.gang.live["drain_trigger"] == team.claims[1].job_id
    assert team.gang.states == ["preempting"] * 3, (
        "nobody has proven rank 1 stopped: it is told to, like the others"
    )
    (event,) = q.events("trip")
    assert (event["gang_id"], event["epoch"], event["job_id"], event["token"]) == (
        team.gang.id,
        1,
        team.claims[1].job_id,
        team.claims[1].token,
    )
    assert event["worker"] == team.by_rank[1].name
    data = event["data"]
    assert (data["code"], data["class"], data["outcome"], data["rank"], data["trips"]) == (
        76,
        "gang",
        "preempted",
        1,
        1,
    )
    assert (data["task"], data["queue"], data["host"]) == ("train", "default", f"host-{team.by_rank[1].name}")
    assert data["steps"] == {"0": 11, "1": 10, "2": 11}
    assert "rank 1 stopped first: it is at step 10" in data["message"]
    assert stopped_at < q.clock.now()
    evidence = q.sql("select * from gangq.evidence where kind = 'trip'")[0]
    assert [m["step"] for m in evidence["data"]["members"]] == [11, 10, 11]


def test_the_blamed_member_is_charged_the_trip_and_the_others_nothing(q: Q) -> None:
    team = Team(q)
    team.beats({"step": 1}, {"step": 1}, {"step": 0})
    team.go_on(1260, *[{"step": 1}, {"step": 1}, {"step": 0}])
    for claim in team.claims:
        assert claim.ack() == "preempted"
    assert team.gang.state == "blocked"
    members = team.gang.members
    assert [m["trips"] for m in members] == [0, 0, 1]
    assert [m["attempts"] for m in members] == [0, 0, 0]
    assert team.gang.live["trips"] == 1
    assert members[2]["error"]["type"] == "NoCollectiveProgress"
    assert [m["error"] for m in members[:2]] == [None, None]


def test_devices_stay_held_until_every_member_is_proven_stopped(q: Q) -> None:
    gang = q.submit_gang(2, gpus=1)
    workers = [q.worker(f"w{n}", devices=gpus(1000, prefix=f"w{n}-")) for n in (1, 2)]
    claims = gang.start(*workers)
    for n in range(23):
        for worker in workers:
            mine = [c for c in claims if c["devices"][0]["uuid"].startswith(worker.name)]
            worker.beat(*mine, beats=[{"step": 5 + mine[0]["rank"]}])
        if n < 22:
            q.later(60)
        q.tick()
    assert gang.state == "draining"
    assert {r["state"] for r in q.sql("select state from gangq.devices")} == {"held"}
    (event,) = q.events("trip")
    assert event["data"]["devices"] == [claims[0]["devices"][0]["uuid"]]


def test_the_lowest_step_is_blamed_although_it_came_last(q: Q) -> None:
    team = Team(q)
    team.beats({"step": 10}, {"step": 10}, {"step": 8})
    q.later(5)
    team.beats({"step": 10}, {"step": 10}, {"step": 9})
    team.go_on(1260, {"step": 10}, {"step": 10}, {"step": 9})
    assert team.gang.live["drain_trigger"] == team.claims[2].job_id


def test_of_equal_steps_nobody_is_charged_and_the_gangs_own_count_ends_it(q: Q) -> None:
    """All beat the step before the one that was never finished: who beat it first says nothing."""
    team = Team(q, max_attempts=9)
    trips = 0
    while team.gang.state not in ("failed", "done"):
        team.beats({"step": 9}, {"step": 9}, {"step": 10})
        q.later(5)
        team.beats({"step": 10}, {"step": 9}, {"step": 10})
        q.later(5)
        team.beats({"step": 10}, {"step": 10}, {"step": 10})
        team.go_on(1260, *[{"step": 10}] * 3)
        assert (team.gang.state, team.gang.live["drain_trigger"]) == ("draining", None)
        trips += 1
        (event,) = q.events("trip")[trips - 1 :]
        assert (
            "ranks 0 to 2 wait at step 10; which of them stopped first is not known"
            in event["data"]["message"]
        )
        assert event["data"]["charged"] is False
        assert (
            q.sql("select trips from gangq.live_jobs where gang_id = %(id)s", id=team.gang.id)
            == [{"trips": 0}] * 3
        )
        for claim in team.claims:
            claim.ack()
        if team.gang.state == "failed":
            break
        q.later(700)
        for worker in team.workers:
            worker.beat()
        team.claims = team.gang.restart(*team.workers)
    assert trips == 4
    assert "the gang tripped a watchdog 4 times" in str(q.events("drained")[-1]["reason"])


@pytest.mark.parametrize(("behind", "who"), [(0, "a member"), (5, "rank 2")])
def test_a_standstill_ends_a_gang_whose_policy_is_fail_whoever_stopped_first(
    q: Q, behind: int, who: str
) -> None:
    team = Team(q, failure_policy="fail")
    team.beats({"step": 10}, {"step": 10}, {"step": 10 - behind})
    team.go_on(1260, {"step": 10}, {"step": 10}, {"step": 10 - behind})
    for claim in team.claims:
        claim.ack()
    assert team.gang.state == "failed"
    reason = str(team.gang.row["reason"])
    assert reason.startswith(f"{who} tripped a watchdog")
    assert reason.endswith("the gang's failure policy is fail")


@pytest.mark.parametrize(("others_at", "named"), [(37, False), (41, True)])
def test_a_member_is_named_only_if_it_is_behind_by_the_steps_between_two_beats(
    q: Q, others_at: int, named: bool
) -> None:
    """Rank 0 beats every tenth step, the others every step: being at 30 while they are at 37 is no evidence."""
    team = Team(q)
    for steps in ((10, 11, 11), (20, 22, 23), (30, others_at, others_at)):
        team.beats(*[{"step": step} for step in steps])
        q.later(5)
    team.go_on(1260, {"step": 30}, {"step": others_at}, {"step": others_at})
    assert team.gang.live["drain_trigger"] == (team.claims[0].job_id if named else None)


WAITING = "recv() of allreduce at train.py:88"


def test_the_member_that_is_in_another_place_of_the_code_has_not_arrived(q: Q) -> None:
    team = Team(q, 4)
    team.beats(*[{"step": 512}] * 4)
    places = [WAITING, WAITING, "read() of load at data.py:12", WAITING]
    for claim, place in zip(team.claims, places, strict=True):
        claim.suspect(place=place)
    team.go_on(1260, *[{"step": 512}] * 4)
    assert team.gang.live["drain_trigger"] == team.claims[2].job_id
    (event,) = q.events("trip")
    assert (
        f"ranks 0, 1, 3 wait in {WAITING}; rank 2 has not arrived: it is in read() of load at data.py:12"
        in event["data"]["message"]
    )


def test_of_two_members_in_two_places_of_the_code_neither_is_named(q: Q) -> None:
    team = Team(q, 2)
    team.beats(*[{"step": 512}] * 2)
    for claim, place in zip(team.claims, [WAITING, "read() of load at data.py:12"], strict=True):
        claim.suspect(place=place)
    found = q.one("who_stopped", gang_id=team.gang.id, own_id=None, own_place=None)
    assert found["job_id"] is None, "each of them may wait for the other"


def test_while_one_member_has_told_no_step_none_is_named_by_its_own(q: Q) -> None:
    team = Team(q, 3)
    team.beats({"step": 3}, {"step": 9}, {})
    found = q.one("who_stopped", gang_id=team.gang.id, own_id=None, own_place=None)
    assert found["job_id"] is None, "the one without may be further behind"


def test_where_a_member_was_in_an_earlier_epoch_is_not_where_it_is_now(q: Q) -> None:
    team = Team(q)
    team.claims[1].suspect(place="read() of load at data.py:12")
    team.claims[0].fail()
    for claim in team.claims[1:]:
        claim.ack()
    team.claims = team.gang.restart(*team.workers)
    team.by_rank = [next(w for w in team.workers if w.name == name) for name in team.gang.placed_on]
    team.beats(*[{"step": 512}] * 3)
    for claim in (team.claims[0], team.claims[2]):
        claim.suspect(place=WAITING)
    team.go_on(1260, *[{"step": 512}] * 3)
    assert (team.gang.state, team.gang.live["drain_trigger"]) == ("draining", None)


def test_where_all_wait_in_one_place_it_is_said_and_nobody_is_charged(q: Q) -> None:
    team = Team(q)
    team.beats(*[{"step": 512}] * 3)
    for claim in team.claims:
        claim.suspect(place=WAITING)
    team.go_on(1260, *[{"step": 512}] * 3)
    (event,) = q.events("trip")
    assert (
        f"ranks 0 to 2 wait at step 512 in {WAITING}; which of them stopped first is not known"
        in event["data"]["message"]
    )
    assert team.gang.live["drain_trigger"] is None


@pytest.mark.parametrize("how", ["behind", "elsewhere", "unknown", "alone"])
def test_the_watchdog_that_speaks_first_does_not_make_its_member_the_culprit(q: Q, how: str) -> None:
    """Rank 0 trips. Rank 1 is behind or elsewhere; or nothing tells them apart; or the others went on."""
    team = Team(q)
    steps = [512, 511 if how == "behind" else 512, 512]
    team.beats(*[{"step": step} for step in steps])
    for rank, claim in enumerate(team.claims[1:], 1):
        if how != "alone":
            claim.suspect(
                place="read() of load at data.py:12" if (how, rank) == ("elsewhere", 1) else WAITING
            )
    if how == "alone":
        q.later(30)
        team.beats(None, {"step": 513}, {"step": 513})
    assert team.claims[0].trip(76, exit_in_s=5, evidence={"place": WAITING}) == "preempted"
    trips = q.sql(
        "select rank, trips from gangq.live_jobs where gang_id = %(id)s order by rank", id=team.gang.id
    )
    charged = {"behind": 1, "elsewhere": 1, "unknown": None, "alone": 0}[how]
    assert [row["trips"] for row in trips] == [int(rank == charged) for rank in range(3)]
    assert team.gang.live["trips"] == 1
    (event,) = q.events("trip")
    assert event["data"]["charged"] is (charged == 0)


@pytest.mark.parametrize("phase", ["load", "save", "long"])
def test_a_gang_of_which_one_member_loads_saves_or_is_in_a_long_phase_is_left_alone(q: Q, phase: str) -> None:
    team = Team(q)
    team.beats({"step": 1}, {"step": 1}, {"step": 1, "phase": phase})
    team.go_on(3000, {"step": 1}, None, None)
    assert team.gang.state == "running"
    team.beats({"step": 1}, {"step": 1}, {"step": 1, "phase": "run"})
    q.later(5)
    team.beats(None, None, None)
    assert team.gang.state == "draining", "the phase is over, and still no step"


def test_one_member_that_makes_steps_keeps_its_gang_running(q: Q) -> None:
    team = Team(q)
    for n in range(30):
        team.beats({"step": n}, {"step": 1}, {"step": 1})
        q.later(60)
    assert team.gang.state == "running"


def test_a_gang_that_has_not_made_a_step_since_it_started_is_not_judged(q: Q) -> None:
    team = Team(q)
    team.beats({"loss": 1}, {"loss": 1}, None)
    team.go_on(3000, {"loss": 1}, None, None)
    assert team.gang.state == "running"


def test_nor_is_it_after_an_outage_of_the_database(q: Q) -> None:
    q.call("configure", lease_s=100000)
    team = Team(q)
    team.beats({"loss": 1}, None, None)
    q.later(90000)
    q.tick()
    assert q.events("outage")
    team.go_on(3000, {"loss": 1}, None, None)
    assert team.gang.state == "running"


def test_a_gang_that_has_made_a_step_since_the_look_is_left_alone(q: Q) -> None:
    team = Team(q)
    team.beats(*[{"step": 5}] * 3)
    judged = "select gangq.judge_standstill(%(id)s, gangq.now(), s) from gangq.settings s"
    assert q.value(judged, id=team.gang.id) == 0
    assert team.gang.state == "running"


def test_steps_of_the_epoch_before_are_none_of_this_one(q: Q) -> None:
    team = Team(q)
    team.beats({"step": 5}, {"step": 5}, {"step": 5})
    team.claims[0].fail()
    for claim in team.claims[1:]:
        claim.ack()
    team.claims = team.gang.restart(*team.workers)
    team.go_on(3000, None, None, None)
    assert team.gang.state == "running"


def test_beside_members_that_never_beat_nobody_is_charged(q: Q) -> None:
    team = Team(q)
    team.beats(None, {"step": 4}, {"loss": 1})
    team.go_on(1260, None, {"step": 4}, {"loss": 1})
    assert (team.gang.state, team.gang.live["drain_trigger"]) == ("draining", None)


def test_after_an_outage_of_the_database_everyone_gets_the_whole_time_again(q: Q) -> None:
    q.call("configure", lease_s=100000)
    team = Team(q)
    team.beats({"step": 1}, {"step": 1}, {"step": 1})
    q.later(90000)
    q.tick()
    assert q.events("outage")
    assert team.gang.state == "running"
    team.go_on(1140, {"step": 1}, {"step": 1}, {"step": 1})
    assert team.gang.state == "running"
    team.go_on(120, {"step": 1}, {"step": 1}, {"step": 1})
    assert team.gang.state == "draining"


@pytest.mark.parametrize("verb", ["configure", "set_task"])
def test_where_class_gang_only_notifies_it_is_said_once_and_nothing_is_stopped(q: Q, verb: str) -> None:
    q.call(verb, notify_only=["gang"], **({"task": "train"} if verb == "set_task" else {}))
    team = Team(q)
    team.beats({"step": 1}, {"step": 1}, {"step": 0})
    team.go_on(3000, *[{"step": 1}, {"step": 1}, {"step": 0}])
    assert (team.gang.state, team.gang.states) == ("running", ["running"] * 3)
    assert q.events("trip") == []
    (event,) = q.events("notify")
    assert (event["data"]["class"], event["data"]["outcome"], event["data"]["trips"]) == ("gang", "notify", 0)
    team.beats({"step": 2}, {"step": 2}, {"step": 2})
    team.go_on(1260, *[{"step": 2}] * 3)
    assert len(q.events("notify")) == 2, "another standstill is said again"


def test_a_task_may_stop_its_gangs_where_the_installation_only_notifies(q: Q) -> None:
    q.call("configure", notify_only=["gang"])
    q.call("set_task", task="train", notify_only=[])
    team = Team(q)
    team.beats(*[{"step": 1}] * 3)
    team.go_on(1260, *[{"step": 1}] * 3)
    assert team.gang.state == "draining"


def test_a_gang_that_keeps_standing_still_fails_when_its_trips_are_spent(q: Q) -> None:
    team = Team(q, max_trips=1, max_attempts=10)
    for _ in range(3):
        team.beats(*[{"step": 1}] * 3)
        team.go_on(1260, *[{"step": 1}] * 3)
        assert team.gang.state == "draining"
        for claim in team.claims:
            claim.ack()
        if team.gang.state != "blocked":
            break
        team.claims = team.gang.restart(*team.workers)
    assert team.gang.state == "failed"
    assert "tripped a watchdog" in team.gang.row["reason"]


def test_the_tick_steps_over_a_gang_that_somebody_has_locked(q: Q) -> None:
    team = Team(q)
    team.beats(*[{"step": 1}] * 3)
    team.go_on(1140, *[{"step": 1}] * 3)
    q.later(65)
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.live_jobs where id = %(id)s for update", id=team.claims[0].job_id)
        assert q.one("tick", force=True)["detail"]["judge_progress"] == 0
        assert team.gang.state == "running"
    q.later(5)
    q.tick()
    assert team.gang.state == "draining"


def test_a_gang_is_judged_once_a_heartbeat_however_often_ticks_run(q: Q) -> None:
    team = Team(q)
    team.beats(*[{"step": 1}] * 3)
    team.go_on(1140, *[{"step": 1}] * 3)
    for seconds, state in ((58, "running"), (3, "running"), (3, "draining")):
        q.later(seconds)
        q.tick()
        assert team.gang.state == state


def test_many_gangs_are_judged_a_hundred_at_a_time_and_all_of_them_in_turn(q: Q) -> None:
    q.worker("big", slots=100)
    q.call("configure", lease_s=100000)
    worker = q.worker("bigger", slots=10)
    gangs = [q.submit_gang(1) for _ in range(7)]
    q.tick()
    claims = [c for w in (worker,) for c in w.claim(max_jobs=50)]
    others = q.call(
        "claim", incarnation=q.value("select id from gangq.incarnations where name = 'big'"), max_jobs=50
    )
    q.sql(
        "insert into gangq.progress (job_id, token, beat_at, data, step, step_at) "
        "select id, token, gangq.now(), '{}', 1, gangq.now() from gangq.live_jobs where state = 'running'"
    )
    assert len(claims) + len(others) == 7
    q.later(1300)
    assert [q.one("judge_progress", most=3) for _ in range(4)] == [3, 3, 1, 0]
    assert {g.state for g in gangs} == {"draining"}


def test_gangs_that_go_on_do_not_keep_later_ones_from_being_judged(q: Q) -> None:
    q.call("configure", lease_s=100000)
    worker = q.worker(slots=10)
    gangs = [q.submit_gang(1) for _ in range(7)]
    q.tick()
    worker.claim(max_jobs=10)
    q.sql(
        "insert into gangq.progress (job_id, token, beat_at, data, step, step_at) "
        "select id, token, gangq.now(), '{}', 1, gangq.now() + case when gang_id = %(last)s then interval '0' else "
        "interval '1 hour' end from gangq.live_jobs where state = 'running'",
        last=gangs[6].id,
    )
    q.later(1300)
    assert [q.one("judge_progress", most=3) for _ in range(4)] == [0, 0, 1, 0]
    assert [g.state for g in gangs] == ["running"] * 6 + ["draining"]


# Stragglers -------------------------------------------------------------------------------------------------


def race(q: Q, team: Team, seconds: float, *rates: float, start: int = 0) -> int:
    """Steps at these rates, with a heartbeat every 10 s; returns how many seconds have been raced in all."""
    for n in range(start, start + int(seconds), 10):
        team.beats(*[{"step": int(rate * n)} for rate in rates])
        q.later(10)
    return start + int(seconds)


def strikes(q: Q) -> list[tuple[int, int]]:
    return [(e["data"]["rank"], e["data"]["strike"]) for e in q.events("straggler")]


def test_a_member_at_less_than_half_the_median_is_a_straggler_and_nothing_is_done_to_it(q: Q) -> None:
    team = Team(q, 4)
    at = race(q, team, 250, 2, 2, 2, 0.5)
    assert strikes(q) == [], "not for long enough yet"
    at = race(q, team, 100, 2, 2, 2, 0.5, start=at)
    assert strikes(q) == [(3, 1)]
    event = q.events("straggler")[0]
    assert (event["job_id"], event["gang_id"]) == (team.claims[3].job_id, team.gang.id)
    assert (event["data"]["rate"], event["data"]["median"]) == (pytest.approx(0.5), pytest.approx(2))
    assert "rank 3 makes 0.500 steps a second" in event["reason"]
    at = race(q, team, 300, 2, 2, 2, 0.5, start=at)
    assert strikes(q) == [(3, 1), (3, 2)]
    race(q, team, 900, 2, 2, 2, 0.5, start=at)
    assert strikes(q) == [(3, 1), (3, 2)], "on record, once each"
    assert team.gang.state == "running"


def test_one_that_catches_up_is_no_straggler_any_more_and_begins_anew(q: Q) -> None:
    team = Team(q, 3)
    at = race(q, team, 200, 2, 2, 0.5)
    assert stored(q, team.claims[2])["lags_since"] is not None
    for n in range(at, at + 350, 10):
        team.beats({"step": 2 * n}, {"step": 2 * n}, {"step": int(0.5 * at + 1.4 * (n - at))})
        q.later(10)
    assert stored(q, team.claims[2])["lags_since"] is None
    assert strikes(q) == []


def test_two_members_are_no_crowd(q: Q) -> None:
    team = Team(q, 2)
    race(q, team, 900, 2, 0.1)
    assert strikes(q) == []


def test_a_little_slower_is_not_a_straggler(q: Q) -> None:
    team = Team(q, 3)
    race(q, team, 900, 2, 2, 1.2)
    assert strikes(q) == []


def test_a_member_whose_steps_stop_coming_is_as_slow_as_that_makes_it(q: Q) -> None:
    team = Team(q, 3)
    at = race(q, team, 100, 2, 2, 2)
    stuck = {"step": int(2 * (at - 10))}
    for n in range(at, at + 400, 10):
        team.beats({"step": 2 * n}, {"step": 2 * n}, stuck)
        q.later(10)
    assert strikes(q) == [(2, 1)]


def test_while_it_saves_a_member_is_not_compared(q: Q) -> None:
    team = Team(q, 3)
    at = race(q, team, 100, 2, 2, 2)
    for n in range(at, at + 600, 10):
        team.beats({"step": 2 * n}, {"step": 2 * n}, {"step": 200, "phase": "save"})
        q.later(10)
    assert strikes(q) == []


def test_members_that_save_do_not_make_up_the_crowd(q: Q) -> None:
    team = Team(q, 3)
    at = race(q, team, 100, 2, 2, 2)
    for n in range(at, at + 600, 10):
        team.beats({"step": 2 * n, "phase": "save"}, {"step": 2 * n}, {"step": 200 + n // 100})
        q.later(10)
    assert strikes(q) == []


def test_a_straggler_whose_beat_is_being_brought_is_not_waited_for(q: Q) -> None:
    team = Team(q, 3)
    race(q, team, 100, 2, 2, 0.5)
    q.sql("update gangq.progress set lags_since = null")
    with q.connected(q.db.info.dsn) as other, other.db.transaction():
        other.sql("select 1 from gangq.progress where job_id = %(id)s for update", id=team.claims[2].job_id)
        assert q.one("tick", force=True)["detail"]["judge_progress"] == 0
    assert stored(q, team.claims[2])["lags_since"] is None
    q.later(5)
    q.tick()
    assert stored(q, team.claims[2])["lags_since"] == q.clock.now()

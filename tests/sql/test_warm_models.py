"""A worker that has a model loaded is given jobs that need it first, past others about as old and no further."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from sql.drive import INVALID, TOO_LARGE, Q, Worker, gpus, refused

COLD = {"model": "loaded nowhere"}


def loaded(worker: Worker, model: str | None) -> Worker:
    """The worker, of which the next pass knows what it has loaded."""
    worker.q.call("claim", incarnation=worker.incarnation, model=model, lane="placed")
    return worker


def order(worker: Worker, model: str | None, each: int = 1, **named: Any) -> list[int]:
    """The ids in the order in which this worker is given them, `each` a claim, each completed at once."""
    ids: list[int] = []
    loaded(worker, model)
    while claims := worker.claim(max_jobs=each, **({"model": model} if model else {}), **named):
        ids += [c.job_id for c in claims]
        for claim in claims:
            claim.complete()
    return ids


# What is said and kept --------------------------------------------------------------------------------------


def test_a_claim_says_which_model_the_job_needs(q: Q) -> None:
    q.submit(model="llama-70b")
    q.submit()
    claims = q.worker(prefetch=2).claim()
    assert [c["model_needed"] for c in claims] == ["llama-70b", None]


def test_each_member_of_a_gang_is_told_its_model(q: Q) -> None:
    gang = q.submit_gang(2, model="llama-70b")
    claims = gang.start(*q.workers(2))
    assert [c["model_needed"] for c in claims] == ["llama-70b"] * 2


def test_what_a_worker_has_loaded_is_kept_with_it_and_written_only_when_it_changes(q: Q) -> None:
    worker = q.worker()

    def version() -> tuple[str | None, str]:
        row = q.sql(
            "select model, xmin::text from gangq.incarnations where id = %(id)s", id=worker.incarnation
        )[0]
        return row["model"], row["xmin"]

    assert version()[0] is None
    q.submit()
    worker.claim(model="a")[0].complete()  # That it has worked is noted there too.
    kept = version()
    assert kept[0] == "a"
    q.submit()
    worker.claim(model="a")
    assert version() == kept
    worker.claim(model="b")
    assert version()[0] == "b"
    worker.claim()
    assert version()[0] is None


@pytest.mark.parametrize("model", ["", "x" * 201])
def test_a_model_has_a_name_of_bounded_length(q: Q, model: str) -> None:
    worker = q.worker()
    with refused(INVALID, "model"):
        q.submit(model=model)
    with refused(INVALID, "model"):
        q.submit_gang(1, model=model)
    with refused(TOO_LARGE if model else INVALID, "model"):
        worker.claim(model=model)


def test_jobs_that_differ_in_their_model_only_are_of_different_shapes(q: Q) -> None:
    for model in ("a", "b", "a", None, None):
        q.submit(model=model)
    rows = q.sql("select model from gangq.shapes order by id")
    assert [row["model"] for row in rows] == ["a", "b", None]


# The order --------------------------------------------------------------------------------------------------


def test_without_a_loaded_model_a_kind_goes_by_its_oldest_job(q: Q) -> None:
    a, b, none, a2, b2 = (q.submit(model=m) for m in ("a", "b", "none", "a", "b"))
    assert order(q.worker(), None) == [a, b, none, a2, b2]


def test_of_jobs_equally_old_those_whose_model_is_loaded_go_first(q: Q) -> None:
    a, b, none, a2, b2 = (q.submit(model=m) for m in ("a", "b", "none", "a", "b"))
    assert order(q.worker(), "b") == [b, b2, a, none, a2]


@pytest.mark.parametrize("each", [1, 3, 100])
def test_it_is_so_for_claims_of_every_size(q: Q, each: int) -> None:
    ids = [q.submit(model="ab"[n % 2]) for n in range(40)]
    worker, taken = loaded(q.worker(slots=40), "b"), 0
    while claims := worker.claim(max_jobs=each, model="b"):
        taken += len(claims)
    assert taken == 40
    assert order_of_taking(q) == ids[1::2] + ids[0::2]


def test_a_worker_takes_what_needs_another_model_rather_than_nothing(q: Q) -> None:
    ids = [q.submit(model="a"), q.submit(**COLD)]
    assert order(q.worker(), "b") == ids


def test_of_two_workers_each_gets_what_it_has_loaded_whatever_is_oldest(q: Q) -> None:
    for _ in range(4):
        q.submit("x", model="a")
        q.submit("y", model="b")
    b, a = loaded(q.worker("w1"), "b"), loaded(q.worker("w2"), "a")
    for _ in range(4):
        for worker, model in ((b, "b"), (a, "a")):
            claim = worker.take(model=model)
            assert claim["model_needed"] == model
            claim.complete()


@pytest.mark.parametrize(("age", "first"), [(10, "warm"), (10.5, "cold")])
def test_a_job_is_overtaken_by_those_up_to_warm_s_younger(q: Q, age: float, first: str) -> None:
    cold = q.submit(**COLD)
    q.later(age)
    warm = q.submit(model="a")
    assert order(q.worker(), "a") == ([warm, cold] if first == "warm" else [cold, warm])


def order_of_taking(q: Q) -> list[int]:
    """Jobs of one claim in the order in which they were taken: tokens are drawn so."""
    return [
        row["id"] for row in q.sql("select id from gangq.live_jobs where token is not null order by token")
    ]


def test_warm_s_can_be_set_and_zero_turns_the_preference_off(q: Q) -> None:
    q.call("configure", warm_s=0)
    cold = q.submit(**COLD)
    q.later(1)
    warm = q.submit(model="a")
    assert order(q.worker(), "a") == [cold, warm]
    q.call("configure", warm_s=100)
    cold = q.submit(**COLD)
    q.later(100)
    warm = q.submit(model="a")
    assert order(q.worker("w2"), "a") == [warm, cold]


def test_nothing_overtakes_a_higher_priority(q: Q) -> None:
    warm = q.submit(model="a", count=2)
    urgent = q.submit(priority=1, **COLD)
    urgent_warm = q.submit(priority=1, model="a")
    assert order(q.worker(), "a") == [urgent_warm, urgent, *warm]


def test_a_claim_of_many_does_not_run_over_into_a_lower_priority(q: Q) -> None:
    cold = q.submit(priority=1, **COLD)
    warm_low = q.submit(model="a", count=5)
    warm = q.submit(model="a", priority=1)
    loaded(q.worker(slots=3), "a").claim(max_jobs=3, model="a")
    assert sorted(order_of_taking(q)) == sorted([warm, cold, warm_low[0]])


def test_a_steady_stream_of_warm_jobs_starves_nobody(q: Q) -> None:
    cold = q.submit(**COLD)
    worker = loaded(q.worker(), "a")
    taken = []
    for _ in range(30):
        q.submit(model="a")
        taken.append(worker.take(model="a"))
        taken[-1].complete()
        if taken[-1].job_id == cold:
            break
        q.later(1)
        worker.beat()
    assert taken[-1].job_id == cold
    assert len(taken) == 12, "those submitted in the first ten seconds, and then it"


def test_a_place_is_filled_again_with_its_model_only_while_nothing_older_waits_for_too_long(q: Q) -> None:
    """In one commit after another, with a pass each time that somebody asks for one."""
    q.submit("warm", count=30, model="a")
    worker = loaded(q.worker(), "a")
    claim = worker.take(model="a")
    cold = q.submit(**COLD)
    q.later(11)
    q.submit("warm", count=30, model="a")
    for _ in range(29):
        rows = q.call(
            "complete_and_claim",
            incarnation=worker.incarnation,
            job_ids=[claim.job_id],
            tokens=[claim.token],
            model="a",
        )
        claim = next((c for c in worker.claim(model="a")), None) or type(claim)(
            q, rows[-1], worker.incarnation
        )
        assert claim.job_id != cold
    claim.complete()
    assert worker.take(model="a").job_id == cold


def test_what_went_to_the_front_after_a_trip_is_overtaken_by_nobody(q: Q) -> None:
    cold = q.submit(**COLD)
    worker = q.worker()
    worker.take().requeue()
    loaded(worker, "a")
    q.submit(model="a")
    assert worker.take(model="a").job_id == cold


def test_a_warm_job_behind_an_old_one_of_its_own_shape_waits_its_turn(q: Q) -> None:
    """The head of its shape is what may overtake; nothing overtakes through the middle of its own queue."""
    cold = q.submit(**COLD)
    ids = q.submit(model="a", count=2)
    q.sql(
        "update gangq.live_jobs set submitted_at = submitted_at + interval '1 hour' where id = %(id)s",
        id=ids[0],
    )
    assert order(q.worker(), "a") == [cold, *ids]


def test_a_warm_job_that_does_not_fit_overtakes_nobody(q: Q) -> None:
    cold = q.submit(**COLD)
    q.submit(model="a", gpus=1)
    small = q.submit(model="a", cpus=1)
    assert order(q.worker(cpus=1), "a") == [small, cold]


def test_what_the_first_warm_job_uses_up_is_missing_for_the_next(q: Q) -> None:
    cold = q.submit(**COLD)
    first, second = (q.submit(model="a", cpus=1) for _ in range(2))
    worker = loaded(q.worker(slots=3, cpus=1), "a")
    assert sorted(c.job_id for c in worker.claim(model="a")) == [cold, first]
    assert q.state(second) == "pending"


def test_devices_are_counted_when_a_warm_job_goes_first(q: Q) -> None:
    cold = q.submit(gpus=1)
    warm = q.submit(gpus=1, model="a")
    worker = loaded(q.worker(slots=2, devices=gpus(1000)), "a")
    assert [c.job_id for c in worker.claim(model="a")] == [warm]
    assert q.state(cold) == "pending"


def test_no_warm_job_that_comes_after_a_gang_takes_what_the_gang_waits_for(q: Q) -> None:
    worker = loaded(q.worker(slots=2), "a")
    q.submit(**COLD)
    busy = worker.take(model="a")
    before = q.submit(**COLD)
    gang = q.submit_gang(2)
    after = q.submit(model="a", budget_s=100000)
    assert worker.take(model="a").job_id == before
    busy.complete()
    assert worker.claim(model="a") == []
    assert (q.state(after), gang.state) == ("pending", "blocked")


def test_jobs_that_somebody_else_is_claiming_are_passed_by(q: Q, dsn: str) -> None:
    cold = q.submit(**COLD)
    warm = q.submit(count=3, model="a")
    worker = loaded(q.worker(), "a")
    with psycopg.connect(dsn) as other:
        other.execute("select 1 from gangq.live_jobs where id = any (%s) for update", [warm[:2]])
        assert worker.take(model="a").job_id == warm[2]
    assert order(q.worker("w2"), None) == [cold, *warm[:2]]


def test_a_repeated_request_returns_the_same_claims_with_a_model_too(q: Q) -> None:
    q.submit(count=2)
    q.submit(count=2, model="a")
    worker = q.worker(slots=2)
    request = "00000000-0000-0000-0000-000000000001"
    first = worker.claim(max_jobs=2, model="a", request_id=request)
    assert [c.job_id for c in worker.claim(max_jobs=2, model="a", request_id=request)] == [
        c.job_id for c in first
    ]


# Devices that a job avoids ----------------------------------------------------------------------------------


def avoid(q: Q, *uuids: str) -> None:
    """Every job and gang avoids these devices from now on, as one does after a trip there."""
    avoided = q.value(
        "select array_agg(id) from gangq.device_registry where uuid = any (%(uuids)s)", uuids=list(uuids)
    )
    for row in q.sql("select shape_id from gangq.live_jobs union select shape_id from gangq.live_gangs"):
        old = row["shape_id"]
        new = q.value("select gangq.shape_avoiding(%(old)s, %(avoided)s)", old=old, avoided=avoided)
        q.sql(
            "select gangq.change_shape(array(select id from gangq.live_gangs), %(old)s, %(new)s)",
            old=old,
            new=new,
        )
        q.sql("update gangq.live_jobs set shape_id = %(new)s where shape_id = %(old)s", old=old, new=new)


def held(claim: Any) -> list[str]:
    return [d["uuid"] for d in claim["devices"]]


def test_a_job_never_gets_a_device_it_avoids_although_it_is_the_smallest_that_fits(q: Q) -> None:
    worker = q.worker(slots=2, devices=gpus(1000, 2000, 3000))
    job = q.submit(gpus=1, vram_mb=500)
    avoid(q, "G0")
    assert held(worker.take()) == ["G1"]
    other = q.submit(gpus=1, vram_mb=500)
    claim = worker.take()
    assert (claim.job_id, held(claim)) == (other, ["G0"]), "for everybody else it is as good as ever"
    assert q.state(job) == "running"


def test_a_job_is_not_claimed_where_only_devices_it_avoids_are_free(q: Q) -> None:
    worker = q.worker(slots=3, devices=gpus(1000, 1000, 1000))
    job = q.submit(gpus=2)
    avoid(q, "G0", "G2")
    assert worker.claim() == []
    assert worker.free["slots"] == 3
    rows = {row["gate"]: row for row in q.call("explain_job", job_id=job)}
    assert rows["avoids"]["ok"] is False
    assert rows["avoids"]["detail"].startswith("avoids device G0 (host-w1) after a trip there: ")
    assert "; avoids device G2 (host-w1) after a trip there: " in rows["avoids"]["detail"]
    assert rows["hardware"]["ok"] is False
    assert "largest worker offers 1 GPU of" in rows["hardware"]["detail"]
    q.worker("w2", devices=gpus(1000, 1000, prefix="H"))
    rows = {row["gate"]: row for row in q.call("explain_job", job_id=job)}
    assert (rows["avoids"]["ok"], "hardware" in rows) == (True, False)


def test_in_one_claim_the_second_job_of_a_shape_does_not_get_what_it_avoids_either(q: Q) -> None:
    worker = q.worker(slots=3, devices=gpus(1000, 2000, 3000))
    q.submit(count=3, gpus=1)
    avoid(q, "G1")
    claims = worker.claim(max_jobs=3)
    assert [held(c) for c in claims] == [["G0"], ["G2"]]


def test_a_gang_is_placed_around_the_devices_it_avoids(q: Q) -> None:
    bad, good, better = (q.worker(f"w{n}", devices=gpus(1000, 1000, prefix=f"{n}-")) for n in (1, 2, 3))
    gang = q.submit_gang(2, gpus=2)
    avoid(q, "1-0")
    claims = gang.start(bad, good, better)
    assert sorted(gang.placed_on) == ["w2", "w3"]
    assert all(u[0] in "23" for c in claims for u in held(c))


def test_members_on_one_worker_share_out_what_is_left(q: Q) -> None:
    worker = q.worker(slots=4, devices=gpus(1000, 1000, 1000, 1000, 1000))
    gang = q.submit_gang(2, gpus=2)
    avoid(q, "G1")
    claims = gang.start(worker)
    assert sorted(u for c in claims for u in held(c)) == ["G0", "G2", "G3", "G4"]


def test_after_placing_a_gang_that_avoids_a_device_the_next_one_may_have_it(q: Q) -> None:
    """What decide subtracts is what reserve_gang takes: else it would place the second where nothing is left."""
    worker = q.worker(slots=2, devices=gpus(1000, 1000))
    first = q.submit_gang(1, gpus=1)
    avoid(q, "G0")
    second = q.submit_gang(1, gpus=1)
    q.place()
    assert (first.state, second.state) == ("reserved", "reserved")
    by_gang = {c["gang_id"]: held(c) for c in worker.claim()}
    assert by_gang == {first.id: ["G1"], second.id: ["G0"]}


def test_the_device_next_best_is_spent_when_the_best_is_avoided(q: Q) -> None:
    q.worker(slots=2, devices=gpus(1000, 2000))
    first = q.submit_gang(1, gpus=1, vram_mb=500)
    avoid(q, "G0")
    q.submit_gang(1, gpus=1, vram_mb=1500)
    q.place()
    assert [g["id"] for g in q.sql("select id from gangq.gangs where state = 'reserved'")] == [first.id]


def test_a_gang_that_fits_only_with_devices_it_avoids_waits_and_keeps_no_worker(q: Q) -> None:
    q.worker(slots=2, devices=gpus(1000, 1000))
    gang = q.submit_gang(2, gpus=1)
    avoid(q, "G0")
    q.place()  # a whole tick would see that it fits nowhere else
    assert gang.state == "blocked"
    assert q.planned_seats() == []
    rows = {row["gate"]: row for row in q.call("explain_gang", gang_id=gang.id)}
    assert (rows["avoids"]["ok"], rows["hardware"]["ok"]) == (False, False)
    q.worker("w2", devices=gpus(1000, prefix="H"))
    q.tick()
    assert gang.state == "reserved"


def test_a_gang_that_must_wait_keeps_the_workers_that_will_hold_it_without_what_it_avoids(q: Q) -> None:
    q.worker("w1", devices=gpus(1000, prefix="A"))
    good = q.worker("w2", devices=gpus(1000, prefix="B"))
    q.call("open_place", incarnation=good.incarnation, job_id=q.submit(gpus=1))
    assert q.call("claim", incarnation=good.incarnation)
    gang = q.submit_gang(1, gpus=1)
    avoid(q, "A0")
    q.tick()
    assert gang.state == "blocked"
    assert [seat["incarnation"] for seat in q.planned_seats()] == [good.incarnation]


def test_a_device_held_by_a_job_that_avoids_it_is_a_violation(q: Q) -> None:
    worker = q.worker(devices=gpus(1000))
    q.submit(gpus=1)
    claim = worker.take()
    with q.db.transaction(force_rollback=True):
        avoid(q, "G0")
        assert [v["rule"] for v in q.violations()] == ["device is not one it avoids"]
    assert held(claim) == ["G0"]


def test_a_gate_about_avoided_devices_is_shown_only_where_there_are_some(q: Q) -> None:
    q.worker(devices=gpus(1000))
    job = q.submit(gpus=1)
    assert "avoids" not in [row["gate"] for row in q.call("explain_job", job_id=job)]


def test_a_light_claim_says_nothing_of_what_is_loaded(q: Q) -> None:
    worker = q.worker()
    worker.claim(model="a", lane="placed")
    worker.claim(lane="light")
    assert q.value("select model from gangq.workers") == "a"

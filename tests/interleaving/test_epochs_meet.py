"""What changes a running gang's epoch meets what changes it too: one waits for the other, and sees what it did."""

from __future__ import annotations

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from interleaving.sessions import Arena, Connection, Verb, both_ends, call, first_of_two, meet, value
from sql.drive import tick


class Three:
    """A gang of three that runs on three workers, with a policy and a minimum; a fourth worker is idle."""

    def __init__(self, arena: Arena, policy: str, fewest: int = 3) -> None:
        self.arena = arena
        self.workers = [arena.worker(f"w{n}") for n in range(3)]
        self.id, self.jobs = arena.gang(3, checkpoint_mode="rank0", max_attempts=9)
        arena.db.execute(
            "update gangq.live_gangs g set failure_policy = %s, kind_id = gangq.intern_kind('default', %s || "
            "jsonb_build_array(jsonb_build_object('name', 'member', 'shape', g.shape_id, 'min', %s::integer, "
            "'max', 3, 'strategy', 'pack', 'require', null, 'prefer', null, 'balanced', false)), null, null, null)",
            (policy, Jsonb([]), fewest),
        )
        assert value(arena.db, "reserve_gang", gang_id=self.id, incarnations=self.workers)
        claims = {row["job_id"]: row["token"] for worker in self.workers for row in arena.claim(worker)}
        self.tokens = [claims[job] for job in self.jobs]
        self.spare = arena.worker("spare")

    @property
    def state(self) -> str:
        return str(self.arena.gang_row(self.id)["state"])

    @property
    def states(self) -> list[str]:
        return [self.arena.state(job) for job in self.jobs]

    @property
    def epoch(self) -> int:
        return int(self.arena.gang_row(self.id)["epoch"])

    def fail(self, rank: int) -> Verb:
        return lambda c: value(
            c, "fail", job_id=self.jobs[rank], token=self.tokens[rank], error={"message": "x"}
        )

    def reserve(self, *ranks: int) -> Verb:
        jobs = [self.jobs[rank] for rank in ranks]
        return lambda c: value(
            c, "reserve_gang", gang_id=self.id, job_ids=jobs, incarnations=[self.spare] * len(jobs)
        )

    def claim(self) -> Verb:
        return lambda c: call(c, "claim", incarnation=self.spare)

    def cancel(self) -> Verb:
        return lambda c: call(c, "cancel", gang_ids=[self.id])


@first_of_two
@both_ends
def test_two_members_fail_at_once_and_both_are_missing(meeting, turn, end):
    gang = Three(meeting, "restart_member")
    _, *answers = meet(meeting, gang.fail(0), gang.fail(1), turn, end)
    assert answers == ["preempted", "preempted"]
    lost = {0, 1} if end == "commit" else {1 - turn}
    assert gang.states == ["blocked" if rank in lost else "running" for rank in range(3)]
    assert (gang.state, gang.epoch) == ("running", 1)


@first_of_two
def test_the_last_two_fail_at_once_and_the_gang_starts_anew(meeting, turn):
    gang = Three(meeting, "restart_member")
    gang.fail(2)(meeting.db)
    meet(meeting, gang.fail(0), gang.fail(1), turn, "commit")
    assert (gang.state, gang.states) == ("blocked", ["blocked"] * 3)


@first_of_two
@both_ends
def test_a_replacement_is_placed_while_another_member_fails(meeting, turn, end):
    gang = Three(meeting, "restart_member")
    gang.fail(0)(meeting.db)
    _, placed, _ = meet(meeting, gang.reserve(0), gang.fail(1), turn, end)
    if end == "rollback" and turn == 0:
        assert gang.states == ["blocked", "blocked", "running"]
    elif end == "rollback":
        assert (placed, gang.states) == (True, ["reserved", "running", "running"])
    elif turn == 0:
        assert (placed, gang.states) == (True, ["reserved", "blocked", "running"])
    else:
        assert (placed, gang.states) == (False, ["blocked", "blocked", "running"])


@first_of_two
@both_ends
def test_a_replacement_is_claimed_while_another_member_fails(meeting, turn, end):
    gang = Three(meeting, "restart_member")
    gang.fail(0)(meeting.db)
    assert gang.reserve(0)(meeting.db)
    meet(meeting, gang.claim(), gang.fail(1), turn, end)
    gang.claim()(meeting.db)  # Where it was rolled back, or left for the next call.
    failed = end == "commit" or turn == 0
    assert gang.states == ["running", "blocked" if failed else "running", "running"]
    token = meeting.row(gang.jobs[0])["token"]
    assert call(meeting.db, "barrier", job_id=gang.jobs[0], token=token)[0]["go"] is not failed


@first_of_two
@both_ends
def test_a_gang_is_cancelled_while_a_replacement_is_claimed(meeting, turn, end):
    gang = Three(meeting, "restart_member")
    gang.fail(0)(meeting.db)
    assert gang.reserve(0)(meeting.db)
    meet(meeting, gang.claim(), gang.cancel(), turn, end)
    if end == "commit" and turn == 0:
        assert gang.states == ["preempting"] * 3
    elif end == "commit" or turn == 0:
        assert gang.states == ["blocked", "preempting", "preempting"]
    else:
        gang.claim()(meeting.db)
        assert gang.states == ["running"] * 3


@first_of_two
@both_ends
def test_two_fail_at_once_where_only_one_can_be_spared(meeting, turn, end):
    gang = Three(meeting, "shrink", fewest=2)
    meet(meeting, gang.fail(1), gang.fail(2), turn, end)
    if end == "rollback":
        assert (gang.state, gang.epoch) == ("running", 2)
        assert gang.states.count("blocked") == 1
    else:
        assert gang.state == "draining"
        assert gang.states[0] == "preempting"


@first_of_two
@both_ends
def test_a_worker_with_two_members_is_lost_while_the_third_fails(meeting, turn, end):
    arena = meeting
    gang = Three(arena, "restart_member")
    # Both of them on one worker: as if it had two slots.
    arena.db.execute("update gangq.incarnations set slots = 2 where id = %s", (gang.workers[0],))
    arena.db.execute(
        "update gangq.live_jobs set incarnation = %s where id = %s", (gang.workers[0], gang.jobs[1])
    )

    def dead(conn: Connection) -> int:
        return int(
            value(conn, "report_dead", worker="w0", incarnation=gang.workers[0], evidence={"by": "test"})
        )

    meet(arena, dead, gang.fail(2), turn, end)
    arena.tick()  # What was locked when the death was reported is freed now.
    if end == "commit":
        assert gang.state in ("blocked", "reserved"), "as a whole, perhaps placed again by now"
        assert gang.states == [gang.state] * 3
    elif turn == 0:
        assert gang.states == ["running", "running", "blocked"], "who failed backs off first"
    else:
        assert gang.states == ["reserved", "reserved", "running"], "by the same tick, on the two idle workers"


@first_of_two
@both_ends
def test_a_displaced_member_finishes_or_leaves(meeting, turn, end):
    gang = Three(meeting, "restart_gang", fewest=1)

    def displace(conn: Connection) -> bool:
        return bool(value(conn, "shrink_gang", gang_id=gang.id, job_ids=[gang.jobs[2]]))

    def finish(conn: Connection) -> Any:
        return call(conn, "complete", job_ids=[gang.jobs[2]], tokens=[gang.tokens[2]])[0]["outcome"]

    _, displaced, finished = meet(meeting, displace, finish, turn, end)
    assert finished == "done"
    first_stands = end == "commit"
    assert displaced is (turn == 0 or not first_stands)
    done = first_stands or turn == 0
    assert gang.states == ["running", "running", "done" if done else "preempting"]
    assert gang.epoch == (2 if (turn == 0 and first_stands) or (turn == 1 and not first_stands) else 1)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_new_rank_0_names_its_port_while_it_is_lost_itself(meeting, end):
    gang = Three(meeting, "shrink", fewest=1)
    gang.fail(0)(meeting.db)

    def lead(conn: Connection) -> list[dict[str, Any]]:
        return call(conn, "barrier", job_id=gang.jobs[1], token=gang.tokens[1], port=21000)

    met = meeting.meet(gang.fail(1), lead, end)
    assert met.later.waited
    row = meeting.db.execute("select epoch, master_port from gangq.live_gangs").fetchone()
    assert row == (
        {"epoch": 3, "master_port": None} if end == "commit" else {"epoch": 2, "master_port": 21000}
    )


def test_a_tick_waits_for_nobody_who_holds_a_gang_that_misses_a_member(meeting):
    gang = Three(meeting, "restart_member")
    gang.fail(0)(meeting.db)
    meeting.db.execute("update gangq.live_gangs set timeout_at = gangq.now()")
    met = meeting.meet(gang.cancel(), tick, "rollback")
    assert not met.later.waited
    assert gang.state == "running"
    meeting.tick()
    assert gang.state == "draining"

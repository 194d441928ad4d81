"""A preemption meets what its victim, its gang and their workers do just then: all or nothing, without waiting."""

from __future__ import annotations

import pytest

from interleaving.sessions import Arena, Connection, both_ends, call, value
from sql.drive import place


class Scene:
    """Two workers run one gang of low priority; another of high priority would need both."""

    def __init__(self, meeting: Arena) -> None:
        self.meeting = meeting
        meeting.db.execute("update gangq.queues_table set min_run_s = 0")
        self.workers = [meeting.worker("a"), meeting.worker("b")]
        self.victim, self.members, self.tokens = meeting.running_gang(self.workers)
        self.gang, _ = meeting.gang(2, priority=5)

    def admit(self, conn: Connection) -> bool:
        """One admission; whether it was told to come back."""
        again: bool = place(conn)["again"]
        return again

    def complete(self, conn: Connection) -> None:
        call(conn, "complete", job_ids=self.members[:1], tokens=self.tokens[:1])

    def cancel_victim(self, conn: Connection) -> None:
        call(conn, "cancel", gang_ids=[self.victim])

    def cancel_gang(self, conn: Connection) -> None:
        call(conn, "cancel", gang_ids=[self.gang])

    def save(self, conn: Connection) -> None:
        call(conn, "save_checkpoint", job_id=self.members[0], token=self.tokens[0], step=1, data=b"")

    def look_at_victim(self, conn: Connection) -> None:
        conn.execute("select 1 from gangq.live_gangs where id = %s for update", (self.victim,))

    def claim(self, conn: Connection) -> None:
        call(conn, "claim", incarnation=self.workers[0])

    def told(self) -> int:
        return len(
            self.meeting.db.execute("select 1 from gangq.live_jobs where state = 'preempting'").fetchall()
        )

    def kept(self) -> int:
        seats = "select 1 from gangq.plans cross join jsonb_array_elements(seats) where kept"
        return len(self.meeting.db.execute(seats).fetchall())


@pytest.fixture
def scene(meeting: Arena) -> Scene:
    return Scene(meeting)


@both_ends
@pytest.mark.parametrize("what", ["complete", "save", "look_at_victim", "cancel_victim", "cancel_gang"])
def test_a_victim_or_gang_that_is_busy_is_left_to_the_next_pass(scene: Scene, what: str, end: str) -> None:
    meeting = scene.meeting
    met = meeting.meet(getattr(scene, what), scene.admit, end)
    assert not met.later.waited
    assert met.later.result() is True, "ask again"
    assert scene.kept() == 0
    assert meeting.db.execute("select 1 from gangq.preemptions").fetchall() == []
    meeting.tick()
    if end == "rollback" or what in ("save", "look_at_victim"):
        assert (scene.told(), scene.kept()) == (2, 2)
    elif what == "complete":
        assert (scene.told(), scene.kept()) == (0, 0), "a gang of which a member is done is left alone"
    elif what == "cancel_victim":
        assert (scene.told(), scene.kept()) == (2, 0), "it leaves anyway"
    else:
        assert (scene.told(), scene.kept()) == (0, 0)


@both_ends
def test_a_worker_that_is_claiming_keeps_no_preemption_up(scene: Scene, end: str) -> None:
    met = scene.meeting.meet(scene.claim, scene.admit, end)
    assert not met.later.waited
    assert (scene.told(), scene.kept()) == (2, 2)


@both_ends
@pytest.mark.parametrize("what", ["complete", "cancel_victim", "cancel_gang", "claim"])
def test_what_meets_an_open_preemption_comes_after_it(scene: Scene, what: str, end: str) -> None:
    meeting = scene.meeting
    met = meeting.meet(scene.admit, getattr(scene, what), end)
    assert met.later.error is None
    assert met.later.waited is (what != "claim")
    told = 2 if end == "commit" else 0
    if what == "complete":
        assert meeting.state(scene.members[0]) == "done"
        told = max(0, told - 1)
    elif what == "cancel_victim":
        told = 2
    assert scene.told() == told
    assert scene.kept() == (2 if end == "commit" and what != "cancel_gang" else 0)


@both_ends
def test_a_solo_victim_that_completes_is_not_told_to_stop(meeting: Arena, end: str) -> None:
    meeting.db.execute("update gangq.queues_table set min_run_s = 0")
    worker = meeting.worker("a", memory_mb=1000)
    job, token = meeting.running(worker, memory_mb=1000)
    meeting.gang(1, priority=5, memory_mb=1000)
    met = meeting.meet(
        lambda conn: call(conn, "complete", job_ids=[job], tokens=[token]),
        lambda conn: place(conn),
        end,
    )
    assert not met.later.waited
    assert met.later.result()["again"]
    meeting.tick()
    assert meeting.state(job) == ("done" if end == "commit" else "preempting")


@both_ends
def test_a_cancel_of_a_gang_that_is_moved_comes_after_the_move(meeting: Arena, end: str) -> None:
    one = meeting.worker("a")
    gang, _, _ = meeting.running_gang([one])
    meeting.worker("b")
    meeting.db.execute("insert into gangq.cordons values ('host', 'a', true, gangq.now(), null, 'r', 'o')")
    met = meeting.meet(lambda conn: place(conn), lambda conn: value(conn, "preempt_gang", gang_id=gang), end)
    assert met.later.waited
    assert met.later.result() is (end == "rollback"), "it drains already"

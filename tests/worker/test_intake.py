"""What a worker claims while it may begin nothing, and what becomes of a claim whose answer was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangq.client import Client
from gangq.client.verb import Query
from gangq.errors import DatabaseUnreachable, InvalidInput, WrongState
from gangq.worker.claims import ClaimSource, TaskWakes, ThreadWakes
from gangq.worker.drain import Drain
from gangq.worker.gangs import PortHolder
from gangq.worker.lease import LeaseKeeper
from gangq.worker.loops import ChildProcessLoop, Intake, MainThreadLoop
from gangq.worker.reporter import Reporter
from gangq.worker.session import Session
from worker.parts import LossyClient, RecordedWork, claimed, session_of, source_of

DOUBTFUL: Any = SimpleNamespace(doubtful=lambda: frozenset({"GPU-1"}))
SURE: Any = SimpleNamespace(doubtful=frozenset)


class CutClient(LossyClient):
    """Calls ``on_cut()`` when it loses an answer."""

    on_cut: Callable[[], object] = int

    def execute(self, query: Any) -> Any:
        try:
            return super().execute(query)
        except DatabaseUnreachable:
            self.on_cut()
            raise


def take(session: Session, intake: Intake, source: ClaimSource[Any]) -> list[int]:
    return [job.id for job in session.main_client.execute(intake.taking(source, 1))]


def test_a_claim_that_waited_for_the_lease_is_not_sent_while_the_driver_does_not_answer(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = client.submit(task="t")[0]
    session = session_of(client, tmp_path)
    source = source_of(session)
    monkeypatch.setattr(session, "lapsing", lambda: True)
    assert take(session, Intake(session, Drain(0.0), SURE), source) == []
    assert source.unsure
    monkeypatch.setattr(session, "lapsing", lambda: False)
    assert take(session, Intake(session, Drain(0.0), DOUBTFUL), source) == []
    assert client.job(id=job).state == "pending"
    assert take(session, Intake(session, Drain(0.0), SURE), source) == [job]


def test_a_claim_that_was_answered_with_nothing_is_not_sent_again_while_the_driver_does_not_answer(
    client: Client, tmp_path: Path
) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    source = source_of(session)
    first = claimed(session, source)
    answer = session.main_client.execute(source.completing_and_claiming([first], 1))
    assert answer is not None
    assert answer[1] == []
    job = client.submit(task="t")[0]
    assert take(session, Intake(session, Drain(0.0), DOUBTFUL), source) == []
    assert client.job(id=job).state == "pending"


def test_what_a_claim_without_an_answer_took_is_asked_for_although_nothing_more_may_begin(
    client: Client, tmp_path: Path
) -> None:
    job = client.submit(task="t")[0]
    session = session_of(LossyClient(client, "claim"), tmp_path)
    source = source_of(session)
    assert take(session, Intake(session, Drain(0.0), SURE), source) == []
    assert source.outstanding
    assert source.unlisted, "nobody may hand it back meanwhile"
    assert take(session, Intake(session, Drain(0.0), DOUBTFUL), source) == [job]
    assert not source.unlisted


def test_a_claim_whose_answer_is_lost_as_a_drain_begins_is_handed_back_while_other_jobs_run_on(
    client: Client, tmp_path: Path
) -> None:
    job = client.submit(task="t")[0]
    cut = CutClient(client, "claim")
    session = session_of(cut, tmp_path)
    keeper = LeaseKeeper(session)
    drain = Drain(3600.0)
    cut.on_cut = drain.request
    parts: Any = (Reporter(session), None, None, None)
    MainThreadLoop(Intake(session, drain, SURE), source_of(session, keeper), *parts, deque()).run()
    assert client.job(id=job).state == "running"
    for _ in range(3):
        session.control.wait(keeper.beat())
    assert client.job(id=job).state == "pending"


def test_what_a_claim_brings_after_a_drain_has_begun_is_never_begun(client: Client, tmp_path: Path) -> None:
    client.submit(task="t")
    session = session_of(client, tmp_path)
    source, drain = source_of(session), Drain(3600.0)
    rows = session.main_client.execute(source.taking(1))
    drain.request()
    (job,) = Intake(session, drain, SURE).add(source, rows)
    assert not job.start(RecordedWork())
    assert job.stop_reason == "drain"


@pytest.fixture
def lane(client: Client, tmp_path: Path) -> tuple[Session, LeaseKeeper, ClaimSource[TaskWakes]]:
    """A lane of child processes."""
    session = session_of(client, tmp_path)
    keeper = LeaseKeeper(session)
    return session, keeper, ClaimSource(session, keeper, PortHolder(0), TaskWakes(session.control))


def test_so_is_one_of_the_lane_of_child_processes(
    client: Client,
    lane: tuple[Session, LeaseKeeper, ClaimSource[TaskWakes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = client.submit(task="t")[0]
    session, keeper, source = lane
    drain = Drain(3600.0)
    execute = session.control.client._execute_pooled

    async def cut(query: Query[Any], attempts: Any) -> Any:
        answer = await execute(query, attempts)
        if query.name == "gangq.claim":
            drain.request()
            raise DatabaseUnreachable("the connection was cut")
        return answer

    monkeypatch.setattr(session.control.client, "_execute_pooled", cut)
    parts: Any = (Reporter(session), None)
    loop = ChildProcessLoop(Intake(session, drain, SURE), source, *parts, 1)
    session.control.wait(loop.run())
    assert client.job(id=job).state == "running"
    for _ in range(3):
        session.control.wait(keeper.beat())
    assert client.job(id=job).state == "pending"


def test_a_port_that_another_worker_serves_under_this_hosts_name_is_not_offered_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(client, tmp_path)
    ports = PortHolder(1)
    source = ClaimSource(session, LeaseKeeper(session), ports, ThreadWakes())
    refusals: list[Exception] = []
    execute = session.main_client._execute_pooled

    def refuses(query: Query[Any], attempts: Any) -> Any:
        if query.name == "gangq.claim" and refusals:
            raise refusals.pop()
        return execute(query, attempts)

    monkeypatch.setattr(session.main_client, "_execute_pooled", refuses)
    try:
        offered = ports.offer()
        refusals.append(InvalidInput("no"))
        assert session.main_client.execute(source.taking(1)) == []
        assert (ports.offer(), source.outstanding) == (offered, False)
        assert source.wait_s > 1
        refusals.append(WrongState("port serves another gang's rendezvous"))
        assert session.main_client.execute(source.taking(1)) == []
        assert set(ports.offer()).isdisjoint(offered)
        assert (source.outstanding, source.wait_s < 1) == (False, True)
    finally:
        ports.close()


@pytest.mark.parametrize(
    ("lane", "free", "arrives", "sleeps"),
    [
        (None, True, True, True),
        (None, False, True, False),
        (None, True, False, False),
        ("light", False, True, True),
        ("placed", True, True, False),
    ],
)
def test_only_a_loop_that_can_take_light_work_and_hears_of_it_asks_to_be_woken(
    client: Client, tmp_path: Path, lane: Any, free: bool, arrives: bool, sleeps: bool
) -> None:
    session = session_of(client, tmp_path)
    source = ClaimSource(
        session,
        LeaseKeeper(session),
        PortHolder(0),
        ThreadWakes(),
        lambda: arrives,
        lane=lane,
        light_slot_free=lambda: free,
    )
    claim: Any = next(source.taking(1))
    assert claim.params["sleep"] is sleeps

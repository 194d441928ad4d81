"""Whose job and whose worker it is: real logins, each with the role that a fleet would give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from sql.drive import INVALID, NAME_TAKEN, NOT_ALLOWED, STALE, Claim, Q, Worker, a_role, gpus, refused
from sql.services import put

ROLES = {
    "s1_test": "gangq_submitter",
    "s2_test": "gangq_submitter",
    "w1_test": "gangq_worker",
    "w2_test": "gangq_worker",
    "v1_test": "gangq_viewer",
    "a1_test": "gangq_admin",
    "h1_test": "gangq_host",
}
SECRET = "hunter2"


class Logins:
    """A connection of each login, by its name without `_test`; `q` is the superuser's."""

    def __init__(self, q: Q, dsn: str, stack: ExitStack) -> None:
        self.q, self._dsn, self._stack = q, dsn, stack
        self._open: dict[str, Q] = {}
        for name, role in ROLES.items():
            a_role(q.db, name, role, login=True)

    def __getattr__(self, name: str) -> Q:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.login(f"{name}_test")

    def login(self, name: str) -> Q:
        if name not in self._open:
            conn = psycopg.connect(self._dsn, user=name, autocommit=True, row_factory=dict_row)
            self._open[name] = Q(self._stack.enter_context(conn), self.q.clock)
        return self._open[name]

    def as_(self, q: Q, claim: Claim) -> Claim:
        """The same claim, in the words of another login."""
        return Claim(q, claim.row, claim.incarnation)


@pytest.fixture
def on(q: Q, dsn: str) -> Iterator[Logins]:
    with ExitStack() as stack:
        yield Logins(q, dsn, stack)


def last_event(q: Q, kind: str) -> dict[str, Any]:
    return q.events(kind)[-1]


# Who is calling ---------------------------------------------------------------------------------------------


def test_set_role_to_a_role_of_gangq_hides_nobody(on: Logins) -> None:
    on.s1.sql("set role gangq_submitter")
    job, gang = on.s1.submit(), on.s1.submit_gang(1)
    assert (on.q.job(job)["submitter"], on.q.job(job)["login"]) == ("s1_test", "s1_test")
    assert (gang.row["submitter"], gang.row["login"]) == ("s1_test", "s1_test")


def test_each_login_has_unique_keys_of_its_own_and_those_of_a_shared_queue_are_everybodys(on: Logins) -> None:
    on.a1.call("set_queue", name="ours", others="shared")
    named = {"unique_key": "k", "task": "t"}
    assert not on.s1.one("submit_unique", **named)["existed"]
    assert not on.s2.one("submit_unique", **named)["existed"]
    job = on.s1.one("submit_unique", **named, queue="ours")["job_id"]
    assert on.s2.one("submit_unique", **named, queue="ours") == {
        "job_id": job, "existed": True, "replaced": False,
    }  # fmt: skip
    with refused(NOT_ALLOWED):
        on.v1.one("submit_unique", **named)


def test_a_limit_per_submitter_is_not_evaded_by_set_role(on: Logins) -> None:
    on.a1.call("set_queue", name="default", submitter_maximum={"jobs": 1})
    worker = on.w1.worker(slots=4)
    on.s1.submit()
    on.s1.sql("set role gangq_submitter")
    on.s1.submit()
    on.w1.place()
    assert len(worker.claim()) == 1


def test_a_role_that_stands_for_a_user_is_the_submitter_and_the_login_is_kept_beside_it(on: Logins) -> None:
    a_role(on.q.db, "tenant_a_test", "gangq_submitter")
    on.q.sql("grant tenant_a_test to s1_test")
    on.s1.sql("set role tenant_a_test")
    job = on.s1.submit()
    on.s1.call("cancel", job_ids=[job], reason="by s2, honestly")
    row = on.q.job(job)
    assert (row["submitter"], row["login"]) == ("tenant_a_test", "s1_test")
    event = last_event(on.q, "cancel")
    assert (event["actor"], event["reason"]) == ("s1_test as tenant_a_test", "by s2, honestly")


def test_login_and_submitter_outlive_the_job_and_its_gang(on: Logins) -> None:
    job, gang = on.s1.submit(), on.s1.submit_gang(1)
    worker = on.w1.worker()
    worker.take().complete()
    on.w1.tick()
    worker.take().complete()
    ended = on.q.sql(
        "select submitter, login from gangq.history union all select submitter, login from gangq.gang_history"
    )
    assert ended == [{"submitter": "s1_test", "login": "s1_test"}] * 3
    assert (on.q.job(job)["login"], gang.row["login"]) == ("s1_test", "s1_test")


def test_every_event_says_who_caused_it(on: Logins) -> None:
    on.s1.submit_gang(1)
    worker = on.w1.worker()
    on.w2.tick()
    claim = worker.take()
    claim.fail()
    on.a1.call("quarantine", worker=worker.name)
    assert on.q.sql("select kind from gangq.events where actor is null") == []
    actors = {event["kind"]: event["actor"] for event in on.q.events()}
    assert (actors["submit"], actors["register"], actors["reserve"], actors["quarantine"]) == (
        "s1_test",
        "w1_test",
        "w2_test",
        "a1_test",
    )


def test_set_priority_leaves_one_event_a_call(on: Logins) -> None:
    jobs = on.s1.submit(count=3)
    on.s1.call("set_priority", priority=5, job_ids=jobs)
    (event,) = on.q.events("priority")
    assert (event["actor"], event["job_id"], event["data"]["priority"]) == ("s1_test", None, 5)
    assert event["data"]["job_ids"] == jobs
    on.a1.call("set_priority", priority=6, job_ids=jobs[:1])
    assert on.q.events("priority", job_id=jobs[0])[0]["actor"] == "a1_test"


def test_retry_says_who_retried(on: Logins) -> None:
    job = on.s1.submit()
    on.s1.call("cancel", job_ids=[job])
    on.a1.call("retry", job_ids=[job])
    assert last_event(on.q, "retry")["actor"] == "a1_test"
    assert (on.q.job(job)["submitter"], on.q.job(job)["login"]) == ("a1_test", "a1_test")


# Who may act on whose work ----------------------------------------------------------------------------------

ACTS: list[tuple[str, dict[str, Any]]] = [("cancel", {}), ("set_priority", {"priority": 1})]


@pytest.mark.parametrize(("verb", "more"), ACTS)
def test_only_its_submitter_and_admins_change_a_job(on: Logins, verb: str, more: dict[str, Any]) -> None:
    jobs = on.s1.submit(count=2)
    gang = on.s1.submit_gang(1)
    for named in ({"job_ids": jobs[:1]}, {"gang_ids": [gang.id]}):
        with refused(NOT_ALLOWED, "which is of s1_test") as caught:
            on.s2.call(verb, **named, **more)
        assert "gangq_admin" in (caught.value.diag.message_hint or "")
    on.s1.call(verb, job_ids=jobs[:1], **more)
    on.a1.call(verb, job_ids=jobs[1:], gang_ids=[gang.id], **more)


@pytest.mark.parametrize(("verb", "more"), ACTS)
def test_a_call_that_names_one_job_of_another_changes_none(
    on: Logins, verb: str, more: dict[str, Any]
) -> None:
    mine, other = on.s2.submit(), on.s1.submit()
    with refused(NOT_ALLOWED, f"job {other}"):
        on.s2.call(verb, job_ids=[mine, other], **more)
    assert (on.q.state(mine), on.q.job(mine)["priority"]) == ("pending", 0)


def test_only_its_submitter_and_admins_retry_a_job(on: Logins) -> None:
    job, gang = on.s1.submit(), on.s1.submit_gang(1)
    on.s1.call("cancel", job_ids=[job], gang_ids=[gang.id])
    for named in ({"job_ids": [job]}, {"gang_ids": [gang.id]}):
        with refused(NOT_ALLOWED, "which is of s1_test"):
            on.s2.call("retry", **named)
    on.s1.call("retry", job_ids=[job])
    on.a1.call("retry", gang_ids=[gang.id])
    # It is the admin's by now.
    with refused(NOT_ALLOWED, "which is of a1_test"):
        on.s1.call("cancel", gang_ids=[gang.id])


def test_in_a_shared_queue_every_submitter_acts_and_reads_and_nobody_else(on: Logins) -> None:
    on.a1.call("set_queue", name="default", others="shared")
    assert on.v1.value("select others from gangq.queues") == "shared"
    job = on.s1.submit(payloads=[{"password": SECRET}])
    assert SECRET in str(on.s2.job(job))
    for login in (on.v1, on.w1, on.h1):
        assert SECRET not in str(login.job(job))
        with refused(NOT_ALLOWED):
            login.call("cancel", job_ids=[job])
    on.s2.call("set_priority", job_ids=[job], priority=3)
    on.s2.call("cancel", job_ids=[job])
    on.s2.call("retry", job_ids=[job])
    on.a1.call("set_queue", name="default", others="owner")
    with refused(NOT_ALLOWED):
        on.s1.call("cancel", job_ids=[job])
    with refused(INVALID, "owner or shared"):
        on.a1.call("set_queue", name="default", others="nobody")


def test_users_behind_one_login_stay_apart_and_the_login_itself_owns_all_of_it(on: Logins) -> None:
    for tenant in ("tenant_a_test", "tenant_b_test"):
        a_role(on.q.db, tenant, "gangq_submitter")
        on.q.sql(f"grant {tenant} to s1_test")
    on.s1.sql("set role tenant_a_test")
    job = on.s1.submit(payloads=[{"password": SECRET}])
    assert on.s1.job(job)["readable"]
    on.s1.sql("set role tenant_b_test")
    assert (on.s1.job(job)["readable"], on.s1.job(job)["payload"]) == (False, None)
    with refused(NOT_ALLOWED, "which is of tenant_a_test (login s1_test)"):
        on.s1.call("cancel", job_ids=[job])
    on.s1.sql("reset role")
    assert on.s1.job(job)["payload"] == {"password": SECRET}
    # Another login with the same role: it is not the one that submitted.
    on.q.sql("grant tenant_a_test to s2_test")
    on.s2.sql("set role tenant_a_test")
    with refused(NOT_ALLOWED):
        on.s2.call("cancel", job_ids=[job])
    on.s1.call("cancel", job_ids=[job])


def test_a_user_behind_a_login_does_not_replace_the_job_of_another_whose_key_it_names(on: Logins) -> None:
    for tenant in ("tenant_a_test", "tenant_b_test"):
        a_role(on.q.db, tenant, "gangq_submitter")
        on.q.sql(f"grant {tenant} to s1_test")
    named = {"unique_key": "k", "task": "t"}
    on.s1.sql("set role tenant_a_test")
    job = on.s1.one("submit_unique", **named, payload={"of": "a"})["job_id"]
    on.s1.submit("parent")
    on.s1.sql("set role tenant_b_test")
    refusal = f"tenant_b_test (login s1_test) may not replace job {job}, which is of tenant_a_test"
    with refused(NOT_ALLOWED, refusal):
        on.s1.one("submit_unique", **named, payload={"of": "b"}, replaces=True)
    assert on.s1.one("submit_unique", **named)["job_id"] == job
    parent_of_b = on.s1.submit("parent")
    worker = on.w1.worker(tasks=["parent"], light=2)
    for claim in worker.claim(max_jobs=2):
        child = {"parent": claim.job_id, "parent_token": claim.token}
        again = {**named, **child, "payload": {"of": "a", "by": "its job"}, "replaces": True}
        if claim.job_id == parent_of_b:
            with refused(NOT_ALLOWED, refusal):
                on.w1.one("submit_unique", **again)
        else:
            assert on.w1.one("submit_unique", **again)["replaced"]
    assert on.q.job(job)["payload"] == {"of": "a", "by": "its job"}
    # Whoever may cancel it may replace it.
    a_role(on.q.db, "boss_test", "gangq_submitter", "gangq_admin")
    on.q.sql("grant boss_test to s1_test")
    on.s1.sql("set role boss_test")
    assert on.s1.one("submit_unique", **named, payload={"of": "boss"}, replaces=True)["replaced"]
    on.s1.sql("reset role")
    on.q.sql("revoke boss_test from s1_test")
    assert on.s1.one("submit_unique", **named, payload={"of": "s1"}, replaces=True)["replaced"]
    on.a1.call("set_queue", name="ours", others="shared")
    for tenant in ("tenant_a_test", "tenant_b_test"):
        on.s1.sql(f"set role {tenant}")
        answer = on.s1.one("submit_unique", **named, queue="ours", replaces=True)
    assert answer["replaced"]


@pytest.mark.parametrize("kind", ["schedule", "service"])
def test_a_program_of_one_user_does_not_end_what_another_behind_its_login_declares(
    on: Logins, kind: str
) -> None:
    for tenant in ("tenant_a_test", "tenant_b_test"):
        a_role(on.q.db, tenant, "gangq_submitter")
        on.q.sql(f"grant {tenant} to s1_test")
    when: dict[str, Any] = {"cron": "0 3 * * *"} if kind == "schedule" else {"source": "app"}
    names: dict[str, Any] = {"source": "app", "names": ["nightly"]}
    on.s1.sql("set role tenant_a_test")
    on.s1.call(f"set_{kind}", name="nightly", task="t", **when)
    on.s1.call(f"declare_{kind}s", **names)
    on.s1.sql("set role tenant_b_test")
    assert on.s1.call(f"declare_{kind}s", source="app", names=[]) == []
    assert on.q.value(f"select undeclared_at from gangq.{kind}s") is None
    on.s1.sql("reset role")
    assert len(on.s1.call(f"declare_{kind}s", source="app", names=[])) == 1


def test_a_submitter_whose_role_was_dropped_is_left_to_admins(on: Logins) -> None:
    a_role(on.q.db, "gone_test", "gangq_submitter", login=True)
    job = on.login("gone_test").submit(payloads=[{"password": SECRET}])
    on.login("gone_test").db.close()
    on.q.sql("drop role gone_test")
    assert on.s1.job(job)["readable"] is False
    with refused(NOT_ALLOWED):
        on.s1.call("cancel", job_ids=[job])
    assert on.a1.job(job)["payload"] == {"password": SECRET}
    on.a1.call("cancel", job_ids=[job])


def test_a_tick_of_a_worker_cancels_what_waits_for_a_job_that_did_not_succeed(on: Logins) -> None:
    first = on.s1.submit()
    second = on.s2.submit(after=[first])
    on.s1.call("cancel", job_ids=[first])
    on.w1.tick()
    assert on.q.state(second) == "cancelled"


# Who reads what ---------------------------------------------------------------------------------------------


def everything(q: Q, job_id: int) -> str:
    return str(
        [
            q.sql(f"select * from gangq.{view} where {column} = %(id)s", id=job_id)
            for view, column in (
                ("jobs", "id"),
                ("job_logs", "job_id"),
                ("job_evidence", "job_id"),
                ("trips", "job_id"),
                ("events", "job_id"),
            )
        ]
    )


def test_payload_result_error_output_and_evidence_are_shown_to_those_they_concern(on: Logins) -> None:
    """Beside the submitter and admins: while the job runs, the login whose worker holds it."""
    worker, beside = on.w1.worker(), on.w2.worker("other")
    job = on.s1.submit(payloads=[{"password": SECRET}])
    claim = worker.take()
    on.w1.call("append_log", job_ids=[job], tokens=[claim.token], seqs=[0], chunks=[SECRET])
    claim.suspect(reason="silent", stack=SECRET)
    claim.save(1, SECRET.encode())
    may, must_not = [on.s1, on.a1, on.q, on.w1], [on.s2, on.v1, on.h1, on.w2]
    for reader in may:
        assert reader.job(job)["readable"] is True
        assert everything(reader, job).count(SECRET) == 3, "payload, output, evidence"
    for reader in must_not:
        assert reader.job(job)["readable"] is False
        assert SECRET not in everything(reader, job)
    claim.trip(evidence={"stack": SECRET})
    claim = worker.take()
    claim.complete({"answer": SECRET})
    for reader in (on.s1, on.a1):
        assert everything(reader, job).count(SECRET) == 6, (
            "also the result, and the trip's evidence in two views"
        )
    for reader in (*must_not, on.w1):
        assert SECRET not in everything(reader, job), "its worker does not hold it any more"
    del beside


@pytest.mark.parametrize(
    "look",
    [
        "select count(*) from gangq.job_logs where chunk::integer = 0",
        "select count(*) from gangq.job_evidence where (data ->> 'stack')::integer = 0",
        "select count(*) from gangq.trips where (evidence ->> 'stack')::integer = 0",
        "select count(*) from gangq.jobs where (payload ->> 'password')::integer = 0",
    ],
)
def test_a_condition_that_fails_on_rows_of_others_does_not_quote_them(on: Logins, look: str) -> None:
    """A condition of the reader's own, cheaper than the view's, would be asked first and name what it fails on."""
    worker = on.w1.worker()
    job = on.s1.submit(payloads=[{"password": SECRET}])
    claim = worker.take()
    on.w1.call("append_log", job_ids=[job], tokens=[claim.token], seqs=[0], chunks=[SECRET])
    claim.suspect(stack=SECRET)
    claim.trip(evidence={"stack": SECRET})
    for reader in (on.s2, on.v1, on.h1, on.w2):
        assert reader.value(look) == 0
    with pytest.raises(psycopg.errors.InvalidTextRepresentation, match=SECRET):
        on.s1.sql(look)


@pytest.mark.parametrize(
    ("first", "second", "others", "readable"),
    [
        (("s1", None), ("s1", None), "owner", True),
        (("s1", None), ("s2", None), "owner", False),
        (("s1", "tenant_a_test"), ("s1", "tenant_a_test"), "owner", True),
        (("s1", "tenant_a_test"), ("s1", None), "owner", True),
        (("s1", "tenant_a_test"), ("s1", "tenant_b_test"), "owner", False),
        (("s1", None), ("s1", "tenant_a_test"), "owner", False),
        (("s1", "tenant_a_test"), ("s2", "tenant_a_test"), "owner", False),
        (("s1", None), ("s2", None), "shared", True),
        (("s1", None), ("s2", "dropped"), "shared", False),
    ],
)
@pytest.mark.parametrize("how", ["done", "failed"])
def test_a_job_reads_what_its_submitter_may_read_whichever_worker_runs_it(
    on: Logins, first: tuple[str, str], second: tuple[str, str], others: str, readable: bool, how: str
) -> None:
    for tenant in ("tenant_a_test", "tenant_b_test"):
        a_role(on.q.db, tenant, "gangq_submitter")
        on.q.sql(f"grant {tenant} to s1_test, s2_test")
    on.a1.call("set_queue", name="default", others=others)

    def submit(who: tuple[str, str], **options: Any) -> Any:
        login = on.login(f"{who[0]}_test")
        login.sql(f"set role {who[1]}" if who[1] not in (None, "dropped") else "reset role")
        return login.submit(**options)

    awaited = submit(first)
    job = submit(second, after_any=[awaited])
    if second[1] == "dropped":
        a_role(on.q.db, "s2_test", "gangq_viewer", login=True)
    worker = on.w1.worker()
    if how == "done":
        worker.take().complete({"answer": SECRET})
    else:
        worker.take().fail(SECRET, retryable=False)
    on.w1.settle()
    claim = worker.take()
    assert claim.job_id == job
    (row,) = on.w1.call("inputs", job_id=job, token=claim.token)
    assert (row["state"], row["readable"], SECRET in str(row)) == (how, readable, readable)


def test_a_submitter_under_a_viewers_role_reads_what_is_its_own_and_no_more(on: Logins) -> None:
    on.q.sql("grant gangq_viewer to a1_test")
    other, mine = on.s1.submit(), on.a1.submit()
    on.a1.sql("set role gangq_viewer")
    assert (on.a1.job(other)["readable"], on.a1.job(mine)["readable"]) == (False, True)


def test_the_address_of_a_health_check_is_shown_to_whoever_may_read_the_payload(on: Logins) -> None:
    put(on.s1, health=f"http://probe:{SECRET}@host/healthz")
    look = "select health, readable from gangq.services"
    assert on.v1.sql(look) == [{"health": None, "readable": False}]
    assert on.s1.sql(look) == [{"health": f"http://probe:{SECRET}@host/healthz", "readable": True}]


def test_the_tables_behind_the_views_are_nobodys(on: Logins) -> None:
    for login in (on.s1, on.w1, on.v1, on.h1, on.a1):
        for table in ("live_jobs", "history", "checkpoints", "logs", "evidence"):
            with refused(NOT_ALLOWED):
                login.sql(f"select * from gangq.{table}")


# A ceiling for priorities -----------------------------------------------------------------------------------


def test_nobody_submits_raises_or_retries_above_the_ceiling(on: Logins) -> None:
    job, gang = on.s1.submit(priority=50), on.s1.submit_gang(1, priority=50)
    on.s1.call("cancel", job_ids=[job], gang_ids=[gang.id])
    on.a1.call("set_queue", name="default", ceilings={"gangq_submitter": 10, "s2_test": 100})
    live = on.s1.submit(priority=10)
    tries: list[Callable[[], Any]] = [
        lambda: on.s1.submit(priority=11),
        lambda: on.s1.submit_gang(1, priority=11),
        lambda: on.s1.call("set_priority", job_ids=[live], priority=11),
        lambda: on.s1.call("retry", job_ids=[job]),
        lambda: on.s1.call("retry", gang_ids=[gang.id]),
    ]
    for above in tries:
        with refused(NOT_ALLOWED, "is above 10, the ceiling of s1_test in queue 'default'") as caught:
            above()
        assert "gangq_admin" in (caught.value.diag.message_hint or "")
    # The highest entry counts, and admins are not bound.
    assert on.s2.submit(priority=100)
    with refused(NOT_ALLOWED, "is above 100"):
        on.s2.submit(priority=101)
    assert on.a1.submit(priority=1000)
    on.a1.call("set_queue", name="default", ceilings=None)
    assert on.s1.submit(priority=1000)


def test_a_ceiling_holds_in_the_queues_below_and_where_it_names_nobody_it_binds_nobody(on: Logins) -> None:
    on.a1.call("set_queue", name="a.b")
    on.a1.call("set_queue", name="a", ceilings={"s1_test": 5})
    with refused(NOT_ALLOWED, "the ceiling of s1_test in queue 'a'"):
        on.s1.submit(queue="a.b", priority=6)
    assert on.s2.submit(queue="a.b", priority=1000)
    on.a1.call("set_queue", name="a.b", ceilings={"s1_test": 3})
    with refused(NOT_ALLOWED, "is above 3"):
        on.s1.submit(queue="a.b", priority=4)


def test_a_ceiling_is_not_evaded_by_set_role_and_each_user_behind_a_login_has_its_own(on: Logins) -> None:
    for tenant in ("tenant_a_test", "tenant_b_test"):
        a_role(on.q.db, tenant, "gangq_submitter")
        on.q.sql(f"grant {tenant} to s1_test")
    on.a1.call("set_queue", name="default", ceilings={"s1_test": 10})
    on.s1.sql("set role tenant_a_test")  # it has no entry: the login's holds
    with refused(NOT_ALLOWED, "is above 10, the ceiling of tenant_a_test"):
        on.s1.submit(priority=11)
    on.a1.call("set_queue", name="default", ceilings={"tenant_a_test": 10, "tenant_b_test": 50})
    with refused(NOT_ALLOWED, "is above 10"):
        on.s1.submit(priority=11)
    on.s1.sql("set role tenant_b_test")
    assert on.s1.submit(priority=50)


@pytest.mark.parametrize(
    "ceilings",
    [[], {"s1_test": "high"}, {"s1_test": 1.5}, {"s1_test": 1001}, {"no such role": 1}, {"s1_test": None}],
)
def test_ceilings_are_priorities_of_roles_that_exist(on: Logins, ceilings: Any) -> None:
    with refused(INVALID, "queue 'default'"):
        on.a1.call("set_queue", name="default", ceilings=ceilings)


def test_a_role_that_was_dropped_since_keeps_no_queue_from_being_changed(on: Logins) -> None:
    a_role(on.q.db, "left_test")
    on.a1.call("set_queue", name="default", ceilings={"left_test": 5, "s1_test": 10})
    on.q.sql("drop role left_test")
    on.a1.call("set_queue", name="default", paused=True)
    with refused(NOT_ALLOWED, "is above 10"):
        on.s1.submit(priority=11)


# Whose worker it is -----------------------------------------------------------------------------------------


def saying(claim: Claim, worker: Worker) -> dict[str, Callable[[], Any]]:
    """Everything that a worker says, of this claim and of itself, over the connection that both carry."""
    q = claim.q
    named = {"worker": worker.name, "incarnation": worker.incarnation}
    arrays = {"job_ids": [claim.job_id], "tokens": [claim.token]}
    return {
        "heartbeat": lambda: worker.beat(),
        "claim": lambda: worker.claim(),
        "append_log": lambda: q.call("append_log", **arrays, seqs=[0], chunks=["forged"]),
        "save_checkpoint": lambda: claim.save(1),
        "load_checkpoint": lambda: claim.load(),
        "inputs": lambda: q.call("inputs", job_id=claim.job_id, token=claim.token),
        "suspect": lambda: claim.suspect(),
        "complete": lambda: claim.complete({"result": "forged"}),
        "complete_and_claim": lambda: q.call(
            "complete_and_claim", incarnation=worker.incarnation, **arrays, results=[None]
        ),
        "fail": lambda: claim.fail(),
        "snooze": lambda: claim.snooze(),
        "requeue": lambda: claim.requeue(),
        "release": lambda: claim.release(),
        "trip": lambda: claim.trip(),
        "ack_preempted": lambda: claim.ack(),
        "barrier": lambda: claim.barrier(),
        "report_ready": lambda: q.call("report_ready", job_id=claim.job_id, token=claim.token, port=80),
        "report_load": lambda: q.call("report_load", job_id=claim.job_id, token=claim.token, load=0.5),
        "retire_worker": lambda: worker.retire(),
        "report_dead": lambda: q.call("report_dead", **named, evidence={"by": "me"}),
        "report_stuck": lambda: q.call("report_stuck", **named, evidence={"pid": 1}),
        "bounce": lambda: q.call("bounce", incarnation=worker.incarnation, host=f"host-{worker.name}"),
        "bounced": lambda: q.call("bounced", incarnation=worker.incarnation, ok=True),
    }


VERBS = list(saying(Claim(None, {"job_id": 0, "token": 0}), Worker(None, "", {"incarnation": 0})))  # type: ignore[arg-type]
# What takes an incarnation or a token and is not the word of that worker.
NOT_SAID = {
    "open_place": "whoever decides opens places on workers of all logins",
    "reserve_gang": "whoever decides reserves seats on workers of all logins",
    "capacity_of": "reads what the view of capacity shows to every role",
}
HOSTS = ["report_dead", "report_stuck", "retire_worker", "trip", "bounce", "bounced"]


def spoken_by(q: Q, claim: Claim, worker: Worker, verb: str) -> Any:
    return saying(Claim(q, claim.row, claim.incarnation), Worker(q, worker.name, worker.registration))[verb]()


def test_everything_that_a_worker_says_is_tried_below(q: Q) -> None:
    taking = q.sql(
        "select p.proname from pg_proc p where p.pronamespace = 'gangq'::regnamespace "
        "and p.proargnames[1:p.pronargs] && '{incarnation,incarnations,token,tokens}' "
        "and (has_function_privilege('gangq_worker', p.oid, 'execute') "
        "or has_function_privilege('gangq_host', p.oid, 'execute'))"
    )
    assert {row["proname"] for row in taking} == {*VERBS, *NOT_SAID}


@pytest.mark.parametrize("verb", VERBS)
def test_another_logins_word_for_a_worker_or_its_job_is_refused_and_changes_nothing(
    on: Logins, verb: str
) -> None:
    worker = on.w1.worker("w1")
    if verb in ("barrier", "report_ready", "report_load"):
        put(on.s1, replicas=1, work={})
        on.w1.tick()
    else:
        on.s1.submit(count=2)
    claim, theirs = worker.take(), on.w2.worker("w2")
    if verb == "ack_preempted":
        on.s1.call("cancel", job_ids=[claim.job_id])

    def seen() -> Any:
        return [
            on.q.sql(f"select * from gangq.{table}")
            for table in (
                "live_jobs",
                "live_gangs",
                "events",
                "incarnations",
                "logs",
                "checkpoints",
                "replicas",
            )
        ]

    before = seen()
    with refused(
        NOT_ALLOWED, "worker 'w1' (incarnation 1) was registered by login w1_test, and this is w2_test"
    ) as caught:
        spoken_by(on.w2, claim, worker, verb)
    assert "gangq_host" in (caught.value.diag.message_hint or "")
    assert seen() == before
    # In the name of its own worker it says no more about that job.
    if verb == "complete_and_claim":
        with refused(NOT_ALLOWED, "registered by login w1_test"):
            spoken_by(on.w2, claim, theirs, verb)
    if verb in HOSTS:
        spoken_by(on.h1, claim, worker, verb)
    elif verb in ("suspect", "heartbeat", "claim", "complete"):
        with refused(NOT_ALLOWED):
            spoken_by(on.h1, claim, worker, verb)
        spoken_by(on.a1, claim, worker, verb)
    else:
        spoken_by(on.w1, claim, worker, verb)


ENDINGS = ("complete", "complete_and_claim", "fail", "snooze", "requeue", "ack_preempted", "trip")


@pytest.mark.parametrize("verb", ENDINGS)
def test_the_end_of_an_attempt_that_was_taken_away_is_stale_whichever_login_runs_the_job_now(
    on: Logins, verb: str
) -> None:
    on.s1.submit()
    worker = on.w1.worker("w1")
    claim = worker.take()
    worker.report_dead()
    again = on.w2.worker("w2").take()
    with refused(STALE, f"job {claim.job_id}"):
        saying(claim, worker)[verb]()
    assert again.complete() == "done"


@pytest.mark.parametrize(
    ("verb", "named", "said"),
    [("complete", {"strict": False}, ["done", "stale"]), ("release", {}, ["released", "repeated"])],
)
def test_a_pair_whose_job_another_login_runs_now_keeps_no_other_pair_from_its_end(
    on: Logins, verb: str, named: dict[str, Any], said: list[str]
) -> None:
    on.s1.submit(count=2)
    own, gone = on.w1.worker("w1", prefetch=2).claim()
    gone.release()
    again = on.w2.worker("w2").take()
    pairs = {"job_ids": [own.job_id, gone.job_id], "tokens": [own.token, gone.token]}
    outcomes = {row["job_id"]: row["outcome"] for row in on.w1.call(verb, **pairs, **named)}
    assert [outcomes[own.job_id], outcomes[gone.job_id]] == said
    assert again.complete() == "done"


def test_a_member_of_the_workers_login_may_complete_in_a_transaction_of_its_own(on: Logins) -> None:
    """A handler that writes its results as the application's login."""
    worker = on.w1.worker()
    on.s1.submit()
    claim = worker.take()
    a_role(on.q.db, "application_test", "w1_test", login=True)
    assert on.as_(on.login("application_test"), claim).complete() == "done"


@pytest.mark.parametrize(("verb", "more"), [("submit", {}), ("submit_gang", {"size": 1})])
def test_another_logins_worker_submits_nothing_for_a_job(on: Logins, verb: str, more: dict[str, Any]) -> None:
    on.s1.submit()
    claim = on.w1.worker().take()
    child = {"task": "leaf", "parent": claim.job_id, "parent_token": claim.token, **more}
    with refused(NOT_ALLOWED, "registered by login w1_test, and this is w2_test"):
        on.w2.call(verb, **child)
    on.w1.call(verb, **child)


def test_output_of_an_attempt_that_is_over_is_taken_from_the_login_it_ran_under(on: Logins) -> None:
    worker = on.w1.worker()
    on.s1.submit()
    claim = worker.take()
    claim.fail()
    said = {"job_ids": [claim.job_id], "tokens": [claim.token], "seqs": [0], "chunks": ["the end"]}
    with refused(NOT_ALLOWED, "registered by login w1_test"):
        on.w2.call("append_log", **said)
    on.w1.call("append_log", **said)
    assert on.s1.sql("select chunk from gangq.job_logs") == [{"chunk": "the end"}]


def test_output_of_a_job_that_was_done_and_is_retried_is_taken_from_the_login_it_ran_under(
    on: Logins,
) -> None:
    """No event tells of the end of a single job that is done."""
    worker = on.w1.worker()
    on.s1.submit()
    claim = worker.take()
    claim.complete()
    on.s1.call("retry", job_ids=[claim.job_id])
    said = {"job_ids": [claim.job_id], "tokens": [claim.token], "seqs": [0], "chunks": ["forged"]}
    with refused(NOT_ALLOWED, "registered by login w1_test"):
        on.w2.call("append_log", **said)
    on.w1.call("append_log", **said | {"chunks": ["the end"]})
    worker.retire()
    on.a1.call("configure", incarnation_retention="1 hour")
    on.q.clock.advance(2 * 3600)
    on.w1.tick()
    on.w2.call("append_log", **said | {"seqs": [1]})
    assert on.s1.sql("select chunk from gangq.job_logs") == [{"chunk": "the end"}], "it is not known any more"


def test_a_live_name_and_a_device_that_is_offered_stay_where_they_are(on: Logins) -> None:
    identity = {"mark": SECRET}
    worker = on.w1.worker("w1", host="h", devices=gpus(8000), identity=identity)
    with refused(NAME_TAKEN) as caught:
        on.w2.worker("w1", host="h")
    assert SECRET not in (caught.value.diag.message_detail or ""), "what its processes are found by"
    with refused(NAME_TAKEN) as caught:
        on.w1.worker("w1", host="h")
    assert SECRET in (caught.value.diag.message_detail or "")
    squatter = on.w2.worker("w2", host="elsewhere", devices=gpus(99))
    assert squatter.registration["withheld"] == ["G0"]
    (device,) = on.v1.sql("select worker, host, vram_mb from gangq.devices")
    assert device == {"worker": "w1", "host": "h", "vram_mb": 8000}
    assert on.v1.value("select login from gangq.workers where name = 'w1'") == "w1_test"
    del worker


def test_what_finds_a_workers_processes_is_told_to_its_login_the_host_and_admins(on: Logins) -> None:
    worker = on.w1.worker("w1", identity={"mark": SECRET})
    on.s1.submit()
    claim = worker.take()
    on.q.later(80)
    on.w2.call("flag_dead_workers")
    for q, shown in ((on.w1, True), (on.h1, True), (on.a1, True), (on.w2, False), (on.v1, False)):
        assert (SECRET in str(q.sql("select * from gangq.flagged"))) == shown
    claim.trip(exit_in_s=5)
    for verb in ("predecessor", "unproven"):
        for q, shown in ((on.w1, True), (on.h1, True), (on.a1, True), (on.w2, False)):
            assert (SECRET in str(q.call(verb, worker="w1"))) == shown
    assert on.w2.call("predecessor", worker="w1")[0]["state"] == "dead"
    on.h1.call("report_dead", worker="w1", incarnation=worker.incarnation, evidence={"by": "the host"})
    assert last_event(on.q, "dead")["actor"] == "h1_test"


def test_the_bouncers_login_does_all_that_a_bouncer_does(on: Logins) -> None:
    worker = on.w1.worker("w1")
    on.s1.submit(payloads=[{"password": SECRET}])
    worker.take()
    on.q.later(40)
    on.h1.call("flag_dead_workers")
    on.h1.tick()
    (row,) = on.h1.sql("select * from gangq.flagged")
    assert row["worker"] == "w1"
    for view in ("jobs", "gangs", "workers", "devices", "events", "settings", "queues"):
        assert SECRET not in str(on.h1.sql(f"select * from gangq.{view}"))
    assert on.h1.one("bounce", incarnation=worker.incarnation, host="host-w1") == "go"
    on.h1.call("bounced", incarnation=worker.incarnation, ok=False)
    for verb, named in (
        ("submit", {"task": "x"}),
        ("cancel", {"job_ids": [1]}),
        ("heartbeat", {"incarnation": 1}),
    ):
        with refused(NOT_ALLOWED):
            on.h1.call(verb, **named)

"""The clients: same methods, typed errors, the caller's transaction, and a database that comes and goes."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import select
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any, get_args, get_type_hints

import psutil
import psycopg
import pytest
from psycopg.rows import dict_row

from databases import OwnServer
from gangq.cli import queries
from gangq.client import AsyncClient, Client, core, rows
from gangq.client.base import Attempts
from gangq.client.encoding import dumps
from gangq.client.options import SubmitGangOptions, SubmitOptions
from gangq.client.settings import QueueSettings, TaskSettings
from gangq.client.sync import Connection
from gangq.client.verb import InSteps, Query, Steps, Verb, View
from gangq.client.verbs import Verbs
from gangq.embedded import Server
from gangq.errors import (
    Busy,
    DatabaseUnreachable,
    GangqError,
    InvalidInput,
    NotAllowed,
    NotFound,
    NotSerializable,
    SchemaMismatch,
    StaleToken,
    TooLarge,
    WorkerNameTaken,
    WrongIsolation,
)

VERBS: list[str] = [name for name in dir(Verbs) if isinstance(getattr(Verbs, name), Verb)]
SECRET = "s3cret/pa:ss@word"


def register(client: Client, name: str = "w1", **more: Any) -> int:
    return client.register_worker(name=name, host="h1", queues=["default"], **more).incarnation


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


# Parity and the contract with the schema


@pytest.mark.parametrize("name", VERBS)
def test_both_clients_have_every_verb_with_the_same_parameters(name: str) -> None:
    sync, aio = getattr(Client, name), getattr(AsyncClient, name)
    assert inspect.signature(sync) == inspect.signature(aio)
    assert inspect.iscoroutinefunction(aio)
    assert not inspect.iscoroutinefunction(sync)
    assert sync.__doc__ == aio.__doc__ == getattr(Verbs, name).__doc__


def test_both_clients_have_the_same_public_surface() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert (
        inspect.signature(Client.__init__).parameters.keys()
        == inspect.signature(AsyncClient.__init__).parameters.keys()
    )


def test_every_argument_of_a_verb_is_an_argument_of_its_sql_function(db: psycopg.Connection[Any]) -> None:
    found = {
        row["proname"]: dict(zip(row["names"] or [], row["types"], strict=True))
        for row in db.execute(
            "select proname, proargnames[1:pronargs] as names, "
            "array(select format_type(t, null) from unnest(proargtypes) t) as types "
            "from pg_proc where pronamespace = 'gangq'::regnamespace"
        )
    }
    spelled = {"timestamptz": "timestamp with time zone"}
    hidden = {"wake", "parent", "parent_token"}
    checked = 0
    for name in VERBS:
        if name not in found:
            continue
        verb = getattr(Verbs, name)
        if isinstance(verb, InSteps):
            continue
        sent = {a.rstrip("_"): spelled.get(kind := of.type, kind) for a, of in verb.types.items()}
        # The client asks for pages of the default size.
        left_out = hidden | ({"most"} if name == "retry_failed" else set())
        theirs = {argument: kind for argument, kind in found[name].items() if argument not in left_out}
        assert sent == theirs, name
        checked += 1
    assert checked >= 34


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        (QueueSettings, "gangq.queues_table"),
        (TaskSettings, "gangq.task_settings"),
    ],
)
def test_every_setting_is_a_column_that_is_no_key_and_not_made_by_others(
    db: psycopg.Connection[Any], settings: type, table: str
) -> None:
    columns = db.execute(
        "select name, needed and type <> 'jsonb'::regtype as needed from gangq.settable(%s::regtype)",
        (table,),
    ).fetchall()
    hints = get_type_hints(settings)
    assert {c["name"] for c in columns} == hints.keys()
    assert {c["name"] for c in columns if not c["needed"]} == {
        name for name, hint in hints.items() if type(None) in get_args(hint)
    }


def test_a_tick_from_python_decides_unless_it_is_told_otherwise() -> None:
    assert Verbs.tick().params == {"decides": True}
    assert Verbs.tick(decides=False).params == {"decides": False}


def test_what_a_call_leaves_unsaid_the_database_fills_in_as_its_signature_says(
    db: psycopg.Connection[Any],
) -> None:
    checked = 0
    for name in VERBS:
        verb = getattr(Verbs, name)
        defaults = {
            row["name"]: db.execute(f"select {row['expression']} as value").fetchone()["value"]
            for row in db.execute(
                "select proargnames[n] as name, pg_get_function_arg_default(oid, n) as expression "
                "from pg_proc cross join generate_series(1, pronargs) as n "
                "where pronamespace = 'gangq'::regnamespace and proname = %s",
                (name,),
            )
            if row["expression"] is not None
        }
        for argument in [] if isinstance(verb, (InSteps, View)) else verb.types:
            ours = verb.parameters[argument].default
            if ours is inspect.Parameter.empty or (name, argument) == ("tick", "decides"):
                continue
            theirs = defaults[argument.rstrip("_")]
            assert ours is None or (list(ours) if isinstance(ours, tuple) else ours) == theirs, (
                name,
                argument,
            )
            checked += 1
    assert checked > 50


def sent(**given: Any) -> tuple[set[str], set[str]]:
    """The arguments and the options that a submission sends."""
    params = Verbs.submit(**given).params
    return set(params), set(json.loads(params.get("options", "{}")))


def test_steps_may_wait_a_whole_number_of_seconds() -> None:
    def waits() -> Steps[str]:
        yield 0
        return "waited"

    with Client("") as client:
        assert client.execute(waits()) == "waited"


def test_an_option_that_is_usual_is_not_sent() -> None:
    usual: dict[str, Any] = {**dict.fromkeys(SubmitOptions.__annotations__), "wait_for_hardware": False}
    assert sent(task="t", **usual)[1] == {"wake"}
    connection = object()
    assert sent(task="t", connection=connection, **usual) == ({"task"}, set())
    assert sent(task="t", connection=connection, cpus=0)[1] == {"cpus"}
    gang = Verbs.submit_gang(task="t", size=2, connection=connection, balanced=False, preemptible=True)
    assert gang.params == {"task": "t", "size": 2}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cpus": float("nan")}, "cpus has nan"),
        ({"budget_s": float("inf")}, "budget_s has inf"),
        ({"labels": {"gpu": object()}}, "labels has object"),
        ({"tolerates": "spot"}, "tolerates is 'spot'"),
        ({"memory_mb": object()}, "memory_mb has object"),
    ],
)
def test_an_option_that_is_no_json_is_refused_by_name_before_it_is_sent(options: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        Verbs.submit(task="t", **options)


@pytest.mark.parametrize(
    ("verb", "given", "said"),
    [
        (
            Verbs.submit,
            {"task": "a", "gpus": 3_000_000_000},
            "gpus is 3000000000: the database takes -2147483648 to 2147483647 at most",
        ),
        (Verbs.set_service, {"name": "s", "replicas": 2**31}, "replicas is 2147483648: "),
        (Verbs.set_priority, {"job_ids": [1], "priority": -(2**31) - 1}, "priority is -2147483649: "),
        (Verbs.set_limit, {"key": "k", "most": 2**31}, "most is 2147483648: "),
        (Verbs.jobs, {"limit": 2**63}, "limit is 9223372036854775808: "),
        (Verbs.explain_job, {"job_id": 2**63}, "job_id is 9223372036854775808: "),
        (Verbs.jobs, {"ids": [1, 2**63]}, "one of ids is 9223372036854775808: "),
        (Verbs.cancel, {"job_ids": [1, -(2**63) - 1]}, "one of job_ids is -9223372036854775809: "),
        (Verbs.submit, {"task": "a", "after": [2**63]}, "one of after is 9223372036854775808: "),
        (Verbs.submit, {"task": "a", "after_any": [2**63]}, "one of after_any is 9223372036854775808: "),
        (
            Verbs.submit,
            {"task": "a", "indexes": [2**31]},
            "one of indexes is 2147483648: the database takes -2147483648 to 2147483647 at most",
        ),
        (queries.newest_events, {"limit": 2**63}, "limit is 9223372036854775808: "),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", None)),
)
def test_a_number_that_no_integer_holds_is_refused_by_name_before_it_is_sent(
    verb: Any, given: Any, said: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{re.escape(said)}"):
        verb(**given)


def test_the_database_refuses_an_option_that_there_is_not(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r"submit has no option 'memory_md'.*Did you mean memory_mb"):
        client.submit(task="t", memory_md=1)  # type: ignore[call-arg]


def test_numbers_of_other_kinds_are_numbers(client: Client) -> None:
    class Scalar:
        """As numpy's."""

        def item(self) -> int:
            return 7

    (job,) = client.submit(task="t", memory_mb=Scalar(), cpus=Decimal("0.5"), vram_mb=16e3, gpus=1)  # type: ignore[arg-type]
    row = client.job(id=job)
    assert (row.memory_mb, row.cpus, row.vram_mb) == (7, 0.5, 16000)


@pytest.mark.parametrize(
    ("options", "type_name"),
    [
        (SubmitOptions, "gangq.job_options"),
        (SubmitGangOptions, "gangq.gang_options"),
    ],
)
def test_every_option_is_one_of_the_sql_function(
    db: psycopg.Connection[Any], options: type, type_name: str
) -> None:
    theirs = {
        row["name"]
        for row in db.execute("select name from gangq.settable(%s::regtype)", (type_name,)).fetchall()
    }
    assert get_type_hints(options).keys() == theirs - {"wake", "parent", "parent_token", "trace"}


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.jobs(ids=[1], state="done", queue="q", task="t", gang_id=1, worker="w", limit=1),
        lambda c: c.jobs(state=["done", "failed"]),
        lambda c: c.gangs(ids=[1], state="done", queue="q", limit=1),
        lambda c: c.workers(name="w", host="h"),
        lambda c: c.devices(host="h", state="free"),
        lambda c: c.waiting(queue="q", limit=1),
        lambda c: c.timeline(gang_id=1),
        lambda c: c.drains(gang_id=1, limit=1),
        lambda c: c.violations(),
        lambda c: c.retention(class_="none"),
        lambda c: c.events(job_id=1, gang_id=1, kind="k", after_id=1, limit=1),
        lambda c: c.logs(job_id=1, token=1, after_seq=0),
    ],
)
def test_every_view_has_the_columns_its_row_names(
    client: Client, call: Callable[[Client], list[Any]]
) -> None:
    assert call(client) == []


def test_queues_are_rows_with_their_settings(client: Client) -> None:
    client.set_queue(name="gpu", max_attempts=7, budget_s=60.0)
    assert [queue.name for queue in client.queues()] == ["default", "gpu"]
    assert client.queues(name="gpu")[0].max_attempts == 7
    limits: dict[str, Any] = {
        "draining": True,
        "guaranteed": {"gpus": 1},
        "maximum": {"gpus": 2, "cpus": 0.5},
        "weight": 2.0,
        "max_running_gangs": 3,
        "max_running_jobs": 4,
        "submitter_maximum": {"jobs": 5},
        "placement_timeout_s": 6.0,
        "timeout_style": "soft",
        "preempts": False,
        "preemptible": False,
        "min_run_s": 7.0,
    }
    client.set_queue(name="gpu.train", **limits)
    (train,) = client.queues(name="gpu.train")
    assert {key: getattr(train, key) for key in limits} == limits
    assert (train.depth, train.paused_by, train.used_cpus, train.waiting_jobs) == (1, None, 0.0, 0)
    client.set_queue(name="gpu.train", maximum=None, max_running_jobs=None)
    (train,) = client.queues(name="gpu.train")
    assert (train.maximum, train.max_running_jobs, train.max_running_gangs) == ({}, None, 3)
    client.configure(lease_s=99.0, retention_short=timedelta(days=3))
    assert client.register_worker(name="w", host="h", queues=["gpu"]).lease_granted_s == 99.0


# A job's life through the sync client


def test_a_job_goes_from_submit_to_done_and_its_rows_say_so(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    first, second = client.submit(task="t", payloads=[{"n": 1}, {"n": 2}], priority=5, cpus=0.5)
    worker = register(client, cpus=4)
    client.tick(force=True)
    request = uuid.uuid4()
    (claim,) = client.claim(incarnation=worker, request_id=request)
    assert (claim.job_id, claim.payload, claim.attempt, claim.devices) == (first, {"n": 1}, 1, [])
    assert not claim.light
    assert client.claim(incarnation=worker, request_id=request) == [claim]
    (told,) = client.heartbeat(incarnation=worker, job_ids=[first], tokens=[claim.token], beats=[{"step": 3}])
    assert (told.action, told.job_id) == ("continue", first)
    assert client.job(id=first).progress == {"step": 3}
    client.save_checkpoint(job_id=first, token=claim.token, step=3, data=b"\x00\xff")
    saved = client.load_checkpoint(job_id=first, token=claim.token)
    assert saved is None or (saved.step, saved.data) == (3, b"\x00\xff")
    client.append_log(job_ids=[first], tokens=[claim.token], seqs=[0], chunks=["a\x00b"])
    assert client.logs(job_id=first)[0].chunk == "a\ufffdb"
    done = client.complete(job_ids=[first], tokens=[claim.token], results=[{"ok": True}])
    assert done == [rows.Outcome(first, "done")]
    assert client.complete(job_ids=[first], tokens=[claim.token])[0].outcome == "repeated"
    row = client.job(id=first)
    assert (row.state, row.result, row.cpus) == ("done", {"ok": True}, 0.5)
    assert client.job_states(ids=[first, second, 10**6]) == {first: "done", second: "pending"}
    assert client.cancel(job_ids=[second])[0].state == "cancelled"
    assert client.retry(job_ids=[second])[0].state == "pending"
    client.retire_worker(incarnation=worker)
    assert client.violations() == []


def test_a_failed_attempt_keeps_its_error_and_a_trip_and_a_release_are_told_apart(client: Client) -> None:
    client.submit(task="t", payloads=[{}, {}, {}], max_attempts=1)
    worker = register(client, slots=3, light=3)
    one, two, three = client.claim(incarnation=worker, max_jobs=3)
    error = {"type": "ValueError", "message": "no"}
    assert client.fail(job_id=one.job_id, token=one.token, error=error) == "failed"
    assert client.job(id=one.job_id).error == error
    assert isinstance(client.call("requeue", job_id=two.job_id, token=two.token, error=error), str)
    assert client.release(job_ids=[three.job_id], tokens=[three.token])[0].outcome == "released"
    assert isinstance(client.tick(force=True), rows.TickReport)
    assert all(isinstance(reason, rows.Reason) for reason in client.explain_job(job_id=three.job_id))


def test_a_gang_is_submitted_reserved_claimed_and_explained(client: Client) -> None:
    gang = client.submit_gang(task="t", size=2, payloads=[{"r": 0}, {"r": 1}], name="pair")
    assert len(gang.job_ids) == 2
    assert client.explain_gang(gang_id=gang.gang_id)
    workers = [register(client, f"w{i}") for i in range(2)]
    client.tick(force=True)
    assert client.gang(id=gang.gang_id).state == "reserved"
    claims = [client.claim(incarnation=worker, ports=[29500 + i])[0] for i, worker in enumerate(workers)]
    members = client.barrier(job_id=claims[0].job_id, token=claims[0].token)
    assert [member.rank for member in members] == [0, 1]
    assert all(member.go for member in members)
    outcomes = client.complete(
        job_ids=[claim.job_id for claim in claims],
        tokens=[claim.token for claim in claims],
        results=[0, None],
    )
    assert [o.outcome for o in outcomes] == ["done", "done"]
    assert client.gang_states(ids=[gang.gang_id]) == {gang.gang_id: "done"}
    assert {step.what for step in client.timeline(gang_id=gang.gang_id)} >= {"submit", "reserve"}
    assert client.violations() == []


def test_devices_are_read_with_their_types(client: Client) -> None:
    offered = [{"uuid": "GPU-1", "index": 0, "vram_mb": 24576, "model": "x", "source": "declared"}]
    register(client, slots=2, devices=offered, memory_mb=1024, cpus=2.5)
    (device,) = client.devices()
    assert (device.uuid, device.state) == ("GPU-1", "free")
    client.quarantine(device_uuid="GPU-1", reason="hot")
    assert client.devices(state="quarantined")[0].reason == "hot"
    client.unquarantine(device_uuid="GPU-1")
    (worker,) = client.workers()
    assert (worker.name, worker.cpus, worker.gpus) == ("w1", 2.5, 1)


def test_hosts_are_cordoned_drained_and_left(client: Client) -> None:
    incarnation = register(client)
    (job,) = client.submit(task="t")
    (claim,) = client.claim(incarnation=incarnation)
    (worker,) = client.workers()
    deadline = datetime(2999, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidInput, match=r"deadline is 2999.* without a time zone"):
        client.cordon(host=worker.host, drain=True, deadline=deadline.replace(tzinfo=None))
    client.cordon(host=worker.host, drain=True, deadline=deadline, reason="fan")
    (found,) = client.cordoned(kind="host", name=worker.host)
    assert (found.state, found.jobs, found.deadline, found.workers) == ("draining", [job], deadline, 1)
    assert client.workers()[0].cordoned == "fan"
    assert client.call("displace_job", job_id=job) is True
    assert client.ack_preempted(job_id=job, token=claim.token) == "pending"
    assert client.cordoned()[0].state == "drained"
    client.uncordon(host=worker.host)
    assert client.cordoned() == []


# Errors


def test_each_sqlstate_becomes_its_exception_with_the_hint(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    with pytest.raises(InvalidInput, match=r"priority.*2000.*-1000 to 1000"):
        client.submit(task="t", priority=2000)
    with pytest.raises(NotFound, match="nowhere"):
        client.submit(task="t", queue="nowhere")
    with pytest.raises(TooLarge):
        client.submit(task="t", payloads=[{"x": "y" * 2_000_000}])
    with pytest.raises(StaleToken):
        client.complete(job_ids=client.submit(task="t"), tokens=[1])
    with pytest.raises(NotFound, match="job 12345 does not exist"):
        client.job(id=12345)
    with pytest.raises(NotFound, match="gang g12345 does not exist"):
        client.gang(id=12345)


def test_a_taken_worker_name_tells_who_holds_it(client: Client) -> None:
    live = register(client, boot_id="b", pid=77, identity={"start": 1})
    with pytest.raises(WorkerNameTaken, match="w1") as caught:
        register(client)
    holder = caught.value.holder
    assert (holder["incarnation"], holder["pid"], holder["identity"]) == (live, 77, {"start": 1})
    assert client.report_dead(worker="w1", incarnation=live, evidence={"by": "test"}) == 0
    assert register(client) > live


def test_a_login_without_a_role_is_told_which_to_ask_for(
    server: Server, dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute("create role nobody_special login")
    try:
        with (
            Client(dsn, user="nobody_special") as outsider,
            pytest.raises(NotAllowed, match="gangq_submitter"),
        ):
            outsider.submit(task="t")
        with (
            Client(dsn, user="nobody_special") as outsider,
            pytest.raises(NotAllowed, match="gangq_notifier"),
        ):
            outsider.fetch_notification(target="oncall")
    finally:
        db.execute("drop role nobody_special")


def test_a_database_without_the_schema_says_migrate(empty_dsn: str) -> None:
    with Client(empty_dsn) as client, pytest.raises(SchemaMismatch, match="gangq migrate"):
        client.submit(task="t")


def test_a_locked_row_is_busy_and_retryable(client: Client, dsn: str) -> None:
    (job,) = client.submit(task="t")
    with psycopg.connect(dsn) as other:
        other.execute("select 1 from gangq.live_jobs where id = %s for update", (job,))
        with pytest.raises(Busy) as caught:
            client.cancel(job_ids=[job])
    assert caught.value.retryable


def test_claim_in_a_serializable_session_is_refused(dsn: str) -> None:
    with Client(dsn) as client:
        worker = register(client)
        with psycopg.connect(dsn) as conn:
            conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
            query = Verbs.claim(incarnation=worker)
            with pytest.raises(WrongIsolation):
                client.execute(Query(query.name, query.text, query.params, query.read, conn))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"x", r"bytes at \$,"),
        ({"a": [1, {"b": {1, 2}}]}, r"set at \$\.a\[1\]\.b"),
        ({"a": float("nan")}, r"nan at \$\.a"),
        ({"a": float("inf")}, r"inf at \$\.a"),
        ({1: 2}, r"key of type int \(1\) at \$"),
        ({"a": datetime(2026, 1, 1)}, r"datetime\.datetime at \$\.a"),
        ({"a": "b\x00"}, r"at \$\.a that PostgreSQL cannot store"),
        ({"a": ["\ud800"]}, r"at \$\.a\[0\] that PostgreSQL cannot store"),
    ],
)
def test_what_is_not_json_is_refused_with_its_type_and_path(value: object, said: str) -> None:
    with pytest.raises(NotSerializable, match=said):
        dumps(value, "result")


def test_a_value_that_contains_itself_or_is_too_deep_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotSerializable, match="contains itself"):
        dumps(loop, "result")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotSerializable, match="nested too deeply"):
        dumps(deep, "result")
    shared = [1]
    assert dumps([shared, shared], "result") == "[[1],[1]]"


def test_a_payload_survives_the_way_there_and_back(client: Client) -> None:
    payload = {"ü": ["\u2028", "😀", "%s %(x)s", "'\"\\", 2**60, -0.5, None, True, {}]}
    (job,) = client.submit(task="t", payloads=[payload])
    assert client.job(id=job).payload == payload


@pytest.mark.parametrize("ids", ["12", "", b"12", 12])
def test_a_string_or_a_number_is_no_list_of_jobs(client: Client, ids: Any) -> None:
    client.submit(task="t", payloads=[{}, {}])
    for call in (client.cancel, client.retry):
        with pytest.raises(InvalidInput, match=r"job_ids is .*: pass a list of whole numbers"):
            call(job_ids=ids)
    assert {job.state for job in client.jobs()} == {"pending"}


def test_a_string_is_no_list_of_queues_and_a_naive_time_is_no_time(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r"\['gpu'\]"):
        client.register_worker(name="w", host="h", queues="gpu")
    with pytest.raises(InvalidInput, match="time zone"):
        client.submit(task="t", due_at=datetime(2030, 1, 1))
    (job,) = client.submit(task="t", due_at=datetime.now(UTC) + timedelta(hours=1))
    assert client.job(id=job).state == "scheduled"
    with pytest.raises(InvalidInput, match="payloads for each"):
        client.submit_gang(task="t", size=1, payload={}, payloads=[{}])


# The caller's transaction


def count(client: Client) -> int:
    return len(client.jobs())


def test_submit_in_the_callers_psycopg_transaction_commits_and_rolls_back_with_it(
    client: Client, dsn: str
) -> None:
    with psycopg.connect(dsn) as conn:
        client.submit(task="t", connection=conn)
        assert count(client) == 0
        conn.rollback()
        assert count(client) == 0
        with conn.cursor() as cursor:
            (job,) = client.submit(task="t", connection=cursor)
        made = client.submit_gang(task="t", size=2, connection=conn)
        assert conn.info.transaction_status is psycopg.pq.TransactionStatus.INTRANS
        conn.commit()
    assert client.job(id=job).state == "pending"
    assert client.gang(id=made.gang_id).state == "blocked"


def test_complete_and_cancel_commit_with_the_callers_transaction(client: Client, dsn: str) -> None:
    client.submit(task="t", payloads=[{}, {}])
    (claim,) = client.claim(incarnation=register(client))
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        client.complete(job_ids=[claim.job_id], tokens=[claim.token], connection=conn)
        conn.rollback()
        assert client.job(id=claim.job_id).state == "running"
        client.complete(job_ids=[claim.job_id], tokens=[claim.token], results=[1], connection=conn)
        client.cancel(job_ids=[claim.job_id + 1], connection=conn)
    assert client.job(id=claim.job_id).state == "done"
    assert client.job(id=claim.job_id + 1).state == "cancelled"


def engine_url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://")


def test_submit_in_a_sqlalchemy_connection_and_session(client: Client, dsn: str) -> None:
    import sqlalchemy
    from sqlalchemy.orm import Session

    engine = sqlalchemy.create_engine(engine_url(dsn))
    with engine.connect() as connection:
        client.submit(task="t", connection=connection)
        connection.commit()
        assert count(client) == 1
        client.submit(task="t", connection=connection)
        connection.rollback()
    assert count(client) == 1
    with Session(engine) as session:
        client.submit(task="t", connection=session)
        session.commit()
        assert count(client) == 2
        client.submit(task="t", connection=session)
    with engine.begin() as connection:
        client.submit(task="t", connection=connection)
    assert count(client) == 3
    engine.dispose()


def test_submit_in_djangos_transaction(client: Client, dsn: str) -> None:
    from django.conf import settings
    from django.db import connections, transaction

    given = psycopg.conninfo.conninfo_to_dict(dsn)
    here = {"NAME": given["dbname"], "USER": given["user"], "HOST": given["host"], "PORT": given["port"]}
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **here}})
    wrapper = connections["default"]
    with transaction.atomic():
        client.submit(task="t", payloads=[{"a": "it's 100%"}], connection=wrapper)
        assert count(client) == 0
    assert client.jobs()[0].payload == {"a": "it's 100%"}
    with transaction.atomic():
        client.submit(task="t", connection=wrapper)
        transaction.set_rollback(True)
    assert count(client) == 1
    wrapper.close()


def test_a_connection_of_another_kind_is_refused_by_name(client: Client) -> None:
    import sqlite3

    other = sqlite3.connect(":memory:")
    with pytest.raises(InvalidInput, match=r"sqlite3\.Connection.*psycopg 3"):
        client.submit(task="t", connection=other)
    other.close()


def test_an_async_connection_is_refused_by_the_sync_client(client: Client, dsn: str) -> None:
    async def attempt() -> None:
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            with pytest.raises(InvalidInput, match="AsyncConnection"):
                client.submit(task="t", connection=conn)

    asyncio.run(attempt())


def test_the_async_client_in_the_callers_transaction(client: Client, dsn: str) -> None:
    async def attempt() -> None:
        async with AsyncClient(dsn) as aio:
            async with await psycopg.AsyncConnection.connect(dsn) as conn:
                await aio.submit(task="t", connection=conn)
                await conn.rollback()
                await aio.submit(task="t", connection=conn)
            with psycopg.connect(dsn) as sync, pytest.raises(InvalidInput, match="async psycopg"):
                await aio.submit(task="t", connection=sync)
            assert len(await aio.jobs()) == 1

    asyncio.run(attempt())


def test_the_async_client_in_sqlalchemys_async_transactions(client: Client, dsn: str) -> None:
    pytest.importorskip("greenlet", reason="SQLAlchemy's asyncio needs it")
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    async def attempt() -> None:
        engine = create_async_engine(engine_url(dsn))
        async with AsyncClient(dsn) as aio:
            async with engine.connect() as connection:
                await aio.submit(task="t", connection=connection)
                await connection.commit()
                await aio.submit(task="t", connection=connection)
            async with AsyncSession(engine) as session:
                await aio.submit(task="t", connection=session)
                await session.commit()
                await aio.submit(task="t", connection=session)
            assert len(await aio.jobs()) == 2
        await engine.dispose()

    asyncio.run(attempt())


def test_the_async_client_gives_the_same_rows_and_errors(client: Client, dsn: str) -> None:
    async def attempt() -> None:
        async with AsyncClient(dsn) as aio:
            (job,) = await aio.submit(task="t", payloads=[{"n": 1}])
            assert await aio.job(id=job) == client.job(id=job)
            with pytest.raises(InvalidInput):
                await aio.submit(task="t", priority=5000)
            await asyncio.gather(*(aio.submit(task="t") for _ in range(20)))
            assert len(await aio.jobs()) == 21
            listener = await aio.connect_listener()
            assert listener.autocommit
            await listener.close()

    asyncio.run(attempt())


# Connections


class _Counted(AsyncClient):
    connections = 0

    async def _connect(self, **more: Any) -> Any:
        self.connections += 1
        return await super()._connect(**more)


def test_a_hundred_first_calls_at_once_try_the_server_once(client: Client, dsn: str) -> None:
    async def attempt() -> tuple[int, int]:
        async with _Counted(dsn) as aio:
            await asyncio.gather(*(aio.submit(task="t") for _ in range(100)))
        nobody = _Counted("host=127.0.0.1 port=9 dbname=jobs")
        refused = await asyncio.gather(*(nobody.job(id=1) for _ in range(100)), return_exceptions=True)
        assert {type(problem) for problem in refused} == {DatabaseUnreachable}
        return aio.connections, nobody.connections

    assert asyncio.run(attempt()) == (1, 1)
    assert len(client.jobs(limit=200)) == 100


def test_the_first_call_may_be_cancelled_while_others_wait_for_its_connection(dsn: str) -> None:
    async def attempt() -> int:
        async with AsyncClient(dsn) as aio:
            calls = [asyncio.create_task(aio.submit(task="t")) for _ in range(5)]
            await asyncio.sleep(0)
            calls[0].cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert isinstance(done[0], asyncio.CancelledError)
            return len(await aio.jobs())

    assert asyncio.run(attempt()) == 4


def test_nothing_of_a_closed_client_is_left_to_the_event_loop(dsn: str) -> None:
    async def attempt() -> set[asyncio.Task[Any]]:
        await AsyncClient(dsn).close()
        aio = AsyncClient(dsn)
        call = asyncio.create_task(aio.submit(task="t"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert len(asyncio.all_tasks()) > 1, "it goes on connecting"
        await aio.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(attempt()) == set()


def test_a_connection_that_was_tried_has_no_deadline_when_it_is_lent(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangq.client.core.doubtful", lambda *_: True)

    async def attempt() -> None:
        async with AsyncClient(dsn, connect_s=0.2) as aio, aio.connection() as conn:
            await conn.execute("select pg_sleep(0.5)")

    asyncio.run(attempt())
    with Client(dsn, connect_s=0.2) as client, client.connection() as conn:
        conn.execute("select pg_sleep(0.5)")


def test_a_call_survives_a_connection_that_the_server_ended(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    client.submit(task="t")
    db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )
    # Told to end is not ended: the line is seen to be cut once the backend is gone.
    deadline = time.monotonic() + 10
    while db.execute(
        "select 1 from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    ).fetchone():
        assert time.monotonic() < deadline
    client.submit(task="t")
    assert count(client) == 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backends of connections that were tried before they were lent."""
    tried: list[int] = []

    def try_it(conn: Connection, used_at: float) -> bool:
        found = doubtful(conn, used_at)
        if found:
            tried.append(conn.info.backend_pid)
        return found

    doubtful = core.doubtful
    monkeypatch.setattr("gangq.client.core.doubtful", try_it)
    return tried


def test_a_connection_is_tried_before_it_is_lent_only_after_a_second_of_rest(
    dsn: str, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(dsn, max_size=1) as client:
        ours = backend(client)
        now = time.time()
        monkeypatch.setattr("gangq.client.core.time.time", lambda: now)
        backend(client)
        asked.clear()
        now += 0.9
        assert backend(client) == ours
        assert asked == []
        now += 1.0
        assert backend(client) == ours
        assert asked == [ours]
        now -= 3600  # A clock that was put back tells nothing about rest.
        assert backend(client) == ours
        assert asked == [ours, ours]


def test_a_connection_that_the_server_has_just_ended_is_not_lent(
    dsn: str, asked: list[int], db: psycopg.Connection[Any]
) -> None:
    with Client(dsn, max_size=1) as client:
        ours = backend(client)
        with client.connection() as conn:
            socket = conn.fileno()
        asked.clear()
        db.execute("select pg_terminate_backend(%s)", (ours,))
        eventually(lambda: bool(select.select([socket], [], [], 0)[0]))
        assert client.execute(Verbs.job_states(ids=[])) == {}
        assert asked[0] == ours
        assert backend(client) != ours


def test_a_client_of_asyncio_does_not_lend_a_connection_just_ended_either(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async def attempt() -> None:
        async with AsyncClient(dsn, max_size=1) as aio:
            async with aio.connection() as conn:
                ours, socket = conn.info.backend_pid, conn.fileno()
            async with aio.connection() as conn:
                assert conn.info.backend_pid == ours
            db.execute("select pg_terminate_backend(%s)", (ours,))
            eventually(lambda: bool(select.select([socket], [], [], 0)[0]))
            assert await aio.jobs() == []

    asyncio.run(attempt())


def test_who_waits_for_the_only_connection_gets_it_before_the_one_that_gave_it_back(dsn: str) -> None:
    got = []
    with Client(dsn, max_size=1) as client, ThreadPoolExecutor() as pool:
        with client.connection() as conn:
            ours = conn.info.backend_pid
            waits = pool.submit(lambda: got.append(("waits", backend(client))))
            eventually(lambda: client._pool.get_stats()["requests_waiting"])
        got.append(("again", backend(client)))
        waits.result(10)
    assert got == [("waits", ours), ("again", ours)]


def test_a_call_amid_another_of_its_thread_does_not_wait_for_it(dsn: str) -> None:
    with Client(dsn, max_size=1) as client:
        with client.connection() as conn:
            ours = conn.info.backend_pid
            with client.connection() as other:  # As from the handler of a signal.
                assert other.info.backend_pid != ours
            assert other.closed
            assert conn.execute("select 1").fetchone() == (1,)
        assert backend(client) == ours


def test_a_client_that_is_closed_while_a_call_waits_for_a_connection_says_so(dsn: str) -> None:
    client = Client(dsn, max_size=1)
    with ThreadPoolExecutor() as pool:
        with client.connection() as conn:
            waits = pool.submit(backend, client)
            eventually(lambda: client._pool.get_stats()["requests_waiting"])
            client.close()
            assert conn.execute("select 1").fetchone() == (1,)
        with pytest.raises(DatabaseUnreachable, match="was closed while this call waited"):
            waits.result(10)
    assert conn.closed
    assert client.job_states(ids=[]) == {}
    client.close()


@pytest.mark.own_database  # A kept one's backends outlive the connections to them.
def test_those_that_were_idle_when_a_connection_fell_silent_are_not_lent_again(dsn: str) -> None:
    with Client(dsn, min_size=2, max_size=2, timeout_s=2) as client:
        with client.connection() as one, client.connection() as other:
            idle = {one.info.backend_pid, other.info.backend_pid}
        with psycopg.connect(dsn) as locker:
            locker.execute("lock table gangq.jobs in access exclusive mode")
            with pytest.raises(DatabaseUnreachable, match=r"no answer came in 2 s"):
                client.jobs()
        assert not {backend(client), backend(client)} & idle


def test_empty_objects_and_lists_of_the_database_are_nobody_elses(client: Client) -> None:
    client.submit(task="t", payloads=[{}, {}, {"a": []}])
    first, second, third = sorted(client.jobs(), key=lambda row: row.id)
    first.payload["mine"] = 1
    assert second.payload == {}
    assert third.payload == {"a": []}
    with client.connection() as conn:
        found = conn.execute(
            "select '[]'::jsonb, '[]'::jsonb, '{}'::json, 'null'::jsonb, '[1]'::json"
        ).fetchone()
        assert found == ([], [], {}, None, [1])
        assert found[0] is not found[1]


def test_a_submission_arrives_as_it_was_said_however_many_came_before(dsn: str) -> None:
    due = datetime.now(UTC) + timedelta(days=1)
    with Client(dsn, max_size=1) as client:
        first = client.submit(task="first")
        for number in range(8):
            (id,) = client.submit(
                task='quote " back \\ slash {,} ü',
                payloads=[{"n": number, "text": 'quote " back \\ slash'}],
                cpus=number + 0.5,
                labels={"a": "b"},
                due_at=due,
                budget_s=1.5,
                after=[*first, *first],
                selector="zone=a",
                tolerates=["spot", "t=1"],
            )
            job = client.job(id=id)
            assert (job.task, job.payload["n"], job.cpus) == (
                'quote " back \\ slash {,} ü',
                number,
                number + 0.5,
            )
            assert (job.due_at, job.budget_s, job.labels) == (due, 1.5, {"a": "b"})
            with pytest.raises(InvalidInput, match="cpus is -1"):
                client.submit(task="t", cpus=-1)


def test_words_and_numbers_of_an_enumeration_are_what_they_stand_for(dsn: str) -> None:
    class Word(StrEnum):
        TASK = "train"

    class Number(IntEnum):
        HIGH = 7

    with Client(dsn, max_size=1) as client:
        (id,) = client.submit(task=Word.TASK, priority=Number.HIGH, memory_mb=1024 / 2)  # type: ignore[arg-type]
        job = client.job(id=id)
    assert (job.task, job.priority, job.memory_mb) == ("train", 7, 512)


def test_a_call_that_is_cut_off_says_that_its_effect_is_unknown(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    with pytest.raises(
        DatabaseUnreachable, match=r"during gangq\.submit; whether it took effect is unknown"
    ) as caught:
        with client.connection("gangq.submit") as conn:
            conn.execute("select pg_terminate_backend(pg_backend_pid())")
    assert caught.value.retryable


def test_a_submission_that_is_sent_again_and_refused_may_have_been_carried_out() -> None:
    attempts = Attempts(Client("dbname=d"), Verbs.submit(task="t"))
    attempts.begin()
    attempts.failed(psycopg.OperationalError("gone"))
    with pytest.raises(DatabaseUnreachable, match="unknown"):
        attempts.failed(NotAllowed("no"))


def test_a_call_is_sent_without_a_prepared_statement_once() -> None:
    attempts = Attempts(Client("dbname=d", prepare=True), Verbs.job(id=1))
    refused = psycopg.errors.InvalidSqlStatementName("there is no such statement")
    attempts.failed(refused)
    with pytest.raises(GangqError, match="no such statement"):
        attempts.failed(refused)


def test_no_submission_is_sent_again_after_its_time() -> None:
    attempts = Attempts(Client("dbname=d", timeout_s=0), Verbs.submit(task="t"))
    attempts.begin()
    with pytest.raises(DatabaseUnreachable, match="unknown"):
        attempts.failed(psycopg.OperationalError("gone"))


def test_clients_survive_a_crash_of_the_server_and_say_so_while_it_is_down(own_server: OwnServer) -> None:
    with own_server() as server:
        with Client(server.dsn("postgres"), timeout_s=1.0) as client:
            with client.connection() as conn:
                conn.execute("select 1")
            server.kill()
            said: list[str] = []

            def unreachable() -> bool:
                # A backend outlives its postmaster by a moment, and may still answer.
                try:
                    client.schema_version()
                except DatabaseUnreachable as e:
                    said.append(str(e))
                except SchemaMismatch:
                    return False
                return said[-1].startswith("cannot connect to database postgres at ") if said else False

            eventually(unreachable)
            server.start()

            def answers() -> bool:
                try:
                    with client.connection() as conn:
                        return conn.execute("select 1").fetchone() == (1,)
                except DatabaseUnreachable:
                    return False

            eventually(answers)


def test_an_exhausted_pool_is_not_called_an_unreachable_server(dsn: str) -> None:
    with (
        Client(dsn, max_size=1, timeout_s=0.2) as client,
        client.connection(),
        ThreadPoolExecutor() as others,
        pytest.raises(DatabaseUnreachable, match="the server answers: use a larger max_size"),
    ):
        others.submit(client.schema_version).result(10)


def test_a_database_that_is_down_is_named_at_once_and_its_password_never(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    quoted = SECRET.replace("/", "%2F").replace(":", "%3A").replace("@", "%40")
    client = Client(f"postgresql://ann:{quoted}@127.0.0.1:9/jobs")
    started = time.monotonic()
    with pytest.raises(DatabaseUnreachable) as caught:
        client.submit(task="t")
    assert time.monotonic() - started < 5
    said = str(caught.value)
    assert re.search(r"database jobs at 127\.0\.0\.1:9 as ann", said)
    assert "refused" in said
    shown = f"{caught.value!r} {said} {caught.value.__cause__} {client!r} {client.target!r} {caplog.text}"
    assert SECRET not in shown
    assert quoted not in shown

    async def attempt() -> None:
        with pytest.raises(DatabaseUnreachable, match=r"database jobs at 127\.0\.0\.1:9") as caught:
            await AsyncClient(f"host=127.0.0.1 port=9 dbname=jobs password={SECRET}").submit(task="t")
        assert SECRET not in str(caught.value)

    asyncio.run(attempt())


def test_a_connection_takes_no_longer_to_make_than_others_may_wait_for_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    connect = Connection.connect
    monkeypatch.setattr(
        Connection,
        "connect",
        lambda *args, **more: limits.append(more["connect_timeout"]) or connect(*args, **more),
    )
    for given in ("2", "0", "-1", "60"):
        with Client(dsn, max_size=1, timeout_s=3, connect_timeout=given) as client:
            client.job_states(ids=[])
    assert limits == [2, 2, 3, 3, 3, 3, 3, 3], "one that says why it fails, and the pool's"
    for given in ("soon", "2.5"):
        with pytest.raises(InvalidInput, match="connect_timeout"):
            Client(dsn, connect_timeout=given)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ann:a/secret@db/jobs",
        "secret",
        "host=db nonsense=secret",
        "postgresql://u:p%zzsecret@h/d",
        "postgresql://ann:7/secret@db/jobs",
    ],
)
def test_an_address_that_cannot_be_parsed_is_explained_without_quoting_it(dsn: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Client(dsn)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("sizes", [{"max_size": 0}, {"min_size": -1}])
def test_a_pool_without_connections_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="max_size"):
        Client("dbname=d", **sizes)


def test_an_option_that_nobody_has_is_named() -> None:
    with pytest.raises(InvalidInput, match="there is no option 'pool_size'"):
        Client("host=db", pool_size=4)
    assert Client("host=db", sslmode="require").target.conninfo.count("sslmode=require") == 1


def test_connections_notice_a_dead_peer_and_carry_a_name(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = psycopg.conninfo.conninfo_to_dict(Client(dsn).target.conninfo)
    wanted = {
        "keepalives": "1",
        "keepalives_idle": "10",
        "tcp_user_timeout": "15000",
        "application_name": "gangq",
    }
    assert {name: str(options[name]) for name in wanted} == wanted
    assert Client(dsn, application_name="mine").target.conninfo.count("application_name=mine") == 1
    assert "target_session_attrs=read-write" in Client("host=a,b dbname=x").target.conninfo
    assert Client(dsn).target.kwargs["prepare_threshold"] == 5
    monkeypatch.setenv("GANGQ_PREPARE", "off")
    assert Client(dsn).target.kwargs["prepare_threshold"] is None
    assert Client(dsn, prepare=True).target.kwargs["prepare_threshold"] == 5


def prepared_on(client: Client) -> set[str]:
    """Which of gangq's calls its one connection has prepared on the server."""
    with client.connection() as conn:
        rows = conn.execute("select statement from pg_prepared_statements").fetchall()
    return {found.group(1) for (text,) in rows if (found := re.search(r"from gangq\.(\w+)\(", text))}


def test_calls_are_prepared_on_the_server_unless_the_connection_does_not_allow_it(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(client: Client) -> set[str]:
        incarnation = register(client)
        for _ in range(10):
            client.submit(task="t")
            (claim,) = client.claim(incarnation=incarnation, request_id=uuid.uuid4())
            client.complete(job_ids=[claim.job_id], tokens=[claim.token])
            client.heartbeat(incarnation=incarnation)
        client.retire_worker(incarnation=incarnation)
        return prepared_on(client)

    hot = {"submit", "claim", "complete", "heartbeat"}
    with Client(dsn, max_size=1) as direct:
        assert work(direct) == hot
    monkeypatch.setenv("GANGQ_PREPARE", "off")
    with Client(dsn, max_size=1) as pooled:
        # PgBouncer before 1.21 lends a session in which another client has prepared under the names that ours uses.
        with pooled.connection() as conn:
            for number in range(20):
                conn.execute(f"prepare _pg3_{number} as select 1".encode())
        assert work(pooled) == set()


SIZES = pytest.mark.parametrize("size", [1, 2], ids=["one connection", "a pool"])


@SIZES
def test_where_prepared_statements_do_not_last_the_client_goes_on_without_them_and_says_so_once(
    dsn: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gangq.client")

    def said() -> int:
        return sum("going on without them" in record.message for record in caplog.records)

    with Client(dsn, min_size=1, max_size=size, prepare=True) as client:
        for number in range(30):
            # What the next transaction meets behind PgBouncer: a session without the statements of this one.
            with client.connection() as conn:
                conn.execute("deallocate all", prepare=False)
            assert client.submit(task="t", payloads=[{"n": number}]) == [number + 1]
            client.schema_version()
        assert said() == 1
        assert prepared_on(client) == set()
        assert [job.payload["n"] for job in client.jobs()] == [*reversed(range(30))], (
            "each was submitted once"
        )
    assert said() == 1


def test_the_async_client_too_goes_on_without_prepared_statements(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gangq.client")

    async def attempt() -> None:
        async with AsyncClient(dsn, max_size=1, prepare=True) as client:
            for number in range(20):
                async with client.connection() as conn:
                    await conn.execute("deallocate all", prepare=False)
                assert await client.submit(task="t") == [number + 1]

    asyncio.run(attempt())
    assert caplog.text.count("going on without them") == 1


def test_two_clients_never_call_their_prepared_statements_alike(dsn: str) -> None:
    names = []
    for _ in range(2):
        with Client(dsn, max_size=1, prepare=True) as client:
            for _ in range(8):
                client.submit(task="t")
                client.schema_version()
            with client.connection() as conn:
                names.append({name for (name,) in conn.execute("select name from pg_prepared_statements")})
    assert all(len(found) >= 2 for found in names)
    assert not names[0] & names[1]


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    """The server's processes stand still: its kernel takes what is sent, and nobody answers."""
    postmaster = psutil.Process(server.status().pid)
    stopped = [postmaster, *postmaster.children(recursive=True)]
    try:
        for process in stopped:
            # A server process that had little to do may have ended by itself.
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.slow
@SIZES
def test_a_server_that_hangs_ends_a_call_when_its_time_is_up_and_the_connection_is_dropped(
    own_server: OwnServer, size: int
) -> None:
    with own_server() as server:
        with Client(server.dsn(), max_size=size, timeout_s=2) as client:
            client.submit(task="t")
            with client.connection() as conn:
                before = conn.info.backend_pid
            with frozen(server):
                started = time.monotonic()
                with pytest.raises(DatabaseUnreachable) as caught:
                    client.submit(task="t")
                took_s = time.monotonic() - started
                said = "during gangq.submit; whether it took effect is unknown: no answer came in 2 s"
                assert said in str(caught.value)
                assert 1.9 <= took_s < 4
                started = time.monotonic()
                with pytest.raises(DatabaseUnreachable):
                    client.submit(task="t")
                assert time.monotonic() - started < 8
            eventually(lambda: client.schema_version() != "")
            with client.connection() as conn:
                assert conn.info.backend_pid != before


@pytest.mark.slow
def test_a_server_that_hangs_ends_an_awaited_call_in_time_and_leaves_the_loop_free(
    own_server: OwnServer,
) -> None:
    async def attempt(server: Server) -> None:
        async with AsyncClient(server.dsn(), timeout_s=2) as client:
            await client.submit(task="t")
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.05)
                    ticks += 1

            ticking = asyncio.create_task(tick())
            with frozen(server):
                started = time.monotonic()
                with pytest.raises(DatabaseUnreachable, match="effect is unknown: no answer came in 2 s"):
                    await client.submit(task="t")
                assert 1.9 <= time.monotonic() - started < 4
            ticking.cancel()
            assert ticks > 5
            await client.submit(task="t")

    with own_server() as server:
        asyncio.run(attempt(server))


def test_the_listener_is_a_connection_of_its_own_that_hears(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    with client.connect_listener() as listener:
        listener.execute("listen gangq_test")
        db.execute("notify gangq_test, 'x'")
        assert [n.payload for n in listener.notifies(timeout=10, stop_after=1)] == ["x"]


def backend(client: Client) -> int:
    with client.connection() as conn:
        return conn.info.backend_pid


def test_a_forked_child_gets_connections_of_its_own(dsn: str) -> None:
    # One connection: with more, which of them comes next is nobody's promise.
    with Client(dsn, max_size=1) as client:
        ours = backend(client)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, str(backend(client)).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with open(reading) as answer:
            theirs = answer.read()
        assert theirs.isdigit()
        assert int(theirs) != ours
        assert backend(client) == ours


def test_a_forked_child_that_closes_its_client_leaves_its_parents_connections(dsn: str) -> None:
    with Client(dsn, max_size=1) as client:
        ours = backend(client)
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                client.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert backend(client) == ours


def test_an_async_client_whose_event_loop_has_ended_can_be_closed(dsn: str) -> None:
    client = AsyncClient(dsn)
    assert asyncio.run(client.jobs()) == []
    asyncio.run(client.close())


def test_a_sleeper_is_woken_by_our_own_submit_and_by_the_callers_commit(client: Client, dsn: str) -> None:
    worker = register(client, light=2)
    with client.connect_listener() as listener:
        listener.execute(f"listen gangq_{worker}")
        listener.execute("listen gangq_wake")

        def heard() -> list[tuple[str, str]]:
            return [(n.channel, n.payload) for n in listener.notifies(timeout=0.2)]

        client.submit(task="t")
        assert heard() == []
        client.claim(incarnation=worker)
        client.claim(incarnation=worker, sleep=True)
        client.submit(task="t")
        assert heard() == [(f"gangq_{worker}", "light")]
        with psycopg.connect(dsn) as conn:
            client.submit(task="t", connection=conn)
            assert heard() == []
        assert heard() == [("gangq_wake", "default")]


def test_what_the_database_warns_of_is_logged_once_where_the_tick_runs(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    incarnation = client.register_worker(name="gone", host="h", queues=["default"]).incarnation
    client.submit(task="t")
    client.claim(incarnation=incarnation)
    client.configure(flag_after_s=0.05)
    time.sleep(0.1)
    with caplog.at_level(logging.WARNING, "gangq.server"):
        assert client.call("flag_dead_workers") == 1
        assert client.call("flag_dead_workers") == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "gangq.server"]
    assert line.startswith("DEAD WORKER gone on host h")


def test_a_look_without_a_limit_is_at_a_thousand_and_none_is_all(client: Client) -> None:
    ids = client.submit(task="t", payloads=[{}] * 1001)
    assert [job.id for job in client.jobs()] == ids[:0:-1]
    assert len(client.jobs(limit=None)) == 1001
    client.cancel(job_ids=ids)
    first = client.events()
    assert len(first) == 1000
    assert len(client.events(limit=None)) == 1000 + len(client.events(after_id=first[-1].id, limit=None))
    assert "limit 1000" in Verbs.gangs().text


def test_a_function_without_a_method_is_called_by_its_name(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    gang = client.submit_gang(task="t", size=2)
    incarnation = register(client, devices=[], slots=2)
    with pytest.raises(
        InvalidInput, match=r"no SQL function gangq\.nothing: in psql, \\df gangq\.\* lists them"
    ):
        client.call("nothing")
    with pytest.raises(
        InvalidInput, match=r"gangq\.time_out has no argument 'least'; its arguments are most"
    ):
        client.call("time_out", least=1)
    with pytest.raises(NotSerializable, match=r"error has object at \$\.a"):
        client.call("requeue", job_id=1, token=1, error={"a": object()})
    with pytest.raises(StaleToken):
        client.call("requeue", job_id=gang.job_ids[0], token=1, error={"a": 1}, front=None)
    assert client.call("reserve_gang", gang_id=gang.gang_id, incarnations=[incarnation] * 2) is True
    claims = client.call("claim", incarnation=incarnation, max_jobs=2, ports=[29500, 29501])
    assert [claim["job_id"] for claim in claims] == gang.job_ids

    async def attempt() -> None:
        async with AsyncClient(client.target.conninfo) as aio:
            assert await aio.call("time_out", most=1) == 0

    asyncio.run(attempt())


def test_help_shows_a_verb_as_it_is_called(client: Client) -> None:
    shown = inspect.signature(client.fail)
    assert list(shown.parameters) == [
        "job_id",
        "token",
        "error",
        "retryable",
        "cause",
        "retry_in_s",
        "connection",
    ]
    assert inspect.signature(client.job).return_annotation == "rows.JobRow"
    assert "Raises `StaleToken`" in inspect.getdoc(AsyncClient.fail)
    with pytest.raises(TypeError, match="missing a required argument: 'token'"):
        client.fail(job_id=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'tokne'"):
        client.jobs(tokne=1)  # type: ignore[call-arg]

"""Who may do what: each role its functions and no more, nobody a table, and every object documented."""

from __future__ import annotations

import psycopg
import pytest

from sql.drive import NOT_ALLOWED, Q, refused

LOOKING = ("gangq_viewer", "gangq_submitter", "gangq_worker", "gangq_host", "gangq_admin")
ROLES = (*LOOKING, "gangq_notifier")
LOOK = {
    "now",
    "schema_version",
    "explain_gang",
    "explain_job",
    "board",
    "preview",
    "caller",
    "is_admin",
    "roles_of",
    "shared_queues",
    "may_act_as",
    "may_report",
    "may_report_too",
    "capacity_of",
    "hosts_of",
    "idle_beside_work",
    "role_of",
    "serves",
    "in_epoch",
    "is_paused",
    "number_in",
    "owned",
    "queue_load",
    "key_usage",
    "limit_opens_at",
    "kept_by_day",
    "open_slots",
    "change_mark",
    "waiting_jobs",
    "planned_in_words",
    "span",
    "in_short",
    "waiting_so_far",
    "usage",
    "metrics",
}
SUBMIT = {
    "submit",
    "submit_gang",
    "submit_unique",
    "submit_unique_gang",
    "set_priority",
    "cancel",
    "retry",
    "retry_failed",
    "set_schedule",
    "pause_schedule",
    "resume_schedule",
    "run_schedule_now",
    "forget_schedule",
    "declare_schedules",
    "set_service",
    "stop_service",
    "delete_service",
    "roll_back_service",
    "declare_services",
}
WORK = {
    "register_worker",
    "heartbeat",
    "claim",
    "barrier",
    "complete",
    "complete_and_claim",
    "fail",
    "snooze",
    "requeue",
    "release",
    "ack_preempted",
    "save_checkpoint",
    "load_checkpoint",
    "inputs",
    "append_log",
    "submit",
    "submit_gang",
    "submit_unique",
    "submit_unique_gang",
    "watch_terms",
    "learn_gap",
    "report_ready",
    "report_load",
    "retire_worker",
    "trip",
    "suspect",
    "predecessor",
    "unproven",
    "report_stuck",
    "bounce",
    "bounced",
    "report_dead",
    "tick",
    "apply",
    "open_place",
    "reserve_gang",
    "rollback_gang",
    "complete_drain",
    "reap_expired",
    "flag_dead_workers",
    "promote_due",
    "time_out",
    "unplanned_schedules",
    "plan_schedules",
}
BOUNCE = {
    "predecessor",
    "unproven",
    "report_dead",
    "report_stuck",
    "retire_worker",
    "trip",
    "bounce",
    "bounced",
    "tick",
    "flag_dead_workers",
    "unplanned_schedules",
    "plan_schedules",
}
DELIVER = {"schema_version", "fetch_notification", "acknowledge_notification"}
RUN = {
    "set_limit",
    "set_queue",
    "configure",
    "set_task",
    "pause_task",
    "resume_task",
    "quarantine",
    "unquarantine",
    "set_taints",
    "preempt_gang",
    "displace_job",
    "cordon",
    "uncordon",
    "shrink_gang",
    "keep_partitions",
    "add_notification",
    "remove_notification",
    "test_notification",
    "retry_notifications",
}
MAY = {
    "gangq_viewer": LOOK,
    "gangq_submitter": LOOK | SUBMIT,
    "gangq_worker": LOOK | WORK,
    "gangq_host": LOOK | BOUNCE,
    "gangq_admin": LOOK | SUBMIT | WORK | RUN | DELIVER,
    "gangq_notifier": DELIVER,
}
VIEWS = (
    "select relname from pg_class where relnamespace = 'gangq'::regnamespace and relkind = 'v' "
    "and relname <> all ('{pending_shapes,blocked_kinds}')"
)
"""All but those that are internal."""
FUNCTIONS = (
    "select p.oid, p.proname, p.oid::regprocedure::text as signature, p.prosecdef, p.proconfig, l.lanname, "
    "p.prorettype = 'trigger'::regtype as is_trigger "
    "from pg_proc p join pg_language l on l.oid = p.prolang where p.pronamespace = 'gangq'::regnamespace"
)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_call_exactly_its_functions(q: Q, role: str) -> None:
    granted = {
        row["proname"]
        for row in q.sql(
            "select proname from pg_proc where pronamespace = 'gangq'::regnamespace "
            "and has_function_privilege(%(role)s, oid, 'execute')",
            role=role,
        )
    }
    assert granted == MAY[role]


@pytest.mark.parametrize("role", ROLES)
def test_every_verb_tried_as_each_role_is_refused_unless_it_is_its_own(q: Q, role: str) -> None:
    """Called for real, with nulls: who may gets past the door, whatever the verb then says."""
    wrong = []
    for row in q.sql(FUNCTIONS + " and p.prorettype <> 'trigger'::regtype"):
        nulls = q.value(
            "select string_agg('null::' || replace(format_type(t, null), 'anyelement', 'integer'), ', ') "
            "from pg_proc p, "
            "unnest(p.proargtypes::oid[]) t where p.oid = %(oid)s",
            oid=row["oid"],
        )
        shut = False
        with q.db.transaction(force_rollback=True):
            q.sql(f"set local role {role}")
            try:
                q.sql(f"select gangq.{row['proname']}({nulls or ''})")
            except psycopg.Error as error:
                # A worker may call submit, which refuses it without a job that it runs.
                shut = error.sqlstate == NOT_ALLOWED and "permission denied" in str(error)
        if shut == (row["proname"] in MAY[role]):
            wrong.append((row["signature"], "refused" if shut else "let in"))
    assert wrong == []


def test_a_login_without_a_role_reaches_nothing(q: Q) -> None:
    with q.db.transaction(force_rollback=True):
        q.sql("create role stranger_test")
        q.sql("set local role stranger_test")
        for statement in ("select * from gangq.jobs", "select gangq.now()", "select gangq.submit('x')"):
            with refused(NOT_ALLOWED), q.db.transaction():
                q.sql(statement)


@pytest.mark.parametrize("role", [*ROLES, "public"])
def test_nobody_but_the_owner_writes_any_table_or_sequence(q: Q, role: str) -> None:
    writable = q.sql(
        "select c.relname, p.privilege from pg_class c cross join "
        "unnest(array['insert','update','delete','truncate','references','trigger']) as p(privilege) "
        "where c.relnamespace = 'gangq'::regnamespace and c.relkind in ('r', 'p', 'v') and "
        "has_table_privilege(%(role)s, c.oid, p.privilege) "
        "union all select c.relname, p.privilege from pg_class c cross join "
        "unnest(array['usage','update']) as p(privilege) "
        "where c.relnamespace = 'gangq'::regnamespace and c.relkind = 'S' and "
        "has_sequence_privilege(%(role)s, c.oid, p.privilege)",
        role=role,
    )
    assert writable == []


def test_a_write_typed_by_hand_is_refused(q: Q) -> None:
    q.submit()
    for statement in (
        "update gangq.live_jobs set priority = 9",
        "delete from gangq.live_jobs",
        "truncate gangq.events",
    ):
        with refused(NOT_ALLOWED), q.db.transaction():
            q.sql("set local role gangq_admin")
            q.sql(statement)


def test_every_function_is_revoked_from_public(q: Q) -> None:
    open_to_all = q.sql(
        "select p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'gangq'::regnamespace "
        "and (p.proacl is null "
        "or exists (select 1 from aclexplode(p.proacl) a where a.grantee = 0))"
    )
    assert open_to_all == []


def test_every_security_definer_and_every_plpgsql_function_pins_its_search_path(q: Q) -> None:
    loose = [
        row["signature"]
        for row in q.sql(FUNCTIONS)
        if (row["prosecdef"] or row["lanname"] == "plpgsql")
        and "search_path=pg_catalog, pg_temp" not in (row["proconfig"] or [])
    ]
    assert loose == []


def test_no_role_calls_a_function_whose_names_are_looked_up_where_the_caller_says(q: Q) -> None:
    """Pinned, or bound when it was created: an inlined text in quotes is neither."""
    open_to_roles = q.sql(
        "select p.oid::regprocedure::text as signature from pg_proc p "
        "where p.pronamespace = 'gangq'::regnamespace and p.prosqlbody is null "
        "and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false) "
        "and exists (select 1 from pg_roles r where r.rolname like 'gangq\\_%%' "
        "and has_function_privilege(r.oid, p.oid, 'execute'))"
    )
    assert open_to_roles == []


def test_nothing_that_is_called_is_ever_compiled(q: Q) -> None:
    """A planner takes arrays and days of history for large, and compiling a query takes up to seconds each time."""
    called = [row for row in q.sql(FUNCTIONS) if row["prosecdef"]]
    assert [row["signature"] for row in called if "jit=off" not in row["proconfig"]] == []


def test_every_verb_of_a_role_that_touches_tables_is_a_security_definer(q: Q) -> None:
    definers = {row["proname"] for row in q.sql(FUNCTIONS) if row["prosecdef"]}
    assert (
        SUBMIT
        | WORK
        | RUN
        | DELIVER
        | {"explain_gang", "explain_job", "schema_version", "board", "preview", "usage", "metrics"}
    ) <= definers


def test_no_verb_is_overloaded(q: Q) -> None:
    assert (
        q.sql(
            "select proname from pg_proc where pronamespace = 'gangq'::regnamespace group by proname "
            "having count(*) > 1"
        )
        == []
    )


@pytest.mark.parametrize("role", LOOKING)
def test_every_role_reads_every_view(q: Q, role: str) -> None:
    q.submit()
    q.submit_gang(2)
    q.worker("a")
    q.worker("b")
    q.tick()
    with q.db.transaction(force_rollback=True):
        q.sql(f"set local role {role}")
        for view in q.sql(VIEWS):
            q.sql(f"select * from gangq.{view['relname']}")
        for verb in ("explain_gang", "explain_job"):
            assert q.call(verb, **{verb.removeprefix("explain_") + "_id": 1})


def test_a_viewer_sees_no_payload_result_or_error_anywhere(q: Q) -> None:
    """All that a viewer may read, searched for a word that was in a payload, a result, an error and a log."""
    secret = "hunter2"
    error = {"type": "E", "message": "failed", "traceback": secret, "log_tail": secret}
    worker = q.worker(slots=3)
    q.submit()
    wedged = worker.take()
    wedged.suspect(reason="silent", stack=secret)
    q.one(
        "trip",
        incarnation=worker.incarnation,
        job_id=wedged.job_id,
        token=wedged.token,
        code=76,
        error=error,
        evidence={"stack": secret},
    )
    q.call("cancel", job_ids=[wedged.job_id])
    q.submit(count=4, payloads=[{"password": secret}] * 4)
    done, failed, tripped = worker.claim()
    q.call("append_log", job_ids=[done.job_id], tokens=[done.token], seqs=[0], chunks=[secret])
    done.save(1, secret.encode())
    done.complete({"token": secret})
    q.one("fail", job_id=failed.job_id, token=failed.token, error=error)
    q.one("requeue", job_id=tripped.job_id, token=tripped.token, error=error)
    gang = q.submit_gang(2, payload={"password": secret}, priority=9)
    q.tick()
    member, other = sorted(worker.claim(max_jobs=2), key=lambda c: c["rank"])
    other.complete({"token": secret})
    q.one("fail", job_id=member.job_id, token=member.token, error=error)
    assert gang.state == "failed"
    readable = q.sql(
        "select c.relname from pg_class c where c.relnamespace = 'gangq'::regnamespace and c.relkind in "
        "('r', 'p', 'v') "
        "and has_table_privilege('gangq_viewer', c.oid, 'select')"
    )
    assert len(readable) >= len(q.sql(VIEWS))
    assert secret in str(q.sql("select * from gangq.jobs")), "the owner does see it"
    leaks = []
    with q.db.transaction(force_rollback=True):
        # A login of its own: under `set role gangq_viewer` the one that submitted these would read what is its own.
        q.sql("create role viewer_test; grant gangq_viewer to viewer_test")
        q.sql("set local session authorization viewer_test")
        for row in readable:
            if secret in str(q.sql(f"select * from gangq.{row['relname']}")):
                leaks.append(row["relname"])
        for table in ("live_jobs", "history", "checkpoints", "logs", "evidence"):
            with refused(NOT_ALLOWED), q.db.transaction():
                q.sql(f"select * from gangq.{table}")
    assert leaks == []


def test_a_login_may_hold_several_roles(q: Q) -> None:
    with q.db.transaction(force_rollback=True):
        q.sql(
            "create role both_test; grant gangq_submitter, gangq_worker to both_test; set local role "
            "both_test"
        )
        q.submit()
        worker = q.worker()
        assert worker.take().complete() == "done"


# Documentation ----------------------------------------------------------------------------------------------


def test_every_schema_table_column_function_view_and_sequence_has_a_comment(q: Q) -> None:
    bare = q.sql(
        "select 'schema gangq' as what where obj_description('gangq'::regnamespace, 'pg_namespace') is null "
        "union all select 'relation ' || c.relname from pg_class c where c.relnamespace = "
        "'gangq'::regnamespace "
        "  and c.relkind in ('r', 'p', 'v') and obj_description(c.oid, 'pg_class') is null "
        "union all select 'sequence ' || c.relname from pg_class c where c.relnamespace = "
        "'gangq'::regnamespace and c.relkind = 'S' "
        "  and obj_description(c.oid, 'pg_class') is null and not exists (select 1 from pg_depend d "
        "where d.objid = c.oid and d.deptype = 'i') "
        "union all select 'column ' || c.relname || '.' || a.attname from pg_class c join pg_attribute a "
        "on a.attrelid = c.oid "
        "  where c.relnamespace = 'gangq'::regnamespace and c.relkind in ('r', 'p') and not "
        "c.relispartition and a.attnum > 0 "
        "  and not a.attisdropped and col_description(c.oid, a.attnum) is null "
        "union all select 'function ' || p.oid::regprocedure from pg_proc p where p.pronamespace = "
        "'gangq'::regnamespace "
        "  and obj_description(p.oid, 'pg_proc') is null"
    )
    assert bare == []


def test_every_state_is_text_and_no_enum_exists(q: Q) -> None:
    assert q.sql("select 1 from pg_type where typnamespace = 'gangq'::regnamespace and typtype = 'e'") == []

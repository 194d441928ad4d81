"""How many distinct requirements one login may add: every one that waits makes the claims of all workers slower."""

from __future__ import annotations

from sql.drive import INVALID, TOO_LARGE, Q, a_role, refused


def submit_distinct(q: Q, count: int, *, first: int = 0, queue: str = "default") -> None:
    q.sql(
        "select gangq.submit('work', queue => %(queue)s, "
        "options => jsonb_build_object('labels', jsonb_build_object('n', n), 'wait_for_hardware', true)) "
        "from generate_series(%(first)s::integer, %(last)s::integer) n",
        queue=queue,
        first=first + 1,
        last=first + count,
    )


def test_a_login_adds_so_many_distinct_requirements_a_day_and_what_is_known_is_never_refused(
    q: Q, logins: dict[str, Q]
) -> None:
    q.call("configure", new_shapes_per_day=5)
    s1 = logins["s1"]
    submit_distinct(s1, 5)
    with refused(TOO_LARGE, "s1_test has submitted 5 new combinations") as error:
        submit_distinct(s1, 1, first=5)
    assert "Use fewer different labels" in str(error.value.diag.message_hint)
    submit_distinct(s1, 5)  # the same five
    submit_distinct(logins["s2"], 5, first=5)
    submit_distinct(s1, 5, first=5)  # known through another login
    assert q.value("select count(*) from gangq.jobs") == 20


def test_gangs_and_single_jobs_are_counted_together(q: Q, logins: dict[str, Q]) -> None:
    q.call("configure", new_shapes_per_day=2)
    s1 = logins["s1"]
    submit_distinct(s1, 1)
    roles = [{"name": "a", "count": 1, "gpus": 1}, {"name": "b", "count": 1, "gpus": 2}]
    with refused(TOO_LARGE, "2 new combinations"):
        s1.submit_gang(task="work", roles=roles, wait_for_hardware=True)
    s1.submit_gang(2, task="work", gpus=1, wait_for_hardware=True)
    with refused(TOO_LARGE, "2 new combinations"):
        submit_distinct(s1, 1, first=1)


def test_after_a_day_a_login_may_add_requirements_again(q: Q, logins: dict[str, Q]) -> None:
    q.call("configure", new_shapes_per_day=3)
    submit_distinct(logins["s1"], 3)
    q.clock.advance(23 * 3600)
    with refused(TOO_LARGE, "3 new combinations"):
        submit_distinct(logins["s1"], 1, first=3)
    q.clock.advance(2 * 3600)
    submit_distinct(logins["s1"], 3, first=3)


def test_admins_add_any_number_of_requirements(q: Q, logins: dict[str, Q]) -> None:
    q.call("configure", new_shapes_per_day=2)
    submit_distinct(logins["a1"], 4)
    submit_distinct(q, 4, first=4)


def test_a_login_that_sets_roles_has_one_bound_for_all_of_them(q: Q, logins: dict[str, Q]) -> None:
    q.call("configure", new_shapes_per_day=2)
    s1 = logins["s1"]
    submit_distinct(s1, 2)
    a_role(q.db, "u1_test", "gangq_submitter")
    q.db.execute("grant u1_test to s1_test")
    s1.sql("set role u1_test")
    with refused(TOO_LARGE, "s1_test has submitted 2 new combinations"):
        submit_distinct(s1, 1, first=2)


def test_a_fair_queue_keeps_a_copy_of_each_requirement_and_the_bound_is_the_same(
    q: Q, logins: dict[str, Q]
) -> None:
    q.call("set_queue", name="fair", policy="fair")
    q.call("configure", new_shapes_per_day=3)
    submit_distinct(logins["s1"], 3, queue="fair")
    with refused(TOO_LARGE, "3 new combinations"):
        submit_distinct(logins["s1"], 1, first=3, queue="fair")
    submit_distinct(logins["s2"], 3, queue="fair")
    with refused(TOO_LARGE, "s2_test has submitted 3 new combinations"):
        submit_distinct(logins["s2"], 1, first=3, queue="fair")


def test_what_a_job_submits_is_charged_to_the_login_of_the_job(q: Q, logins: dict[str, Q]) -> None:
    q.call("configure", new_shapes_per_day=2)
    worker = logins["w1"].worker()
    logins["s1"].submit()
    claim = worker.take()
    children = (
        "select gangq.submit('work', options => jsonb_build_object('parent', %(job)s::bigint, 'parent_token', "
        "%(token)s::bigint, 'labels', jsonb_build_object('n', n), 'wait_for_hardware', true)) "
        "from generate_series(1, %(count)s::integer) n"
    )
    with refused(TOO_LARGE, "s1_test has submitted 2 new combinations"):
        logins["w1"].sql(children, job=claim.job_id, token=claim.token, count=2)
    logins["w1"].sql(children, job=claim.job_id, token=claim.token, count=1)


def test_new_shapes_per_day_is_a_positive_number(q: Q) -> None:
    with refused(INVALID, "new_shapes_per_day"):
        q.call("configure", new_shapes_per_day=0)

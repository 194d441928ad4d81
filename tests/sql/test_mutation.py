"""Removes one condition from one function at a time, and expects a test to fail without it.

The named test files run in a process of their own, against a schema in which the function lacks the condition. A
text that is not in its function fails the first test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sql.drive import Q

HERE = Path(__file__).parent

# Function, what is replaced, what replaces it, and the test files of which one has to go red.
MUTATIONS = [
    # Claim.
    ("lock_claimer", "me.login <> session_user", "false", "test_owners"),
    ("lock_claimer", "or me.ended_at is not null", "", "test_claim test_finish"),
    ("claim_facts", "l.expires_at > t", "true", "test_claim"),
    ("take", "room.places and not may_take", "false", "test_places test_cordons"),
    ("take", "room.places and take.lane is distinct from 'light'", "room.places", "test_places test_slots"),
    ("take", "take.lane is distinct from 'placed' and", "", "test_places"),
    ("take", "may_start and not room.cordoned", "may_start", "test_places test_cordons"),
    ("take", "may_take and take.lane", "take.lane", "test_trips test_cordons"),
    ("take", "may_start and members", "members", "test_claim"),
    ("take", "least(take.max_jobs - claimed, me.light * me.prefetch - room.light)", "(take.max_jobs - claimed)",
     "test_slots test_claim"),
    ("take", "me.state = 'live' and me.quarantined is null", "me.state = 'live'",
     "test_places test_trips test_trip_devices test_stuck"),
    ("take", "me.state = 'live' and", "", "test_places"),
    ("take", "if room.repeated then", "if false then", "test_claim"),
    ("lock_reserved", "order by j.id limit most", "order by j.id", "test_claim"),
    ("start_reserved", "if patient then", "if true then", "test_complete_and_claim"),
    ("light_heads", "gangq.serves(me, z) and", "", "test_selectors test_claim test_slots"),
    ("light_heads", "q.paused or", "", "test_queues"),
    ("light_heads", "z.task <> all", "z.task = z.task or z.task <> all", "test_task_pauses"),
    ("reserve_gang", "or gangq.paused_task(g.kind_id) is not null", "", "test_task_pauses"),
    ("board_kinds", "min(r.paused)", "null", "test_task_pauses"),
    ("end_pauses", "perform gangq.wake_tasks(tasks);", "", "test_task_pauses"),
    ("idle_beside_work", "gangq.paused_task(-s.id) is null", "true", "test_task_pauses"),
    ("light_heads", "q.limited or", "", "test_limits"),
    ("light_heads", "or q.policy = 'fair'", "", "test_queues test_limits test_fair_placement"),
    ("take_light", "for update skip locked", "", "test_claim test_lows test_claim_pace"),
    ("take_light", "or j.returned", "", "test_lows test_claim_pace"),
    ("raise_low", "age(raise_low.horizon::xid) <= age(l.xmin)", "true", "test_lows test_claim_pace"),
    ("take_light", "looked_from <= head.low", "true", "test_lows"),
    ("raise_low", "least(l.marked, excluded.marked)", "excluded.marked", "test_lows"),
    # Fill.
    ("no_fill", "then 'its time is over'", "then null", "test_places"),
    ("is_over", "until <= t", "false", "test_places"),
    ("is_over", "(until > (t", "(false and until > (t", "test_places"),
    ("no_fill", "<> (s).gpus", "< 0", "test_places"),
    ("no_fill", "then 'its queue is paused'", "then null", "test_places"),
    ("no_fill", "then 'its task is paused'", "then null", "test_places"),
    ("no_fill", "then 'a limit was lowered'", "then null", "test_places"),
    ("no_fill", "case when (s).gpus = 0 then 0 end", "null", "test_places"),
    ("unparted", "gangq.tells_apart((s).queue)", "false", "test_places"),
    ("no_fill", "not gangq.serves(me, s)", "false", "test_places"),
    ("fill_places", "head.priority < p.min_priority", "false", "test_places"),
    ("fill_places", "p.ends_by < t + make_interval", "null < t + make_interval", "test_places"),
    ("fill_places", "order by j.order_key limit 1 for update skip locked",
     "order by j.order_key limit 1", "test_places"),
    ("vacate", "not gangq.is_over(z.until, c.tick_s, t)", "true", "test_places"),
    ("close_places", "if waits then", "if false then", "../interleaving/test_device_changes_hands"),
    # Finish.
    ("look_at_done", "not gangq.may_report(i.login)", "false", "test_owners"),
    ("finish", "look.placed > gone.vacant", "false", "test_places"),
    ("finish_member", "g.go_at is null", "false", "test_finish"),
    ("finish_rest", "elsif gangq.was_final(p.id, p.token, as_done => true) then", "elsif true then", "test_finish"),
    ("was_final", "(x.state = 'done' or not as_done)", "true", "test_finish"),
    ("force_unconfirmed", "set taken_token = x.token", "set taken_token = null", "test_judge"),
    ("free_orphaned_job", "set taken_token = x.token", "set taken_token = null", "test_judge"),
    ("free_orphaned_members", "set taken_token = x.token", "set taken_token = null", "test_finish"),
    ("free_orphaned_members", "if g.state = 'draining' then", "if false then", "test_judge"),
    ("free_orphaned_job", "and y.incarnation = worker.id", "", "../interleaving/test_judged_meanwhile"),
    ("force_unconfirmed", "and x.token = w.token", "", "../interleaving/test_judged_meanwhile"),
    ("report", "(j.token = report.token) is not true", "false", "test_finish"),
    ("stopped", "kind => nullif(how, 'ack')", "kind => null", "test_judge"),
    ("stopped", "j.stop_reason, null, 'told to stop'", "'release', null, 'told to stop'", "test_cordons"),
    ("must_drain", "or c.ending = 'asked'", "", "test_failure_policies"),
    ("move_to_history", "and j.token is not distinct from l.token", "", "test_finish"),
    ("move_to_history", "when 'done' then j.gang_id is null and j.state in ('running', 'preempting')",
     "when 'done' then j.state in ('running', 'preempting')", "test_finish test_claim"),
    ("finish_rest", "j.token = c.token as ours", "true as ours", "test_finish"),
    ("was_final", "x.taken_token is distinct from was_final.token", "true", "test_judge test_finish"),
    ("leave", "if at_once and leave.new_state = 'done' then", "if at_once then", "test_places"),
    ("append_log", "x.token = said.token and x.at", "x.at", "test_finish"),
    ("lock_output", "or j.token is null and j.final_token = lock_output.token", "", "test_finish"),
    # Charges and losses.
    ("cause_charged", "g.go_at is null", "false", "test_failure_policies"),
    ("cause_charged", "stopped <> '{}' and", "", "test_progress"),
    ("cause_charged", "or j.claimed_at <= g.missing_since", "", "test_failure_policies"),
    ("member_charge", "job_id = any (payers) or", "true or", "test_drain"),
    ("spends_gang", "g.crashes >= g.max_crashes", "false", "test_failure_policies"),
    ("spends_gang", "g.trips >= g.max_trips", "false", "test_failure_policies"),
    ("cause_of_losses", "when causes is null then 'placement_miss'", "when false then ''", "test_judge"),
    ("drained_for_good", "or j.crashes > j.max_crashes", "", "test_drain"),
    ("drained_for_good", "or j.trips > j.max_trips", "", "test_drain"),
    ("must_drain", "and must_drain.cause = 'fail'", "", "test_failure_policies"),
    ("must_drain", "and j.id = any (payers) and", "and", "test_failure_policies"),
    ("must_drain", "and gangq.in_epoch(j, g)", "", "test_failure_policies"),
    ("lose_members", "and gangq.rank_of(j) = 0", "", "test_failure_policies"),
    ("wind_up", "'reserved', 'running', 'preempting'", "'running', 'preempting'", "test_completion"),
    ("shrink_gang", "g.state <> 'running' or", "", "test_failure_policies"),
    ("free_orphaned_members", "and x.token is not null", "", "test_failure_policies"),
    ("lose_orphaned_members", "if gone = '{}' and g.state = 'running' then", "if gone = '{}' then", "test_judge"),
    ("lose_orphaned_members", "where m.its_cause = cause", "", "test_failure_policies"),
    ("free_orphaned_job", "for update skip locked", "for update", "../interleaving/test_nobody_stalls"),
    ("free_orphaned_job", "and j.light", "", "test_trips"),
    # Judges and hosts.
    ("allow_for_gap", "i.ended_at is null and l.renewed_at > s.outage_ended_at", "true", "test_slow_cron"),
    ("allow_for_gap", "and z.renewed_at > coalesce(s.outage_ended_at, '-infinity')", "", "test_slow_cron"),
    ("reap_expired", "if outage = 'infinity' then", "if false then", "../interleaving/test_judged_meanwhile"),
    ("rollback_stale", "and gangq.reservation_over(x, t);", ";", "../interleaving/test_judged_meanwhile"),
    ("flag_dead_workers", "(select l.renewed_at from gangq.leases l where l.incarnation = w.id) > t - flag_after",
     "false", "../interleaving/test_judged_meanwhile"),
    ("bounced_too_often", "filter (where e.round <> e.this_round)", "", "test_dead_workers"),
    ("bounce", "and e.at <= t and", "and", "test_dead_workers"),
    ("report_stuck", "(i.exits_at is null or lease_ends <= t)", "true", "test_stuck"),
    ("quarantine_all_of", "where h.kind = 'quarantine' and h.until is not null", "where h.kind = 'quarantine'",
     "test_stuck"),
    ("postpone_exit", "z.not_before >= i.exits_at and", "", "test_stuck"),
    # Trips and progress.
    ("has_tripped", "and e.token = has_tripped.token", "", "test_trips"),
    ("trip", "and j.state <> 'preempting'", "", "test_brake"),
    ("carry_out_trip", "when me.exits_at > t then me.exits_at", "when false then me.exits_at", "test_trips"),
    ("end_tripped", "if me.ended_at is not null then", "if false then", "test_trips"),
    ("end_tripped", "and x.id <> j.id", "", "test_trips"),
    ("judge_progress", "and mark.judged_at <= t", "", "test_set_back"),
    ("steps_of_gang", "greatest(max(p.step_at), max(x.claimed_at))", "max(p.step_at)", "test_failure_policies"),
    ("judge_standstill", "last.steppers = 0 or", "", "test_progress"),
    ("judge_standstill", "or last.step_at > t - make_interval(secs => cfg.gang_stall_s)", "", "test_progress"),
    ("who_stopped", "v.token = j.token and", "", "test_progress"),
    # Dependencies, what is kept, and a clock that is set back.
    ("settle", "and not exists (select 1 from gangq.live_jobs j where j.id = z.on_job_id)", "",
     "../interleaving/test_revive_meets"),
    ("cancel_dependents", "and not gangq.is_wanted(d.outcome, d.wants)", "", "../interleaving/test_revive_meets"),
    ("revive", "when sqlstate 'GQ001' or sqlstate 'GQ002' then taken := 0;",
     "when sqlstate 'GQ999' then taken := 0;", "test_revive"),
    ("forget", "and not exists (select 1 from gangq.live_jobs j where j.id = c.job_id offset 0)", "", "test_tick"),
    ("forget", "and not exists (select 1 from gangq.live_jobs j where j.id = p.job_id offset 0)", "", "test_tick"),
    ("keep_partitions", "and x.partitions_checked_at <= t", "", "test_tick"),
    ("move_workers_back", "i.ended_at > t or i.exits_at > last_tick then", "i.exits_at > t then", "test_set_back"),
    ("move_work_back", "gangq.moved(j.due_at, last_tick, by)", "gangq.moved(j.due_at, t, by)", "test_set_back"),
    ("move_work_back", "where z.until > last_tick", "where z.until > t", "test_set_back"),
    ("move_work_back", "greatest(gangq.moved(g.not_before, t, by), (",
     "least(gangq.moved(g.not_before, t, by), (", "test_set_back"),
    ("move_work_back", "(z.epoch > 0 or z.timeouts > 0 or z.not_before is null) and", "", "test_set_back"),
    ("move_work_back", "and z.claimed_at is not null", "", "test_set_back"),
    # Apply.
    ("no_room", "gangq.candidates(t, array[(me).id]) = '{}'", "false", "test_places"),
    ("no_room", "not gangq.serves(me, s)", "false", "test_places"),
    ("no_room", "gangq.paused_queue((s).queue) is not null", "false", "test_places"),
    ("no_room", "gangq.paused_task(-(s).id) is not null", "false", "test_places"),
    ("no_room", "s, free.slots,", "s, null,", "test_places"),
    ("no_room", "free.memory_mb,", "null,", "test_places"),
    ("no_room", "free.cpus,", "null,", "test_places"),
    ("suit", "cardinality(chosen) = (s).gpus", "true", "test_places"),
    ("suit", "chosen <@ gangq.usable(s, device_ids, vrams)", "true", "test_places"),
    ("suit", "(select count(distinct d.id) from unnest(chosen) as d(id)) = (s).gpus", "true", "test_places"),
    ("usable", "d.id <> all ((s).avoid)", "true", "test_places test_trips test_trip_devices test_stuck"),
    ("usable", "d.vram >= (s).vram_mb", "true", "test_places"),
    ("no_room", "when hit is not null then", "when false then", "test_places test_limits"),
    ("limit_hit", "gangq.rate_hit(limit_hit.queue, limit_hit.key, limit_hit.jobs)", "null::jsonb", "test_rates"),
    ("limit_hit", "coalesce(sum(u.jobs), 0)", "0", "test_limit_keys"),
    ("add_place", "perform gangq.count_starts((s).queue, (s).limit_key, 1);", "", "test_rates"),
    ("vacate", "and not exists (select from gangq.rates_on(s.queue, s.limit_key))", "", "test_rates"),
    ("last_run", "and gangq.rate_opens_at() > t is not false", "", "test_rates"),
    ("apply", "l.runs + 1 - apply.part = apply.pass", "l.runs >= apply.pass", "test_apply"),
    ("renew_places", "not vacant or z.job_id is null", "true", "test_places test_apply"),
    ("may_not_stop", "not between 1 and most", "< 0", "test_apply test_preemption"),
    ("may_not_stop", "if not (select q.preempts", "if false and (select q.preempts", "test_apply test_preemption"),
    ("movable_at", "and stops < max_stops", "", "test_apply test_preemption"),
    ("may_not_stop", "coalesce(x.preemptible, true)", "true", "test_apply test_preemption"),
    ("may_not_stop", "and q.preemptible", "", "test_apply test_preemption"),
    ("may_not_stop", "<= t, false)", "is not null, false)", "test_apply test_preemption"),
    ("may_not_stop", "elsif not unit.there then", "elsif false then", "test_apply test_preemption"),
    ("may_not_stop", "unit.priority >= (a).priority", "false", "test_apply test_preemption"),
    ("may_not_stop", "return gangq.guarantee_broken(own, d -> 'stop');", "return null;",
     "test_apply test_preemption"),
    # Services.
    ("gangs_to_leave", "and (not x.ready or n.ready - x.size >= n.want)", "", "test_services"),
    ("count_gangs", "(s).stopped or (s).deleting", "false", "test_services"),
    ("gangs_to_leave", "and not n.impossible", "", "test_services"),
    ("service_facts", "and i.flagged_at is null) = k.size", ") = k.size", "test_services"),
    ("service_facts", "case when g.state = 'running' and", "case when", "test_services"),
    ("service_facts", "and r.token = j.token", "", "test_services"),
    ("own_claim", "(j.token = own_claim.token) is not true", "false", "test_services test_finish"),
    ("revision_to_make", "case when (s).halted is null then (s).revision else (s).good_revision end",
     "(s).revision", "test_services"),
]  # fmt: skip


def test_each_condition_occurs_once_in_its_function(q: Q) -> None:
    bodies = {
        row["proname"]: row["body"]
        for row in q.sql(
            "select p.proname, pg_get_functiondef(p.oid) as body from pg_proc p "
            "where p.pronamespace = 'gangq'::regnamespace and p.proname = any (%(names)s)",
            names=[function for function, *_ in MUTATIONS],
        )
    }
    assert not [m[:2] for m in MUTATIONS if bodies.get(m[0], "").count(m[1]) != 1]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("function", "condition", "without", "tests"), MUTATIONS, ids=[f"{m[0]}: {m[1][:50]}" for m in MUTATIONS]
)
def test_without_this_condition_a_test_is_red(
    function: str, condition: str, without: str, tests: str
) -> None:
    files = [str(HERE / f"{name}.py") for name in tests.split()]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "GANGQ_MUTATION": json.dumps([function, condition, without])},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout[-2000:]

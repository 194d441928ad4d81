-- Who may do what. Nobody but the owner writes a table: the functions are the door.
-- gangq_viewer reads views; gangq_submitter also submits, cancels, retries; gangq_worker also works; gangq_admin all.

do $$
declare
  r text;
begin
  foreach r in array array['gangq_viewer', 'gangq_submitter', 'gangq_worker', 'gangq_admin'] loop
    if not exists (select 1 from pg_catalog.pg_roles where rolname = r) then
      begin
        execute format('create role %I nologin', r);
      exception
        when duplicate_object or unique_violation then null;  -- another database of this server migrates at the same time
        when insufficient_privilege then
          raise exception using errcode = '42501', message = format('role %s is missing and %s may not create roles', r, current_user),
            hint = 'Have an administrator run: create role gangq_viewer; create role gangq_submitter; create role gangq_worker; create role gangq_admin;';
      end;
    end if;
  end loop;
end $$;

revoke all on schema gangq from public;
revoke all on all tables in schema gangq from public;
revoke all on all sequences in schema gangq from public;
revoke all on all functions in schema gangq from public;
grant usage on schema gangq to gangq_viewer, gangq_submitter, gangq_worker, gangq_admin;

grant select on gangq.jobs, gangq.gangs, gangq.workers, gangq.devices, gangq.waiting, gangq.timeline, gangq.drains, gangq.preemptions,
  gangq.trips, gangq.device_trips, gangq.flagged, gangq.cordoned, gangq.capacity, gangq.violations, gangq.queues, gangq.tasks, gangq.retention, gangq.events, gangq.settings, gangq.transitions, gangq.migrations, gangq.tick_state
to gangq_viewer, gangq_submitter, gangq_worker, gangq_admin;
grant select on gangq.passes to gangq_admin;
grant select on gangq.logs, gangq.evidence to gangq_submitter, gangq_worker, gangq_admin;
grant execute on function gangq.now(), gangq.schema_version(), gangq.explain_gang(bigint), gangq.explain_job(bigint), gangq.plan(jsonb, integer),
  gangq.caller(), gangq.may_read_payloads(), gangq.queue_load(), gangq.kept_by_day(), gangq.waiting_later(), gangq.capacity_of(bigint[]), gangq.role_of(bigint, integer), gangq.hosts_of(bigint), gangq.serves(gangq.incarnations, gangq.shapes),
  gangq.in_epoch(gangq.live_jobs, gangq.live_gangs),
  gangq.infeasible(integer, integer, boolean), gangq.gate_text(text, jsonb)
to gangq_viewer, gangq_submitter, gangq_worker, gangq_admin;

grant execute on function
  gangq.submit(text, text, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, text, jsonb, text[]),
  gangq.submit_gang(text, integer, text, jsonb, jsonb[], integer, integer, integer, bigint, numeric, jsonb, timestamptz, real, integer, integer, integer, bigint[], text, real, text, text,
    jsonb, text, text, text, boolean, text, jsonb, text[], integer, text, text, real, text, boolean, boolean),
  gangq.set_priority(integer, bigint[], bigint[]), gangq.cancel(bigint[], bigint[], text), gangq.retry(bigint[], bigint[])
to gangq_submitter, gangq_admin;

grant execute on function
  gangq.register_worker(text, text, text[], text, integer, integer, bigint, numeric, jsonb, text[], jsonb, text, text, bigint, jsonb, real, text[]),
  gangq.heartbeat(bigint, bigint[], bigint[], jsonb[], jsonb), gangq.claim(bigint, uuid, integer, integer[], boolean, text), gangq.barrier(bigint, bigint, integer),
  gangq.complete(bigint[], bigint[], jsonb[], boolean),
  gangq.complete_and_claim(bigint, bigint[], bigint[], jsonb[], boolean, uuid, integer, integer[], boolean, text, boolean, boolean),
  gangq.fail(bigint, bigint, jsonb, boolean, text),
  gangq.requeue(bigint, bigint, jsonb, boolean), gangq.release(bigint[], bigint[], text), gangq.ack_preempted(bigint, bigint),
  gangq.save_checkpoint(bigint, bigint, bigint, bytea, integer), gangq.load_checkpoint(bigint, bigint),
  gangq.watch_terms(text, text, text), gangq.learn_gap(text, text, real, bigint),
  gangq.trip(bigint, bigint, bigint, integer, jsonb, jsonb, text[], real, text), gangq.suspect(bigint, bigint, bigint, text, jsonb, boolean),
  gangq.predecessor(text), gangq.unproven(text), gangq.report_stuck(text, bigint, jsonb), gangq.bounce(bigint, text, boolean), gangq.bounced(bigint, boolean, jsonb),
  gangq.append_log(bigint[], bigint[], integer[], text[]), gangq.retire_worker(bigint, boolean), gangq.report_dead(text, bigint, jsonb),
  gangq.tick(boolean), gangq.admit(integer, integer), gangq.reserve_gang(bigint, bigint[]), gangq.reserve_members(bigint, bigint[], bigint[]), gangq.rollback_gang(bigint, text),
  gangq.complete_drain(bigint), gangq.reap_expired(integer), gangq.flag_dead_workers(), gangq.promote_due(integer), gangq.time_out(integer)
to gangq_worker, gangq_admin;

grant execute on function
  gangq.set_queue(text, boolean, text, integer, integer, integer, real, real, real, integer, text, text, boolean, jsonb, jsonb, real, integer, integer,
    jsonb, real, text, boolean, boolean, real, text[]),
  gangq.configure(real, real, real, real, real, real, real, real, real, real, real, real, integer, integer, interval, interval, interval, integer,
    real, real, real, real, real, real, real, real, real, integer, integer, real, text[], text[], integer, real, integer, boolean),
  gangq.set_task(text, real, real, real, real, real, text[], boolean),
  gangq.quarantine(text, text, text), gangq.unquarantine(text, text), gangq.set_taints(text, text[]), gangq.preempt_gang(bigint, bigint, text),
  gangq.shrink_gang(bigint, bigint[], text), gangq.displace_job(bigint, text), gangq.cordon(text, text, boolean, timestamptz, text), gangq.uncordon(text, text), gangq.decide(integer), gangq.replay(timestamptz, timestamptz),
  gangq.keep_partitions(boolean)
to gangq_admin;

select gangq.keep_partitions(true);

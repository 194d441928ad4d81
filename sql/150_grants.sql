-- Who may do what. Nobody but the owner writes a table: the functions are the door.
-- gangq_viewer reads views; gangq_submitter also submits, cancels, retries; gangq_worker also works; gangq_host is for the bouncer
-- of a host; gangq_admin may do all.

do $$
declare
  roles text[] := array['gangq_viewer', 'gangq_submitter', 'gangq_worker', 'gangq_host', 'gangq_admin'];
  missing text[] := array(
    select r.name from unnest(roles) with ordinality as r(name, n)
    where not exists (select 1 from pg_catalog.pg_roles p where p.rolname = r.name)
    order by r.n
  );
  r text;
begin
  foreach r in array missing loop
    begin
      execute format('create role %I nologin', r);
    exception
      when duplicate_object or unique_violation then null;  -- another database of this server migrates at the same time
      when insufficient_privilege then
        raise exception using errcode = '42501', message = format('role %s is missing and %s may not create roles', r, current_user),
          hint = format('Have an administrator run: create role %s;', array_to_string(missing, '; create role '));
    end;
  end loop;
end $$;

revoke all on schema gangq from public;
revoke all on all tables in schema gangq from public;
revoke all on all sequences in schema gangq from public;
revoke all on all functions in schema gangq from public;
grant usage on schema gangq to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_admin;

grant select on gangq.jobs, gangq.gangs, gangq.workers, gangq.devices, gangq.waiting, gangq.timeline, gangq.drains, gangq.preemptions,
  gangq.trips, gangq.device_trips, gangq.job_logs, gangq.job_evidence, gangq.flagged, gangq.cordoned, gangq.capacity, gangq.violations, gangq.queues, gangq.tasks, gangq.retention, gangq.events, gangq.settings, gangq.transitions, gangq.migrations, gangq.tick_state, gangq.lock_rows
to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_admin;
grant select on gangq.passes to gangq_admin;
grant execute on function
  gangq.now,
  gangq.schema_version,
  gangq.explain_gang,
  gangq.explain_job,
  gangq.plan,
  gangq.caller,
  gangq.is_admin,
  gangq.roles_of,
  gangq.shared_queues,
  gangq.may_act_as,
  gangq.may_report,
  gangq.may_report_too,
  gangq.queue_load,
  gangq.kept_by_day,
  gangq.waiting_later,
  gangq.capacity_of,
  gangq.idle_beside_work,
  gangq.role_of,
  gangq.hosts_of,
  gangq.serves,
  gangq.in_epoch,
  gangq.infeasible,
  gangq.gate_text
to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_admin;

grant execute on function
  gangq.submit,
  gangq.submit_gang,
  gangq.set_priority,
  gangq.cancel,
  gangq.retry
to gangq_submitter, gangq_admin;

grant execute on function
  gangq.register_worker,
  gangq.heartbeat,
  gangq.claim,
  gangq.barrier,
  gangq.complete,
  gangq.complete_and_claim,
  gangq.fail,
  gangq.requeue,
  gangq.release,
  gangq.ack_preempted,
  gangq.save_checkpoint,
  gangq.load_checkpoint,
  gangq.watch_terms,
  gangq.learn_gap,
  gangq.trip,
  gangq.suspect,
  gangq.predecessor,
  gangq.unproven,
  gangq.report_stuck,
  gangq.bounce,
  gangq.bounced,
  gangq.append_log,
  gangq.submit_child,
  gangq.submit_child_gang,
  gangq.retire_worker,
  gangq.report_dead,
  gangq.tick,
  gangq.admit,
  gangq.reserve_gang,
  gangq.reserve_members,
  gangq.rollback_gang,
  gangq.complete_drain,
  gangq.reap_expired,
  gangq.flag_dead_workers,
  gangq.promote_due,
  gangq.time_out
to gangq_worker, gangq_admin;

grant execute on function
  gangq.predecessor,
  gangq.unproven,
  gangq.report_dead,
  gangq.report_stuck,
  gangq.retire_worker,
  gangq.trip,
  gangq.bounce,
  gangq.bounced,
  gangq.tick,
  gangq.flag_dead_workers
to gangq_host;

grant execute on function
  gangq.set_queue,
  gangq.configure,
  gangq.set_task,
  gangq.quarantine,
  gangq.unquarantine,
  gangq.set_taints,
  gangq.preempt_gang,
  gangq.shrink_gang,
  gangq.displace_job,
  gangq.cordon,
  gangq.uncordon,
  gangq.decide,
  gangq.replay,
  gangq.keep_partitions
to gangq_admin;

select gangq.keep_partitions(true);

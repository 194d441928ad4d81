-- Who may do what. Nobody but the owner writes a table: the functions are the door. gangq_viewer
-- reads views; gangq_submitter also submits, cancels, retries; gangq_worker also works; gangq_host
-- is for the bouncer of a host; gangq_notifier delivers notifications; gangq_admin may do all.

-- The newest migration applied; the library refuses to work with another.
create function gangq.schema_version() returns text language sql stable as $$
  select max(m.name) from gangq.migrations m where m.name <> 'code'
$$;

do $$
declare
  roles text[] := '{gangq_viewer,gangq_submitter,gangq_worker,gangq_host,gangq_notifier,'
    'gangq_admin}';
  missing text[] := array(
    select r.name from unnest(roles) with ordinality as r(name, n)
    where not exists (select 1 from pg_catalog.pg_roles p where p.rolname = r.name)
    order by r.n);
  r text;
begin
  foreach r in array missing loop
    begin
      execute format('create role %I nologin', r);
    exception
      -- Another database of this server migrates at the same time.
      when duplicate_object or unique_violation then null;
      when insufficient_privilege then
        raise exception using errcode = '42501',
          message = format('role %s is missing and %s may not create roles', r, current_user),
          hint = format('Have an administrator run: create role %s;',
            array_to_string(missing, '; create role '));
    end;
  end loop;
end $$;

revoke all on schema gangq from public;
revoke all on all tables in schema gangq from public;
revoke all on all sequences in schema gangq from public;
revoke all on all functions in schema gangq from public;
grant usage on schema gangq
to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_notifier, gangq_admin;

grant select on gangq.jobs, gangq.gangs, gangq.workers, gangq.devices, gangq.waiting,
  gangq.timeline, gangq.drains, gangq.preemptions, gangq.places_open, gangq.trips,
  gangq.device_trips, gangq.job_logs, gangq.job_evidence, gangq.flagged, gangq.cordoned,
  gangq.capacity, gangq.violations, gangq.queues, gangq.limits, gangq.tasks, gangq.schedules,
  gangq.services, gangq.service_gangs, gangq.scaling, gangq.endpoints, gangq.batches,
  gangq.retention, gangq.events, gangq.settings, gangq.transitions, gangq.causes,
  gangq.trip_classes, gangq.migrations, gangq.tick_state, gangq.lock_rows,
  gangq.attempts, gangq.notifications, gangq.undelivered, gangq.notification_kinds, gangq.fleet,
  gangq.planned, gangq.running, gangq.member_beats
to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_admin;
grant select on gangq.passes to gangq_admin;
-- The doors: every function that a role may call. Each runs with its owner's rights, and is what
-- the roles that may call it can change at all. gangq_admin may open them all. There are no
-- overloads, so the name alone is enough: regproc.
do $$
declare
  every constant text := 'viewer submitter worker host';
  door record;
begin
  for door in
    select p.oid::regprocedure as f, p.provolatile = 'v' as changes, d.waits, d.roles
    from (values
      ('submit submit_gang submit_unique submit_unique_gang', 'submitter worker', '2s'),
      ('set_priority cancel retry retry_failed', 'submitter', '2s'),
      ('set_schedule pause_schedule resume_schedule', 'submitter', '2s'),
      ('run_schedule_now forget_schedule declare_schedules', 'submitter', '2s'),
      ('set_service stop_service delete_service roll_back_service declare_services', 'submitter',
        '2s'),
      ('claim barrier complete complete_and_claim fail snooze', 'worker', '2s'),
      ('requeue release ack_preempted', 'worker', '2s'),
      ('heartbeat save_checkpoint load_checkpoint inputs append_log', 'worker', '2s'),
      ('learn_gap suspect watch_terms report_ready report_load', 'worker', '2s'),
      ('register_worker', 'worker', '2s'),
      ('apply', 'worker', '100ms'),
      ('unplanned_schedules plan_schedules', 'worker host', '2s'),
      ('open_place reserve_gang rollback_gang complete_drain', 'worker', '2s'),
      ('retire_worker trip report_dead report_stuck predecessor unproven bounce bounced',
        'worker host', '2s'),
      ('tick', 'worker host', '100ms'),
      -- Steps of a tick and, time_out, of a pass.
      ('promote_due reap_expired time_out', 'worker', '100ms'),
      ('flag_dead_workers', 'worker host', '100ms'),
      ('keep_partitions', '', '100ms'),
      ('configure set_queue set_limit set_task pause_task resume_task', '', '2s'),
      ('quarantine unquarantine set_taints', '', '2s'),
      ('cordon uncordon', '', '2s'),
      ('preempt_gang shrink_gang displace_job', '', '2s'),
      ('add_notification remove_notification test_notification retry_notifications', '', '2s'),
      ('fetch_notification acknowledge_notification', 'notifier', '2s'),
      ('schema_version', every || ' notifier', '2s'),
      ('explain_gang explain_job board preview usage metrics', every, '2s'),
      -- What views call.
      ('shared_queues role_of hosts_of waiting_so_far capacity_of queue_load waiting_jobs', every,
        '2s'),
      ('key_usage limit_opens_at idle_beside_work kept_by_day open_slots change_mark', every, '2s')
    ) as d(verbs, roles, waits)
    cross join string_to_table(d.verbs, ' ') as v(name)
    left join pg_catalog.pg_proc p on p.oid = ('gangq.' || v.name)::regproc
  loop
    execute format('alter function %s security definer '
      'set search_path = pg_catalog, pg_temp set jit = off', door.f);
    if door.changes then
      execute format('alter function %s set lock_timeout = %L', door.f, door.waits);
    end if;
    execute format('grant execute on function %s to %s', door.f,
      'gangq_' || replace(trim(door.roles || ' admin'), ' ', ', gangq_'));
  end loop;

  -- PL/pgSQL looks names up when it runs: no other path may be in force then.
  for door in
    select p.oid::regprocedure as f
    from pg_catalog.pg_proc p join pg_catalog.pg_language l on l.oid = p.prolang
    where p.pronamespace = 'gangq'::regnamespace and l.lanname = 'plpgsql' and not p.prosecdef
  loop
    execute format('alter function %s set search_path = pg_catalog, pg_temp', door.f);
  end loop;
end $$;

-- What views call for each row, with the rights of whoever reads them.
grant execute on function
  gangq.now, gangq.caller, gangq.is_admin, gangq.roles_of, gangq.may_act_as, gangq.may_report,
  gangq.may_report_too, gangq.serves, gangq.in_epoch, gangq.number_in,
  gangq.owned, gangq.is_paused, gangq.planned_in_words, gangq.span, gangq.in_short
to gangq_viewer, gangq_submitter, gangq_worker, gangq_host, gangq_admin;

select gangq.keep_partitions(true);

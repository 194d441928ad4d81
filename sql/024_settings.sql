-- What administrators set: configure, set_task; set_queue is with the queues.
-- Locks: configure the row of settings; submit_gang shares it where a gang names a topology level.

create function gangq.settable(of_type regtype)
returns table (name text, type regtype, needed boolean) language sql stable as $$
  select a.attname::text, a.atttypid::regtype, a.attnotnull
  from pg_attribute a join pg_type t on t.typrelid = a.attrelid
  where t.oid = of_type and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
$$;
comment on function gangq.settable is 'Internal. The columns of a row type that a caller can set.';

create function gangq.refuse_unknown_key(what text, noun text, key text, known text[]) returns void
language plpgsql stable as $$
begin
  perform gangq.refuse('GQ001', format('%s has no %s %L', what, noun, left(key, 100)),
    coalesce(format('Did you mean %s? ', gangq.nearest(left(key, 100), known)), '')
      || format('There are %s.', array_to_string(known, ', ')));
end $$;
comment on function gangq.refuse_unknown_key is
  'Internal. Raises GQ001 for a key that is none of these, naming those that are most like it.';

create function gangq.changed(what text, was anyelement, changes jsonb) returns anyelement
language plpgsql stable as $$
declare
  known text[];
  change record;
begin
  if jsonb_typeof(changes) is distinct from 'object' then
    perform gangq.refuse('GQ001',
      format('the settings of %s are %s', what, coalesce(left(changes::text, 200), 'null')),
      'Pass them as one JSON object, for example {"budget_s": 3600}.');
  end if;
  known := array(
    select a.name from gangq.settable(pg_typeof(was)) a
    where a.name <> all ('{singleton,name,created_at}') order by 1);
  for change in
    select c.key, c.value, a.needed, a.type = 'jsonb'::regtype as is_object
    from jsonb_each(changes) c left join gangq.settable(pg_typeof(was)) a on a.name = c.key
    order by c.key
  loop
    if change.key <> all (known) then
      perform gangq.refuse_unknown_key(what, 'setting', change.key, known);
    end if;
    if change.value = 'null' and change.is_object then
      change.value := '{}';
    elsif change.value = 'null' and change.needed then
      perform gangq.refuse('GQ001', format('%s: %s needs a value', what, change.key),
        'Leave it out, and it stays what it is.');
    end if;
    begin
      was := jsonb_populate_record(was, jsonb_build_object(change.key, change.value));
    exception
      when data_exception then
        perform gangq.refuse('GQ001',
          format('%s: %s cannot be %s (%s)', what, change.key, left(change.value::text, 200), sqlerrm),
          'Numbers, texts and lists as JSON writes them; an interval is a text, like "7 days".');
    end;
  end loop;
  return was;
end $$;
comment on function gangq.changed is
  'Internal. A row of settings with what is given changed; a null takes a setting away where it may '
  'be absent. Raises GQ001 for a setting that there is not, or of another type.';

-- A worker stops its work when less than the margin and the grace are left of its lease. A lease
-- that is not longer than both and two heartbeats leaves no time to work in: one heartbeat may fail,
-- and the next must still come in time.
create function gangq.check_lease(lease_s real, margin_s real, grace_s real, heartbeat_s real)
returns void language plpgsql immutable as $$
declare
  least_s real := margin_s + grace_s + 2 * heartbeat_s;
begin
  if lease_s > least_s then
    return;
  end if;
  perform gangq.refuse('GQ001',
    format('a lease of %s s is too short: with lease_margin_s %s, grace_s %s and heartbeat_s %s it '
      'must be longer than %s s', lease_s, margin_s, grace_s, heartbeat_s, least_s),
    format('Work stops lease_margin_s and grace_s before the lease ends, and two heartbeats must fit '
      'before that. Set lease_s above %s, or lower lease_margin_s, grace_s or heartbeat_s '
      '(gangq.configure takes them in one call).', least_s));
end $$;
comment on function gangq.check_lease is
  'Internal. Raises GQ001 unless the lease is longer than its margin, the grace and two heartbeats '
  'together.';

create function gangq.configure(settings jsonb) returns void language plpgsql as $$
declare
  n gangq.settings;
  used record;
begin
  -- From here on no gang that names a topology level is on its way.
  select s.* into n from gangq.settings s for no key update;
  n := gangq.changed('the installation', n, settings);
  if exists (
      select 1 from unnest(n.topology) as l(level)
      where coalesce(l.level, '') = '' or length(l.level) > 200)
    or cardinality(n.topology) <> (select count(distinct l.level) from unnest(n.topology) as l(level))
  then
    perform gangq.refuse('GQ001', format('topology is %s', n.topology),
      'Name each level once, broad to narrow: {"topology": ["zone", "rack", "host"]}.');
  end if;
  select g.id as gang, l.level into used
  from gangq.live_gangs g
  join gangq.gang_kinds k on k.id = g.kind_id
  join gangq.kind_roles r on r.kind_id = k.id
  cross join lateral (values (k.require), (k.prefer), (r.require), (r.prefer)) as l(level)
  where settings ? 'topology' and l.level <> all (n.topology) limit 1;
  if found then
    perform gangq.refuse('GQ004',
      format('gang %s asks for the topology level %s', used.gang, used.level),
      'Leave the level in, or cancel the gang first.');
  end if;
  -- A retention that ends in the future would drop today's history with the next tick; one of
  -- 5,000 years ends before the calendar begins.
  if least(n.retention_short, n.retention_long, n.incarnation_retention) < '0'
    or greatest(n.retention_short, n.retention_long, n.incarnation_retention) > '100 years'
  then
    perform gangq.refuse('GQ001',
      format('retention_short is %s, retention_long %s and incarnation_retention %s',
        n.retention_short, n.retention_long, n.incarnation_retention),
      'Each is from 0 to 100 years: {"retention_short": "7 days"}. A queue''s retention_done '
      '"forever" keeps its history for good.');
  end if;
  update gangq.settings s set (
    singleton, heartbeat_s, lease_s, lease_margin_s, grace_s, claim_deadline_s, ack_timeout_s,
    candidate_silence_s, pass_over_s, flag_after_s, tick_s, gang_backoff_s, gang_backoff_max_s,
    topology, reservations, placement_timeout_s, preemptions_per_pass, warm_s, record_decisions,
    max_stops, budget_s, budget_gpu_s, stall_timeout_s, load_grace_s, health_window_s,
    long_phase_s, gang_stall_s, straggler_s, brake_share, brake_hold_s, device_trips,
    bounces_per_hour, notify_only, new_shapes_per_day, checkpoint_bytes, log_bytes,
    retention_short, retention_long, incarnation_retention
  ) = (select n.*);
  perform gangq.check_lease(n.lease_s, n.lease_margin_s, n.grace_s, n.heartbeat_s);
exception
  when check_violation then
    perform gangq.refuse('GQ001', sqlerrm,
      'Seconds, bytes and counts are positive numbers, brake_share is at most 1, and notify_only '
      'takes budget, stall, health, fault and gang; topology has 1 to 8 levels, host among them; '
      'see \d+ gangq.settings.');
end $$;
comment on function gangq.configure is
  'Changes the installation''s settings that are given: {"lease_s": 300, "topology": ["rack", '
  '"host"]}. For gangq_admin. Raises GQ001, GQ004 (a level of topology that a live gang asks for '
  'would go).';

create function gangq.set_task(
  task text, budget_s real default null, stall_timeout_s real default null, load_grace_s real default null,
  health_window_s real default null, long_phase_s real default null, notify_only text[] default null,
  forget boolean default false
) returns void language plpgsql as $$
#variable_conflict use_column
begin
  if coalesce(set_task.task, '') = '' or length(set_task.task) > 200 then
    perform gangq.refuse('GQ001', 'a task has a name of 1 to 200 characters', 'Call gangq.set_task(task => ''train'', budget_s => 3600).');
  end if;
  if set_task.forget then
    delete from gangq.task_settings ts where ts.task = set_task.task;
    delete from gangq.beat_gaps b where b.task = set_task.task;
  end if;
  if num_nonnulls(set_task.budget_s, set_task.stall_timeout_s, set_task.load_grace_s, set_task.health_window_s,
    set_task.long_phase_s, set_task.notify_only) = 0 then
    return;
  end if;
  insert into gangq.task_settings (task, budget_s, stall_timeout_s, load_grace_s, health_window_s, long_phase_s, notify_only)
  values (set_task.task, set_task.budget_s, set_task.stall_timeout_s, set_task.load_grace_s, set_task.health_window_s,
    set_task.long_phase_s, set_task.notify_only)
  on conflict (task) do update set
    budget_s = coalesce(excluded.budget_s, task_settings.budget_s),
    stall_timeout_s = coalesce(excluded.stall_timeout_s, task_settings.stall_timeout_s),
    load_grace_s = coalesce(excluded.load_grace_s, task_settings.load_grace_s),
    health_window_s = coalesce(excluded.health_window_s, task_settings.health_window_s),
    long_phase_s = coalesce(excluded.long_phase_s, task_settings.long_phase_s),
    notify_only = coalesce(excluded.notify_only, task_settings.notify_only);
exception
  when check_violation or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', format('task %L: %s', set_task.task, sqlerrm),
      'Seconds are positive numbers, a budget at most 1e9 and the others at most 1e7; notify_only takes budget, stall, health, fault and gang.');
end $$;
comment on function gangq.set_task is
  'Sets what the watchdogs allow the jobs of one task; null leaves a setting as it is. forget: first drops what was set '
  'for it before and what has been learned of its beats. Workers read it when they start and now and then; a budget '
  'is taken by jobs when they are submitted. For gangq_admin. Raises GQ001.';

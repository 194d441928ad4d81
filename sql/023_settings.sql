-- What is given by name, in one JSON object: the settings of the installation, of a queue and of a
-- task, the options of a verb (032), the roles of a gang. Each is read into a row whose columns say
-- what there is, and whose domains say what is allowed and are the hint of the error.
-- Locks: configure the row of settings, set_task its task's. What takes a topology level away also
-- waits for each transaction that submits or retries a gang which may name it (keep_topology).

-- Internal. The columns of a row type that a caller can set; type: of its domain the base type.
create function gangq.settable(of_type regtype)
returns table (name text, type regtype, domain oid, needed boolean) language sql stable as $$
  select a.attname::text, coalesce(nullif(d.typbasetype, 0), d.oid)::regtype, d.oid, a.attnotnull
  from pg_type t
  join pg_class c on c.oid = t.typrelid
  join pg_attribute a on a.attrelid = c.oid
  join pg_type d on d.oid = a.atttypid
  where t.oid = of_type and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
    -- Nor the key of a table, nor what a verb writes beside the settings.
    and (c.relkind = 'c'
      or a.attname <> all ('{singleton,name,task,created_at,worker,declared_at,full_at}'))
$$;

-- Internal. Whether JSON writes a value of this type so.
create function gangq.is_json_of(given jsonb, type regtype) returns boolean
language sql immutable as $$
  select case
    when type = 'jsonb'::regtype then true
    when type = any ('{smallint,integer,bigint,real,numeric}'::regtype[])
      then jsonb_typeof(given) = 'number'
    when type in ('integer[]'::regtype, 'bigint[]'::regtype)
      then jsonb_typeof(given) = 'array'
        and not jsonb_path_exists(given, 'strict $[*] ? (@.type() != "number")')
    when type = 'boolean'::regtype then jsonb_typeof(given) = 'boolean'
    when type = 'text[]'::regtype
      then jsonb_typeof(given) = 'array'
        and not jsonb_path_exists(given, 'strict $[*] ? (@.type() != "string")')
    else jsonb_typeof(given) = 'string' end
$$;

-- Internal. The row o with what is given changed; a null takes a value away. Raises GQ001.
create function gangq.read_options(what text, given jsonb, o anyelement) returns anyelement
language plpgsql stable as $$
declare
  said record;
  whole record;
begin
  -- What reads back as it was written has the right names, types and ranges. An array may hold a
  -- null. Nearly every call ends here.
  begin
    whole := jsonb_populate_record(o, given);
    if jsonb_strip_nulls(to_jsonb(whole)) = given
      and not jsonb_path_exists(given,
        'strict $.* ? (@.type() == "array")[*] ? (@ == null || @.type() == "array")')
    then
      return whole;
    end if;
  exception
    when data_exception or check_violation then null;
  end;
  if jsonb_typeof(given) is distinct from 'object' then
    perform gangq.refuse('GQ001',
      format('the options of %s are %s', what, left(coalesce(given::text, 'null'), 200)),
      'Pass them as one JSON object, for example {"budget_s": 3600}.');
  end if;
  for said in
    select e.key, e.value, a.*, obj_description(a.domain, 'pg_type') as hint,
      -- A number has as many digits as it is large: 1e300 has 301.
      gangq.shortened(e.value::text,
        case jsonb_typeof(e.value) when 'number' then 30 else 200 end) as shown
    from jsonb_each(given) e
    left join gangq.settable(pg_typeof(o)) a on a.name = e.key
    order by e.key
  loop
    if said.name is null then
      perform gangq.refuse_option(what, said.key, pg_typeof(o));
    elsif said.value = 'null' and said.needed and said.type = 'jsonb'::regtype then
      said.value := '{}';
    elsif said.value = 'null' and said.needed then
      perform gangq.refuse('GQ001', format('%s: %s needs a value', what, said.key),
        'Leave it out, and it stays what it is.');
    elsif said.value <> 'null' and not gangq.is_json_of(said.value, said.type) then
      perform gangq.refuse('GQ001', format('%s: %s cannot be %s', what, said.key, said.shown),
        format('In JSON it is written as %s. %s', said.type, coalesce(said.hint, '')));
    elsif jsonb_typeof(said.value) = 'number' then
      said.value := to_jsonb(trim_scale(said.value::numeric));
    end if;
    begin
      o := jsonb_populate_record(o, jsonb_build_object(said.key, said.value));
    exception
      when check_violation or numeric_value_out_of_range then
        perform gangq.refuse('GQ001',
          format('%s: %s is %s', what, said.key, said.shown),
          coalesce(said.hint, format('It is kept as %s.', said.type)));
      when data_exception then
        perform gangq.refuse('GQ001',
          format('%s: %s cannot be %s (%s)', what, said.key, said.shown, sqlerrm),
          coalesce(said.hint, format('It is kept as %s.', said.type)));
    end;
  end loop;
  return o;
end $$;

-- Internal. Raises GQ001, naming the options that are most like it.
create function gangq.refuse_option(what text, key text, type regtype) returns void
language plpgsql stable as $$
declare
  known text[] := array(select a.name from gangq.settable(type) a order by 1);
begin
  if exists (
    select from pg_proc p
    where p.pronamespace = 'gangq'::regnamespace and p.proname = what
      and key = any (p.proargnames[: p.pronargs - 1]))
  then
    perform gangq.refuse('GQ001', format('%s is no option of %s', key, what),
      format('It is an argument of its own: gangq.%s(%s => ...).', what, key));
  end if;
  perform gangq.refuse('GQ001', format('%s has no option %L', what, left(key, 100)),
    coalesce('Did you mean ' || gangq.nearest(left(key, 100), known) || '? ', '')
      || format('There are %s.', array_to_string(known, ', ')));
end $$;

-- Internal. Raises GQ001 for a lease that leaves no time to work in. A worker stops its work when
-- less than the margin and the grace are left of its lease. Before that one heartbeat may fail, and
-- the next must still come in time.
create function gangq.check_lease(lease_s real, margin_s real, grace_s real, heartbeat_s real)
returns void language plpgsql immutable as $$
declare
  least_s real := margin_s + grace_s + 2 * heartbeat_s;
begin
  if lease_s <= least_s then
    perform gangq.refuse('GQ001',
      format('a lease of %s s is too short: with lease_margin_s %s, grace_s %s and heartbeat_s %s '
        'it must be longer than %s s', lease_s, margin_s, grace_s, heartbeat_s, least_s),
      format('Work stops lease_margin_s and grace_s before the lease ends, and two heartbeats must '
        'fit before that. Set lease_s above %s, or lower lease_margin_s, grace_s or heartbeat_s '
        '(gangq.configure takes them in one call).', least_s));
  end if;
end $$;

-- Internal. Until this transaction ends no level of topology is taken away: configure cannot see a
-- gang that names one before it is committed. Waits only for a transaction that takes a level away.
create function gangq.keep_topology() returns void language plpgsql as $$
begin
  perform from gangq.settings s for key share;
end $$;

-- Changes the installation's settings that are given: {"lease_s": 300, "topology": ["rack",
-- "host"]}. For gangq_admin. Taking a topology level away waits for every open transaction that
-- submits a gang with roles or levels or retries a gang. Raises GQ001, GQ004 (a level of topology
-- that a live gang asks for would go), 55P03.
create function gangq.configure(settings jsonb) returns void language plpgsql as $$
declare
  n gangq.settings;
  used record;
begin
  select s.* into n from gangq.settings s for no key update;
  n := gangq.read_options('the installation', settings, n);
  -- If a level is taken away: see keep_topology.
  perform from gangq.settings s where not s.topology <@ n.topology for update;
  if exists (
      select 1 from unnest(n.topology) as l(level)
      where coalesce(l.level, '') = '' or length(l.level) > 200)
    or cardinality(n.topology) <> (
      select count(distinct l.level) from unnest(n.topology) as l(level))
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
      format('gang g%s asks for the topology level %s', used.gang, used.level),
      'Leave the level in, or cancel the gang first.');
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
end $$;

-- Sets what the watchdogs allow the jobs of one task: set_task('train', '{"budget_s": 3600}'); null
-- takes a setting away, and the installation's holds. forget: first drops what was set for it
-- before and what has been learned of its beats. Workers read it when they start and now and then;
-- a budget is taken by jobs when they are submitted. For gangq_admin. Raises GQ001.
create function gangq.set_task(task text, settings jsonb default '{}', forget boolean default false)
returns void language plpgsql as $$
declare
  n gangq.task_settings;
begin
  perform gangq.read_options('set_task', jsonb_build_object('task', coalesce(set_task.task, '')),
    null::gangq.other_arguments);
  if forget then
    delete from gangq.task_settings ts where ts.task = set_task.task;
    delete from gangq.beat_gaps b where b.task = set_task.task;
  end if;
  if settings = '{}' then
    return;
  end if;
  insert into gangq.task_settings (task) values (set_task.task) on conflict do nothing;
  select ts.* into n from gangq.task_settings ts where ts.task = set_task.task for no key update;
  n := gangq.read_options(format('task %L', set_task.task), settings, n);
  update gangq.task_settings ts
  set (task, budget_s, stall_timeout_s, load_grace_s, health_window_s, long_phase_s, notify_only)
    = (select n.*)
  where ts.task = set_task.task;
end $$;

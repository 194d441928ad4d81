-- Workers: register_worker, retire_worker, report_dead (proof of death). What a worker registers
-- belongs to one incarnation, which ends (end_incarnation) when the worker retires or dies.
-- Locks: register_worker the worker's name (a row of worker_names), the tasks that it declares
-- (task_options, by task), then its devices (device_registry, by UUID); retire_worker and
-- report_dead the incarnation, for no key update because foreign keys point at it, then its
-- devices by UUID. Then its jobs are freed with skip locked (free_orphans, 108); the next tick
-- frees the rest.

-- Internal. Locks a worker's name until the transaction ends, whether it exists or not.
create function gangq.lock_name(name text) returns void language plpgsql as $$
begin
  if lock_name.name is null or length(lock_name.name) > 200 then
    return;  -- No worker has such a name.
  end if;
  loop
    perform from gangq.worker_names n where n.name = lock_name.name for update;
    exit when found;
    -- If two sessions add the name at once, one waits here for the other, then locks its row.
    insert into gangq.worker_names (name) values (lock_name.name) on conflict do nothing;
  end loop;
end $$;

-- Internal. Keeps what a worker declares its tasks with, in place of what was declared before.
-- Raises GQ001.
create function gangq.declare_tasks(task_options jsonb, worker text, t timestamptz) returns void
language plpgsql as $$
declare
  said record;
  old gangq.task_options;
  new gangq.task_options;
begin
  if jsonb_typeof(declare_tasks.task_options) <> 'object'
    or pg_column_size(declare_tasks.task_options) > gangq.most_said() then
    perform gangq.refuse('GQ001',
      format('task_options of worker %L is no JSON object of 256 KiB at most', worker),
      'For example {"train": {"gpus": 1, "vram_mb": 16000}}.');
  end if;
  for said in
    select e.key as task, e.value as options from jsonb_each(declare_tasks.task_options) e
    order by e.key
  loop
    new := null;
    new := gangq.read_options(format('task %L', left(said.task, 220)), said.options, new);
    new.task := said.task;
    new.selector := gangq.check_selector(new.selector);
    new.tolerates := nullif(gangq.check_taints(new.tolerates, 'tolerates', true), '{}');
    select o.* into old from gangq.task_options o where o.task = said.task;
    new.worker := old.worker;
    new.declared_at := old.declared_at;
    continue when new = old;  -- A fleet that starts again writes nothing.
    new.worker := declare_tasks.worker;
    new.declared_at := t;
    delete from gangq.task_options o where o.task = said.task;
    if jsonb_strip_nulls(said.options) <> '{}' then
      -- Another worker may register at this moment, and is as new as this one.
      insert into gangq.task_options values (new.*) on conflict (task) do nothing;
    end if;
  end loop;
end $$;

-- Internal. Validates what a worker registers with. Raises GQ001, GQ002, GQ007.
create function gangq.check_worker(
  name text, host text, queues text[], devices jsonb, o gangq.worker_options
) returns void language plpgsql stable as $$
declare
  wrong record;
begin
  select w.what, w.said into wrong
  from (values ('name', name), ('host', host), ('address', coalesce(o.address, host)))
    as w(what, said)
  where (w.said ~ '^[A-Za-z0-9._@:][A-Za-z0-9._@:-]{0,199}$') is not true limit 1;
  if found then
    perform gangq.refuse('GQ001',
      format('the %s of a worker cannot be %L', wrong.what, coalesce(left(wrong.said, 80), '')),
      format('1 to 200 letters, digits, and . _ @ : - (no - first). Pass another %s, for example '
        'host-1.', wrong.what));
  end if;
  perform gangq.refuse_larger(format('%s of worker %s', w.what, name), w.bytes, w.most)
  from (values ('labels', pg_column_size(o.labels), 8192),
    ('identity', pg_column_size(o.identity), 65536), ('devices', pg_column_size(devices), 1048576),
    ('tasks', pg_column_size(o.tasks), gangq.most_said()),
    ('queues', pg_column_size(queues), gangq.most_said()),
    ('taints', pg_column_size(o.taints), 65536),
    ('boot_id', octet_length(o.boot_id), 200)) as w(what, bytes, most);
  if coalesce(cardinality(queues), 0) = 0 then
    perform gangq.refuse('GQ001', format('worker %L serves no queue', name),
      'Pass queues => array[''default''].');
  end if;
  perform gangq.queue_named(w.q) from unnest(queues) as w(q);
  if not o.lease_s <= 1e6 then
    perform gangq.refuse('GQ001', format('lease_s is %s', o.lease_s),
      'A worker''s own lease is a million seconds at most; null: the installation''s.');
  end if;
  if jsonb_typeof(devices) <> 'array' then
    perform gangq.refuse('GQ001', 'devices must be a JSON array',
      'For example [{"uuid": "GPU-...", "index": 0, "vram_mb": 24576, "source": "nvml"}].');
  end if;
end $$;

-- Internal. Raises GQ006 if a live incarnation has this name, saying what proves it dead.
create function gangq.refuse_taken(name text, t timestamptz) returns void language plpgsql as $$
declare
  other record;
begin
  select i.*, l.expires_at, extract(epoch from t - l.renewed_at) as silent_s,
    extract(epoch from l.expires_at - t) as lease_left_s
  into other
  from gangq.incarnations i join gangq.leases l on l.incarnation = i.id
  where i.name = refuse_taken.name and i.ended_at is null;
  if not found then
    return;
  end if;
  raise exception using errcode = 'GQ006',
    message = format('worker %L is registered from host %s (pid %s) and was heard %s s ago',
      other.name, other.host, coalesce(other.pid::text, '?'), round(other.silent_s, 1)),
    hint = format('Give this one another name, stop the other, or wait %s s for its lease to end '
      'and a tick to judge it.', greatest(0, ceil(other.lease_left_s))),
    detail = jsonb_build_object('incarnation', other.id, 'host', other.host,
      'boot_id', other.boot_id, 'pid', other.pid,
      'identity', case when gangq.may_report(other.login) then other.identity end,
      'silent_s', other.silent_s, 'lease_left_s', other.lease_left_s)::text;
end $$;

-- Internal. Records the devices that an incarnation sees. ids: of these devices; withheld: those
-- that another live incarnation offers or that are quarantined. Raises GQ001.
create function gangq.register_devices(
  incarnation bigint, host text, devices jsonb, out ids bigint[], out withheld text[]
) language plpgsql as $$
begin
  if exists (
    select from jsonb_to_recordset(devices) as x(uuid text, index integer)
    where (octet_length(x.uuid) between 1 and 1000 and x.index is not null) is not true)
  then
    perform gangq.refuse('GQ001', 'a device needs a uuid of 1 to 1000 bytes and an index',
      'For example {"uuid": "GPU-...", "index": 0, "vram_mb": 24576}.');
  end if;
  insert into gangq.device_registry as r (uuid, host, index, vram_mb, model, source, link)
  select distinct on (x.uuid) x.uuid, register_devices.host, x.index, coalesce(x.vram_mb, 0),
    coalesce(x.model, ''), coalesce(x.source, 'declared'), x.link
  from jsonb_to_recordset(devices) as x(
    uuid text, index integer, vram_mb integer, model text, source text, link text)
  order by x.uuid
  on conflict (uuid) do update set host = excluded.host, index = excluded.index,
    vram_mb = excluded.vram_mb, model = excluded.model, source = excluded.source,
    link = excluded.link
  -- A device that a live worker offers is described by that worker alone.
  where not exists (
    select 1 from gangq.incarnations i where i.id = r.offered_by and i.ended_at is null);
  with seen as (
    insert into gangq.device_claimants (device_id, incarnation)
    select r.id, register_devices.incarnation from gangq.device_registry r
    where r.uuid in (select x.uuid from jsonb_to_recordset(devices) as x(uuid text))
    returning device_id
  )
  select coalesce(array_agg(s.device_id), '{}') into ids from seen s;
  perform gangq.offer_devices(ids);
  withheld := array(
    select r.uuid
    from gangq.device_registry r
    left join gangq.device_holds h on h.device_id = r.id and h.kind = 'quarantine'
    where r.id = any (ids)
      and (r.offered_by is distinct from register_devices.incarnation or h.kind is not null)
    order by r.uuid);
end $$;

-- A worker starts: records what it offers and returns its incarnation, which every other worker
-- verb carries, and the installation's numbers. The lease runs from now. Devices that another live
-- incarnation offers, or that are quarantined, come back in withheld; the former are offered as
-- soon as that incarnation has ended. slots: how many placed jobs and members it runs at once;
-- null: one for each device, at least 1. options: light (1), labels, taints, tasks and more, see
-- \dT+ gangq.worker_options. The incarnation belongs to the login that registers it: no other, but
-- its members and admins, reports for it. Raises GQ001, GQ002, GQ006 (a live incarnation has this
-- name; the error's detail says what proves it dead, to its login), GQ007.
create function gangq.register_worker(
  name text, host text, queues text[], slots integer default null,
  memory_mb bigint default 0, cpus numeric default 0, devices jsonb default '[]',
  options jsonb default '{}'
) returns table (
  incarnation bigint, lease_granted_s real, heartbeat_s real, lease_margin_s real, grace_s real,
  ack_timeout_s real, tick_s real, log_bytes integer, checkpoint_bytes integer, withheld text[],
  registered_at timestamptz
) language plpgsql as $$
declare
  o gangq.worker_options;
  ids bigint[];
  predecessor record;
begin
  registered_at := gangq.now();
  o := gangq.read_options('register_worker', coalesce(register_worker.options, '{}'), o);
  o.task_options := nullif(o.task_options, 'null');
  perform gangq.read_options('register_worker', jsonb_strip_nulls(jsonb_build_object(
    'memory_mb', memory_mb, 'cpus', cpus)), null::gangq.other_arguments);
  select coalesce(o.lease_s, s.lease_s), s.heartbeat_s, s.lease_margin_s, s.grace_s,
    s.ack_timeout_s, s.tick_s, s.log_bytes, s.checkpoint_bytes
  into lease_granted_s, heartbeat_s, lease_margin_s, grace_s, ack_timeout_s, tick_s, log_bytes,
    checkpoint_bytes
  from gangq.settings s;
  -- A device that no slot can use lies idle.
  slots := coalesce(slots, case when jsonb_typeof(devices) = 'array'
    then greatest(1, jsonb_array_length(devices)) else 1 end);
  perform gangq.check_worker(name, host, queues, devices, o);
  perform gangq.check_lease(lease_granted_s, lease_margin_s, grace_s, heartbeat_s);
  perform gangq.lock_name(name);
  perform gangq.refuse_taken(name, registered_at);
  incarnation := (select b.base from gangq.id_base() b)
    + nextval('gangq.incarnation_ids'::regclass);
  select i.quarantined, i.operator_taints into predecessor
  from gangq.incarnations i where i.name = register_worker.name order by i.id desc limit 1;
  insert into gangq.incarnations (id, name, host, address, slots, light, prefetch, memory_mb, cpus,
    queues, tasks, labels, boot_id, pid, identity, registered_at, quarantined, taints,
    operator_taints, task_options)
  values (incarnation, name, host, coalesce(o.address, host), slots, coalesce(o.light, 1),
    coalesce(o.prefetch, 1), memory_mb, cpus, queues, o.tasks, coalesce(o.labels, '{}'), o.boot_id,
    o.pid, coalesce(o.identity, '{}'), registered_at, predecessor.quarantined,
    gangq.check_taints(coalesce(o.taints, '{}'), 'taints', false)
      || coalesce(predecessor.operator_taints, '{}'),
    coalesce(predecessor.operator_taints, '{}'), o.task_options);
  perform gangq.declare_tasks(o.task_options, name, registered_at);
  insert into gangq.leases (incarnation, expires_at, renewed_at, lease_s)
  values (incarnation, registered_at + make_interval(secs => lease_granted_s), registered_at,
    lease_granted_s);
  select r.ids, r.withheld into ids, withheld
  from gangq.register_devices(incarnation, host, devices) r;
  perform gangq.log_event(registered_at, 'register', incarnation => incarnation,
    data => jsonb_build_object('host', host, 'slots', slots, 'light', coalesce(o.light, 1),
      'devices', cardinality(ids), 'withheld', withheld));
  perform gangq.wake_tick();
  return next;
exception
  when check_violation or not_null_violation or invalid_text_representation
    or invalid_parameter_value or numeric_value_out_of_range then
    perform gangq.refuse('GQ001', format('worker %L: %s', register_worker.name, sqlerrm),
      'slots and light are 0 to 10000 and not both 0; prefetch is 1, or 1 to 1000 with light 1; '
      'vram_mb of a device is 0 to 2147483647.');
end $$;

-- Internal. Decides anew who offers these devices. A device stays with the live incarnation that
-- offers it, then goes to the oldest live one that sees it: one whose registration was held up
-- takes nothing away. Devices are locked in the order in which a registration takes them, NO KEY
-- because a claim refers to the key of a device. The second statement sees what has registered
-- while the first one waited.
create function gangq.offer_devices(device_ids bigint[]) returns void language sql volatile as $$
  select d.id from gangq.device_registry d
  where d.id = any (device_ids) order by d.uuid for no key update;
  update gangq.device_registry r set offered_by = best.incarnation
  from (
    select d.id, (
      select c.incarnation
      from gangq.device_claimants c join gangq.incarnations i on i.id = c.incarnation
      where c.device_id = d.id and i.ended_at is null
      order by c.incarnation is distinct from d.offered_by, c.incarnation limit 1) as incarnation
    from gangq.device_registry d where d.id = any (device_ids)) best
  where r.id = best.id and r.offered_by is distinct from best.incarnation
$$;

-- Internal. Locks all devices that this incarnation sees without waiting; false: one is locked
-- already, and some of the others may be locked from here on. For the tick, before offer_devices.
create function gangq.try_lock_devices(incarnation bigint) returns boolean language sql volatile as
$$
  with seen as materialized (
    select c.device_id from gangq.device_claimants c
    where c.incarnation = try_lock_devices.incarnation
  ),
  locked as materialized (
    select from gangq.device_registry d
    where d.id in (select s.device_id from seen s) order by d.uuid for no key update skip locked
  )
  select (select count(*) from locked) = (select count(*) from seen)
$$;

-- Internal. Raises GQ005, or GQ002 for an incarnation that never was.
create function gangq.refuse_ended(incarnation bigint) returns void language plpgsql as $$
declare
  i gangq.incarnations;
begin
  select x.* into i from gangq.incarnations x where x.id = refuse_ended.incarnation;
  if not found then
    perform gangq.refuse_missing('incarnation', refuse_ended.incarnation::text);
  end if;
  perform gangq.refuse('GQ005',
    format('worker %L, incarnation %s, ended at %s (%s)', i.name, i.id, i.ended_at, i.state),
    'Kill what it still runs, report nothing, and register again.');
end $$;

-- Internal. Marks an incarnation, whose row is locked, ended and passes its devices on; its jobs
-- are freed by free_orphans.
create function gangq.end_incarnation(incarnation bigint, final_state text, t timestamptz)
returns void language plpgsql as $$
begin
  update gangq.incarnations i set state = final_state, ended_at = t, model = null
  where i.id = end_incarnation.incarnation;
  perform gangq.forget_sleepers(array[end_incarnation.incarnation]);
  perform gangq.close_places(array(
    select p.id from gangq.places p where p.incarnation = end_incarnation.incarnation));
  perform gangq.offer_devices(array(
    select c.device_id from gangq.device_claimants c
    where c.incarnation = end_incarnation.incarnation));
end $$;

-- A worker stops as asked. final false: it takes nothing new and goes on with what it runs. final
-- true: it is gone, and says so itself, so all it had started is dead; jobs it still held are free
-- at once. No attempt is charged, each counts a stop (max_stops). Repeats are harmless. Raises
-- GQ002, 42501 (another login registered it).
create function gangq.retire_worker(incarnation bigint, final boolean default true) returns void
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  me gangq.incarnations;
begin
  select i.* into me from gangq.incarnations i
  where i.id = retire_worker.incarnation for no key update;
  if not found then
    perform gangq.refuse_ended(retire_worker.incarnation);
  end if;
  perform gangq.check_login(me.id, host => true);
  if me.ended_at is not null then
    return;
  end if;
  if final is not true then
    update gangq.incarnations i set state = 'draining' where i.id = me.id;
    perform gangq.forget_sleepers(array[me.id]);
    perform gangq.log_event(t, 'drain_worker', incarnation => me.id);
  else
    perform gangq.end_incarnation(me.id, 'retired', t);
    perform gangq.log_event(t, 'retire', incarnation => me.id);
    perform gangq.free_orphans(array[me.id]);
  end if;
  perform gangq.wake_tick();
end $$;

-- Internal, for report_dead and report_stuck. Locks the incarnation reported on and returns it.
-- Raises GQ001 without evidence, GQ002, 42501.
create function gangq.lock_reported(worker text, incarnation bigint, evidence jsonb)
returns gangq.incarnations language plpgsql as $$
declare
  i gangq.incarnations;
begin
  if jsonb_typeof(lock_reported.evidence) is distinct from 'object'
    or lock_reported.evidence = '{}'
  then
    perform gangq.refuse('GQ001',
      format('worker %L is reported on without evidence', lock_reported.worker),
      'Say what was found, as a JSON object. Dead: how every process it started was confirmed '
      'gone, {"by": "alice", "checked": "host was powered off"}. Stuck: which process survived '
      'SIGKILL, {"pid": 4711, "state": "D"}.');
  end if;
  select x.* into i from gangq.incarnations x
  where x.id = lock_reported.incarnation and x.name = lock_reported.worker for no key update;
  if not found then
    perform gangq.refuse('GQ002', format('worker %L has no incarnation %s', worker,
        coalesce(lock_reported.incarnation::text, 'null')),
      'Take both from select name, incarnation from gangq.workers.');
  end if;
  perform gangq.check_login(i.id, host => true);
  return i;
end $$;

-- Internal. Locks the single jobs that wait until the process of this incarnation, which tripped,
-- is gone: see 117. Returns those that no other transaction holds.
create function gangq.waits_for_exit(i gangq.incarnations) returns bigint[] language sql as $$
  select array(
    select z.id from gangq.live_jobs z
    where z.state = 'scheduled' and z.due_at = i.exits_at and z.ran_on = i.id
    order by z.id for update skip locked)
$$;

-- Proof of death of a worker's work: its parent, its next incarnation or its host's bouncer has
-- confirmed gone every process it had started. Its jobs are free at once, also one that waits since
-- a trip for its process to be gone, and so are devices withheld since then; returns how many jobs.
-- Evidence is kept in events, its traceback and log_tail apart. Repeats are harmless. For the login
-- that registered the worker, gangq_host and gangq_admin. Raises GQ001, GQ002, 42501.
create function gangq.report_dead(worker text, incarnation bigint, evidence jsonb) returns integer
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  i gangq.incarnations;
  due bigint[];
begin
  i := gangq.lock_reported(report_dead.worker, report_dead.incarnation, report_dead.evidence);
  if i.ended_at is not null and i.exits_at is null then
    return 0;
  end if;
  perform gangq.log_event(t, 'dead', incarnation => i.id, reason => 'proof of death',
    data => gangq.for_events(report_dead.evidence));
  insert into gangq.evidence (at, kind, incarnation, data)
  values (t, 'dead', i.id, gangq.cut(report_dead.evidence, gangq.most_evidence()));
  if i.ended_at is null then
    perform gangq.end_incarnation(i.id, 'dead', t);
  end if;
  -- After a trip jobs wait for exits_at, when the process would be gone: they need not any more.
  update gangq.incarnations x set exits_at = null, flagged_at = null where x.id = i.id;
  due := gangq.waits_for_exit(i);
  perform gangq.make_pending(due);
  perform gangq.lift_withheld(i.id, t);
  return cardinality(due) + gangq.free_orphans(array[i.id]);
end $$;

-- What an operator does to a worker or a device: quarantine, unquarantine, set_taints. Of a worker
-- both belong to its name and outlive its restart: register_worker copies them.
-- Locks: the worker's name and its newest incarnation; or the device: the worker that offers it,
-- then its places. unquarantine first takes the gangs and jobs that avoid the device (let_use).

-- Internal. Locks a worker's name and newest incarnation, which it returns. Raises GQ002. A
-- registration copies the operator's quarantine and taints from the newest incarnation of its name.
-- With the name locked, a registration has either committed, and its incarnation is the newest
-- here, or it waits and copies what this transaction writes.
create function gangq.lock_newest(worker text) returns bigint language plpgsql as $$
declare
  newest bigint;
begin
  perform gangq.lock_name(worker);
  select i.id into newest from gangq.incarnations i
  where i.name = worker order by i.id desc limit 1 for no key update;
  if not found then
    perform gangq.refuse_missing('worker', worker);
  end if;
  return newest;
end $$;

-- Internal. The device with this UUID. Raises GQ002.
create function gangq.device_of(device_uuid text) returns gangq.device_registry
language plpgsql stable as $$
declare
  d gangq.device_registry;
begin
  select r.* into d from gangq.device_registry r where r.uuid = device_uuid;
  if not found then
    perform gangq.refuse_missing('device', device_uuid);
  end if;
  return d;
end $$;

-- Keeps a device, or a worker (by name, also after a restart), from taking work. Running work goes
-- on. For gangq_admin. Raises GQ001, GQ002, GQ004 (device in use), GQ007 (the reason).
create function gangq.quarantine(
  device_uuid text default null, worker text default null, reason text default 'operator'
) returns void language plpgsql as $$
declare
  t timestamptz := gangq.now();
  d gangq.device_registry;
  newest bigint;
  holder bigint;
begin
  if (device_uuid is null) = (worker is null) then
    perform gangq.refuse('GQ001', 'quarantine a device or a worker, one of them',
      'Pass device_uuid or worker.');
  end if;
  perform gangq.refuse_larger('the reason', octet_length(reason), 4000);
  if coalesce(reason, '') = '' then
    perform gangq.refuse('GQ001', 'a quarantine needs a reason', 'Say why it takes no work.');
  end if;
  if worker is not null then
    newest := gangq.lock_newest(worker);
    update gangq.incarnations x set quarantined = quarantine.reason where x.id = newest;
    perform gangq.log_event(t, 'quarantine', incarnation => newest, reason => quarantine.reason,
      data => jsonb_build_object('worker', worker));
    return;
  end if;
  d := gangq.device_of(device_uuid);
  perform gangq.lock_devices(array[d.id]);
  select h.job_id into holder from gangq.device_holds h
  where h.device_id = d.id and h.kind = 'job';
  if found then
    perform gangq.refuse('GQ004', format('device %s is held by job %s', device_uuid, holder),
      'Cancel the job or let it end, then quarantine the device.');
  end if;
  perform gangq.close_places(waits => true, ids => array(
    select h.place_id from gangq.device_holds h where h.device_id = d.id and h.kind = 'place'));
  insert into gangq.device_holds (device_id, kind, reason, since)
  values (d.id, 'quarantine', quarantine.reason, t)
  -- In place of what a trip has withheld for a while.
  on conflict (device_id) do update
  set reason = excluded.reason, incarnation = null, until = null;
  perform gangq.log_event(t, 'quarantine', incarnation => d.offered_by,
    reason => quarantine.reason, data => jsonb_build_object('device', d.uuid));
end $$;

-- Internal. Until the transaction ends no claim takes these devices. Raises 55P03. A claim that
-- takes a device locks the worker that offers it first. Where no worker offers it, a registration
-- with it has to wait. A device may have changed hands while this waited.
create function gangq.lock_devices(device_ids bigint[]) returns void language plpgsql as $$
declare
  offering bigint[] := array(
    select distinct r.offered_by from gangq.device_registry r
    where r.id = any (device_ids) and r.offered_by is not null);
  moved text;
begin
  perform 1 from gangq.incarnations x where x.id = any (offering) order by x.id for no key update;
  perform 1 from gangq.device_registry r
  where r.id = any (device_ids) and r.offered_by is null order by r.uuid for no key update;
  select r.uuid into moved
  from gangq.device_registry r
  where r.id = any (device_ids) and r.offered_by is not null and r.offered_by <> all (offering)
  limit 1;
  if found then
    raise exception using errcode = 'lock_not_available',
      message = format('device %s is changing hands this moment', moved),
      hint = 'Nothing was changed: try again.';
  end if;
end $$;

-- Lifts a quarantine; live jobs that keep away from the device because they tripped on it may use
-- it again. For gangq_admin. Repeats are harmless. Raises GQ001, GQ002.
create function gangq.unquarantine(device_uuid text default null, worker text default null)
returns void language plpgsql as $$
declare
  d gangq.device_registry;
  newest bigint;
begin
  if (device_uuid is null) = (worker is null) then
    perform gangq.refuse('GQ001', 'lift the quarantine of a device or of a worker, one of them',
      'Pass device_uuid or worker.');
  end if;
  if worker is not null then
    newest := gangq.lock_newest(worker);
    update gangq.incarnations x set quarantined = null where x.id = newest;
  else
    d := gangq.device_of(device_uuid);
    perform gangq.let_use(d.id);
    delete from gangq.device_holds h where h.device_id = d.id and h.kind = 'quarantine';
    perform gangq.wake(array[d.offered_by], 'claim');
  end if;
  perform gangq.log_event(gangq.now(), 'unquarantine',
    incarnation => coalesce(newest, d.offered_by), reason => coalesce(device_uuid, worker),
    data => jsonb_strip_nulls(jsonb_build_object('device', device_uuid, 'worker', worker)));
  perform gangq.wake_tick();
end $$;

-- Sets what an operator taints a worker with, by name and also after a restart, beside the taints
-- it registers with; an empty array takes them off. What runs there runs on, what is reserved there
-- still starts. For gangq_admin. Raises GQ001, GQ002.
create function gangq.set_taints(worker text, taints text[]) returns void
language plpgsql as $$
declare
  newest bigint;
  wanted text[] := gangq.check_taints(set_taints.taints, 'taints', false);
begin
  newest := gangq.lock_newest(worker);
  update gangq.incarnations x set operator_taints = wanted,
    taints = x.taints[1:cardinality(x.taints) - cardinality(x.operator_taints)] || wanted
  where x.id = newest;
  perform gangq.log_event(gangq.now(), 'taint', incarnation => newest,
    data => jsonb_build_object('taints', wanted));
  perform gangq.wake(array[newest], 'claim');
  perform gangq.wake_tick();
end $$;

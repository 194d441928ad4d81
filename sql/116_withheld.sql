-- Devices that nobody gets: withheld after a trip, of a process that cannot be killed, or avoided
-- by a job that tripped there.
-- Locks: report_stuck: gangs, the worker's name, its row, the rows of workers that offer its
-- devices. lift_avoided, a step of the tick: gangs and jobs, with skip locked.
--
-- Several live workers may see one device (device_claimants). The jobs of one of them may take it
-- (device_registry.offered_by). While it is held it has one row in device_holds:
--
--     kind        incarnation  until      why it is held                         what ends that
--   1 job         -            -          its job is reserved or runs            its proven end
--   2 place       -            -          no job fills that place yet            fill or closing
--   3 quarantine  the worker   its lease  it tripped and may still run           report_dead, until
--   4 quarantine  the worker   -          a process of it cannot be killed       unquarantine
--   5 quarantine  -            -          a trip blamed it, its job never        unquarantine
--                                         confirmed a stop, an operator said so
--
-- withhold turns 1 into 3, 4 or 5; report_stuck turns 3, 2 and free devices into 4; quarantine, an
-- operator's, everything but 1 into 5. An operator can end 3 early, too.

-- Devices that are withheld -----------------------------------------------------------------------

-- Internal. Devices of this job (all, or these) are quarantined from here on: the head of this file
-- says with which incarnation and until. Returns which; null: it held none.
create function gangq.withhold(
  j gangq.live_jobs, reason text, t timestamptz, device_ids bigint[] default null,
  incarnation bigint default null, until timestamptz default null
) returns bigint[] language plpgsql as $$
declare
  withheld bigint[];
begin
  with moved as (
    update gangq.device_holds h set kind = 'quarantine', job_id = null, since = withhold.t,
      reason = withhold.reason, incarnation = withhold.incarnation,
      until = withhold.until
    where h.job_id = j.id and h.device_id = any (coalesce(withhold.device_ids, array[h.device_id]))
    returning h.device_id
  )
  select array_agg(m.device_id) into withheld from moved m;
  return withheld;
end $$;

-- Internal. Before a job of an ended incarnation is freed: withholds its devices where that may
-- still run.
create function gangq.withhold_doubtful(j gangq.live_jobs, t timestamptz) returns void
language sql volatile as $$
  select gangq.withhold(j, case
      when not i.reboot_needed then
        format('worker %s is exiting after a trip (%s)', i.name, i.exit_code)
      else coalesce(i.quarantined,
        format('a process of worker %s cannot be killed: reboot host %s', i.name, i.host)) end,
    t, incarnation => i.id, until => case when not i.reboot_needed then greatest(i.exits_at, (
      select l.expires_at from gangq.leases l where l.incarnation = i.id)) end)
  from gangq.incarnations i
  where i.id = j.incarnation and (i.reboot_needed or i.exits_at is not null)
$$;

-- Internal. Gives back devices withheld after a trip: of an incarnation that is proven gone, or
-- (null) those whose time is over.
create function gangq.lift_withheld(of_incarnation bigint, t timestamptz, most integer default 200)
returns void language plpgsql as $$
declare
  given_back bigint[];
  device record;
begin
  given_back := array(
    select z.device_id from gangq.device_holds z
    where z.kind = 'quarantine' and z.until is not null and case
      when of_incarnation is null then z.until <= lift_withheld.t
      else z.incarnation = of_incarnation end
    order by z.device_id limit most for update skip locked);
  if given_back = '{}' then
    return;
  end if;
  for device in
    with lifted as (
      delete from gangq.device_holds h where h.device_id = any (given_back)
      returning h.device_id, h.incarnation
    )
    select r.uuid, r.offered_by, l.incarnation
    from lifted l join gangq.device_registry r on r.id = l.device_id
  loop
    perform gangq.log_event(t, 'unquarantine', incarnation => device.incarnation,
      reason => case when of_incarnation is null then 'its worker''s lease would be over'
        else 'its worker is proven gone' end, data => jsonb_build_object('device', device.uuid));
    perform gangq.wake(array[device.offered_by], 'claim');
  end loop;
  perform gangq.wake_tick();
end $$;

-- Which jobs tripped on which device within the last day, as the quarantine of a device counts
-- them: without budgets, memory, faults of the application, members that were not charged, and jobs
-- called poison.
create view gangq.device_trips as
select d.uuid, v.job_id, v.at, e.code, v.incarnation
from (select gangq.now() as t offset 0) c
join gangq.evidence v on v.kind = 'trip' and v.at > c.t - interval '1 day' and v.at <= c.t
-- offset 0: each trip's event is read by its key, never by a scan of the day's events.
cross join lateral (
  select (x.data ->> 'code')::integer as code, x.data
  from gangq.events x
  where x.job_id = v.job_id and x.at = v.at and x.token = v.token and x.kind = 'trip' offset 0) e
cross join lateral jsonb_array_elements_text(coalesce(e.data -> 'blamed', '[]')) as d(uuid)
where e.code in (select k.code from gangq.trip_classes k where k.devices <> 'nothing')
  and not coalesce((e.data ->> 'application')::boolean, false)
  and coalesce((e.data ->> 'charged')::boolean, true)
  and not exists (
    select 1 from gangq.events p where p.job_id = v.job_id and p.kind = 'poison' offset 0);

-- Internal, for trip. Quarantines the devices that a trip blames: all when they are faulty,
-- otherwise those on which device_trips different jobs tripped within a day.
create function gangq.quarantine_blamed(
  j gangq.live_jobs, blamed bigint[], faulty boolean, why text, message text, t timestamptz
) returns void language plpgsql as $$
declare
  most integer := (select c.device_trips from gangq.settings c);
begin
  if not faulty then
    -- One query for all devices, limited to workers that had one of them: the day may have seen
    -- very many other trips.
    blamed := array(
      select r.id from gangq.device_registry r
      where r.id = any (blamed) and r.uuid in (
        select d.uuid from gangq.device_trips d
        where d.incarnation = any (array(
          select distinct c.incarnation from gangq.device_claimants c
          where c.device_id = any (blamed)))
        group by d.uuid
        having count(distinct d.job_id) >= most));
  end if;
  why := case when faulty then format('fault under job %s: %s', j.id, coalesce(message, why))
    else format('%s different jobs tripped on it within a day, the last one was job %s (%s)', most,
      j.id, why) end;
  blamed := gangq.withhold(j, why, t, blamed);
  perform gangq.log_job(t, 'quarantine', j, why, jsonb_build_object('device', r.uuid))
  from gangq.device_registry r where r.id = any (blamed) order by r.index, r.id;
end $$;

-- Devices that a job avoids -----------------------------------------------------------------------

-- Internal. The shape like this one that avoids exactly these devices; none given: no device.
create function gangq.shape_avoiding(shape_id integer, device_ids bigint[]) returns integer
language sql as $$
  select gangq.shape_like(s.id, (
      select array_agg(distinct d.id order by d.id) from unnest(device_ids) as d(id)
      where d.id is not null), s.submitter, null)
  from gangq.shapes s where s.id = shape_avoiding.shape_id
$$;

-- Internal. The members of these gangs that have the one shape get the other.
create function gangq.change_shape(gang_ids bigint[], old_shape integer, new_shape integer)
returns void language sql as $$
  update gangq.live_gangs g set
    kind_id = gangq.kind_of_shapes(g.kind_id, array(
      select case r.shape_id when old_shape then new_shape else r.shape_id end
      from gangq.kind_roles r where r.kind_id = g.kind_id order by r.ordinal)),
    shape_id = case g.shape_id when old_shape then new_shape else g.shape_id end
  where g.id = any (gang_ids);
  update gangq.live_jobs j set shape_id = new_shape
  where j.gang_id = any (gang_ids) and j.shape_id = old_shape;
$$;

-- Internal. Live jobs that tripped on this device may use it again.
create function gangq.let_use(device bigint) returns void language plpgsql as $$
declare
  avoiding integer[] := array(select s.id from gangq.shapes s where device = any (s.avoid));
  shape record;
begin
  perform 1 from gangq.live_gangs g
  where g.kind_id = any (array(
    select r.kind_id from gangq.kind_roles r where r.shape_id = any (avoiding)))
  order by g.id for update;
  perform 1 from gangq.live_jobs j where j.shape_id = any (avoiding) order by j.id for update;
  for shape in
    select s.id, gangq.shape_avoiding(s.id, array_remove(s.avoid, device)) as opened
    from gangq.shapes s
    where s.id = any (avoiding)
      and exists (select 1 from gangq.live_jobs j where j.shape_id = s.id)
  loop
    perform gangq.change_shape(array(
      select g.id from gangq.live_gangs g
      where g.kind_id in (select r.kind_id from gangq.kind_roles r where r.shape_id = shape.id)),
      shape.id, shape.opened);
    update gangq.live_jobs j set shape_id = shape.opened where j.shape_id = shape.id;
  end loop;
end $$;

-- Internal. Whether the workers that take work would have room for so many members when idle, on
-- devices besides these.
create function gangq.placeable_without(shape_id integer, members bigint, device_ids bigint[])
returns boolean language sql stable as $$
  select coalesce(sum(gangq.room(s, i.slots, i.memory_mb, i.cpus, d.enough)), 0) >= members
  from gangq.shapes s
  join gangq.incarnations i on i.state = 'live' and i.ended_at is null and i.quarantined is null
    and gangq.serves(i, s)
  cross join lateral (
    select count(*) as enough from gangq.device_registry r
    where r.offered_by = i.id and r.vram_mb >= s.vram_mb and r.id <> all (device_ids)
      and not exists (
        select 1 from gangq.device_holds h
        where h.device_id = r.id and h.kind = 'quarantine' and h.until is null)) d
  where s.id = placeable_without.shape_id and s.gpus > 0
$$;

-- Internal, for trip. A job never again uses a faulty device, and avoids one that was only idle as
-- long as another device could take it.
create function gangq.shape_after_trip(j gangq.live_jobs, blamed bigint[], faulty boolean)
returns integer language sql as $$
  select case when faulty or gangq.placeable_without(s.id, coalesce((
      select sum(r.min_members)
      from gangq.live_gangs g
      join gangq.kind_roles r on r.kind_id = g.kind_id and r.shape_id = s.id
      where g.id = j.gang_id), 1)::bigint, s.avoid || blamed)
    then gangq.shape_avoiding(s.id, s.avoid || blamed) else s.id end
  from gangq.shapes s
  where s.id = j.shape_id
$$;

-- Internal, a step of the tick. Pending jobs and blocked gangs may use devices again that they
-- avoid, if no other device could take them by now. Returns how many. A job avoids a device that
-- was only idle (78) as long as another device could take the job. That can end: the worker of the
-- other device retires, or it is quarantined. A device quarantined for good stays avoided until
-- unquarantine. Pending jobs and blocked gangs are found by hops along their indexes, so a tick
-- pays for the kinds that wait. Each round judges up to 20 kinds at random, so that none is always
-- left out.
create function gangq.lift_avoided(most integer default 200) returns integer
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  w record;
  n integer := 0;
begin
  for w in
    select s.id as shape_id, k.kind_id, k.members, s.avoid, a.kept
    from (
      select p.shape_id, null::integer as kind_id, 1::bigint as members from gangq.pending_shapes p
      union all
      select r.shape_id, b.kind_id, sum(r.min_members)
      from gangq.blocked_kinds b join gangq.kind_roles r on r.kind_id = b.kind_id
      group by r.shape_id, b.kind_id) k
    join gangq.shapes s on s.id = k.shape_id and s.avoid is not null
    cross join lateral (
      select array(
        select h.device_id from gangq.device_holds h
        where h.device_id = any (s.avoid) and h.kind = 'quarantine' and h.until is null
        order by h.device_id) as kept) a
    where exists (
      select 1 from gangq.device_registry r join gangq.incarnations i on i.id = r.offered_by
      where r.id = any (s.avoid) and r.id <> all (a.kept) and gangq.serves(i, s))
    order by random() limit 20
  loop
    exit when n >= most;
    -- When it could not be placed either way, as while all workers restart, nothing is gained.
    continue when gangq.placeable_without(w.shape_id, w.members, w.avoid)
      or not gangq.placeable_without(w.shape_id, w.members, w.kept);
    n := n + gangq.unavoid(w.shape_id, w.kind_id, w.kept, most - n);
  end loop;
  return n;
end $$;

-- Internal, for lift_avoided. Blocked gangs of this kind (null: pending single jobs) get the shape
-- that avoids only the devices kept. Returns how many.
create function gangq.unavoid(shape_id integer, kind_id integer, kept bigint[], most integer)
returns integer language plpgsql as $$
declare
  opened integer := gangq.shape_avoiding(unavoid.shape_id, kept);
  given_back jsonb := jsonb_build_object('devices', gangq.uuids_of(array(
    select d from gangq.shapes s cross join unnest(s.avoid) as d
    where s.id = unavoid.shape_id and d <> all (kept))));
  ids bigint[];
begin
  if unavoid.kind_id is null then
    ids := array(
      select z.id from gangq.live_jobs z where z.shape_id = unavoid.shape_id and z.state = 'pending'
      order by z.order_key limit most for update skip locked);
    update gangq.live_jobs j set shape_id = opened where j.id = any (ids);
    perform gangq.wake_lane(opened, cardinality(ids), 'sleepers');
  else
    ids := array(
      select w.id
      from (
        select g.id from gangq.live_gangs g
        where g.state = 'blocked' and g.kind_id = unavoid.kind_id order by g.order_key limit most) w
      where gangq.try_lock_gang(w.id));
    -- Read again under the lock.
    ids := array(
      select g.id from gangq.live_gangs g
      where g.id = any (ids) and g.state = 'blocked' and g.kind_id = unavoid.kind_id);
    perform gangq.change_shape(ids, unavoid.shape_id, opened);
  end if;
  perform gangq.log_event(gangq.now(), 'unavoid',
    gang_id => case when unavoid.kind_id is not null then i.id end,
    job_id => case when unavoid.kind_id is null then i.id end,
    reason => 'no other device could take it any more', data => given_back)
  from unnest(ids) as i(id);
  return cardinality(ids);
end $$;

-- Incarnations that are not proven gone -----------------------------------------------------------

-- Incarnations of this worker that ended by a trip and are not yet proven gone: its next start
-- looks for each and, when every process of it is gone, says so with report_dead, which gives their
-- devices back. Those that another login registered are left out, but for gangq_host and
-- gangq_admin.
create function gangq.unproven(worker text)
returns table (incarnation bigint, host text, boot_id text, pid bigint, identity jsonb,
  exits_at timestamptz, exit_code integer)
language sql stable as $$
  select i.id, i.host, i.boot_id, i.pid, i.identity, i.exits_at, i.exit_code::integer
  from gangq.incarnations i
  where i.name = unproven.worker and i.exits_at is not null
    and (gangq.may_report(i.login) or gangq.may_act_as('gangq_host'))
  order by i.id
$$;

-- The latest incarnation of this name, ended or not, with the devices it saw that a driver vouches
-- for. A worker that starts compares them with what it sees itself, and does not start beside a
-- process that nothing could kill. identity is empty where another login registered it.
create function gangq.predecessor(worker text)
returns table (incarnation bigint, state text, host text, boot_id text, pid bigint, identity jsonb,
  ended_at timestamptz, quarantined text, reboot_needed boolean, exits_at timestamptz,
  exit_code integer, devices text[])
language sql stable as $$
  select i.id, i.state, i.host, i.boot_id, i.pid,
    case when gangq.may_report(i.login) or gangq.may_act_as('gangq_host') then i.identity
      else '{}' end,
    i.ended_at, i.quarantined, i.reboot_needed, i.exits_at, i.exit_code::integer,
    array(
      select r.uuid from gangq.device_claimants c join gangq.device_registry r on r.id = c.device_id
      where c.incarnation = i.id and r.source <> 'declared' order by r.index, r.id)
  from gangq.incarnations i
  where i.name = predecessor.worker
  order by i.id desc
  limit 1
$$;

-- A process of this incarnation survived SIGKILL: only a reboot of its host helps. Nothing is freed
-- early. The worker is quarantined by name. Every device that it holds is quarantined from the end
-- of its lease until an operator lifts that; said after the lease, every device that it had, except
-- those that other jobs hold by now: the event and the server's log name them. Returns how many
-- devices. Repeats are harmless. For the login that registered the worker, gangq_host and
-- gangq_admin. Raises GQ001, GQ002, 42501; 55P03 while a device is changing hands: try again.
create function gangq.report_stuck(worker text, incarnation bigint, evidence jsonb) returns integer
language plpgsql as $$
declare
  t timestamptz;
  i gangq.incarnations;
  why text;
  lease_ends timestamptz;
  stuck bigint[];
  elsewhere jsonb := '[]';
begin
  perform gangq.lock_waiting_for(report_stuck.incarnation);
  perform gangq.lock_name(report_stuck.worker);  -- against a registration of it, as quarantine does
  i := gangq.lock_reported(report_stuck.worker, report_stuck.incarnation, report_stuck.evidence);
  t := gangq.now();
  why := format('process %s cannot be killed: reboot host %s',
    coalesce(report_stuck.evidence ->> 'pid', i.pid::text, '?'), i.host);
  -- What its jobs hold is withheld when its lease ends and the jobs are freed: see free_orphans.
  stuck := array(
    select h.device_id from gangq.device_holds h left join gangq.live_jobs j on j.id = h.job_id
    where j.incarnation = i.id or h.kind = 'quarantine' and h.incarnation = i.id
    order by h.device_id);
  if i.reboot_needed then
    return cardinality(stuck);
  end if;
  lease_ends := greatest(i.exits_at,
    (select l.expires_at from gangq.leases l where l.incarnation = i.id));
  if i.ended_at is not null and (i.exits_at is null or lease_ends <= t) then
    -- The devices of its jobs were given back, and it is not known any more which they were.
    stuck := gangq.quarantine_all_of(i, why, t);
    elsewhere := gangq.held_elsewhere(i.id);
  end if;
  update gangq.incarnations x set
    reboot_needed = x.reboot_needed or x.id = i.id,
    quarantined = case when x.id = newest.id then why else x.quarantined end
  from (select max(y.id) as id from gangq.incarnations y where y.name = i.name) newest
  where x.id in (i.id, newest.id);
  update gangq.device_holds h set reason = why, until = null
  where h.kind = 'quarantine' and h.incarnation = i.id;
  if i.exits_at > t then
    perform gangq.postpone_exit(i, lease_ends);
  end if;
  perform gangq.log_event(t, 'stuck', incarnation => i.id, reason => why,
    data => gangq.for_events(report_stuck.evidence) || jsonb_build_object('host', i.host,
      'held_by_others', elsewhere, 'devices', gangq.uuids_of(stuck)));
  insert into gangq.evidence (at, kind, incarnation, data)
  values (t, 'stuck', i.id, gangq.cut(report_stuck.evidence, 4194304));
  raise warning 'UNKILLABLE worker % on host %, incarnation %: % (its devices and its name are '
    'quarantined until gangq.unquarantine%)',
    i.name, i.host, i.id, why, (
      select coalesce('; others hold ' || string_agg(format('device %s by now (job %s of worker '
        '%s): cancel it, then select gangq.quarantine(%L)', e ->> 'device', e ->> 'job_id',
        e ->> 'worker', e ->> 'device'), '; '), '')
      from jsonb_array_elements(elsewhere) e);
  return cardinality(stuck);
end $$;

-- Internal, for report_stuck. Locks the gangs that wait until this worker is gone, now or once they
-- are drained, if they are free within 500 ms. Gangs are locked before worker rows. A gang that
-- another transaction holds open must not block the report.
create function gangq.lock_waiting_for(incarnation bigint) returns void language plpgsql as $$
begin
  begin
    perform set_config('lock_timeout', '500ms', true);
    perform 1 from gangq.live_gangs g
    where (g.state = 'draining' or (g.state = 'blocked' or g.missing_since is not null)
      and g.not_before is not null)
      and exists (
        select 1 from gangq.live_jobs j
        where j.gang_id = g.id and j.ran_on = lock_waiting_for.incarnation)
    order by g.id for update;
  exception when lock_not_available then
    null;
  end;
  perform set_config('lock_timeout', '2s', true);
end $$;

-- Internal, for report_stuck. Quarantines every device that an incarnation had and no job or other
-- quarantine holds. Returns all that are quarantined for it. Raises 55P03.
create function gangq.quarantine_all_of(i gangq.incarnations, why text, t timestamptz)
returns bigint[] language plpgsql as $$
declare
  had bigint[] := array(
    select c.device_id from gangq.device_claimants c where c.incarnation = i.id);
begin
  perform gangq.lock_devices(had);
  perform gangq.close_places(waits => true, ids => array(
    select h.place_id from gangq.device_holds h
    where h.device_id = any (had) and h.kind = 'place'));
  insert into gangq.device_holds as h (device_id, kind, reason, since, incarnation)
  select d.id, 'quarantine', why, t, i.id from unnest(had) as d(id) order by d.id
  -- Also devices that another trip withholds for a while only.
  on conflict (device_id) do update
    set reason = excluded.reason, incarnation = excluded.incarnation, until = null
  where h.kind = 'quarantine' and h.until is not null;
  return array(
    select h.device_id from gangq.device_holds h
    where h.kind = 'quarantine' and h.incarnation = i.id order by h.device_id);
end $$;

-- Internal, for report_stuck. The devices that an incarnation had and jobs of others hold now.
create function gangq.held_elsewhere(incarnation bigint) returns jsonb language sql stable as $$
  select coalesce(jsonb_agg(jsonb_build_object('device', r.uuid, 'job_id', j.id, 'worker', x.name)
    order by r.index, r.id), '[]')
  from gangq.device_claimants c
  join gangq.device_registry r on r.id = c.device_id
  join gangq.device_holds h on h.device_id = r.id
  join gangq.live_jobs j on j.id = h.job_id
  left join gangq.incarnations x on x.id = j.incarnation
  where c.incarnation = held_elsewhere.incarnation
    and j.incarnation is distinct from held_elsewhere.incarnation
$$;

-- Internal, for report_stuck. What waits for a process that should be gone at exits_at waits for
-- the end of its lease.
create function gangq.postpone_exit(i gangq.incarnations, lease_ends timestamptz) returns void
language sql as $$
  update gangq.live_gangs g set not_before = lease_ends
  where g.id = any (array(
    select z.id from gangq.live_gangs z
    where (z.state = 'blocked' or z.missing_since is not null)
      and z.not_before >= i.exits_at and z.not_before < lease_ends
      and exists (select 1 from gangq.live_jobs j where j.gang_id = z.id and j.ran_on = i.id)
    order by z.id for update skip locked));
  update gangq.live_jobs j set due_at = lease_ends
  where j.id = any (array(
    select z.id from gangq.live_jobs z
    where z.state = 'scheduled' and z.due_at = i.exits_at and z.ran_on = i.id
    order by z.id for update skip locked));
  update gangq.incarnations x set exits_at = lease_ends where x.id = i.id;
$$;

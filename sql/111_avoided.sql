-- Devices that a job avoids because it tripped there.
-- Locks: gangs by id, jobs by id. lift_avoided, a step of the tick, skips what is locked; let_use,
-- for unquarantine, waits.

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

-- Members get their place, and lose it again unclaimed: take_places, reserve_members, reserve_gang,
-- rollback_gang.
-- Locks: the gang, its jobs by id, then the chosen worker rows, those with skip locked: what is
-- busy now is tried again; then queues that have limits, by name.

-- A gang whose roles all have one size has all its members in every epoch. Of an elastic one those
-- with an epoch_rank are in it; the others stay blocked, or are being stopped because they have
-- just left it.
create function gangq.elastic(kind_id integer) returns boolean language sql stable as
$$ select exists (
  select 1
  from gangq.kind_roles r
  where r.kind_id = elastic.kind_id and r.min_members < r.max_members) $$;
comment on function gangq.elastic is
  'Internal. Whether gangs of this kind may run with fewer members than they have.';

create function gangq.in_epoch(j gangq.live_jobs, g gangq.live_gangs) returns boolean
language sql immutable
return j.epoch_rank is not null or g.world_size = g.size;
comment on function gangq.in_epoch is
  'Internal. Whether a member of a placed gang is part of its present epoch.';

create function gangq.lock_gang(gang_id bigint) returns gangq.live_gangs language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  select x.* into g from gangq.live_gangs x where x.id = lock_gang.gang_id for update;
  if not found then
    perform gangq.refuse('GQ002', format('gang %s is not live', lock_gang.gang_id),
      'It has ended or never existed: select * from gangq.gangs.');
  end if;
  perform 1 from gangq.live_jobs j where j.gang_id = g.id order by j.id for update;
  return g;
end $$;
comment on function gangq.lock_gang is
  'Internal. Locks a live gang and its members, and returns it. Raises GQ002.';

-- What it is to be placed, for whatever chose the places; under the caller's locks, and judged by
-- him.
create function gangq.take_places(
  gang_ids bigint[], job_ids bigint[], incarnations bigint[], ranks integer[], device_ids bigint[],
    device_jobs bigint[], digest text, t timestamptz
) returns void language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  ids bigint[] := array(select distinct i from unnest(take_places.gang_ids) as i order by i);
begin
  insert into gangq.device_holds (device_id, kind, job_id, since)
  select d.id, 'job', d.job_id, t from unnest(device_ids, device_jobs) as d(id, job_id);
  update gangq.live_gangs x set
    state = case x.state when 'blocked' then 'reserved' else x.state end, epoch = x.epoch + 1,
    world_size = case x.state when 'blocked' then m.members else x.world_size end,
    reserved_at = case x.state when 'blocked' then t else x.reserved_at end,
    deadline_at = case x.state when 'running'
      then least(x.deadline_at, t + make_interval(secs => x.claim_deadline_s))
        else t + make_interval(secs => x.claim_deadline_s) end,
    go_at = case x.state when 'blocked' then null else x.go_at end, not_before = null,
    restore_step = gangq.restore_step(x), drain_cause = null, drain_trigger = null
  from (select i.id, count(*) as members from unnest(take_places.gang_ids) as i(id) group by i.id) m
  where x.id = m.id;
  update gangq.live_jobs j
    set state = 'reserved', incarnation = p.incarnation,
      deadline_at = t + make_interval(secs => g.claim_deadline_s),
    epoch_rank = case when g.state = 'running' then j.epoch_rank when gangq.elastic(g.kind_id)
      then p.rank end
  from unnest(take_places.gang_ids, take_places.job_ids, take_places.incarnations,
    take_places.ranks) as p(gang_id, job_id, incarnation, rank)
  join gangq.live_gangs g on g.id = p.gang_id
  where j.id = p.job_id;
  -- A later step that only some members saved in an older epoch must never complete with this
  -- epoch's saves.
  delete from gangq.checkpoints c using gangq.live_gangs g
  where g.id = any (ids) and c.gang_id = g.id and c.step > coalesce(g.restore_step, -1);
  delete from gangq.plans p where p.ask = any (array(select 'g' || i from unnest(ids) as i));
  insert into gangq.events (id, at, kind, gang_id, epoch, actor, data)
  select (select b.base from gangq.id_base() b) + nextval('gangq.events_id_seq'::regclass), t,
    'reserve', g.id, g.epoch, gangq.actor(), jsonb_build_object(
    'size', g.size, 'world_size', g.world_size, 'restore_step', g.restore_step, 'digest',
      left(take_places.digest, 64),
    'replaces', case g.state when 'running' then (
      select jsonb_agg(coalesce(j.epoch_rank, j.rank) order by j.rank)
      from gangq.live_jobs j
      where j.gang_id = g.id and j.state = 'reserved') end,
    'hosts', h.hosts)
  from (
    select x.gang_id, jsonb_object_agg(x.host, x.members) as hosts
    from (
      select w.gang_id, i.host, count(*) as members
      from unnest(take_places.gang_ids, take_places.incarnations) as w(gang_id, id)
      join gangq.incarnations i on i.id = w.id
      group by w.gang_id, i.host) x
    group by x.gang_id) h
  join gangq.live_gangs g on g.id = h.gang_id
  order by g.id;
  perform gangq.wake(array(select distinct w from unnest(take_places.incarnations) as w), 'claim');
end $$;
comment on function gangq.take_places is
  'Internal. Writes down that these members, one entry each, are placed: new epochs, claim '
  'deadlines, devices held, workers woken. ranks: in the epoch. digest: of what the pass saw, null '
  'without one.';

-- Each member has as many devices as it needs, one after the other.
create function gangq.holders_of(job_ids bigint[], incarnations bigint[], device_ids bigint[])
returns bigint[]
language sql stable as $$
  with members as materialized (
    select w.job_id, w.incarnation, s.gpus, s.vram_mb, s.avoid,
      sum(s.gpus) over (order by w.n) as upto
    from unnest(job_ids, incarnations) with ordinality as w(job_id, incarnation, n)
    join gangq.live_jobs j on j.id = w.job_id join gangq.shapes s on s.id = j.shape_id
  )
  select case when count(*) = cardinality(device_ids) and count(distinct d.id) = count(*)
    and count(*) = (select sum(x.gpus) from members x)
    and coalesce(bool_and(r.id is not null), true)
      then coalesce(array_agg(m.job_id order by d.n), '{}') end
  from members m
  join unnest(device_ids) with ordinality as d(id, n) on d.n > m.upto - m.gpus and d.n <= m.upto
  left join gangq.device_registry r on r.id = d.id and r.offered_by = m.incarnation
    and r.vram_mb >= m.vram_mb
    and (m.avoid is null or r.id <> all (m.avoid))
    and not exists (select 1 from gangq.device_holds h where h.device_id = r.id)
$$;
comment on function gangq.holders_of is
  'Internal. The member that gets each of these devices; null where one is held, too small, '
  'avoided or elsewhere, or they are not as many as are needed.';

create function gangq.reserve_members(
  gang_id bigint, job_ids bigint[], incarnations bigint[], device_ids bigint[] default null,
    digest text default null
) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  fresh boolean;
  wanted bigint[];
  locked bigint[];
  m record;
  at_worker bigint;
  left_ids bigint[];
  left_vrams integer[];
  own_queue text;
  hit jsonb;
  picked bigint[];
  devices bigint[] := '{}';
  holders bigint[] := '{}';
begin
  perform gangq.require_read_committed('reserve_members');
  g := gangq.lock_gang(reserve_members.gang_id);
  if g.state <> 'blocked' and not (g.state = 'running' and g.missing_since is not null) then
    perform gangq.refuse('GQ004',
      format('gang %s is %s, only a blocked gang can be reserved', g.id, g.state),
        'Somebody else placed, cancelled or drained it.');
  end if;
  if coalesce(cardinality(reserve_members.job_ids), 0) = 0
    or cardinality(reserve_members.job_ids) <> coalesce(cardinality(reserve_members.incarnations),
      0) then
    perform gangq.refuse('GQ001',
      format('%s workers given for %s members',
        coalesce(cardinality(reserve_members.incarnations), 0),
      coalesce(cardinality(reserve_members.job_ids), 0)),
        'Pass the worker''s incarnation for each member, in rank order.');
  end if;
  fresh := g.state = 'blocked';
  own_queue := (select k.queue from gangq.gang_kinds k where k.id = g.kind_id);
  if fresh then
    if reserve_members.job_ids <> array(
        select j.id
        from gangq.live_jobs j
        where j.gang_id = g.id and j.id = any (reserve_members.job_ids)
        order by j.rank)
      or cardinality(reserve_members.job_ids) <> g.size and exists (
        select 1 from gangq.kind_roles r
        left join (
          select coalesce(j.role, 1) as ordinal, count(*) as members, max(j.rank) as last_rank
          from gangq.live_jobs j
          where j.id = any (reserve_members.job_ids)
          group by coalesce(j.role, 1)) x on x.ordinal = r.ordinal
        where r.kind_id = g.kind_id
          and (coalesce(x.members, 0) not between r.min_members and r.max_members
          or x.last_rank <> r.first_rank + x.members - 1)) then
      perform gangq.refuse('GQ001',
        format('these %s members are no epoch of gang %s', cardinality(reserve_members.job_ids),
          g.id),
        'Pass in rank order the lowest ranks of each role, at least its minimum and at most its maximum.');
    end if;
  elsif reserve_members.job_ids <> array(
    select j.id
    from gangq.live_jobs j
    where j.gang_id = g.id and j.state = 'blocked' and gangq.in_epoch(j, g)
    order by j.rank) then
    -- Another one is missing by now, or this one no more: they are placed together or not at all.
    return false;
  end if;
  wanted := array(select distinct w from unnest(reserve_members.incarnations) w order by w);
  -- Skip locked: a worker that is claiming this very moment may be about to spend what decide saw
  -- free.
  locked := array(
    select i.id
    from gangq.incarnations i
    where i.id = any (wanted)
    order by i.id
    for no key update skip locked);
  -- A statement of its own: what was cordoned while this one locked is seen.
  locked := gangq.candidates(t, locked);
  if locked <> wanted or exists (
    select 1
    from (
      select k.incarnation, bool_and(gangq.serves(i, s)) as serves, sum(k.members) as members,
        sum(k.members * s.memory_mb) as memory_mb,
        sum(k.members * s.cpus) as cpus
      from (
        select w.incarnation, j.shape_id, count(*) as members
        from unnest(reserve_members.job_ids, reserve_members.incarnations) as w(job_id, incarnation)
        join gangq.live_jobs j on j.id = w.job_id group by w.incarnation, j.shape_id) k
      join gangq.shapes s on s.id = k.shape_id join gangq.incarnations i on i.id = k.incarnation
      group by k.incarnation) d
    join gangq.free_capacity(wanted) f on f.incarnation = d.incarnation
    where not d.serves or d.members > f.slots or d.memory_mb > f.memory_mb or d.cpus > f.cpus
  ) then
    return false;
  end if;
  perform gangq.lock_limited(array[own_queue]);
  select gangq.limit_hit(own_queue, g.submitter, fresh::integer, count(*)::integer,
    sum(s.gpus)::bigint, sum(s.memory_mb)::bigint, sum(s.cpus))
  into hit
  from gangq.live_jobs j
  join gangq.shapes s on s.id = j.shape_id
  where j.id = any (reserve_members.job_ids);
  if hit is not null then
    perform gangq.refuse('GQ004',
      format('gang %s does not fit the limits of queue %s: %s %s are used, %s more would be, and %s is the limit', g.id, hit ->> 'queue',
      hit ->> 'used', hit ->> 'resource', hit ->> 'asked', hit ->> 'limit'),
        'Wait until others have ended, or raise the limit: select gangq.set_queue(...).');
  end if;
  if reserve_members.device_ids is not null then
    holders := gangq.holders_of(reserve_members.job_ids, reserve_members.incarnations,
      reserve_members.device_ids);
    if holders is null then
      return false;
    end if;
    devices := reserve_members.device_ids;
  end if;
  -- Each takes the smallest devices that are large enough and not avoided. Who can use the fewest
  -- chooses first: what suits the next one suited it too, so that nobody is left without whom
  -- another order would have served.
  for m in
    select w.job_id, w.incarnation, s.gpus, s.vram_mb, s.avoid, f.device_ids, f.vrams
    from unnest(reserve_members.job_ids, reserve_members.incarnations) as w(job_id, incarnation)
    join gangq.live_jobs j on j.id = w.job_id join gangq.shapes s on s.id = j.shape_id
    join gangq.free_capacity(wanted) f on f.incarnation = w.incarnation
    where s.gpus > 0 and reserve_members.device_ids is null
    order by w.incarnation, s.vram_mb desc, coalesce(cardinality(s.avoid), 0) desc, j.rank
  loop
    if m.incarnation is distinct from at_worker then
      at_worker := m.incarnation;
      left_ids := m.device_ids;
      left_vrams := m.vrams;
    end if;
    picked := array(
      select d.id from unnest(left_ids, left_vrams) with ordinality as d(id, vram, n)
      where d.vram >= m.vram_mb and (m.avoid is null or d.id <> all (m.avoid))
      order by d.n
      limit m.gpus);
    if cardinality(picked) < m.gpus then
      return false;
    end if;
    devices := devices || picked;
    holders := holders || array_fill(m.job_id, array[m.gpus]);
    select coalesce(array_agg(d.id order by d.n), '{}'),
      coalesce(array_agg(d.vram order by d.n), '{}')
    into left_ids, left_vrams
    from unnest(left_ids, left_vrams) with ordinality as d(id, vram, n) where d.id <> all (picked);
  end loop;
  perform gangq.take_places(array_fill(g.id, array[cardinality(reserve_members.job_ids)]),
    reserve_members.job_ids, reserve_members.incarnations,
    array(select n from generate_series(0, cardinality(reserve_members.job_ids) - 1) as n), devices,
      holders, reserve_members.digest, t);
  return true;
end $$;
comment on function gangq.reserve_members is
  'Places members of a gang, given in rank order, each on the worker given for it; all of them or '
  'none. Of a blocked gang: the members of a new epoch (of each role the lowest ranks, from its '
  'minimum to its maximum), which get the claim deadline; of a running one: exactly those that are '
  'missing, while the others run on and are told of the new epoch. Holds devices, wakes workers. '
  'False when a worker is busy or has no room any more, or others are missing by now: decide '
  'again. device_ids: theirs, in the same order; null: the smallest that do. digest: of the board '
  'that it was decided on. Raises GQ001, GQ002, GQ004, GQ008.';

create function gangq.reserve_gang(gang_id bigint, incarnations bigint[]) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
  g gangq.live_gangs;
begin
  perform gangq.require_read_committed('reserve_gang');
  select x.* into g from gangq.live_gangs x where x.id = reserve_gang.gang_id for update;
  if g.state = 'blocked' and coalesce(cardinality(reserve_gang.incarnations), 0) <> g.size then
    perform gangq.refuse('GQ001',
      format('%s given for a gang of %s',
        gangq.counted(coalesce(cardinality(reserve_gang.incarnations), 0), 'worker'), g.size),
      'Pass the worker''s incarnation for each rank, in rank order.');
  end if;
  return gangq.reserve_members(reserve_gang.gang_id,
    array(select j.id from gangq.live_jobs j where j.gang_id = g.id order by j.rank),
      reserve_gang.incarnations);
end $$;
comment on function gangq.reserve_gang is
  'Places a blocked gang: all members or none, on the worker given for each rank. Takes a new '
  'epoch, sets the claim deadline, holds the devices, wakes the workers, all in one transaction. '
  'False when a worker is busy this moment or has no room any more: decide again. Raises GQ001, '
  'GQ002, GQ004, GQ008.';

create function gangq.rollback_gang(gang_id bigint, reason text default null) returns boolean
language plpgsql as $$
#variable_conflict use_column
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  cfg gangq.settings;
  back bigint[];
begin
  g := gangq.lock_gang(rollback_gang.gang_id);
  back := array(
    select j.id
    from gangq.live_jobs j
    where j.gang_id = g.id and j.state = 'reserved'
    order by j.rank);
  if back = '{}' or g.state not in ('reserved', 'running')
    or g.state = 'reserved'
    and exists (select 1 from gangq.live_jobs j where j.gang_id = g.id and j.state = 'running') then
    return false;
  end if;
  select x.* into cfg from gangq.settings x;
  delete from gangq.device_holds h where h.job_id = any (back);
  -- Whoever did not claim in time is not asked again for a while. A worker that is claiming right
  -- now is not silent.
  update gangq.incarnations i set passed_over_until = t + make_interval(secs => cfg.pass_over_s)
  where g.deadline_at <= t and i.id = any (array(
    select z.id from gangq.incarnations z
    where z.id in (
      select j.incarnation from gangq.live_jobs j where j.id = any (back) and j.deadline_at <= t)
    order by z.id for no key update skip locked));
  update gangq.live_jobs j set state = 'blocked', incarnation = null, deadline_at = null,
    epoch_rank = case g.state when 'running' then j.epoch_rank end
  where j.id = any (back);
  update gangq.live_gangs x set deadline_at = null, placement_misses = x.placement_misses + 1,
    state = case x.state when 'reserved' then 'blocked' else x.state end,
    world_size = case x.state when 'running' then x.world_size end,
    reserved_at = case x.state when 'running' then x.reserved_at end,
    master_host = case x.state when 'running' then x.master_host end,
    master_addr = case x.state when 'running' then x.master_addr end,
    master_port = case x.state when 'running' then x.master_port end,
    not_before = t + gangq.backoff(cfg.gang_backoff_s, cfg.gang_backoff_max_s,
      x.placement_misses + 1)
  where x.id = g.id;
  perform gangq.log_event(t, 'rollback', g.id, g.epoch,
    reason => coalesce(rollback_gang.reason, 'not claimed in time'),
    data => case g.state when 'running' then jsonb_build_object('members', back) end);
  return true;
end $$;
comment on function gangq.rollback_gang is
  'Takes back a reservation that nobody has started on: the whole gang is blocked again, or of a '
  'running gang the members that were to replace missing ones; nobody is charged, a miss is '
  'counted and backs the gang off; workers that missed the deadline are passed over for a while. '
  'False when a member of a reserved gang was claimed (then it drains) or nothing is reserved. '
  'Raises GQ002.';

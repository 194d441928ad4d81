-- reserve_gang gives all members of a gang their workers and devices, in one transaction;
-- rollback_gang takes back what no worker has claimed.
-- reserve_gang: check_seats refuses what makes no sense; lock_room locks the workers and counts
-- their room; limit_hit asks the queue's limits; devices_for chooses devices; place_members writes.
-- Locks, in this order: the gang, its jobs by id, the chosen worker rows (skip locked: a busy one
-- means "decide again"), queues with limits by name.

-- Internal. Writes that these members, in rank order, are placed: a new epoch, claim deadlines,
-- device holds; wakes the workers. digest: of the board that the pass saw.
create function gangq.place_members(
  g gangq.live_gangs, job_ids bigint[], incarnations bigint[], devices bigint[], holders bigint[],
  digest text, t timestamptz
) returns void language plpgsql as $$
declare
  fresh constant boolean := g.state = 'blocked';
  waited constant jsonb := gangq.waited_of(g, t);
  deadline constant timestamptz := t + make_interval(secs => g.claim_deadline_s);
begin
  insert into gangq.device_holds (device_id, kind, job_id, since)
  select d.id, 'job', d.job_id, t from unnest(devices, holders) as d(id, job_id);
  update gangq.live_gangs x set epoch = x.epoch + 1, not_before = null,
    state = case when fresh then 'reserved' else x.state end,
    world_size = case when fresh then cardinality(place_members.job_ids) else x.world_size end,
    reserved_at = case when fresh then t else x.reserved_at end,
    deadline_at = case when fresh then deadline else least(x.deadline_at, deadline) end,
    go_at = case when fresh then null else x.go_at end,
    restore_step = gangq.restore_step(x), drain_cause = null, drain_trigger = null
  where x.id = g.id returning x.* into g;
  update gangq.live_jobs j set state = 'reserved', incarnation = p.incarnation,
    deadline_at = deadline, epoch_rank = case
      when not fresh then j.epoch_rank when gangq.elastic(g.kind_id) then p.n - 1 end
  from unnest(place_members.job_ids, incarnations) with ordinality as p(job_id, incarnation, n)
  where j.id = p.job_id;
  -- A later step that only some members saved in an older epoch must never complete with this
  -- epoch's saves.
  delete from gangq.checkpoints c
  where c.gang_id = g.id and c.step > coalesce(g.restore_step, -1);
  delete from gangq.plans p where p.ask = 'g' || g.id;
  perform gangq.log_event(t, 'reserve', g.id, g.epoch, data => jsonb_build_object(
    'waited', waited, 'size', g.size, 'world_size', g.world_size, 'restore_step', g.restore_step,
    'digest', left(digest, 64), 'replaces', case when not fresh then (
      select jsonb_agg(gangq.rank_of(j) order by j.rank)
      from gangq.live_jobs j where j.gang_id = g.id and j.state = 'reserved') end,
    'hosts', (
      select jsonb_object_agg(x.host, x.members)
      from (
        select i.host, count(*) as members
        from unnest(incarnations) as w(id) join gangq.incarnations i on i.id = w.id
        group by i.host) x)));
  perform gangq.wake(incarnations, 'claim');
end $$;

-- Internal. Whether these members, in rank order, could be an epoch: of each role the lowest ranks,
-- from its minimum to its maximum.
create function gangq.is_epoch(g gangq.live_gangs, job_ids bigint[]) returns boolean
language plpgsql stable set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return job_ids = array(
      select j.id from gangq.live_jobs j
      where j.gang_id = (g).id and j.id = any (job_ids) order by j.rank)
    and (cardinality(job_ids) = (g).size or not exists (
      select 1 from gangq.kind_roles r
      left join (
        select j.role as ordinal, count(*) as members, max(j.rank) as last_rank
        from gangq.live_jobs j
        where j.id = any (job_ids)
        group by j.role) x on x.ordinal = r.ordinal
      where r.kind_id = (g).kind_id
        and (coalesce(x.members, 0) not between r.min_members and r.max_members
          or x.last_rank <> r.first_rank + x.members - 1)));
end $$;

-- Internal. Locks these workers. Returns whether none was busy and they have room for the members.
-- A worker whose row is locked may be claiming what the decision saw free: it counts as busy. The
-- checks are statements after the locks, so they see what was cordoned or claimed before.
create function gangq.lock_room(job_ids bigint[], incarnations bigint[], t timestamptz)
returns boolean language plpgsql as $$
declare
  wanted bigint[] := array(select distinct w from unnest(incarnations) as w order by w);
  locked bigint[] := array(
    select i.id from gangq.incarnations i
    where i.id = any (wanted) order by i.id for no key update skip locked);
begin
  if gangq.candidates(t, locked) <> wanted then
    return false;
  end if;
  return not exists (
    select 1
    from (
      select w.incarnation, bool_and(gangq.serves(i, s)) as serves, count(*) as members,
        sum(s.memory_mb) as memory_mb, sum(s.cpus) as cpus
      from unnest(job_ids, incarnations) as w(job_id, incarnation)
      join gangq.live_jobs j on j.id = w.job_id
      join gangq.shapes s on s.id = j.shape_id
      join gangq.incarnations i on i.id = w.incarnation
      group by w.incarnation) d
    join gangq.free_capacity(wanted) f on f.incarnation = d.incarnation
    where not d.serves or d.members > f.slots or d.memory_mb > f.memory_mb or d.cpus > f.cpus);
end $$;

-- Internal. Devices for these members, and which member gets each: the given ones in order, or the
-- smallest free ones. devices null: they are not to be had. The member that fits the fewest devices
-- chooses first. Every device that fits it also fits the members after it, so this order serves all
-- members if any order does.
create function gangq.devices_for(
  job_ids bigint[], incarnations bigint[], given bigint[],
  out devices bigint[], out holders bigint[]
) language plpgsql stable as $$
declare
  m record;
  mine bigint[];
begin
  devices := '{}';
  for m in
    select w.job_id, s as shape, s.gpus, f.device_ids, f.vrams,
      sum(s.gpus) over (order by w.n) as upto
    from unnest(job_ids, incarnations) with ordinality as w(job_id, incarnation, n)
    join gangq.live_jobs j on j.id = w.job_id
    join gangq.shapes s on s.id = j.shape_id
    join gangq.free_capacity(incarnations) f on f.incarnation = w.incarnation
    where s.gpus > 0
    order by s.vram_mb desc, coalesce(cardinality(s.avoid), 0) desc, j.rank
  loop
    mine := coalesce(given[m.upto - m.gpus + 1:m.upto], (array(
      select u.id
      from unnest(gangq.usable(m.shape, m.device_ids, m.vrams)) with ordinality as u(id, n)
      where u.id <> all (devices) order by u.n))[1:m.gpus]);
    if mine && devices or not gangq.suit(m.shape, mine, m.device_ids, m.vrams) then
      devices := null;
      return;
    end if;
    devices := devices || mine;
    holders := holders || array_fill(m.job_id, array[m.gpus]);
  end loop;
  if cardinality(devices) <> cardinality(given) then
    devices := null;
  end if;
end $$;

-- Internal, for reserve_gang. Raises GQ001 or GQ004 where gang, members and workers do not fit.
create function gangq.check_seats(
  g gangq.live_gangs, job_ids bigint[], incarnations bigint[]
) returns void language plpgsql stable as $$
declare
  members constant integer := cardinality(job_ids);
begin
  if g.state <> 'blocked' and not (g.state = 'running' and g.missing_since is not null) then
    perform gangq.refuse('GQ004',
      format('gang g%s is %s, only a blocked gang can be reserved', g.id, g.state),
      'Another session placed, cancelled or drained it.');
  elsif members = 0 or cardinality(incarnations) is distinct from members then
    perform gangq.refuse('GQ001', format('%s given for %s',
      gangq.counted(coalesce(cardinality(incarnations), 0), 'worker'),
      gangq.counted(members, 'member')),
      'Pass the worker''s incarnation for each member, in rank order.');
  elsif g.state = 'blocked' and not gangq.is_epoch(g, job_ids) then
    perform gangq.refuse('GQ001',
      format('these %s members are no epoch of gang g%s', members, g.id),
      'Pass in rank order the lowest ranks of each role, at least its minimum and at most its '
      'maximum.');
  end if;
end $$;

-- Places members of a gang, given in rank order (null: all), each on the worker given for it; all
-- of them or none, in one transaction. Of a blocked gang: the members of a new epoch (of each role
-- the lowest ranks, from its minimum to its maximum), which get the claim deadline; of a running
-- one: exactly those that are missing, while the others run on and are told of the new epoch. Holds
-- devices, wakes workers. False when a worker is busy or has no room any more, or others are
-- missing by now: decide again. device_ids: theirs, in the same order; null: the smallest that do.
-- digest: of the board that it was decided on. Raises GQ001, GQ002, GQ004 (also of a pause or a
-- limit), GQ008.
create function gangq.reserve_gang(
  gang_id bigint, incarnations bigint[], job_ids bigint[] default null,
  device_ids bigint[] default null, digest text default null
) returns boolean
language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  own_queue text;
  own_key text;
  hit jsonb;
  d record;
begin
  perform gangq.require_read_committed('reserve_gang');
  g := gangq.lock_gang(reserve_gang.gang_id);
  reserve_gang.job_ids := coalesce(reserve_gang.job_ids, array(
    select j.id from gangq.live_jobs j where j.gang_id = g.id order by j.rank));
  perform gangq.check_seats(g, reserve_gang.job_ids, reserve_gang.incarnations);
  if g.state = 'running' and reserve_gang.job_ids <> array(
    select j.id from gangq.live_jobs j
    where j.gang_id = g.id and j.state = 'blocked' and gangq.in_epoch(j, g) order by j.rank) then
    -- By now others are missing. All that are missing are placed together or not at all.
    return false;
  end if;
  own_queue := (select k.queue from gangq.gang_kinds k where k.id = g.kind_id);
  own_key := gangq.key_of(g.kind_id);
  if gangq.paused_queue(own_queue) is not null or gangq.paused_task(g.kind_id) is not null then
    perform gangq.refuse('GQ004', case when gangq.paused_queue(own_queue) is not null
        then 'its queue is paused' else 'a task of it is paused' end,
      'Resume it first: gangq.set_queue(..., ''{"paused": false}''), gangq.resume_task.');
  elsif not gangq.lock_room(reserve_gang.job_ids, reserve_gang.incarnations, t) then
    return false;
  end if;
  perform gangq.lock_limited(array[own_queue], array[own_key]);
  select gangq.limit_hit(own_queue, own_key, g.submitter, (g.state = 'blocked')::integer,
    count(*)::integer, sum(s.gpus)::bigint, sum(s.memory_mb)::bigint, sum(s.cpus))
  into hit
  from gangq.live_jobs j join gangq.shapes s on s.id = j.shape_id
  where j.id = any (reserve_gang.job_ids);
  if hit is not null then
    perform gangq.refuse('GQ004', format('gang g%s does not fit the limits of %s: '
      '%s %s are used, %s more would be, and %s is the limit', g.id,
      gangq.limited_by(hit ->> 'queue', hit ->> 'key'), hit ->> 'used', hit ->> 'resource',
      hit ->> 'asked', hit ->> 'limit'),
      'Wait until others have ended, or raise the limit: gangq.set_queue, gangq.set_limit.');
  end if;
  d := gangq.devices_for(
    reserve_gang.job_ids, reserve_gang.incarnations, reserve_gang.device_ids);
  if d.devices is null then
    return false;
  end if;
  perform gangq.count_starts(own_queue, own_key, cardinality(reserve_gang.job_ids));
  perform gangq.place_members(g, reserve_gang.job_ids, reserve_gang.incarnations, d.devices,
    d.holders, reserve_gang.digest, t);
  return true;
end $$;

-- Internal. Workers that did not claim members of this locked gang in time get no work for
-- pass_over_s. Skip locked: a worker that is claiming right now is not silent.
create function gangq.pass_over(g gangq.live_gangs, t timestamptz) returns void
language sql volatile as $$
  update gangq.incarnations i set passed_over_until = t + make_interval(secs => c.pass_over_s)
  from gangq.settings c
  where g.deadline_at <= t and i.id = any (array(
    select z.id from gangq.incarnations z
    where z.id in (
      select j.incarnation from gangq.live_jobs j
      where j.gang_id = g.id and j.state = 'reserved' and j.deadline_at <= t)
    order by z.id for no key update skip locked))
$$;

-- Takes back a reservation that nobody has started on: the whole gang is blocked again, or of a
-- running gang the members that were to replace missing ones; nobody is charged, a miss is counted
-- and backs the gang off; workers that missed the deadline are passed over for a while. False when
-- a member of a reserved gang was claimed (then it drains) or nothing is reserved. Raises GQ002.
create function gangq.rollback_gang(gang_id bigint, reason text default null) returns boolean
language plpgsql as $$
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  cfg gangq.settings;
  back bigint[];
  runs boolean;
begin
  g := gangq.lock_gang(rollback_gang.gang_id);
  runs := g.state = 'running';
  back := array(
    select j.id from gangq.live_jobs j
    where j.gang_id = g.id and j.state = 'reserved' order by j.rank);
  if back = '{}' or g.state not in ('reserved', 'running') or not runs and exists (
    select 1 from gangq.live_jobs j where j.gang_id = g.id and j.state = 'running') then
    return false;
  end if;
  select x.* into cfg from gangq.settings x;
  delete from gangq.device_holds h where h.job_id = any (back);
  perform gangq.pass_over(g, t);
  update gangq.live_jobs j set state = 'blocked', incarnation = null, deadline_at = null,
    epoch_rank = case when runs then j.epoch_rank end
  where j.id = any (back);
  update gangq.live_gangs x set deadline_at = null, placement_misses = x.placement_misses + 1,
    state = case when runs then x.state else 'blocked' end,
    world_size = case when runs then x.world_size end,
    reserved_at = case when runs then x.reserved_at end,
    master_host = case when runs then x.master_host end,
    master_addr = case when runs then x.master_addr end,
    master_port = case when runs then x.master_port end,
    -- A member lost meanwhile may have to wait longer.
    not_before = greatest(x.not_before, t + gangq.backoff(cfg.gang_backoff_s,
      cfg.gang_backoff_max_s, x.placement_misses + 1))
  where x.id = g.id;
  perform gangq.log_event(t, 'rollback', g.id, g.epoch,
    reason => coalesce(rollback_gang.reason, 'not claimed in time'),
    data => case when runs then jsonb_build_object('members', back) end);
  return true;
end $$;

-- The jobs that ended incarnations still hold: a worker was judged dead (110), tripped (117), was
-- proven dead (report_dead, 040) or has retired.
-- taken_token makes whatever that worker still reports stale.
-- Locks: gangs by id, jobs by id, device_holds, all with skip locked.

-- Internal. The jobs that ended incarnations still hold and that cannot run any more. A worker that
-- tripped exits within seconds. Until then the child processes of its other slots may run. among:
-- of these incarnations; null: of all.
create function gangq.orphans(t timestamptz, among bigint[] default null)
returns table (job gangq.live_jobs, worker gangq.incarnations) language sql stable as $$
  select j, i from gangq.incarnations i join gangq.live_jobs j on j.incarnation = i.id
  where i.ended_at is not null and (i.exits_at > t) is not true
    and (orphans.among is null or i.id = any (orphans.among))
$$;

-- Internal. Frees the jobs that ended incarnations still hold. It reads only rows, so it can be
-- interrupted and repeated. Locked rows and jobs that may still run are left for the next tick.
-- Returns how many jobs.
create function gangq.free_orphans(of_incarnations bigint[], most integer default 1000)
returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  freed integer := 0;
  w record;
begin
  for w in
    select distinct (o.job).gang_id from gangq.orphans(t, of_incarnations) o
    where (o.job).gang_id is not null
    order by 1 limit most
  loop
    continue when not gangq.try_lock_gang(w.gang_id);
    freed := freed + gangq.free_orphaned_members(w.gang_id, t);
  end loop;
  for w in
    select (o.job).id, o.worker,
      row_number() over (partition by (o.worker).id, (o.job).light order by (o.job).token) as nth
    from gangq.orphans(t, of_incarnations) o
    where (o.job).gang_id is null
    order by 1 limit most
  loop
    freed := freed + gangq.free_orphaned_job(w.id, w.worker, w.nth, t)::integer;
  end loop;
  if freed > 0 then
    perform gangq.wake_tick();
  end if;
  return freed;
end $$;

-- 1. Members that were told to stop have stopped.
-- 2. A gang that drains needs no more than that: complete_drain goes on.
-- 3. A reservation that its workers cannot claim any more is rolled back.
-- 4. Members that ran are lost. The failure policy of the gang decides what follows.
--
-- Internal, for free_orphans. Of a locked gang: members told to stop are stopped, a reservation
-- that nobody claimed is rolled back, running members are lost. Returns how many.
create function gangq.free_orphaned_members(gang_id bigint, t timestamptz) returns integer
language plpgsql as $$
declare
  j gangq.live_jobs;
  g gangq.live_gangs;
  freed integer := 0;
begin
  select x.* into g from gangq.live_gangs x where x.id = free_orphaned_members.gang_id;
  -- Another transaction may have freed them, and the gang may have been reserved anew.
  if not exists (select from gangq.orphans(t) o where (o.job).gang_id = g.id) then
    return 0;
  end if;
  update gangq.live_jobs x set taken_token = x.token
  from gangq.orphans(t) o
  where x.id = (o.job).id and x.gang_id = g.id and x.token is not null;
  -- 1.
  for j in
    select (o.job).* from gangq.orphans(t) o
    where (o.job).gang_id = g.id and (o.job).state = 'preempting' order by (o.job).id
  loop
    perform gangq.withhold_doubtful(j, t);
    perform gangq.stopped(j, null, t, 'dead');
    freed := freed + 1;
  end loop;
  -- 2.
  if g.state = 'draining' then
    return freed;
  end if;
  -- 3.
  if g.state = 'reserved' or exists (
    select 1 from gangq.live_jobs x join gangq.incarnations i on i.id = x.incarnation
    where x.gang_id = g.id and x.state = 'reserved' and i.ended_at is not null)
  then
    if gangq.rollback_gang(g.id, 'a worker ended before it claimed') and g.state = 'reserved' then
      return freed;
    end if;
  end if;
  -- 4.
  return freed + gangq.lose_orphaned_members(g, t);
end $$;

-- Internal, for free_orphaned_members. The members of this gang that ran are lost; one lost worker
-- outweighs all others (cause_of_losses). A gang that is still reserved, because a member was
-- claimed, is taken down even if none of its members ran there. Returns how many are lost.
create function gangq.lose_orphaned_members(g gangq.live_gangs, t timestamptz) returns integer
language plpgsql as $$
declare
  gone bigint[];
  causes text[];
  cause text;
begin
  select coalesce(array_agg((o.job).id order by (o.job).rank), '{}'),
    array_agg(gangq.cause_of_loss(o.worker) order by (o.job).rank)
  into gone, causes
  from gangq.orphans(t) o
  where (o.job).gang_id = g.id and (o.job).state = 'running';
  if gone = '{}' and g.state = 'running' then
    return 0;
  end if;
  cause := gangq.cause_of_losses(causes);
  perform gangq.withhold_doubtful(x, t), gangq.log_event(t, 'lost', g.id, g.epoch, x.id, x.token,
    x.incarnation, 'its worker ended')
  from gangq.live_jobs x where x.id = any (gone);
  perform gangq.lose_members(g.id, gone, array(
      -- A member that was lost for another cause pays nothing for this one.
      select m.id from unnest(gone, causes) with ordinality as m(id, its_cause, n)
      where m.its_cause = cause order by m.n), cause,
    case cause when 'crash'
      then jsonb_build_object('type', 'WorkerLost', 'message', 'its worker was lost') end,
    format('a member %s%s', (gangq.cause_named(cause)).words,
      case cause when 'placement_miss' then ': its worker ended' end), t);
  return cardinality(gone);
end $$;

-- Internal, for free_orphans. Returns false when another transaction holds the job. nth: its place
-- among the claims of its lane. Of prefetched jobs only the oldest can have run; only that one is
-- charged a crash.
create function gangq.free_orphaned_job(job_id bigint, worker gangq.incarnations, nth bigint,
  t timestamptz)
returns boolean language plpgsql as $$
declare
  j gangq.live_jobs;
  cause text := gangq.cause_of_loss(worker);
begin
  update gangq.live_jobs x set taken_token = x.token
  from (
    select y.id from gangq.live_jobs y
    where y.id = free_orphaned_job.job_id and y.incarnation = worker.id
    for update skip locked) mine
  where x.id = mine.id
  returning x.* into j;
  if not found then
    return false;
  end if;
  perform gangq.withhold_doubtful(j, t);
  if j.state = 'preempting' then
    perform gangq.stopped(j, null, t, 'dead');
    return true;
  end if;
  perform gangq.log_job(t, 'lost', j, 'its worker ended');
  perform gangq.end_attempt(j,
    case when cause = 'crash' and j.light and worker.prefetch > 1 and nth > 1 then 'other_job'
      else cause end, null,
    format('worker %s %s', worker.name, case
      when cause = 'other_job' then format('stopped over another job (%s)', worker.exit_code)
      when worker.state = 'dead' then 'was lost'
      else 'was retired' end),
    t);
  return true;
end $$;

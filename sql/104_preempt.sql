-- Work is told to make room: preempt_gang stops a gang, displace_job a single job, shrink_gang
-- surplus members of an elastic gang; move_away, a step of the tick, moves both when the deadline
-- of a drain has passed.
-- Locks: gangs by id, jobs by id; move_away takes them with skip locked. Never a worker row.

-- Tells a reserved or running gang to stop. It keeps its checkpoint and is placed again; no attempt
-- is charged, each member that ran counts a stop. (A gang of which a member has finished cannot run
-- again and ends failed, for gangq.retry.) Returns false, and changes nothing, when the gang is not
-- placed. Raises GQ002, GQ007.
create function gangq.preempt_gang(gang_id bigint, reason text default null) returns boolean
language plpgsql as $$
declare
  g gangq.live_gangs;
begin
  perform gangq.refuse_larger('the reason', octet_length(preempt_gang.reason), 4000);
  g := gangq.lock_gang(preempt_gang.gang_id);
  if g.state not in ('reserved', 'running') then
    return false;
  end if;
  perform gangq.drain(g.id, '{}', '{}', 'preempt', null,
    coalesce(preempt_gang.reason, 'preempted by an operator'), gangq.now());
  return true;
end $$;

-- Tells a running single job to stop. No attempt is charged, it counts a stop; the job keeps its
-- checkpoint and returns to its old place in the queue once it is proven stopped. Returns false,
-- and changes nothing, for a job that does not run. For gangq_admin. Raises GQ001 (a member of a
-- gang), GQ002, GQ007.
create function gangq.displace_job(job_id bigint, reason text default null) returns boolean
language plpgsql as $$
declare
  j gangq.live_jobs;
begin
  perform gangq.refuse_larger('the reason', octet_length(displace_job.reason), 4000);
  select x.* into j from gangq.live_jobs x where x.id = displace_job.job_id for update;
  if not found then
    perform gangq.refuse_missing('job', displace_job.job_id::text, true);
  elsif j.gang_id is not null then
    perform gangq.refuse('GQ001', format('job %s is rank %s of gang g%s', j.id, j.rank, j.gang_id),
      format('Members stop together: select gangq.preempt_gang(%s).', j.gang_id));
  elsif j.state <> 'running' then
    return false;
  end if;
  perform gangq.stop_solo(j, 'preempt', coalesce(displace_job.reason, 'preempted by an operator'),
    null, gangq.now());
  return true;
end $$;

-- Internal. Tells this running single job, which is locked, to stop. how: preempt or move.
create function gangq.stop_solo(
  j gangq.live_jobs, how text, reason text, data jsonb, t timestamptz
) returns void language plpgsql as $$
begin
  update gangq.live_jobs x set state = 'preempting', told_at = t, stop_reason = how
  where x.id = j.id;
  perform gangq.log_job(t, how, j, reason, data);
  perform gangq.wake(array[j.incarnation], 'stop');
end $$;

-- Tells surplus members of a running elastic gang to stop. The others run on in a new epoch without
-- them. No attempt is charged, each of them counts a stop. What they hold is free once they are
-- proven stopped; they come back when the gang is placed anew. Returns false, and changes nothing,
-- when one of them is not running, a role would fall below its minimum, or a member is being
-- replaced. Raises GQ002, GQ007.
create function gangq.shrink_gang(gang_id bigint, job_ids bigint[], reason text default null)
returns boolean language plpgsql set plan_cache_mode = force_generic_plan as $$
declare
  t timestamptz := gangq.now();
  g gangq.live_gangs;
  leaving bigint[];
begin
  perform gangq.refuse_larger('the reason', octet_length(shrink_gang.reason), 4000);
  g := gangq.lock_gang(shrink_gang.gang_id);
  leaving := array(
    select j.id from gangq.live_jobs j
    where j.gang_id = g.id and j.id = any (shrink_gang.job_ids) and j.state = 'running'
    order by j.rank);
  if g.state <> 'running' or g.missing_since is not null or leaving = '{}'
    or cardinality(leaving) <> cardinality(shrink_gang.job_ids)
    or not exists (
      select 1 from gangq.live_jobs j
      where j.gang_id = g.id and j.state = 'running' and j.id <> all (leaving))
    or gangq.falls_below_minimum(g, leaving)
  then
    return false;
  end if;
  update gangq.live_jobs j set state = 'preempting', told_at = t, stop_reason = 'preempt',
    (attempts, crashes, trips, stops, snoozes) = (
      select * from gangq.charge_job(j, (gangq.cause_named('preempt')).member))
  where j.id = any (leaving);
  perform gangq.wake(array(select j.incarnation from gangq.live_jobs j where j.id = any (leaving)),
    'stop');
  perform gangq.go_on_without(g, leaving, '{"cause": "preempt"}',
    coalesce(shrink_gang.reason, 'surplus members are displaced'), t);
  return true;
end $$;

-- Internal, for move_away. The gangs and single jobs that are where the deadline of a drain has
-- passed.
create function gangq.must_move(t timestamptz)
returns table (gang_id bigint, job_id bigint, why text) language sql stable as $$
  select j.gang_id, case when j.gang_id is null then j.id end,
    min(format('%s %s is drained: %s', c.kind, c.name, c.reason))
  from gangq.cordons c
  join gangq.incarnations i on gangq.is_at(i, c.kind, c.name) and i.ended_at is null
  join gangq.live_jobs j on j.incarnation = i.id and j.state in ('reserved', 'running')
  where c.drain and c.deadline <= t
  group by 1, 2
$$;

-- Internal, a step of the tick. After the deadline of a drain, tells what runs there to stop.
-- Returns how many gangs and single jobs.
create function gangq.move_away(most integer default 200) returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  w record;
  moved integer := 0;
begin
  for w in
    select o.* from gangq.must_move(t) o order by o.gang_id nulls last, o.job_id limit most
  loop
    if w.gang_id is not null then
      continue when not gangq.try_lock_gang(w.gang_id);
    else
      perform from gangq.live_jobs j
      where j.id = w.job_id and j.gang_id is null for update skip locked;
      continue when not found;
    end if;
    -- It may have left that host, or may have ended.
    continue when not exists (
      select from gangq.must_move(t) o
      where (o.gang_id, o.job_id) is not distinct from (w.gang_id, w.job_id));
    moved := moved + gangq.stop_unit(coalesce('g' || w.gang_id, 'j' || w.job_id), 'move', w.why,
      '{}', t)::integer;
  end loop;
  return moved;
end $$;

-- What became of every attempt, and what that cost: attempt_history, the view attempts, usage.
--
-- What is recorded. An attempt is recorded once, when it ends, in the transaction that ends it, if
-- it held devices or did not end done. So a job without devices that is simply done, of which there
-- may be thousands a second, costs nothing here: its one row in history is the record of it, and
-- lacks only the worker's name once the incarnation is forgotten. Recording those as well would
-- cost each a second row beside that one. The row of a job with a GPU costs 2 to 3 % of the server
-- CPU that its completion and the next claim take (2.8 ms). usage counts devices alone, and keeps
-- its rows as long as events (retention_long), whatever the queue keeps of its jobs.
--
-- Who records. Five statements take a token off a job: leave (single jobs that are done),
-- end_attempt (other single jobs), finish_member, write_stopped and stopped (members). A test walks
-- through random verbs and finds each token ever given out in the view attempts exactly once.
-- Takes no locks.

-- Internal. The present attempt of a job, ended by this cause, for record_attempts.
create function gangq.attempt_of(j gangq.live_jobs, cause text, t timestamptz)
returns gangq.attempt_history language sql stable as $$
  select (j.id, j.token, j.gang_id, j.incarnation, j.claimed_at, t, j.shape_id, null,
    j.rank, null, null, cause, j.submitter, j.devices, null, null)::gangq.attempt_history
$$;

-- Internal. Records those of these attempts that held devices or did not end done.
create function gangq.record_attempts(ended gangq.attempt_history[]) returns void language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  insert into gangq.attempt_history (job_id, token, gang_id, incarnation, started_at, ended_at,
    shape_id, epoch, rank, worker, host, cause, submitter, devices, service)
  select e.job_id, e.token, e.gang_id, e.incarnation, e.started_at, e.ended_at, e.shape_id,
    case when e.gang_id is not null then (
      -- Its gang may have begun other epochs since. Of its day's events alone.
      select c.epoch from gangq.events c
      where c.job_id = e.job_id and c.at = e.started_at and c.kind = 'claim' and c.token = e.token
      limit 1) end,
    e.rank, i.name, i.host, e.cause, e.submitter, e.devices,
    (select g.service from gangq.live_gangs g where g.id = e.gang_id)
  from unnest(ended) e
  join gangq.shapes s on s.id = e.shape_id
  left join gangq.incarnations i on i.id = e.incarnation
  where s.gpus > 0 or e.cause <> 'done';
end $$;

-- The union is of bare tables and everything else is joined above it, as in the view jobs.
--
-- Every attempt of every job: where and on which devices it ran, from when to when, and why it
-- ended (cause: done, or one of gangq.causes; null: it runs). rank: a member's place in its gang at
-- its largest; epoch: the one that its attempt began in, where it is recorded. Attempts are kept
-- for retention_long; those that were done without devices as long as their job's history, and the
-- name of their worker as long as its incarnation.
create view gangq.attempts as
select a.job_id, a.token, a.gang_id, a.epoch, a.rank, coalesce(a.worker, i.name) as worker,
  coalesce(a.host, i.host) as host, s.queue, s.task, a.submitter, s.gpus,
  case when a.devices is not null then array(
    select r.uuid from gangq.device_registry r
    where r.id = any (a.devices) order by r.index, r.id) else '{}' end as devices,
  a.started_at, a.ended_at, a.cause
from (
  select x.job_id, x.token, x.gang_id, x.incarnation, x.started_at, x.ended_at, x.shape_id,
    x.epoch, x.rank, x.worker, x.host, x.cause, x.submitter, x.devices, true as recorded
  from gangq.attempt_history x
  union all
  select j.id, j.token, j.gang_id, j.incarnation, j.claimed_at, null::timestamptz, j.shape_id,
    null::integer, j.rank, null::text, null::text, null::text, j.submitter, j.devices, true
  from gangq.live_jobs j
  where j.token is not null
  union all
  -- Members that are done, of gangs that have not ended.
  select j.id, j.final_token, j.gang_id, j.ran_on, j.claimed_at, j.finished_at, j.shape_id,
    null::integer, j.rank, null::text, null::text, 'done', j.submitter, null::bigint[], false
  from gangq.live_jobs j
  where j.state = 'done'
  union all
  select h.job_id, h.token, h.gang_id, h.incarnation, h.claimed_at, h.finished_at, h.shape_id,
    null::integer, h.rank, null::text, null::text, 'done', h.submitter, null::bigint[], false
  from gangq.history h
  where h.state = 'done') a
join gangq.shapes s on s.id = a.shape_id
left join gangq.incarnations i on i.id = a.incarnation
where a.recorded or s.gpus = 0;

-- GPU hours in the time since, by submitter, queue, task and service or some of them (null: summed
-- over; for service also: of none), most first: devices held times time, from claim to proven end,
-- of attempts that have ended and of those that run. wasted_hours of them: attempts that failed or
-- were lost, with the members that stopped with those. displaced_hours: attempts that were told to
-- stop for others, moved off a host, or handed back by a worker that stopped. gangq.causes says
-- which is which. Raises GQ001.
create function gangq.usage(since interval default '30 days', by text[] default '{submitter}')
returns table (
  submitter text, queue text, task text, service text, attempts bigint, gpu_hours double precision,
  wasted_hours double precision, displaced_hours double precision
) language plpgsql stable as $$
declare
  t timestamptz := gangq.now();
  began timestamptz;
begin
  if (usage.since > '0' and usage.since <= '100 years') is not true then
    perform gangq.refuse('GQ001', format('since is %s', coalesce(usage.since::text, 'null')),
      'It is how far back to look: more than 0, and 100 years at most.');
  -- Also without nulls: for a null the comparison is false.
  elsif (usage.by <@ '{submitter,queue,task,service}') is not true
  then
    perform gangq.refuse('GQ001', format('by is %s', left(coalesce(usage.by::text, 'null'), 100)),
      'It is some of submitter, queue, task and service, or empty for the sum.');
  end if;
  began := t - usage.since;
  return query
  with spent as (
    select x.shape_id, x.submitter, x.service, c.hours as kind, count(*) as attempts,
      sum(greatest(0, extract(epoch from x.ended_at - greatest(x.started_at, began))))::float8
        as seconds
    from gangq.attempt_history x left join gangq.causes c on c.cause = x.cause
    where x.ended_at > began
    group by 1, 2, 3, 4
    union all
    select j.shape_id, j.submitter, g.service, null, count(*),
      sum(greatest(0, extract(epoch from t - greatest(j.claimed_at, began))))::float8
    from gangq.live_jobs j left join gangq.live_gangs g on g.id = j.gang_id
    where j.incarnation is not null and j.token is not null
    group by 1, 2, 3
  )
  select case when 'submitter' = any (usage.by) then p.submitter end,
    case when 'queue' = any (usage.by) then s.queue end,
    case when 'task' = any (usage.by) then s.task end,
    case when 'service' = any (usage.by) then p.service end,
    sum(p.attempts)::bigint, sum(p.seconds * s.gpus) / 3600,
    coalesce(sum(p.seconds * s.gpus) filter (where p.kind = 'wasted'), 0) / 3600,
    coalesce(sum(p.seconds * s.gpus) filter (where p.kind = 'displaced'), 0) / 3600
  from spent p join gangq.shapes s on s.id = p.shape_id
  where s.gpus > 0
  group by 1, 2, 3, 4
  order by 6 desc, 1, 2, 3, 4;
end $$;

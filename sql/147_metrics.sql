-- metrics(): the numbers that gangq metrics serves to a Prometheus. It has those of jobs and
-- queues, gauges() all others; counters are in 128.
-- A job that has entered the queue is live or has ended, and so has each attempt: so submitted and
-- started are sums over both, in one snapshot. A retry enters anew.
-- A scrape reads what waits and runs, the fleet, the counters, and what ended since the last tick.
-- Labels are queues, tasks, outcomes and the like; never jobs, logins or text of jobs.
-- Takes no locks.

-- By state, because that is what the indexes tell apart. Members of a gang that waits are not read:
-- all of them are blocked, as many as its roles have.
--
-- Internal, for metrics. How many live jobs there are by queue, task and state, how many attempts
-- of theirs have no row in history yet, and since when the oldest waits for its place.
create function gangq.live_by_task() returns table (
  queue text, task text, state text, jobs numeric, begun numeric, oldest timestamptz
) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
begin
  return query
  with live as (
    select j.shape_id, j.state, count(*) as n, min(greatest(j.submitted_at, j.due_at, j.claimed_at))
      as oldest
    from gangq.live_jobs j
    where j.state = 'pending'
    group by 1, 2
    union all
    select j.shape_id, j.state, count(*), null
    from gangq.live_jobs j
    where j.state = 'scheduled'
    group by 1, 2
    union all
    select j.shape_id, j.state, count(*), null
    from gangq.live_jobs j
    where j.incarnation is not null and j.state = 'running'
    group by 1, 2
    union all
    select j.shape_id, j.state, count(*), null
    from gangq.live_jobs j
    where j.state <> all ('{pending,running,blocked,scheduled}')
    group by 1, 2
    union all
    select r.shape_id, 'blocked', r.max_members * g.gangs, g.oldest
    from (
      select x.kind_id, count(*) as gangs, min(greatest(x.submitted_at, x.not_before)) as oldest
      from gangq.live_gangs x
      where x.state = 'blocked'
      group by 1) g
    join gangq.kind_roles r on r.kind_id = g.kind_id
    union all
    select j.shape_id, j.state, count(*), null
    from gangq.live_gangs g join gangq.live_jobs j on j.gang_id = g.id
    where g.state in ('reserved', 'running', 'draining') and j.state = 'blocked'
    group by 1, 2
  )
  select s.queue, s.task, l.state, sum(l.n),
    -- Of the end of a done member with devices attempt_history tells already.
    sum(l.n) filter (where l.state in ('running', 'preempting') or l.state = 'done' and s.gpus = 0),
    min(l.oldest)
  from live l join gangq.shapes s on s.id = l.shape_id
  group by 1, 2, 3;
end $$;

-- Internal, for metrics. What the fleet, the tick, the server and the outbox are at.
create function gangq.gauges(t timestamptz)
returns table (name text, labels jsonb, value double precision) language sql stable as $$
  select 'gangq_workers', jsonb_build_object('state', z.state), count(i.id)::numeric
  from unnest('{live,draining,silent}'::text[]) as z(state)
  left join gangq.incarnations i on i.ended_at is null
    and case when i.flagged_at is not null then 'silent' else i.state end = z.state
  group by z.state
  union all
  select 'gangq_worst_lease_age_seconds', '{}',
    coalesce(greatest(0, extract(epoch from t - min(l.renewed_at))), 0)
  from gangq.leases l join gangq.incarnations i on i.id = l.incarnation
  where i.ended_at is null
  union all
  select 'gangq_devices', jsonb_build_object('model', m.model, 'state', z.state), count(d.id)
  from (select distinct r.model from gangq.device_registry r) m
  cross join unnest('{busy,held,free,quarantined}'::text[]) as z(state)
  left join (
    select r.id, r.model, case
      when h.kind = 'quarantine' then 'quarantined'
      when j.state in ('running', 'preempting') then 'busy'
      when h.kind is not null then 'held'
      when r.offered_by is not null then 'free' end as state
    from gangq.device_registry r
    left join gangq.device_holds h on h.device_id = r.id
    left join gangq.live_jobs j on j.id = h.job_id) d on d.model = m.model and d.state = z.state
  group by m.model, z.state
  union all
  select 'gangq_last_tick_age_seconds', '{}', greatest(0, extract(epoch from t - x.last_at))
  from gangq.tick_state x
  union all
  select 'gangq_ticks_total', '{}', l.runs from gangq.lock_rows l where l.name = 'tick'
  union all
  select v.name, '{}', v.value
  from gangq.decider d
  cross join lateral (values
    ('gangq_last_pass_age_seconds', greatest(0, extract(epoch from t - d.decided_at))),
    ('gangq_last_pass_duration_seconds', d.pass_s::numeric)) as v(name, value)
  where d.decided_at is not null
  union all
  select 'gangq_notification_queue_usage_ratio', '{}', pg_notification_queue_usage()
  union all
  -- As far as the owner of the schema may see: of other logins with pg_read_all_stats only.
  select 'gangq_oldest_transaction_seconds', '{}',
    coalesce(max(extract(epoch from clock_timestamp() - x.began)), 0)
  from (
    select coalesce(a.xact_start, a.query_start) as began
    from pg_catalog.pg_stat_activity a
    where a.backend_xmin is not null and a.pid <> pg_backend_pid()
      and a.backend_type = 'client backend'
    union all
    select p.prepared from pg_catalog.pg_prepared_xacts p) x
  union all
  select v.name, jsonb_build_object('target', n.target), v.value
  from gangq.notifications n
  cross join lateral (values
    ('gangq_outbox_waiting', n.waiting::numeric), ('gangq_outbox_dead', n.dead),
    ('gangq_outbox_lag_seconds',
      coalesce(greatest(0, extract(epoch from t - n.oldest_at)), 0)),
    ('gangq_outbox_delivered_total', n.delivered), ('gangq_outbox_dropped_total', n.dropped))
    as v(name, value)
$$;

-- What gangq metrics serves: every number with its name and labels (docs/manual/metrics.md).
-- Counters do not fall when history is dropped. It reads what is live, and of what has ended only
-- what the last tick has not seen.
create function gangq.metrics()
returns table (name text, labels jsonb, value double precision) language plpgsql stable as $$
declare
  t timestamptz := gangq.now();
begin
  return query
  with live as materialized (
    select x.* from gangq.live_by_task() x
  ),
  ended as materialized (
    select x.* from gangq.counted_by_now() x
  ),
  -- What is submitted and started is what is live and what has ended.
  whole as (
    select case e.name when 'gangq_jobs_ended_total' then 'gangq_jobs_submitted_total'
      else 'gangq_jobs_started_total' end as name, e.labels ->> 'queue' as queue,
      e.labels ->> 'task' as task, e.value
    from ended e
    where e.name in ('gangq_jobs_ended_total', 'gangq_attempts_ended_total')
    union all
    select 'gangq_jobs_submitted_total', l.queue, l.task, l.jobs from live l
    union all
    select 'gangq_jobs_started_total', l.queue, l.task, l.begun from live l where l.begun > 0
  ),
  measured as (
    select e.name, e.labels, e.value from ended e
    union all
    select w.name, jsonb_build_object('queue', w.queue, 'task', w.task), sum(w.value)
    from whole w
    group by 1, w.queue, w.task
    union all
    select 'gangq_jobs', jsonb_build_object('queue', q.name, 'state', z.state), coalesce((
      select sum(l.jobs) from live l where l.queue = q.name and l.state = z.state), 0)
    from gangq.queues_table q
    cross join unnest(
      '{waiting,scheduled,pending,blocked,reserved,running,preempting,preempted}'::text[])
      as z(state)
    union all
    select 'gangq_oldest_waiting_seconds', jsonb_build_object('queue', q.name), coalesce((
      select greatest(0, extract(epoch from t - min(l.oldest))) from live l
      where l.queue = q.name), 0)
    from gangq.queues_table q
    union all
    select 'gangq_queue_paused', jsonb_build_object('queue', q.name), q.paused::integer
    from gangq.queues_table q
    union all
    select * from gangq.gauges(t)
  )
  select m.name, m.labels, m.value::double precision from measured m where m.value is not null
  order by 1, 2;
end $$;

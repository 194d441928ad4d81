-- Numbers for machines: metrics() is what gangq metrics serves to a Prometheus.
--
-- Counters. They must not fall when history is dropped, and no job pays for them with a row. So the
-- tick adds up what has ended since it last did (count_ended), by queue and task, in counters; and
-- metrics() adds what the tick has not counted yet. Each row of history, attempt_history and events
-- is counted once, however late its transaction commits:
-- 1. Each row holds the number of the transaction that wrote it (written_in).
-- 2. count_ended counts the rows that its snapshot sees and the snapshot of the last count did not,
--    and stores what describes its own: counted_below, the first number that had not been given out
--    to an ended transaction, and uncounted, the lower ones that had not ended.
-- 3. A row is counted exactly if written_in < counted_below and not in uncounted. Its own rows a
--    transaction leaves to the next count: it may write more of them.
-- 4. In a cluster restored from a dump the numbers start anew, lower. What was restored is counted.
-- A job that has entered the queue is live or has ended, and so has each attempt that was begun: so
-- submitted and started are sums over both, in one snapshot. A retry enters anew.
--
-- Cost. A scrape reads what waits and runs, the fleet, the counters, and what ended since the last
-- tick. It reads nothing of history but that. forget_counters bounds the counters: a task of which
-- nothing is live and nothing has ended for retention_long has none. Labels are queues, tasks,
-- outcomes and the like; never jobs, logins or text of jobs. Locks: rows of counters.

-- Internal, for uncounted. Of drains and trips. c: what is counted so far.
create function gangq.happened(c gangq.tick_state, but_of xid8)
returns table (name text, labels jsonb, value double precision) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
begin
  return query
  with happened as materialized (
    select e.kind, e.data, e.gang_id
    from gangq.events e
    where (e.written_in >= c.counted_below or e.written_in = any (c.uncounted))
      and e.at >= c.counted_from and e.written_in is distinct from but_of
      and e.kind in ('drain', 'drained', 'force', 'trip', 'notify', 'held')
  ),
  drained as materialized (
    select (h.data ->> 'seconds')::float8 as seconds
    from happened h
    where h.kind = 'drained' and h.data ? 'seconds'
  )
  select 'gangq_gangs_preempted_total', '{}'::jsonb, 1::double precision
  from happened h
  where h.kind = 'drain' and h.gang_id is not null and h.data ->> 'cause' = 'preempt'
  union all
  select 'gangq_preemptions_completed_total', jsonb_build_object('outcome', h.data ->> 'outcome'),
    1
  from happened h
  where h.kind = 'drained' and h.data ->> 'cause' = 'preempt'
  union all
  select 'gangq_force_drained_total', '{}', 1 from happened h where h.kind = 'force'
  union all
  select 'gangq_trips_total', jsonb_build_object('outcome', h.kind, 'class',
    case when h.data ->> 'class' in (select k.class from gangq.trip_classes k)
      then h.data ->> 'class' else 'other' end), 1
  from happened h
  where h.kind in ('trip', 'notify', 'held')
  union all
  select 'gangq_drain_duration_seconds_bucket', jsonb_build_object('le', b.le), 1
  from drained d join unnest(gangq.drain_buckets()) as b(le) on d.seconds <= b.le::float8
  union all
  select 'gangq_drain_duration_seconds_sum', '{}', d.seconds from drained d
  union all
  select 'gangq_drain_duration_seconds_count', '{}', 1 from drained d;
end $$;

-- Internal. What has ended and happened and is not in counters yet, as this query sees it. but_of:
-- without what this transaction has written.
create function gangq.uncounted(but_of xid8 default null)
returns table (name text, labels jsonb, value double precision) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
declare
  c gangq.tick_state;
begin
  select x.* into c from gangq.tick_state x;
  c.counted_from := coalesce(c.counted_from, '-infinity');
  return query
  with ended as materialized (
    select s.queue, s.task, s.gpus > 0 as has_gpus, h.state, count(*) as n
    from gangq.history h join gangq.shapes s on s.id = h.shape_id
    where (h.written_in >= c.counted_below or h.written_in = any (c.uncounted))
      and h.finished_at >= c.counted_from and h.written_in is distinct from but_of
    group by 1, 2, 3, 4
  ),
  counted as (
    select 'gangq_jobs_ended_total', jsonb_build_object('queue', e.queue, 'task', e.task,
      'outcome', e.state), e.n
    from ended e
    union all
    -- As in the view attempts: what is done without devices has no row in attempt_history.
    select 'gangq_attempts_ended_total', jsonb_build_object('queue', e.queue, 'task', e.task,
      'cause', 'done'), e.n
    from ended e
    where e.state = 'done' and not e.has_gpus
    union all
    select 'gangq_attempts_ended_total', jsonb_build_object('queue', s.queue, 'task', s.task,
      'cause', a.cause), 1
    from gangq.attempt_history a join gangq.shapes s on s.id = a.shape_id
    where (a.written_in >= c.counted_below or a.written_in = any (c.uncounted))
      and a.ended_at >= c.counted_from and a.written_in is distinct from but_of
    union all
    select h.name, h.labels, h.value from gangq.happened(c, but_of) h
  )
  select x.name, x.labels, sum(x.value)::double precision
  from counted as x(name, labels, value)
  group by 1, 2;
end $$;

-- Internal. The upper bounds, in seconds, that drains are counted by.
create function gangq.drain_buckets() returns text[] language sql immutable as $$
  select '{0.1,0.5,1,2.5,5,10,30,60,120,300,+Inf}'::text[]
$$;

-- Internal, a step of the tick. Adds to counters what has ended and happened since the last time.
-- Returns 1 if that is something.
create function gangq.count_ended() returns integer language plpgsql as $$
declare
  t timestamptz := gangq.now();
  mine xid8 := pg_current_xact_id();
  counted integer;
begin
  update gangq.tick_state x
  set counted_below = pg_snapshot_xmax(pg_current_snapshot()), uncounted = '{}', counted_from = t
  where x.counted_below > pg_snapshot_xmax(pg_current_snapshot());
  -- One statement: what is counted and what is stored of the snapshot belong together.
  with news as materialized (
    select n.name, n.labels, n.value from gangq.uncounted(but_of => mine) n
  ),
  added as (
    insert into gangq.counters as x (name, labels, value, changed_at)
    select n.name, n.labels, n.value, t from news n
    on conflict (name, labels) do update
    set value = x.value + excluded.value, changed_at = excluded.changed_at
  )
  update gangq.tick_state x
  set counted_below = pg_snapshot_xmax(pg_current_snapshot()),
    uncounted = array(select pg_snapshot_xip(pg_current_snapshot())) || mine,
    -- A transaction that ends a job and stays open for longer is not counted. So a count looks into
    -- the partitions of two days at most.
    counted_from = greatest(x.counted_from, t - interval '1 day')
  where exists (select 1 from news);
  get diagnostics counted = row_count;
  return counted;
end $$;

-- By state, because that is what the indexes tell apart. Members of a gang that waits are not read:
-- all of them are blocked, as many as its roles have.
--
-- Internal, for metrics. How many live jobs there are by queue, task and state, how many attempts
-- of theirs have no row in history yet, and since when the oldest waits for its place.
create function gangq.live_by_task() returns table (
  queue text, task text, state text, jobs numeric, begun numeric, oldest timestamptz
) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off set jit = off as $$
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

-- Internal, for forget. Deletes the counters of a task all at once, and not while a job of it is
-- live: submitted and started are sums over all of them and over live jobs. A Prometheus takes a
-- sum that falls for one that begins anew, and would add what is left of it once more.
create function gangq.forget_counters(before timestamptz) returns void language plpgsql as $$
begin
  with old as materialized (
    select c.labels ->> 'queue' as queue, c.labels ->> 'task' as task
    from gangq.counters c
    where c.labels ? 'task'
    group by 1, 2
    having max(c.changed_at) < before
  ),
  over as materialized (
    select o.queue, o.task from old o
    where not exists (
      select from gangq.live_by_task() l where l.queue = o.queue and l.task = o.task)
  )
  delete from gangq.counters c where (c.name, c.labels) in (
    select x.name, x.labels
    from gangq.counters x join over o
      on o.queue = x.labels ->> 'queue' and o.task = x.labels ->> 'task'
    where x.changed_at < before
    for update of x skip locked);
end $$;

-- Internal, for metrics. All counters, with what the tick has not counted yet; of those whose
-- labels are known, also what has never happened.
create function gangq.counted_by_now()
returns table (name text, labels jsonb, value double precision) language sql stable as $$
  select c.name, c.labels, sum(c.value) as value
  from (
    select x.name, x.labels, x.value from gangq.counters x
    union all
    select u.name, u.labels, u.value from gangq.uncounted() u
    union all
    select z.name, z.labels, 0
    from (values ('gangq_gangs_preempted_total', '{}'::jsonb),
      ('gangq_force_drained_total', '{}'), ('gangq_drain_duration_seconds_sum', '{}'),
      ('gangq_drain_duration_seconds_count', '{}')) as z(name, labels)
    union all
    select 'gangq_drain_duration_seconds_bucket', jsonb_build_object('le', b.le), 0
    from unnest(gangq.drain_buckets()) as b(le)
    union all
    select 'gangq_trips_total', jsonb_build_object('class', k.class, 'outcome', 'trip'), 0
    from gangq.trip_classes k
    union all
    select 'gangq_preemptions_completed_total', jsonb_build_object('outcome', o.outcome), 0
    from unnest('{blocked,done,failed,cancelled}'::text[]) as o(outcome)) as c
  group by 1, 2
$$;

-- Internal, for metrics. How many queues are paused, and what the fleet is made of.
create function gangq.fleet_gauges(t timestamptz)
returns table (name text, labels jsonb, value double precision) language sql stable as $$
  select 'gangq_queue_paused', jsonb_build_object('queue', q.name), q.paused::integer
  from gangq.queues_table q
  union all
  select 'gangq_workers', jsonb_build_object('state', z.state), count(i.id)
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
  select 'gangq_devices', jsonb_build_object('model', m.model, 'state', z.state),
    count(d.id)
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
$$;

-- Internal, for metrics. How old the last tick and pass are, what waits to be told, and for how
-- long the oldest transaction has been open.
create function gangq.server_gauges(t timestamptz)
returns table (name text, labels jsonb, value double precision) language sql stable as $$
  select 'gangq_last_tick_age_seconds', '{}'::jsonb, greatest(0, extract(epoch from t - x.last_at))
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
    select f.name, f.labels, f.value from gangq.fleet_gauges(t) f
    union all
    select s.name, s.labels, s.value from gangq.server_gauges(t) s
  )
  select m.name, m.labels, m.value::double precision from measured m where m.value is not null
  order by 1, 2;
end $$;

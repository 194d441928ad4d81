-- Counters of what has ended and happened, for metrics() (147). They must not fall when history is
-- dropped, and no job pays for them with a row. So the tick adds up what has ended since it last
-- did (count_ended), by queue and task, in counters; and metrics() adds what the tick has not
-- counted yet. Each row of history, attempt_history and events is counted once, however late its
-- transaction commits:
-- 1. Each row holds the number of the transaction that wrote it (written_in).
-- 2. count_ended counts the rows that its snapshot sees and the snapshot of the last count did not,
--    and stores what describes its own: counted_below, the first number that had not been given out
--    to an ended transaction, and uncounted, the lower ones that had not ended.
-- 3. A row is counted exactly if written_in < counted_below and not in uncounted. Its own rows a
--    transaction leaves to the next count: it may write more of them.
-- 4. In a cluster restored from a dump the numbers start anew, lower. What was restored is counted.
--
-- For example transaction 90 ends job a and commits, and 92, which ends b, is open when 95 counts:
--    95          counts a; stores counted_below 95, uncounted {92,95}
--    92, 97      commit the ends of b and c
--    metrics()   reads a in counters, and adds b (92 is in uncounted) and c (97 is not below 95)
--    98          counts b and c; stores counted_below 98, uncounted {98}
--
-- forget_counters bounds the counters: a task of which nothing is live and nothing has ended for
-- retention_long has none.
-- Locks: tick_state, then rows of counters. The tick waits for them, 100 ms at most.

-- Internal. The upper bounds, in seconds, that drains are counted by.
create function gangq.drain_buckets() returns text[] language sql immutable as $$
  select '{0.1,0.5,1,2.5,5,10,30,60,120,300,+Inf}'::text[]
$$;

-- Internal. Whether a row that was written then is not in counters yet. c: what is counted so far.
create function gangq.is_uncounted(
  written_in xid8, at timestamptz, c gangq.tick_state, but_of xid8
) returns boolean language sql immutable
return (written_in >= (c).counted_below or written_in = any ((c).uncounted))
  and at >= (c).counted_from and written_in is distinct from but_of;

-- Internal. What has ended and happened and is not in counters yet, as this query sees it. but_of:
-- without what this transaction has written.
create function gangq.uncounted(but_of xid8 default null)
returns table (name text, labels jsonb, value double precision) language plpgsql stable
set plan_cache_mode = force_generic_plan set enable_seqscan = off as $$
declare
  c gangq.tick_state;
begin
  select x.* into c from gangq.tick_state x;
  c.counted_from := coalesce(c.counted_from, '-infinity');
  return query
  with ended as materialized (
    select s.queue, s.task, s.gpus > 0 as has_gpus, h.state, count(*) as n
    from gangq.history h join gangq.shapes s on s.id = h.shape_id
    where gangq.is_uncounted(h.written_in, h.finished_at, c, but_of)
    group by 1, 2, 3, 4
  ),
  happened as materialized (
    select e.kind, e.data, e.gang_id,
      case e.kind when 'drained' then (e.data ->> 'seconds')::float8 end as seconds
    from gangq.events e
    where gangq.is_uncounted(e.written_in, e.at, c, but_of)
      and e.kind in ('drain', 'drained', 'force', 'trip', 'notify', 'held')
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
    where gangq.is_uncounted(a.written_in, a.ended_at, c, but_of)
    union all
    select v.name, v.labels, v.value
    from happened h
    cross join lateral (values
      ('gangq_gangs_preempted_total', '{}'::jsonb, 1::float8,
        h.kind = 'drain' and h.gang_id is not null and h.data ->> 'cause' = 'preempt'),
      ('gangq_preemptions_completed_total',
        jsonb_build_object('outcome', h.data ->> 'outcome'), 1,
        h.kind = 'drained' and h.data ->> 'cause' = 'preempt'),
      ('gangq_force_drained_total', '{}', 1, h.kind = 'force'),
      ('gangq_trips_total', jsonb_build_object('outcome', h.kind, 'class', coalesce(
          (select k.class from gangq.trip_classes k where k.class = h.data ->> 'class'),
          'other')),
        1, h.kind in ('trip', 'notify', 'held')),
      ('gangq_drain_duration_seconds_sum', '{}', h.seconds, h.seconds is not null),
      ('gangq_drain_duration_seconds_count', '{}', 1, h.seconds is not null)
    ) as v(name, labels, value, counts)
    where v.counts
    union all
    select 'gangq_drain_duration_seconds_bucket', jsonb_build_object('le', b.le), 1
    from happened h join unnest(gangq.drain_buckets()) as b(le) on h.seconds <= b.le::float8
  )
  select x.name, x.labels, sum(x.value)::double precision
  from counted as x(name, labels, value)
  group by 1, 2;
end $$;

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
  -- A clock that was ahead has been set back.
  update gangq.tick_state x set counted_from = t - interval '1 day' where x.counted_from > t;
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

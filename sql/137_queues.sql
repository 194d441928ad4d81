-- The views of queues and tasks. They take no locks.

-- Internal, for the view queues: where each queue stands in the tree, what is placed in it and its
-- children, and what waits there to be placed.
create function gangq.queue_load()
returns table (
  queue text, depth integer, paused_by text, running_gangs bigint, running_jobs bigint,
  gpus bigint, memory_mb bigint, cpus numeric, waiting_gangs bigint, waiting_jobs bigint
) language sql stable as $$
  -- Looked up one by one: of all shapes and kinds, which are kept for ever, only a few wait.
  with waits as materialized (
    select (select s.queue from gangq.shapes s where s.id = j.shape_id) as queue, 0 as gangs,
      count(*) as jobs
    from gangq.live_jobs j
    where j.state = 'pending'
    group by j.shape_id
    union all
    select (select k.queue from gangq.gang_kinds k where k.id = g.kind_id), count(*), 0
    from gangq.live_gangs g
    where g.state = 'blocked'
    group by g.kind_id
  )
  select q.name, cardinality(gangq.queue_path(q.name)) - 1, gangq.paused_queue(q.name),
    coalesce(u.gangs, 0), coalesce(u.jobs, 0), coalesce(u.gpus, 0), coalesce(u.memory_mb, 0),
    coalesce(u.cpus, 0), coalesce(w.gangs, 0)::bigint, coalesce(w.jobs, 0)::bigint
  from gangq.queues_table q
  left join (
    select x.queue, sum(x.gangs)::bigint as gangs, sum(x.jobs)::bigint as jobs,
      sum(x.gpus)::bigint as gpus, sum(x.memory_mb)::bigint as memory_mb, sum(x.cpus) as cpus
    from gangq.queue_usage(array(select z.name from gangq.queues_table z)) x
    group by x.queue) u on u.queue = q.name
  cross join lateral (
    select sum(x.gangs) as gangs, sum(x.jobs) as jobs
    from waits x
    where gangq.below(x.queue, array[q.name])) w
$$;

-- Queues as a tree, each parent before its children: the defaults their jobs inherit, what they may
-- hold, what is placed and what waits there to be placed, children included. depth: how many
-- ancestors it has; paused_by: the nearest queue on its path that is paused. used_gpus,
-- used_memory_mb, used_cpus, running_jobs count against maximum. others: who may act on the work of
-- others in it; ceilings: the highest priority by role.
create view gangq.queues as
select q.name, q.paused, q.paused_until, q.policy, q.max_attempts, q.max_crashes, q.max_trips,
  q.backoff_s, q.backoff_max_s, q.budget_s, q.max_payload_bytes, q.retention_done,
  q.retention_failed,
  q.created_at, l.depth, l.paused_by, q.draining, q.guaranteed, q.maximum, q.weight,
  q.max_running_gangs, q.max_running_jobs, q.rate, q.submitter_maximum, q.placement_timeout_s,
  q.timeout_style, q.preempts, q.preemptible, q.min_run_s, q.others, q.ceilings, l.running_gangs,
  l.running_jobs, l.gpus as used_gpus, l.memory_mb as used_memory_mb, l.cpus as used_cpus,
  l.waiting_gangs, l.waiting_jobs
from gangq.queues_table q join gangq.queue_load() l on l.queue = q.name
order by string_to_array(q.name, '.') collate "C";

-- What was set for each task and what has been learned of its beats, one row per class of devices
-- it ran on (device_class "": none; null: nothing learned); a number null: the installation's.
-- declared: the options with which the newest worker that runs it (declared_by) declares it; submit
-- applies them where a caller says nothing. paused: nothing new of it starts, until paused_until
-- (null: until resume_task).
create view gangq.tasks as
select coalesce(ts.task, b.task, o.task, p.task) as task, ts.budget_s, ts.stall_timeout_s,
  ts.load_grace_s, ts.health_window_s, ts.long_phase_s, ts.notify_only,
  b.device_class, b.longest_s as longest_gap_s, b.beats, b.updated_at as learned_at,
  jsonb_strip_nulls(to_jsonb(o) - '{task,worker,declared_at}'::text[]) as declared,
  o.worker as declared_by, o.declared_at, p.task is not null as paused, p.until as paused_until,
  p.reason as pause_reason, p.operator as paused_by
from gangq.task_settings ts
full join gangq.beat_gaps b on b.task = ts.task
full join gangq.task_options o on o.task = coalesce(ts.task, b.task)
full join gangq.task_pauses p on p.task = coalesce(ts.task, b.task, o.task);

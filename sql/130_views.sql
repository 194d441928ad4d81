-- The views of jobs, gangs, workers, devices, queues and their history, and the functions that only
-- views call. They take no locks.
-- Payloads, results, errors, output and evidence are shown to the submitter of a job, to the login
-- whose live worker holds it, and to admins; in a shared queue to all submitters (readable).

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
  select q.name, cardinality(gangq.queue_path(q.name)) - 1, (
      select p.name
      from gangq.queues_table p
      where p.paused and gangq.below(q.name, array[p.name])
      order by length(p.name) desc
      limit 1),
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
-- hold, what is placed and what waits there to be placed, children included. paused_by: the nearest
-- queue on its path that is paused. used_gpus, used_memory_mb, used_cpus, running_jobs count
-- against maximum. others: who may act on the work of others in it; ceilings: the highest priority
-- by role.
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
-- it ran on; null: the installation's number. declared: the options with which the newest worker
-- that runs it declares it; submit applies them where a caller says nothing. paused: nothing new of
-- it starts, until paused_until (null: until resume_task).
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

-- Internal, for the view jobs: the role of this rank in a gang, live or ended. role_of and hosts_of
-- are functions: as subqueries they would raise the estimated cost of a query over many days of
-- history, and PostgreSQL would JIT-compile it, which takes seconds.
create function gangq.role_of(gang_id bigint, rank integer) returns text
language plpgsql stable as $$
begin
  return (
    select r.name
    from gangq.kind_roles r
    where r.kind_id = coalesce((
        select g.kind_id from gangq.live_gangs g where g.id = role_of.gang_id), (
        select h.kind_id
        from gangq.gang_history h
        where h.gang_id = role_of.gang_id
        order by h.finished_at desc limit 1))
      and r.first_rank <= role_of.rank
    order by r.first_rank desc
    limit 1);
end $$;

-- Internal, for the view gangs: the hosts where members of a live gang are placed.
create function gangq.hosts_of(gang_id bigint) returns text[] language sql stable as $$
  -- Not a join: it would read the whole fleet for each gang.
  select array(
    select distinct (select i.host from gangq.incarnations i where i.id = j.incarnation) as host
    from gangq.live_jobs j
    where j.gang_id = hosts_of.gang_id and j.incarnation is not null
    order by host)
$$;

-- The union is of bare tables and everything else is joined above it: so an ORDER BY id LIMIT 50
-- reads 50 rows.
--
-- Every job, live or ended: its live row, else its latest ending. rank: a member's place in its
-- gang at its largest; epoch_rank: of an elastic gang, its rank in the present epoch, null while it
-- has no part in it. parent: the job that submitted it. login: the login that submitted it.
-- step_rate: steps a second, smoothed; null until two steps were seen. array_index: its place in
-- its batch (gangq.batches), from 0. readable: whether payload, result and error are shown to this
-- session; where it is false they are null.
create view gangq.jobs as
select k.id, s.queue, s.task, k.state, k.priority, k.gang_id, k.rank, i.name as worker, i.host,
  k.attempts, k.max_attempts, k.crashes, k.trips, k.stops, k.submitted_at, k.due_at, k.claimed_at,
  k.finished_at, k.told_at, k.stop_reason, k.token, k.budget_s, s.gpus, s.vram_mb, s.memory_mb,
  s.cpus, s.labels, k.submitter, p.data as progress,
  case when o.readable then k.payload end as payload,
  case when o.readable then k.result end as result,
  case when o.readable then k.error end as error, s.model,
  case when k.gang_id is not null then gangq.role_of(k.gang_id, k.rank) end as role, k.epoch_rank,
  k.parent, k.login, o.readable, k.max_trips, p.rate as step_rate, k.snoozes, k.max_snoozes,
  k.batch_id, k.array_index
from (
  select j.id, j.state, j.priority, j.gang_id, j.rank, j.incarnation, j.shape_id, j.attempts,
    j.max_attempts, j.crashes, j.trips, j.stops, j.submitted_at, j.due_at, j.claimed_at,
    j.finished_at, j.told_at, j.stop_reason, j.token, j.budget_s, j.submitter, j.login, j.payload,
    j.result, j.error, j.epoch_rank, j.parent, true as live, j.max_trips,
    j.snoozes, j.max_snoozes, j.batch_id, j.array_index
  from gangq.live_jobs j
  union all
  select h.job_id, h.state, h.priority, h.gang_id, h.rank, h.incarnation, h.shape_id, h.attempts,
    h.max_attempts, h.crashes, h.trips, h.stops, h.submitted_at, null::timestamptz, h.claimed_at,
    h.finished_at, null::timestamptz, null::text, h.token, h.budget_s, h.submitter, h.login,
    h.payload, h.result, h.error, null::integer, h.parent, false, h.max_trips,
    h.snoozes, h.max_snoozes, h.batch_id, h.array_index
  from gangq.history h
) k
join gangq.shapes s on s.id = k.shape_id
left join gangq.incarnations i on i.id = k.incarnation
left join gangq.progress p on p.job_id = k.id and p.token = k.token
-- Questions about the caller are asked once per query; per row only columns are compared.
cross join lateral (
  select (select gangq.is_admin())
    or k.login = session_user
    and k.submitter = any ((select gangq.roles_of(gangq.caller()))::text[])
    or coalesce(k.live and i.login = session_user and i.ended_at is null, false)
    or s.queue = any ((select gangq.shared_queues())::text[]) as readable) o
where not exists (
  select 1 from gangq.retried r where r.job_id = k.id and r.finished_at = k.finished_at);

-- Internal, for the view gangs: waited_of a live gang.
create function gangq.waiting_so_far(gang_id bigint) returns jsonb language sql stable as $$
  select gangq.waited_of(g, gangq.now())
  from gangq.live_gangs g where g.id = waiting_so_far.gang_id
$$;

-- As jobs: the union is of bare tables.
--
-- Every gang, live or ended. waited: for how many seconds it has waited to be placed, by what the
-- passes found against the first of its kind (gates, as in explain_gang); null: it does not wait.
-- What an earlier wait was is in its events reserve and end.
create view gangq.gangs as
select k.id, k.name, s.queue, s.task, k.state, k.size, k.epoch, k.priority, k.attempts,
  k.max_attempts, k.crashes, k.trips, k.placement_misses, k.never_started, k.preemptions,
  k.submitted_at, k.not_before, k.reserved_at, k.deadline_at, k.go_at, k.finished_at, k.drain_cause,
  k.note, k.reason, k.submitter,
  case when k.finished_at is null then gangq.hosts_of(k.id) else '{}' end as hosts,
  k.world_size, k.failure_policy, k.completion, k.missing_since, k.login, k.service,
  case when k.state = 'blocked' then gangq.waiting_so_far(k.id) end as waited
from (
  select g.id, g.name, g.shape_id, g.state, g.size, g.epoch, g.priority, g.attempts, g.max_attempts,
    g.crashes, g.trips, g.placement_misses, g.never_started, g.preemptions, g.submitted_at,
    g.not_before, g.reserved_at, g.deadline_at, g.go_at, null::timestamptz as finished_at,
    g.drain_cause, g.note, null::text as reason, g.submitter, g.world_size, g.failure_policy,
    g.completion, g.missing_since, g.login, g.service
  from gangq.live_gangs g
  union all
  select h.gang_id, h.name, h.shape_id, h.state, h.size, h.epoch, h.priority, h.attempts,
    h.max_attempts, h.crashes, h.trips, h.placement_misses, h.never_started, h.preemptions,
    h.submitted_at, null::timestamptz, null::timestamptz, null::timestamptz, null::timestamptz,
    h.finished_at, null::text, null::text, h.reason, h.submitter, h.world_size, h.failure_policy,
    h.completion, null::timestamptz, h.login, h.service
  from gangq.gang_history h
) k
join gangq.shapes s on s.id = k.shape_id
where not exists (
  select 1 from gangq.retried r where r.gang_id = k.id and r.finished_at = k.finished_at);

-- Every worker by name, its latest incarnation: live, draining, silent (flagged), retired or dead.
-- quarantined, cordoned (it or its host): why it is given nothing new. login: the login that
-- registered it. cgroups: whether its host lets it give each command a control group of its own.
create view gangq.workers as
select i.name, i.host,
  case when i.ended_at is null and i.flagged_at is not null then 'silent' else i.state end as state,
  i.id as incarnation, i.slots, i.slots - f.slots as used_slots, i.light,
  i.light * i.prefetch - f.light as used_light, i.prefetch, i.queues, i.tasks, i.labels,
  (select count(*) from gangq.device_registry r where r.offered_by = i.id)::integer as gpus,
  i.memory_mb, i.cpus, i.pid, i.registered_at, l.renewed_at,
  round(extract(epoch from c.t - l.renewed_at)::numeric, 1) as silent_s,
  round(extract(epoch from l.expires_at - c.t)::numeric, 1) as lease_left_s,
  i.flagged_at, i.passed_over_until, i.quarantined, i.ended_at, i.model, i.exits_at,
  i.exit_code::integer as exit_code, i.reboot_needed, b.last_beat_at, b.step_rate, i.taints,
  (
    select c.reason from gangq.cordons c
    where (c.kind, c.name) in (('host', i.host), ('worker', i.name))
    order by c.kind limit 1) as cordoned,
  i.task_options, i.login,
  case i.identity -> 'cgroups' when 'true' then true when 'false' then false end as cgroups
from gangq.incarnations i
left join gangq.leases l on l.incarnation = i.id
cross join (select gangq.now() as t offset 0) c
cross join lateral gangq.capacity_of(array[i.id]) f
cross join lateral (
  select max(p.beat_at) as last_beat_at, sum(p.rate) as step_rate
  from gangq.live_jobs j
  join gangq.progress p on p.job_id = j.id and p.token = j.token
  where j.incarnation = i.id) b
where i.id = (
  select n.id from gangq.incarnations n where n.name = i.name order by n.id desc limit 1);

-- Workers that are heard, hold nothing and are open, although a job that fits them has waited for
-- waited_s, or that did not claim what was reserved on them. A worker between two jobs may be among
-- them: ask again a second later.
create function gangq.idle_beside_work(waited_s real default 60)
returns table (worker text, host text, why text)
language sql stable as $$
  with heads as materialized (
    select s as shape, gangq.placed_queues() as placed, j.id,
      extract(epoch from n.t - greatest(j.submitted_at, j.due_at, j.claimed_at)) as waited_s
    from (select gangq.now() as t offset 0) n
    cross join gangq.pending_shapes p
    join gangq.shapes s on s.id = p.shape_id
    cross join lateral (
      select x.id, x.submitted_at, x.due_at, x.claimed_at from gangq.live_jobs x
      where x.shape_id = s.id and x.state = 'pending' order by x.order_key limit 1) j
    -- Where a limit or a fair order decides, another job's turn may come first.
    where not exists (
      select 1 from gangq.queues_table q
      where (q.paused or q.limited or q.policy = 'fair') and gangq.below(s.queue, array[q.name]))
      and gangq.paused_task(-s.id) is null
  )
  select i.name, i.host, w.why
  from (select gangq.now() as t offset 0) n
  cross join lateral gangq.barred(n.t) b
  join gangq.incarnations i on i.id = b.incarnation
  cross join lateral (
    select 'it did not claim in time what was reserved on it' as why where b.why = 'passed over'
    union all (
      select format('job %s has waited for %s s and fits', h.id, round(h.waited_s::numeric))
      from heads h cross join lateral gangq.capacity_of(array[i.id]) f
      where h.waited_s >= idle_beside_work.waited_s and gangq.serves(i, h.shape)
        and gangq.room(h.shape,
          case when gangq.is_placed(h.shape, h.placed) then f.slots else f.light end,
          f.memory_mb, f.cpus,
          cardinality(gangq.usable(h.shape, f.device_ids, f.vrams))) > 0
        and not exists (
          select 1 from gangq.plans p
          where p.seats @> jsonb_build_array(jsonb_build_object('worker', i.id)))
      order by h.waited_s desc limit 1)) w
  where coalesce(b.why = 'passed over', true)
    and extract(epoch from n.t - i.registered_at) >= idle_beside_work.waited_s
    and not exists (select 1 from gangq.live_jobs j where j.incarnation = i.id)
  order by 1
$$;

-- Who was displaced for whom: gang (gang_id, epoch), solo job (job_id) or surplus member of a gang
-- that goes on (both), why, and lost_s: work since the last checkpoint, in seconds times devices.
-- for_job: where it was for single jobs of one shape and priority, the first of those.
create view gangq.preemptions as
select e.at, (e.data ->> 'for')::bigint as for_gang, e.gang_id, e.epoch, e.job_id, e.reason,
  (e.data ->> 'lost_s')::real as lost_s, e.data ->> 'digest' as digest,
  (e.data ->> 'for_job')::bigint as for_job
from gangq.events e where e.kind = 'preempt' and e.data ?| '{for,for_job}';

-- Every device: free, held by one job, quarantined, or withdrawn (offered by no live worker). link:
-- of the devices of its worker that NVLink or XGMI joins with it, the index of the first; null:
-- none, or nobody knows. health: ok, degraded (its latest reading shows it throttled, with memory
-- errors, or its driver asking for an action), exiting (withheld until the worker that tripped on
-- it is proven gone), or quarantined. trips_day: jobs that tripped on it within a day, as its
-- quarantine counts them. reading: the latest one a worker brought.
create view gangq.devices as
select r.uuid, r.host, r.index, r.vram_mb, r.model, r.source, l.index as link, i.name as worker,
  case
    when h.kind = 'quarantine' then 'quarantined'
    when h.kind in ('job', 'place') then 'held'
    when r.offered_by is null then 'withdrawn'
    else 'free' end as state,
  h.job_id, h.reason, h.since,
  case
    when h.kind = 'quarantine' and h.until is not null then 'exiting'
    when h.kind = 'quarantine' then 'quarantined'
    when d.data @? '$.throttle[*] ? (@ != null)' or d.data @? '$.recovery_action ? (@ > 0)'
      or d.data @? '$.ecc_uncorrectable ? (@ > 0)'
      then 'degraded' else 'ok' end as health,
  coalesce(t.trips, 0) as trips_day, d.data as reading, d.at as read_at
from gangq.device_registry r
left join gangq.incarnations i on i.id = r.offered_by
left join gangq.device_registry l on l.uuid = r.link
left join gangq.device_holds h on h.device_id = r.id
left join gangq.device_readings d on d.device_id = r.id
left join (
  select x.uuid, count(distinct x.job_id) as trips from gangq.device_trips x group by x.uuid) t
    on t.uuid = r.uuid;

-- The case hides the chunk from a reader's own condition: PostgreSQL may evaluate that before
-- `readable`, and the error message of a condition quotes what it reads.
--
-- Output of jobs that this session may read, by attempt (token) and in order (seq). Filter by
-- job_id.
create view gangq.job_logs as
select l.job_id, l.token, l.seq, l.at, case when j.readable then l.chunk end as chunk
from gangq.jobs j join gangq.logs l on l.job_id = j.id
where j.readable;

-- What was seen at trips and suspicions of jobs that this session may read; and how workers were
-- proven dead or stuck, for the login that registered them, gangq_host and admins. Filter by
-- job_id.
create view gangq.job_evidence as
select v.at, v.kind, v.job_id, v.token, v.incarnation, case when j.readable then v.data end as data
from gangq.jobs j join gangq.evidence v on v.job_id = j.id
where j.readable
union all
select v.at, v.kind, v.job_id, v.token, v.incarnation, case when o.readable then v.data end as data
from gangq.evidence v join gangq.incarnations i on i.id = v.incarnation
cross join lateral (
  select (select gangq.is_admin()) or i.login = session_user
    or (select gangq.may_act_as('gangq_host')) as readable) o
where v.job_id is null and o.readable;

-- Every trip of a watchdog, by code, task, device and host; outcome notify and held: it would have
-- tripped, and nothing was stopped. Evidence is shown to those who may read the payload of its job.
-- Give a range of at: it reads only those days.
create view gangq.trips as
select e.at, n.code, e.data ->> 'class' as class, e.reason, e.data ->> 'outcome' as outcome,
  e.data ->> 'task' as task, e.data ->> 'queue' as queue, e.job_id, e.gang_id, e.epoch, n.rank,
  e.worker, e.data ->> 'host' as host,
  array(
    select d #>> '{}'
    from jsonb_array_elements(case jsonb_typeof(e.data -> 'devices') when 'array'
      then e.data -> 'devices' else '[]' end) as d) as devices,
  n.trips, exists (
    select 1 from gangq.events p where p.job_id = e.job_id and p.kind = 'poison') as poison,
  (select v.data from gangq.job_evidence v
    where v.job_id = e.job_id and v.at = e.at and v.kind = e.kind
      and v.token is not distinct from e.token
    limit 1) as evidence
from gangq.events e
-- requeue takes any error from anybody, whose keys may be called like ours.
cross join lateral (
  select case when e.data ->> 'code' ~ '^[0-9]{1,9}$' then (e.data ->> 'code')::integer end as code,
    case when e.data ->> 'rank' ~ '^[0-9]{1,9}$' then (e.data ->> 'rank')::integer end as rank,
    case when e.data ->> 'trips' ~ '^[0-9]{1,9}$' then (e.data ->> 'trips')::integer end as trips) n
where e.kind in ('trip', 'notify', 'held');

-- What the live workers of each queue offer and have free, by host. A worker of several queues
-- counts in each. cordoned: how many of these workers are given nothing new, whatever they have
-- free.
create view gangq.capacity as
select q.name as queue, i.host, count(*) as workers, sum(i.slots) as slots,
  sum(greatest(f.slots, 0)) as free_slots,
  sum(d.gpus)::bigint as gpus, sum(cardinality(f.device_ids)) as free_gpus,
  sum(i.memory_mb) as memory_mb, sum(f.memory_mb) as free_memory_mb, sum(i.cpus) as cpus,
  sum(f.cpus) as free_cpus,
  count(*) filter (where exists (
    select 1
    from gangq.cordons x
    where (x.kind, x.name) in (('host', i.host), ('worker', i.name)))) as cordoned
from gangq.queues_table q
join gangq.incarnations i on q.name = any (i.queues) and i.ended_at is null
cross join lateral gangq.capacity_of(array[i.id]) f
cross join lateral (
  select count(*) as gpus from gangq.device_registry r where r.offered_by = i.id) d
group by q.name, i.host;

-- A gang's life in order: submit, reserve, claim, go, replace, shrink, drain, ack, drained, end.
-- Filter by gang_id.
create view gangq.timeline as
select e.gang_id, e.epoch, e.at, e.kind as what, e.job_id,
  (e.data ->> 'rank')::integer as rank, e.worker, coalesce(i.host, e.data ->> 'host') as host,
  e.reason, e.data, e.actor
from gangq.events e left join gangq.incarnations i on i.id = e.incarnation
where e.gang_id is not null
order by e.id;

-- One row per drain: what caused it, how many members were told to stop, how many acknowledged,
-- were forced, or ended with their worker, and how it ended.
create view gangq.drains as
select d.gang_id, d.epoch, d.data ->> 'cause' as cause, d.job_id as trigger_job,
  (d.data ->> 'told')::integer as moved,
  n.acked, n.forced, n.dead,
  z.data ->> 'outcome' as outcome, d.reason, d.at as started_at, z.at as ended_at
from gangq.events d
left join lateral (
  select x.at, x.data
  from gangq.events x
  where x.gang_id = d.gang_id and x.epoch = d.epoch and x.kind = 'drained' and x.id > d.id
  order by x.id
  limit 1) z on true
cross join lateral (
  select count(*) filter (where a.kind = 'ack') as acked,
    count(*) filter (where a.kind = 'force') as forced,
    count(*) filter (where a.kind = 'dead') as dead
  from gangq.events a
  where a.gang_id = d.gang_id and a.epoch = d.epoch) n
where d.kind = 'drain' and d.gang_id is not null;

-- Names of partitions and sizes of files: no table is read.
--
-- What is kept of what has ended, by class (short, long, forever) and table: in how many partitions
-- of a day each, how large with indexes, the oldest day, and when that is dropped. missing: today
-- and tomorrow, if they lack a partition; no_default: true if nothing would catch their rows then.
create view gangq.retention as
select k.class, k.name as part_of, k.keep, count(d.day)::integer as partitions,
  coalesce(sum(pg_total_relation_size(f.oid)), 0)::bigint as bytes, min(d.day) as oldest,
  ((min(d.day) + 1)::timestamp at time zone 'UTC') + k.keep as next_drop,
  array(
    select n::date
    from generate_series((c.t at time zone 'UTC')::date, (c.t at time zone 'UTC')::date + 1,
      interval '1 day') n
    where k.keep is not null
      and to_regclass('gangq.' || k.name || to_char(n, '_YYYYMMDD')) is null) as missing,
  k.keep is not null and not coalesce(bool_or(f.oid = p.partdefid), false) as no_default
from (
  select x.name, x.class, x.keep from gangq.kept_by_day() x
  union all values ('history_forever', 'forever', null::interval),
    ('gang_history_forever', 'forever', null)) k
cross join (select gangq.now() as t offset 0) c
join pg_catalog.pg_class r on r.oid = ('gangq.' || k.name)::regclass
left join pg_catalog.pg_partitioned_table p on p.partrelid = r.oid
left join lateral (
  select i.inhrelid as oid from pg_catalog.pg_inherits i where i.inhparent = r.oid
  union all select r.oid where r.relkind = 'r') f on true
left join pg_catalog.pg_class b on b.oid = f.oid
cross join lateral (
  select case when b.relname ~ '_[0-9]{8}$'
    then to_date(right(b.relname, 8), 'YYYYMMDD') end as day) d
group by k.class, k.name, k.keep, c.t
order by array_position(array['short', 'long', 'forever'], k.class), k.name;

-- Where single jobs may start, by decision: on which worker, for jobs of which queue and task, with
-- which devices. job_id: who sits there; until: nobody fills it after that, unless a pass renews
-- it.
create view gangq.places_open as
select p.id, i.name as worker, i.host, s.queue, s.task,
  array(
    select r.uuid from gangq.device_registry r
    where r.id = any (p.device_ids) order by r.uuid) as devices,
  p.job_id, p.min_priority, p.ends_by, p.refills, p.until
from gangq.places p
join gangq.incarnations i on i.id = p.incarnation
join gangq.shapes s on s.id = p.shape_id;

-- The views of workers, their devices, and what they have free. They take no locks.

-- Every worker by name, its latest incarnation: live, draining, silent (flagged), retired or dead.
-- flagged_at: its silence was noticed then, and nothing was freed. quarantined, cordoned (it or its
-- host): why it is given nothing new; null: it is not. exits_at: it tripped (exit_code), and is not
-- yet proven gone. last_beat_at: of any job it runs now; step_rate: steps a second of all of these
-- together, null: none of them counts steps. login: the login that registered it. cgroups: whether
-- its host lets it give each command a control group of its own; null: it did not say.
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

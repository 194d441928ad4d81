-- What must never be seen: the invariants of all tables, as a view that is always empty.
-- Takes no locks.

-- Each rule with the condition that breaks it; the numbers of a row that breaks one tell how. The
-- rules of jobs are arrays, so that one filter leaves out a job that breaks none: as rows of VALUES
-- they took 4 us a job, 3 s for 640,000. They use joins instead of subqueries: the planner counts a
-- subquery for every job, and then compiles the query, which takes seconds more.
--
-- Broken invariants. Always empty; a row is a bug worth reporting.
create view gangq.violations as
select r.rule, 'gang g' || g.id as subject,
  format('%s, epoch %s, size %s, world size %s, %s members: %s in the epoch, %s outside, ranks %s, '
    'priority %s, kind %s, %s of %s attempts, %s crashes, %s trips', g.state, g.epoch, g.size,
    g.world_size, m.n, m.states, m.others, m.ranks, g.priority, g.kind_id, g.attempts,
    g.max_attempts, g.crashes, g.trips) as detail
from gangq.live_gangs g
cross join lateral (
  select count(*) as n,
    coalesce(array_agg(distinct j.state) filter (where x.member), '{}') as states,
    coalesce(array_agg(distinct j.state) filter (where not x.member), '{}') as others,
    coalesce(array_agg(j.epoch_rank order by j.epoch_rank)
      filter (where j.epoch_rank is not null), '{}') as ranks
  from gangq.live_jobs j
  cross join lateral (select g.world_size is null or gangq.in_epoch(j, g) as member) x
  where j.gang_id = g.id) m
cross join lateral (values
  ('members match size', m.n <> g.size),
  ('gang state matches its members', not case g.state
    when 'waiting' then m.states <@ '{waiting}'
    when 'blocked' then m.states <@ '{blocked}'
    when 'reserved' then m.states <@ '{reserved,running}' and m.states && '{reserved}'
      and m.others <@ '{blocked}'
    when 'running' then m.others <@ '{blocked,preempting,done}' and case
      when g.missing_since is null then m.states <@ '{running,done}' and m.states && '{running}'
      else g.failure_policy = 'restart_member' and m.states <@ '{running,done,blocked,reserved}'
        and m.states && '{running,done}' and m.states && '{blocked,reserved}' end
    when 'draining' then m.states <@ '{preempting,preempted,blocked,done}'
      and m.others <@ '{preempting,preempted,blocked,done}'
      and m.states || m.others && '{preempting}'
    else false end),
  ('placed gangs have an epoch',
    (g.world_size is not null) <> (g.state in ('reserved', 'running', 'draining'))
      or g.missing_since is not null and g.state <> 'running'),
  ('ranks of an epoch are contiguous', case m.ranks when '{}' then g.world_size <> g.size
    else m.ranks is distinct from array(select generate_series(0, g.world_size - 1)) end),
  ('order key of a gang matches priority', (g.order_key >> 50) <> 1000 - g.priority),
  ('a gang that runs has begun an epoch', g.state = 'running' and g.epoch = 0),
  ('gang is of a known kind',
    not exists (select 1 from gangq.kind_roles r where r.kind_id = g.kind_id)),
  ('gang asks for levels that exist', exists (
    select 1
    from gangq.gang_kinds k join gangq.kind_roles r on r.kind_id = k.id cross join gangq.settings s
    where k.id = g.kind_id
      and not array_remove(array[k.require, k.prefer, r.require, r.prefer], null) <@ s.topology)),
  ('counters are not negative',
    least(g.attempts, g.crashes, g.trips, g.max_attempts, g.max_crashes, g.max_trips) < 0),
  ('charged no more than it may spend', g.attempts > g.max_attempts)
) as r(rule, broken)
where r.broken
union all
select r.rule, 'job ' || j.id, format('%s, rank %s of gang g%s, priority %s, %s of %s attempts, '
  '%s crashes, %s trips, %s stops, waits for %s, told at %s, finished at %s', j.state, j.rank,
  j.gang_id, j.priority, j.attempts, j.max_attempts, j.crashes, j.trips, j.stops, j.waits_on,
  j.told_at, j.finished_at)
from gangq.live_jobs j
left join gangq.live_gangs g on g.id = j.gang_id
left join (
  select x.job_id, count(*) as n from gangq.dependencies x group by x.job_id) d on d.job_id = j.id
cross join lateral (select array[
  case when j.gang_id is not null and g.id is null then 'member of a live gang' end,
  case when j.rank not between 0 and g.size - 1 then 'rank within its gang' end,
  case when j.state = 'waiting' and j.waits_on <> coalesce(d.n, 0)
    then 'waits for as many as it says' end,
  case when (j.order_key >> 50) <> 1000 - j.priority then 'order key matches priority' end,
  case when least(j.crashes, j.trips, j.stops, j.snoozes, j.max_attempts, j.max_crashes,
      j.max_trips, j.max_snoozes) < 0
    then 'counters are not negative' end,
  case when j.attempts > j.max_attempts then 'charged no more than it may spend' end,
  case when j.told_at is not null
      and j.state in ('pending', 'scheduled', 'waiting', 'reserved', 'running')
    then 'told to stop while it stops' end,
  case when j.finished_at is not null and j.state not in ('done', 'failed', 'cancelled')
    then 'finished when it has ended' end] as broken) b
cross join lateral unnest(b.broken) as r(rule)
where num_nonnulls(variadic b.broken) > 0 and r.rule is not null
union all
select r.rule, 'job ' || j.id,
  format('worker %s, incarnation %s, asks for %s', i.name, j.incarnation, s.gpus)
from gangq.live_jobs j
left join gangq.shapes s on s.id = j.shape_id
left join gangq.incarnations i on i.id = j.incarnation
left join gangq.leases l on l.incarnation = i.id
left join (
  select x.job_id, count(*) as n from gangq.device_holds x group by x.job_id) h on h.job_id = j.id
cross join lateral (select array[
  case when i.id is null then 'held by a known incarnation' end,
  -- What runs on a worker when an operator taints it runs on.
  case when i.operator_taints = '{}' and not gangq.serves(i, s) then 'worker may run it' end,
  case when i.ended_at is not null
      and (l.expires_at > gangq.now() - interval '10 minutes') is not true
    then 'ended worker holds nothing beyond its lease' end,
  case when s.gpus <> coalesce(h.n, 0) then 'holds as many devices as it asks for' end] as broken) b
cross join lateral unnest(b.broken) as r(rule)
where j.incarnation is not null and num_nonnulls(variadic b.broken) > 0 and r.rule is not null
union all
select r.rule, 'job ' || h.job_id, format('device %s, %s MiB', d.uuid, d.vram_mb)
from gangq.device_holds h
join gangq.device_registry d on d.id = h.device_id
left join gangq.live_jobs j on j.id = h.job_id
left join gangq.shapes s on s.id = j.shape_id
left join gangq.incarnations i on i.id = j.incarnation
cross join lateral (values
  ('device held by a placed job', j.incarnation is null),
  ('device is not one it avoids', d.id = any (s.avoid)),
  ('device large enough', d.vram_mb < s.vram_mb),
  ('holds devices of its own worker', i.id is not null and i.ended_at is null and not exists (
    select 1 from gangq.device_claimants c where c.device_id = d.id and c.incarnation = i.id))
) as r(rule, broken)
where h.kind = 'job' and r.broken
union all
select r.rule, 'worker ' || i.name, format('incarnation %s, free: %s slots, %s light slots, '
  '%s MiB, %s CPUs', i.id, f.slots, f.light, f.memory_mb, f.cpus)
from gangq.incarnations i
cross join lateral gangq.capacity_of(array[i.id]) f
cross join lateral (values
  ('within capacity', least(f.slots, f.light, f.memory_mb, f.cpus) < 0),
  ('live worker has a lease',
    not exists (select 1 from gangq.leases l where l.incarnation = i.id))
) as r(rule, broken)
where i.ended_at is null and r.broken
union all
select 'token is unique', 'token ' || j.token, count(*) || ' jobs'
from gangq.live_jobs j where j.token is not null group by j.token having count(*) > 1
union all
select 'waits for a live job', 'job ' || d.job_id, 'on ' || d.on_job_id
from gangq.dependencies d
where d.settled and d.outcome is null
  and not exists (select 1 from gangq.live_jobs j where j.id = d.on_job_id)
  and not exists (select 1 from gangq.unsettled u where u.job_id = d.on_job_id)
union all
select 'an open batch has a live job', 'batch b' || b.id,
  format('%s of %s jobs, the last tick was at %s', b.name, b.size, x.last_at)
from gangq.batches_table b cross join gangq.tick_state x
where b.finished_at is null and b.submitted_at < x.last_at - interval '10 minutes'
  and not exists (select from gangq.live_jobs j where j.batch_id = b.id)
  and not exists (
    select from gangq.history h
    where h.batch_id = b.id and h.finished_at > x.last_at - interval '10 minutes')
union all
select 'a batch that has ended has no live job', 'batch b' || b.id, b.name
from gangq.batches_table b
where b.finished_at is not null
  and exists (select from gangq.live_jobs j where j.batch_id = b.id)
union all
-- Of a service that has halted, gangs of the good revision are made.
select 'replicas are whole gangs', 'service ' || s.name,
  format('%s replicas in gangs of %s', s.replicas, r.gang_size)
from gangq.services_table s
join gangq.service_revisions r on r.service = s.name and r.revision = s.revision
where s.halted is null and s.replicas % r.gang_size <> 0
union all
select 'has its rows', 'table ' || n.name, 'empty'
from (values ('settings', (select count(*) from gangq.settings)),
  ('tick_state', (select count(*) from gangq.tick_state)),
  ('transitions', (select count(*) from gangq.transitions)),
  ('lock_rows', (select count(*) from gangq.lock_rows)),
  ('sequence_base', (select count(*) from gangq.sequence_base)),
  ('decider', (select count(*) from gangq.decider))) as n(name, rows)
where n.rows = 0;

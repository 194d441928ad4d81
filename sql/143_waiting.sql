-- The view of all that waits, with the reason. It takes no locks.

-- Internal, for the view waiting: solo jobs that are due later or wait for others, by shape and
-- priority. Without sequential scans: the rows are read from indexes, however many there are.
create function gangq.waiting_later()
returns table (
  shape_id integer, state text, priority smallint, jobs integer, since timestamptz, due timestamptz)
language sql stable set enable_seqscan = off as $$
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), min(j.due_at)
  from gangq.live_jobs j where j.state = 'scheduled' group by j.shape_id, j.state, j.priority
  union all
  select j.shape_id, j.state, j.priority, count(*)::integer, min(j.submitted_at), null
  from gangq.live_jobs j where j.state = 'waiting' and j.gang_id is null
  group by j.shape_id, j.state, j.priority
$$;

-- What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many;
-- since: when the first of them was submitted). gate: what the last pass found; starts_at: its
-- planned start, if it has one. explain_gang and explain_job say more.
create view gangq.waiting as
select 'gang' as kind, g.id, s.queue, s.task, g.priority, g.size, g.state, g.submitted_at as since,
  case
    when g.state = 'waiting' then 'waits for other jobs'
    when g.not_before > c.t
      then 'backing off for ' || gangq.in_short(gangq.in_s(g.not_before, c.t))
    when p.starts_at is not null
      then format('place %s of those with a planned start, in %s', p.place,
          gangq.in_short(gangq.in_s(p.starts_at, c.t)))
        || coalesce(', ' || coalesce(o.follows, v.follows), '')
    else coalesce(o.why, v.why, g.note, 'waits to be judged') end as why,
  coalesce(o.gate, v.gate) as gate, p.starts_at
from gangq.live_gangs g
join gangq.shapes s on s.id = g.shape_id
cross join (select gangq.now() as t offset 0) c
left join gangq.verdicts v on v.kind_id = g.kind_id and v.ask = ''
left join gangq.verdicts o on o.kind_id = g.kind_id and o.ask = 'g' || g.id
left join gangq.plans p on p.ask = 'g' || g.id and not p.kept
where g.state in ('waiting', 'blocked')
union all
select 'job', null, s.queue, s.task, x.priority, x.jobs, x.state, x.since,
  case
    when x.state = 'waiting' then 'waits for other jobs'
    when x.state = 'scheduled'
      then 'due later, the first in ' || gangq.in_short(gangq.in_s(x.due, c.t))
    when exists (  -- As gangq.paused_queue, which readers of this view may not call.
      select 1 from gangq.queues_table q
      where q.paused and starts_with(s.queue || '.', q.name || '.')) then 'its queue is paused'
    when exists (select 1 from gangq.task_pauses p where p.task = s.task) then 'its task is paused'
    when p.starts_at is not null
      then format('place %s of those with a planned start, in %s', p.place,
          gangq.in_short(gangq.in_s(p.starts_at, c.t)))
        || coalesce(', ' || coalesce(o.follows, v.follows), '')
    else coalesce(h.why, o.why, v.why, gangq.waits_for_worker()) end,
  coalesce(o.gate, v.gate), p.starts_at
from (
  -- Counted in the index of claims, whose order begins with the priority.
  select z.shape_id, 'pending' as state, p.priority, p.jobs, h.submitted_at as since,
    null::timestamptz as due
  from gangq.pending_shapes z
  cross join lateral (
    select (1000 - (j.order_key >> 50))::smallint as priority, count(*)::integer as jobs,
      min(j.order_key) as head
    from gangq.live_jobs j
    where j.shape_id = z.shape_id and j.state = 'pending' group by j.order_key >> 50) p
  join lateral (
    select j.submitted_at from gangq.live_jobs j
    where j.shape_id = z.shape_id and j.state = 'pending' and j.order_key = p.head
    limit 1) h on true
  union all
  select l.shape_id, l.state, l.priority, l.jobs, l.since, l.due from gangq.waiting_later() l) x
cross join (select gangq.now() as t offset 0) c
-- Looked up one by one: shapes are kept for ever. placed: as gangq.is_placed, which readers may not
-- call. Of light jobs a verdict or plan may be left from when their queue had limits.
cross join lateral (
  select z.queue, z.task,
    x.state = 'pending' and (not z.plain or z.model is not null or exists (
      select 1 from gangq.queues_table q
      where (q.limited or q.policy = 'fair') and starts_with(z.queue || '.', q.name || '.')))
      as placed
  from gangq.shapes z where z.id = x.shape_id offset 0) s
left join lateral (select gangq.infeasible(x.shape_id, 1) as why) h on x.state = 'pending'
left join gangq.verdicts v on s.placed and v.kind_id = -x.shape_id and v.ask = ''
left join gangq.verdicts o on s.placed and o.kind_id = -x.shape_id
  and o.ask = 'k' || x.shape_id || '/' || x.priority
left join gangq.plans p on s.placed and not p.kept
  and p.ask = 'k' || x.shape_id || '/' || x.priority;

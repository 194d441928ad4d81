-- The view of all that waits, with the reason. It takes no locks.

-- Internal. A planned start in words; null: there is none. follows: whose end it waits for.
create function gangq.planned_in_words(p gangq.plans, follows text, t timestamptz) returns text
language sql stable
return case when (p).starts_at is not null
  then format('place %s of those with a planned start, in %s', (p).place,
    gangq.span((p).starts_at, t)) || coalesce(', ' || follows, '') end;

-- Internal, for the view waiting: solo jobs, one row per kind and priority. Without sequential
-- scans: the rows are read from indexes, however many there are.
create function gangq.waiting_jobs() returns table (
  queue text, task text, priority smallint, size integer, state text, since timestamptz, why text,
  gate text, starts_at timestamptz
) language sql stable set enable_seqscan = off as $$
  with jobs as (
    -- Counted in the index of claims, whose order begins with the priority.
    select z.shape_id, p.priority, p.jobs, 'pending' as state, h.submitted_at as since,
      null::timestamptz as due
    from gangq.pending_shapes z
    cross join lateral (
      select gangq.priority_of(min(j.order_key))::smallint as priority, count(*)::integer as jobs,
        min(j.order_key) as head
      from gangq.live_jobs j
      where j.shape_id = z.shape_id and j.state = 'pending' group by j.order_key >> 50) p
    join lateral (
      select j.submitted_at from gangq.live_jobs j
      where j.shape_id = z.shape_id and j.state = 'pending' and j.order_key = p.head
      limit 1) h on true
    union all
    select j.shape_id, j.priority, count(*)::integer, j.state, min(j.submitted_at), min(j.due_at)
    from gangq.live_jobs j where j.state = 'scheduled' group by j.shape_id, j.state, j.priority
    union all
    select j.shape_id, j.priority, count(*)::integer, j.state, min(j.submitted_at), null
    from gangq.live_jobs j where j.state = 'waiting' and j.gang_id is null
    group by j.shape_id, j.state, j.priority
  )
  select s.queue, s.task, x.priority, x.jobs, x.state, x.since,
    case
      when x.state = 'waiting' then 'waits for other jobs'
      when x.state = 'scheduled' then 'due later, the first in ' || gangq.span(x.due, c.t)
      when gangq.paused_queue(s.queue) is not null then 'its queue is paused'
      when gangq.paused_task(-x.shape_id) is not null then 'its task is paused'
      else coalesce(gangq.planned_in_words(p, coalesce(o.follows, v.follows), c.t),
        gangq.infeasible(x.shape_id, 1), o.why, v.why, 'waits for a free worker') end,
    coalesce(o.gate, v.gate), p.starts_at
  from jobs x
  cross join (select gangq.now() as t, gangq.placed_queues() as placed offset 0) c
  -- Looked up one by one: shapes are kept for ever. Of light jobs a verdict or plan may be left
  -- from when their queue had limits.
  cross join lateral (
    select z.queue, z.task, format('k%s/%s', z.id, x.priority) as ask,
      x.state = 'pending' and gangq.is_placed(z, c.placed) as placed
    from gangq.shapes z where z.id = x.shape_id offset 0) s
  left join gangq.verdicts v on s.placed and v.kind_id = -x.shape_id and v.ask = ''
  left join gangq.verdicts o on s.placed and o.kind_id = -x.shape_id and o.ask = s.ask
  left join gangq.plans p on s.placed and p.ask = s.ask and not p.kept
$$;

-- What waits, and why: one row per gang, one per kind and priority of solo jobs (size: how many;
-- since: when the first of them was submitted). A running gang is here as long as members that it
-- has lost wait for a place (size: how many; since: when it lost the first). gate: what the last
-- pass found; starts_at: its planned start, if it has one. explain_gang and explain_job say more.
create view gangq.waiting as
select 'gang' as kind, g.id, s.queue, s.task, g.priority, g.size, g.state, g.since,
  case
    when g.state = 'waiting' then 'waits for other jobs'
    when g.not_before > c.t then 'backing off for ' || gangq.span(g.not_before, c.t)
    else coalesce(gangq.planned_in_words(p, coalesce(o.follows, v.follows), c.t),
      o.why, v.why, g.note, 'waits to be judged') end as why,
  coalesce(o.gate, v.gate) as gate, p.starts_at
from (
  select x.id, x.kind_id, x.shape_id, x.priority, x.size, x.state, x.submitted_at as since,
    x.not_before, x.note
  from gangq.live_gangs x where x.state in ('waiting', 'blocked')
  union all
  select x.id, x.kind_id, x.shape_id, x.priority, m.lost, x.state, x.missing_since, x.not_before,
    x.note
  from gangq.live_gangs x
  cross join lateral (
    select count(*)::integer as lost
    from gangq.live_jobs j
    where j.gang_id = x.id and j.state = 'blocked' and gangq.in_epoch(j, x)) m
  where x.missing_since is not null and m.lost > 0) g
join gangq.shapes s on s.id = g.shape_id
cross join (select gangq.now() as t offset 0) c
left join gangq.verdicts v on v.kind_id = g.kind_id and v.ask = ''
left join gangq.verdicts o on o.kind_id = g.kind_id and o.ask = 'g' || g.id
left join gangq.plans p on p.ask = 'g' || g.id and not p.kept
union all
select 'job', null, j.* from gangq.waiting_jobs() j;
